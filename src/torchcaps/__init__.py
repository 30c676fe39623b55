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

_MODULES = {
    "ascent": ("RoutingAscent",),
    "functional": ("margin_loss", "spread_loss", "squash"),
    "layers.capsule": ("CapsuleLayer",),
    "layers.decoder": ("Decoder",),
    "layers.primary": ("PrimaryCapsules",),
    "models.capsnet": ("CapsuleNetwork",),
    "models.files": ("load", "pretrained"),
    "models.registry": ("create_model", "list_models"),
    "optim": ("Muon",),
    "routing.clustering": ("ClusteringRouting",),
    "routing.discriminative": ("L1Routing", "L2Routing"),
    "routing.dynamic": ("DynamicRouting",),
    "routing.em": ("EMRouting",),
    "routing.learned": ("LearnedRouting",),
    "routing.uniform": ("UniformRouting",),
}
__getattr__, __dir__, __all__ = attach(__name__, _MODULES)
