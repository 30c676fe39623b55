"""Networks as settings: enough to build one, and to prepare images for it. Nothing here imports torch."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torchcaps.routing.config import RoutingConfig
from torchcaps.settings import SettingError, Settings, setting, shown

if TYPE_CHECKING:
    from torchcaps.models.base import Network
    from torchcaps.routing.base import Routing

LARGEST = 2**20  # of any size: a damaged file must not ask for more than a machine could have


class TaskConfig(Settings):
    """What a network is for: the images it sees, and the classes it tells apart."""

    image_shape: tuple[int, int, int] = setting(help="(C, H, W) of what the network sees", least=1, most=LARGEST)
    classes: tuple[str, ...] = setting(help="names of the classes")
    labels_per_image: int = setting(1, "classes that every image shows; 0 for any number", least=0, most=1000)
    mean: tuple[float, ...] = setting((0.0,), "of each channel, subtracted")
    std: tuple[float, ...] = setting((1.0,), "of each channel, divided by", above=0)
    source_shape: tuple[int, int, int] | None = setting(
        None, "(C, H, W) that image files are brought to, if only the centre of that is used", least=1, most=LARGEST
    )
    fit: str = setting("stretch", "how image files are brought to that shape", choices=("stretch", "pad", "crop"))
    standardise: bool = setting(False, "whether each image is brought to mean 0 and deviation 1")

    def check(self) -> None:
        if len(self.classes) < 2:
            raise SettingError("classes", f"must be at least 2, not {len(self.classes)}")
        if self.labels_per_image > len(self.classes):
            raise SettingError("labels_per_image", f"must be at most {len(self.classes)}, the number of classes")
        channels = self.image_shape[0]
        if self.source_shape is not None and (
            self.source_shape[0] != channels or any(map(operator.lt, self.source_shape, self.image_shape))
        ):
            raise SettingError("source_shape", f"{self.source_shape} does not hold images of {self.image_shape}")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, channels):
                raise SettingError(name, f"must have one number, or one for each of {channels} channels")


class ModelConfig(Settings):
    """A kind of network and its sizes. ``name`` says which kind."""

    name: ClassVar[str]
    title: ClassVar[str] = "network"

    def build(self, task: TaskConfig, routing: RoutingConfig, own: type[Routing] | None = None) -> Network:
        """The network with fresh weights, drawn from torch's global random numbers."""
        raise NotImplementedError

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
        (), "capsule layers between primary and class capsules, as COUNTxSIZE,... such as 32x8", least=1, most=LARGEST
    )
    conv_channels: int = setting(256, "channels of the first convolution", least=1, most=LARGEST)
    primary_capsules: int = setting(
        32, "types of primary capsules (the paper: 32, 64 for CIFAR-10)", least=1, most=LARGEST
    )
    primary_size: int = setting(8, "components of a primary capsule", least=1, most=4096)
    class_size: int = setting(16, "components of a class capsule", least=1, most=4096)
    kernel: int = setting(9, "side of both convolution kernels", least=1, most=64)
    padding: str = setting("valid", "valid as in the paper, or same: the image is padded", choices=("valid", "same"))
    negative_slope: float = setting(0.0, "of the leaky ReLU after the first convolution; 0 is ReLU", least=0, below=1)
    weight_std: float | None = setting(
        None, "standard deviation that starts the capsule weights [by the routing and their number]", least=0, most=100
    )
    reconstruction: bool = setting(True, "train a decoder beside the classifier")
    kept_capsules: tuple[int, ...] | None = setting(
        None, "numbers of the primary capsules that a pruned network still uses", least=0, option=""
    )

    def build(self, task: TaskConfig, routing: RoutingConfig, own: type[Routing] | None = None) -> Network:
        from torchcaps.models.capsnet import CapsuleNetwork

        routings = [routing.build(own) for _ in range(len(self.layers) + 1)]
        return CapsuleNetwork.from_config(self, task, routings)


class MatrixConfig(ModelConfig):
    """The network of matrix capsules with EM routing."""

    name = "matrix"

    matrix_sizes: tuple[int, int, int, int] = setting(
        (64, 8, 16, 16), "of the matrix network: A,B,C,D as its paper calls them", least=1, most=4096
    )
    iterations: int = setting(3, "of its EM routing", least=1, most=100, option="")
    reconstruction: bool = setting(True, "train a decoder beside the classifier")

    def build(self, task: TaskConfig, routing: RoutingConfig, own: type[Routing] | None = None) -> Network:
        from torchcaps.models.matrix import MatrixCapsuleNetwork

        return MatrixCapsuleNetwork.from_config(self, task)


class CnnConfig(ModelConfig):
    """An ordinary convolutional network of the capsnet's size."""

    name = "cnn"

    conv_channels: int = setting(256, "channels of the first convolution", least=1, most=LARGEST)
    second_channels: int = setting(256, "channels of the second convolution", least=1, most=LARGEST)
    class_size: int = setting(16, "hidden units for each class", least=1, most=4096)
    kernel: int = setting(9, "side of both convolution kernels", least=1, most=64)
    negative_slope: float = setting(0.0, "of the leaky ReLU after the first convolution; 0 is ReLU", least=0, below=1)
    reconstruction: bool = setting(True, "train a decoder beside the classifier")

    def build(self, task: TaskConfig, routing: RoutingConfig, own: type[Routing] | None = None) -> Network:
        from torchcaps.models.cnn import ConvolutionalNetwork

        return ConvolutionalNetwork.from_config(self, task)


MODELS: dict[str, type[ModelConfig]] = {config.name: config for config in (CapsNetConfig, MatrixConfig, CnnConfig)}
