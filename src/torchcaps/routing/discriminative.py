"""Discriminative routing (Yang, Li and Yu, "Routing towards discriminative power of class capsules")."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self, final

import torch
from torch import Tensor

from torchcaps.routing.base import SharedRouting, finite


class DiscriminativeRouting(SharedRouting):
    """One coefficient per pair of capsules, shared by all images, any sign, moved by ascending ``r``.

    The forward pass is a weighted sum of votes. What is special happens in training: the coefficients do
    not descend the loss, they ascend :func:`torchcaps.functional.routing_objective` of the class capsules. That is
    why they are a buffer and not among the module's parameters: an optimiser of ``network.parameters()`` leaves
    them alone, and :class:`torchcaps.RoutingAscent` moves them. At test time they are constants: no iterations,
    no labels.

    Args:
        start: value of all coefficients before training.
        strength: λ, the weight of the penalty.

    Differs from the paper: the start value is not given there; 1 is that of the authors' early code.
    """

    penalty: ClassVar[str]
    """"l2" or "l1"."""
    coefficients: Tensor

    def __init__(self, *, start: float = 1.0, strength: float = 1e-5) -> None:
        super().__init__()
        if not strength >= 0:
            raise ValueError(f"strength (λ) must not be negative, got {strength}")
        self.start = finite("start", start)
        self.strength = strength

    def connect(self, inputs: int, outputs: int, output_size: int) -> None:
        self.register_buffer("coefficients", torch.full((inputs, outputs), self.start, requires_grad=True))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to a device or a data type as a parameter does: it remains the tensor that RoutingAscent knows."""
        coefficients = self._buffers.get("coefficients")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if coefficients is not None:
            coefficients.grad = None  # of another device or data type
            moved = self.coefficients.detach()
            if coefficients.is_meta != moved.is_meta:  # a tensor without memory cannot become one that has some
                coefficients = moved.requires_grad_()
            else:
                coefficients.data = moved
            self._buffers["coefficients"] = coefficients
        return self


@final
class L2Routing(DiscriminativeRouting):
    """Discriminative routing with the penalty λ‖b‖² (Eq. obj-2): shared coefficients that ascend ``r``.

    Args:
        start: value of all coefficients before training.
        strength: λ, the weight of the penalty.

    The layer it is given to has ``layer.routing.coefficients`` (I, J), a buffer that :class:`torchcaps.RoutingAscent`
    moves. It has a gradient of its own: ``detach()`` it to look at it.

    >>> import torchcaps
    >>> layer = torchcaps.CapsuleLayer(6, 8, 3, 16, L2Routing(start=0.5))
    >>> layer.routing.coefficients.shape
    torch.Size([6, 3])
    """

    penalty = "l2"


@final
class L1Routing(DiscriminativeRouting):
    """Discriminative routing with the penalty λ‖b‖₁ (Eq. obj-3), doubled as in the printed update.

    Args:
        start: value of all coefficients before training.
        strength: λ, the weight of the penalty.

    >>> L1Routing(strength=1e-3).strength
    0.001
    """

    penalty = "l1"
