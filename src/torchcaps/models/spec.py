"""A network as data: enough to build it again, and to prepare images for it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.models.capsnet import CapsuleNetwork
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
    decoder: bool = True

    def build(self) -> Network:
        """The network with fresh weights, drawn from torch's global random numbers."""
        return CapsuleNetwork(
            self.image_shape,
            len(self.classes),
            [make_routing(self.routing, **self.routing_settings) for _ in range(len(self.hidden) + 1)],
            hidden=self.hidden,
            conv_channels=self.conv_channels,
            primary_capsules=self.primary_capsules,
            primary_size=self.primary_size,
            class_size=self.class_size,
            kernel=self.kernel,
            negative_slope=self.negative_slope,
            weight_std=self.weight_std,
            decoder=self.decoder,
            present=self.present,
            mean=self.mean,
            std=self.std,
        )

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> NetworkSpec:
        """The inverse of :func:`dataclasses.asdict` after a trip through JSON, which knows no tuples."""
        tuples = {key: tuple(value) for key, value in stored.items() if isinstance(value, list)}
        tuples["hidden"] = tuple((capsules, size) for capsules, size in stored["hidden"])
        return cls(**{**stored, **tuples})


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
