"""Discriminative routing (Yang, Li and Yu, "Routing towards discriminative power of class capsules")."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import softshrink

from torchcaps.functional import PENALTIES
from torchcaps.routing.base import SharedRouting


class DiscriminativeRouting(SharedRouting):
    """One coefficient per pair of capsules, shared by all images, any sign, moved by ascending ``r``.

    The forward pass is a weighted sum of votes. What is special happens in training: the coefficients do
    not descend the loss, they ascend :func:`torchcaps.functional.routing_objective` of the class capsules
    (:mod:`torchcaps.train.ascent`). At test time they are constants: no iterations, no labels.

    Differs from the paper: the start value is not given there; 1 is that of the authors' early code.
    """

    penalty: ClassVar[str]

    def __init__(self, *, start: float = 1.0, strength: float = 1e-5) -> None:
        super().__init__()
        if strength < 0:
            raise ValueError(f"strength (λ) must not be negative, got {strength}")
        self.strength = strength
        self._start = start

    def connect(self, inputs: int, outputs: int, output_size: int) -> None:
        self.coefficients: nn.Parameter = nn.Parameter(torch.full((inputs, outputs), self._start))

    def regulariser(self) -> Tensor:
        """λ times the penalty on this layer's coefficients, to be subtracted from the discriminative power."""
        return self.strength * PENALTIES[self.penalty](self.coefficients)

    @abstractmethod
    def shrink(self, step: float) -> None:
        """The proximal step of the penalty, for an ascent step of size γ: ours, in place of its gradient."""

    @torch.no_grad()
    def shrink_groups(self, step: float, groups: int) -> None:
        """The proximal step of the group penalty 2λ Σ_g √n ‖b_g‖ over groups of n coefficients: ours.

        Input capsule i belongs to group i modulo ``groups``: its type, if there are as many types as groups. What is
        not worth its penalty becomes zero for all output capsules at once, and can be pruned. The factor √n makes it
        as strong as the L1 penalty is on coefficients that are all alike.
        """
        inputs, outputs = self.coefficients.shape
        grouped = self.coefficients.view(inputs // groups, groups, outputs)
        norms = torch.linalg.vector_norm(grouped, dim=(0, 2), keepdim=True)
        threshold = 2 * step * self.strength * math.sqrt(inputs // groups * outputs)
        grouped.mul_((1 - threshold / norms.clamp_min(torch.finfo(norms.dtype).tiny)).clamp_min(0))


@final
class L2Routing(DiscriminativeRouting):
    """Discriminative routing with the penalty λ‖b‖² (Eq. obj-2)."""

    penalty = "l2"

    @torch.no_grad()
    def shrink(self, step: float) -> None:
        self.coefficients.div_(1 + 2 * step * self.strength)


@final
class L1Routing(DiscriminativeRouting):
    """Discriminative routing with the penalty λ‖b‖₁ (Eq. obj-3), doubled as in the printed update."""

    penalty = "l1"

    @torch.no_grad()
    def shrink(self, step: float) -> None:
        """Soft thresholding, which sets a coefficient to exactly zero where a gradient would step over it."""
        self.coefficients.copy_(softshrink(self.coefficients, 2 * step * self.strength))
