"""The front end of the paper's capsule network in one piece: convolution, (leaky) ReLU, strided convolution.

Between two convolutions nothing needs the usual layout. The first one, a matrix product over image patches, writes
its outputs phase by phase in the order that the second one's transforms read, and the result comes out with
channels last, as capsules group them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.ops import compiled
from torchcaps.ops.compiled import first_matrix
from torchcaps.ops.phases import (
    PhaseProducts,
    from_taps,
    new_totals,
    phase_of,
    synthesise,
    synthesise_gradient,
    to_taps,
    transform_taps,
)
from torchcaps.ops.plan import (
    BilinearPlan,
    ConvolutionShape,
    best_tile,
    make_plan,
    pays,
    runs_eagerly_on_cpu,
    supported,
)


@dataclass(frozen=True)
class TransformedKernel:
    """A second convolution's kernels at all points of all phases, for ``conv_pair``. Made by ``transform_kernel``."""

    tile: tuple[int, int]
    values: tuple[Tensor, ...]  # (I, J, O, C) for each phase, or all of them as the compiled kernels have them
    compiled: bool


def conv_pair(
    images: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    stride: int,
    padding: int = 0,
    negative_slope: float = 0.0,
    kernel: TransformedKernel | None = None,
) -> Tensor:
    """Convolution, leaky ReLU, convolution with ``stride``, channels last: (B, C_in, rows, cols) -> (B, H, W, O).

    The weights are those of ``torch.nn.Conv2d``, and ``padding`` is that of both convolutions; ``negative_slope`` 0 is
    ReLU. Where the fast algorithm does not pay or does not apply (see ``strided_conv2d``) two ordinary convolutions
    take its place. Backward works once: there are no second derivatives.

    ``kernel`` is ``transform_kernel(weight2, ...)``, for using the same weights many times without gradients.

    >>> images = torch.rand(2, 1, 28, 28)
    >>> weight1, weight2 = torch.randn(16, 1, 9, 9), torch.randn(32, 16, 9, 9)
    >>> conv_pair(images, weight1, None, weight2, None, stride=2).shape
    torch.Size([2, 6, 6, 32])
    """
    tensors = (images, weight1, bias1, weight2, bias2)
    if kernel and kernel.compiled and compiled.native() is None:
        kernel = None  # transformed where there was numba
    if runs_eagerly_on_cpu(*tensors) and _fits(images, weight1, weight2) and negative_slope >= 0:
        shape = pair_shape(images, weight1, weight2, stride, padding)
        if supported(shape) if kernel else pays(shape):
            return bilinear_conv_pair(
                *tensors, stride=stride, padding=padding, negative_slope=negative_slope, kernel=kernel
            )
    hidden = F.leaky_relu(F.conv2d(images, weight1, bias1, padding=padding), negative_slope)
    return F.conv2d(hidden, weight2, bias2, stride, padding).permute(0, 2, 3, 1)


def transform_kernel(weight: Tensor, *, stride: int, size: tuple[int, int]) -> TransformedKernel | None:
    """What ``conv_pair`` computes from ``weight2`` alone, for outputs of ``size`` (H, W). None where it has no use.

    Takes five times the memory of the weight, and follows no later change of it.

    >>> kernel = transform_kernel(torch.randn(32, 16, 9, 9), stride=2, size=(6, 6))
    >>> kernel.tile, sum(value.numel() for value in kernel.values) // (32 * 16)
    ((6, 6), 361)
    """
    outputs, channels, width = weight.shape[:3]
    shape = ConvolutionShape(128, channels, outputs, size, width, stride)  # any large batch
    if not (runs_eagerly_on_cpu(weight) and weight.shape[2] == weight.shape[3] and supported(shape)):
        return None
    tile = best_tile(shape)
    if compiled.usable(weight.dtype, channels, outputs):
        values = compiled.compiled_plan(shape, tile).kernel_values(weight.detach())
        return TransformedKernel(tile, (values.clone(),), True)  # in memory of its own: it lives for long
    plan = make_plan(shape, weight.dtype)
    taps = to_taps(weight.detach())
    of_phases = [transform_taps(plan, p, q, taps).at(slice(None)) for p, q in plan.phases()]  # (I, J, O * C)
    return TransformedKernel(tile, tuple(value.view(*value.shape[:2], *taps.shape[2:]) for value in of_phases), False)


def bilinear_conv_pair(
    images: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    stride: int,
    padding: int = 0,
    negative_slope: float = 0.0,
    kernel: TransformedKernel | None = None,
) -> Tensor:
    """``conv_pair`` by the bilinear algorithm, whether or not it pays."""
    shape = pair_shape(images, weight1, weight2, stride, padding)
    if kernel and any(width > size for width, size in zip(kernel.tile, shape.size)):
        raise ValueError(f"a kernel transformed for tiles {kernel.tile} cannot serve outputs of size {shape.size}")
    if padding:
        images = F.pad(images, (padding,) * 4)
    tile = kernel.tile if kernel else best_tile(shape)
    tensors = (images, weight1, bias1, weight2, bias2)
    result: Tensor
    if kernel.compiled if kernel else compiled.usable(images.dtype, shape.channels, shape.outputs):
        values = kernel.values[0] if kernel else None
        plan = compiled.compiled_plan(shape, tile)
        result = compiled.CompiledPair.apply(*tensors, plan, negative_slope, values)  # type: ignore[no-untyped-call]
    else:
        reference_plan = make_plan(shape, images.dtype, tile)
        result = _ConvPair.apply(*tensors, reference_plan, negative_slope, kernel)  # type: ignore[no-untyped-call]
    return result


def pair_shape(images: Tensor, weight1: Tensor, weight2: Tensor, stride: int, padding: int = 0) -> ConvolutionShape:
    """The shape of the second convolution."""
    rows, cols = (size + 2 * padding - weight1.shape[2] + 1 for size in images.shape[2:])
    return ConvolutionShape.of(images.shape[0], (rows, cols), weight2, stride, padding)


def _fits(images: Tensor, weight1: Tensor, weight2: Tensor) -> bool:
    """Whether the shapes are those of two convolutions with square kernels; the fallback says what is wrong if not."""
    if not images.dim() == weight1.dim() == weight2.dim() == 4:
        return False
    square = all(weight.shape[2] == weight.shape[3] for weight in (weight1, weight2))
    return square and images.shape[1] == weight1.shape[1] and weight1.shape[0] == weight2.shape[1]


class _Patches:
    """The image patches under the first convolution's kernel, one phase at a time, and their gradient."""

    def __init__(self, images: Tensor, window: int, plan: BilinearPlan) -> None:
        self.images = images.permute(1, 2, 3, 0).contiguous()  # (C_in, rows, cols, B)
        self.window, self.plan = window, plan

    def shape(self, p: int, q: int) -> tuple[int, ...]:
        row, col = self.plan.rows.phases[p], self.plan.cols.phases[q]
        return (self.images.shape[0], self.window, self.window, col.samples, row.samples, self.images.shape[3])

    def view(self, images: Tensor, p: int, q: int) -> Tensor:
        """One phase's patches as an overlapping view: (C_in, window rows, window cols, S, R, B)."""
        stride = self.plan.stride
        channel, row, col, image = images.stride()
        strides = (channel, row, col, stride * col, stride * row, image)
        first = self.plan.rows.phases[p].start * row + self.plan.cols.phases[q].start * col
        return images.as_strided(self.shape(p, q), strides, first)

    def matrix(self, p: int, q: int) -> Tensor:
        """One phase's patches and a row of ones for the bias: (C_in * window**2 + 1, S * R * B)."""
        shape = self.shape(p, q)
        taps = shape[0] * shape[1] * shape[2]
        matrix = self.images.new_empty(taps + 1, shape[3] * shape[4] * shape[5])
        matrix[:taps].view(shape).copy_(self.view(self.images, p, q))
        matrix[taps] = 1
        return matrix

    def add_gradient(self, gradient: Tensor, matrix: Tensor, p: int, q: int) -> None:
        """Add the gradient of ``matrix`` without its ones to that of the images, (C_in, rows, cols, B)."""
        source = matrix.view(self.shape(p, q))
        target = self.view(gradient, p, q)
        for row in range(self.window):
            for col in range(self.window):
                target[:, row, col] += source[:, row, col]  # within one tap nothing overlaps


class _ConvPair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        plan: BilinearPlan,
        negative_slope: float,
        kernel: TransformedKernel | None,
    ) -> Tensor:
        batch, channels, outputs = images.shape[0], weight1.shape[0], weight2.shape[0]
        patches = _Patches(images, weight1.shape[2], plan)
        first = first_matrix(weight1, bias1)
        taps = to_taps(weight2) if kernel is None else weight2.permute(3, 2, 0, 1)
        totals = new_totals(plan, batch, outputs, images)
        hidden = []
        for index, (p, q) in enumerate(plan.phases()):
            samples = torch.mm(patches.matrix(p, q).T, first.T)  # (S * R * B, C)
            F.leaky_relu_(samples, negative_slope)
            samples = samples.view(plan.cols.phases[q].samples, -1, batch, channels)  # (S, R, B, C)
            kernels = kernel.values[index] if kernel else None
            PhaseProducts(plan, p, q, samples, taps, kernels).add_to(totals[q], first=p == 0)
            if any(ctx.needs_input_grad):
                hidden.append(samples)
        result = synthesise(plan, totals, batch)  # (W, H, B, O)
        if bias2 is not None:
            result += bias2
        # The taps are saved beside the weight they were transposed from: backward would hold them both anyway.
        ctx.save_for_backward(images, weight1, weight2, taps, *hidden)
        ctx.plan, ctx.negative_slope = plan, negative_slope
        return result.permute(2, 1, 0, 3).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight1, weight2, taps, *hidden = ctx.saved_tensors
        plan: BilinearPlan = ctx.plan
        needs_images, needs_weight1, needs_bias1, needs_weight2, needs_bias2 = ctx.needs_input_grad[:5]
        needs_first = needs_weight1 or needs_bias1
        channels = weight1.shape[0]
        patches = _Patches(images, weight1.shape[2], plan)
        totals = synthesise_gradient(plan, gradient.permute(2, 1, 0, 3).contiguous())  # from (W, H, B, O)
        first_gradient = images.new_zeros(weight1[0].numel() + 1, channels)
        image_gradient = torch.zeros_like(patches.images) if needs_images else None
        tap_gradients = torch.empty_like(taps) if needs_weight2 else None
        for (p, q), samples in zip(plan.phases(), hidden):
            of_samples, of_taps = PhaseProducts(plan, p, q, samples, taps).gradients(
                totals[q], samples=needs_images or needs_first, taps=needs_weight2
            )
            if of_taps and tap_gradients is not None:
                phase_of(tap_gradients, p, q, plan.stride).copy_(of_taps.take())
                del of_taps
            if of_samples:
                of_hidden = of_samples.take()  # (S, R, B, C)
                del of_samples
                torch.ops.aten.leaky_relu_backward.grad_input(
                    of_hidden, samples, ctx.negative_slope, True, grad_input=of_hidden
                )
                of_hidden = of_hidden.view(-1, channels)  # (S * R * B, C)
                if needs_first:
                    first_gradient.addmm_(patches.matrix(p, q), of_hidden)
                if image_gradient is not None:
                    patches.add_gradient(image_gradient, torch.mm(weight1.flatten(1).T, of_hidden.T), p, q)
                del of_hidden
        del totals
        return (
            image_gradient.permute(3, 0, 1, 2) if image_gradient is not None else None,  # (B, C_in, rows, cols)
            first_gradient[:-1].T.reshape(weight1.shape) if needs_weight1 else None,
            first_gradient[-1] if needs_bias1 else None,
            from_taps(tap_gradients, weight2) if tap_gradients is not None else None,
            gradient.sum((0, 1, 2)) if needs_bias2 else None,
            None,
            None,
            None,
        )
