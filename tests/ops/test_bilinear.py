"""The exact matrices: they compute a correlation, with no rounding at all."""

from fractions import Fraction

import pytest
import torch

from torchcaps.ops.bilinear import POINTS, axis, evaluation, inverse, taps_of_phases


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tile", [1, 2, 3, 5, 6, 8])
def test_matrices_compute_a_correlation_exactly(tile: int, taps: int) -> None:
    points = tile + taps - 1
    interpolation = inverse(evaluation(points, points))
    signal = [Fraction(k * k - 7, 3) for k in range(points)]
    kernel = [Fraction(2 * k + 1, 5) for k in range(taps)]
    products = [
        sum(g * x for g, x in zip(row, kernel)) * sum(interpolation[k][i] * signal[k] for k in range(points))
        for i, row in enumerate(evaluation(points, taps))
    ]
    values = evaluation(points, tile)
    outputs = [sum(values[i][k] * products[i] for i in range(points)) for k in range(tile)]
    assert outputs == [sum(kernel[j] * signal[k + j] for j in range(taps)) for k in range(tile)]


def test_points_are_distinct() -> None:
    assert len({(a, b) if b == 0 else Fraction(a, b) for a, b in POINTS}) == len(POINTS)


@pytest.mark.parametrize(("kernel", "stride"), [(9, 2), (5, 1), (7, 3), (4, 2)])
@pytest.mark.parametrize(("size", "tile"), [(6, 6), (7, 3), (5, 4), (10, 4), (1, 1)])
def test_an_axis_is_a_strided_correlation(size: int, tile: int, kernel: int, stride: int) -> None:
    x = torch.randn((size - 1) * stride + kernel, dtype=torch.float64)
    taps = torch.randn(kernel, dtype=torch.float64)
    result = torch.zeros(size, dtype=torch.float64)
    for p, phase in enumerate(axis(size, tile, kernel, stride, torch.float64).phases):
        values = phase.analysis @ x[p::stride][: phase.samples]  # (points, tiles)
        products = (phase.kernel @ taps[p::stride])[:, None] * values
        result += torch.einsum("hit,it->h", phase.synthesis, products)
    torch.testing.assert_close(result, x.unfold(0, kernel, stride) @ taps, rtol=1e-9, atol=1e-9)


def test_taps_are_shared_out() -> None:
    assert taps_of_phases(9, 2) == [5, 4]
    assert taps_of_phases(7, 3) == [3, 2, 2]
    assert taps_of_phases(2, 3) == [1, 1, 0]
