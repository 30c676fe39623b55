"""How many operations a training step needs: the arithmetic limit that its time is compared with."""

from __future__ import annotations

import math
from itertools import product

import torch

from torchcaps.lab.bench.networks import NETWORKS
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.layers.primary import ImageCapsules
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.ops.bilinear import taps_of_phases
from torchcaps.ops.conv_pair import pair_shape
from torchcaps.ops.plan import ConvolutionShape, best_tile


def training_gflop(network_name: str, batch: int) -> float:
    """Multiplications and additions, in 1e9, of one fused step with discriminative routing.

    Counted once each: the products of the bilinear algorithm and its transforms, forward and for both gradients (what
    is computed again to save memory is not counted again), the first convolution, the class capsules with the ascent,
    and the decoder. Not counted: squash, losses, Adam, data.
    """
    network = NETWORKS[network_name].build("l2")
    assert isinstance(network, CapsuleNetwork)
    front = network.front
    assert isinstance(front, ImageCapsules)
    channels, image_channels, kernel = front.first.weight.shape[:3]
    images = torch.empty(batch, *front.image_shape, device="meta")
    shape = pair_shape(images, front.first.weight, front.second.weight, front.STRIDE, front.padding)
    first = batch * math.prod(shape.used) * channels * (image_channels * kernel**2 + 1)
    capsules = batch * sum(layer.weight.numel() for layer in network.layers if isinstance(layer, CapsuleLayer))
    labels = network.task.labels_per_image
    decoder = network.decoder
    drawn = 0 if decoder is None else batch * labels * sum(parameter.numel() for parameter in decoder.parameters())
    # forward and weight gradient; with input gradient; with the ascent's gradient as well
    return 2 * (2 * first + bilinear_multiplications(shape) + 4 * capsules + 3 * drawn) / 1e9


def bilinear_multiplications(shape: ConvolutionShape) -> float:
    """Forward and both gradients of the strided convolution. Zeros of the padding are not transformed."""
    tile = best_tile(shape)
    taps = taps_of_phases(shape.kernel, shape.stride)
    tiles = [-(-size // width) for size, width in zip(shape.size, tile)]
    samples_there = [-(-size // shape.stride) for size in shape.used]
    total = 0.0
    for phase_taps in product(taps, repeat=2):
        kernel_points = [width + count - 1 for width, count in zip(tile, phase_taps)]
        points = [count * number for count, number in zip(kernel_points, tiles)]
        samples = [min(size + count - 1, there) for size, count, there in zip(shape.size, phase_taps, samples_there)]
        total += 3 * points[0] * points[1] * shape.batch * shape.channels * shape.outputs
        total += 2 * _transform(samples, points) * shape.batch * shape.channels
        total += 2 * _transform(phase_taps, kernel_points) * shape.channels * shape.outputs
    points = [(width + taps[0] - 1) * number for width, number in zip(tile, tiles)]
    return total + 2 * _transform(shape.size, points) * shape.batch * shape.outputs


def _transform(samples: tuple[int, ...] | list[int], points: list[int]) -> int:
    """(rows, columns) -> (row points, columns) -> (row points, column points), or back."""
    return points[0] * samples[0] * samples[1] + points[0] * points[1] * samples[1]
