"""The settings of data and of its augmentation. Nothing here imports torch: the command line answers at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torchcaps.settings import Settings, setting

if TYPE_CHECKING:
    from torchcaps.data.datasets import DataSet

FITS = ("stretch", "pad", "crop")
LARGEST_SIDE = 1024  # pixels; far more than a capsule network can use


class DataConfig(Settings):
    """Which images to learn from.

    >>> DataConfig(name="digits", validation=100).load().validation is None
    False
    """

    title: ClassVar[str] = "data"

    name: str = setting(
        default="digits",
        help="data set: a name from 'torchcaps data list', folder:PATH, csv:FILE or npz:FILE",
        option="data",
    )
    folder: str | None = setting(
        default=None, help="where fetched data sets are kept [the user's cache folder]", option="data-dir"
    )
    validation: int = setting(default=0, help="training images to hold out for the curves and the best state", least=0)
    image_size: int | None = setting(
        default=None,
        help="side in pixels that your own images are resized to [their usual size, from 20 to 64]",
        least=1,
        most=LARGEST_SIDE,
    )
    channels: int | None = setting(
        default=None, help="1 for grey, 3 for colour [as your own images are]", choices=(1, 3)
    )
    fit: str = setting(default="stretch", help="how your own images are brought to a square", choices=FITS)
    skip_unreadable: bool = setting(default=False, help="leave out images that cannot be read, instead of stopping")
    class_weights: str = setting(
        default="none", help="balanced: a mistake costs more in a class with few images", choices=("none", "balanced")
    )
    sampling: str = setting(
        "balanced: show every class equally often; auto: if one has 5 times as many images as another",
        default="auto",
        choices=("auto", "even", "balanced"),
    )

    def load(self) -> DataSet:
        """The data set that these settings describe, fetched first if need be."""
        from torchcaps.data.datasets import load

        return load(self)


class AugmentationConfig(Settings):
    """Random changes of the training images. :class:`torchcaps.data.augmentation.Augmentation` makes them."""

    title: ClassVar[str] = "augmentation"

    shift: int = setting(default=2, help="move by up to this many pixels in each direction", least=0, most=LARGEST_SIDE)
    flip: str = setting(
        default="none",
        help="mirror left to right: random: half of the images; alternate: each image every second epoch",
        choices=("none", "random", "alternate"),
    )
    crop: int = setting(
        default=0,
        help="train on random squares of this side, evaluate on the centre (0: whole images)",
        least=0,
        most=LARGEST_SIDE,
    )
    cutout: int = setting(default=0, help="blank a random square of this side", least=0, most=LARGEST_SIDE)
    rotate: float = setting(default=0.0, help="turn by up to this many degrees", least=0, most=180)
    scale: float = setting(default=0.0, help="enlarge or shrink by up to this fraction", least=0, most=0.9)
    brightness: float = setting(
        default=0.0,
        help="brighten or darken by up to this fraction of the range (the CIFAR-10 network: 0.247)",
        least=0,
        most=1,
    )
    contrast: float = setting(
        default=0.0, help="change the contrast by up to this fraction (the CIFAR-10 network: 0.8)", least=0, most=1
    )
    standardise: bool = setting(default=False, help="bring each image to mean 0 and variance 1, in evaluation as well")
