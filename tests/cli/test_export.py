"""``torchcaps export`` as a user meets it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import torchcaps
from commands import TINY_FLAGS
from torchcaps.cli.main import main


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    flags = ["--steps", "20", "--no-reconstruction", "--test-images", "100", "--out", str(folder)]
    assert main(["train", *TINY_FLAGS, *flags]) == 0
    return folder


def export(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    """What the command says."""
    capsys.readouterr()
    try:
        ended = main(["export", *map(str, arguments), "--threads", "1"])
    except SystemExit as stop:
        ended = int(stop.code or 0)
    assert ended == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_a_run_is_exported_with_a_card_and_nothing_of_it_changes(run_folder, capsys):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    before = {path: path.read_bytes() for path in run_folder.iterdir() if path.is_file()}
    said = export(capsys, run_folder, "--to", "onnx")
    assert "on 64 test images" in said
    said = export(capsys, run_folder, "--to", "safetensors", "--precision", "int8")
    assert "of 100 test images" in said
    assert " % -> " in said
    folder = run_folder / "export"
    assert {path.name for path in folder.iterdir()} == {"model.onnx", "model-int8.safetensors", "README.md"}
    card = (folder / "README.md").read_text()
    for part in ("model.onnx", "model-int8.safetensors", "digits", "% of 100 images (n = 1 run", "Apache"):
        assert part in card
    assert str(run_folder) not in card
    assert {path: path.read_bytes() for path in run_folder.iterdir() if path.is_file()} == before
    images = torch.rand(2, 1, 28, 28)
    small, large = torchcaps.load(folder / "model-int8.safetensors"), torchcaps.load(run_folder)
    assert (small.predict(images).lengths - large.predict(images).lengths).abs().max() < 0.1


def test_the_trained_network_itself_is_not_written_over(run_folder, capsys):
    message = export(capsys, run_folder, "--to", "safetensors", "--out", run_folder / "model.safetensors", code=2)
    assert "choose another one" in message


def test_without_the_data_random_images_do(tmp_path, capsys):
    images, labels = np.random.default_rng(0).integers(256, size=(30, 20, 20), dtype=np.uint8), np.arange(30) % 3
    data, run = tmp_path / "data.npz", tmp_path / "run"
    np.savez(data, x_train=images, y_train=labels, x_test=images, y_test=labels)
    flags = ["--data", f"npz:{data}", "--steps", "1", "--no-reconstruction", "--out", str(run)]
    assert main(["train", *TINY_FLAGS, *flags]) == 0
    data.unlink()
    out = tmp_path / "new" / "m.safetensors"
    said = export(capsys, run, "--to", "safetensors", "--precision", "float16", "--out", out)
    assert "random images" in said
    assert "data.npz does not exist" in said
    assert out.exists()
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("seed: 0", "seed: 1"))
    assert "config.yaml is not the one" in export(capsys, run, "--to", "safetensors", "--out", out, code=2)


def test_what_cannot_be_done_is_said(run_folder, tmp_path, capsys, monkeypatch):
    assert "There is no run folder" in export(capsys, tmp_path / "nowhere", "--to", "onnx", code=2)
    assert "invalid choice" in export(capsys, run_folder, "--to", "tflite", code=2)
    assert "invalid choice" in export(capsys, run_folder, "--to", "onnx", "--precision", "int4", code=2)
    (tmp_path / "file").write_text("")
    assert export(capsys, run_folder, "--to", "safetensors", "--out", tmp_path / "file" / "m", code=2)
    assert export(capsys, run_folder, "--to", "safetensors", "--out", tmp_path, code=2)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    out = tmp_path / "m.onnx"
    assert "pip install 'torchcaps[export]'" in export(capsys, run_folder, "--to", "onnx", "--out", out, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
