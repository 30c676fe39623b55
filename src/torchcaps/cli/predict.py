"""``torchcaps predict``"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from torchcaps.cli.shared import add_run_folder, open_run, positive


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_folder(parser)
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="PNG, JPEG or other image files")
    parser.add_argument("--top", type=positive, default=3, metavar="N", help="classes to show for each image [3]")
    parser.add_argument("--json", action="store_true", help="print all classes with their lengths as JSON")


def run(arguments: argparse.Namespace) -> int:
    trained = open_run(arguments)
    predictions = list(trained.predict(arguments.images))
    top = max(arguments.top, trained.network.task.labels_per_image)
    answered = [prediction for prediction in predictions if prediction.problem is None]
    if arguments.json:
        rows = [
            {
                "image": prediction.image,
                "found": prediction.found,
                "lengths": dict(zip(prediction.classes, prediction.lengths)),
            }
            for prediction in answered
        ]
        print(json.dumps(rows, indent=2))
    else:
        for prediction in answered:
            ranked = list(zip(prediction.classes, prediction.lengths))[:top]
            ranking = "  ".join(f"{name} {length:.3f}" for name, length in ranked)
            print(f"{prediction.image}: {' and '.join(prediction.found)}   [{ranking}]")
    bad = [prediction for prediction in predictions if prediction.problem is not None]
    for prediction in bad:
        print(f"torchcaps: {prediction.problem}", file=sys.stderr)
    if not answered:
        return 2
    return 1 if bad else 0
