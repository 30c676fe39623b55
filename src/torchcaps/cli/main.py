"""Finds the command, runs it, and turns whatever goes wrong into one sentence."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Protocol

import torchcaps
from torchcaps.errors import UserError
from torchcaps.settings import SettingError

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("train", "train a network, or continue a run"),
    "evaluate": ("evaluate", "test error of a trained network"),
    "predict": ("predict", "classify image files with a trained network"),
    "compare": ("compare", "one table and the curves of several runs"),
    "prune": ("prune", "a smaller network without the capsules that no class uses"),
    "explain": ("explain", "pictures of what a network sees in images, and what its capsules mean"),
    "export": ("export", "a trained network as a file for other programs: ONNX, pt2, safetensors"),
    "serve": ("serve", "a page to see and touch what is inside a trained network"),
    "data": ("data", "list, fetch, verify and check data sets"),
    "bench": ("bench", "speed and memory of every routing, side by side"),
    "reproduce": ("reproduce", "the paper's table and figures, from real runs"),
    "info": ("info", "versions, devices and what is available"),
}
"""Each command's module and what it does."""
NEEDED = ("yaml", "rich", "lightning_fabric", "PIL", "matplotlib", "filelock", "sklearn")
"""What the extra [train] brings."""


class Command(Protocol):
    """What a command's module has."""

    def add_options(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int | None: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 2 for bad input."""
    parser, command, arguments = _parsed(sys.argv[1:] if argv is None else list(argv))
    if command is None:
        parser.print_help()
        return 0
    try:
        _require_extra()
        from torchcaps.training.host import follow_parent

        follow_parent()
        return command.run(arguments) or 0
    except SettingError as error:
        return _fail(f"{_as_option(error.setting)} {error.problem}.", 2)
    except UserError as error:
        return _fail(str(error), getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        return _fail("Stopped.", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError:
        return _fail("There is not enough memory. Choose a smaller batch, smaller images or fewer capsules.", 2)
    except OSError as error:
        if error.errno is None:
            return _fail(_unexpected(error), 1)
        return _fail(f"{error.strerror}: {error.filename or 'the output folder'}. Nothing that was there is lost.", 2)
    except Exception as error:  # the last resort: one sentence, and the details in a file
        if "not enough memory" in str(error) or "out of memory" in str(error):
            return _fail("There is not enough memory. Choose a smaller batch, smaller images or fewer capsules.", 2)
        return _fail(_unexpected(error), 1)


def _parsed(argv: list[str]) -> tuple[argparse.ArgumentParser, Command | None, argparse.Namespace]:
    """Only the module of the command that is asked for is imported."""
    parser = argparse.ArgumentParser(prog="torchcaps", description="Capsule networks for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torchcaps {torchcaps.__version__}")
    branches = parser.add_subparsers(metavar="COMMAND", dest="command")
    asked = next((word for word in argv if not word.startswith("-")), None)
    command: Command | None = None
    for name, (module, help) in COMMANDS.items():
        leaf = branches.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
        if name == asked:
            command = importlib.import_module(f"torchcaps.cli.{module}")
            assert command is not None
            command.add_options(leaf)
    arguments = parser.parse_args(argv)
    return parser, command, arguments


def _require_extra() -> None:
    if any(importlib.util.find_spec(module) is None for module in NEEDED):
        raise UserError("The command line needs more packages than the library: pip install 'torchcaps[train]'.")


def _as_option(setting: str) -> str:
    """What the command line calls a setting, if it can be given there.

    >>> _as_option("run.batch_size"), _as_option("batch_size"), _as_option("data.name")
    ('--batch-size', '--batch-size', '--data')
    """
    from torchcaps.cli.options import option_of

    return option_of(setting) or setting


def _fail(message: str, code: int) -> int:
    """Say what is wrong, once: of several processes the first one speaks and has the exit code.

    A launcher that sees another process fail might kill the first before it has spoken.
    """
    if int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) != 0:
        return 0
    printable = "".join(letter if letter.isprintable() or letter == "\n" else ascii(letter)[1:-1] for letter in message)
    print(f"torchcaps: {printable}", file=sys.stderr)
    return code


def _unexpected(error: BaseException) -> str:
    """What to say of a mistake of ours; the details go to a file."""
    descriptor, name = tempfile.mkstemp(prefix="torchcaps-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"torchcaps {torchcaps.__version__}, python {sys.version}\n{' '.join(map(ascii, sys.argv))}\n\n")
        file.write("".join(traceback.format_exception(error)))
    return (
        f"Something went wrong that should not ({type(error).__name__}). Please report it with the details in {name}."
    )


if __name__ == "__main__":
    sys.exit(main())
