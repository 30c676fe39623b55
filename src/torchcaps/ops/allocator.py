"""Asking for memory in large pages, and the C library to keep what a program gives back."""

from __future__ import annotations

import ctypes
import os
import platform

# mallopt parameters, from glibc's malloc.h
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4

_LARGEST = 2**31 - 1
_TOP_PAD_BYTES = 64 * 2**20


def keep_memory() -> bool:
    """Tell this process's allocator to keep freed memory; True where that is supported (Linux with glibc).

    By default glibc maps every tensor over 32 MB afresh and unmaps it when it dies. The system then clears each
    page again on first touch, which can cost more time than the arithmetic. After this call
    large tensors come from the ordinary heap, and what they leave behind is used again. Torch is also told to ask for
    pages of 2 MB: it looks at the variable THP_MEM_ALLOC_ENABLE when it makes the first tensor.

    The price: memory is given back to the system only when the process ends. That is a decision for a program,
    not for a library, so nothing in torchcaps calls this on import. Call it once, before the first tensor.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _LARGEST), (_TOP_PAD, _TOP_PAD_BYTES))
    return all(mallopt(parameter, value) == 1 for parameter, value in settings)
