"""Files of bytes that are written whole or not at all, and read with a limit. Nothing here imports torch."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from torchcaps.errors import UserError

UNFINISHED = ".part"


class DamagedFile(UserError):
    """A file whose content is not what was written."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by a file with this content; whatever happens, the old or the new one is there, whole."""
    unfinished = path.parent / f".{path.name}{UNFINISHED}"
    try:
        with os.fdopen(_create(unfinished), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        _sync_folder(path.parent)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise UserError(
                f"No space left for {path}. What was there before is untouched: make room and try again."
            ) from error
        raise


def _create(path: Path) -> int:
    """A new file, opened for writing. Whatever has that name is removed first, and a link is not followed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, where folders can be synced."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(descriptor)


def read_bytes(path: Path, *, most: int) -> bytes:
    """The content of a regular file of at most this many bytes; pipes and devices are refused instead of waited for."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise DamagedFile(f"{path} is not a regular file.")
    if path.stat().st_size > most:
        raise DamagedFile(f"{path} is too large: at most {most:,} bytes are expected.")
    return path.read_bytes()
