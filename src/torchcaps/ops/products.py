"""Products of float32 matrices, by whichever of torch's two libraries is the faster one here.

Torch leaves them to MKL, whose AVX-512 code is for Intel's processors: on AMD's it does less than half of what they
can. oneDNN, by which torch convolves, makes no such difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchcaps.ops.plan import runs_eagerly_on_cpu

LEAST = 2**21  # multiplications of a product; with fewer, handing it over costs what it saves


def multiply(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``torch.matmul(left, right, out=out)`` of two matrices, or of equally many on both sides.

    >>> multiply(torch.ones(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """
    if not _suits_onednn(left, right):
        return torch.matmul(left, right, out=out)
    if out is None:
        return _Product.apply(left, right)  # type: ignore[no-any-return, no-untyped-call]
    return _by_onednn(left, right, out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the products of equally many matrices to ``total``, in place: (n, m, k), (n, k, l) to (n, m, l)."""
    if _suits_onednn(left, right):
        total += _by_onednn(left, right)
    else:
        total.baddbmm_(left, right)


def _suits_onednn(left: Tensor, right: Tensor) -> bool:
    # First of all, because of a traced tensor not even the size is known.
    if not runs_eagerly_on_cpu(left, right) or left.dtype != torch.float32 or _onednn() is None:
        return False
    if not 2 <= left.ndim == right.ndim <= 3:
        return False
    return left.shape[-2] * left.shape[-1] * right.shape[-1] >= LEAST


@lru_cache
def _onednn() -> Callable[..., Tensor] | None:
    """torch's x @ w.T by oneDNN, if that is the faster way on this processor."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    amd = capabilities.get("sse4a")  # which no other maker has
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None) if amd and capabilities.get("avx512_f") else None


def _by_onednn(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    linear = _onednn()
    assert linear is not None
    if left.ndim == 2:
        result = linear(left, right.mT, None, "none", [], "")
        return result if out is None else out.copy_(result)
    out = left.new_empty(*left.shape[:-1], right.shape[-1]) if out is None else out
    for one, other, result in zip(left.unbind(), right.unbind(), out.unbind()):
        result.copy_(linear(one, other.mT, None, "none", [], ""))
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return _by_onednn(left, right)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        needs_left, needs_right = ctx.needs_input_grad
        return multiply(grad, right.mT) if needs_left else None, multiply(left.mT, grad) if needs_right else None
