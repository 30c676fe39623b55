"""Capsule networks for PyTorch: the paper's discriminative routing, and what it is compared with.

Nothing is imported before it is used, so that ``import torchcaps`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchcaps._lazy import attach

if TYPE_CHECKING:
    from torchcaps.ascent import RoutingAscent as RoutingAscent
    from torchcaps.functional import margin_loss as margin_loss
    from torchcaps.functional import spread_loss as spread_loss
    from torchcaps.functional import squash as squash
    from torchcaps.layers.capsule import CapsuleLayer as CapsuleLayer
    from torchcaps.layers.decoder import Decoder as Decoder
    from torchcaps.layers.primary import PrimaryCapsules as PrimaryCapsules
    from torchcaps.models.capsnet import CapsuleNetwork as CapsuleNetwork
    from torchcaps.models.files import load as load
    from torchcaps.models.files import pretrained as pretrained
    from torchcaps.models.registry import create_model as create_model
    from torchcaps.models.registry import list_models as list_models
    from torchcaps.optim import Muon as Muon
    from torchcaps.routing.clustering import ClusteringRouting as ClusteringRouting
    from torchcaps.routing.discriminative import L1Routing as L1Routing
    from torchcaps.routing.discriminative import L2Routing as L2Routing
    from torchcaps.routing.dynamic import DynamicRouting as DynamicRouting
    from torchcaps.routing.em import EMRouting as EMRouting
    from torchcaps.routing.learned import LearnedRouting as LearnedRouting
    from torchcaps.routing.uniform import UniformRouting as UniformRouting

__version__ = "0.2.0"

_HOMES = {
    "CapsuleLayer": "torchcaps.layers.capsule",
    "CapsuleNetwork": "torchcaps.models.capsnet",
    "ClusteringRouting": "torchcaps.routing.clustering",
    "Decoder": "torchcaps.layers.decoder",
    "DynamicRouting": "torchcaps.routing.dynamic",
    "EMRouting": "torchcaps.routing.em",
    "L1Routing": "torchcaps.routing.discriminative",
    "L2Routing": "torchcaps.routing.discriminative",
    "LearnedRouting": "torchcaps.routing.learned",
    "Muon": "torchcaps.optim",
    "PrimaryCapsules": "torchcaps.layers.primary",
    "RoutingAscent": "torchcaps.ascent",
    "UniformRouting": "torchcaps.routing.uniform",
    "create_model": "torchcaps.models.registry",
    "list_models": "torchcaps.models.registry",
    "load": "torchcaps.models.files",
    "margin_loss": "torchcaps.functional",
    "pretrained": "torchcaps.models.files",
    "spread_loss": "torchcaps.functional",
    "squash": "torchcaps.functional",
}
__all__ = [*_HOMES]
__getattr__, __dir__ = attach(__name__, _HOMES)
