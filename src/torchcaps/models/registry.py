"""Networks by name, in the manner of timm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from typing import Any

from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.models.cnn import ConvolutionalNetwork
from torchcaps.models.matrix import MatrixCapsuleNetwork

ARCHITECTURES: dict[str, tuple[Callable[..., Network], dict[str, Any]]] = {
    "capsnet-mnist": (CapsuleNetwork, {"image_shape": (1, 28, 28)}),
    "capsnet-multi-mnist": (CapsuleNetwork, {"image_shape": (1, 36, 36), "labels_per_image": 2}),
    "capsnet-cifar": (
        CapsuleNetwork,
        {
            "image_shape": (3, 24, 24),
            "primary_capsules": 64,
            "negative_slope": 0.2,
            "reconstruction": False,
            "mean": (0.4914, 0.4822, 0.4465),
            "std": (0.2470, 0.2435, 0.2616),
        },
    ),
    "capsnet-deep": (CapsuleNetwork, {"image_shape": (1, 28, 28), "layers": ((32, 8),)}),
    "matrix-small": (MatrixCapsuleNetwork, {"image_shape": (1, 28, 28), "matrix_sizes": (64, 8, 16, 16)}),
    "matrix-large": (MatrixCapsuleNetwork, {"image_shape": (1, 28, 28), "matrix_sizes": (32, 32, 32, 32)}),
    "cnn": (ConvolutionalNetwork, {"image_shape": (1, 28, 28)}),
}
"""Each name's class, and the arguments that make it what it is."""


def list_models(pattern: str = "*") -> list[str]:
    """The names that :func:`create_model` knows.

    Args:
        pattern: only those that match it; * stands for anything.

    >>> list_models("capsnet-m*")
    ['capsnet-mnist', 'capsnet-multi-mnist']
    """
    return sorted(name for name in ARCHITECTURES if fnmatch(name, pattern))


def create_model(name: str, *, classes: int | Sequence[str] = 10, **arguments: Any) -> Network:
    """A network by name, with fresh weights.

    Args:
        name: one of :func:`list_models`.
        classes: how many, or their names.
        arguments: those of the network's class, such as ``routing``, ``image_shape`` or ``reconstruction``.

    >>> create_model("capsnet-mnist", classes=5, reconstruction=False).numbers()
    6072704
    """
    if name not in ARCHITECTURES:
        raise UserError(f"There is no model {name!a}: choose one of {', '.join(list_models())}.")
    kind, own = ARCHITECTURES[name]
    return kind(classes=classes, **{**own, **arguments})
