"""``torchcaps data list``, ``fetch``, ``verify`` and ``check``"""

from __future__ import annotations

import argparse
from pathlib import Path

from torchcaps.cli.shared import add_data_folder
from torchcaps.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="the data sets, and which are fetched")
    fetching = actions.add_parser("fetch", help="download data sets")
    fetching.add_argument(
        "--from", dest="source", type=Path, metavar="DIR", help="a folder to look for the files in before downloading"
    )
    verifying = actions.add_parser("verify", help="check fetched data sets against their checksums")
    checking = actions.add_parser("check", help="what is in your own images, and what is wrong with them")
    checking.add_argument("name", metavar="DATA", help="folder:PATH, csv:FILE or npz:FILE")
    checking.add_argument("--sheet", type=Path, metavar="FILE", help="draw a contact sheet of all classes, as PNG")
    for action, run_action in ((listing, _list), (fetching, _fetch), (verifying, _verify), (checking, _check)):
        action.set_defaults(run_action=run_action)
        if action in (fetching, verifying):
            action.add_argument("names", nargs="+", metavar="NAME", help="see 'torchcaps data list'")
        if action is not checking:
            add_data_folder(action)


def run(arguments: argparse.Namespace) -> int | None:
    result: int | None = arguments.run_action(arguments)
    return result


def _list(arguments: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from torchcaps.data.datasets import describe

    table = Table(box=None)
    for heading in ("name", "images", "size", "classes", "MB", "fetched", ""):
        table.add_column(heading, no_wrap=bool(heading))
    for row in describe(_folder(arguments)):
        table.add_row(
            row.name, row.images, row.image_shape, row.classes, str(row.megabytes or ""), row.cached, row.summary
        )
    console = Console(markup=False, emoji=False)
    console.width = max(console.width, 130)  # longer lines read better than broken ones
    console.print(table)


def _fetch(arguments: argparse.Namespace) -> None:
    from torchcaps.data.fetch import fetch

    for name in arguments.names:
        folder = fetch(name, cache=_folder(arguments), source=arguments.source, report=print)
        print(f"{name} is ready in {folder}")


def _verify(arguments: argparse.Namespace) -> None:
    from torchcaps.data.fetch import verify

    damaged = False
    for name in arguments.names:
        for file, problem in verify(name, _folder(arguments)).items():
            print(f"{name}/{file}: {problem or 'intact'}")
            damaged |= bool(problem)
    if damaged:
        raise UserError(f"Some files are not intact: 'torchcaps data fetch {' '.join(arguments.names)}' mends that.")


def _check(arguments: argparse.Namespace) -> int:
    from torchcaps.data.check import check_data, draw_contact_sheet
    from torchcaps.data.config import DataConfig

    config = DataConfig(name=arguments.name)
    if config.name.startswith("npz:"):
        if arguments.sheet is not None:
            raise UserError("A contact sheet is drawn of image files only.")
        print(config.load().report)
        return 0
    report = check_data(config)
    for heading, text in report.rows():
        print(f"{heading}: {text}" if heading else text)
    if arguments.sheet is not None:
        drawn = draw_contact_sheet(config, arguments.sheet)
        part = "" if drawn == len(report.classes) else f" of the first {drawn} classes"
        print(f"A contact sheet{part} is in {arguments.sheet}")
    return 1 if report.problems else 0


def _folder(arguments: argparse.Namespace) -> Path | None:
    return Path(arguments.data_dir) if arguments.data_dir else None
