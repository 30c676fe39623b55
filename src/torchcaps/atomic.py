"""Files of bytes that are written whole or not at all, and read with a limit. Nothing here imports torch."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from torchcaps.errors import UserError

UNFINISHED = ".part"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # for the other end of a pipe


class DamagedFile(UserError):
    """A file whose content is not what was written."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by a file with this content; whatever happens, the old or the new one is there, whole."""
    check_replaceable(path)
    # A name of its own: two processes that write the same file must not finish each other's.
    unfinished = path.parent / f".{secrets.token_hex(8)}{UNFINISHED}"
    try:
        with unfinished.open("xb") as file:  # "x": never through a link of that name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        sync_folder(path.parent)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise UserError(
                f"No space left for {path}. What was there before is untouched: make room and try again."
            ) from error
        if isinstance(error, OSError) and error.filename == os.fspath(unfinished):  # a name that nobody gave
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
        raise


def write_json(path: Path, values: Any) -> None:
    """Replace ``path`` by a file with these values, to be read by people, too."""
    write_atomically(path, (json.dumps(values, indent=2) + "\n").encode())


def check_replaceable(path: Path) -> None:
    """Only files and links are replaced: not what is a device, a pipe or a folder."""
    if os.path.lexists(path) and not (path.is_symlink() or stat.S_ISREG(path.lstat().st_mode)):
        raise UserError(f"{path} is there, and is not a file: choose another name.")


def sync_folder(folder: Path) -> None:
    """Make sure that names just changed in a folder outlast a power cut, where the system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # a system on which folders cannot be opened
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def read_bytes(path: Path, *, most: int) -> bytes:
    """The content of a regular file of at most this many bytes; pipes and devices are refused instead of waited for."""
    if not stat.S_ISREG(path.stat().st_mode):  # looked at first, because opening a device can already do something
        raise DamagedFile(f"{path} is not a regular file.")
    with os.fdopen(os.open(path, os.O_RDONLY | _WITHOUT_WAITING), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # exchanged in the meantime
            raise DamagedFile(f"{path} is not a regular file.")
        content = file.read(most + 1)
    if len(content) > most:
        raise DamagedFile(f"{path} is too large: at most {most:,} bytes are expected.")
    return content


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, which is made if it is not there. A link of that name is not followed."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | _WITHOUT_WAITING
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        file.write(f"{line}\n".encode())


def sweep(folder: Path) -> None:
    """Remove what a process that was killed left half-written; nobody else may be writing in the folder."""
    for path in folder.glob(f".*{UNFINISHED}"):
        path.unlink(missing_ok=True)
