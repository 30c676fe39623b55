"""``torchcaps reproduce`` from its request to its report."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from torchcaps.bench.measure import check_threads
from torchcaps.errors import UserError
from torchcaps.reproduce.cells import Cell, all_cells, select
from torchcaps.reproduce.display import CellDisplay
from torchcaps.reproduce.engine import command, run_cells
from torchcaps.reproduce.paper import METHODS
from torchcaps.reproduce.reconstruction import draw_reconstructions
from torchcaps.reproduce.report import RUNTIME, Report
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
    execution: Mapping[str, Any] = field(default_factory=dict)
    """Where and how cells are trained: the options of EXECUTION."""

    def asks_for(self, figure: str) -> bool:
        return self.figure in (figure, "all")


def reproduce(request: Request, console: Console) -> None:
    """Train what is missing, then write the report of everything in the folder."""
    _check(request)
    cells = _needed(request)
    failures = run_cells(
        cells, execution=request.execution, ray_address=request.ray_address, display=CellDisplay(console, cells)
    )
    report = Report(request.out, request.budget, _there(request))
    report.write()  # before what else may go wrong
    if request.asks_for("runtime") and not report.runtime.exists():
        console.print("measuring the time of a step of every method, side by side")
        measure_runtime(report.runtime, request.budget, request.execution.get("threads"), console.print)
    if request.asks_for("reconstruction") and not report.has_reconstruction:
        pair = _reconstruction_pair(request)
        if request.figure == "reconstruction" or all(cell.folder.network.exists() for cell in pair):
            draw_reconstructions(
                *pair, report.reconstruction, report.reconstruction_picture, request.execution.get("data_dir")
            )
    report.write()
    told = f"The report is {report.out / 'report.md'} and {report.out / 'report.html'}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    if failures:
        each = "\n".join(f"  {failure.cell.name}: {failure.reason} (see {failure.cell.log})" for failure in failures)
        raise UserError(f"{len(failures)} of {len(cells)} cells could not be trained:\n{each}")


def list_cells(request: Request, console: Console) -> None:
    """Every cell, how far it is, and the command that trains it, for whoever wants to start it elsewhere."""
    _check(request)
    for cell in _needed(request):
        cell.write_recipe()
        if cell.done:
            state = f"{cell.result()['test_error_percent']:.2f} % test error"
        else:
            state = shlex.join(["torchcaps", *command(cell, request.execution)])
        console.print(f"{cell.name}: {state}", markup=False, highlight=False, soft_wrap=True)


def _check(request: Request) -> None:
    """What can be found wrong before hours of training."""
    if request.only and request.figure in ("runtime", "reconstruction"):
        raise UserError(f"--only chooses cells of the table and the curves; {request.figure} has cells of its own.")
    if request.asks_for("runtime"):
        check_threads(request.execution.get("threads"))
    for cell in _there(request):
        if cell.started:
            cell.check_settings()
    runtime = request.out / RUNTIME
    if runtime.exists() and (budget := json.loads(runtime.read_text())["budget"]) != request.budget:
        raise UserError(f"{runtime} was measured at the budget {budget}. Choose another --out, or remove it.")


def _needed(request: Request) -> list[Cell]:
    """The cells that the figures asked for are made of."""
    if request.figure == "runtime":
        return []
    if request.figure == "reconstruction":
        return list(_reconstruction_pair(request))
    return select(_asked_for(request), request.only)


def _asked_for(request: Request) -> list[Cell]:
    return all_cells(request.budget, request.out / "cells", seeds=request.seeds, first_seed=request.first_seed)


def _reconstruction_pair(request: Request) -> tuple[Cell, Cell]:
    by_method = {cell.method: cell for cell in reversed(_asked_for(request)) if cell.benchmark.data == "fashion-mnist"}
    return by_method["dr"], by_method["l2-fc"]


def _there(request: Request) -> list[Cell]:
    """The cells asked for and whatever other seeds the folder holds."""
    cells = {cell.name: cell for cell in _asked_for(request)}
    folders = (request.out / "cells").glob("*/*/seed-*")
    for seed in {int(found[1]) for path in folders if (found := re.fullmatch(r"seed-(\d+)", path.name))}:
        for cell in all_cells(request.budget, request.out / "cells", seeds=1, first_seed=seed):
            cells.setdefault(cell.name, cell)
    order = {method: place for place, method in enumerate(METHODS)}
    return sorted(cells.values(), key=lambda cell: (cell.benchmark.data, order[cell.method], cell.seed))
