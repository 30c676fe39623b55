"""Weights in fewer bits: how they are stored, and how they become float32 again.

In 16 bits a weight is a float16. In 8 bits it is a whole number from -127 to 127, with one scale for each row of its
tensor (each entry of the first axis). Biases and other vectors stay float32: they are few, and every image meets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from torchcaps.errors import UserError

PRECISIONS = ("float32", "float16", "int8")
SCALE = ".scale"
"""What is added to the name of an 8-bit tensor for that of its scales."""


class Packed(NamedTuple):
    """A tensor as it is stored."""

    values: Tensor
    """float32, float16 or int8."""
    scale: Tensor | None = None
    """(rows, 1, …) float32, if the values are int8."""

    def unpacked(self) -> Tensor:
        """The numbers it stands for, float32."""
        values = self.values.to(torch.float32)
        return values if self.scale is None else values * self.scale


def check_finite(tensor: Tensor) -> None:
    """Nothing is stored that could not be loaded."""
    if not tensor.isfinite().all():
        raise UserError("This network has weights that are not finite: they are not worth storing. Train it anew.")


def packed(tensor: Tensor, precision: str) -> Packed:
    """A tensor with at least two axes in fewer bits; any other as float32.

    >>> packed(torch.tensor([[0.5, -1.27], [0.0, 0.0]]), "int8").values.tolist()
    [[50, -127], [0, 0]]
    """
    if precision not in PRECISIONS:
        raise UserError(f"There is no precision {precision!a}: choose one of {', '.join(PRECISIONS)}.")
    check_finite(tensor)
    tensor = tensor.detach().to(torch.float32)
    if precision == "float32" or tensor.ndim < 2:
        return Packed(tensor)
    if precision == "float16":
        half = tensor.to(torch.float16)
        if not half.isfinite().all():
            raise UserError("This network has weights that float16 cannot hold: choose float32 or int8.")
        return Packed(half)
    scale = tensor.abs().flatten(1).amax(1).view(-1, *[1] * (tensor.ndim - 1)) / 127
    steps = (tensor / torch.where(scale > 0, scale, 1.0)).round().clamp(-127, 127)
    return Packed(steps.to(torch.int8), scale)


def pack(state: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """A network's state in fewer bits, scales beside the tensors they belong to."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        values, scale = packed(tensor, precision)
        tensors[name] = values
        if scale is not None:
            tensors[name + SCALE] = scale
    return tensors


def unpack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state that :func:`pack` was given, as far as the bits go; ``ValueError`` if the tensors are not its work."""
    left = dict(tensors)
    state: dict[str, Tensor] = {}
    for name, values in tensors.items():
        if values.dtype == torch.int8:
            scale = left.pop(name + SCALE, None)
            rows = (*values.shape[:1], *[1] * (values.ndim - 1))
            if scale is None or values.ndim < 2 or scale.dtype != torch.float32 or tuple(scale.shape) != rows:
                raise ValueError(f"{name} has no scales that fit")
            state[name] = Packed(values, scale).unpacked()
        elif not values.is_floating_point():
            raise ValueError(f"{name} holds {values.dtype}")
        else:
            state[name] = values.to(torch.float32) if values.dtype == torch.float16 else values
    return {name: tensor for name, tensor in state.items() if name in left}
