"""A routing of one's own with a setting of its own, complete in one file: votes far from the median count less.

Train with it, from the folder this file is in:

    torchcaps train --routing median_routing:MedianRouting --routing-setting sharpness=2

and check that it keeps the contract of a routing:

    python median_routing.py
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.routing import Routing, Votes
from torchcaps.testing import check_routing


@final
class MedianRouting(Routing):
    """Coefficients that fall with a vote's distance from the median vote, the mean over inputs kept at 1.

    Args:
        sharpness: how fast they fall; at 0 all votes count the same.
    """

    weight_std = 0.01
    holds_votes = True

    def __init__(self, *, sharpness: float = 1.0) -> None:
        super().__init__()
        if not sharpness >= 0:
            raise ValueError(f"sharpness must not be negative, got {sharpness}")
        self.sharpness = sharpness

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return capsules_from_totals(votes.combine(self.coefficients_for(votes, activations)))

    def coefficients_for(self, votes: Votes, activations: Tensor) -> Tensor:
        dense = votes.dense()  # (B, I, J, E): a median needs all votes at once
        median = dense.median(dim=1, keepdim=True).values
        distance = (dense - median).square().sum(-1)  # (B, I, J)
        closeness = torch.exp(-self.sharpness * distance)
        return closeness / closeness.mean(1, keepdim=True)


if __name__ == "__main__":
    check_routing(MedianRouting)
    print("MedianRouting keeps the contract.")
