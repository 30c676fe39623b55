"""Tensors and a little JSON in one file that is written whole or not at all, and checked when read.

The format is safetensors; the JSON and a SHA-256 of everything sit in its metadata. Nothing is pickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from torchcaps.errors import UserError

UNFINISHED = ".part"
KEY = "torchcaps"


class DamagedFile(UserError):
    """A file whose content is not what was written."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by a file with this content; whatever happens, the old or the new one is there, whole."""
    unfinished = path.parent / f".{path.name}{UNFINISHED}"
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise UserError(
                f"No space left for {path}. What was there before is untouched: make room and try again."
            ) from error
        raise


def write_tensors(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and a JSON-able state to ``path``, atomically."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    encoded = json.dumps(state)
    # One key only: safetensors writes several in any order, and equal contents should be equal files.
    envelope = json.dumps({"state": encoded, "sha256": _digest(held, encoded)})
    write_atomically(path, safetensors.torch.save(held, {KEY: envelope}))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What :func:`write_tensors` wrote, or :class:`DamagedFile` if that is no longer what the file holds."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            envelope = json.loads((file.metadata() or {})[KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        intact = envelope["sha256"] == _digest(tensors, envelope["state"])
    except FileNotFoundError:
        raise
    except (safetensors.SafetensorError, KeyError, OSError, ValueError) as error:
        raise DamagedFile(f"{path} is damaged or not one of torchcaps' files ({error}).") from error
    if not intact:
        raise DamagedFile(f"{path} is damaged: its content does not match its checksum.")
    return tensors, json.loads(envelope["state"])


def _digest(tensors: dict[str, Tensor], state: str) -> str:
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
