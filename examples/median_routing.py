"""A routing of one's own, complete in one file: votes far from the median of all votes count less.

Train with it, from the folder this file is in:

    torchcaps train --routing median_routing:MedianRouting

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
    """Coefficients that fall with a vote's distance from the median vote, the mean over inputs kept at 1."""

    weight_std = 0.01
    holds_votes = True

    def __init__(self, *, start: float = 1.0) -> None:
        super().__init__()
        self.start = start

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        dense = votes.dense()  # (B, I, J, E): a median needs all votes at once
        median = dense.median(dim=1, keepdim=True).values
        distance = (dense - median).square().sum(-1)  # (B, I, J)
        closeness = torch.exp(-distance)
        coefficients = closeness / closeness.mean(1, keepdim=True)
        return capsules_from_totals(votes.combine(self.start * coefficients))


if __name__ == "__main__":
    check_routing(MedianRouting)
    print("MedianRouting keeps the contract.")
