"""The folder of a run: what was asked for, what happened, what came out."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from torchcaps.atomic import DamagedFile, append_line, read_bytes, sweep, write_atomically
from torchcaps.errors import UserError
from torchcaps.models.files import MODEL_FILE
from torchcaps.training.algorithm import COEFFICIENT_STATISTICS, STATISTICS
from torchcaps.training.checkpoint import Checkpoints
from torchcaps.training.config import TrainingConfig
from torchcaps.training.files import read_config, to_yaml
from torchcaps.training.result import RunResult

PATIENCE = 30  # seconds in which a run that was told to stop has saved where it is
CONFIG = "config.yaml"
LOCK = ".lock"
LARGEST_METRICS = 2**28
COLUMNS = (
    "step",
    "epoch",
    "seconds",
    "images_per_second",
    "learning_rate",
    *STATISTICS,
    "evaluation_error",
    *COEFFICIENT_STATISTICS,
)


class RunFolder:
    """Paths and files of one run; ``RunFolder.create`` and ``RunFolder.open`` check what is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / CONFIG
        self.metrics = path / "metrics.csv"
        self.result = path / "result.json"
        self.network = path / MODEL_FILE
        self.checkpoints = Checkpoints(path / "checkpoints")

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a place where a new run cannot be started; a folder that has one already is left untouched."""
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: choose another folder.")
        if (path / CONFIG).exists():
            raise UserError(
                f"{path} already has a run. Continue it with 'torchcaps train --resume {path}', "
                "or choose another folder."
            )
        if path.is_dir() and any(inside.name != LOCK for inside in path.iterdir()):
            raise UserError(f"{path} is not empty: choose another folder.")

    @classmethod
    def create(cls, path: Path, config: TrainingConfig) -> RunFolder:
        """Start a new run here."""
        with cls.created(path, config) as folder:
            return folder

    @classmethod
    @contextlib.contextmanager
    def created(cls, path: Path, config: TrainingConfig) -> Iterator[RunFolder]:
        """Start a new run here, claimed before anything is written: of two that start at once, one is refused."""
        cls.check_free(path)
        folder = cls(path)
        with contextlib.ExitStack() as stack:
            try:
                path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(folder.claimed())
                cls.check_free(path)
                write_atomically(folder.config_file, to_yaml(config).encode())
            except OSError as error:
                raise UserError(f"Cannot write to {path}: {error.strerror}. Choose another folder.") from error
            yield folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run."""
        folder = cls(path)
        if not path.is_dir():
            raise UserError(f"There is no run folder {path}.")
        if not folder.config_file.is_file():
            raise UserError(f"{path} has no config.yaml: it is not a run folder, or not a whole one.")
        return folder

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Within it, no other process trains here."""
        file = self.path / LOCK
        lock = FileLock(file)
        try:
            lock.acquire(timeout=PATIENCE)
        except Timeout:
            raise UserError(f"Another process is training in {self.path}: wait until it is done, or stop it.") from None
        try:
            sweep(self.path)
            yield
        finally:
            with contextlib.suppress(OSError):  # where a file that is open cannot be removed
                file.unlink()
            lock.release()

    def set_aside_damage(self, say: Callable[[str], None]) -> None:
        """Put records that cannot be read out of the way: the run makes them anew from its checkpoints."""
        if os.path.lexists(self.result):
            try:
                RunResult.read(self.result)
            except UserError as error:
                _set_aside(self.result)
                say(f"{error} It is set aside, and made anew.")
        if os.path.lexists(self.metrics):
            try:
                read_bytes(self.metrics, most=LARGEST_METRICS)
            except (DamagedFile, OSError) as error:
                _set_aside(self.metrics)
                say(f"metrics.csv cannot be read ({error}). It is set aside.")

    def config(self) -> TrainingConfig:
        return read_config(self.config_file)

    def extend(self, config: TrainingConfig) -> None:
        """Let a run go on for longer: the only setting of a run that may change once it has begun."""
        rows = self.read_metrics()
        logged = (rows[-1]["step"] if rows else None) or 0
        steps = max([logged, *self.checkpoints.steps()])
        epochs = ((rows[-1]["epoch"] if rows else None) or 0) * (steps / logged if logged else 1)
        for name, taken in (("steps", steps), ("epochs", epochs)):
            asked = getattr(config.run, name)
            if asked is not None and asked < taken:
                raise UserError(f"The run has taken {taken:g} {name} already: it can be made longer, not shorter.")
        self.checkpoints.restamp(config.determining())
        self.set_aside_damage(lambda line: None)
        write_atomically(self.config_file, to_yaml(config).encode())  # last: until then it is the run it was
        if self.result.exists():
            steps = RunResult.read(self.result).steps
            self.result.rename(self.result.with_name(f"result-{steps}.json"))

    def append_metrics(self, row: Mapping[str, object]) -> None:
        if not self.metrics.exists():
            append_line(self.metrics, ",".join(COLUMNS))
        cells = (row.get(name) for name in COLUMNS)
        append_line(self.metrics, ",".join("" if cell is None else str(cell) for cell in cells))

    def read_metrics(self) -> list[dict[str, float | None]]:
        """All rows that can be read, with None where there was nothing to report."""
        rows = self._whole_rows() if self.metrics.exists() else []
        return [{name: float(cell) if cell else None for name, cell in zip(COLUMNS, row)} for row in rows]

    def forget_metrics_after(self, step: int) -> int:
        """Drop the rows of steps that a resumed run will take again; returns how many damaged ones were dropped too."""
        if not self.metrics.exists():
            return 0
        rows = self._whole_rows()
        damaged = read_bytes(self.metrics, most=LARGEST_METRICS).count(b"\n") - 1 - len(rows)
        kept = [row for row in rows if float(row[0]) <= step]
        write_atomically(self.metrics, "".join(",".join(row) + "\n" for row in [COLUMNS, *kept]).encode())
        return max(0, damaged)

    def _whole_rows(self) -> list[list[str]]:
        """The cells of the rows that have all their columns; torn and damaged rows are left out."""
        text = read_bytes(self.metrics, most=LARGEST_METRICS).decode("utf-8", errors="replace")
        rows = text.split("\n")[1:-1]  # what follows the last line end is torn, or nothing
        return [cells for cells in (row.split(",") for row in rows) if _is_whole(cells)]


def _is_whole(cells: list[str]) -> bool:
    if not cells[0] or len(cells) != len(COLUMNS):
        return False
    try:
        return all(cell.strip() == cell and math.isfinite(float(cell or 0)) for cell in cells)
    except ValueError:
        return False


def _set_aside(path: Path) -> None:
    names = (path.with_name(f"{path.name}{number or ''}.damaged") for number in itertools.count())
    path.rename(next(name for name in names if not os.path.lexists(name)))
