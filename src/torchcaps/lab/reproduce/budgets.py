"""How long, and with which settings, the cells of a budget train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchcaps.recipes import find_recipe
from torchcaps.reproduce.paper import METHODS, Benchmark
from torchcaps.train import TrainOptions, read_options

Values = dict[str, Any]
BOOKKEEPING = (
    "log_every",
    "evaluate_every",
    "evaluation_images",
    "checkpoint_every",
    "pictures",
)  # no matter for the outcome


@dataclass(frozen=True)
class Budget:
    """A way to train every cell."""

    summary: str
    values: Callable[[Benchmark, str], Values]
    """Options of a benchmark and method, but for the routing, the reconstruction network and the seed."""
    seeds: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How many seeds a data set gets unless asked otherwise; 1 if it is not named."""
    rounds: int = 5
    """Rounds of the runtime measurement."""
    batch_size: int = 128
    """Images in a step of the runtime measurement."""

    def options(self, benchmark: Benchmark, method: str, seed: int) -> TrainOptions:
        fixed = {
            "routing": METHODS[method].routing,
            "reconstruction": benchmark.reconstructs(method),
            "seed": seed,
        }
        return TrainOptions(**{**self.values(benchmark, method), **fixed})


def _paper(benchmark: Benchmark, method: str) -> Values:
    # The uniform baseline, which the paper does not have, is trained like the L2 network it is a baseline of.
    routing = "l2" if METHODS[method].routing == "uniform" else METHODS[method].routing
    without = benchmark.decoder and not benchmark.reconstructs(method)
    return read_options(find_recipe(f"{benchmark.data}-{routing}{'-no-reconstruction' if without else ''}"))


def _cpu(benchmark: Benchmark, method: str) -> Values:
    return read_options(find_recipe(f"{benchmark.data}-cpu"))


def _smoke(benchmark: Benchmark, method: str) -> Values:
    """A tiny network on embedded stand-ins: whether everything works, not how well."""
    return {
        "data": "multi-digits" if benchmark.data == "multi-mnist" else "digits",
        "conv_channels": 8,
        "primary_capsules": 4,
        "batch_size": 16,
        "steps": 6,
        "warmup": 2,
        "evaluate_every": 2,
        "checkpoint_every": 2,
        "log_every": 2,
        "test_images": 100,
        "pictures": False,
    }


BUDGETS = {
    "smoke": Budget(
        "tiny networks on embedded stand-ins, to see that everything works", _smoke, rounds=1, batch_size=8
    ),
    "cpu": Budget(
        "our recipes for ordinary processors, minutes a run, chosen on held-out training images",
        _cpu,
        {"fashion-mnist": 3},
    ),
    "paper": Budget("the paper's iterations and settings, for a machine with GPUs", _paper),
}


def differences(budget: Budget, benchmark: Benchmark, method: str) -> dict[str, tuple[Any, Any]]:
    """The options in which a budget differs from the paper's setting: name -> (paper, budget)."""
    published = dataclasses.asdict(BUDGETS["paper"].options(benchmark, method, 0))
    own = dataclasses.asdict(budget.options(benchmark, method, 0))
    compared = [name for name in own if name not in BOOKKEEPING]
    return {name: (published[name], own[name]) for name in compared if own[name] != published[name]}
