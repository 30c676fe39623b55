"""Time of 100 training steps by method, measured side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchcaps.bench.cases import Case, TrainingStep
from torchcaps.bench.measure import check_threads, measure
from torchcaps.errors import UserError
from torchcaps.reproduce.budgets import BUDGETS
from torchcaps.reproduce.paper import BENCHMARKS, METHODS
from torchcaps.storage import write_atomically
from torchcaps.train.environment import cpu_name


def measure_runtime(path: Path, budget_name: str, threads: int | None, say: Callable[[str], None]) -> None:
    """Measure all methods on the MNIST network in turns, and write the figures to ``path``."""
    threads = check_threads(threads)
    budget = BUDGETS[budget_name]
    mnist = BENCHMARKS["mnist"]
    methods = list(mnist.published)
    cases: list[Case] = [
        TrainingStep(
            METHODS[method].routing,
            budget.batch_size,
            threads,
            architecture="mnist" if mnist.reconstructs(method) else "mnist-fc",
        )
        for method in methods
    ]
    outcome = measure(cases, rounds=budget.rounds, say=say)
    if not all(each.seconds for each in outcome):
        raise UserError("A method could not be measured, most likely for want of memory. Nothing was kept.")
    report: dict[str, Any] = {
        "budget": budget_name,
        "cpu": cpu_name(),
        "threads": threads,
        "torch": torch.__version__,
        "batch_size": budget.batch_size,
        "rounds": budget.rounds,
        "seconds_per_100_steps": {name: round(100 * each.median, 3) for name, each in zip(methods, outcome)},
        "spread_percent": {name: round(100 * each.spread, 1) for name, each in zip(methods, outcome)},
    }
    write_atomically(path, (json.dumps(report, indent=2) + "\n").encode())
