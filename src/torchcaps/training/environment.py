"""Where a run happens: devices, versions, memory."""

from __future__ import annotations

import sys
import warnings

import torch
from lightning_fabric import Fabric
from lightning_fabric.utilities.exceptions import MisconfigurationException

from torchcaps.errors import UserError
from torchcaps.training.config import RunConfig
from torchcaps.training.host import cpu_name, from_environment, kernel_says, usable_cores

MANY_PROCESSES = 16
"""As many may always share a CPU, if only to try something out."""


def local_processes(run: RunConfig) -> int:
    """How many processes share this machine: those of ``--devices``, or those that ``torchrun`` started."""
    return from_environment("LOCAL_WORLD_SIZE", least=1, default=run.devices)


def make_fabric(run: RunConfig) -> Fabric:
    """Lightning Fabric for these settings, or for the processes that ``torchrun`` started."""
    devices, nodes = run.devices, 1
    if torch.distributed.is_available() and torch.distributed.is_torchelastic_launched():
        devices = from_environment("LOCAL_WORLD_SIZE", least=1)
        nodes = from_environment("WORLD_SIZE", least=1) // devices
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*AMP with fp16 is not supported on CPU.*")  # refused below
            fabric = Fabric(
                accelerator=run.accelerator,
                strategy="ddp" if devices * nodes > 1 else "auto",
                devices=devices,
                num_nodes=nodes,
                precision=run.precision,  # type: ignore[arg-type]
            )
    except (ValueError, RuntimeError, ImportError, MisconfigurationException) as error:
        raise UserError(f"Cannot use accelerator '{run.accelerator}' with {devices} device(s): {error}") from error
    if fabric.device.type == "cpu" and devices > max(MANY_PROCESSES, usable_cores()):
        raise UserError(f"{devices} processes are too many for the {usable_cores()} cores of this machine.")
    if run.precision == "16-mixed" and fabric.device.type == "cpu":
        raise UserError("--precision 16-mixed needs a GPU: on a CPU choose bf16-mixed, or 32-true, the default.")
    return fabric


def peak_memory_mb(device: torch.device) -> float:
    """The most memory this process has held: on a CUDA device, tensors there; else the operating system's count."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if sys.platform == "win32":
        return 0.0  # not counted there
    if held := kernel_says("self/status", "VmHWM"):  # unlike getrusage's, of this program and not of what started it
        return float(held.removesuffix(" kB")) / 2**10
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def processor_name(device: torch.device) -> str:
    """What a device is called by its maker."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
