"""The list of work: one cell for each data set, method and seed, kept as an ordinary run folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchcaps.errors import UserError
from torchcaps.reproduce.budgets import BUDGETS
from torchcaps.reproduce.paper import BENCHMARKS, METHODS, Benchmark
from torchcaps.storage import write_atomically
from torchcaps.train import RunFolder, TrainOptions
from torchcaps.train.options import EXECUTION


@dataclass(frozen=True)
class Cell:
    """One training run: what it is for, how it is trained and where it is kept."""

    benchmark: Benchmark
    method: str
    seed: int
    options: TrainOptions
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
    def done(self) -> bool:
        return self.folder.result.exists()

    @property
    def started(self) -> bool:
        return self.folder.config.exists()

    def result(self) -> dict[str, Any]:
        try:
            result: dict[str, Any] = json.loads(self.folder.result.read_text(encoding="utf-8"))
        except ValueError:
            raise UserError(f"{self.folder.result} is damaged. Remove {self.folder.path} to train it again.") from None
        return result

    def steps_done(self) -> int:
        """Steps so far, as far as they have been written down."""
        metrics = self.folder.read_metrics() if self.started else []
        return int(metrics[-1]["step"] or 0) if metrics else 0

    def check_settings(self) -> None:
        """Refuse what was begun here with other settings, for another budget perhaps."""
        if _settings(self.folder.options()) != _settings(self.options):
            raise UserError(
                f"{self.folder.path} was trained with other settings. Choose another --out, or remove that folder."
            )

    def write_recipe(self) -> None:
        """Say, beside the run, how it is trained."""
        try:
            self.recipe.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"Cannot write to {self.recipe.parent}: {error.strerror}. Choose another --out.") from error
        defaults = dataclasses.asdict(TrainOptions())
        chosen = {name: value for name, value in _settings(self.options).items() if value != defaults[name]}
        lines = [f"{name}: {json.dumps(value)}\n" for name, value in chosen.items()]  # JSON is YAML, too
        write_atomically(self.recipe, "".join(lines).encode())

    def forget_checkpoints(self) -> None:
        """A cell that is done needs no checkpoint, which would take three times the room of its network."""
        shutil.rmtree(self.folder.checkpoints.folder, ignore_errors=True)


def _settings(options: TrainOptions) -> dict[str, Any]:
    """What determines the numbers of a run, leaving out where and how it is executed."""
    return {name: value for name, value in dataclasses.asdict(options).items() if name not in (*EXECUTION, "out")}


def all_cells(budget: str, root: Path, *, seeds: int | None = None, first_seed: int = 0) -> list[Cell]:
    """The cells of the whole table: all methods of a seed before the next seed, so that comparisons come early."""
    chosen = BUDGETS[budget]
    cells = []
    for benchmark in BENCHMARKS.values():
        count = seeds or chosen.seeds.get(benchmark.data, 1)
        for seed in range(first_seed, first_seed + count):
            for method in benchmark.published:
                cells.append(Cell(benchmark, method, seed, chosen.options(benchmark, method, seed), root))
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
