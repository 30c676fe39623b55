"""A network as data: enough to build it again, and to prepare images for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.models.cnn import ConvolutionalNetwork
from torchcaps.models.matrix import SMALL_SIZES, MatrixCapsuleNetwork
from torchcaps.routing import make_routing
from torchcaps.storage import DamagedFile, read_tensors, write_tensors


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """Everything but the weights."""

    image_shape: tuple[int, int, int]
    """(C, H, W) of what the network sees."""
    source_shape: tuple[int, int, int]
    """(C, H, W) of the data set's images, before the centre is cut out."""
    classes: tuple[str, ...]
    model: str = "capsnet"
    routing: str
    routing_settings: dict[str, Any] = field(default_factory=dict)
    fit: str = "stretch"
    present: int = 1
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    hidden: tuple[tuple[int, int], ...] = ()
    conv_channels: int = 256
    primary_capsules: int = 32
    primary_size: int = 8
    class_size: int = 16
    kernel: int = 9
    negative_slope: float = 0.0
    weight_std: float | None = None
    kept_capsules: tuple[int, ...] | None = None
    matrix_sizes: tuple[int, int, int, int] = SMALL_SIZES
    decoder: bool = True

    def build(self) -> Network:
        """The network with fresh weights, drawn from torch's global random numbers."""
        return MODELS[self.model](self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> NetworkSpec:
        """The inverse of :func:`dataclasses.asdict` after a trip through JSON, which knows no tuples."""
        tuples = {key: tuple(value) for key, value in stored.items() if isinstance(value, list)}
        tuples["hidden"] = tuple((capsules, size) for capsules, size in stored["hidden"])
        return cls(**{**stored, **tuples})


def _capsnet(spec: NetworkSpec) -> Network:
    return CapsuleNetwork(
        spec.image_shape,
        len(spec.classes),
        [make_routing(spec.routing, **spec.routing_settings) for _ in range(len(spec.hidden) + 1)],
        hidden=spec.hidden,
        conv_channels=spec.conv_channels,
        primary_capsules=spec.primary_capsules,
        primary_size=spec.primary_size,
        class_size=spec.class_size,
        kernel=spec.kernel,
        negative_slope=spec.negative_slope,
        weight_std=spec.weight_std,
        kept_capsules=spec.kept_capsules,
        decoder=spec.decoder,
        present=spec.present,
        mean=spec.mean,
        std=spec.std,
    )


def _matrix(spec: NetworkSpec) -> Network:
    return MatrixCapsuleNetwork(
        spec.image_shape,
        len(spec.classes),
        sizes=spec.matrix_sizes,
        iterations=spec.routing_settings.get("iterations", 3),
        decoder=spec.decoder,
        present=spec.present,
        mean=spec.mean,
        std=spec.std,
    )


def _cnn(spec: NetworkSpec) -> Network:
    return ConvolutionalNetwork(
        spec.image_shape,
        len(spec.classes),
        conv_channels=spec.conv_channels,
        second_channels=spec.primary_capsules * spec.primary_size,
        class_size=spec.class_size,
        kernel=spec.kernel,
        negative_slope=spec.negative_slope,
        decoder=spec.decoder,
        present=spec.present,
        mean=spec.mean,
        std=spec.std,
    )


MODELS: dict[str, Callable[[NetworkSpec], Network]] = {"capsnet": _capsnet, "matrix": _matrix, "cnn": _cnn}


def save_network(path: Path, network: Network, spec: NetworkSpec) -> None:
    """Write the weights and the spec to one file that :func:`load_network` needs nothing else for."""
    write_tensors(path, network.state_dict(), {"network": asdict(spec)})


def load_network(path: Path) -> tuple[Network, NetworkSpec]:
    """Build the network stored at ``path`` and give it its weights."""
    if not path.is_file():
        raise UserError(f"There is no trained network at {path}.")
    tensors, state = read_tensors(path)
    try:
        spec = NetworkSpec.from_json(state["network"])
    except (KeyError, TypeError) as error:
        raise DamagedFile(f"{path} holds no network of this version of torchcaps ({error}).") from error
    network = spec.build()
    network.load_state_dict(tensors)
    return network, spec
