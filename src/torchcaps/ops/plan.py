"""Which bilinear algorithm a strided convolution uses, and whether it pays to use one at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.nn import Parameter

from torchcaps.functional import runs_eagerly
from torchcaps.ops.bilinear import POINTS, Axis, axis, taps_of_phases

# Time in units of one multiplication in a large matrix product: of one in a small transform, of one number on its way
# through a transform, and of one multiplication in a direct convolution. Fitted to forward and backward of 21 shapes
# (MKL and oneDNN, AVX-512), most of which they predict within a fifth.
TRANSFORM_COST = 3.0
MOVE_COST = 50.0
DIRECT_COST = 1.2


@dataclass(frozen=True)
class ConvolutionShape:
    """What is to be convolved: everything a cost depends on."""

    batch: int
    channels: int
    outputs: int
    size: tuple[int, int]  # of the output
    kernel: int
    stride: int
    padding: int = 0
    extent: tuple[int, int] | None = None  # of the input without padding; needed where there is any

    @classmethod
    def of(cls, batch: int, extent: tuple[int, int], weight: Tensor, stride: int, padding: int = 0) -> ConvolutionShape:
        """The convolution of inputs of size ``extent`` with ``weight`` (O, C, k, k)."""
        outputs, channels, kernel = weight.shape[:3]
        rows, cols = ((size + 2 * padding - kernel) // stride + 1 for size in extent)
        return cls(batch, channels, outputs, (rows, cols), kernel, stride, padding, extent if padding else None)

    @property
    def used(self) -> tuple[int, int]:
        """Rows and columns of the input, without padding, that any output depends on."""
        reach = [(size - 1) * self.stride + self.kernel - self.padding for size in self.size]
        rows, cols = reach if self.extent is None else map(min, reach, self.extent)
        return rows, cols


@dataclass(frozen=True)
class BilinearPlan:
    """Bilinear algorithms along the rows and the columns of a convolution with a square kernel."""

    rows: Axis
    cols: Axis

    @property
    def stride(self) -> int:
        return len(self.rows.phases)

    def phases(self) -> Iterator[tuple[int, int]]:
        """The remainders (row, column) of all phases. The first has the most points."""
        return ((p, q) for p in range(self.stride) for q in range(self.stride))


def direct_cost(shape: ConvolutionShape) -> float:
    """Time of the direct convolution, in multiplications of a large matrix product."""
    products = shape.size[0] * shape.size[1] * shape.kernel**2
    return DIRECT_COST * products * shape.batch * shape.channels * shape.outputs


def bilinear_cost(shape: ConvolutionShape, tile: tuple[int, int]) -> float:
    """Time of the bilinear algorithm with tiles of ``tile`` outputs, in the same unit."""
    taps = taps_of_phases(shape.kernel, shape.stride)
    row_tiles, col_tiles = (-(-size // width) for size, width in zip(shape.size, tile))
    products = samples = kernels = 0.0
    for row_taps, col_taps in product(taps, repeat=2):
        row_points, col_points = tile[0] + row_taps - 1, tile[1] + col_taps - 1
        rows, cols = shape.size[0] + row_taps - 1, shape.size[1] + col_taps - 1
        products += row_points * row_tiles * col_points * col_tiles
        samples += _transform_cost(rows, cols, row_points * row_tiles, col_points * col_tiles)
        kernels += _transform_cost(row_taps, col_taps, row_points, col_points)
    row_points, col_points = tile[0] + taps[0] - 1, tile[1] + taps[0] - 1
    outputs = _transform_cost(*shape.size, row_points * row_tiles, col_points * col_tiles)
    return (
        products * shape.batch * shape.channels * shape.outputs
        + samples * shape.batch * shape.channels
        + kernels * shape.channels * shape.outputs
        + outputs * shape.batch * shape.outputs
    )


def _transform_cost(rows: int, cols: int, row_points: int, col_points: int) -> float:
    """(rows, cols) -> (row_points, cols) -> (row_points, col_points), or back."""
    multiplications = row_points * cols * (rows + col_points)
    moved = rows * cols + row_points * cols + row_points * col_points
    return TRANSFORM_COST * multiplications + MOVE_COST * moved


@lru_cache(maxsize=256)
def best_tile(shape: ConvolutionShape) -> tuple[int, int]:
    """The cheapest tile for ``shape`` among those the points can serve.

    >>> [best_tile(ConvolutionShape(128, 256, 256, (n, n), kernel=9, stride=2)) for n in (4, 6, 8, 10)]
    [(4, 4), (6, 6), (8, 8), (5, 5)]
    """
    widest = len(POINTS) - taps_of_phases(shape.kernel, shape.stride)[0] + 1
    rows, cols = (range(1, min(widest, size) + 1) for size in shape.size)
    return min(product(rows, cols), key=lambda tile: bilinear_cost(shape, tile))


def supported(shape: ConvolutionShape) -> bool:
    """Whether a bilinear algorithm exists: no phase is without taps or samples, and there are points enough."""
    taps = taps_of_phases(shape.kernel, shape.stride)
    sampled = shape.extent is None or min(shape.extent) >= shape.stride
    return shape.batch > 0 and min(shape.size) > 0 and taps[-1] > 0 and taps[0] < len(POINTS) and sampled


def pays(shape: ConvolutionShape) -> bool:
    """Whether the bilinear algorithm is the faster one.

    >>> [pays(ConvolutionShape(batch, 256, 256, (6, 6), kernel=9, stride=2)) for batch in (128, 1)]
    [True, False]
    """
    return supported(shape) and bilinear_cost(shape, best_tile(shape)) < direct_cost(shape)


def make_plan(shape: ConvolutionShape, dtype: torch.dtype, tile: tuple[int, int] | None = None) -> BilinearPlan:
    """The bilinear algorithm for ``shape``: with the cheapest tile, unless one is given."""
    widths = tile or best_tile(shape)
    extents = shape.extent or (None, None)
    rows, cols = (
        axis(size, width, shape.kernel, shape.stride, dtype, shape.padding, extent)
        for size, width, extent in zip(shape.size, widths, extents)
    )
    return BilinearPlan(rows, cols)


def runs_eagerly_on_cpu(*tensors: Tensor | None) -> bool:
    """Whether the fast kernels can take these tensors: with memory of the CPU, one dtype of 32 or 64 bits,
    no autocast, nobody tracing.

    >>> runs_eagerly_on_cpu(torch.ones(2), None), runs_eagerly_on_cpu(torch.ones(2), torch.ones(2, dtype=torch.float16))
    (True, False)
    """
    given = [tensor for tensor in tensors if tensor is not None]
    if not runs_eagerly() or torch.is_autocast_enabled("cpu"):
        return False
    dtype = given[0].dtype
    return dtype in (torch.float32, torch.float64) and all(
        type(tensor) in (Tensor, Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype == dtype
        and tensor.layout == torch.strided
        for tensor in given
    )
