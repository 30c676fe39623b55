"""Sums over votes that are linear in the input poses, without ever holding all the votes.

The votes û_j|i = W_ij u_i of a batch are a (B, I, J, E) tensor: 94 MB for the paper's MNIST network, 9.4 GB
with a thousand classes. Both things a routing does with them are matrix products per output capsule, so a
loop over output capsules needs the memory of one; and with coefficients that all images share, the sum of the
votes is one product with the folded weights. The backward passes rebuild what they need instead of keeping it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["fold", "vote_agreement", "weighted_vote_sum"]

CHUNK = 2**21  # weights looked at in one go


def fold(weight: Tensor, coefficients: Tensor) -> Tensor:
    """b ⊙ W, the weights with the coefficients that all images share multiplied in.

    Shapes: (I, D, J, E), (I, J) -> (I, D, J, E). To be used in one operation only: its gradient is overwritten.
    The product rule would take two more arrays of the weights' size; with many classes these are gigabytes.
    """
    return _Fold.apply(weight, coefficients)  # type: ignore[no-any-return, no-untyped-call]


def weighted_vote_sum(poses: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
    """Σ_i c_ij W_ij u_i with coefficients of each image's own.

    Shapes: (B, I, D), (I, D, J, E), (B, I, J) -> (B, J, E).
    """
    return _WeightedVoteSum.apply(poses, weight, coefficients)  # type: ignore[no-any-return, no-untyped-call]


def vote_agreement(poses: Tensor, weight: Tensor, outputs: Tensor) -> Tensor:
    """(W_ij u_i) · s_j, how far each vote agrees with the output capsule it votes for.

    Shapes: (B, I, D), (I, D, J, E), (B, J, E) -> (B, I, J).
    """
    return _VoteAgreement.apply(poses, weight, outputs)  # type: ignore[no-any-return, no-untyped-call]


def _by_output(weight: Tensor) -> Tensor:
    """(I, D, J, E) -> (J, I * D, E): one plain matrix for each output capsule."""
    I, D, J, E = weight.shape
    return weight.permute(2, 0, 1, 3).reshape(J, I * D, E)


def _to_weight(by_output: Tensor, like: Tensor) -> Tensor:
    """(J, I * D, E) -> (I, D, J, E)."""
    I, D, J, E = like.shape
    return by_output.view(J, I, D, E).permute(1, 2, 0, 3)


class _Fold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, coefficients: Tensor) -> Tensor:
        ctx.save_for_backward(weight, coefficients)
        return weight * coefficients[:, None, :, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, coefficients = ctx.saved_tensors
        needs_weight, needs_coefficients = ctx.needs_input_grad
        grad_coefficients = torch.empty_like(coefficients) if needs_coefficients else None
        if grad_coefficients is not None:
            for part in _chunks(weight):
                torch.sum(grad[part] * weight[part], (1, 3), out=grad_coefficients[part])
        # In place: the folded weights go into one product only, whose gradient nobody else holds.
        return grad.mul_(coefficients[:, None, :, None]) if needs_weight else None, grad_coefficients


def _chunks(weight: Tensor) -> Iterator[slice]:
    """Stretches of input capsules with about CHUNK weights each."""
    step = max(1, CHUNK // weight[0].numel())
    return (slice(start, start + step) for start in range(0, weight.shape[0], step))


class _WeightedVoteSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, poses: Tensor, weight: Tensor, coefficients: Tensor) -> Tensor:
        ctx.save_for_backward(poses, weight, coefficients)
        matrices = _by_output(weight)
        sums = poses.new_empty(len(matrices), len(poses), weight.shape[3])  # (J, B, E)
        for j, matrix in enumerate(matrices):
            torch.mm((poses * coefficients[:, :, j, None]).flatten(1), matrix, out=sums[j])
        return sums.transpose(0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        poses, weight, coefficients = ctx.saved_tensors
        matrices = _by_output(weight)
        grad_sums = grad.transpose(0, 1).contiguous()  # (J, B, E)
        grad_poses = torch.zeros_like(poses)
        grad_matrices = torch.empty_like(matrices) if ctx.needs_input_grad[1] else None
        grad_coefficients = poses.new_empty(coefficients.shape[2], *coefficients.shape[:2])  # (J, B, I)
        for j, matrix in enumerate(matrices):
            of_output = coefficients[:, :, j, None]
            back = (grad_sums[j] @ matrix.mT).view_as(poses)
            torch.sum(back * poses, 2, out=grad_coefficients[j])
            grad_poses.addcmul_(back, of_output)
            if grad_matrices is not None:
                torch.mm((poses * of_output).flatten(1).mT, grad_sums[j], out=grad_matrices[j])
        grad_weight = None if grad_matrices is None else _to_weight(grad_matrices, weight)
        return grad_poses, grad_weight, grad_coefficients.permute(1, 2, 0)


class _VoteAgreement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, poses: Tensor, weight: Tensor, outputs: Tensor) -> Tensor:
        ctx.save_for_backward(poses, weight, outputs)
        agreement = poses.new_empty(outputs.shape[1], *poses.shape[:2])  # (J, B, I)
        for j, matrix in enumerate(_by_output(weight)):
            torch.sum((outputs[:, j] @ matrix.mT).view_as(poses) * poses, 2, out=agreement[j])
        return agreement.permute(1, 2, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        poses, weight, outputs = ctx.saved_tensors
        matrices = _by_output(weight)
        grad_poses = torch.zeros_like(poses)
        grad_matrices = torch.empty_like(matrices) if ctx.needs_input_grad[1] else None
        grad_outputs = torch.empty_like(outputs)
        for j, matrix in enumerate(matrices):
            of_output = grad[:, :, j, None]
            grad_poses.addcmul_((outputs[:, j] @ matrix.mT).view_as(poses), of_output)
            weighted = (poses * of_output).flatten(1)  # (B, I * D)
            grad_outputs[:, j] = weighted @ matrix
            if grad_matrices is not None:
                torch.mm(weighted.mT, outputs[:, j], out=grad_matrices[j])
        grad_weight = None if grad_matrices is None else _to_weight(grad_matrices, weight)
        return grad_poses, grad_weight, grad_outputs
