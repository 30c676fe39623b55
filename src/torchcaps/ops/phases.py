"""The arithmetic of a planned convolution: transforms, products at all points, and their gradients.

Letters: ``B`` batch, ``C`` and ``O`` input and output channels, ``H`` and ``W`` output size; in one phase ``R`` and
``S`` rows and columns of samples, ``I`` and ``J`` row and column points; ``T`` and ``U`` tiles along rows and columns;
``g`` row points in hand. Columns come before rows in memory: then the row transforms, which come first, read and
write it in order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchcaps.ops.plan import BilinearPlan


def along(matrix: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """``matrix`` applied to the middle axis: (L, R, N) -> (L, X, N).

    A batch of products, because MKL shares a batch among threads better than one thin product; into contiguous
    memory, because there it is half as fast again.

    >>> along(torch.ones(1, 3), torch.ones(2, 3, 4)).tolist()
    [[[3.0, 3.0, 3.0, 3.0]], [[3.0, 3.0, 3.0, 3.0]]]
    """
    return torch.bmm(matrix.expand(x.shape[0], -1, -1), x, out=out)


class Transformed:
    """An array (S, R, *tail) under a transform of its rows (X, R) and one of its columns (Y, S). N is tail's size.

    The row transform is done at once, the column transform only at the row points in hand: its result is the
    largest array of all, but a few row points of it stay in cache until they have been multiplied.
    """

    def __init__(self, rows: Tensor, cols: Tensor, x: Tensor) -> None:
        self.rows, self.cols, self.tail = rows, cols, x.shape[2:]
        self.half = along(rows, x.flatten(2))  # (S, R, N) -> (S, X, N)

    def at(self, points: slice) -> Tensor:
        """The values at some row points: (g, Y, N)."""
        return along(self.cols, self.half[:, points].transpose(0, 1))  # (g, S, N) -> (g, Y, N)


class Gradient:
    """The transpose of ``Transformed``: put in the gradients at all row points, take out that of the array."""

    def __init__(self, of: Transformed) -> None:
        self.rows, self.cols, self.tail = of.rows, of.cols, of.tail
        samples, points, size = of.half.shape
        self.half = of.half.new_empty(points, samples, size)  # (X, S, N)

    def put(self, points: slice, values: Tensor) -> None:
        """The gradient at some row points, (g, Y, N) in any shape."""
        flat = values.view(-1, self.cols.shape[0], self.half.shape[2])  # (g, Y, N)
        along(self.cols.T, flat, out=self.half[points])  # (g, Y, N) -> (g, S, N)

    def take(self) -> Tensor:
        """The gradient of the array: (S, R, *tail)."""
        flat = along(self.rows.T, self.half.transpose(0, 1))  # (S, X, N) -> (S, R, N)
        return flat.view(*flat.shape[:2], *self.tail)


def to_taps(weight: Tensor) -> Tensor:
    """(O, C, rows, cols) -> (cols, rows, O, C). Free for a weight whose memory has that order already."""
    taps = weight.permute(3, 2, 0, 1)
    if taps.is_contiguous():
        return taps
    # Two transpositions, one of them of whole rows, take less time than one of single numbers.
    outputs, channels, rows, cols = weight.shape
    inner = weight.flatten(2).transpose(1, 2).contiguous()  # (O, rows * cols, C)
    return inner.view(outputs, rows, cols, channels).permute(2, 1, 0, 3).contiguous()


def from_taps(taps: Tensor, like: Tensor) -> Tensor:
    """(cols, rows, O, C) -> (O, C, rows, cols), in the memory order of the weight ``like``."""
    weight = taps.permute(2, 3, 1, 0)
    if weight.stride() == like.stride():
        return weight
    inner = taps.permute(2, 1, 0, 3).contiguous()  # (O, rows, cols, C)
    return inner.permute(0, 3, 1, 2).contiguous()


def phase_of(x: Tensor, p: int, q: int, stride: int) -> Tensor:
    """Every ``stride``-th of the columns (first axis) from ``q`` and of the rows (second axis) from ``p``."""
    return x[q::stride, p::stride]


def transform_taps(plan: BilinearPlan, p: int, q: int, taps: Tensor) -> Transformed:
    """One phase of the taps (cols, rows, O, C), for row points I and column points J."""
    row, col = plan.rows.phases[p], plan.cols.phases[q]
    return Transformed(row.kernel, col.kernel, phase_of(taps, p, q, plan.stride))


class PhaseProducts:
    """The products of one phase: samples (U * B, C) @ kernels (C, O), at each point of each row tile.

    ``kernels``, (I, J, O, C), are the transformed taps where these are at hand already.
    """

    def __init__(
        self, plan: BilinearPlan, p: int, q: int, samples: Tensor, taps: Tensor, kernels: Tensor | None = None
    ) -> None:
        row, col = plan.rows.phases[p], plan.cols.phases[q]
        self.points, self.tiles = row.points, plan.rows.tiles
        self.outputs, self.channels = taps.shape[2:]
        rows = row.analysis.transpose(0, 1).flatten(0, 1)  # (I, T, R) -> (T * I, R)
        self.samples = Transformed(rows, col.analysis.flatten(0, 1), samples)
        self.kernels = kernels
        if kernels is None:
            self.taps = transform_taps(plan, p, q, taps)

    def groups(self) -> Iterator[slice]:
        """All row points, as many at a time as there are threads."""
        width = torch.get_num_threads()
        return (slice(start, min(start + width, self.points)) for start in range(0, self.points, width))

    def place(self, t: int, points: slice) -> slice:
        """Where the points of row tile ``t`` stand among (T * I)."""
        return slice(t * self.points + points.start, t * self.points + points.stop)

    def kernel(self, points: slice) -> Tensor:
        """The kernels at some row points: (g * J, O, C)."""
        values = self.taps.at(points) if self.kernels is None else self.kernels[points]
        return values.view(-1, self.outputs, self.channels)

    def values(self, t: int, points: slice, rows: int) -> Tensor:
        """The samples at some row points of row tile ``t``: (g * J, U * B, C)."""
        return self.samples.at(self.place(t, points)).view(-1, rows, self.channels)

    def add_to(self, total: Tensor, *, first: bool) -> None:
        """Add to ``total`` (T, I, J, U * B, O); the first phase overwrites it."""
        for points in self.groups():
            kernel = self.kernel(points).mT
            for t in range(self.tiles):
                here = total[t, points].flatten(0, 1)  # (g * J, U * B, O)
                values = self.values(t, points, here.shape[1])
                torch.baddbmm(here, values, kernel, beta=0 if first else 1, out=here)

    def gradients(self, total: Tensor, *, samples: bool, taps: bool) -> tuple[Gradient | None, Gradient | None]:
        """The gradients of samples (S, R, B, C) and taps (cols, rows, O, C), from that of ``total``."""
        sample_gradient = Gradient(self.samples) if samples else None
        tap_gradient = Gradient(self.taps) if taps else None
        for points in self.groups():
            kernel = self.kernel(points)
            kernel_gradient = torch.empty_like(kernel)
            for t in range(self.tiles):
                here = total[t, points].flatten(0, 1)  # (g * J, U * B, O)
                if tap_gradient:
                    values = self.values(t, points, here.shape[1])
                    torch.baddbmm(kernel_gradient, here.mT, values, beta=0 if t == 0 else 1, out=kernel_gradient)
                if sample_gradient:
                    sample_gradient.put(self.place(t, points), torch.bmm(here, kernel))  # (g * J, U * B, C)
            if tap_gradient:
                tap_gradient.put(points, kernel_gradient)
        return sample_gradient, tap_gradient


def new_totals(plan: BilinearPlan, batch: int, outputs: int, like: Tensor) -> list[Tensor]:
    """Room for sums of products (T, I, J, U * B, O): one for each column phase, because these differ in J."""
    rows, cols = plan.rows, plan.cols
    shapes = [(rows.tiles, rows.points, col.points, cols.tiles * batch, outputs) for col in cols.phases]
    return [like.new_empty(shape) for shape in shapes]


def synthesise(plan: BilinearPlan, totals: list[Tensor], batch: int) -> Tensor:
    """The convolution from its products at all points: (T, I, J, U * B, O) for each column phase -> (W, H, B, O)."""
    parts = []
    for col, total in zip(plan.cols.phases, totals):
        cols = col.synthesis.flatten(1)  # (W, J * U)
        parts.append(along(cols, total.view(-1, cols.shape[1], batch * total.shape[4])))  # (T * I, W, B * O)
    half = parts[0]
    for part in parts[1:]:
        half += part
    rows = plan.rows.phases[0].synthesis.transpose(1, 2).flatten(1)  # (H, T * I)
    result = along(rows, half.transpose(0, 1))  # (W, H, B * O)
    return result.view(*result.shape[:2], batch, -1)


def synthesise_gradient(plan: BilinearPlan, gradient: Tensor) -> list[Tensor]:
    """The transpose of ``synthesise``: (W, H, B, O) -> (T, I, J, U * B, O) for each column phase."""
    rows = plan.rows.phases[0].synthesis.transpose(1, 2).flatten(1)  # (H, T * I)
    half = along(rows.T, gradient.flatten(2)).transpose(0, 1)  # (T * I, W, B * O)
    batch, outputs = gradient.shape[2:]
    totals = []
    for col in plan.cols.phases:
        total = along(col.synthesis.flatten(1).T, half)  # (T * I, J * U, B * O)
        totals.append(total.view(plan.rows.tiles, -1, col.points, plan.cols.tiles * batch, outputs))
    return totals
