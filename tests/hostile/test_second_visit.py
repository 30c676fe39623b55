"""What a second hostile visitor tried."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import uvicorn
from PIL import Image

import torchcaps
from commands import TINY_FLAGS
from hostile.test_kills import sentence
from torchcaps.cli.main import main
from torchcaps.cli.serve import listening_on
from torchcaps.models.files import in_the_box
from torchcaps.ops import compiled
from torchcaps.process import _leave_out_the_current_folder
from torchcaps.serve import connection

SHORT = [*TINY_FLAGS, "--test-images", "16"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", *SHORT, "--steps", "6", "--checkpoint-every", "2", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def place(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finished run and an image in it, which is the current one."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, tmp_path / "run")
    Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "image.png")
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    try:
        code = main(list(map(str, words)))
    except SystemExit as stop:
        return f"{stop.code}: {capsys.readouterr().err}"
    assert code == 2
    return sentence(capsys.readouterr().err)


def test_numba_takes_no_settings_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".numba_config.yaml").write_text("cache_dir: elsewhere")
    for name in [name for name in sys.modules if name.partition(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(UserWarning, match="numba_config"):
        assert compiled.native.__wrapped__() is None
    assert "numba" not in sys.modules


@pytest.mark.parametrize("words", [["explain", "run", "image.png"], ["evaluate", "run", "--limit", "16"]])
def test_pictures_and_tables_follow_no_links(place, words, capsys):
    precious = place / "precious"
    precious.write_text("precious")
    (place / "out").mkdir()
    for name in ("image.png", "predictions.csv", "calibration.png", "mistakes.png"):
        (place / "out" / name).symlink_to(precious)
    assert main([*words, "--threads", "1", "--out", "out"]) == 0
    assert precious.read_text() == "precious"


def test_what_is_no_file_is_not_replaced(place, capsys):
    os.mkfifo(place / "pipe.safetensors")
    assert "is not a file" in refused(capsys, "export", "run", "--to", "safetensors", "--out", "pipe.safetensors")
    assert stat.S_ISFIFO((place / "pipe.safetensors").lstat().st_mode)


def test_a_run_that_cannot_be_made_longer_stays_what_it_was(place, capsys):
    before = (place / "run/config.yaml").read_bytes()
    for path in (place / "run/checkpoints").iterdir():
        path.write_bytes(b"x")
    assert "cannot be made longer" in refused(capsys, "train", "--resume", "run", "--steps", 8)
    assert (place / "run/config.yaml").read_bytes() == before
    assert main(["evaluate", "run", "--limit", "16", "--threads", "1"]) == 0


def test_a_run_is_made_longer_from_the_last_good_checkpoint(place, capsys):
    (place / "run/checkpoints/step-000000006.safetensors").write_bytes(b"x")
    assert main(["train", "--resume", "run", "--steps", "8"]) == 0
    assert "Continuing after step 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["predict", "run", "image.png", "--json"], ["evaluate", "run", "--json"], ["prune", "run"]]
)
def test_answers_that_are_no_numbers_are_no_answers(place, words, capsys):
    network = torchcaps.load(place / "run")
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(3e38)
    network.save(place / "run/model.safetensors")
    assert "not finite" in refused(capsys, *words, "--threads", 1)


def test_a_removed_current_folder_is_told(place, whole, monkeypatch, capsys):
    gone = place / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    _leave_out_the_current_folder()
    assert "no longer there" in refused(capsys, "predict", whole, place / "image.png")


def test_names_are_no_markup_and_no_commands(place, capsys):
    assert main(["train", *SHORT, "--steps", "1", "--out", "a[/x]\x1b[31m"]) == 0
    said = capsys.readouterr().out
    assert "a[/x]" in said
    assert "\x1b" not in said
    shutil.copytree(place / "run", place / "[/b]")
    assert main(["compare", "run", "[/b]"]) == 0


def test_a_closed_standard_input_is_told(place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert "Standard input is closed" in refused(capsys, "predict", "run", "-")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--accelerator", "tpu"], "Cannot use accelerator"),
        (["--backbone", "os:system"], "could not make a backbone"),
        (["--devices", "1000", "--batch-size", "1000", "--accelerator", "cpu"], "too many"),
        (["--out", ""], "--out is empty"),
        (["--from", ""], "--from is empty"),
        (["--recipe", ""], "no recipe"),
        (["--resume", ""], "--resume"),
    ],
)
def test_odd_words_of_train_are_told(place, words, told, capsys):
    out = [] if "--out" in words else ["--out", "new"]
    assert told in refused(capsys, "train", *SHORT, "--steps", 1, *out, *words)
    assert not (place / "new").exists()


def test_weights_of_a_backbone_are_a_file(place, capsys):
    (place / "own_backbone.py").write_text("import torch\ndef make():\n    return torch.nn.Conv2d(1, 8, 3, stride=2)\n")
    os.mkfifo(place / "pipe")
    words = ["--backbone", "own_backbone:make", "--backbone-weights", "pipe", "--primary-capsules", 4]
    assert "not a regular file" in refused(capsys, "train", *words, "--steps", 2, "--threads", 1, "--out", "new")


def test_a_record_is_set_aside_under_a_name_that_is_free(place, capsys):
    (place / "run/result.json").write_text("x")
    (place / "run/result.json.damaged").mkdir()
    assert main(["train", "--resume", "run"]) == 0
    assert (place / "run/result.json1.damaged").is_file()


def test_clients_that_say_nothing_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE", 0.2)

    async def app(scope, receive, send):
        raise AssertionError("nobody asked")

    listening = listening_on("127.0.0.1", 0)
    config = uvicorn.Config(app, http=connection.Impatient, log_level="error", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    with socket.create_connection(listening.getsockname(), timeout=60) as client:
        assert client.recv(1) == b""  # closed by the server
    server.should_exit = True
    thread.join(60)


def test_the_network_in_the_box_is_read_only(place, capsys):
    """Nothing that a command does with it writes beside it."""
    before = {path: path.stat().st_mtime_ns for path in in_the_box("mnist").iterdir()}
    assert main(["explain", "--pretrained", "mnist", "image.png", "--threads", "1"]) == 0
    time.sleep(0.01)
    assert {path: path.stat().st_mtime_ns for path in in_the_box("mnist").iterdir()} == before
