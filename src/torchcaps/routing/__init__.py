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

__getattr__, __dir__ = attach(
    __name__,
    {
        "Routing": "torchcaps.routing.base",
        "SharedRouting": "torchcaps.routing.base",
        "ClusteringRouting": "torchcaps.routing.clustering",
        "DiscriminativeRouting": "torchcaps.routing.discriminative",
        "L1Routing": "torchcaps.routing.discriminative",
        "L2Routing": "torchcaps.routing.discriminative",
        "DynamicRouting": "torchcaps.routing.dynamic",
        "EMRouting": "torchcaps.routing.em",
        "LearnedRouting": "torchcaps.routing.learned",
        "ROUTINGS": "torchcaps.routing.registry",
        "UniformRouting": "torchcaps.routing.uniform",
        "DenseVotes": "torchcaps.routing.votes",
        "LinearVotes": "torchcaps.routing.votes",
        "Votes": "torchcaps.routing.votes",
    },
)
