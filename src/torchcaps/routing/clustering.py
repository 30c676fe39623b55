"""Routing as regularised clustering (Wang and Liu, "An optimization view on dynamic routing between capsules").

Votes are shared out among the output capsules so that they point the way their capsule does, while the shares of an
input capsule move only so far from where they were:

    minimise over c, s:   −Σ_ij c_ij û_j|i · s_j + α Σ_i KL(c_i ‖ last c_i),   Σ_j c_ij = 1,   ‖s_j‖ ≤ 1,

from even shares. Given one of c and s, the best other is a closed form; the two in turn are coordinate descent, and the
first term, the loss of the clustering, falls with every turn. As dynamic routing's, the logits of the shares add up.
With the entropy Σ_ij c_ij log c_ij in place of the divergence they do not: the second solution of the paper.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from torchcaps.functional import Capsules
from torchcaps.routing.base import Routing, checked_iterations
from torchcaps.routing.votes import Votes, softmax_over_outputs


def clustering_objective(
    votes: Votes, coefficients: Tensor, directions: Tensor, last: Tensor, *, alpha: float
) -> Tensor:
    """What a turn minimises, for each image: shares now and before (B, I, J), directions (B, J, E) -> (B,)."""
    agreement = (coefficients * votes.agreement(directions)).sum((1, 2))
    divergence = (torch.xlogy(coefficients, coefficients) - torch.xlogy(coefficients, last)).sum((1, 2))
    return alpha * divergence - agreement


def best_coefficients(votes: Votes, directions: Tensor, last: Tensor, *, alpha: float) -> Tensor:
    """The shares (B, I, J) that minimise the objective, given the directions and the shares before."""
    return (last.log() + votes.agreement(directions) / alpha).softmax(2)


def best_directions(totals: Tensor) -> Tensor:
    """The directions (B, J, E) that minimise the objective, given Σ_i c_ij û_j|i: theirs, at length one."""
    return F.normalize(totals, dim=-1, eps=1e-6)


def clustering_coefficients(
    votes: Votes, *, iterations: int = 3, alpha: float = 1.0, regulariser: str = "divergence"
) -> Tensor | float:
    """The shares after coordinate descent from even ones: (B, I, J), or 1 / J if there is one iteration only."""
    coefficients: Tensor | float = 1.0 / votes.shape[2]
    logits: Tensor | None = None
    for _ in range(iterations - 1):
        pull = votes.agreement(best_directions(votes.combine(coefficients))) / alpha
        logits = pull if logits is None or regulariser == "entropy" else logits + pull
        coefficients = softmax_over_outputs(logits)  # as best_coefficients, without rounding
    return coefficients


def clustering_routing(
    votes: Votes, *, iterations: int = 3, alpha: float = 1.0, regulariser: str = "divergence"
) -> Capsules:
    """Coordinate descent from even shares, ``iterations`` times; no dense votes are held."""
    shares = clustering_coefficients(votes, iterations=iterations, alpha=alpha, regulariser=regulariser)
    totals = votes.combine(shares)
    lengths = torch.linalg.vector_norm(totals, dim=-1)  # (B, J)
    # One factor for all capsules of an image keeps their lengths in proportion, and below one.
    shrink = 1 / (1 + lengths.amax(1, keepdim=True))
    return Capsules(totals * shrink.unsqueeze(-1), lengths * shrink, totals)


@final
class ClusteringRouting(Routing):
    """Dynamic routing as the descent of an objective, with ``alpha`` the pull towards the shares as they were.

    Args:
        iterations: how often shares and directions are computed.
        alpha: how strongly shares stay as they were, or even, above zero.
        regulariser: "divergence" from the last shares, as in the paper's first solution, whose logits add up; or
            "entropy", its second, which resembles agglomerative fuzzy k-means: Σ_i Σ_j c_ij log c_ij in place of the
            divergence, so that each turn starts afresh.

    >>> ClusteringRouting(alpha=0.5).alpha
    0.5

    Differs from the paper: a vote is taken as it comes instead of being divided by the norm of its matrix W_ij, so that
    ``alpha`` is in the units of a vote. The last step, one factor 1 / (1 + the longest length) for all capsules of an
    image, keeps lengths below one. With Σ_i c_ij û_j|i = 0 every direction is as good, and none is taken.
    """

    weight_std = 0.1

    def __init__(self, *, iterations: int = 3, alpha: float = 1.0, regulariser: str = "divergence") -> None:
        super().__init__()
        if regulariser not in ("divergence", "entropy"):
            raise ValueError(f"regulariser must be 'divergence' or 'entropy', not {regulariser!r}")
        if not alpha > 0:
            raise ValueError(f"alpha must be above zero, not {alpha}")
        self.iterations = checked_iterations(iterations)
        self.alpha = alpha
        self.regulariser = regulariser

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return clustering_routing(votes, iterations=self.iterations, alpha=self.alpha, regulariser=self.regulariser)

    def coefficients_for(self, votes: Votes, activations: Tensor) -> Tensor | float:
        return clustering_coefficients(
            votes, iterations=self.iterations, alpha=self.alpha, regulariser=self.regulariser
        )
