"""How many operations a training step needs: the arithmetic limit that its time is compared with."""

from __future__ import annotations

from itertools import product

from torchcaps.bench.cases import ARCHITECTURES
from torchcaps.layers import CapsuleLayer
from torchcaps.models import CapsuleNetwork
from torchcaps.ops.bilinear import taps_of_phases
from torchcaps.ops.plan import Shape, best_tile

KERNEL, STRIDE, CHANNELS = 9, 2, 256


def training_gflop(architecture: str, batch: int) -> float:
    """Multiplications and additions, in 1e9, of one fused step with discriminative routing.

    Counted once each: the products of the bilinear algorithm and its transforms, forward and for both
    gradients (what is computed again to save memory is not counted again), the first convolution, the
    class capsules with the ascent, and the decoder. Not counted: squash, losses, Adam, data.
    """
    network = ARCHITECTURES[architecture].build("l2")
    assert isinstance(network, CapsuleNetwork)
    image_channels, *sides = ARCHITECTURES[architecture].image_shape
    rows, columns, types = network.map_shape
    shape = Shape(batch, CHANNELS, types * network.primary.size, (rows, columns), KERNEL, STRIDE)
    hidden_places = (sides[0] - KERNEL + 1) * (sides[1] - KERNEL + 1)
    first = batch * hidden_places * CHANNELS * (image_channels * KERNEL**2 + 1)
    capsules = batch * sum(layer.weight.numel() for layer in network.modules() if isinstance(layer, CapsuleLayer))
    decoder = 0 if network.decoder is None else batch * sum(each.numel() for each in network.decoder.parameters())
    # forward and weight gradient; with input gradient; with the ascent's gradient as well
    multiplications = 2 * first + _bilinear_multiplications(shape) + 4 * capsules + 3 * decoder
    return 2 * multiplications / 1e9


def _bilinear_multiplications(shape: Shape) -> float:
    """Forward and both gradients of the strided convolution."""
    tile = best_tile(shape)
    taps = taps_of_phases(shape.kernel, shape.stride)
    tiles = [-(-size // width) for size, width in zip(shape.size, tile)]
    total = 0.0
    for row_taps, col_taps in product(taps, repeat=2):
        points = (tile[0] + row_taps - 1) * tiles[0], (tile[1] + col_taps - 1) * tiles[1]
        samples = shape.size[0] + row_taps - 1, shape.size[1] + col_taps - 1
        kernel_points = tile[0] + row_taps - 1, tile[1] + col_taps - 1
        total += 3 * points[0] * points[1] * shape.batch * shape.channels * shape.outputs
        total += 2 * _transform(samples, points) * shape.batch * shape.channels
        total += 2 * _transform((row_taps, col_taps), kernel_points) * shape.channels * shape.outputs
    points = (tile[0] + taps[0] - 1) * tiles[0], (tile[1] + taps[0] - 1) * tiles[1]
    return total + 2 * _transform(shape.size, points) * shape.batch * shape.outputs


def _transform(samples: tuple[int, int], points: tuple[int, int]) -> int:
    """(rows, columns) -> (row points, columns) -> (row points, column points), or back."""
    return points[0] * samples[0] * samples[1] + points[0] * points[1] * samples[1]
