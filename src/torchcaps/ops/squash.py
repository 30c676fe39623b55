"""The squash of many capsules in one pass, where torch's operations would take a dozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.ops import compiled
from torchcaps.ops.plan import runs_eagerly_on_cpu

MANY = 2**16  # components; with fewer the passes do not matter


def squashed_capsules(totals: Tensor) -> Capsules:
    """:func:`torchcaps.functional.capsules_from_totals`, compiled where that pays."""
    return Capsules(*compiled_squash(totals), totals) if can_squash(totals) else capsules_from_totals(totals)


def can_squash(totals: Tensor) -> bool:
    """Whether :func:`compiled_squash` can take these vectors, and pays."""
    # First of all, because of a traced tensor not even the size is known.
    if not runs_eagerly_on_cpu(totals) or totals.dtype != torch.float32:
        return False
    return totals.numel() >= MANY and compiled.native() is not None


def compiled_squash(totals: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors of the last axis squashed, and their lengths: (..., D) -> (..., D) and (...)."""
    result: tuple[Tensor, Tensor] = _Squash.apply(totals)  # type: ignore[no-untyped-call]
    return result


class _Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, totals: Tensor) -> tuple[Tensor, Tensor]:
        totals = totals.contiguous()
        ctx.save_for_backward(totals)
        poses, lengths = torch.empty_like(totals), totals.new_empty(totals.shape[:-1])
        _run("squash", totals, poses=poses, lengths=lengths)
        return poses, lengths

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_poses: Tensor, of_lengths: Tensor) -> Tensor:
        (totals,) = ctx.saved_tensors
        result = torch.empty_like(totals)
        gradients = {"poses": of_poses.contiguous(), "lengths": of_lengths.contiguous()}
        _run("squash_gradient", totals, result=result, **gradients)
        return result


def _run(kernel: str, totals: Tensor, **others: Tensor) -> None:
    sizes = {"count": others["lengths"].numel(), "size": totals.shape[-1]}
    compiled.run("native", kernel, "SQUASH", totals=totals, **sizes, **others)
