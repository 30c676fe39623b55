"""Sums over votes that are linear in the input poses, by compiled kernels that make the votes in registers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.ops import compiled
from torchcaps.ops.plan import runs_eagerly_on_cpu

LANES = 16  # input capsules side by side
MANY = 2**18  # numbers of all votes; with fewer it does not matter how they are summed


def can_block(poses: Tensor, weight: Tensor) -> bool:
    """Whether :func:`in_blocks` can take these, and pays."""
    # First of all, because of a traced tensor not even the size is known.
    if not runs_eagerly_on_cpu(poses, weight) or poses.dtype != torch.float32:
        return False
    I, D, J, E = weight.shape
    if poses.shape[0] * I * J * E < MANY or I % LANES or D % 2 or E % 2:
        return False
    return compiled.native("native_votes") is not None


def in_blocks(poses: Tensor, weight: Tensor) -> BlockedVotes:
    """Poses and weights laid out for the kernels, input capsules side by side: (B, I, D), (I, D, J, E)."""
    (B, I, D), (J, E) = poses.shape, weight.shape[2:]
    return BlockedVotes(
        poses.reshape(B, I // LANES, LANES, D).permute(1, 0, 3, 2).contiguous(),
        weight.reshape(I // LANES, LANES, D, J, E).permute(0, 3, 4, 2, 1).contiguous(),
    )


class BlockedVotes(NamedTuple):
    """What :class:`torchcaps.ops.linear_votes.VotesByOutput` offers."""

    poses: Tensor  # (I / LANES, B, D, LANES)
    weights: Tensor  # (I / LANES, J, E, D, LANES)

    def weighted_sum(self, coefficients: Tensor) -> Tensor:
        blocks, B, _, _ = self.poses.shape
        coefficients = coefficients.to(self.poses).expand(B, blocks * LANES, self.weights.shape[1])
        return _WeightedSum.apply(self.poses, self.weights, coefficients)  # type: ignore[no-any-return, no-untyped-call]

    def agreement(self, outputs: Tensor) -> Tensor:
        outputs = outputs.to(self.poses).expand(self.poses.shape[1], *self.weights.shape[1:3])
        return _Agreement.apply(self.poses, self.weights, outputs)  # type: ignore[no-any-return, no-untyped-call]


def _run(kernel: str, poses: Tensor, weights: Tensor, **others: Tensor) -> None:
    blocks, images, input_size, _ = poses.shape
    _, output_count, output_size, _, _ = weights.shape
    sizes = {"blocks": blocks, "images": images, "input_size": input_size}
    outputs = {"output_count": output_count, "output_size": output_size}
    compiled.run("native_votes", kernel, "VOTES", poses=poses, weights=weights, **sizes, **outputs, **others)


def _gradients(poses: Tensor, weights: Tensor, **tensors: Tensor) -> tuple[Tensor, Tensor]:
    of_poses, of_weights = torch.empty_like(poses), torch.empty_like(weights)
    _run("gradients", poses, weights, grad_poses=of_poses, grad_weights=of_weights, **tensors)
    return of_poses, of_weights


def _by_output(coefficients: Tensor) -> Tensor:
    """(B, I, J) -> (J, B, I), the order in memory of what :meth:`BlockedVotes.agreement` returns."""
    return coefficients.movedim(2, 0).contiguous()


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, poses: Tensor, weights: Tensor, coefficients: Tensor) -> Tensor:
        coefficients = _by_output(coefficients)
        ctx.save_for_backward(poses, weights, coefficients)
        result = poses.new_empty(poses.shape[1], *weights.shape[1:3])
        _run("weighted_sum", poses, weights, coefficients=coefficients, result=result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        poses, weights, coefficients = ctx.saved_tensors
        agreement = torch.empty_like(coefficients)
        arrays = {"coefficients": coefficients, "outputs": grad.contiguous(), "result": agreement}
        return *_gradients(poses, weights, **arrays), agreement.movedim(0, 2)


class _Agreement(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, poses: Tensor, weights: Tensor, outputs: Tensor) -> Tensor:
        outputs = outputs.contiguous()
        ctx.save_for_backward(poses, weights, outputs)
        blocks, images, _, _ = poses.shape
        result = poses.new_empty(weights.shape[1], images, blocks * LANES)
        _run("agreement", poses, weights, outputs=outputs, result=result)
        return result.movedim(0, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        poses, weights, outputs = ctx.saved_tensors
        coefficients, of_outputs = _by_output(grad), torch.empty_like(outputs)
        _run("weighted_sum", poses, weights, coefficients=coefficients, result=of_outputs)
        return *_gradients(poses, weights, coefficients=coefficients, outputs=outputs), of_outputs
