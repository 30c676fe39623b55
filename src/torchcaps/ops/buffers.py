"""Large arrays whose memory is used again from step to step."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from math import prod

import numpy as np
import torch
from torch import Tensor

MOST_BYTES_KEPT = 2**29
"""Of memory that no array uses at the moment."""
MOST_ROOM = 2
"""How many times as large as an array its memory may be."""
_kept: dict[int, mmap.mmap] = {}  # memory that no array uses, by identity; what was used last comes last


def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An array of any content, whose memory is used again once the array and all views of it have died.

    The system clears every page of new memory when it is touched for the first time. For arrays of 100 MB that takes
    longer than to fill them. Memory that was used before is there already, and in large pages if the system gives
    those on request. It may be larger than the array: what is to live for long, or to be sent elsewhere, is better
    copied.

    >>> first = buffer(64, 64)
    >>> address = first.data_ptr()
    >>> del first
    >>> buffer(64, 64).data_ptr() == address
    True
    """
    size = prod(shape) * dtype.itemsize
    memory = _take(size)
    owner = np.frombuffer(memory, np.uint8)  # for this use alone: the tensor's storage, which views share, holds it
    weakref.finalize(owner, _give_back, memory).atexit = False
    return torch.frombuffer(owner, dtype=torch.uint8)[:size].view(dtype).view(shape)


def release_buffers() -> None:
    """Give memory that no array uses back to the system. Otherwise up to 512 MB of it are kept."""
    _kept.clear()


def _take(size: int) -> mmap.mmap:
    fitting = [(len(memory), name) for name, memory in list(_kept.items()) if size <= len(memory) <= MOST_ROOM * size]
    for _, name in sorted(fitting):
        memory = _kept.pop(name, None)  # None: another thread was faster
        if memory is not None:
            return memory
    try:
        memory = mmap.mmap(-1, max(size, 1), access=mmap.ACCESS_COPY)  # not shared with processes that are forked
    except OSError as error:
        raise MemoryError(f"no {size} bytes of memory are to be had") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _give_back(memory: mmap.mmap) -> None:
    _kept[id(memory)] = memory
    for name in list(_kept):
        if sum(map(len, list(_kept.values()))) <= MOST_BYTES_KEPT:
            break
        _kept.pop(name, None)
