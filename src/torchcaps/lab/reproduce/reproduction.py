"""``torchcaps reproduce`` from what is asked for to its report."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from torchcaps.atomic import write_atomically
from torchcaps.errors import UserError
from torchcaps.lab.bench.measure import check_threads
from torchcaps.lab.reproduce.cells import Cell, all_cells, select
from torchcaps.lab.reproduce.display import CellDisplay
from torchcaps.lab.reproduce.engine import run_cells
from torchcaps.lab.reproduce.reconstruction import draw_reconstructions
from torchcaps.lab.reproduce.report import RUNTIME, Report
from torchcaps.lab.reproduce.runtime import measure_runtime
from torchcaps.lab.reproduce.worker import Execution
from torchcaps.lab.results import RESULTS, Results, agrees, collect, read_record
from torchcaps.trained.run import TrainedRun
from torchcaps.trained.scores import score


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Figures of the paper at a budget, in a folder.

    Args:
        figure: one of :data:`torchcaps.lab.reproduce.paper.FIGURES`.
        budget: one of :data:`torchcaps.lab.reproduce.budgets.BUDGETS`.
        out: the folder, which may hold what was done before.
        only: words that choose cells, such as "mnist/l2-fc"; all if there are none.
        seeds: runs of each cell; by default the budget decides.
        first_seed: the first of the seeds.
        ray_address: of a Ray cluster, or "local".
        execution: where and how cells are trained.
    """

    figure: str
    budget: str
    out: Path
    only: Sequence[str] = ()
    seeds: int | None = None
    first_seed: int = 0
    ray_address: str | None = None
    execution: Execution = field(default_factory=Execution)

    def run(self, console: Console) -> None:
        """Train what is missing, then write results and report of everything in the folder."""
        self._check()
        cells = self._needed()
        display = CellDisplay(console, cells)
        failures = run_cells(cells, execution=self.execution, ray_address=self.ray_address, display=display)
        self._write_report()  # before what else may go wrong
        for cell in cells:
            if cell.done and not cell.views.exists():
                self._average_views(cell)
        self._measure(console)
        report = self._write_report()
        display.say(f"The report is {report.folder / 'report.md'} and {report.folder / 'report.html'}")
        if failures:
            lines = "\n".join(
                f"  {failure.cell.name}: {failure.reason} (see {failure.cell.log})" for failure in failures
            )
            raise UserError(f"{len(failures)} of {len(cells)} cells could not be trained:\n{lines}")

    def list_cells(self, console: Console) -> None:
        """Every cell, how far it is, and the command that trains it, for whoever wants to start it elsewhere."""
        self._check()
        for cell in self._needed():
            cell.write_recipe()
            if cell.done:
                state = f"{cell.result().test_error_percent:.2f} % test error"
            else:
                folder = str(cell.folder.path)
                what = ["--resume", folder] if cell.started else ["--recipe", str(cell.recipe), "--out", folder]
                state = shlex.join(["torchcaps", "train", *what, *self.execution.options()])
            console.print(f"{cell.name}: {state}", markup=False, highlight=False, soft_wrap=True)

    @property
    def _root(self) -> Path:
        return self.out / "cells"

    def _asks_for(self, figure: str) -> bool:
        return self.figure in (figure, "all")

    def _check(self) -> None:
        """What can be found wrong before hours of training."""
        if self.only and self.figure in ("runtime", "reconstruction"):
            raise UserError(f"--only chooses cells of the table and the curves; {self.figure} has cells of its own.")
        if self._asks_for("runtime") and self.execution.threads:
            check_threads(self.execution.threads)
        rows = {row.run: row for row in Results.read(self.out).rows.values()}
        names = [*rows, *(path.relative_to(self._root).as_posix() for path in self._root.glob("*/*/seed-*"))]
        for seed in {int(match[1]) for name in names if (match := re.search(r"/seed-(\d+)$", name))}:
            for cell in all_cells(self.budget, self._root, seeds=1, first_seed=seed):
                if cell.started:
                    cell.check_settings()
                if cell.name in rows and not agrees(cell.config, rows[cell.name].settings):
                    raise UserError(
                        f"{self.out / RESULTS} has {cell.name} trained with other settings. Choose another --out."
                    )
        runtime = self.out / RUNTIME
        if runtime.exists() and (budget := read_record(runtime, "budget")["budget"]) != self.budget:
            raise UserError(f"{runtime} was measured at the budget {budget}. Choose another --out, or remove it.")

    def _needed(self) -> list[Cell]:
        """The cells that the figures asked for are made of."""
        if self.figure == "runtime":
            return []
        if self.figure == "reconstruction":
            return list(self._reconstruction_pair())
        return select(self._cells(), self.only)

    def _cells(self) -> list[Cell]:
        return all_cells(self.budget, self._root, seeds=self.seeds, first_seed=self.first_seed)

    def _reconstruction_pair(self) -> tuple[Cell, Cell]:
        by_method = {cell.method: cell for cell in reversed(self._cells()) if cell.benchmark.data == "fashion-mnist"}
        return by_method["dr"], by_method["l2-fc"]

    def _average_views(self, cell: Cell) -> None:
        """The error with moved images averaged, and mirrored ones where the cell was trained with them."""
        trained = TrainedRun(cell.folder.path, threads=self.execution.threads)
        plan = trained.plan(data_folder=self.execution.data_folder)
        views = ("shift",) if plan.config.augmentation.flip == "none" else ("flip", "shift")
        test, limit = plan.data.test, plan.evaluation_limit(plan.data.test)
        scores = score([trained.network.folded()], test, augmentation=plan.augmentation, views=views, limit=limit)
        content = json.dumps({"views": views, "error_percent": scores.error_percent})
        write_atomically(cell.views, content.encode())

    def _measure(self, console: Console) -> None:
        """The figures that are no matter of error rates."""
        report = Report(self.out)
        if self._asks_for("runtime") and not report.runtime.exists():
            console.print("measuring the time of a step of every method, side by side")
            measure_runtime(report.runtime, self.budget, self.execution.threads, console.print)
        if self._asks_for("reconstruction") and not report.has_reconstruction:
            pair = self._reconstruction_pair()
            if self.figure == "reconstruction" or all(cell.folder.network.exists() for cell in pair):
                draw_reconstructions(*pair, report.reconstruction, report.reconstruction_picture, self.execution)

    def _write_report(self) -> Report:
        """Add the finished cells to the results, and say what they say; one process at a time."""
        self.out.mkdir(parents=True, exist_ok=True)
        with FileLock(self.out / ".report.lock"):
            results = Results.read(self.out)
            results.update(collect(self._root, experiment=self.budget))
            results.write(self.out)
            report = Report(self.out)
            report.write()
        return report
