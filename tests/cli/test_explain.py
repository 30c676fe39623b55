"""``torchcaps explain`` as a user meets it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import TINY_FLAGS
from torchcaps.cli import explain as command
from torchcaps.cli.main import main


@pytest.fixture(autouse=True)
def _few_training_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TRAINING_IMAGES", 30)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explain") / "run"
    assert main(["train", *TINY_FLAGS, "--steps", "3", "--test-images", "50", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "three.png"
    Image.fromarray(np.random.default_rng(0).integers(256, size=(40, 30, 3), dtype=np.uint8)).save(path)
    return path


def explain(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["explain", *map(str, arguments), "--threads", "1"])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_pictures_of_the_found_and_the_asked_classes_are_drawn(run_folder, picture, tmp_path, capsys):
    code, said, _ = explain(capsys, run_folder, picture, "--class", "4", "--out", tmp_path / "out")
    assert code == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"three.png", "three-types-4.png", "three-sweep-4.png"} <= names
    assert set(said.split()) == {str(tmp_path / "out" / name) for name in names}
    for name in names:
        with Image.open(tmp_path / "out" / name) as drawn:
            assert min(drawn.size) > 100


def test_bad_images_are_named_and_the_others_drawn(run_folder, picture, tmp_path, capsys):
    (tmp_path / "note.png").write_text("not a picture")
    code, said, complaint = explain(capsys, run_folder, tmp_path / "note.png", picture, "--out", tmp_path / "out")
    assert code == 1
    assert "note.png" in complaint
    assert "three.png" in said
    code, _, complaint = explain(capsys, run_folder, tmp_path / "missing.png", "--out", tmp_path / "none")
    assert code == 2
    assert "missing.png" in complaint
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_done_is_said(run_folder, picture, tmp_path, capsys):
    code, _, complaint = explain(capsys, run_folder, picture, "--class", "cow")
    assert code == 2
    assert "There is no class 'cow': the network knows 0, 1" in complaint
    code, _, complaint = explain(capsys, run_folder, picture, "--out", picture)
    assert code == 2
    assert "is a file" in complaint


def test_without_data_and_decoder_the_rest_is_drawn(picture, tmp_path, capsys):
    run = tmp_path / "cnn"
    sizes = ["--conv-channels", "4", "--second-channels", "8", "--batch-size", "8", "--threads", "1"]
    flags = ["--model", "cnn", *sizes, "--no-reconstruction", "--steps", "1", "--test-images", "10"]
    assert main(["train", *flags, "--out", str(run)]) == 0
    config = (run / "config.yaml").read_text().replace("name: digits", "name: folder:/nowhere/at/all")
    (run / "config.yaml").write_text(config)
    twin = tmp_path / "other" / "three.png"
    twin.parent.mkdir()
    shutil.copy(picture, twin)
    code, said, complaint = explain(capsys, run, picture, twin)
    assert code == 0
    assert "Only a capsnet" in said
    assert "has no decoder" in said
    assert "training images" in complaint
    assert {path.name for path in (run / "explained").iterdir()} == {"three.png", "three-2.png"}
