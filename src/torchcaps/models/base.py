"""What all networks have in common."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchcaps.errors import UserError
from torchcaps.functional import Capsules, at_least_float32, margin_loss
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.layers.decoder import Decoder
from torchcaps.layers.primary import ImageCapsules
from torchcaps.layers.stem import evaluating
from torchcaps.models.config import ModelConfig, TaskConfig
from torchcaps.models.packing import pack
from torchcaps.routing.config import RoutingConfig
from torchcaps.settings import SettingError
from torchcaps.storage import write_tensors

PRESENT_FROM = 0.5
"""Length from which a class counts as shown where images may show any number of them."""


ROUNDING = 0.01
"""How far beyond [0, 1] the numbers of an image may be."""


class Output(NamedTuple):
    """What the network makes of a batch of images."""

    capsules: Capsules
    """The class capsules; ``capsules.activations`` (B, J) are the lengths that decide."""
    reconstructions: Tensor | None
    """(B, K, C, H, W) one image for each class asked for, when labels were given and there is a decoder."""


class Prediction(NamedTuple):
    """What a network says about a batch of images."""

    labels: Tensor
    """(B, K) numbers of the classes found, surest first; -1 where fewer than K were found."""
    lengths: Tensor
    """(B, J) how sure it is of every class, from 0 to 1."""


class Network(nn.Module, ABC):
    """Images in [0, 1] -> primary capsules -> class capsules, and back to images if there is a decoder."""

    evaluation_batch: int = 500
    """Images to classify at a time."""
    config_class: ClassVar[type[ModelConfig]]
    config: ModelConfig
    """What it is built from."""
    decoder: Decoder | None
    map_shape: tuple[int, int, int]
    """(rows, columns, types) of the primary capsules, in the order of their numbering."""
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        image_shape: Sequence[int],
        classes: int | Sequence[str],
        *,
        labels_per_image: int = 1,
        mean: float | Sequence[float] = (0.0,),
        std: float | Sequence[float] = (1.0,),
        **settings: Any,
    ) -> None:
        task = as_task(image_shape, classes, labels_per_image, mean, std)
        self._begin(self.config_class.from_mapping(settings), task)

    @classmethod
    def from_config(cls, config: ModelConfig, task: TaskConfig, **parts: Any) -> Self:
        """The network that settings describe; ``parts`` are the objects it needs that no setting can name."""
        network = cls.__new__(cls)
        network._begin(config, task, **parts)
        return network

    def _begin(self, config: ModelConfig, task: TaskConfig, **parts: Any) -> None:
        super().__init__()
        self.config = config.resolved(task)
        self.task = task
        for name, values in self._constants().items():
            self.register_buffer(name, values, persistent=False)
        self._build(**parts)

    def _constants(self) -> dict[str, Tensor]:
        """Numbers that follow from the settings: no file has them."""
        return {name: torch.tensor(getattr(self.task, name)).view(-1, 1, 1) for name in ("mean", "std")}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to a device or a data type; what had no memory gets it with its numbers."""
        had_memory = not self.mean.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not (had_memory or self.mean.is_meta):
            for name, values in self._constants().items():
                getattr(self, name).copy_(values)
        return self

    @abstractmethod
    def _build(self) -> None:
        """Make the layers that ``config`` and ``task`` ask for."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the class capsules."""
        return self.task.classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images it takes."""
        return self.task.image_shape

    def normalised(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.image_shape or not images.is_floating_point():
            wanted = ", ".join(map(str, self.image_shape))
            given = f"{images.dtype} with shape {tuple(images.shape)}"
            raise ValueError(f"images must be numbers in [0, 1], (B, {wanted}), not {given}: prepare() makes them so")
        return (images - self.mean) / self.std

    @abstractmethod
    def primary_capsules(self, images: Tensor) -> Capsules:
        """(B, C, H, W) -> (B, I, D)."""

    @abstractmethod
    def route(self, capsules: Capsules) -> Capsules:
        """Primary capsules (B, I, D) -> class capsules (B, J, E)."""

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Output:
        """Classify images and, if there is a decoder, draw them again.

        Args:
            images: (B, C, H, W) in [0, 1].
            labels: the classes to draw, (B,) or (B, K); without them nothing is drawn.
        """
        capsules = self.route(self.primary_capsules(images))
        reconstructions = None
        if self.decoder is not None and labels is not None:
            reconstructions = self.decoder(capsules.poses, labels)
        return Output(capsules, reconstructions)

    def loss(
        self, capsules: Capsules, labels: Tensor, progress: float = 1.0, image_weights: Tensor | None = None
    ) -> Tensor:
        """What training descends for the class capsules.

        Args:
            capsules: of a forward pass.
            labels: class numbers (B,) or (B, K), or presence (B, J).
            progress: how far training has come, from 0 to 1.
            image_weights: how much each image counts, (B,).
        """
        return margin_loss(at_least_float32(capsules.activations), labels, image_weights=image_weights)

    def found(self, capsules: Capsules) -> Tensor:
        """The classes (B, K) with the longest capsules, longest first; -1 where fewer than K are shown."""
        if self.task.labels_per_image:
            return capsules.activations.topk(self.task.labels_per_image, dim=1).indices
        lengths, order = capsules.activations.sort(dim=1, descending=True)
        return torch.where(lengths > PRESENT_FROM, order, -1)

    def prepare(self, images: Tensor | np.ndarray) -> Tensor:
        """Images of any size, grey or colour, as this network wants them.

        Args:
            images: one or several, bytes or numbers in [0, 1]; (H, W), (H, W, C), (C, H, W), or a batch of these. Three
                images (3, H, W) would be taken for one in colour: give grey batches as (B, 1, H, W).

        Returns:
            (B, C, H, W)
        """
        return prepared(images, self.task).to(self.mean)

    @torch.no_grad()  # not inference mode: lengths may be what another network learns
    def predict(self, images: Tensor) -> Prediction:
        """Classify images (B, C, H, W) in [0, 1], a few at a time, in evaluation mode."""
        with evaluating(self):
            parts = [self.forward(part).capsules for part in torch.split(images, self.evaluation_batch)]
        found = torch.cat([self.found(capsules) for capsules in parts])
        lengths = check_answers(torch.cat([capsules.activations for capsules in parts]).float())
        return Prediction(found, lengths)

    def reconstruct(self, capsules: Capsules) -> Tensor:
        """Draw the classes found: (B, K, C, H, W)."""
        if self.decoder is None:
            raise UserError("This network was trained without reconstruction: it has no decoder.")
        images: Tensor = self.decoder(capsules.poses, self.found(capsules))
        return images

    def numbers(self) -> int:
        """How many numbers were learned: weights, biases and routing coefficients."""
        return sum(tensor.numel() for tensor in self.state_dict().values())

    def numbers_per_image(self) -> int:
        """Roughly how many numbers training holds for each image of a batch."""
        rows, columns, types = self.map_shape
        return 64 * rows * columns * types

    def copy_with(self, state: Mapping[str, Tensor]) -> Self:
        """A copy with these weights, named as in :meth:`state_dict`."""
        network = copy.deepcopy(self)
        network.load_state_dict(state)
        return network

    def folded(self) -> Self:
        """A copy for inference, with shared coefficients multiplied into the weights; later changes do not reach it."""
        network = copy.deepcopy(self).eval().requires_grad_(False)
        for module in network.modules():
            if isinstance(module, CapsuleLayer | ImageCapsules):
                module.fold()
        return network

    def routing_config(self) -> RoutingConfig:
        """Name and settings of the routing; those of the default where the network has none to choose."""
        return RoutingConfig()

    def description(self) -> dict[str, Any]:
        """All of it but its weights, as plain values: model, task and routing."""
        return {
            "model": self.config.to_mapping(),
            "task": self.task.to_mapping(),
            "routing": self.routing_config().to_mapping(),
        }

    def save(self, path: Path | str, *, precision: str = "float32", settings: Mapping[str, Any] | None = None) -> None:
        """Write weights and description to one file, for :func:`torchcaps.load`.

        Args:
            path: of the file.
            precision: of the weights there: "float32", or "float16" or "int8" for a smaller file. What is
                loaded is float32 again.
            settings: of the run that trained it, to be kept beside them.
        """
        trained = {} if settings is None else {"settings": dict(settings)}
        state = self.state_dict()
        write_tensors(Path(path), pack(state, precision), {"network": self.description(), **trained})

    def save_pretrained(self, folder: Path | str, *, precision: str = "float32") -> None:
        """Write a folder in the convention of the Hugging Face hub: config.json, model.safetensors, README.md.

        Needs the extra [hub]; sends nothing. :func:`torchcaps.load` reads such a folder without it.

        Args:
            folder: made if it is not there.
            precision: of the weights, as for :meth:`save`.
        """
        from torchcaps.trained.hub import Pretrained

        Pretrained(self, precision=precision).save_pretrained(folder)

    @classmethod
    def from_pretrained(cls, folder: Path | str, **options: Any) -> Self:
        """The network that :meth:`save_pretrained` wrote to a folder, or ``owner/name`` on the Hugging Face hub.

        Args:
            folder: a folder, or the name of a repository.
            options: ``routing`` and ``device`` as for :func:`torchcaps.load`, and the hub's own, such as ``revision``.
        """
        from torchcaps.trained.hub import Pretrained

        network = Pretrained.from_pretrained(folder, **options).network
        if not isinstance(network, cls):
            raise UserError(f"{folder} holds a {type(network).__name__}, not a {cls.__name__}.")
        return network


def check_answers(lengths: Tensor) -> Tensor:
    """The lengths that a network answers with, if they are numbers."""
    if not lengths.isfinite().all():
        raise UserError("The answers of this network are not finite: its weights are too large. Train it anew.")
    return lengths


def as_task(
    image_shape: Sequence[int],
    classes: int | Sequence[str],
    labels_per_image: int = 1,
    mean: float | Sequence[float] = (0.0,),
    std: float | Sequence[float] = (1.0,),
) -> TaskConfig:
    """A task from what a constructor is given; numbered classes are named "0", "1", …"""
    if isinstance(classes, str):
        raise SettingError("classes", f"must be a number, or names, not {classes!r}")
    names = tuple(classes) if isinstance(classes, Sequence) else tuple(map(str, range(operator.index(classes))))
    return TaskConfig(
        image_shape=cast(Any, tuple(image_shape)),  # which it checks
        classes=names,
        labels_per_image=labels_per_image,
        mean=tuple(mean) if isinstance(mean, Sequence) else (mean,),
        std=tuple(std) if isinstance(std, Sequence) else (std,),
    )


def prepared(images: Tensor | np.ndarray, task: TaskConfig) -> Tensor:
    """Images of any size as the network of this task wants them; see :meth:`Network.prepare`."""
    # A copy, because torch takes neither arrays that are read backwards nor, without a warning, those of Pillow.
    tensor = images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))
    if tensor.dtype == torch.uint8:
        tensor = tensor.float() / 255
    if not tensor.is_floating_point():
        raise ValueError(f"images must be bytes, or floating-point numbers in [0, 1], not {tensor.dtype}")
    if tensor.numel() and not (tensor.min() >= -ROUNDING and tensor.max() <= 1 + ROUNDING):
        raise ValueError(f"images must be numbers in [0, 1], not {tensor.min():g} to {tensor.max():g}: or give bytes")
    channels, height, width = task.source_shape or task.image_shape
    batch = _channels_first(tensor.float(), channels)
    if batch.shape[2:] != (height, width):
        batch = _fitted(batch, (height, width), task.fit)
    _, rows, columns = task.image_shape
    top, left = (height - rows) // 2, (width - columns) // 2
    batch = batch[:, :, top : top + rows, left : left + columns]
    if task.standardise:
        batch = standardised(batch)
    return batch.contiguous()


def standardised(images: Tensor) -> Tensor:
    """Each image (C, H, W) of a batch at mean 0 and standard deviation 1; one of a single colour becomes zeros."""
    flat = images.flatten(1)
    deviation = flat.std(1, correction=0).clamp_min(flat.shape[1] ** -0.5 / 255)
    return (images - flat.mean(1).view(-1, 1, 1, 1)) / deviation.view(-1, 1, 1, 1)


def _channels_first(images: Tensor, channels: int) -> Tensor:
    """(H, W), (B, H, W), channels first or last, with or without a batch -> (B, C, H, W)."""
    shape = tuple(images.shape)
    known = {1, 3, channels}
    if images.ndim == 2:
        images = images[None, None]
    elif images.ndim == 3:
        if shape[0] in known:
            images = images[None]
        elif shape[2] in known:
            images = images.permute(2, 0, 1)[None]
        elif shape[2] == 4:
            raise ValueError(f"images of shape {shape} have an alpha channel: convert them to RGB")
        else:
            images = images[:, None]
    elif images.ndim == 4 and shape[1] not in known:
        images = images.permute(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in ({channels} if channels not in (1, 3) else known):
        raise ValueError(f"images of shape {shape} are neither grey nor colour")
    if images.shape[1] == channels:
        return images
    if channels == 1:
        weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)  # the usual grey of red, green and blue
        return (images * weights).sum(1, keepdim=True)
    return images.expand(-1, channels, -1, -1)


def _fitted(images: Tensor, size: tuple[int, int], fit: str) -> Tensor:
    """Images (B, C, H, W) at another size: stretched, padded with black, or cropped at the centre."""
    ratios = [wanted / given for wanted, given in zip(size, images.shape[2:])]
    if fit == "stretch":
        scaled = list(size)
    else:
        ratio = min(ratios) if fit == "pad" else max(ratios)
        scaled = [max(1, round(given * ratio)) for given in images.shape[2:]]
    images = F.interpolate(images, scaled, mode="bicubic", antialias=True).clamp(0, 1)
    margins = [wanted - given for wanted, given in zip(size, scaled)]  # negative where there is too much
    top, left = margins[0] // 2, margins[1] // 2
    return F.pad(images, (left, margins[1] - left, top, margins[0] - top))
