"""The network that comes along, one without a decoder, and the page that shows them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

from commands import command_environment
from torchcaps.cli.serve import listening_on
from torchcaps.models.files import in_the_box
from torchcaps.serve.app import make_app
from torchcaps.serve.connection import Impatient
from torchcaps.serve.gallery import Gallery
from torchcaps.serve.model import ServedModel
from torchcaps.trained.run import TrainedRun

SMALL = ["--data", "digits", "--conv-channels", 16, "--primary-capsules", 4, "--batch-size", 64, "--threads", 1]
SMALL += ["--learning-rate", 0.003, "--accelerator", "cpu", "--log-every", 10, "--no-pictures"]


def trained(folder: Path, *flags: object) -> Path:
    command = [sys.executable, "-P", "-m", "torchcaps", "train", *map(str, [*SMALL, *flags]), "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True, env=command_environment())
    return folder


@pytest.fixture(scope="session")
def trained_folder() -> Path:
    """The network that comes along."""
    return in_the_box("mnist")


@pytest.fixture(scope="session")
def dynamic_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another routing, and no decoder."""
    folder = tmp_path_factory.mktemp("runs") / "dynamic"
    return trained(folder, "--steps", 20, "--routing", "dynamic", "--no-reconstruction")


@pytest.fixture(scope="session")
def model(trained_folder: Path) -> ServedModel:
    return ServedModel.of_run(TrainedRun(trained_folder, accelerator="cpu", threads=1))


@pytest.fixture(scope="session")
def gallery(trained_folder: Path) -> Gallery:
    return Gallery.of_run(TrainedRun(trained_folder, accelerator="cpu", threads=1))


@pytest.fixture(scope="session")
def dynamic_model(dynamic_folder: Path) -> ServedModel:
    return ServedModel.of_run(TrainedRun(dynamic_folder, accelerator="cpu", threads=1))


@pytest.fixture(scope="session")
def served() -> Iterator[Callable[..., str]]:
    """Serves models on a free port of this machine and returns the address."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(models: list[ServedModel], **settings: object) -> str:
        listening = listening_on("127.0.0.1", 0)
        app = make_app(models, **settings)
        config = uvicorn.Config(app, log_level="error", lifespan="off", ws="none", http=Impatient)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield serve
    for server, thread in running:
        server.should_exit = True
        thread.join(10)
