"""``torchcaps evaluate``"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.cli.shared import add_computing, add_data_folder, add_pretrained, open_run, positive, pretrained_folder
from torchcaps.errors import UserError

if TYPE_CHECKING:
    from torchcaps.trained.scores import Scores

VIEWS = ("flip", "shift")
ATTACKS = ("fgsm", "pgd")
WORST = 24
LISTED_CLASSES = 40


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folders", type=Path, nargs="*", metavar="DIR", help="folders of finished runs; several are an ensemble"
    )
    add_pretrained(parser)
    add_computing(parser)
    parser.add_argument("--data", help="another data set of the same shape and classes [the run's own]")
    parser.add_argument("--limit", type=positive, metavar="N", help="evaluate on N test images only")
    parser.add_argument(
        "--views",
        type=_views,
        default=(),
        metavar="flip,shift",
        help="average over mirrored images, and over images shifted by a pixel",
    )
    parser.add_argument("--affine", action="store_true", help="error on images turned, scaled and moved more and more")
    parser.add_argument("--noise", action="store_true", help="error on images with more and more noise")
    parser.add_argument(
        "--attack", choices=ATTACKS, action="append", default=[], help="error on images that are changed to fool it"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="predictions as CSV; worst mistakes, calibration and robustness drawn"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_data_folder(parser)


def _views(text: str) -> tuple[str, ...]:
    views = tuple(text.split(","))
    if not set(views) <= set(VIEWS):
        raise argparse.ArgumentTypeError(f"must be among {', '.join(VIEWS)}, not '{text}'")
    return views


def run(arguments: argparse.Namespace) -> None:
    import time

    from torchcaps.trained.robustness import error_by_strength
    from torchcaps.trained.scores import score

    folders = [*arguments.run_folders, *([pretrained_folder(arguments.pretrained)] if arguments.pretrained else [])]
    if not folders:
        raise UserError("Name the folder of a run, or a network that comes with torchcaps: --pretrained mnist.")
    runs = [open_run(folder, arguments) for folder in folders]
    trials = [*(["affine"] if arguments.affine else []), *(["noise"] if arguments.noise else []), *arguments.attack]
    if trials and arguments.views:
        raise UserError("Robustness is measured on single images: leave out --views.")
    if len(runs) > 1 and arguments.attack:
        raise UserError("An attack is made against one network: name one run.")
    tasks = [trained.network.task for trained in runs]
    for what in ("classes", "image_shape", "source_shape", "fit", "standardise", "labels_per_image"):
        if any(getattr(task, what) != getattr(tasks[0], what) for task in tasks):
            raise UserError(f"An ensemble needs runs with the same {what.replace('_', ' ')}.")
    plan = runs[0].plan(data=arguments.data, data_folder=arguments.data_dir)
    networks = [trained.network.folded() for trained in runs]
    limit = arguments.limit or plan.evaluation_limit(plan.data.test)
    started = time.perf_counter()
    scores = score(networks, plan.data.test, augmentation=plan.augmentation, views=arguments.views, limit=limit)
    speed = len(scores.lengths) / (time.perf_counter() - started)
    whole = [trained.network for trained in runs]  # an attack needs gradients
    errors = {
        trial: error_by_strength(whole, plan.data.test, trial, augmentation=plan.augmentation, limit=limit)
        for trial in trials
    }
    if arguments.json:
        print(json.dumps(_summary(plan.config.data.name, scores, speed, errors)))
    else:
        _print(plan.config.data.name, scores, speed, errors)
    if arguments.out is not None:
        names = " + ".join(folder.resolve().name for folder in folders)
        _write(arguments.out, scores, errors, names, plan)


def _summary(data: str, scores: Scores, speed: float, errors: dict[str, Any]) -> dict[str, Any]:
    from torchcaps.training.evaluation import confusion_matrix

    shown, lengths = scores.shown, scores.lengths
    return {
        "data": data,
        "images": len(lengths),
        "error_percent": scores.error_percent,
        "length_right": float((lengths * shown).sum() / shown.sum().clamp_min(1)),
        "length_wrong": float((lengths * (1 - shown)).sum() / (1 - shown).sum().clamp_min(1)),
        "images_per_second": speed,
        "calibration_error": scores.calibration_error(),
        "classes": {
            row.name: {"images": row.images, "precision": row.precision, "recall": row.recall, "f1": row.f1}
            for row in scores.by_class()
        },
        "confusion": confusion_matrix(shown, scores.found).tolist(),
        "robustness": errors,
    }


def _print(data: str, scores: Scores, speed: float, errors: dict[str, Any]) -> None:
    from rich.cells import cell_len, set_cell_size

    from torchcaps.data.files import shown

    summary = _summary(data, scores, speed, errors)
    print(f"{shown(data)}: {scores.error_percent:.2f} % of {len(scores.lengths)} images wrong")
    print(f"capsule length: {summary['length_right']:.3f} right class, {summary['length_wrong']:.3f} wrong classes")
    print(f"calibration: lengths are {summary['calibration_error']:.3f} off the share of right answers, on average")
    rows = sorted(scores.by_class(), key=lambda row: row.f1)[:LISTED_CLASSES]
    width = max(cell_len(shown(row.name)) for row in rows)
    print(f"\n{'':{width}}  images  precision  recall     f1")
    for row in rows:
        name = set_cell_size(shown(row.name), width)
        print(f"{name}  {row.images:>6}  {row.precision:>9.3f}  {row.recall:>6.3f}  {row.f1:>5.3f}")
    if len(scores.classes) > LISTED_CLASSES:
        print(f"(the {LISTED_CLASSES} worst of {len(scores.classes)} classes)")
    for trial, by_strength in summary["robustness"].items():
        print(f"\n{trial:<8}" + "".join(f"{strength:>8g}" for strength in by_strength))
        print(f"{'error, %':<8}" + "".join(f"{error:>8.2f}" for error in by_strength.values()))
    print(f"\n{speed:.0f} images/s")


def _write(folder: Path, scores: Scores, errors: dict[str, Any], network: str, plan: Any) -> None:
    import torch

    from torchcaps.plots import evaluation
    from torchcaps.plots.files import save

    folder.mkdir(parents=True, exist_ok=True)
    names = plan.data.test_names
    scores.write_csv(folder / "predictions.csv", names)
    save(evaluation.calibration(scores), folder / "calibration.png")
    worst = scores.worst(WORST)
    if worst:
        numbers = torch.tensor([scores.image(row) for row in worst])
        images = plan.augmentation.centre(plan.data.test.fetch(numbers)).on("cpu").images
        save(evaluation.worst_mistakes(images, scores, worst, names), folder / "mistakes.png")
    if errors:
        save(evaluation.robustness(errors, network), folder / "robustness.png")
    print(f"Predictions and pictures are in {folder}", file=sys.stderr)
