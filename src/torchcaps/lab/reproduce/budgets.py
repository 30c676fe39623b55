"""How long, and with which settings, the cells of a budget train."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchcaps.lab.reproduce.paper import METHODS, Benchmark
from torchcaps.training.config import TrainingConfig

Values = Mapping[str, Mapping[str, Any]]
ASCENDING = ("l2", "l1")
"""The routings whose coefficients ascend."""
BOOKKEEPING = ("run.log_every", "run.evaluate_every", "run.evaluation_images", "run.checkpoint_every", "run.seed")
"""Settings that are no matter for the outcome, or differ between the runs of a cell."""


@dataclass(frozen=True)
class Budget:
    """A way to train every cell."""

    summary: str
    recipe: Callable[[Benchmark, str], Values]
    """Settings of a benchmark and method, but for the routing, the reconstruction network and the seed."""
    seeds: Mapping[str, int] = field(default_factory=dict)
    """How many seeds a cell, DATA/METHOD, gets unless asked otherwise; 1 if it is not named."""
    rounds: int = 5
    """Rounds of the runtime measurement."""
    batch_size: int = 128
    """Images in a step of the runtime measurement."""

    def config(self, benchmark: Benchmark, method: str, seed: int) -> TrainingConfig:
        values = {section: dict(part) for section, part in self.recipe(benchmark, method).items()}
        routing = METHODS[method].routing
        values["routing"] = _routing(values.get("routing", {}), routing)
        if routing not in ASCENDING:  # a recipe that changes how others ascend does not change this cell
            values.pop("ascent", None)
        values.setdefault("model", {})["reconstruction"] = benchmark.reconstructs(method)
        values.setdefault("run", {})["seed"] = seed
        return TrainingConfig.from_mapping(values)


def _routing(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A recipe's settings as far as this routing has them: one recipe serves several methods."""
    from torchcaps.routing.registry import ROUTINGS

    known = {key for routing in ROUTINGS.values() for key in inspect.signature(routing).parameters}
    foreign = known - set(inspect.signature(ROUTINGS[name]).parameters)
    return {
        "name": name,
        "settings": {key: value for key, value in given.get("settings", {}).items() if key not in foreign},
    }


def _read(recipe: str) -> Values:
    from torchcaps.training.files import find_recipe, read_mapping

    return read_mapping(find_recipe(recipe))


def _paper(benchmark: Benchmark, method: str) -> Values:
    # The uniform baseline, which the paper does not have, is trained like the L2 network it is a baseline of.
    routing = "l2" if METHODS[method].routing == "uniform" else METHODS[method].routing
    without = benchmark.decoder and not benchmark.reconstructs(method)
    return _read(f"{benchmark.data}-{routing}{'-no-reconstruction' if without else ''}")


def _cpu(benchmark: Benchmark, method: str) -> Values:
    return _read(f"{benchmark.data}-cpu")


def _smoke(benchmark: Benchmark, method: str) -> Values:
    """A tiny network on embedded stand-ins: whether everything works, not how well."""
    return {
        "data": {"name": "multi-digits" if benchmark.data == "multi-mnist" else "digits"},
        "model": {"conv_channels": 8, "primary_capsules": 4},
        "optimiser": {"warmup": 2},
        "run": {
            "batch_size": 16,
            "steps": 6,
            "evaluate_every": 2,
            "checkpoint_every": 2,
            "log_every": 2,
            "test_images": 100,
            "pictures": False,
        },
    }


_SEVERAL = {"mnist": ("dr", "l2", "l1-fc"), "fashion-mnist": ("dr", "l2-fc", "l1-fc", "uniform-fc")}
BUDGETS = {
    "smoke": Budget(
        "tiny networks on embedded stand-ins, to see that everything works", _smoke, rounds=1, batch_size=8
    ),
    "cpu": Budget(
        "our recipes for ordinary processors",
        _cpu,
        {f"{data}/{method}": 3 for data, methods in _SEVERAL.items() for method in methods},
    ),
    "paper": Budget("the paper's iterations and settings, for a machine with GPUs", _paper),
}


def differences(settings: Mapping[str, Any], benchmark: Benchmark, method: str) -> dict[str, tuple[Any, Any]]:
    """In what the settings of a run differ from the paper's: name -> (the paper's, the run's).

    Args:
        settings: as a row of ``results.csv`` has them.
        benchmark, method: the cell.
    """
    from torchcaps.lab.results import OPEN, all_settings

    paper = all_settings(BUDGETS["paper"].config(benchmark, method, 0))
    pairs = {name: (paper.get(name), value) for name, value in settings.items() if name not in BOOKKEEPING}
    idle = () if settings.get("optimiser.schedule") == "staircase" else ("optimiser.decay", "optimiser.decay_every")
    return {
        name: pair
        for name, pair in pairs.items()
        if pair[0] != pair[1] and name not in idle and not any(part in OPEN for part in pair)
    }
