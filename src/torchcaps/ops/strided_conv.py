"""Strided convolution with few multiplications: an eighth, for 9x9 kernels, stride 2 and 6x6 outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.ops.phases import (
    PhaseProducts,
    from_taps,
    new_totals,
    phase_of,
    synthesise,
    synthesise_gradient,
    to_taps,
)
from torchcaps.ops.plan import BilinearPlan, ConvolutionShape, make_plan, pays, runs_eagerly_on_cpu


def strided_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int, padding: int = 0) -> Tensor:
    """The convolution ``torch.nn.functional.conv2d(x, weight, bias, stride, padding)``; on CPUs, a bilinear algorithm.

    (B, C, rows, cols) and (O, C, k, k) -> (B, O, H, W). Where the algorithm does not pay or does not apply (other
    devices and dtypes, autocast, compilers, small batches), this *is* ``conv2d``. Otherwise it rounds a little more:
    in float32 about 2e-6 to 1e-4 rms relative, growing with the tile; ``conv2d`` itself has about 1e-6.

    >>> x, weight = torch.randn(2, 3, 28, 28), torch.randn(8, 3, 9, 9)
    >>> strided_conv2d(x, weight, stride=2).shape
    torch.Size([2, 8, 10, 10])
    """
    if runs_eagerly_on_cpu(x, weight, bias) and x.dim() == weight.dim() == 4 and x.shape[1] == weight.shape[1]:
        shape = ConvolutionShape.of(len(x), (x.shape[2], x.shape[3]), weight, stride, padding)
        if weight.shape[2] == weight.shape[3] and pays(shape):
            return bilinear_conv2d(x, weight, bias, stride, padding=padding)
    return F.conv2d(x, weight, bias, stride, padding)


def bilinear_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int,
    tile: tuple[int, int] | None = None,
    *,
    padding: int = 0,
) -> Tensor:
    """``strided_conv2d`` by the bilinear algorithm, whether or not it pays."""
    plan = make_plan(ConvolutionShape.of(len(x), (x.shape[2], x.shape[3]), weight, stride, padding), x.dtype, tile)
    result: Tensor = _StridedConv2d.apply(x, weight, bias, plan)  # type: ignore[no-untyped-call]
    return result


def samples_of(x: Tensor, p: int, q: int, plan: BilinearPlan) -> Tensor:
    """One phase of (cols, rows, B, C), as far as outputs depend on it: (S, R, B, C)."""
    row, col = plan.rows.phases[p], plan.cols.phases[q]
    return phase_of(x, row.start, col.start, plan.stride)[: col.samples, : row.samples]


class _StridedConv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, plan: BilinearPlan) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        samples = x.permute(3, 2, 0, 1).contiguous()  # (B, C, rows, cols) -> (cols, rows, B, C)
        taps = to_taps(weight)
        totals = new_totals(plan, x.shape[0], weight.shape[0], x)
        for p, q in plan.phases():
            PhaseProducts(plan, p, q, samples_of(samples, p, q, plan), taps).add_to(totals[q], first=p == 0)
        result = synthesise(plan, totals, x.shape[0])  # (W, H, B, O)
        if bias is not None:
            result += bias
        return result.permute(2, 3, 1, 0).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        plan: BilinearPlan = ctx.plan
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        x_gradient = weight_gradient = bias_gradient = None
        if needs_bias:
            bias_gradient = gradient.sum((0, 2, 3))
        if needs_x or needs_weight:
            samples = x.permute(3, 2, 0, 1).contiguous()  # (B, C, rows, cols) -> (cols, rows, B, C)
            taps = to_taps(weight)
            totals = synthesise_gradient(plan, gradient.permute(3, 2, 0, 1).contiguous())  # from (W, H, B, O)
            # Samples that no output depends on have gradient zero.
            sample_gradients = torch.zeros_like(samples) if needs_x else None
            tap_gradients = torch.empty_like(taps) if needs_weight else None
            for p, q in plan.phases():
                of_samples, of_taps = PhaseProducts(plan, p, q, samples_of(samples, p, q, plan), taps).gradients(
                    totals[q], samples=needs_x, taps=needs_weight
                )
                if of_samples and sample_gradients is not None:
                    samples_of(sample_gradients, p, q, plan).copy_(of_samples.take())
                if of_taps and tap_gradients is not None:
                    phase_of(tap_gradients, p, q, plan.stride).copy_(of_taps.take())
            if sample_gradients is not None:
                x_gradient = sample_gradients.permute(2, 3, 1, 0).contiguous()  # (B, C, rows, cols)
            if tap_gradients is not None:
                weight_gradient = from_taps(tap_gradients, weight)
        return x_gradient, weight_gradient, bias_gradient, None
