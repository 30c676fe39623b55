"""Routings: one paper, one file, one entry in :data:`torchcaps.routing.registry.ROUTINGS`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchcaps._lazy import attach

if TYPE_CHECKING:
    from torchcaps.routing.base import Routing as Routing
    from torchcaps.routing.base import SharedRouting as SharedRouting
    from torchcaps.routing.clustering import ClusteringRouting as ClusteringRouting
    from torchcaps.routing.discriminative import DiscriminativeRouting as DiscriminativeRouting
    from torchcaps.routing.discriminative import L1Routing as L1Routing
    from torchcaps.routing.discriminative import L2Routing as L2Routing
    from torchcaps.routing.dynamic import DynamicRouting as DynamicRouting
    from torchcaps.routing.em import EMRouting as EMRouting
    from torchcaps.routing.learned import LearnedRouting as LearnedRouting
    from torchcaps.routing.registry import ROUTINGS as ROUTINGS
    from torchcaps.routing.uniform import UniformRouting as UniformRouting
    from torchcaps.routing.votes import DenseVotes as DenseVotes
    from torchcaps.routing.votes import LinearVotes as LinearVotes
    from torchcaps.routing.votes import Votes as Votes

_MODULES = {
    "base": ("Routing", "SharedRouting"),
    "clustering": ("ClusteringRouting",),
    "discriminative": ("DiscriminativeRouting", "L1Routing", "L2Routing"),
    "dynamic": ("DynamicRouting",),
    "em": ("EMRouting",),
    "learned": ("LearnedRouting",),
    "registry": ("ROUTINGS",),
    "uniform": ("UniformRouting",),
    "votes": ("DenseVotes", "LinearVotes", "Votes"),
}
__getattr__, __dir__, __all__ = attach(__name__, _MODULES)
