"""``torchcaps predict``"""

from __future__ import annotations

import argparse
import csv
import glob
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from torchcaps.cli.shared import add_run_and_images, open_run, positive, run_and_images
from torchcaps.errors import UserError
from torchcaps.process import say

if TYPE_CHECKING:
    from torchcaps.trained.predict import ImagePrediction

STANDARD_INPUT = "-"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_and_images(
        parser, "image files, folders of them, patterns such as 'new/*.png', or - for a list of files on standard input"
    )
    parser.add_argument("--top", type=positive, default=3, metavar="N", help="classes to show for each image [3]")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print all classes with their lengths as JSON")
    form.add_argument("--csv", action="store_true", help="print all classes with their lengths as CSV")


def run(arguments: argparse.Namespace) -> int:
    from torchcaps.data.files import shown

    folder, words = run_and_images(arguments)
    paths = list(_files(words))
    if not paths:
        raise UserError("No image files were found.")
    trained = open_run(folder, arguments)
    predictions = list(trained.predict(paths))
    answered = [prediction for prediction in predictions if prediction.problem is None]
    if arguments.json:
        print(json.dumps([_as_json(prediction) for prediction in answered], indent=2))
    elif arguments.csv:
        _print_csv(answered, trained.network.classes)
    else:
        top = max(arguments.top, trained.network.task.labels_per_image)
        for prediction in answered:
            ranked = list(zip(prediction.classes, prediction.lengths))[:top]
            ranking = "  ".join(f"{shown(name)} {length:.3f}" for name, length in ranked)
            found = " and ".join(map(shown, prediction.found)) or "nothing"
            print(f"{shown(prediction.image)}: {found}   [{ranking}]")
    problems = [prediction.problem for prediction in predictions if prediction.problem is not None]
    for problem in problems:
        say(problem)
    if not answered:
        return 2
    return 1 if problems else 0


def _files(words: Iterable[str]) -> Iterable[Path]:
    """The image files that these words stand for; a folder stands for all images below it."""
    from torchcaps.data.listing import images_below

    for word in words:
        path = Path(word)
        if word == STANDARD_INPUT and sys.stdin is None:
            raise UserError("Standard input is closed: there is no list of files to read.")
        if word == STANDARD_INPUT:
            listed = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
            if b"\0" in listed:
                raise UserError("Standard input is no text: - stands for a list of image files, one a line.")
            yield from (Path(os.fsdecode(line)) for line in listed.splitlines() if line.strip())
        elif os.path.isdir(word):
            yield from images_below(path) or [path]
        elif not os.path.exists(word) and glob.has_magic(word):
            matching = sorted(glob.glob(word, recursive=True))
            yield from map(Path, [name for name in matching if os.path.isfile(name)] or [word])
        else:
            yield path


def _as_json(prediction: ImagePrediction) -> dict[str, object]:
    return {
        "image": prediction.image,
        "found": prediction.found,
        "lengths": dict(zip(prediction.classes, prediction.lengths)),
    }


def _print_csv(predictions: Iterable[ImagePrediction], classes: tuple[str, ...]) -> None:
    from torchcaps.data.files import shown

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["image", "found", *(f"length {shown(name)}" for name in classes)])
    for prediction in predictions:
        lengths = dict(zip(prediction.classes, prediction.lengths))
        found = "|".join(map(shown, prediction.found))
        writer.writerow([shown(prediction.image), found, *(f"{lengths[name]:.6g}" for name in classes)])
