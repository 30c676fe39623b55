"""Sums over votes that are linear in the input poses, without ever holding all the votes.

The votes û_j|i = W_ij u_i of a batch are a (B, I, J, E) tensor: 94 MB for the paper's MNIST network, 9.4 GB
with a thousand classes. Both things a routing does with them are matrix products per output capsule, so a
loop over output capsules needs the memory of one; and with coefficients that all images share, the sum of the
votes is one product with the folded weights. The backward passes make the votes again instead of keeping them.
With numba, :mod:`torchcaps.ops.blocked_votes` does the same faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["VotesByOutput", "by_output", "fold"]

CHUNK = 2**21  # weights looked at in one go


def fold(weight: Tensor, coefficients: Tensor) -> Tensor:
    """b ⊙ W, the weights with the coefficients that all images share multiplied in.

    Shapes: (I, D, J, E), (I, J) -> (I, D, J, E). To be used in one operation only: its gradient is overwritten.
    The product rule would take two more arrays of the weights' size; with many classes these are gigabytes.
    """
    return _Fold.apply(weight, coefficients)  # type: ignore[no-any-return, no-untyped-call]


class VotesByOutput(NamedTuple):
    """Poses and weights with one plain matrix for each output capsule."""

    planes: Tensor  # (B, D, I)
    matrices: Tensor  # (J, D * I, E)

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        """Σ_i c_ij W_ij u_i with coefficients of each image's own: (B, I, J) -> (B, J, E)."""
        return _WeightedVoteSum.apply(*self, coefficients)  # type: ignore[no-any-return, no-untyped-call]

    def agreement(self, outputs: Tensor) -> Tensor:
        """(W_ij u_i) · s_j, how far each vote agrees with the output capsule it votes for: (B, J, E) -> (B, I, J)."""
        return _VoteAgreement.apply(*self, outputs)  # type: ignore[no-any-return, no-untyped-call]


def by_output(poses: Tensor, weight: Tensor) -> VotesByOutput:
    """Poses (B, I, D) and weights (I, D, J, E) by output capsule.

    Input capsules come last, so that what is multiplied by their coefficients are long rows instead of vectors of a few
    numbers.
    """
    I, D, J, E = weight.shape
    return VotesByOutput(poses.mT.contiguous(), weight.permute(2, 1, 0, 3).reshape(J, D * I, E))


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
    def forward(ctx: Any, planes: Tensor, matrices: Tensor, coefficients: Tensor) -> Tensor:
        ctx.save_for_backward(planes, matrices, coefficients)
        sums = planes.new_empty(len(matrices), len(planes), matrices.shape[2])  # (J, B, E)
        for j, matrix in enumerate(matrices):
            torch.mm((planes * coefficients[:, None, :, j]).flatten(1), matrix, out=sums[j])
        return sums.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # for one image, too, no view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        planes, matrices, coefficients = ctx.saved_tensors
        grad_sums = grad.transpose(0, 1).contiguous()  # (J, B, E)
        grad_planes = torch.zeros_like(planes)
        grad_matrices = torch.empty_like(matrices) if ctx.needs_input_grad[1] else None
        grad_coefficients = planes.new_empty(len(matrices), *coefficients.shape[:2])  # (J, B, I)
        for j, matrix in enumerate(matrices):
            of_output = coefficients[:, None, :, j]
            back = (grad_sums[j] @ matrix.mT).view_as(planes)
            torch.sum(back * planes, 1, out=grad_coefficients[j])
            grad_planes.addcmul_(back, of_output)
            if grad_matrices is not None:
                torch.mm((planes * of_output).flatten(1).mT, grad_sums[j], out=grad_matrices[j])
        return grad_planes, grad_matrices, grad_coefficients.permute(1, 2, 0)


class _VoteAgreement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, planes: Tensor, matrices: Tensor, outputs: Tensor) -> Tensor:
        ctx.save_for_backward(planes, matrices, outputs)
        agreement = planes.new_empty(len(matrices), len(planes), planes.shape[2])  # (J, B, I)
        for j, matrix in enumerate(matrices):
            torch.sum((outputs[:, j] @ matrix.mT).view_as(planes) * planes, 1, out=agreement[j])
        return agreement.permute(1, 2, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        planes, matrices, outputs = ctx.saved_tensors
        grad_planes = torch.zeros_like(planes)
        grad_matrices = torch.empty_like(matrices) if ctx.needs_input_grad[1] else None
        grad_outputs = torch.empty_like(outputs)
        for j, matrix in enumerate(matrices):
            of_output = grad[:, None, :, j]
            grad_planes.addcmul_((outputs[:, j] @ matrix.mT).view_as(planes), of_output)
            weighted = (planes * of_output).flatten(1)  # (B, D * I)
            grad_outputs[:, j] = weighted @ matrix
            if grad_matrices is not None:
                torch.mm(weighted.mT, outputs[:, j], out=grad_matrices[j])
        return grad_planes, grad_matrices, grad_outputs
