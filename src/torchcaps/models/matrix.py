"""The network of matrix capsules (Hinton, Sabour and Frosst, "Matrix capsules with EM routing", ICLR 2018)."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from torchcaps.errors import UserError
from torchcaps.functional import Capsules, at_least_float32, spread_loss, spread_margin
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.matrix import POSE, ClassMatrixCapsules, ConvMatrixCapsules, PrimaryMatrixCapsules
from torchcaps.models.base import Network
from torchcaps.models.config import MatrixConfig
from torchcaps.routing.em import EMRouting


@final
class MatrixCapsuleNetwork(Network):
    """images in [0, 1] -> convolution -> primary -> two layers of convolutional -> class matrix capsules.

    Made for :func:`torchcaps.spread_loss`. The paper's small network has the sizes A, B, C, D = 64, 8, 16, 16 (the
    default here), its best one 32, 32, 32, 32: channels of the convolution, types of primary capsules, and types of
    capsules of the two convolutional layers.

    Args:
        image_shape: (C, H, W) of the images.
        classes: how many, or their names.
        labels_per_image: classes that every image shows; 0 for any number.
        mean, std: of each channel, to normalise images with.
        settings: ``matrix_sizes`` (A, B, C, D), ``iterations``, ``reconstruction`` (whether there is a decoder).

    Differs from the paper: the cost of a capsule is relative, see :class:`torchcaps.routing.EMRouting`; a
    decoder as that of the vector capsules is possible. Start values and λ are not given there; with these, and
    matrices that start near the identity, all layers start with about half of their capsules on.
    """

    evaluation_batch = 64  # EM routing holds the votes of all of them

    config_class = MatrixConfig
    config: MatrixConfig

    def _build(self) -> None:
        config, task = self.config, self.task
        channels, *sides = task.image_shape
        rows, columns = (_receptive_fields(side) for side in sides)
        if not (rows and columns):
            smallest = next(side for side in range(1, 100) if _receptive_fields(side))
            raise UserError(
                f"Images of {sides[0]}x{sides[1]} are too small for the network of matrix capsules: "
                f"the smallest size is {smallest}x{smallest}. Enlarge them."
            )

        def routing() -> EMRouting:
            return EMRouting(iterations=config.iterations, inverse_temperature=2.0, beta_u=1.5)

        A, B, C, D = config.matrix_sizes
        self.conv = nn.Conv2d(channels, A, 5, stride=2)
        self.primary = PrimaryMatrixCapsules(A, B)
        self.layers = nn.ModuleList(
            [
                ConvMatrixCapsules(B, C, routing(), kernel=3, stride=2),
                ConvMatrixCapsules(C, D, routing(), kernel=3, stride=1),
                ClassMatrixCapsules(D, len(task.classes), routing(), rows=rows, columns=columns),
            ]
        )
        height, width = (_places(side, 5, 2) for side in sides)
        self.map_shape = (height, width, B)
        self.decoder = Decoder(len(task.classes), POSE, task.image_shape) if config.reconstruction else None

    def primary_capsules(self, images: Tensor) -> Capsules:
        """(B, C, H, W) -> (B, I, 16)."""
        poses, activations, _ = self.primary(self.conv(self.normalised(images)).relu())
        poses = poses.flatten(1, 3)
        return Capsules(poses, activations.flatten(1), poses)

    def route(self, capsules: Capsules) -> Capsules:
        """Primary capsules (B, I, 16) -> class capsules (B, J, 16)."""
        B = capsules.poses.shape[0]  # not len(), which export would take for a constant
        poses = capsules.poses.reshape(B, *self.map_shape, POSE)
        capsules = Capsules(poses, capsules.activations.reshape(B, *self.map_shape), poses)
        for layer in self.layers:
            capsules = layer(capsules)
        return capsules

    def loss(
        self, capsules: Capsules, labels: Tensor, progress: float = 1.0, image_weights: Tensor | None = None
    ) -> Tensor:
        """The spread loss, its margin growing as training proceeds."""
        activations, margin = at_least_float32(capsules.activations), spread_margin(progress)
        return spread_loss(activations, labels, margin=margin, image_weights=image_weights)


def _places(side: int, kernel: int, stride: int) -> int:
    return max(0, (side - kernel) // stride + 1)


def _receptive_fields(side: int) -> list[float]:
    """Where, as fractions of the image's side, the receptive fields of the last map's places have their centres.

    >>> _receptive_fields(28)
    [0.30357142857142855, 0.44642857142857145, 0.5892857142857143]
    """
    first, step, places = 0.5, 1, side
    for kernel, stride in ((5, 2), (3, 2), (3, 1)):
        places = _places(places, kernel, stride)
        first += step * (kernel - 1) / 2
        step *= stride
    return [(first + step * place) / side for place in range(places)]
