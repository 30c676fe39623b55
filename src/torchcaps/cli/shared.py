"""Options and steps that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchcaps.routing.base import Routing
    from torchcaps.trained.run import TrainedRun


def positive(text: str) -> int:
    """A whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def threads(text: str) -> int:
    value = positive(text)
    if value > 1024:
        raise argparse.ArgumentTypeError(f"must be at most 1024, not {value}")
    return value


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="DIR", help="the folder of a finished run")
    parser.add_argument("--threads", type=threads, metavar="N", help="CPU threads [all cores]")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu, cuda, mps")
    parser.add_argument("--routing", metavar="MODULE:CLASS", help="a routing of your own that the run was trained with")


def add_data_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", metavar="DIR", help="where data sets are kept [the user's cache]")


def own_routing(name: str | None) -> type[Routing] | None:
    """The routing that ``module:Class`` on this command line names; its module may be in the current folder."""
    if name is None or ":" not in name:
        return None
    from torchcaps.routing.config import import_routing

    sys.path.append(os.getcwd())  # last, so that nothing lying there can stand in for anything else
    return import_routing(name)


def open_run(arguments: argparse.Namespace) -> TrainedRun:
    from torchcaps.ops import keep_memory
    from torchcaps.trained.run import TrainedRun

    keep_memory()
    return TrainedRun(
        arguments.run_folder,
        own_routing=own_routing(arguments.routing),
        accelerator=arguments.accelerator,
        threads=arguments.threads,
    )
