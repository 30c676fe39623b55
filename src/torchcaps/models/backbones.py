"""Backbones: modules of somebody else's that make feature maps of images."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from torchcaps.errors import UserError


class _LastMap(nn.Module):
    """A timm model that returns its last feature map."""

    def __init__(self, name: str) -> None:
        super().__init__()
        timm: Any = importlib.import_module("timm")
        self.model = timm.create_model(name, pretrained=False, features_only=True)

    def forward(self, images: Tensor) -> Tensor:
        maps: list[Tensor] = self.model(images)
        return maps[-1]


def import_backbone(name: str) -> Callable[[], nn.Module]:
    """What makes the backbone that ``timm:NAME`` or ``module:function`` names. Runs the code of that module."""
    module, _, attribute = name.partition(":")
    if not (module and attribute):
        raise UserError(f"The backbone '{name}' must be timm:NAME or module:function.")
    if module == "timm":
        try:
            importlib.import_module("timm")
        except Exception as error:  # timm itself, or torchvision, which it needs
            raise UserError(f"The backbone '{name}' needs timm, which cannot be imported: {error}.") from error
        return partial(_LastMap, attribute)
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a module of the user's own does when it is imported
        raise UserError(f"Could not load the backbone '{name}': {error}.") from error
    if not callable(function):
        raise UserError(f"'{name}' cannot be called to make a backbone.")
    return function  # type: ignore[no-any-return]


def maker(backbone: nn.Module | Callable[[], nn.Module] | None) -> Callable[[], nn.Module] | None:
    """What makes the backbone: a module is made already."""
    if isinstance(backbone, nn.Module):
        return lambda: backbone
    if not (backbone is None or callable(backbone)):
        raise TypeError(f"backbone must be a module, or a function that makes one, not {backbone!r}")
    return backbone


def make_backbone(function: Callable[[], nn.Module]) -> nn.Module:
    """What a function of the user's own makes, if that is a module."""
    name = getattr(function, "__name__", "the backbone")
    try:
        made = function()
    except Exception as error:  # whatever it does
        raise UserError(f"{name} could not make a backbone: {error}.") from error
    if not isinstance(made, nn.Module):
        raise UserError(f"{name} must return a torch module, not {type(made).__name__}.")
    return made


def load_weights(backbone: nn.Module, path: Path) -> None:
    """Give a backbone the weights in a file: safetensors, or what torch.save wrote, of which only tensors are read."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file.")
    try:
        if path.suffix == ".safetensors":
            state = safetensors.torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        backbone.load_state_dict(state)
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except Exception as error:  # damaged files and weights of another module
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path} does not hold the weights of this backbone: {reason}.") from error
