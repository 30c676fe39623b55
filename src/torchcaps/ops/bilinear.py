"""Bilinear (Toom-Cook, Winograd) algorithms for short correlations, derived in exact rationals.

A polynomial of degree ``n - 1`` is known from its values at ``n`` points, so the product of a polynomial with
``m`` coefficients and one with ``r`` needs ``n = m + r - 1`` multiplications: evaluate both factors, multiply
the values, interpolate. Transposing that linear map gives the correlation of ``n`` samples with ``r`` taps,
``m`` outputs long, written ``F(m, r)``::

    output = synthesis @ ((kernel @ taps) * (analysis @ samples))

A stride ``s`` splits samples and taps by their index modulo ``s`` into ``s`` *phases*: stride-1 correlations whose
outputs add up. Their taps are ``r`` or ``r - 1`` in number; the shorter ones need one point fewer, and because
``synthesis`` only looks at the points, all phases are added before it, point by point.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

Matrix = list[list[Fraction]]

# Points as (numerator, denominator); (1, 0) is the point at infinity. F(m, r) with n points uses the first n, so
# the short phases' n - 1 points are always among the long phases' n.
POINTS: tuple[tuple[int, int], ...] = (
    (0, 1),
    (1, 0),
    (1, 1),
    (-1, 1),
    (1, 2),
    (-1, 2),
    (2, 1),
    (-2, 1),
    (-4, 3),
    (3, 4),
    (4, 1),
    (-1, 4),
)


def evaluation(count: int, width: int) -> Matrix:
    """Rows that evaluate a polynomial with ``width`` coefficients at the first ``count`` points.

    Homogeneous coordinates keep the entries integers: the row of the point a/b is ``a^k b^(width - 1 - k)``.

    >>> [[int(x) for x in row] for row in evaluation(5, 3)]
    [[1, 0, 0], [0, 0, 1], [1, 1, 1], [1, -1, 1], [4, 2, 1]]
    """
    return [[Fraction(a**k * b ** (width - 1 - k)) for k in range(width)] for a, b in POINTS[:count]]


def inverse(matrix: Matrix) -> Matrix:
    """The exact inverse, by Gauss-Jordan elimination."""
    size = len(matrix)
    rows = [row + [Fraction(i == j) for j in range(size)] for i, row in enumerate(matrix)]
    for i in range(size):
        pivot = next(k for k in range(i, size) if rows[k][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for k in range(size):
            if k != i and rows[k][i]:
                rows[k] = [x - rows[k][i] * y for x, y in zip(rows[k], rows[i])]
    return [row[size:] for row in rows]


def _tensor(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    return torch.tensor([[float(x) for x in row] for row in matrix], dtype=dtype, device="cpu")


@dataclass(frozen=True)
class Phase:
    """One phase of one axis: the samples and taps whose index leaves the same remainder modulo the stride."""

    points: int
    start: int  # which input is the first sample
    samples: int
    analysis: Tensor  # (points, tiles, samples)
    kernel: Tensor  # (points, taps)
    synthesis: Tensor  # (outputs, points, tiles)


@dataclass(frozen=True)
class Axis:
    """A strided correlation along one axis, whose outputs are cut into ``tiles`` tiles.

    Tiles share samples, and the last one is pushed back to end with the axis. Both facts live in the zeros of
    ``analysis`` and ``synthesis``: nothing is gathered. Nor is anything padded: ``analysis`` lacks the columns of the
    samples that would be zero.
    """

    tiles: int
    phases: tuple[Phase, ...]

    @property
    def points(self) -> int:
        """The points of all phases: those of the first, which has the most taps."""
        return self.phases[0].points


def taps_of_phases(kernel: int, stride: int) -> list[int]:
    """How many of ``kernel`` taps fall in each phase.

    >>> taps_of_phases(9, 2)
    [5, 4]
    """
    return [-(-(kernel - phase) // stride) for phase in range(stride)]


@lru_cache(maxsize=64)
def axis(
    size: int, tile: int, kernel: int, stride: int, dtype: torch.dtype, padding: int = 0, extent: int | None = None
) -> Axis:
    """The matrices of a correlation with ``kernel`` taps and ``stride`` along one axis, ``size >= tile`` outputs.

    ``padding`` zeros stand before the first of ``extent`` inputs, and as many as are needed after the last.
    """
    tiles = -(-size // tile)
    phases = []
    for number, taps in enumerate(taps_of_phases(kernel, stride)):
        samples = range(number - padding, number - padding + stride * (size + taps - 1), stride)
        inside = [index for index, place in enumerate(samples) if place >= 0 and (extent is None or place < extent)]
        phases.append(_phase(size, tile, tiles, taps, dtype, samples, slice(inside[0], inside[-1] + 1)))
    return Axis(tiles, tuple(phases))


def _phase(size: int, tile: int, tiles: int, taps: int, dtype: torch.dtype, samples: range, inside: slice) -> Phase:
    points = tile + taps - 1
    interpolation = _tensor(inverse(evaluation(points, points)), dtype)  # (points, points)
    values = _tensor(evaluation(points, tile), dtype)  # (points, tile)
    analysis = torch.zeros(points, tiles, len(samples), dtype=dtype, device="cpu")
    synthesis = torch.zeros(size, points, tiles, dtype=dtype, device="cpu")
    for t in range(tiles):
        start = min(t * tile, size - tile)
        analysis[:, t, start : start + points] = interpolation.T
        # Outputs before t * tile belong to the tile before.
        synthesis[t * tile : start + tile, :, t] = values.T[t * tile - start :]
    analysis = analysis[:, :, inside].contiguous()
    kernel = _tensor(evaluation(points, taps), dtype)
    return Phase(points, samples[inside.start], analysis.shape[2], analysis, kernel, synthesis)
