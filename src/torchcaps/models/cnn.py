"""An ordinary convolutional network of the same size: what capsules have to be compared with."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn
from torch.nn import functional as F

from torchcaps.functional import Capsules, at_least_float32, classes_shown, weighted_mean
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.primary import ImageCapsules
from torchcaps.models.base import Network
from torchcaps.models.config import CnnConfig


@final
class ConvolutionalNetwork(Network):
    """The capsule network with neurons in place of capsules: two convolutions, two fully connected layers, softmax.

    It has the same convolutions, as many hidden units as the class capsules have components, and nearly the same
    number of weights; no squash, no routing, and cross-entropy for its loss. The hidden units stand in for the
    class capsules' poses, so that it can be given the same decoder. Where images show any number of classes, each
    class has a sigmoid of its own in place of the softmax.

    Args:
        image_shape: (C, H, W) of the images.
        classes: how many, or their names.
        labels_per_image: classes that every image shows; 0 for any number.
        mean, std: of each channel, to normalise images with.
        settings: sizes, by the names of :class:`torchcaps.models.config.CnnConfig`.

    >>> ConvolutionalNetwork((1, 28, 28), 10).numbers()
    8217338
    """

    config_class = CnnConfig
    config: CnnConfig

    def _build(self) -> None:
        config, task = self.config, self.task
        # Its convolutions and their names are the capsule network's; one "capsule" holds all channels of a place.
        self.front = ImageCapsules(
            task.image_shape,
            config.conv_channels,
            types=1,
            size=config.second_channels,
            kernel=config.kernel,
            negative_slope=config.negative_slope,
        )
        self.map_shape = self.front.map_shape
        rows, columns, _ = self.map_shape
        classes = len(task.classes)
        self.hidden = nn.Linear(rows * columns * config.second_channels, classes * config.class_size)
        self.scores = nn.Linear(classes * config.class_size, classes)
        self.decoder = Decoder(classes, config.class_size, task.image_shape) if config.reconstruction else None

    def numbers_per_image(self) -> int:
        return super().numbers_per_image() + self.front.numbers_per_image()

    def primary_capsules(self, images: Tensor) -> Capsules:
        """The features of each place as one capsule: (B, C, H, W) -> (B, H' * W', channels)."""
        features = self.front(self.normalised(images)).totals.relu()  # before the squash
        return Capsules(features, features.amax(-1), features)

    def route(self, capsules: Capsules) -> Capsules:
        """Poses are the hidden units, activations the class probabilities, totals their scores (B, J, 1)."""
        hidden = self.hidden(capsules.poses.flatten(1)).relu()
        scores = at_least_float32(self.scores(hidden))
        poses = hidden.view(-1, len(self.classes), self.config.class_size)
        probabilities = scores.softmax(1) if self.task.labels_per_image else scores.sigmoid()
        return Capsules(poses, probabilities, scores[:, :, None])

    def loss(
        self, capsules: Capsules, labels: Tensor, progress: float = 1.0, image_weights: Tensor | None = None
    ) -> Tensor:
        """Cross-entropy: of each class if there may be any number of them, or with equal shares for those shown."""
        shown = classes_shown(labels, capsules.totals)
        scores = capsules.totals[:, :, 0]
        if self.task.labels_per_image:
            shares = shown / shown.sum(1, keepdim=True).clamp_min(1)
            losses = -(shares * scores.log_softmax(1)).sum(1)
        else:
            losses = F.binary_cross_entropy_with_logits(scores, shown.to(scores.dtype), reduction="none").sum(1)
        return weighted_mean(losses, image_weights)
