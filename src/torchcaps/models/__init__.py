"""Whole networks."""

from torchcaps.models.base import Network, Output
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.models.cnn import ConvolutionalNetwork
from torchcaps.models.matrix import MatrixCapsuleNetwork
from torchcaps.models.spec import MODELS, NetworkSpec, load_network, save_network

__all__ = [
    "MODELS",
    "CapsuleNetwork",
    "ConvolutionalNetwork",
    "MatrixCapsuleNetwork",
    "Network",
    "NetworkSpec",
    "Output",
    "load_network",
    "save_network",
]
