"""Checkpoints: the last few, each whole or not there at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from torchcaps.errors import UserError
from torchcaps.storage import UNFINISHED, DamagedFile, read_tensors, write_tensors

KEPT = 2  # the newest, and the one before it in case the newest is damaged


class Checkpoints:
    """The folder ``checkpoints`` of a run, one file for each step kept."""

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

    def load_newest(self, say: Callable[[str], None]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest intact checkpoint; None if the run has not made any yet."""
        paths = self.paths()
        for path in reversed(paths):
            try:
                return read_tensors(path)
            except DamagedFile as error:
                say(f"{error} Going back to the one before it.")
                path.rename(path.with_suffix(".damaged"))  # or it would take the place of a good one
        if paths:
            raise UserError(f"No checkpoint in {self.folder} is intact. The run cannot be resumed: start it again.")
        return None
