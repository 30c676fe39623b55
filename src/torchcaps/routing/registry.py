"""All routings by name."""

from __future__ import annotations

from torchcaps.routing.base import Routing
from torchcaps.routing.clustering import ClusteringRouting
from torchcaps.routing.discriminative import L1Routing, L2Routing
from torchcaps.routing.dynamic import DynamicRouting
from torchcaps.routing.em import EMRouting
from torchcaps.routing.learned import LearnedRouting
from torchcaps.routing.uniform import UniformRouting

ROUTINGS: dict[str, type[Routing]] = {
    "l2": L2Routing,
    "l1": L1Routing,
    "dynamic": DynamicRouting,
    "uniform": UniformRouting,
    "learned": LearnedRouting,
    "em": EMRouting,
    "clustering": ClusteringRouting,
}


def own_name(routing: type[Routing]) -> str:
    """What a routing is called in a file: its name in :data:`ROUTINGS`, or ``module:Class``.

    >>> own_name(DynamicRouting)
    'dynamic'
    """
    names = {known: name for name, known in ROUTINGS.items()}
    return names.get(routing, f"{routing.__module__}:{routing.__qualname__}")
