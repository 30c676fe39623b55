"""The list of work: one cell for each data set, method and seed, kept as an ordinary run folder."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from torchcaps.atomic import write_atomically
from torchcaps.errors import UserError
from torchcaps.lab.reproduce.budgets import BUDGETS
from torchcaps.lab.reproduce.paper import BENCHMARKS, METHODS, Benchmark
from torchcaps.lab.results import VIEWS, agrees, all_settings
from torchcaps.training.config import TrainingConfig
from torchcaps.training.defaults import filled_in
from torchcaps.training.files import to_yaml
from torchcaps.training.folder import RunFolder
from torchcaps.training.result import RunResult


@dataclass(frozen=True)
class Cell:
    """One training run: what it is for, how it is trained and where it is kept."""

    benchmark: Benchmark
    method: str
    seed: int
    config: TrainingConfig
    root: Path

    @property
    def name(self) -> str:
        return f"{self.benchmark.data}/{self.method}/seed-{self.seed}"

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.root / self.name)

    @property
    def recipe(self) -> Path:
        return self.root / f"{self.name}.yaml"

    @property
    def log(self) -> Path:
        return self.root / f"{self.name}.log"

    @property
    def lock(self) -> Path:
        """Held by whoever has this cell trained."""
        return self.root / f"{self.name}.lock"

    @property
    def views(self) -> Path:
        """The error with several views of an image averaged."""
        return self.folder.path / VIEWS

    @property
    def done(self) -> bool:
        return self.folder.result.exists()

    @property
    def started(self) -> bool:
        return self.folder.config_file.exists()

    @property
    def total_steps(self) -> int:
        images = self.benchmark.train_images
        run = filled_in(self.config, images=images, classes=10, has_validation=False).run
        return run.steps or (run.epochs or 1) * (images // (run.batch_size or 1))

    def set_aside_damage(self, say: Callable[[str], None]) -> None:
        """Let a cell whose records cannot be read be trained anew, unless somebody is training it."""
        if self.folder.path.is_dir():
            with contextlib.suppress(Timeout), FileLock(self.lock, timeout=0):
                self.folder.set_aside_damage(say)

    def result(self) -> RunResult:
        return RunResult.read(self.folder.result)

    def progress(self) -> tuple[int, float]:
        """Steps and seconds so far, as far as they have been written down."""
        if self.done:
            return self.total_steps, self.result().seconds
        metrics = self.folder.read_metrics() if self.started else []
        return (int(metrics[-1]["step"] or 0), metrics[-1]["seconds"] or 0.0) if metrics else (0, 0.0)

    def check_settings(self) -> None:
        """Refuse what was begun here with other settings, for another budget perhaps."""
        if not agrees(self.config, all_settings(self.folder.config())):
            raise UserError(
                f"{self.folder.path} was trained with other settings. Choose another --out, or remove that folder."
            )

    def write_recipe(self) -> None:
        """Say, beside the run, how it is trained."""
        try:
            self.recipe.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot write to {self.recipe.parent}: {error.strerror}. Choose another --out.") from error
        content = to_yaml(self.config).encode()
        if not (self.recipe.exists() and self.recipe.read_bytes() == content):
            write_atomically(self.recipe, content)

    def forget_checkpoints(self) -> None:
        """A cell that is done needs no checkpoint, which would take three times the room of its network."""
        shutil.rmtree(self.folder.checkpoints.folder, ignore_errors=True)


def all_cells(budget: str, root: Path, *, seeds: int | None = None, first_seed: int = 0) -> list[Cell]:
    """The cells of the whole table: all methods of a seed before the next seed, so that comparisons come early."""
    chosen = BUDGETS[budget]
    cells = []
    for benchmark in BENCHMARKS.values():
        for method in benchmark.published:
            count = seeds or chosen.seeds.get(f"{benchmark.data}/{method}", 1)
            for seed in range(first_seed, first_seed + count):
                cells.append(Cell(benchmark, method, seed, chosen.config(benchmark, method, seed), root))
    return sorted(cells, key=lambda cell: cell.seed)


def select(cells: Sequence[Cell], only: Iterable[str]) -> list[Cell]:
    """The cells that one of the words is about: a data set, a method, a seed, or several of them joined by "/"."""
    wanted = [word.lower() for word in only]
    known = [*BENCHMARKS, *METHODS, *sorted({f"seed-{cell.seed}" for cell in cells})]
    for word in wanted:
        if not any(_matches(cell, word) for cell in cells):
            raise UserError(
                f"--only {word} matches no cell. Give {', '.join(known)}, or several of them joined as in mnist/l2-fc."
            )
    return [cell for cell in cells if not wanted or any(_matches(cell, word) for word in wanted)]


def _matches(cell: Cell, word: str) -> bool:
    return set(word.split("/")) <= set(cell.name.split("/"))
