"""Networks as settings: enough to build one, and to prepare images for it. Nothing here imports torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from torchcaps.routing.config import RoutingConfig
from torchcaps.settings import SettingError, Settings, setting, shown

if TYPE_CHECKING:
    from torch import nn

    from torchcaps.models.base import Network
    from torchcaps.routing.base import Routing

LARGEST_FOR_THE_PAPER = 40
"""Side of images, in pixels, up to which the paper's two convolutions are the stem unless told otherwise."""
MOST_CLASS_WEIGHTS = 2**24
"""Weights between primary and class capsules up to which that is so: they grow with the classes, too."""
LARGEST_DRAWN = 3 * 64 * 64
"""Numbers of an image up to which a decoder is trained unless told otherwise: it has a thousand weights for each."""
MOST_IN_AN_IMAGE = 2**26
"""Numbers."""
LARGEST = 2**20  # of any size: a damaged file must not ask for more than a machine could have


class Own(NamedTuple):
    """Code of the user's own, which only the user can name: no file ever does."""

    routing: type[Routing] | None = None
    backbone: Callable[[], nn.Module] | None = None


class TaskConfig(Settings):
    """What a network is for: the images it sees, and the classes it tells apart."""

    image_shape: tuple[int, int, int] = setting(help="(C, H, W) of what the network sees", least=1, most=LARGEST)
    classes: tuple[str, ...] = setting(help="names of the classes")
    labels_per_image: int = setting("classes that every image shows; 0 for any number", default=1, least=0, most=1000)
    mean: tuple[float, ...] = setting("of each channel, subtracted", default=(0.0,), least=-1e6, most=1e6)
    std: tuple[float, ...] = setting("of each channel, divided by", default=(1.0,), least=1e-6, most=1e6)
    source_shape: tuple[int, int, int] | None = setting(
        "(C, H, W) that image files are brought to, if only the centre of that is used",
        default=None,
        least=1,
        most=LARGEST,
    )
    fit: str = setting(
        "how image files are brought to that shape", default="stretch", choices=("stretch", "pad", "crop")
    )
    standardise: bool = setting("whether each image is brought to mean 0 and deviation 1", default=False)

    def check(self) -> None:
        if len(self.classes) < 2:
            raise SettingError("classes", f"must be at least 2, not {len(self.classes)}")
        if len(set(self.classes)) < len(self.classes):
            raise SettingError("classes", "must have different names")
        if self.labels_per_image > len(self.classes):
            raise SettingError("labels_per_image", f"must be at most {len(self.classes)}, the number of classes")
        channels = self.image_shape[0]
        if self.source_shape is not None and (
            self.source_shape[0] != channels or any(map(operator.lt, self.source_shape, self.image_shape))
        ):
            raise SettingError("source_shape", f"{self.source_shape} does not hold images of {self.image_shape}")
        for shape in filter(None, (self.image_shape, self.source_shape)):
            if math.prod(shape) > MOST_IN_AN_IMAGE:
                raise SettingError("image_shape", f"{shape} is larger than any image that is read")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, channels):
                raise SettingError(name, f"must have one number, or one for each of {channels} channels")


class ModelConfig(Settings):
    """A kind of network and its sizes. ``name`` says which kind."""

    name: ClassVar[str]
    title: ClassVar[str] = "network"

    reconstruction: bool | None = setting(
        "train a decoder beside the classifier [yes, if images are not larger than 64x64 in colour]", default=None
    )

    def build(self, task: TaskConfig, routing: RoutingConfig, own: Own | None = None) -> Network:
        """The network with fresh weights, drawn from torch's global random numbers."""
        raise NotImplementedError

    def resolved(self, task: TaskConfig) -> Self:
        """The same settings with everything that follows from the images filled in.

        Images that show any number of classes have no pictures of each of them that a decoder could learn from.
        """
        if self.reconstruction and not task.labels_per_image:
            raise SettingError("reconstruction", "is not possible where images show any number of classes")
        if self.reconstruction is not None:
            return self
        drawn = task.labels_per_image > 0 and math.prod(task.image_shape) <= LARGEST_DRAWN
        return self.replace(reconstruction=drawn)

    @classmethod
    def from_mapping(cls, values: object, *, where: str = "") -> Self:
        if not isinstance(values, Mapping):
            raise SettingError(where or "model", f"must be names with values, not {shown(values)}")
        kinds = MODELS if cls is ModelConfig else {cls.name: cls}
        name = values.get("name", next(iter(kinds)))  # the paper's is the first
        if not isinstance(name, str) or name not in kinds:
            raise SettingError(
                f"{where}.name" if where else "name", f"must be one of {', '.join(kinds)}, not {shown(name)}"
            )
        rest = {key: value for key, value in values.items() if key != "name"}
        if cls is not ModelConfig:
            return super().from_mapping(rest, where=where)
        return kinds[name].from_mapping(rest, where=where)  # type: ignore[return-value]

    def to_mapping(self) -> dict[str, Any]:
        return {"name": self.name, **super().to_mapping()}


class CapsNetConfig(ModelConfig):
    """The paper's network: two convolutions, primary capsules, class capsules, decoder."""

    name = "capsnet"

    layers: tuple[tuple[int, int], ...] = setting(
        "capsule layers between primary and class capsules, as COUNTxSIZE,... such as 32x8",
        default=(),
        least=1,
        most=LARGEST,
    )
    conv_channels: int = setting("channels of the paper's first convolution", default=256, least=1, most=LARGEST)
    primary_capsules: int = setting(
        "types of primary capsules (the paper: 32, 64 for CIFAR-10)", default=32, least=1, most=LARGEST
    )
    primary_size: int = setting("components of a primary capsule", default=8, least=1, most=4096)
    class_size: int = setting("components of a class capsule", default=16, least=1, most=4096)
    kernel: int = setting("side of the kernels of the paper's convolutions", default=9, least=1, most=64)
    stem: str = setting(
        "what makes feature maps of images: the paper's two convolutions, a small one for images over "
        f"{LARGEST_FOR_THE_PAPER} pixels or many classes, a backbone, or auto: by size",
        default="auto",
        choices=("auto", "paper", "small", "backbone"),
    )
    backbone: str | None = setting(
        "timm:NAME, or module:function that makes a module of your own, as the stem", default=None
    )
    backbone_weights: str | None = setting("a file with the backbone's weights (safetensors, or torch's)", default=None)
    freeze_backbone: bool = setting("leave the backbone's weights as they are", default=False)
    padding: str = setting(
        "of the convolutions: valid as in the paper, or same", default="valid", choices=("valid", "same")
    )
    negative_slope: float = setting(
        "of the leaky ReLU after the first convolution; 0 is ReLU", default=0.0, least=0, below=1
    )
    weight_std: float | None = setting(
        "standard deviation that starts the capsule weights [by the routing and their number]",
        default=None,
        least=0,
        most=100,
    )
    kept_capsules: tuple[int, ...] | None = setting(
        "numbers of the primary capsules that a pruned network still uses", default=None, least=0, option=""
    )

    def resolved(self, task: TaskConfig) -> Self:
        config = super().resolved(task)
        if config.stem != "auto":
            return config
        small = max(task.image_shape[1:]) > LARGEST_FOR_THE_PAPER or self._class_weights(task) > MOST_CLASS_WEIGHTS
        return config.replace(stem="backbone" if config.backbone else "small" if small else "paper")

    def _class_weights(self, task: TaskConfig) -> int:
        """Weights between primary and class capsules, or what comes first, with the paper's convolutions."""
        grow = 2 * (self.kernel // 2 if self.padding == "same" else 0) - self.kernel
        places = math.prod(max(0, (side + 2 * grow + 1) // 2 + 1) for side in task.image_shape[1:])
        above = math.prod([*self.layers, (len(task.classes), self.class_size)][0])
        return places * self.primary_capsules * self.primary_size * above

    def check(self) -> None:
        if (self.stem == "backbone") != bool(self.backbone) and self.stem != "auto":
            raise SettingError("backbone", "must be given if, and only if, the stem is one")
        if self.backbone is None and (self.backbone_weights or self.freeze_backbone):
            raise SettingError("backbone", "is missing: there are settings for one")

    def build(self, task: TaskConfig, routing: RoutingConfig, own: Own | None = None) -> Network:
        from torchcaps.models.capsnet import CapsuleNetwork

        own = own or Own()
        routings = [routing.build(own.routing) for _ in range(len(self.layers) + 1)]
        return CapsuleNetwork.from_config(self, task, routing=routings, backbone=own.backbone)


class MatrixConfig(ModelConfig):
    """The network of matrix capsules with EM routing."""

    name = "matrix"

    matrix_sizes: tuple[int, int, int, int] = setting(
        "of the matrix network: A,B,C,D as its paper calls them", default=(64, 8, 16, 16), least=1, most=4096
    )
    iterations: int = setting("of its EM routing", default=3, least=1, most=100, option="")

    def build(self, task: TaskConfig, routing: RoutingConfig, own: Own | None = None) -> Network:
        from torchcaps.models.matrix import MatrixCapsuleNetwork

        return MatrixCapsuleNetwork.from_config(self, task)


class CnnConfig(ModelConfig):
    """An ordinary convolutional network of the capsnet's size."""

    name = "cnn"

    conv_channels: int = setting("channels of the first convolution", default=256, least=1, most=LARGEST)
    second_channels: int = setting("channels of the second convolution", default=256, least=1, most=LARGEST)
    class_size: int = setting("hidden units for each class", default=16, least=1, most=4096)
    kernel: int = setting("side of both convolution kernels", default=9, least=1, most=64)
    negative_slope: float = setting(
        "of the leaky ReLU after the first convolution; 0 is ReLU", default=0.0, least=0, below=1
    )

    def build(self, task: TaskConfig, routing: RoutingConfig, own: Own | None = None) -> Network:
        from torchcaps.models.cnn import ConvolutionalNetwork

        return ConvolutionalNetwork.from_config(self, task)


MODELS: dict[str, type[ModelConfig]] = {config.name: config for config in (CapsNetConfig, MatrixConfig, CnnConfig)}
