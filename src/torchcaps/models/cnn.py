"""An ordinary convolutional network of the same size: what capsules have to be compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

from torchcaps.functional import Capsules, at_least_float32
from torchcaps.layers import Decoder
from torchcaps.models.base import Network, check_image_size
from torchcaps.ops import conv_pair


@final
class ConvolutionalNetwork(Network):
    """The capsule network with neurons in place of capsules: two convolutions, two fully connected layers, softmax.

    It has the same convolutions, as many hidden units as the class capsules have components, and nearly the same
    number of weights; no squash, no routing, and cross-entropy for its loss. The hidden units stand in for the
    class capsules' poses, so that it can be given the same decoder.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        classes: int,
        *,
        conv_channels: int = 256,
        second_channels: int = 256,
        class_size: int = 16,
        kernel: int = 9,
        negative_slope: float = 0.0,
        decoder: bool = True,
        present: int = 1,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__(classes, present=present, mean=mean, std=std)
        check_image_size(image_shape, kernel)
        channels, *sides = image_shape
        self.negative_slope = negative_slope
        self.class_size = class_size
        self.conv1 = nn.Conv2d(channels, conv_channels, kernel)
        self.conv2 = nn.Conv2d(conv_channels, second_channels, kernel, stride=2)
        rows, columns = ((side - kernel + 1 - kernel) // 2 + 1 for side in sides)
        self.map_shape = (rows, columns, 1)
        self.hidden = nn.Linear(rows * columns * second_channels, classes * class_size)
        self.scores = nn.Linear(classes * class_size, classes)
        self.decoder = Decoder(classes, class_size, image_shape) if decoder else None

    def primary_capsules(self, images: Tensor) -> Capsules:
        """The features of each place as one capsule: (B, C, H, W) -> (B, H' * W', channels)."""
        places = conv_pair(
            self.normalised(images),
            self.conv1.weight,
            self.conv1.bias,
            self.conv2.weight,
            self.conv2.bias,
            stride=2,
            negative_slope=self.negative_slope,
        )
        features = places.relu().flatten(1, 2)
        return Capsules(features, features.amax(-1), features)

    def route(self, capsules: Capsules) -> Capsules:
        """Poses are the hidden units, activations the class probabilities, totals their scores (B, J, 1)."""
        hidden = self.hidden(capsules.poses.flatten(1)).relu()
        scores = at_least_float32(self.scores(hidden))
        poses = hidden.view(-1, self.classes, self.class_size)
        return Capsules(poses, scores.softmax(1), scores[:, :, None])

    def loss(self, capsules: Capsules, present: Tensor, progress: float) -> Tensor:
        """Cross-entropy, with equal shares for several classes present."""
        shares = present / present.sum(1, keepdim=True)
        return -(shares * capsules.totals[:, :, 0].log_softmax(1)).sum(1).mean()
