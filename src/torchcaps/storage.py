"""Tensors and a little JSON in one file that is written whole or not at all, and checked when read.

The format is safetensors; the JSON and a SHA-256 of everything sit in its metadata. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from torchcaps.atomic import DamagedFile, write_atomically

KEY = "torchcaps"
LARGEST_FILE = 2**34
LARGEST_STATE = 2**24
"""Characters of the JSON in a file."""


def write_tensors(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and a JSON-able state to ``path``, atomically."""
    held: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        held[name] = tensor.clone() if place in memory else tensor  # tied weights are written twice
        memory.add(place)
    encoded = json.dumps(state)
    # One key only: safetensors writes several in any order, and equal contents should be equal files.
    envelope = json.dumps({"state": encoded, "sha256": _digest(held, encoded)})
    write_atomically(path, safetensors.torch.save(held, {KEY: envelope}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`write_tensors` wrote, or :class:`DamagedFile` if that is no longer what the file holds."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("not a regular file")
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"more than {LARGEST_FILE:,} bytes")
        with safetensors.safe_open(path, framework="pt") as file:
            written = (file.metadata() or {})[KEY]
            if len(written) > LARGEST_STATE:
                raise ValueError(f"more than {LARGEST_STATE:,} characters of description")
            envelope = json.loads(written)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if envelope["sha256"] != _digest(tensors, envelope["state"]):
            raise ValueError("its content does not match its checksum")
        state = json.loads(envelope["state"])
        if not isinstance(state, dict):
            raise ValueError("its description is not one")
    except (FileNotFoundError, MemoryError):
        raise
    except Exception as error:  # damaged files make readers raise nearly anything
        reason = str(error).split("\n")[0][:200]
        raise DamagedFile(f"{path} is damaged or not one of torchcaps' files ({reason}).") from error
    return tensors, state


def _digest(tensors: dict[str, Tensor], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
