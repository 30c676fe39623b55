"""Code that nobody asked for never runs: not from the current folder, not from a file, not from an image."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

import torchcaps
from commands import TINY_FLAGS, command_environment
from hostile.kills import LIMIT
from torchcaps.cli.main import main
from torchcaps.errors import UserError
from torchcaps.storage import read_tensors, write_tensors

pytestmark = pytest.mark.timeout(1200)
LYING_AROUND = (
    *("mpi4py", "torch_xla", "sklearn", "torch", "rich", "numpy", "matplotlib", "yaml", "filelock", "PIL"),
    *("lightning_fabric", "lightning", "safetensors", "numba", "timm", "torchvision", "tensorboard", "ray", "mine"),
    *("habana_frameworks", "deepspeed", "transformer_engine", "bitsandbytes", "IPython", "ipywidgets", "ctypes"),
)
TRAP = """import pathlib
(pathlib.Path(__file__).parent / "TOUCHED").open("a").write(__name__ + "\\n")
raise SystemExit(9)
"""
SHORT = [*TINY_FLAGS, "--steps", "2", "--test-images", "16"]
WAYS = {
    "-P -m": ["-P", "-m", "torchcaps"],
    "-m": ["-m", "torchcaps"],
    "script": ["-c", "import sys; from torchcaps.cli.start import main; sys.exit(main())"],
}


def run(folder: Path, *arguments: object, way: str = "-P -m", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *WAYS[way], *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=LIMIT,
        env=command_environment() | environment,
    )


def touched(folder: Path) -> str:
    marker = folder / "TOUCHED"
    return marker.read_text() if marker.exists() else ""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    done = run(folder, "train", *SHORT, "--out", "run", way="script")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder of images with modules lying in it that must not be imported."""
    for name in LYING_AROUND:
        (tmp_path / f"{name}.py").write_text(TRAP)
    (tmp_path / "matplotlibrc").write_text("backend: module://mine\ntext.usetex: true\n")
    Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "a.png")
    return tmp_path


@pytest.mark.parametrize("way", WAYS)
def test_nothing_in_the_current_folder_is_imported_by_predict(trained, trapped, way):
    done = run(trapped, "predict", trained, "a.png", "--threads", 1, way=way)
    assert not touched(trapped)
    assert done.returncode == 0, done.stderr


def test_nor_by_train_with_two_processes_and_pictures(trapped):
    done = run(trapped, "train", *SHORT, "--pictures", "--devices", 2, "--accelerator", "cpu", "--out", "run", way="-m")
    assert not touched(trapped)
    assert done.returncode == 0, done.stderr
    assert (trapped / "run" / "curves.png").exists()
    assert "could not be drawn" not in done.stderr


def test_nor_by_evaluate_and_what_it_draws(trained, trapped):
    done = run(trapped, "evaluate", trained, "--threads", 1, "--out", "evaluation", way="-m")
    assert not touched(trapped)
    assert done.returncode == 0, done.stderr


def test_nor_by_reproduce_and_its_children(trapped):
    only = ["--only", "mnist/l2-fc/seed-0"]
    done = run(trapped, "reproduce", "table", "--budget", "smoke", "--threads", 1, *only, way="-m")
    assert not touched(trapped)
    assert done.returncode == 0, done.stderr


def test_nor_by_bench_and_its_children(trapped):
    options = ["--rounds", 1, "--threads", 1, "--no-classes", "--batch-size", 2, "--routings", "uniform"]
    done = run(trapped, "bench", *options, "--networks", "mnist", way="-m")
    assert not touched(trapped)
    assert done.returncode == 0, done.stderr


OWN = """
from torchcaps.routing.base import Routing
import helper_of_mine
import pathlib
(pathlib.Path(__file__).parent / "ASKED").touch()
from torchcaps.routing.uniform import UniformRouting as Base
class Net(Routing):
    iterations = 0
    def forward(self, votes, activations=None):
        raise SystemExit(9)
"""


def test_a_routing_that_is_named_is_imported_and_its_neighbours_are_not(trapped):
    (trapped / "mine.py").write_text(OWN)
    (trapped / "helper_of_mine.py").write_text("")
    run(trapped, "train", *SHORT, "--routing", "mine:Net", "--out", "run", way="-m")
    assert (trapped / "ASKED").exists()
    assert not touched(trapped)


@pytest.mark.parametrize("named", ["routing", "backbone", "timm"])
def test_a_file_imports_nothing(trained, tmp_path, monkeypatch, capsys, named):
    (tmp_path / "mine.py").write_text(TRAP)
    (tmp_path / "timm.py").write_text(TRAP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # it could be imported
    tensors, state = read_tensors(trained / "model.safetensors")
    folder = tmp_path / "run"
    folder.mkdir()
    config = (trained / "config.yaml").read_text()
    if named == "routing":
        state["network"]["routing"] = {"name": "mine:Net", "settings": {}}
        config = config.replace("name: l2", "name: mine:Net")
    else:
        name = "mine:Net" if named == "backbone" else "timm:resnet18"
        state["network"]["model"] |= {"stem": "backbone", "backbone": name, "backbone_weights": "weights.pt"}
        config = config.replace("backbone: null", f"backbone: {name}").replace("stem: paper", "stem: backbone")
    assert config != (trained / "config.yaml").read_text()
    write_tensors(folder / "model.safetensors", tensors, state)
    (folder / "config.yaml").write_text(config)
    os.mkfifo(tmp_path / "weights.pt")
    for command in (["predict", "run", "a.png"], ["evaluate", "run"], ["train", "--resume", "run"]):
        assert main([*command, "--threads", "1"]) == 2
        told = capsys.readouterr().err
        assert f"--{'routing' if named == 'routing' else 'backbone'} module:" in told
        assert "Traceback" not in told
    with pytest.raises(UserError, match="module:"):
        torchcaps.load(folder)
    assert not touched(tmp_path)


def test_images_that_are_something_else_are_reported_and_the_rest_goes_on(trained, trapped):
    (trapped / "x.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(ran) (w) file closefile\n")
    os.mkfifo(trapped / "pipe.png")
    (trapped / "device.png").symlink_to("/dev/zero")
    (trapped / "gone.png").symlink_to("nowhere")
    (trapped / "bomb.png").write_bytes(_bomb())
    strange = os.fsencode("\x1b[31m") + b"\xff.png"
    os.symlink(b"a.png", os.fsencode(trapped) + b"/" + strange)
    names = ["x.png", "pipe.png", "device.png", "gone.png", "bomb.png", "a.png", os.fsdecode(strange)]
    done = run(trapped, "predict", trained, *names, "--threads", 1)
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 2
    assert len(done.stderr.splitlines()) == 5, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\\x1b[31m\\xff.png" in done.stdout
    assert not (trapped / "ran").exists()


def _bomb() -> bytes:
    """A small PNG file of 30,000 x 30,000 pixels."""
    import zlib

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    side = (30_000).to_bytes(4, "big")
    pixels = zlib.compress(bytes(30_001) * 300)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", side + side + bytes([8, 0, 0, 0, 0]))
        + chunk(b"IDAT", pixels)
        + chunk(b"IEND", b"")
    )


STRANGE = [b"p_1$^$", b"caf\xe9", b"\x1b[31mred\x07", b"[bold]x[/nope]", b"a%s{0}"]


def test_classes_with_strange_names_are_trained_and_told_escaped(tmp_path):
    images = tmp_path / "images"
    for number, name in enumerate(STRANGE):
        place = os.fsencode(images) + b"/" + name
        os.makedirs(place)
        for shade in range(6):
            picture = Image.fromarray(np.full((20, 20), 40 * number + shade, np.uint8))
            with open(place + f"/{shade}.png".encode(), "wb") as file:
                picture.save(file, "PNG")
    flags = [*SHORT[:-2], "--pictures", "--batch-size", 4]
    done = run(tmp_path, "train", "--data", "folder:images", *flags, "--out", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 2
    assert "\x1b" not in done.stdout + done.stderr
    for command in (["evaluate", "run", "--out", "evaluation"], ["predict", "run", "images"]):
        done = run(tmp_path, *command, "--threads", 1)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_a_strange_environment_is_no_crash(tmp_path):
    strange = {
        "MPLBACKEND": "nonsense",
        "COLUMNS": "-5",
        "TERM": "nonsense",
        "PYTHONIOENCODING": "ascii",
        "TORCHCAPS_DATA": "/dev/null/x",
        "TORCHCAPS_SOURCE": "/nowhere",
        "MATPLOTLIBRC": "/nowhere",
    }
    done = run(tmp_path, "train", *SHORT, "--pictures", "--out", "run", **strange)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "curves.png").exists()
    assert run(tmp_path, "train", "--help", **strange).returncode == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "x"), ("LOCAL_RANK", "-1"), ("TORCHCAPS_END_WITH_PARENT", "x"), ("LOCAL_WORLD_SIZE", "0")],
)
def test_numbers_in_the_environment_that_are_none_are_told(tmp_path, monkeypatch, capsys, name, value):
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(ctypes, "CDLL", Mock())  # or this process would follow its parent
    assert main(["train", *SHORT, "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert "Something went wrong" not in told
    assert name in told or "is gone" in told


def test_a_link_where_a_file_is_written_is_not_followed(tmp_path):
    done = run(tmp_path, "train", *SHORT, "--steps", 4, "--checkpoint-every", 2, "--out", "run")
    assert done.returncode == 0, done.stderr
    folder, precious = tmp_path / "run", tmp_path / "precious"
    for name in ("metrics.csv", "result.json", "model.safetensors", "curves.png", ".lock"):
        (folder / name).unlink(missing_ok=True)
        precious.write_text("precious")
        (folder / name).symlink_to(precious if name != "metrics.csv" else tmp_path / "made")
    run(tmp_path, "train", "--resume", "run")
    run(tmp_path, "train", "--resume", "run")
    assert precious.read_text() == "precious"
    assert not (tmp_path / "made").exists()
