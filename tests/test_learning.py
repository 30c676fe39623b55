"""A short training of the paper's network on real MNIST, fetched as a user would fetch it."""

import json

import pytest

from torchcaps.data.fetch import fetch
from torchcaps.errors import UserError


def test_the_papers_network_learns_mnist(torchcaps, tmp_path):
    try:
        fetch("mnist", progress=False)
    except UserError as error:
        pytest.skip(f"no source of MNIST can be reached: {error}")
    flags = ["--data", "mnist", "--routing", "l2", "--steps", 120, "--test-images", 5000, "--threads", 2]
    finished = torchcaps("train", *flags, "--out", "run", timeout=600)
    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["test_error_percent"] < 5
