"""Where a run happens: devices, versions, memory."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from lightning_fabric import Fabric
from lightning_fabric.utilities.exceptions import MisconfigurationException

from torchcaps.errors import UserError
from torchcaps.train.options import TrainOptions


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
