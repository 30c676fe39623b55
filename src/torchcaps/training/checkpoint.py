"""Checkpoints: the last few, each whole or not there at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from torchcaps.atomic import UNFINISHED, DamagedFile
from torchcaps.errors import UserError
from torchcaps.storage import read_tensors, write_tensors

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

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self.folder.mkdir(exist_ok=True)
        write_tensors(self.folder / f"step-{step:09d}.safetensors", tensors, {"step": step, **state})
        left_by_a_kill = self.folder.glob(f".*{UNFINISHED}")
        for path in [*left_by_a_kill, *self.paths()[:-KEPT]]:
            path.unlink()

    def restamp(self, settings: dict[str, Any]) -> None:
        """Make the newest checkpoint one of a run with these settings, and forget the older ones."""
        if not self.paths():
            return
        *older, newest = self.paths()
        tensors, state = read_tensors(newest)
        write_tensors(newest, tensors, {**state, "settings": settings})
        for path in older:
            path.unlink()

    def load_newest(
        self, settings: dict[str, Any], say: Callable[[str], None]
    ) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest intact checkpoint; None if the run has not made any yet.

        Raises :class:`UserError` if it was made with other settings than these.
        """
        paths = self.paths()
        for path in reversed(paths):
            try:
                tensors, state = read_tensors(path)
            except (DamagedFile, OSError) as error:
                say(f"{error} Going back to the checkpoint before it.")
                with contextlib.suppress(OSError):
                    path.rename(path.with_suffix(".damaged"))  # or it would take the place of a good one
                continue
            _check_settings(path, state.get("settings"), settings)
            return tensors, state
        if paths:
            raise UserError(f"No checkpoint in {self.folder} is intact. The run cannot be resumed: start it again.")
        return None


def _check_settings(path: Path, stored: object, given: dict[str, Any]) -> None:
    if not isinstance(stored, dict):
        raise UserError(f"{path} does not say which settings it was made with: it cannot be resumed from.")
    names = sorted(name for name in stored.keys() | given.keys() if stored.get(name) != given.get(name))
    if names:
        changes = "; ".join(f"{name} was {stored.get(name)!a}, is {given.get(name)!a}" for name in names[:10])
        raise UserError(
            f"config.yaml is not the one this run was made with ({changes}). Put the old values back to resume it, "
            "or start a new run."
        )
