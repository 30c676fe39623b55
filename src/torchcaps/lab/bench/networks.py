"""The paper's networks, by the names that the benchmark has for them. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchcaps.models.config import MODELS, CapsNetConfig, ModelConfig, TaskConfig
from torchcaps.routing.config import NAMES, RoutingConfig

if TYPE_CHECKING:
    from torchcaps.models.base import Network

MODEL_NAMES = tuple(name for name in MODELS if name != CapsNetConfig.name)
KINDS = (*NAMES, *MODEL_NAMES)
"""What can be measured: the capsnet with each routing, and the other models."""


@dataclass(frozen=True)
class BenchNetwork:
    """One of the paper's networks, without its routing."""

    task: TaskConfig
    model: CapsNetConfig

    def settings(self, kind: str) -> tuple[ModelConfig, RoutingConfig]:
        """Of the capsnet with a routing, or of one of the other models with and without a decoder alike."""
        if kind not in MODEL_NAMES:
            return self.model, RoutingConfig(name=kind)
        model = ModelConfig.from_mapping({"name": kind, "reconstruction": self.model.reconstruction})
        return model, RoutingConfig()

    def build(self, kind: str) -> Network:
        """The capsnet with a routing, or another model, with fresh weights."""
        model, routing = self.settings(kind)
        return model.build(self.task, routing)


def _network(image_shape: tuple[int, int, int], labels_per_image: int = 1, **settings: Any) -> BenchNetwork:
    task = TaskConfig(image_shape=image_shape, classes=tuple("0123456789"), labels_per_image=labels_per_image)
    return BenchNetwork(task, CapsNetConfig(**settings).resolved(task))


_CIFAR: dict[str, Any] = {"primary_capsules": 64, "negative_slope": 0.2, "reconstruction": False}
NETWORKS = {
    "mnist": _network((1, 28, 28)),
    "mnist-fc": _network((1, 28, 28), reconstruction=False),
    "multi-mnist": _network((1, 36, 36), labels_per_image=2),
    "cifar-10-24": _network((3, 24, 24), **_CIFAR),
    "cifar-10-32": _network((3, 32, 32), **_CIFAR),
    "cifar-10-24-same": _network((3, 24, 24), padding="same", **_CIFAR),
}
