"""``torchcaps prune``"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchcaps.cli.shared import add_data_folder, add_run_folder, open_run


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_folder(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the smaller network [DIR-pruned]")
    parser.add_argument(
        "--precision", choices=("float32", "float16", "int8"), default="float32", help="of its weights [float32]"
    )
    add_data_folder(parser)


def run(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    trained = open_run(arguments.run_folder, arguments)
    report = trained.prune(arguments.out, precision=arguments.precision, data_folder=arguments.data_dir)
    print(f"removed {report.capsules_removed} primary capsules, and {report.types_removed} types of them altogether")
    table = Table(box=None)
    for heading in ("", "test error, %", "parameters", "images/s"):
        table.add_column(heading, justify="right")
    for name, measured in (("before", report.before), ("after", report.after)):
        table.add_row(
            name,
            f"{measured.test_error_percent:.2f}",
            f"{measured.parameters:,}",
            f"{measured.evaluate_images_per_second:.0f}",
        )
    Console(markup=False, emoji=False).print(table)
    print(f"{report.answers_changed} of {report.after.test_images} test images have another answer than before")
    print(f"The smaller network is in {report.folder}")
