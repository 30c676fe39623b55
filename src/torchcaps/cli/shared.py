"""Options and steps that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcaps.errors import UserError

if TYPE_CHECKING:
    from torchcaps.models.config import Own
    from torchcaps.trained.run import TrainedRun


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number of this range."""
    wanted = f"at least {least}" if most is None else f"from {least} to {most}"

    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be {wanted}, not {value}")
        return value

    return number


positive, threads = whole(1), whole(1, 1024)


def folder(text: str) -> Path:
    """A path; an empty one is a mistake, such as a variable of a script that was never set."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return Path(text)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, metavar="DIR", help="the folder of a finished run")
    add_computing(parser)


def add_pretrained(parser: argparse.ArgumentParser, **options: Any) -> None:
    help = "in place of DIR, a network that comes along: mnist"
    parser.add_argument("--pretrained", metavar="NAME", help=help, **options)


def add_run_and_images(parser: argparse.ArgumentParser, images: str) -> None:
    """A run folder and images, or ``--pretrained`` and images."""
    words = [
        parser.add_argument("run_folder", metavar="DIR", help="the folder of a finished run"),
        parser.add_argument("images", nargs="+", metavar="IMAGE", help=images),
    ]

    class InPlaceOfARun(argparse.Action):
        """All words are images then, even if there is only one."""

        def __call__(self, _: object, namespace: argparse.Namespace, values: object, option: str | None = None) -> None:
            setattr(namespace, self.dest, values)
            for word in words:
                word.required = False

    add_pretrained(parser, action=InPlaceOfARun)
    add_computing(parser)


def run_and_images(arguments: argparse.Namespace) -> tuple[Path, list[str]]:
    """What :func:`add_run_and_images` was given."""
    if arguments.pretrained is None:
        return Path(arguments.run_folder), arguments.images
    images = [word for word in (arguments.run_folder, *(arguments.images or ())) if word is not None]
    if not images:
        raise UserError("Name images to look at.")
    return pretrained_folder(arguments.pretrained), images


def pretrained_folder(name: str) -> Path:
    from torchcaps.models.files import in_the_box

    return in_the_box(name)


def add_computing(parser: argparse.ArgumentParser) -> None:
    """Where to compute, and code of the user's own that a run needs."""
    parser.add_argument("--threads", type=threads, metavar="N", help="CPU threads [all cores]")
    parser.add_argument("--accelerator", default="auto", help="auto, cpu, cuda, mps")
    parser.add_argument("--routing", metavar="MODULE:CLASS", help="a routing of your own that the run was trained with")
    parser.add_argument("--backbone", metavar="MODULE:FUNCTION", help="a backbone that the run was trained with")


def add_data_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", metavar="DIR", help="where data sets are kept [the user's cache]")


def own_code(routing: str | None, backbone: str | None) -> Own:
    """The routing and the backbone that this command line names; their modules may be in the current folder."""
    from torchcaps.models.backbones import import_backbone
    from torchcaps.models.config import Own
    from torchcaps.routing.config import import_routing

    from_timm = backbone is not None and backbone.startswith("timm:")
    makes_backbone = import_backbone(backbone) if backbone and from_timm else None
    with _current_folder_last():
        return Own(
            import_routing(routing) if routing and ":" in routing else None,
            import_backbone(backbone) if backbone and not from_timm else makes_backbone,
        )


@contextlib.contextmanager
def _current_folder_last() -> Iterator[None]:
    """Within it, modules in the current folder are found, after all others.

    Not for longer: what else lies there must not be found by whoever asks whether some package is installed.
    """
    try:
        here = os.getcwd()
    except OSError:
        raise UserError("The current folder is no longer there.") from None
    sys.path.append(here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.reverse()
            sys.path.remove(here)
            sys.path.reverse()


def open_run(folder: Path, arguments: argparse.Namespace) -> TrainedRun:
    from torchcaps.ops import keep_memory
    from torchcaps.trained.run import TrainedRun

    if arguments.routing is not None and ":" not in arguments.routing:
        raise UserError("A run knows its routing: --routing only names the code of one of your own, module:Class.")
    keep_memory()
    return TrainedRun(
        folder,
        own=own_code(arguments.routing, arguments.backbone),
        accelerator=arguments.accelerator,
        threads=arguments.threads,
    )
