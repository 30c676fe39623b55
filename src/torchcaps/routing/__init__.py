"""Routings: one paper, one file, one entry in :data:`ROUTINGS`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from torchcaps.errors import UserError
from torchcaps.routing.base import Routing, SharedRouting
from torchcaps.routing.clustering import ClusteringRouting, clustering_objective, clustering_routing
from torchcaps.routing.discriminative import DiscriminativeRouting, L1Routing, L2Routing
from torchcaps.routing.dynamic import DynamicRouting, dynamic_routing
from torchcaps.routing.em import EMRouting, em_routing
from torchcaps.routing.learned import LearnedRouting
from torchcaps.routing.uniform import UniformRouting
from torchcaps.routing.votes import DenseVotes, LinearVotes, Votes

__all__ = [
    "ROUTINGS",
    "ClusteringRouting",
    "DenseVotes",
    "DiscriminativeRouting",
    "DynamicRouting",
    "EMRouting",
    "L1Routing",
    "L2Routing",
    "LearnedRouting",
    "LinearVotes",
    "Routing",
    "SharedRouting",
    "UniformRouting",
    "Votes",
    "clustering_objective",
    "clustering_routing",
    "dynamic_routing",
    "em_routing",
    "make_routing",
]

ROUTINGS: dict[str, type[Routing]] = {
    "l2": L2Routing,
    "l1": L1Routing,
    "dynamic": DynamicRouting,
    "uniform": UniformRouting,
    "learned": LearnedRouting,
    "em": EMRouting,
    "clustering": ClusteringRouting,
}


def make_routing(name: str, **settings: Any) -> Routing:
    """A routing by its name in :data:`ROUTINGS`, or ``module:Class`` for one of your own.

    Of the settings, a routing is given those that its constructor names.

    >>> make_routing("dynamic", iterations=2, start=1.0).iterations
    2
    """
    factory = _routing_class(name)
    accepted = inspect.signature(factory).parameters
    try:
        return factory(**{key: value for key, value in settings.items() if key in accepted})
    except (TypeError, ValueError) as error:
        raise UserError(f"Cannot make the routing '{name}': {error}.") from error


def _routing_class(name: str) -> type[Routing]:
    if name in ROUTINGS:
        return ROUTINGS[name]
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UserError(f"Unknown routing '{name}'. Choose one of {', '.join(ROUTINGS)}, or module:Class.")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a module of the user's own does when it is imported
        raise UserError(f"Could not load the routing '{name}': {error}.") from error
    if not (inspect.isclass(found) and issubclass(found, Routing)):
        raise UserError(f"'{name}' is not a subclass of torchcaps.routing.Routing.")
    return found
