"""``torchcaps explain``: pictures of what a network sees in images, and what its capsules mean."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.cli.shared import add_data_folder, add_run_and_images, open_run, run_and_images
from torchcaps.errors import UserError
from torchcaps.process import say

if TYPE_CHECKING:
    from torch import Tensor

    from torchcaps.trained.run import TrainedRun

TRAINING_IMAGES = 2000
"""Training images that exciting patches are looked for in."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_and_images(parser, "PNG, JPEG or other image files")
    parser.add_argument(
        "--class",
        dest="classes",
        action="append",
        default=[],
        metavar="NAME",
        help="explain this class, too; may be given several times [the classes found]",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the pictures ['explained' in DIR, or here]")
    add_data_folder(parser)


def run(arguments: argparse.Namespace) -> int:
    from torchcaps.trained.predict import read_files

    folder, words = run_and_images(arguments)
    trained = open_run(folder, arguments)
    asked = _numbers(trained.network.classes, arguments.classes)
    pixels, problems = read_files(trained.network, map(Path, words))
    images = {path: trained.network.prepare(image)[0] for path, image in pixels.items()}
    for problem in problems.values():
        say(problem)
    if not images:
        return 2
    out = arguments.out or (Path() if arguments.pretrained else folder) / "explained"
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file: choose another folder.")
    out.mkdir(parents=True, exist_ok=True)
    training = _training_images(trained, arguments.data_dir)
    _draw(trained, images, asked, training, out)
    return 1 if problems else 0


def _numbers(classes: Sequence[str], names: Sequence[str]) -> list[int]:
    """Names of classes to their numbers."""
    for name in names:
        if name not in classes:
            known = ", ".join(classes[:30]) + (", …" if len(classes) > 30 else "")
            raise UserError(f"There is no class {name!a}: the network knows {known}.")
    return [list(classes).index(name) for name in names]


def _training_images(trained: TrainedRun, data_folder: str | None) -> Tensor | None:
    from torchcaps.data.augmentation import Augmentation
    from torchcaps.trained.run import sample_images

    try:
        images = trained.images_at_hand(data_folder=data_folder)
    except UserError as error:
        print(f"Without the run's training images no exciting patches are shown: {error}", file=sys.stderr)
        return None
    return sample_images(images.train, Augmentation(trained.config().augmentation), TRAINING_IMAGES)


def _draw(
    trained: TrainedRun, images: dict[Path, Tensor], asked: Sequence[int], training: Tensor | None, out: Path
) -> None:
    from torchcaps.data.files import shown
    from torchcaps.plots import explain as plots
    from torchcaps.plots.files import save

    network = trained.network
    explained, why_not = plots.explained_or_why_not(network, next(iter(images.values())))
    with_types = explained is not None and explained.by_place is not None
    exciting = plots.most_exciting(network, training) if with_types and training is not None else None
    used: set[str] = set()
    for path, image in images.items():
        prediction = network.predict(image[None])
        found = [label for label in prediction.labels[0].tolist() if label >= 0]
        labels = list(dict.fromkeys([*(found or [int(prediction.lengths[0].argmax())]), *asked]))
        stem = _unused(_file_name(path.stem), used)
        figures = {f"{stem}.png": plots.explanation(network, image, labels, title=path.name)}
        for label in labels:
            name = _file_name(network.classes[label])
            if with_types:
                figure = plots.capsule_types(network, image, label, exciting, title=path.name)
                figures[_unused(f"{stem}-types-{name}", used) + ".png"] = figure
            if network.decoder is not None:
                reach = _reach(trained, training, label)
                figure = plots.sweep(network, image, label, reach=reach, title=path.name)
                figures[_unused(f"{stem}-sweep-{name}", used) + ".png"] = figure
        for file, figure in figures.items():
            save(figure, out / file)
            print(shown(str(out / file)))
    if not with_types:
        print(why_not)
    if network.decoder is None:
        print("This network was trained without reconstruction: it has no decoder, so there is no sweep.")


def _reach(trained: TrainedRun, training: Tensor | None, label: int) -> float | Tensor:
    """How far components are moved: as in the original paper where they are squashed as there, else by their spread."""
    from torchcaps.plots.explain import PAPER_REACH, usual_reach

    if trained.network.config.name == "capsnet" or training is None:
        return PAPER_REACH
    reach = usual_reach(trained.network, training[:500], label)
    return PAPER_REACH if reach is None else reach


def _file_name(name: str) -> str:
    """A name as part of a file's.

    >>> _file_name("T-shirt/top")
    'T-shirt_top'
    """
    return re.sub(r"[^\w-]+", "_", name)[:40] or "_"


def _unused(name: str, used: set[str]) -> str:
    """The name, or with a number if it has been given before, capitals or not."""
    number, candidate = 2, name
    while candidate.lower() in used:
        candidate, number = f"{name}-{number}", number + 1
    used.add(candidate.lower())
    return candidate
