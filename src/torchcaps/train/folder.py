"""The folder of a run: what was asked for, what happened, what came out."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from torchcaps.errors import UserError
from torchcaps.storage import write_atomically
from torchcaps.train.algorithm import STATISTICS
from torchcaps.train.checkpoint import Checkpoints
from torchcaps.train.options import TrainOptions, read_options

PATIENCE = 30  # seconds in which a run that was told to stop has saved where it is
CONFIG = "config.yaml"
COLUMNS = (
    "step",
    "epoch",
    "seconds",
    "images_per_second",
    "learning_rate",
    *STATISTICS,
    "evaluation_error",
    "coefficient_mean",
    "coefficient_std",
    "coefficient_min",
    "coefficient_max",
    "coefficient_negative",
    "coefficient_zero",
)


class RunFolder:
    """Paths and files of one run; ``RunFolder.create`` and ``RunFolder.open`` check what is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.metrics = path / "metrics.csv"
        self.result = path / "result.json"
        self.network = path / "model.safetensors"
        self.checkpoints = Checkpoints(path / "checkpoints")

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a place where a new run cannot be started; a folder that has one already is left untouched."""
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: choose another --out.")
        if (path / CONFIG).exists():
            raise UserError(
                f"{path} already has a run. Continue it with 'torchcaps train --resume {path}', "
                "or choose another --out."
            )
        if path.is_dir() and any(path.iterdir()):
            raise UserError(f"{path} is not empty: choose another --out.")

    @classmethod
    def create(cls, path: Path, options: TrainOptions) -> RunFolder:
        """Start a new run here."""
        cls.check_free(path)
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(folder.config, options.to_yaml().encode())
        except OSError as error:
            raise UserError(f"Cannot write to {path}: {error.strerror}. Choose another --out.") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        folder = cls(path)
        if not path.is_dir():
            raise UserError(f"There is no run folder {path}.")
        if not folder.config.is_file():
            raise UserError(f"{path} has no config.yaml: it is not a run folder, or not a whole one.")
        return folder

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Within it, no other process trains here."""
        file = self.path / ".lock"
        lock = FileLock(file)
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            raise UserError(f"Another process is training in {self.path}: wait until it is done, or stop it.") from None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # where a file that is open cannot be removed
                file.unlink()
            lock.release()

    def options(self) -> TrainOptions:
        return TrainOptions(**read_options(self.config))

    def append_metrics(self, row: Mapping[str, object]) -> None:
        new = not self.metrics.exists()
        with self.metrics.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)

    def read_metrics(self) -> list[dict[str, float | None]]:
        """All rows, with None where there was nothing to report."""
        if not self.metrics.exists():
            return []
        with self.metrics.open(newline="") as file:
            whole = [line for line in file if line.endswith("\n")]  # a line without its end is still being written
        return [{name: float(value) if value else None for name, value in row.items()} for row in csv.DictReader(whole)]

    def forget_metrics_after(self, step: int) -> None:
        """Drop the rows of steps that a resumed run will take again."""
        if not self.metrics.exists():
            return
        header, *rows = self.metrics.read_text().splitlines(keepends=True) or [""]
        if not header.endswith("\n"):  # ended while the first row was being written
            self.metrics.unlink()
            return
        # A row without its line end was cut off by whatever ended the run.
        kept = [row for row in rows if row.endswith("\n") and int(row.partition(",")[0]) <= step]
        write_atomically(self.metrics, "".join([header, *kept]).encode())

    def write_result(self, result: Mapping[str, Any]) -> None:
        write_atomically(self.result, (json.dumps(result, indent=2) + "\n").encode())
