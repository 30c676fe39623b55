"""Folders in the convention of the Hugging Face hub, without any connection; and model cards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchcaps
from torchcaps import CapsuleNetwork, DynamicRouting
from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.models.cnn import ConvolutionalNetwork
from torchcaps.trained.card import FRONT, card, write_card
from torchcaps.training.config import TrainingConfig
from torchcaps.training.result import RunResult

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def network_of(**settings) -> CapsuleNetwork:
    return CapsuleNetwork(
        (1, 20, 18), ["cat", "dog"], DynamicRouting(), conv_channels=4, primary_capsules=3, **settings
    )


def result_of(**changes) -> RunResult:
    speeds = dict.fromkeys(("train_images_per_second", "evaluate_images_per_second", "peak_memory_mb", "seconds"), 1.0)
    counts = {"seed": 7, "steps": 300, "batch_size": 32, "images_seen": 9600, "parameters": 9, "test_images": 360}
    values = {
        "data": "digits",
        "model": "capsnet",
        "routing": "dynamic",
        "reconstruction": True,
        "epochs": 2.5,
        "test_error_percent": 1.25,
        "train_seconds": 90.0,
        "threads": 1,
        "processes": 1,
        "device": "cpu",
        "processor": "abacus",
        "versions": {"torch": "9.9"},
    }
    return RunResult.from_mapping({**speeds, **counts, **values, **changes})


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_folder_is_written_and_read_without_a_connection(precision, tmp_path):
    network = network_of()
    network.save_pretrained(tmp_path / "cats", precision=precision)
    assert {path.name for path in (tmp_path / "cats").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    config = json.loads((tmp_path / "cats" / "config.json").read_text())
    assert config["routing"]["name"] == "dynamic"
    assert config["task"]["classes"] == ["cat", "dog"]
    images = torch.rand(2, 1, 20, 18)
    loaded = Network.from_pretrained(tmp_path / "cats")
    again = torchcaps.load(tmp_path / "cats")
    assert loaded.classes == ("cat", "dog")
    assert torch.equal(loaded.predict(images).lengths, again.predict(images).lengths)
    if precision == "float32":
        assert torch.equal(loaded.predict(images).lengths, network.predict(images).lengths)


def test_a_class_by_its_own_name_loads_too(tmp_path):
    ConvolutionalNetwork((1, 20, 18), 3, conv_channels=4, second_channels=6).save_pretrained(tmp_path / "plain")
    assert isinstance(ConvolutionalNetwork.from_pretrained(str(tmp_path / "plain")), ConvolutionalNetwork)


@pytest.mark.parametrize("content", ["[]", "not json", '{"network": 5}', '"text"', "[" * 100_000, '{"routing": "l2"}'])
def test_a_hostile_description_is_no_traceback(content, tmp_path):
    network_of().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(content)
    assert outcome(tmp_path) in ("read", "refused")


def outcome(folder: Path) -> str:
    """What the weights' file says holds, or there is a sentence."""
    try:
        return "read" if Network.from_pretrained(folder).classes == ("cat", "dog") else "misread"
    except UserError as error:
        return "refused" if "no network to be had" in str(error) else str(error)


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(UserError, match="no trained network"):
        Network.from_pretrained(tmp_path)
    network_of().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(UserError, match="damaged"):
        Network.from_pretrained(tmp_path)
    with pytest.raises(UserError, match="no network to be had from 'nobody/nothing'"):
        Network.from_pretrained("nobody/nothing", cache_dir=tmp_path / "cache")


def test_importing_torchcaps_does_not_import_the_hub():
    code = (
        "import sys, torchcaps; torchcaps.CapsuleNetwork; import torchcaps.trained.export; "
        "assert not {'huggingface_hub', 'onnx', 'onnxruntime'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torchcaps.trained.hub", raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install 'torchcaps\[hub\]'"):
        network_of().save_pretrained(tmp_path)


def test_a_card_tells_recipe_data_error_and_versions():
    config = TrainingConfig.from_mapping(
        {
            "data": {"name": "digits", "folder": "/home/me"},
            "run": {"steps": 300, "out": "/home/me/run"},
            "routing": {"name": "dynamic"},
        }
    )
    text = card(network_of(), files={"model.safetensors": "", "m.onnx": ""}, config=config, result=result_of())
    assert text.startswith(FRONT)
    for part in (
        *("digits", "1.25 % of 360 images (n = 1 run, seed 7)", "dynamic", "torch 9.9", torchcaps.__version__),
        *(
            "Apache License 2.0",
            "torchcaps train --recipe",
            "steps: 300",
            "`cat`",
            'torchcaps.load("model.safetensors")',
        ),
        *('InferenceSession("m.onnx")', "20 x 18", "abacus"),
    ):
        assert part in text, part
    assert "/home/me" not in text


def test_names_cannot_break_a_card():
    network = CapsuleNetwork((1, 20, 18), ["a|b`c\n# d", "<script>"], conv_channels=4, primary_capsules=3)
    text = card(network, result=result_of(data="x\n\n# y"))
    assert "\n# d" not in text
    assert "\n# y" not in text
    assert "<script>" not in text


def test_a_readme_of_somebody_else_is_left_alone(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("my thesis")
    assert write_card(tmp_path, card(network_of())) is None
    assert readme.read_text() == "my thesis"
    readme.unlink()
    assert write_card(tmp_path, card(network_of())) == readme
    assert write_card(tmp_path, card(network_of(reconstruction=False))) == readme
    assert "no decoder" in readme.read_text()
