"""``torchcaps compare``"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folders", nargs="+", type=Path, metavar="DIR", help="folders of runs, finished or not")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the curves as a picture, and all of it as a page")


def run(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from torchcaps.data.files import shown
    from torchcaps.trained.compare import COLUMNS, compare, write_page

    compared = compare(arguments.run_folders)
    table = Table(box=None)
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=heading == "run")
    for summary in compared:
        table.add_row(*(shown(cell) for cell in summary.cells()))
    console = Console(markup=False, emoji=False)
    console.width = 10_000  # in a pipe as well: the table is as wide as it needs, and no number is cut
    console.print(table)
    if arguments.out is not None:
        write_page(compared, arguments.out)
        print(f"The comparison is in {arguments.out / 'compare.html'}")
