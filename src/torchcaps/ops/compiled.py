"""``conv_pair`` with compiled transforms: the plan of a convolution, laid out for :mod:`torchcaps.ops.native`.

Letters as in :mod:`torchcaps.ops.phases`. What differs from there is the order of things in memory. All phases that
have a point are neighbours at that point, so that one matrix product sums over channels and phases; points that have
as many phases form a *group*, whose products are one batch. For the paper's network: 81 products (B, 4 C) @ (4 C, O)
and 19 smaller ones. Images pass through the first convolution a few at a time, so that its outputs are transformed
while they are in cache; all that is kept of them for the backward pass are their signs.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from itertools import accumulate, groupby, product
from math import gcd
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchcaps.ops.bilinear import Matrix, evaluation, inverse, taps_of_phases
from torchcaps.ops.buffers import buffer
from torchcaps.ops.plan import ConvolutionShape
from torchcaps.ops.products import add_product, multiply

NUMBA_SETTINGS = ".numba_config.yaml"
IN_CACHE = 2**20  # numbers of the first convolution's outputs to have in hand
SCRATCH = 2**17  # numbers that a thread has in hand while it transforms
ROUND_NUMBER = 16  # of images to go backward with: a plan for every number would be too many
MOST_WITH_GRADIENT = 0.9  # of the images, or leaving the others out costs more than it saves


@lru_cache
def native(module: str = "native") -> ModuleType | None:
    """Compiled kernels, or None: without numba, or where torch runs its threads by something else than OpenMP."""
    if "numba" not in sys.modules and os.path.lexists(NUMBA_SETTINGS):
        # Numba takes whatever this file says, also where compiled code is loaded from.
        warnings.warn(
            f"There is a {NUMBA_SETTINGS} in the current folder. Numba is left alone, and all is slower.", stacklevel=2
        )
        return None
    try:
        return import_module(f"torchcaps.ops.{module}")
    except Exception:  # whatever stands in the way of compiled code, there is another way
        return None


def usable(dtype: torch.dtype, channels: int, outputs: int) -> bool:
    """Whether the compiled kernels can compute in ``dtype``, with vectors of whole channels."""
    if dtype != torch.float32 or native() is None:
        return False
    lanes: int = _kernels().LANES
    return channels % lanes == 0 and outputs % lanes == 0


def _kernels(module: str = "native") -> Any:
    kernels = native(module)
    assert kernels is not None
    return kernels


def run(module: str, kernel: str, job: str, /, **parts: Any) -> None:
    """Run a compiled kernel of a module. ``parts`` make its job: a tensor by its address, and None as 0."""
    kernels = _kernels(module)
    record = np.zeros((), getattr(kernels, job))
    for name, part in parts.items():
        record[name] = part.data_ptr() if isinstance(part, Tensor) else 0 if part is None else part
    kernels.run(getattr(kernels, kernel), record)


class Side(NamedTuple):
    """A transform along one axis, tile by tile."""

    matrices: np.ndarray[Any, Any]  # (tiles, points, terms)
    starts: list[int]  # the first sample of each tile
    samples: int

    @property
    def points(self) -> int:
        return int(self.matrices.shape[1])


def _side(matrices: Sequence[Matrix], starts: list[int], samples: int) -> Side:
    return Side(
        np.array([[[float(x) for x in row] for row in matrix] for matrix in matrices], np.float32), starts, samples
    )


def _starts(size: int, tile: int) -> list[int]:
    """Where tiles begin: the last one is pushed back to end with the axis."""
    return [min(start, size - tile) for start in range(0, size, tile)]


def _sample_side(size: int, tile: int, taps: int) -> Side:
    points, starts = tile + taps - 1, _starts(size, tile)
    analysis = [list(row) for row in zip(*inverse(evaluation(points, points)))]
    return _side([analysis] * len(starts), starts, size + taps - 1)


def _tap_side(size: int, tile: int, taps: int) -> Side:
    return _side([evaluation(tile + taps - 1, taps)], [0], taps)


def _output_side(size: int, tile: int, taps: int) -> Side:
    """The transpose of synthesis. Outputs that two tiles have belong to the first of them."""
    starts = _starts(size, tile)
    values = evaluation(tile + taps - 1, tile)
    owned = [
        [[x * (start + k >= t * tile) for k, x in enumerate(row)] for row in values] for t, start in enumerate(starts)
    ]
    return _side(owned, starts, size)


class Places(NamedTuple):
    """Where the values of each point are in an array, in numbers from its beginning."""

    offsets: list[int]
    leads: list[int]  # from one row to the next


class Points:
    """The points of all phases, those that belong to as many phases next to each other: a *group*."""

    def __init__(self, row_points: Sequence[int], col_points: Sequence[int]) -> None:
        """How many points each phase has, along the rows and along the columns."""
        self.phases = {
            point: tuple(
                f
                for f, (rows, cols) in enumerate(product(row_points, col_points))
                if point[0] < rows and point[1] < cols
            )
            for point in product(range(max(row_points)), range(max(col_points)))
        }
        self.order = sorted(self.phases, key=self._phase_count)
        self.groups = [(len(list(points)), phases) for phases, points in groupby(self.order, self._phase_count)]
        self.count = sum(points * phases for points, phases in self.groups)

    def _phase_count(self, point: tuple[int, int]) -> int:
        return len(self.phases[point])

    def places(self, phase: int, rows: int, channels: int) -> Places:
        """Where the rows of each point of a phase begin in an array of all groups, and how far they are apart."""
        before = dict(zip(self.order, accumulate(map(self._phase_count, self.order), initial=0)))
        mine = [point for point in self.phases if phase in self.phases[point]]
        offsets = [(before[point] * rows + self.phases[point].index(phase)) * channels for point in mine]
        return Places(offsets, [self._phase_count(point) * channels for point in mine])

    def total_places(self, rows: int, channels: int) -> Places:
        """The same in the array (points, rows, channels) of sums over the phases."""
        return Places(
            [self.order.index(point) * rows * channels for point in self.phases], [channels] * len(self.order)
        )

    def empty(self, rows: int, channels: int) -> Tensor:
        return buffer(self.count * rows * channels)

    def split(self, values: Tensor, rows: int, channels: int) -> Iterator[Tensor]:
        """The array of each group: (points, rows, phases * channels)."""
        sizes = [points * rows * phases * channels for points, phases in self.groups]
        return (
            part.view(points, rows, phases * channels)
            for part, (points, phases) in zip(torch.split(values, sizes), self.groups)
        )


class Transform:
    """A transform of some array to points and back, as the kernels want to be told of it."""

    def __init__(
        self,
        sides: Sequence[tuple[Side, Side]],
        positions: Sequence[Sequence[int]],
        places: Sequence[Places],
        *,
        row_count: int,
        items: int,
        channels: int,
    ) -> None:
        """``sides``, ``positions`` (which of an item's rows each sample is) and ``places`` of each phase."""
        self._kept: list[np.ndarray[Any, Any]] = []  # what the records hold addresses of
        self._forth, self._back = (np.zeros(len(sides), _kernels().PHASE) for _ in range(2))
        for phase, (rows, cols) in enumerate(sides):
            for record, back in ((self._forth[phase], False), (self._back[phase], True)):
                for name, side in (("row", rows), ("col", cols)):
                    matrices = side.matrices.transpose(0, 2, 1) if back else side.matrices
                    record[name + "s"] = self._address(np.ascontiguousarray(matrices))
                    record[name + "_starts"] = self._address(np.array(side.starts, np.int64))
                    record[name + "_tiles"], record[name + "_points"], record[name + "_terms"] = side.matrices.shape
                    record[name + "_samples"] = side.samples
                record["positions"] = self._address(np.array(positions[phase], np.int64))
                record["offsets"] = self._address(np.array(places[phase].offsets, np.int64))
                record["leads"] = self._address(np.array(places[phase].leads, np.int64))
        room = max(max(rows.samples, rows.points) * max(cols.samples, cols.points) for rows, cols in sides)
        wide = 256 if 3 * room * 256 <= SCRATCH else 64  # channels at a time
        self._sizes = {
            "phase_count": len(sides),
            "row_count": row_count,
            "all_items": items,
            "channels": channels,
            "room": room,
            "width": gcd(channels, wide),
        }

    def _address(self, array: np.ndarray[Any, Any]) -> int:
        self._kept.append(array)
        return int(array.ctypes.data)

    def spread(self, array: Tensor, values: Tensor, *, items: int, before: int = 0, **others: Any) -> None:
        """Transform ``items`` of ``array`` into ``values``, after those ``before``."""
        self._run("spread", self._forth, array=array, values=values, items=items, before=before, **others)

    def collect(self, values: Tensor, array: Tensor, *, items: int, before: int = 0, **others: Any) -> None:
        """The transpose of ``spread``: transform ``values`` back into ``array``."""
        self._run("collect", self._back, array=array, values=values, items=items, before=before, **others)

    def _run(self, kernel: str, phases: np.ndarray[Any, Any], **parts: Any) -> None:
        run("native", kernel, "TRANSFORM", phases=phases.ctypes.data, **self._sizes, **parts)


class CompiledPlan:
    """All transforms of a convolution of ``shape`` with tiles of ``tile`` outputs."""

    def __init__(self, shape: ConvolutionShape, tile: tuple[int, int]) -> None:
        self.shape, self.tile = shape, tile
        down, across = self.used = shape.used
        self.tiles = len(_starts(shape.size[0], tile[0])) * len(_starts(shape.size[1], tile[1]))
        self.rows = self.tiles * shape.batch
        taps = taps_of_phases(shape.kernel, shape.stride)
        self.points = Points(*([width + count - 1 for count in taps] for width in tile))
        phases = [((p, q), (taps[p], taps[q])) for p, q in product(range(shape.stride), repeat=2)]

        def sides(make: Callable[[int, int, int], Side], counts: tuple[int, int]) -> tuple[Side, Side]:
            rows, cols = (make(*axis) for axis in zip(shape.size, tile, counts))
            return rows, cols

        def inputs(number: tuple[int, int], counts: tuple[int, int]) -> list[int]:
            lines, places = (
                [first - shape.padding + shape.stride * k for k in range(size + count - 1)]
                for first, size, count in zip(number, shape.size, counts)
            )
            return [
                line * across + place if 0 <= line < down and 0 <= place < across else -1
                for line, place in product(lines, places)
            ]

        def weights(number: tuple[int, int], counts: tuple[int, int]) -> list[int]:
            lines, places = ([first + shape.stride * k for k in range(count)] for first, count in zip(number, counts))
            return [line * shape.kernel + place for line, place in product(lines, places)]

        self.samples = Transform(
            [sides(_sample_side, counts) for _, counts in phases],
            [inputs(*phase) for phase in phases],
            [self.points.places(f, self.rows, shape.channels) for f in range(len(phases))],
            row_count=down * across,
            items=shape.batch,
            channels=shape.channels,
        )
        self.taps = Transform(
            [sides(_tap_side, counts) for _, counts in phases],
            [weights(*phase) for phase in phases],
            [self.points.places(f, shape.outputs, shape.channels) for f in range(len(phases))],
            row_count=shape.kernel**2,
            items=shape.outputs,
            channels=shape.channels,
        )
        self.outputs = Transform(
            [sides(_output_side, phases[0][1])],
            [range(shape.size[0] * shape.size[1])],
            [self.points.total_places(self.rows, shape.outputs)],
            row_count=shape.size[0] * shape.size[1],
            items=shape.batch,
            channels=shape.outputs,
        )

    @property
    def in_hand(self) -> int:
        """How many images to have in hand at a time: an even number, which two or four threads can share."""
        images = max(1, IN_CACHE // (self.used[0] * self.used[1] * self.shape.channels))
        return min(images + images % 2, self.shape.batch)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """The first image to have in hand and their number."""
        size, batch = self.in_hand, self.shape.batch
        return ((start, min(size, batch - start)) for start in range(0, batch, size))

    def patches(self, images: Tensor, start: int, count: int, window: int) -> Tensor:
        """Image patches, each with a one for the bias: (count * down * across, C_in * window**2 + 1)."""
        _, channels, rows, cols = images.shape
        down, across = self.used
        result = images.new_empty(count * down * across, channels * window**2 + 1)
        sizes = {"images": count, "channels": channels, "rows": rows, "cols": cols}
        places = {"window": window, "down": down, "across": across}
        run("native", "patches", "PATCHES", source=images[start], target=result, **sizes, **places)
        return result

    def set_image_gradient(self, gradient: Tensor, of_patches: Tensor, window: int) -> None:
        """The gradient of images (B, C_in, rows, cols) from that of their patches without the ones."""
        down, across = (size + window - 1 for size in self.used)
        columns = of_patches.view(gradient.shape[0], self.used[0] * self.used[1], -1).mT
        gradient[:, :, :down, :across] = F.fold(columns, (down, across), window)

    def kernel_values(self, weight: Tensor) -> Tensor:
        """The weight (O, C, k, k) at all points."""
        outputs, channels = weight.shape[:2]
        values = self.points.empty(outputs, channels)
        self.taps.spread(weight.contiguous(), values, items=outputs, channels_first=True)
        return values

    def kernel_groups(self, values: Tensor) -> Iterator[Tensor]:
        """(points, O, phases * C) for each group."""
        return self.points.split(values, self.shape.outputs, self.shape.channels)

    def sample_groups(self, values: Tensor) -> Iterator[Tensor]:
        """(points, T * U * B, phases * C) for each group."""
        return self.points.split(values, self.rows, self.shape.channels)

    def taken(self, values: Tensor, images: Tensor, fewer: CompiledPlan) -> Tensor:
        """The values at all points of some images, (n,), as the plan for so many has them."""
        result = fewer.points.empty(fewer.rows, self.shape.channels)
        for group, part in zip(self.sample_groups(values), fewer.sample_groups(result)):
            by_image, chosen = (array.view(len(array), self.tiles, -1, array.shape[2]) for array in (group, part))
            torch.index_select(by_image, 2, images, out=chosen)
        return result

    def total_groups(self, totals: Tensor) -> Iterator[Tensor]:
        """(points, T * U * B, O) for each group."""
        return iter(torch.split(totals, [points for points, _ in self.points.groups]))

    def new_totals(self) -> Tensor:
        return buffer(len(self.points.order), self.rows, self.shape.outputs)


@lru_cache(maxsize=64)
def compiled_plan(shape: ConvolutionShape, tile: tuple[int, int]) -> CompiledPlan:
    return CompiledPlan(shape, tile)


class CompiledPair(torch.autograd.Function):
    """``conv_pair``, given images that are padded already."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        bias2: Tensor | None,
        plan: CompiledPlan,
        negative_slope: float,
        kernel_values: Tensor | None,
    ) -> Tensor:
        shape, window = plan.shape, weight1.shape[2]
        images = images.contiguous()
        first = first_matrix(weight1, bias1)
        samples = plan.points.empty(plan.rows, shape.channels)
        keep = any(ctx.needs_input_grad)
        signs = None
        if keep:
            signs = buffer(shape.batch, plan.used[0] * plan.used[1], shape.channels, dtype=torch.uint8)
        for start, count in plan.chunks():
            hidden = multiply(plan.patches(images, start, count, window), first.T)
            here = None if signs is None else signs[start]
            plan.samples.spread(
                hidden, samples, items=count, before=start, signs=here, rectify=True, slope=negative_slope
            )
        kernels = plan.kernel_values(weight2) if kernel_values is None else kernel_values
        totals = plan.new_totals()
        for values, kernel, total in zip(
            plan.sample_groups(samples), plan.kernel_groups(kernels), plan.total_groups(totals)
        ):
            multiply(values, kernel.mT, out=total)
        result = images.new_empty(shape.batch, *shape.size, shape.outputs)
        plan.outputs.collect(totals, result, items=shape.batch, bias=None if bias2 is None else bias2.contiguous())
        if keep:
            ctx.save_for_backward(images, weight1, samples, kernels, signs)
        ctx.plan, ctx.negative_slope, ctx.second_shape = plan, negative_slope, weight2.shape
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight1, samples, kernels, signs = ctx.saved_tensors
        plan: CompiledPlan = ctx.plan
        needs_images, needs_weight1, needs_bias1, needs_weight2, needs_bias2 = ctx.needs_input_grad[:5]
        needs_first = needs_weight1 or needs_bias1
        if not needs_images and (some := _with_gradient(gradient)) is not None:
            fewer = compiled_plan(replace(plan.shape, batch=len(some)), plan.tile)
            samples = plan.taken(samples, some, fewer)
            gradient, images, signs, plan = gradient[some], images[some], signs[some], fewer
        shape, window = plan.shape, weight1.shape[2]
        totals = plan.new_totals()
        plan.outputs.spread(gradient.contiguous(), totals, items=shape.batch)
        weight2_gradient = image_gradient = None
        first_gradient = images.new_empty(weight1[0].numel() + 1, shape.channels)
        if needs_weight2:
            of_kernels = buffer(*kernels.shape)
            for total, values, of_kernel in zip(
                plan.total_groups(totals), plan.sample_groups(samples), plan.kernel_groups(of_kernels)
            ):
                multiply(total.mT, values, out=of_kernel)
            weight2_gradient = images.new_empty(ctx.second_shape)
            plan.taps.collect(of_kernels, weight2_gradient, items=shape.outputs, channels_first=True)
            del of_kernels
        if needs_first or needs_images:
            of_samples = buffer(*samples.shape)
            for total, kernel, of_values in zip(
                plan.total_groups(totals), plan.kernel_groups(kernels), plan.sample_groups(of_samples)
            ):
                multiply(total, kernel, out=of_values)
            image_gradient = torch.zeros_like(images) if needs_images else None
            first_gradients = images.new_zeros(plan.in_hand, *first_gradient.shape)
            for start, count in plan.chunks():
                of_hidden = images.new_empty(count * plan.used[0] * plan.used[1], shape.channels)
                plan.samples.collect(
                    of_samples, of_hidden, items=count, before=start, signs=signs[start], slope=ctx.negative_slope
                )
                if needs_first:  # image by image: each thread has written some, and has them in its cache
                    patches = plan.patches(images, start, count, window).view(count, -1, len(first_gradient))
                    add_product(first_gradients[:count], patches.mT, of_hidden.view(count, -1, shape.channels))
                if image_gradient is not None:
                    of_patches = multiply(of_hidden, weight1.flatten(1))
                    plan.set_image_gradient(image_gradient[start : start + count], of_patches, window)
            torch.sum(first_gradients, 0, out=first_gradient)
        return (
            image_gradient,
            first_gradient[:-1].T.reshape(weight1.shape) if needs_weight1 else None,
            first_gradient[-1] if needs_bias1 else None,
            weight2_gradient,
            gradient.sum((0, 1, 2)) if needs_bias2 else None,
            None,
            None,
            None,
        )


def _with_gradient(gradient: Tensor) -> Tensor | None:
    """The numbers of the images that have any, with a few others to make a round number; None if most have."""
    batch = len(gradient)
    given = gradient.flatten(1).ne(0).any(1)
    count = max(1, -(-int(given.sum()) // ROUND_NUMBER)) * ROUND_NUMBER
    if count > MOST_WITH_GRADIENT * batch:
        return None
    return given.to(torch.uint8).argsort(descending=True, stable=True)[:count].sort().values


def first_matrix(weight: Tensor, bias: Tensor | None) -> Tensor:
    """The first convolution as a matrix, its bias as the last column: (C, C_in * window**2 + 1)."""
    column = weight.new_zeros(weight.shape[0]) if bias is None else bias
    return torch.cat((weight.flatten(1), column[:, None]), dim=1)
