"""Checkpoints: the last few, each whole or not there at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from torchcaps.atomic import DamagedFile, sweep
from torchcaps.errors import UserError
from torchcaps.settings import shown
from torchcaps.storage import read_tensors, write_tensors
from torchcaps.training.config import TrainingConfig

KEPT = 2  # the newest, and the one before it in case the newest is damaged


class Checkpoints:
    """The folder ``checkpoints`` of a run, one file for each step kept.

    Every checkpoint holds the settings that determine the run, so that it cannot be taken for another run's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def paths(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("step-*.safetensors"))

    def steps(self) -> list[int]:
        """After how many steps they were made."""
        return [int(number) for path in self.paths() if (number := path.stem.removeprefix("step-")).isdecimal()]

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        write_tensors(self.folder / f"step-{step:09d}.safetensors", tensors, {"step": step, **state})
        sweep(self.folder)
        for path in self.paths()[:-KEPT]:
            path.unlink()

    def restamp(self, settings: dict[str, Any]) -> None:
        """Make the newest intact checkpoint one of a run with these settings, and forget the others."""
        paths = self.paths()
        while paths:
            newest = paths.pop()
            try:
                tensors, state = _read(newest)
            except (DamagedFile, OSError):
                _set_aside(newest, ".damaged")
                continue
            write_tensors(newest, tensors, {**state, "settings": settings})
            for path in paths:
                path.unlink()
            return
        if list(self.folder.glob("*.damaged")):
            raise UserError(f"No checkpoint in {self.folder} is intact: this run cannot be made longer.")

    def load_newest(
        self,
        settings: dict[str, Any],
        say: Callable[[str], None],
        use: Callable[[dict[str, Tensor], dict[str, Any]], None] = lambda tensors, state: None,
        *,
        images: dict[str, Any] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest intact checkpoint of this run; None if the run has not made any yet.

        Args:
            settings: those of the run. If every checkpoint was made with others, that is a :class:`UserError`.
            say: told what is passed over.
            use: continues from a checkpoint; if it raises, the checkpoint is a damaged one.
            images: what they are like, if that must be as it was when the checkpoint was made.
        """
        paths = self.paths()
        foreign: dict[Path, UserError] = {}
        for path in reversed(paths):
            try:
                tensors, state = _read(path)
                if differing := changes(state["settings"], settings):
                    foreign[path] = UserError(
                        f"config.yaml is not the one this run was made with ({differing}). Put the old values back to "
                        "resume it, or start a new run."
                    )
                    continue
                then = state.get("images", images)
                if then != images:
                    foreign[path] = UserError(
                        f"The images are not those that this run was made with: they were {shown(then)}, and are "
                        f"{shown(images)}. Put them back to resume it, or start a new run."
                    )
                    continue
                use(tensors, state)
            except (DamagedFile, OSError) as error:
                say(f"{error} Going back to the checkpoint before it.")
                _set_aside(path, ".damaged")
                continue
            for other in foreign:
                say(f"{other} belongs to another run. Going back to the checkpoint before it.")
                _set_aside(other, ".foreign")
            return tensors, state
        if foreign:
            raise next(iter(foreign.values()))
        if paths:
            raise UserError(
                f"No checkpoint in {self.folder} is intact; they are set aside. Resume it once more, and the run "
                "starts from its first step."
            )
        return None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A checkpoint that says of which step and of which run it is."""
    tensors, state = read_tensors(path)
    if not isinstance(state.get("settings"), dict):
        raise DamagedFile(f"{path} does not say which settings it was made with.")
    step = state.get("step")
    if type(step) is not int or path.stem != f"step-{step:09d}":
        raise DamagedFile(f"{path} is of another step than its name says.")
    return tensors, state


def _set_aside(path: Path, ending: str) -> None:
    """Or it would take the place of a good one."""
    with contextlib.suppress(OSError):
        path.rename(path.with_suffix(ending))


def changes(stored: dict[str, Any], given: dict[str, Any]) -> str:
    """The settings that differ, with what they were and what they are; empty if none do.

    What an older version did not have yet was as it is by default now.
    """
    later = {name: value for name, value in TrainingConfig().determining().items() if name in given}
    before = later | stored
    names = sorted(name for name in before.keys() | given.keys() if before.get(name) != given.get(name))
    return "; ".join(f"{name[:60]} was {shown(before.get(name))}, is {shown(given.get(name))}" for name in names[:10])
