"""Dynamic routing by agreement (Sabour, Frosst and Hinton, "Dynamic routing between capsules", NIPS 2017)."""

from __future__ import annotations

from typing import final

from torch import Tensor

from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.routing.base import Routing, checked_iterations
from torchcaps.routing.votes import Votes, softmax_over_outputs

LARGEST_START = 0.5
"""Standard deviation of the weights that a layer with few inputs starts with at most."""


def dynamic_coefficients(votes: Votes, *, iterations: int = 3) -> Tensor | float:
    """The coefficients of the last iteration: (B, I, J), or 1 / J if there is only one."""
    J = votes.shape[2]
    coefficients: Tensor | float = 1.0 / J  # with all logits at zero the first softmax is 1 / J
    logits: Tensor | None = None
    for _ in range(iterations - 1):
        agreement = votes.agreement(capsules_from_totals(votes.combine(coefficients)).poses)  # (B, I, J)
        logits = agreement if logits is None else logits + agreement
        coefficients = softmax_over_outputs(logits)  # Eq. rsftmx
    return coefficients


def dynamic_routing(votes: Votes, *, iterations: int = 3) -> Capsules:
    """Give each image coefficients of its own, raising those of votes that agree with the outcome."""
    return capsules_from_totals(votes.combine(dynamic_coefficients(votes, iterations=iterations)))  # Eq. dcap


@final
class DynamicRouting(Routing):
    """Routing by agreement: what the paper compares itself with.

    Args:
        iterations: how often coefficients and capsules are computed, the last time included.

    >>> DynamicRouting(iterations=2).iterations
    2

    Differs from the paper: the loss is differentiated through all iterations; some public implementations
    treat the coefficients of all but the last iteration as constants.
    """

    weight_std = 0.1

    def __init__(self, *, iterations: int = 3) -> None:
        super().__init__()
        self.iterations = checked_iterations(iterations)

    def start_std(self, fan_in: int) -> float:
        # Agreement is of each vote by itself: among few long ones, the first softmax would decide for good.
        return min(super().start_std(fan_in), LARGEST_START)

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return dynamic_routing(votes, iterations=self.iterations)

    def coefficients_for(self, votes: Votes, activations: Tensor) -> Tensor | float:
        return dynamic_coefficients(votes, iterations=self.iterations)
