"""Where the compiled kernels are used, and where they are not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchcaps.ops import compiled
from torchcaps.ops.compiled import Points, usable

needs_kernels = pytest.mark.skipif(compiled.native() is None, reason="there are no compiled kernels here")


def run_python(code: str, **environment: str) -> str:
    variables = {**os.environ, **environment}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=True)
    return result.stdout.strip()


def test_importing_torchcaps_does_not_import_numba() -> None:
    assert run_python("import sys, torchcaps, torchcaps.models; print('numba' in sys.modules)") == "False"


def test_without_numba_there_are_no_kernels() -> None:
    code = """
import sys
sys.modules["numba"] = None
import torch
from torchcaps.ops import compiled
from torchcaps.ops.conv_pair import bilinear_conv_pair
tensors = torch.rand(2, 1, 28, 28), torch.randn(8, 1, 9, 9), None, torch.randn(8, 8, 9, 9), None
print(compiled.native(), tuple(bilinear_conv_pair(*tensors, stride=2).shape))
"""
    assert run_python(code) == "None (2, 6, 6, 8)"


@needs_kernels
def test_no_place_for_a_cache_is_no_error(tmp_path: Path) -> None:
    """A file where numba is told to make its directory."""
    blocked = tmp_path / "file"
    blocked.touch()
    code = "from torchcaps.ops import compiled; print(compiled.native() is not None)"
    assert run_python(code, NUMBA_CACHE_DIR=str(blocked / "cache")) == "True"


@needs_kernels
def test_no_memory_is_used_after_it_was_freed() -> None:
    """With this setting glibc gives memory back to the system at once, and whoever touches it then is ended."""
    code = """
import torch
from torchcaps.ops.blocked_votes import in_blocks
from torchcaps.ops.conv_pair import bilinear_conv_pair
tensors = torch.rand(4, 1, 28, 28), torch.rand(256, 1, 9, 9).requires_grad_(), None, torch.rand(256, 256, 9, 9), None
bilinear_conv_pair(*tensors, stride=2).sum().backward()
in_blocks(torch.rand(4, 64, 64), torch.rand(64, 64, 10, 16)).weighted_sum(torch.rand(4, 64, 10))
print("alive")
"""
    assert run_python(code, MALLOC_MMAP_THRESHOLD_="8192") == "alive"


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "channels", "outputs", "expected"),
    [
        (torch.float32, 256, 512, True),
        (torch.float32, 8, 8, True),
        (torch.float64, 256, 256, False),
        (torch.float32, 12, 8, False),
        (torch.float32, 8, 12, False),
    ],
)
def test_whole_vectors_of_single_precision(dtype: torch.dtype, channels: int, outputs: int, expected: bool) -> None:
    assert usable(dtype, channels, outputs) == expected


def test_points_with_as_many_phases_are_a_group() -> None:
    """MNIST: 10 points for five taps, 9 for four."""
    points = Points([10, 9], [10, 9])
    assert points.groups == [(1, 1), (18, 2), (81, 4)]
    assert points.count == 19**2


def test_every_point_of_every_phase_has_a_place_of_its_own() -> None:
    points, rows, channels = Points([4, 3, 3], [5, 4, 4]), 2, 8
    starts = [
        offset + row * lead
        for phase in range(9)
        for offset, lead in zip(*points.places(phase, rows, channels))
        for row in range(rows)
    ]
    assert sorted(starts) == list(range(0, points.count * rows * channels, channels))
