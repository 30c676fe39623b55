"""What a routing may ask of the votes, so that it need not hold them all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from torchcaps import functional
from torchcaps.ops.blocked_votes import BlockedVotes, can_block, in_blocks
from torchcaps.ops.linear_votes import VotesByOutput, by_output, fold
from torchcaps.ops.products import multiply


def softmax_over_outputs(logits: Tensor) -> Tensor:
    """The softmax over output capsules of logits (B, I, J).

    Agreement is computed output by output, and stays in that order in memory: a softmax over the last dimension would
    reorder it, and all that follows would be slow.
    """
    return logits.movedim(2, 0).softmax(0).movedim(0, 2)


class Votes(ABC):
    """The votes û_j|i of I input capsules for J output capsules, for a batch of B images."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(B, I, J, E)"""

    @abstractmethod
    def dense(self) -> Tensor:
        """All votes as one (B, I, J, E) tensor: simple, and large."""

    @abstractmethod
    def combine(self, coefficients: Tensor | float) -> Tensor:
        """Σ_i c_ij û_j|i (Eq. dcap) -> (B, J, E).

        Coefficients: (B, I, J) for each image its own, (I, J) shared by all images, or one number for all.
        """

    @abstractmethod
    def agreement(self, poses: Tensor) -> Tensor:
        """û_j|i · s_j for output poses (B, J, E) -> (B, I, J)."""


class DenseVotes(Votes):
    """Votes that exist as a tensor: the form everyone writes, and the reference for the others."""

    def __init__(self, votes: Tensor) -> None:
        self._votes = votes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, I, J, E = self._votes.shape
        return B, I, J, E

    def dense(self) -> Tensor:
        return self._votes

    def combine(self, coefficients: Tensor | float) -> Tensor:
        if isinstance(coefficients, Tensor):
            return (self._votes * coefficients[..., None]).sum(1)
        return coefficients * self._votes.sum(1)

    def agreement(self, poses: Tensor) -> Tensor:
        return (self._votes * poses[:, None]).sum(-1)


class LinearVotes(Votes):
    """Votes û_j|i = W_ij u_i, kept as the poses u (B, I, D) and the weights W (I, D, J, E), for one forward pass."""

    def __init__(self, poses: Tensor, weight: Tensor) -> None:
        self._poses = poses
        self._weight = weight

    @property
    def shape(self) -> tuple[int, int, int, int]:
        I, _, J, E = self._weight.shape
        return self._poses.shape[0], I, J, E  # not len(), which export would take for a constant

    def dense(self) -> Tensor:
        return functional.votes(self._poses, self._weight)

    def combine(self, coefficients: Tensor | float) -> Tensor:
        I, D, J, E = self._weight.shape
        if not isinstance(coefficients, Tensor):
            totals = multiply(self._poses.flatten(1), self._weight.reshape(I * D, J * E)).view(-1, J, E)
            return totals if coefficients == 1.0 else coefficients * totals
        B = self._poses.shape[0]
        coefficients = coefficients.expand((I, J) if coefficients.ndim == 2 else (B, I, J))
        traced = self._ordinary_only()
        if coefficients.ndim == 3:
            if traced:
                return DenseVotes(self.dense()).combine(coefficients)
            return self._sums.weighted_sum(coefficients)
        # With shared coefficients the votes and their sum are one matrix product.
        folded = self._weight * coefficients[:, None, :, None] if traced else fold(self._weight, coefficients)
        return LinearVotes(self._poses, folded).combine(1.0)

    def agreement(self, poses: Tensor) -> Tensor:
        if self._ordinary_only():
            return DenseVotes(self.dense()).agreement(poses)
        return self._sums.agreement(poses)

    @cached_property
    def _sums(self) -> BlockedVotes | VotesByOutput:
        lay_out = in_blocks if can_block(self._poses, self._weight) else by_output
        with torch.enable_grad():  # whoever asks first may do without gradients, and the next one not
            return lay_out(self._poses, self._weight)

    def _ordinary_only(self) -> bool:
        """Whether only ordinary operations will do."""
        device = self._poses.device.type
        return not functional.runs_eagerly() or device == "meta" or torch.is_autocast_enabled(device)
