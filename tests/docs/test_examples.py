"""Every file of ``examples`` does what its first lines say."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchcaps
from torchcaps.settings import SettingError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports an example by name, as a program in its folder would."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_a_capsule_layer_as_the_head_of_an_own_cnn(example):
    assert example("own_cnn").main(epochs=3) < 15


def test_class_capsules_on_any_backbone(example):
    losses = example("backbone").main(steps=10)
    assert losses[-1] < 0.2 * losses[0]


def test_the_sizes_follow_from_the_backbone(example):
    backbone = example("backbone")
    network = backbone.CapsuleClassifier(backbone.small_backbone(), (3, 40, 24), classes=7)
    assert network(torch.rand(2, 3, 40, 24)).activations.shape == (2, 7)
    assert network.training


def test_class_capsules_on_a_backbone_of_timm(example):
    try:
        import timm  # noqa: F401
    except Exception as error:  # it imports torchvision, which fails in many ways beside a torch that is not its own
        pytest.skip(f"timm cannot be imported: {error}")
    losses = example("backbone").main("resnet18", steps=4)
    assert losses[-1] < losses[0]


@pytest.mark.filterwarnings("default")  # Lightning warns of a deprecation in its own code
def test_a_lightning_module(example):
    try:
        module = example("lightning_module")
    except ImportError as error:
        pytest.skip(f"neither lightning nor pytorch-lightning can be imported: {error}")
    assert module.main(epochs=2) < 20


def test_an_own_loop_resumes_from_state_dicts(example, capsys):
    example("resume_loop").main(steps=6)
    assert "same numbers after 6 steps" in capsys.readouterr().out


def test_two_processes_with_an_own_reduce_find_what_one_finds():
    done = subprocess.run(
        [sys.executable, "two_processes.py"], cwd=EXAMPLES, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "find what one finds alone" in done.stdout


def test_an_own_routing_with_an_own_setting_is_saved_and_loaded(example, tmp_path):
    MedianRouting = example("median_routing").MedianRouting
    sizes = {"conv_channels": 8, "primary_capsules": 4, "reconstruction": False}
    network = torchcaps.CapsuleNetwork((1, 20, 20), 3, MedianRouting(sharpness=2.0), **sizes)
    network.save(tmp_path / "median.safetensors")
    loaded = torchcaps.load(tmp_path / "median.safetensors", routing=MedianRouting)
    assert loaded.layers[-1].routing.sharpness == 2.0
    images = torch.rand(2, 1, 20, 20)
    assert torch.equal(loaded.predict(images).lengths, network.predict(images).lengths)
    with pytest.raises(SettingError, match="median_routing:MedianRouting"):
        torchcaps.load(tmp_path / "median.safetensors")
