"""The parts of a capsule network that hold weights."""

from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.matrix import ClassMatrixCapsules, ConvMatrixCapsules, PrimaryMatrixCapsules
from torchcaps.layers.primary import PrimaryCapsules

__all__ = [
    "CapsuleLayer",
    "ClassMatrixCapsules",
    "ConvMatrixCapsules",
    "Decoder",
    "PrimaryCapsules",
    "PrimaryMatrixCapsules",
]
