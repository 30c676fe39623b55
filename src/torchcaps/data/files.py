"""Files that are not trusted: only regular ones are opened, up to a limit, and names are shown escaped."""

from __future__ import annotations

import os
import stat
from io import BufferedReader
from pathlib import Path

from torchcaps.errors import UserError


class BadFile(UserError):
    """A file that cannot be used. ``name`` is the file as it may be printed, ``reason`` what is wrong with it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} {reason}")
        self.name = name
        self.reason = reason


def shown(name: str | Path) -> str:
    r"""A name that is safe to print: control characters and bytes that are not UTF-8 are escaped.

    >>> print(shown("caf\udce9 \x1b[31m"))
    caf\xe9 \x1b[31m
    """
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in str(name))


def _escaped(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # how Python holds a byte that is not UTF-8
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode()


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. A pipe, a device or a folder is an error, and never waited for.

    Raises:
        BadFile: there is no such file, it is not a regular one, or it must not be read.
    """
    try:
        # Looked at first, because opening a device can already do something; and again, in case it was exchanged.
        _check_regular(path, os.stat(path))
        # O_NONBLOCK: opening a pipe does not wait for a writer. It means nothing to a regular file.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        stream = os.fdopen(descriptor, "rb")
        try:
            _check_regular(path, os.fstat(descriptor))
        except BaseException:
            stream.close()
            raise
    except FileNotFoundError:
        raise BadFile(shown(path), "does not exist (there is no file of that name)") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadFile(shown(path), f"cannot be read ({reason})") from error
    return stream


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise BadFile(shown(path), "is a folder, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise BadFile(shown(path), "is not a regular file")


def read_bytes(path: Path, limit: int) -> bytearray:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        BadFile: it is larger, or :func:`open_regular` cannot open it.
    """
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            content = bytearray() if size > limit else bytearray(stream.read(limit + 1))
        except OSError as error:
            raise BadFile(shown(path), f"cannot be read ({error.strerror or error})") from error
    if max(size, len(content)) > limit:
        raise BadFile(shown(path), f"is too large: it has {max(size, len(content)):,} bytes, the limit is {limit:,}")
    return content
