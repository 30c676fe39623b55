"""``torchcaps evaluate``"""

from __future__ import annotations

import argparse

from torchcaps.cli.shared import add_data_folder, add_run_folder, open_run, positive


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_folder(parser)
    parser.add_argument("--data", help="another data set of the same shape and classes [the run's own]")
    parser.add_argument("--limit", type=positive, metavar="N", help="evaluate on the first N test images only")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_data_folder(parser)


def run(arguments: argparse.Namespace) -> None:
    import json

    trained = open_run(arguments)
    plan = trained.plan(data=arguments.data, data_folder=arguments.data_dir)
    outcome = trained.evaluate(plan, limit=arguments.limit)
    name = plan.config.data.name
    if arguments.json:
        summary = {
            "data": name,
            "images": outcome.images,
            "error_percent": outcome.error_percent,
            "length_right": outcome.length_right,
            "length_wrong": outcome.length_wrong,
            "images_per_second": outcome.images_per_second,
            "confusion": outcome.confusion.tolist(),
        }
        print(json.dumps(summary))
        return
    print(f"{name}: {outcome.error_percent:.2f} % of {outcome.images} images wrong")
    print(f"capsule length: {outcome.length_right:.3f} right class, {outcome.length_wrong:.3f} wrong classes")
    print(f"{outcome.images_per_second:.0f} images/s")
