"""What a program can know about its machine and its process without importing torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torchcaps
from torchcaps.errors import UserError

END_WITH_PARENT = "TORCHCAPS_END_WITH_PARENT"
"""In the environment of a process that should stop when the one that started it is gone: the latter's number."""
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """If the environment asks for it, be told to stop, as by SIGTERM, when the parent dies; Linux only."""
    parent = os.environ.pop(END_WITH_PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != parent:
        raise UserError("What had started this process is gone.")


def is_first_process() -> bool:
    """Whether this is the one process that writes files and talks, as far as launchers have told it."""
    return from_environment("RANK" if "RANK" in os.environ else "LOCAL_RANK") == 0


def from_environment(name: str, *, least: int = 0, default: int = 0) -> int:
    """A number that a launcher has left in the environment."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) >= least):
        raise UserError(f"The environment variable {name} must be a whole number from {least}, not {text!a}.")
    return int(text)


def usable_cores() -> int:
    """The cores this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_threads(processes: int = 1) -> int:
    """As many as OMP_NUM_THREADS says, or the share of one of several processes in the cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    cores = usable_cores()
    return min(int(asked), cores) if asked.isdecimal() and int(asked) else max(1, cores // processes)


def cpu_name() -> str:
    """The processor's name as the operating system tells it."""
    return kernel_says("cpuinfo", "model name") or platform.processor() or platform.machine()


def kernel_says(file: str, field: str) -> str:
    """What Linux says under a heading of one of its files below /proc; nothing where there is no such thing."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{field}\s*:\s*(.+)$", Path("/proc", file).read_text(), re.MULTILINE):
            return found[1].strip()
    return ""


def versions() -> dict[str, str]:
    """What a result depends on."""
    own = {"python": platform.python_version(), "torchcaps": torchcaps.__version__}
    return own | {name: version(name) for name in ("torch", "lightning-fabric", "numpy")}


def commit() -> str | None:
    """The commit of the source this runs from, marked if it was changed since; None if it is not a checkout."""
    root = Path(__file__).parents[3]
    if not (root / "pyproject.toml").is_file():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_features() -> list[str]:
    """The vector instructions that matter for speed, as far as the operating system tells."""
    flags = kernel_says("cpuinfo", "flags").split()
    return [name for name in ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
