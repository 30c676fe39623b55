"""``torchcaps reproduce`` from its request to its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from torchcaps.errors import UserError
from torchcaps.reproduce.budgets import BUDGETS
from torchcaps.reproduce.cells import Cell, all_cells, select
from torchcaps.reproduce.display import CellDisplay
from torchcaps.reproduce.engine import command, run_cells
from torchcaps.reproduce.reconstruction import draw_reconstructions
from torchcaps.reproduce.report import Report
from torchcaps.reproduce.runtime import measure_runtime

FIGURES = ("table", "convergence", "runtime", "reconstruction", "all")


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    figure: str
    budget: str
    out: Path
    only: Sequence[str] = ()
    seeds: int | None = None
    first_seed: int = 0
    ray_address: str | None = None
    execution: dict[str, Any] | None = None
    """Where and how cells are trained: the options of EXECUTION."""

    def asks_for(self, figure: str) -> bool:
        return self.figure in (figure, "all")


def reproduce(request: Request, console: Console) -> None:
    """Train what is missing, then write the report of everything in the folder."""
    everything = all_cells(request.budget, request.out / "cells", seeds=request.seeds, first_seed=request.first_seed)
    cells = _needed(request, everything)
    execution = request.execution or {}
    failures = run_cells(
        cells, execution=execution, ray_address=request.ray_address, display=CellDisplay(console, cells)
    )
    report = Report(request.out, request.budget, _there(request, everything))
    report.pictures.mkdir(parents=True, exist_ok=True)
    if request.asks_for("runtime") and not report.runtime.exists():
        console.print("measuring the time of a step of every method, side by side")
        budget = BUDGETS[request.budget]
        measure_runtime(report.runtime, budget, execution.get("threads"), lambda line: console.print(line))
    if request.asks_for("reconstruction") and not failures and not report.reconstruction.exists():
        pair = _reconstruction_pair(everything)
        draw_reconstructions(*pair, report.reconstruction, report.pictures / "reconstruction.png")
    report.write()
    console.print(f"The report is {report.out / 'report.md'} and {report.out / 'report.html'}", soft_wrap=True)
    if failures:
        told = "\n".join(f"  {failure.cell.name}: {failure.reason} (see {failure.cell.log})" for failure in failures)
        raise UserError(f"{len(failures)} of {len(cells)} cells could not be trained:\n{told}")


def list_cells(request: Request, console: Console) -> None:
    """Every cell, how far it is, and the command that trains it, for whoever wants to start it elsewhere."""
    everything = all_cells(request.budget, request.out / "cells", seeds=request.seeds, first_seed=request.first_seed)
    for cell in _needed(request, everything):
        cell.write_recipe()
        if cell.done:
            state = f"{cell.result()['test_error_percent']:.2f} % test error"
        else:
            state = f"torchcaps {' '.join(command(cell, request.execution or {}))}"
        console.print(f"{cell.name}: {state}", markup=False, highlight=False, soft_wrap=True)


def _needed(request: Request, everything: Sequence[Cell]) -> list[Cell]:
    """The cells that the figures asked for are made of."""
    if request.figure == "runtime":
        return []
    if request.figure == "reconstruction":
        return list(_reconstruction_pair(everything))
    chosen = select(everything, request.only)
    if request.figure == "all":
        chosen += [cell for cell in _reconstruction_pair(everything) if cell not in chosen and not request.only]
    return chosen


def _reconstruction_pair(cells: Sequence[Cell]) -> tuple[Cell, Cell]:
    by_method = {cell.method: cell for cell in reversed(cells) if cell.benchmark.data == "fashion-mnist"}
    return by_method["dr"], by_method["l2-fc"]


def _there(request: Request, everything: Sequence[Cell]) -> list[Cell]:
    """The cells asked for and whatever other seeds the folder holds."""
    cells = {cell.name: cell for cell in everything}
    for path in sorted((request.out / "cells").glob("*/*/seed-*/result.json")):
        seed = int(path.parent.name.removeprefix("seed-"))
        for cell in all_cells(request.budget, request.out / "cells", seeds=1, first_seed=seed):
            cells.setdefault(cell.name, cell)
    return sorted(cells.values(), key=lambda cell: (cell.benchmark.data, cell.method, cell.seed))
