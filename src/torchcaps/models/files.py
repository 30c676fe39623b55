"""Trained networks in files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcaps.atomic import DamagedFile
from torchcaps.errors import UserError
from torchcaps.models.backbones import make_backbone, maker
from torchcaps.models.base import Network
from torchcaps.models.config import ModelConfig, Own, TaskConfig
from torchcaps.models.packing import unpack
from torchcaps.routing.base import Routing
from torchcaps.routing.config import RoutingConfig
from torchcaps.settings import SettingError, Settings, setting
from torchcaps.storage import read_tensors

MODEL_FILE = "model.safetensors"
BOX = Path(__file__).parents[1] / "box"
"""Run folders of the trained networks that come with the package."""


class Description(Settings):
    """All of a stored network but its weights."""

    model: ModelConfig = setting()
    task: TaskConfig = setting()
    routing: RoutingConfig = setting()

    def build(self, own: Own | None = None) -> Network:
        return self.model.build(self.task, self.routing, own)


def load(
    path: Path | str,
    *,
    routing: type[Routing] | None = None,
    backbone: nn.Module | Callable[[], nn.Module] | None = None,
    device: torch.device | str = "cpu",
) -> Network:
    """A trained network, ready to use: it knows its classes and how to prepare images.

    Args:
        path: a run folder, or a file that :meth:`Network.save` wrote.
        routing: the class of a routing of your own that the network was trained with. What a file names is never
            imported.
        backbone: a backbone of your own, or what makes one, if it has one. A module is copied.
        device: where to put it.

    Returns:
        the network in evaluation mode; ``network.classes`` are its classes, ``network.prepare`` takes images and
        ``network.predict`` classifies them.

    >>> import tempfile, torchcaps
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torchcaps.CapsuleNetwork((1, 28, 28), ["cat", "dog"]).save(f"{folder}/pets.safetensors")
    ...     torchcaps.load(f"{folder}/pets.safetensors").classes
    ('cat', 'dog')
    """
    if routing is not None and not (isinstance(routing, type) and issubclass(routing, Routing)):
        raise TypeError(f"routing must be a class that is a torchcaps.routing.Routing, not {routing!r}")
    path = Path(path)
    file = path / MODEL_FILE if path.is_dir() else path
    if not file.is_file():
        if (path / "config.yaml").is_file() and not (path / "result.json").is_file():
            again = f"torchcaps train --resume {path}"
            raise UserError(f"There is no trained network at {path}: the run is not finished. To finish it: {again}")
        raise UserError(f"There is no trained network at {file}.")
    stored, state = read_tensors(file)
    try:
        tensors = unpack(stored)
    except ValueError as error:
        raise DamagedFile(f"{file} is damaged: {error}.") from None
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise DamagedFile(f"{file} holds numbers that are not finite, in {bad[0]!a}.")
    if isinstance(backbone, nn.Module):
        backbone = copy.deepcopy(backbone)  # whose weights may be in use elsewhere
    network = _described(file, state, tensors, Own(routing, maker(backbone)))
    network.load_state_dict(tensors)
    return network.to(device).eval()


def trained_with(file: Path) -> dict[str, Any] | None:
    """The settings of the run that made a file; None if it does not say."""
    _, state = read_tensors(file)
    settings = state.get("settings")
    return settings if isinstance(settings, dict) else None


def in_the_box(name: str) -> Path:
    """The run folder of a trained network that comes with the package."""
    names = sorted(folder.parent.name for folder in BOX.glob(f"*/{MODEL_FILE}"))
    if name not in names:
        raise UserError(f"No trained network {name!a} comes with torchcaps; those that do: {', '.join(names)}.")
    return BOX / name


def pretrained(name: str = "mnist", *, device: torch.device | str = "cpu") -> Network:
    """A trained network that comes with the package, ready to use.

    Args:
        name: "mnist" (handwritten digits; L1 routing, pruned, 8-bit weights, with a decoder).
        device: where to put it.

    >>> pretrained("mnist").classes
    ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    """
    return load(in_the_box(name), device=device)


def _described(file: Path, state: dict[str, Any], tensors: dict[str, Tensor], own: Own) -> Network:
    """The network that a file describes, built only if its tensors are those of the file.

    First without memory and without its routing, so that no file asks for more than it holds. Code of the user's own
    never runs without memory, where numbers cannot be read.
    """
    if "network" not in state:
        raise DamagedFile(f"{file} holds no network.")
    try:
        description = Description.from_mapping(state["network"])
    except SettingError as error:
        raise DamagedFile(f"{file} describes no network of this version of torchcaps: {error}.") from error
    stored = _forms(tensors)
    if own.backbone is not None:
        own = own._replace(backbone=maker(make_backbone(own.backbone)))
    try:
        with torch.device("meta"):  # shapes without memory
            without_routing = description.replace(routing=RoutingConfig(name="uniform")).build(own)
        expected = _forms(without_routing.state_dict())
        if expected.items() <= stored.items():
            network = description.build(own)
            expected = _forms(network.state_dict())
            if expected == stored:
                return network
    except UserError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedFile(f"{file} describes a network that cannot be built: {error}.") from error
    wrong = sorted(name for name in expected.keys() | stored.keys() if expected.get(name) != stored.get(name))
    raise DamagedFile(f"{file} describes another network than it holds: {', '.join(wrong[:5])} do not fit.")


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, bool]]:
    return {name: (tensor.shape, tensor.is_floating_point()) for name, tensor in tensors.items()}
