"""What the paper reports, and which cells its claims are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

FIGURES = ("table", "convergence", "runtime", "reconstruction", "all")
"""What can be reproduced."""


class Method(NamedTuple):
    """A column of the classification table. "x/FC" is the paper's way to say: without reconstruction network."""

    title: str
    routing: str


METHODS = {
    "dr": Method("DR", "dynamic"),
    "l2": Method("L2", "l2"),
    "l1": Method("L1", "l1"),
    "l2-fc": Method("L2/FC", "l2"),
    "l1-fc": Method("L1/FC", "l1"),
    "uniform": Method("uniform", "uniform"),
    "uniform-fc": Method("uniform/FC", "uniform"),
}
"""By their names in paths and on the command line."""


@dataclass(frozen=True)
class Benchmark:
    """A row of the classification table."""

    data: str
    title: str
    published: Mapping[str, float | None]
    """Test error in percent by method; None for our own baseline, which the paper does not have."""
    decoder: bool
    """Whether methods that are not "x/FC" have a reconstruction network."""
    milestones: tuple[float, ...]
    """Errors in percent for which it is told when they were reached."""
    goal: float
    """What the ``cpu`` budget aims at: about the best error of the paper."""
    train_images: int = 60_000
    """How many an epoch has."""

    def reconstructs(self, method: str) -> bool:
        return self.decoder and not method.endswith("-fc")


BENCHMARKS = {
    benchmark.data: benchmark
    for benchmark in (
        Benchmark(
            "mnist",
            "MNIST",
            {"dr": 0.34, "l2": 0.35, "l1": 0.32, "l2-fc": 0.35, "l1-fc": 0.44, "uniform-fc": None},
            decoder=True,
            milestones=(3.0, 2.0, 1.5, 1.0, 0.5),
            goal=0.32,
        ),
        Benchmark(
            "fashion-mnist",
            "Fashion-MNIST",
            {"dr": 7.21, "l2": 7.01, "l1": 6.76, "l2-fc": 6.75, "l1-fc": 6.77, "uniform-fc": None},
            decoder=True,
            milestones=(15.0, 14.0, 13.0, 12.0, 10.0, 8.0),
            goal=6.75,
        ),
        Benchmark(
            "cifar-10",
            "CIFAR-10",
            {"dr": 15.3, "l2-fc": 14.52, "l1-fc": 14.04, "uniform-fc": None},
            decoder=False,
            milestones=(70.0, 60.0, 55.0, 50.0, 40.0, 20.0),
            goal=14.0,
            train_images=50_000,
        ),
        Benchmark(
            "multi-mnist",
            "overlapping digits",
            {"dr": 7.47, "l2": 7.54, "l1": 7.54, "uniform": None},  # one figure for both of its own methods
            decoder=True,
            milestones=(80.0, 60.0, 40.0, 20.0, 10.0),
            goal=7.47,
            train_images=60_000_000,
        ),
    )
}

# The figure "Approximate training time per 100 steps".
SECONDS_PER_100_STEPS = {"dr": 18.79, "l2": 15.61, "l1": 14.98, "l2-fc": 11.10, "l1-fc": 11.92}
