"""Large arrays whose memory is used again from step to step."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from math import prod

import torch
from torch import Tensor

MOST_BYTES_KEPT = 2**29
"""Of memory that no array uses at the moment."""
MOST_ROOM = 2
"""How many times as large as an array its memory may be."""
_kept: dict[int, Tensor] = {}  # memory that no array uses, by address; what was used last comes last


def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An array of any content. Its memory is used again once it has died, so no view of it may live longer.

    The system clears every page of new memory when it is touched for the first time. For arrays of 100 MB that takes
    longer than to fill them. Memory that was used before is there already, and in large pages if the system gives
    those on request.

    >>> first = buffer(64, 64)
    >>> address = first.data_ptr()
    >>> del first
    >>> buffer(64, 64).data_ptr() == address
    True
    """
    size = prod(shape) * dtype.itemsize
    memory = _take(size)
    result = memory[:size].view(dtype).view(shape)
    weakref.finalize(result, _give_back, memory).atexit = False
    return result


def release_buffers() -> None:
    """Give memory that no array uses back to the system. Otherwise up to 512 MB of it are kept."""
    _kept.clear()


def _take(size: int) -> Tensor:
    fitting = [
        (len(memory), address) for address, memory in list(_kept.items()) if size <= len(memory) <= MOST_ROOM * size
    ]
    for _, address in sorted(fitting):
        memory = _kept.pop(address, None)  # None: another thread was faster
        if memory is not None:
            return memory
    try:
        pages = mmap.mmap(-1, max(size, 1), access=mmap.ACCESS_COPY)  # not shared with processes that are forked
    except OSError as error:
        raise MemoryError(f"no {size} bytes of memory are to be had") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system that was built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _give_back(memory: Tensor) -> None:
    _kept[memory.data_ptr()] = memory
    for address in list(_kept):
        if sum(len(memory) for memory in list(_kept.values())) <= MOST_BYTES_KEPT:
            break
        _kept.pop(address, None)
