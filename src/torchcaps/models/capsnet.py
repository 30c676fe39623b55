"""The capsule network of the paper: convolutions, primary capsules, class capsules, decoder."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from torchcaps.errors import UserError
from torchcaps.functional import Capsules
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.primary import ImageCapsules
from torchcaps.layers.stem import SmallStem, StemCapsules
from torchcaps.models.backbones import load_weights, make_backbone, maker
from torchcaps.models.base import Network, as_task
from torchcaps.models.config import CapsNetConfig, TaskConfig
from torchcaps.models.explain import Explanation, explain
from torchcaps.routing.base import Routing
from torchcaps.routing.config import RoutingConfig
from torchcaps.routing.discriminative import L2Routing
from torchcaps.routing.registry import own_name
from torchcaps.settings import SettingError

MOST_NUMBERS_EVALUATED = 2**27
"""That the stems of large images hold at a time."""


@final
class CapsuleNetwork(Network):
    """Images in [0, 1] -> two convolutions -> primary capsules -> capsule layers -> class capsules.

    Args:
        image_shape: (C, H, W) of the images.
        classes: how many, or their names.
        routing: of all capsule layers, by default :class:`torchcaps.L2Routing`; or one for each of them. Of different
            ones keep the ``state_dict()``: :meth:`save` can name one routing only.
        backbone: a module of your own, or what makes one, in place of the convolutions: images (B, C, H, W) ->
            feature maps (B, channels, h, w).
        labels_per_image: classes that every image shows; 0 for any number.
        mean, std: of each channel, to normalise images with.
        settings: sizes, by the names of :class:`torchcaps.models.config.CapsNetConfig`: ``layers`` (count and size of
            capsule layers in between), ``conv_channels``, ``primary_capsules`` (types), ``primary_size``,
            ``class_size``, ``kernel``, ``padding`` ("valid" or "same"), ``negative_slope``, ``weight_std``,
            ``reconstruction`` (whether there is a decoder), ``stem`` ("auto", "paper", "small").

    >>> network = CapsuleNetwork((1, 28, 28), classes=10)
    >>> output = network(torch.rand(2, 1, 28, 28))
    >>> output.capsules.activations.shape  # the length of each class capsule
    torch.Size([2, 10])
    """

    config_class = CapsNetConfig
    config: CapsNetConfig
    kept: Tensor | None

    def __init__(
        self,
        image_shape: Sequence[int],
        classes: int | Sequence[str],
        routing: Routing | Sequence[Routing] | None = None,
        *,
        backbone: nn.Module | Callable[[], nn.Module] | None = None,
        labels_per_image: int = 1,
        mean: float | Sequence[float] = (0.0,),
        std: float | Sequence[float] = (1.0,),
        **settings: Any,
    ) -> None:
        make_stem = maker(backbone)
        if backbone is not None:
            named = backbone if hasattr(backbone, "__qualname__") else type(backbone)
            settings = {"backbone": f"{named.__module__}:{named.__qualname__}", **settings}
        task = as_task(image_shape, classes, labels_per_image, mean, std)
        self._begin(CapsNetConfig.from_mapping(settings), task, routing=routing, backbone=make_stem)

    def _build(
        self, routing: Routing | Sequence[Routing] | None = None, backbone: Callable[[], nn.Module] | None = None
    ) -> None:
        config, task = self.config, self.task
        self.front = _front(config, task, backbone)
        self.config = config.replace(backbone_weights=None)  # they are its own now: nobody needs that file again
        self.map_shape = self.front.map_shape
        inputs = math.prod(self.map_shape)
        if config.kept_capsules is None:
            self.register_buffer("kept", None)
        else:
            if not config.kept_capsules or max(config.kept_capsules) >= inputs:
                raise SettingError("kept_capsules", f"must be numbers below {inputs}, and at least one")
            inputs = len(config.kept_capsules)
        classes = len(task.classes)
        sizes = [(inputs, config.primary_size), *config.layers, (classes, config.class_size)]
        routings = _one_each(routing, len(sizes) - 1)
        self.layers = nn.ModuleList(
            CapsuleLayer(*below, *above, layer_routing, weight_std=config.weight_std)
            for below, above, layer_routing in zip(sizes, sizes[1:], routings)
        )
        if any(layer_routing.holds_votes for layer_routing in routings):
            self.evaluation_batch = 100
        if isinstance(self.front, StemCapsules):
            fitting = MOST_NUMBERS_EVALUATED // self.front.numbers_per_image()
            self.evaluation_batch = max(10, min(self.evaluation_batch, fitting))
        self.decoder = Decoder(classes, config.class_size, task.image_shape) if config.reconstruction else None

    def _constants(self) -> dict[str, Tensor]:
        kept = self.config.kept_capsules
        return super()._constants() | ({} if kept is None else {"kept": torch.tensor(kept)})

    def numbers_per_image(self) -> int:
        return super().numbers_per_image() + self.front.numbers_per_image()

    def primary_capsules(self, images: Tensor) -> Capsules:
        """(B, C, H, W) -> (B, I, D)."""
        capsules: Capsules = self.front(self.normalised(images))
        return capsules

    def route(self, capsules: Capsules) -> Capsules:
        """Primary capsules (B, I, D) -> class capsules (B, J, E)."""
        if self.kept is not None:
            capsules = Capsules(*(tensor[:, self.kept] for tensor in capsules))
        for layer in self.layers:
            capsules = layer(capsules.poses, capsules.activations)
        return capsules

    def explain(self, images: Tensor) -> Explanation:
        """What each primary capsule adds to or takes from each class capsule, exactly.

        Args:
            images: (B, C, H, W) in [0, 1].

        >>> network = CapsuleNetwork((1, 28, 28), classes=10)
        >>> explanation = network.explain(torch.rand(2, 1, 28, 28))
        >>> explanation.maps.shape  # for each class, pixel by pixel
        torch.Size([2, 10, 28, 28])
        >>> torch.allclose(explanation.contributions.sum(1), explanation.lengths, rtol=1e-4)
        True
        """
        return explain(self, images)

    def routing_config(self) -> RoutingConfig:
        routings = [cast(CapsuleLayer, layer).routing for layer in self.layers]
        configs = [
            RoutingConfig(name=own_name(type(routing)), settings=routing.current_settings()) for routing in routings
        ]
        if any(config != configs[-1] for config in configs):
            raise UserError("The layers of this network have different routings, and a file can name one only.")
        return configs[-1]


def _front(
    config: CapsNetConfig, task: TaskConfig, backbone: Callable[[], nn.Module] | None
) -> ImageCapsules | StemCapsules:
    """From images to primary capsules."""
    if config.stem == "paper":
        return ImageCapsules(
            task.image_shape,
            config.conv_channels,
            config.primary_capsules,
            config.primary_size,
            kernel=config.kernel,
            padding=cast(Any, config.padding),
            negative_slope=config.negative_slope,
        )
    if config.stem == "small":
        stem: nn.Module = SmallStem(task.image_shape)
    elif backbone is not None:
        stem = make_backbone(backbone)
        if config.backbone_weights:
            load_weights(stem, Path(config.backbone_weights))
    else:
        raise SettingError(
            "backbone",
            f"{config.backbone!a} is somebody's own code. If it is yours, name it: --backbone module:function on the "
            "command line, load(path, backbone=function) in Python",
        )
    return StemCapsules(
        task.image_shape, stem, config.primary_capsules, config.primary_size, frozen=config.freeze_backbone
    )


def _one_each(routing: Routing | Sequence[Routing] | None, layers: int) -> list[Routing]:
    if routing is None or isinstance(routing, Routing):
        first = L2Routing() if routing is None else routing
        return [*(copy.deepcopy(first) for _ in range(layers - 1)), first]
    if isinstance(routing, str | type) or not all(isinstance(layer_routing, Routing) for layer_routing in routing):
        raise TypeError(f"routing must be an object such as L2Routing(), or several, not {routing!r}")
    if len(routing) != layers:
        raise ValueError(f"{layers} capsule layers need as many routings, not {len(routing)}")
    return list(routing)
