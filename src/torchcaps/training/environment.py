"""Where a run happens: devices, versions, memory."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from lightning_fabric.utilities.exceptions import MisconfigurationException

from torchcaps.errors import UserError
from torchcaps.training.config import RunConfig
from torchcaps.training.host import cpu_name


def local_processes(run: RunConfig) -> int:
    """How many processes share this machine: those of ``--devices``, or those that ``torchrun`` started."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", run.devices))


def make_fabric(run: RunConfig) -> Fabric:
    """Lightning Fabric for these settings, or for the processes that ``torchrun`` started."""
    devices, nodes = run.devices, 1
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    try:
        return Fabric(
            accelerator=run.accelerator,
            strategy="ddp" if devices * nodes > 1 else "auto",
            devices=devices,
            num_nodes=nodes,
            precision=run.precision,  # type: ignore[arg-type]
        )
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        raise UserError(f"Cannot use accelerator '{run.accelerator}' with {devices} device(s): {error}") from error


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
