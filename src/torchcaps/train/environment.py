"""Where a run happens: devices, versions, memory."""

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

import torch
from lightning_fabric import Fabric
from lightning_fabric.utilities.exceptions import MisconfigurationException

from torchcaps.errors import UserError
from torchcaps.train.options import TrainOptions

END_WITH_PARENT = "TORCHCAPS_END_WITH_PARENT"
"""In the environment of a process that should stop when the one that started it is gone: the latter's number."""
_PR_SET_PDEATHSIG = 1


def follow_parent() -> None:
    """If the environment asks for it, be told to stop, as by SIGTERM, when the parent dies; Linux only."""
    parent = os.environ.pop(END_WITH_PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        raise UserError("What had started this process is gone.")


def is_first_process() -> bool:
    """Whether this is the one process that writes files and talks, as far as launchers have told it."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


def usable_cores() -> int:
    """The cores this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def local_processes(options: TrainOptions) -> int:
    """How many processes share this machine: those of ``--devices``, or those that ``torchrun`` started."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", options.devices))


def make_fabric(options: TrainOptions) -> Fabric:
    """Lightning Fabric for these options, or for the processes that ``torchrun`` started."""
    devices, nodes = options.devices, 1
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    try:
        return Fabric(
            accelerator=options.accelerator,
            strategy="ddp" if devices * nodes > 1 else "auto",
            devices=devices,
            num_nodes=nodes,
            precision=options.precision,  # type: ignore[arg-type]
        )
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        raise UserError(f"Cannot use accelerator '{options.accelerator}' with {devices} device(s): {error}") from error


def peak_memory_mb(device: torch.device) -> float:
    """The most memory this process has held: on a CUDA device, tensors there; else the operating system's count."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return float("nan")  # not counted there
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage, it starts anew with the program and not with what started it
        return float(re.findall(r"VmHWM:\s*(\d+) kB", status.read_text())[0]) / 2**10
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def processor_name(device: torch.device) -> str:
    """What a device is called by its maker."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """The processor's name as the operating system tells it."""
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """What a result depends on."""
    packages = ("torchcaps", "torch", "lightning-fabric", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


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
