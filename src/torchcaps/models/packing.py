"""Weights in fewer bits: how they are stored, and how they become float32 again.

In 16 bits a weight is a float16. In 8 bits it is a whole number from -127 to 127, with one scale for each row of its
tensor (each entry of the first axis). Biases and other vectors stay float32: they are few, and every image meets them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchcaps.errors import UserError

PRECISIONS = ("float32", "float16", "int8")
SCALE = ".scale"
"""What is added to the name of an 8-bit tensor for that of its scales."""


def check_precision(precision: str) -> None:
    """Raise :class:`UserError` for a precision that there is not."""
    if precision not in PRECISIONS:
        raise UserError(f"There is no precision {precision!a}: choose one of {', '.join(PRECISIONS)}.")


def pack(state: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """A network's state in fewer bits, scales (rows, 1, …) beside the tensors they belong to.

    Tensors with one axis become float32.

    >>> state = pack({"weight": torch.tensor([[0.5, -1.27], [0.0, 0.0]])}, "int8")
    >>> state["weight"].tolist(), list(state)
    ([[50, -127], [0, 0]], ['weight.scale', 'weight'])
    """
    check_precision(precision)
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{name} of this network is a {type(tensor).__name__}: only tensors can be stored.")
        if not tensor.isfinite().all():  # nothing is stored that could not be loaded
            raise UserError("This network has weights that are not finite: they are not worth storing. Train it anew.")
        if not tensor.is_floating_point():  # what a backbone counts
            tensors[name] = tensor
            continue
        tensor = tensor.detach().to(torch.float32)
        if precision == "float16" and tensor.ndim > 1:
            tensor = tensor.to(torch.float16)
            if not tensor.isfinite().all():
                raise UserError("This network has weights that float16 cannot hold: choose float32 or int8.")
        elif precision == "int8" and tensor.ndim > 1:
            scale = tensor.abs().flatten(1).amax(1).view(-1, *[1] * (tensor.ndim - 1)) / 127
            tensor = (tensor / torch.where(scale > 0, scale, 1.0)).round().clamp(-127, 127).to(torch.int8)
            tensors[name + SCALE] = scale
        tensors[name] = tensor
    return tensors


def unpack(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state that :func:`pack` was given, as far as the bits go; ``ValueError`` if the tensors are not its work."""
    state: dict[str, Tensor] = {}
    packed = {name for name, values in tensors.items() if values.dtype == torch.int8 and name + SCALE in tensors}
    scales = {name + SCALE for name in packed}
    for name, values in tensors.items():
        if name in scales:
            continue
        if name in packed:
            scale = tensors[name + SCALE]
            rows = (*values.shape[:1], *[1] * (values.ndim - 1))
            if values.ndim < 2 or scale.dtype != torch.float32 or tuple(scale.shape) != rows:
                raise ValueError(f"{name} has no scales that fit")
            values = values.to(torch.float32) * scale
        if values.is_floating_point():
            if values.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                raise ValueError(f"{name} holds {values.dtype}")
            values = values.to(torch.float32)
        state[name] = values
    return state
