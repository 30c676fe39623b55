"""What the tests share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for the naive reference computations

# A network small enough for a test, on the embedded data.
TINY = {"conv_channels": 8, "primary_capsules": 4, "batch_size": 32, "threads": 1}
TINY_FLAGS = ["--conv-channels", "8", "--primary-capsules", "4", "--batch-size", "32", "--threads", "1"]


@pytest.fixture(autouse=True)
def _fixed_randomness_and_threads() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def torchcaps(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command line in a process of its own, in a fresh folder."""

    def run(*arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torchcaps", *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=timeout, env=command_environment()
        )

    return run


def command_environment() -> dict[str, str]:
    """The environment without what a launcher of distributed training may have left in it."""
    left_over = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"}
    return {name: value for name, value in os.environ.items() if name not in left_over} | {"COLUMNS": "120"}
