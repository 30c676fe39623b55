"""The trained network that comes along: small, good, and at hand in every command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import torchcaps
from torchcaps.cli.main import main
from torchcaps.errors import UserError
from torchcaps.models.files import in_the_box
from torchcaps.trained.run import TrainedRun
from torchcaps.training.result import RunResult

FOLDER = in_the_box("mnist")


@pytest.fixture(autouse=True)
def _no_data_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing was fetched; whatever is written goes to an empty folder."""
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def digit(tmp_path: Path) -> Path:
    """A seven of the test images, as a picture."""
    samples = np.load(FOLDER / "samples.npz")
    first = int((samples["y_test"] == 7).argmax())
    Image.fromarray(samples["x_test"][first].reshape(28, 28)).save(tmp_path / "seven.png")
    return Path("seven.png")


def test_it_is_as_small_and_as_good_as_is_said():
    assert (FOLDER / "model.safetensors").stat().st_size <= 3_000_000
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 4_000_000
    result = RunResult.read(FOLDER / "result.json")
    assert (result.test_images, result.routing, result.reconstruction) == (10_000, "l1", True)
    assert result.test_error_percent <= 0.6
    assert json.loads((FOLDER / "pruning.json").read_text())["after"]["parameters"] == result.parameters


def test_it_knows_the_test_images_that_come_along():
    network = torchcaps.pretrained()
    samples = np.load(FOLDER / "samples.npz")
    images, labels = network.prepare(samples["x_test"][:500] / 255), torch.from_numpy(samples["y_test"][:500])
    assert (network.predict(images).labels[:, 0] != labels).float().mean() <= 0.02
    assert network.reconstruct(network(images[:2]).capsules).shape == (2, 1, 1, 28, 28)


def test_nothing_of_the_machine_that_made_it_is_in_it():
    trained = TrainedRun(FOLDER, accelerator="cpu", threads=1)
    config = trained.folder.config()
    assert (config.data.folder, config.run.out) == (None, None)
    assert trained.folder.read_metrics()[-1]["step"] == trained.folder.config().run.steps
    assert not list(FOLDER.glob(".*"))


def test_other_names_are_refused():
    with pytest.raises(UserError, match=r"No trained network 'mnits' comes with torchcaps; those that do: mnist\."):
        torchcaps.pretrained("mnits")


def test_predict_in_the_first_minute(digit, capsys):
    assert main(["predict", "--pretrained", "mnist", str(digit), "--json", "--threads", "1"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["found"] == ["7"]


def test_explain_shows_patches_of_the_images_that_come_along(digit, capsys):
    assert main(["explain", "--pretrained", "mnist", str(digit), "--threads", "1"]) == 0
    said = capsys.readouterr()
    assert {path.name for path in Path("explained").iterdir()} == {
        *("seven.png", "seven-types-7.png", "seven-sweep-7.png")
    }
    assert "exciting patches" not in said.err


def test_serve_without_an_argument_shows_it(capsys):
    assert main(["serve", "--static", "page", "--threads", "1"]) == 0
    assert Path("page/index.html").is_file()
    assert "no test images" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--pretrained", "mnist", "{}", "{}"], ["{}", "--json", "--pretrained", "mnist", "{}"]]
)
def test_the_words_may_come_in_any_order(words, digit, capsys):
    assert main(["predict", *(word.format(digit) for word in words), "--json"]) == 0
    assert [answer["found"] for answer in json.loads(capsys.readouterr().out)] == [["7"], ["7"]]


def test_what_is_missing_is_told(digit, capsys):
    with pytest.raises(SystemExit):
        main(["predict", str(digit)])
    assert "IMAGE" in capsys.readouterr().err
    assert main(["predict", "--pretrained", "mnist"]) == 2
    assert "Name images" in capsys.readouterr().err
    assert main(["evaluate"]) == 2
    assert "--pretrained mnist" in capsys.readouterr().err
