"""Time of 100 training steps by method, measured side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchcaps.atomic import write_json
from torchcaps.errors import UserError
from torchcaps.lab.bench.cases import TrainingStep
from torchcaps.lab.bench.measure import check_threads, measure
from torchcaps.lab.reproduce.budgets import BUDGETS
from torchcaps.lab.reproduce.paper import BENCHMARKS, METHODS
from torchcaps.training.host import cpu_name, usable_cores


def measure_runtime(path: Path, budget_name: str, threads: int | None, say: Callable[[str], None]) -> None:
    """Measure all methods on the MNIST network in turns, and write the figures to ``path``."""
    threads = check_threads(threads or usable_cores())
    budget = BUDGETS[budget_name]
    mnist = BENCHMARKS["mnist"]
    methods = list(mnist.published)
    cases = [
        TrainingStep(
            kind=METHODS[method].routing,
            batch_size=budget.batch_size,
            threads=threads,
            network="mnist" if mnist.reconstructs(method) else "mnist-fc",
        )
        for method in methods
    ]
    outcomes = dict(zip(methods, measure(cases, rounds=budget.rounds, say=say)))
    if not all(outcome.seconds for outcome in outcomes.values()):
        raise UserError("A method could not be measured, most likely for want of memory. Nothing was kept.")
    report: dict[str, Any] = {
        "budget": budget_name,
        "cpu": cpu_name(),
        "threads": threads,
        "torch": torch.__version__,
        "batch_size": budget.batch_size,
        "rounds": budget.rounds,
        "seconds_per_100_steps": {name: round(100 * outcome.median, 3) for name, outcome in outcomes.items()},
        "spread_percent": {name: round(100 * outcome.spread, 1) for name, outcome in outcomes.items()},
    }
    write_json(path, report)
