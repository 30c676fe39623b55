"""Finds the command, runs it, and turns whatever goes wrong into one sentence."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torchcaps
from torchcaps.errors import UserError
from torchcaps.process import printable, told
from torchcaps.settings import SettingError

COMMANDS = {
    "train": "train a network, or continue a run",
    "evaluate": "test error of a trained network",
    "predict": "classify image files with a trained network",
    "compare": "one table and the curves of several runs",
    "prune": "a smaller network without the capsules that no class uses",
    "explain": "pictures of what a network sees in images, and what its capsules mean",
    "export": "a trained network as a file for other programs: ONNX, pt2, safetensors",
    "serve": "a page to see and touch what is inside a trained network",
    "data": "list, fetch, verify and check data sets",
    "bench": "speed and memory of every routing, side by side",
    "reproduce": "the paper's table and figures, from real runs",
    "info": "versions, processor and what is available",
}
"""What each command does; its module has its name."""
NEEDED = (
    *("PIL", "filelock", "lightning_fabric", "markdown_it", "matplotlib", "pooch"),
    *("requests", "rich", "scipy", "sklearn", "yaml"),
)
"""What the extra [train] brings."""


class Command(Protocol):
    """What a command's module has."""

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int | None: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 2 for bad input."""
    words = sys.argv[1:] if argv is None else list(argv)
    return told(lambda: _run(words))


def _run(words: list[str]) -> int:
    parser, command, arguments = _parsed(words)
    if command is None:
        parser.print_help()
        return 0
    if any(importlib.util.find_spec(module) is None for module in NEEDED):
        raise UserError("The command line needs more packages than the library: pip install 'torchcaps[train]'.")
    from torchcaps.training.host import follow_parent

    follow_parent()
    try:
        return command.run(arguments) or 0
    except SettingError as error:
        from torchcaps.cli.options import option_of

        raise UserError(f"{option_of(error.setting)} {error.problem}.") from error


class _Parser(argparse.ArgumentParser):
    """One that never prints what a terminal would take for a command, such as a strange file name."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable(message), file)


def _parsed(argv: list[str]) -> tuple[argparse.ArgumentParser, Command | None, argparse.Namespace]:
    """Only the module of the command that is asked for is imported."""
    parser = _Parser(prog="torchcaps", description="Capsule networks for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torchcaps {torchcaps.__version__}")
    branches = parser.add_subparsers(metavar="COMMAND", dest="command")
    asked = next((word for word in argv if not word.startswith("-")), None)
    command: Command | None = None
    asked_parser: argparse.ArgumentParser = parser
    for name, help in COMMANDS.items():
        leaf = branches.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        if name == asked:
            command = importlib.import_module(f"torchcaps.cli.{name}")
            assert command is not None
            command.add_options(leaf)
            asked_parser = leaf
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [option for action in asked_parser._actions for option in action.option_strings]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        asked_parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return parser, command, arguments
