"""Loggers beside ``metrics.csv``. Anything else is a :class:`torchcaps.training.fit.Callback` of your own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchcaps.errors import UserError
from torchcaps.training.fit import Callback, Finished
from torchcaps.training.folder import RunFolder

FOLDER = "tensorboard"


class TensorBoard(Callback):
    """Every number of ``metrics.csv`` as a curve of TensorBoard, in the run's folder."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("TensorBoard is not installed: pip install 'torchcaps[tensorboard]'.") from None
        self._make = SummaryWriter
        self._writer: Any = None

    def on_start(self, folder: RunFolder) -> None:
        rows = folder.read_metrics()
        last = rows[-1]["step"] if rows else None  # what a run that was stopped wrote after that is taken back
        self._writer = self._make(str(folder.path / FOLDER), purge_step=None if last is None else int(last) + 1)

    def on_row(self, row: Mapping[str, float | int | None]) -> None:
        for name, value in row.items():
            if value is not None and name != "step":
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def on_finish(self, finished: Finished) -> None:
        self._writer.close()
