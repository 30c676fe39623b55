"""Networks in files: what is saved is loaded, and a file can neither run code nor ask for the impossible."""

import json
import os
import sys
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from torchcaps import CapsuleNetwork, DynamicRouting, L1Routing, UniformRouting, create_model, list_models, load
from torchcaps.atomic import DamagedFile
from torchcaps.errors import UserError
from torchcaps.functional import Capsules, capsules_from_totals
from torchcaps.models.base import Network
from torchcaps.models.config import CapsNetConfig, MatrixConfig, TaskConfig
from torchcaps.models.files import MODEL_FILE, Description
from torchcaps.models.registry import ARCHITECTURES
from torchcaps.routing import ROUTINGS, Routing, Votes
from torchcaps.routing.config import RoutingConfig
from torchcaps.settings import SettingError
from torchcaps.storage import KEY, _digest, read_tensors, write_tensors

DESCRIPTION = Description(
    model=CapsNetConfig(layers=((6, 4),), conv_channels=4, primary_capsules=2),
    task=TaskConfig(
        image_shape=(3, 20, 20),
        source_shape=(3, 24, 24),
        classes=("cat", "dog"),
        mean=(0.1, 0.2, 0.3),
        std=(1.0, 2.0, 3.0),
    ),
    routing=RoutingConfig(name="l1", settings={"start": 0.5, "strength": 1e-3}),
)
SMALL = {
    "CapsuleNetwork": {"conv_channels": 4, "primary_capsules": 2},
    "MatrixCapsuleNetwork": {"matrix_sizes": (4, 2, 2, 3)},
    "ConvolutionalNetwork": {"conv_channels": 4, "second_channels": 4},
}


class Own(Routing):
    """A routing of one's own."""

    def __init__(self, *, sharpness: float = 1.0) -> None:
        super().__init__()
        self.sharpness = sharpness

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return capsules_from_totals(votes.combine(self.sharpness))


def assert_same(loaded: Network, network: Network) -> None:
    assert type(loaded) is type(network)
    assert loaded.config == network.config
    assert loaded.task == network.task
    assert loaded.routing_config() == network.routing_config()
    images = torch.rand(2, *network.image_shape)
    network.eval()
    torch.testing.assert_close(loaded(images).capsules, network(images).capsules, rtol=0, atol=0)
    if network.decoder is not None:
        labels = torch.tensor([0, 1])
        torch.testing.assert_close(loaded(images, labels).reconstructions, network(images, labels).reconstructions)


def test_a_network_survives_the_trip_through_its_file(tmp_path):
    network = DESCRIPTION.build()
    path = tmp_path / MODEL_FILE
    network.save(path)
    loaded = load(path)
    expected = DESCRIPTION.replace(model=DESCRIPTION.model.resolved(DESCRIPTION.task))
    assert Description(model=loaded.config, task=loaded.task, routing=loaded.routing_config()) == expected
    assert loaded.classes == ("cat", "dog")
    assert not loaded.training
    assert_same(loaded, network)
    assert_same(load(tmp_path), network)  # a run folder holds its network under this name
    assert_same(load(str(path), device="cpu"), network)


@pytest.mark.parametrize("name", list_models())
def test_every_model_survives_the_trip(name, tmp_path):
    network = create_model(name, classes=3, **SMALL[ARCHITECTURES[name][0].__name__])
    network.save(tmp_path / "network")
    assert_same(load(tmp_path / "network"), network)


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing_survives_the_trip(name, tmp_path):
    settings = {"iterations": 2} if name in ("dynamic", "em", "clustering") else {"start": 0.5}
    network = CapsuleNetwork(
        (1, 20, 20), 3, ROUTINGS[name](**settings), layers=[(6, 4)], **SMALL["CapsuleNetwork"], labels_per_image=2
    )
    for tensor in network.state_dict().values():
        tensor.normal_(std=0.1)
    network.save(tmp_path / "network")
    loaded = load(tmp_path / "network")
    assert_same(loaded, network)
    assert [layer.routing.settings for layer in loaded.layers] == [settings] * 2


def test_a_folded_network_and_a_pruned_one_survive_the_trip(tmp_path):
    network = CapsuleNetwork((1, 20, 20), 3, L1Routing(start=0.5), **SMALL["CapsuleNetwork"]).eval()
    network.folded().save(tmp_path / "folded")
    images = torch.rand(2, 1, 20, 20)
    folded = load(tmp_path / "folded")
    torch.testing.assert_close(folded(images).capsules, network(images).capsules, rtol=1e-4, atol=1e-6)
    pruned = CapsuleNetwork((1, 20, 20), 3, L1Routing(), kept_capsules=(1, 5), **SMALL["CapsuleNetwork"])
    pruned.save(tmp_path / "pruned")
    assert_same(load(tmp_path / "pruned"), pruned)


def test_layers_with_different_routings_are_not_stored_as_one(tmp_path):
    for routings in ([DynamicRouting(), UniformRouting()], [DynamicRouting(iterations=2), DynamicRouting()]):
        network = CapsuleNetwork((1, 20, 20), 3, routings, layers=[(6, 4)], **SMALL["CapsuleNetwork"])
        with pytest.raises(UserError, match="different routings"):
            network.save(tmp_path / "network")
    assert not (tmp_path / "network").exists()


def test_the_same_seed_builds_the_same_network():
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(DESCRIPTION.build().state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)


# A routing of one's own: a file may name it, and only its reader may bring it.


def test_a_routing_that_a_file_names_is_never_imported(tmp_path, monkeypatch):
    network = CapsuleNetwork((1, 20, 20), 3, Own(sharpness=0.5), layers=[(6, 4)], **SMALL["CapsuleNetwork"])
    network.save(tmp_path / "network")
    tensors, state = read_tensors(tmp_path / "network")
    assert state["network"]["routing"] == {"name": f"{__name__}:Own", "settings": {"sharpness": 0.5}}
    state["network"]["routing"]["name"] = "mine:Net"
    write_tensors(tmp_path / "network", tensors, state)
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"'mine:Net' is none of torchcaps' own.*load\(path, routing=Class\) in Python"):
        load(tmp_path / "network")
    assert "mine" not in sys.modules
    loaded = load(tmp_path / "network", routing=Own)
    assert "mine" not in sys.modules
    images = torch.rand(2, 1, 20, 20)
    torch.testing.assert_close(loaded(images).capsules, network(images).capsules, rtol=0, atol=0)


def test_settings_that_the_class_given_does_not_have_are_told(tmp_path):
    CapsuleNetwork((1, 20, 20), 3, Own(sharpness=0.5), **SMALL["CapsuleNetwork"]).save(tmp_path / "network")

    class Other(Own):
        def __init__(self, *, softness: float = 1.0) -> None:
            super().__init__()

    with pytest.raises(SettingError, match=r"sharpness is not a setting.*softness"):
        load(tmp_path / "network", routing=Other)


# Files that are missing, foreign, damaged, or made to do harm.


def test_a_missing_or_foreign_file_is_told_as_such(tmp_path):
    with pytest.raises(UserError, match="no trained network"):
        load(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no trained network"):
        load(tmp_path)
    write_tensors(tmp_path / "other.safetensors", {"x": torch.ones(1)}, {"step": 3})
    with pytest.raises(DamagedFile, match="holds no network"):
        load(tmp_path / "other.safetensors")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(DamagedFile, match="not one of torchcaps' files"):
        load(tmp_path / "text")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / MODEL_FILE)
    for path in (tmp_path, tmp_path / MODEL_FILE):
        with pytest.raises(UserError, match="no trained network"):
            load(path)


def test_a_field_of_another_version_is_told_as_such(tmp_path):
    path = tmp_path / "model.safetensors"
    write_tensors(path, {}, {"network": {**DESCRIPTION.to_mapping(), "colour": "green"}})
    with pytest.raises(DamagedFile, match="colour"):
        load(path)


def changed(section: str, name: str, value: Any) -> dict[str, Any]:
    """The description with one value changed."""
    mapping = DESCRIPTION.to_mapping()
    mapping[section][name] = value
    return mapping


DAMAGED = {
    "nothing": None,
    "a list": [],
    "a number": 3,
    "empty": {},
    "no task": {name: part for name, part in DESCRIPTION.to_mapping().items() if name != "task"},
    "model is a list": {**DESCRIPTION.to_mapping(), "model": [1]},
    "task is a text": {**DESCRIPTION.to_mapping(), "task": "mnist"},
    "routing is a text": {**DESCRIPTION.to_mapping(), "routing": "l2"},
    "unknown model": changed("model", "name", "transformer"),
    "model's name is a list": changed("model", "name", ["capsnet"]),
    "misspelled": changed("model", "conv_chanels", 4),
    "10**12 channels": changed("model", "conv_channels", 10**12),
    "1e12 channels": changed("model", "conv_channels", 1e12),
    "as many channels as may be": changed("model", "conv_channels", 2**20),
    "channels as text": changed("model", "conv_channels", "4"),
    "negative channels": changed("model", "conv_channels", -4),
    "true channels": changed("model", "conv_channels", True),
    "other channels": changed("model", "conv_channels", 5),
    "a layer more": changed("model", "layers", [[6, 4], [6, 4]]),
    "layers without sizes": changed("model", "layers", [6, 4]),
    "a huge layer": changed("model", "layers", [[2**20, 2**20]]),
    "no decoder": changed("model", "reconstruction", False),
    "kernel too large": changed("model", "kernel", 64),
    "capsules that are not there": changed("model", "kept_capsules", [10**9]),
    "no capsules kept": changed("model", "kept_capsules", []),
    "nan": changed("model", "negative_slope", float("nan")),
    "huge images": changed("task", "image_shape", [3, 2**20, 2**20]),
    "small images": changed("task", "image_shape", [3, 2, 2]),
    "other images": changed("task", "image_shape", [1, 20, 20]),
    "other classes": changed("task", "classes", ["cat", "dog", "cow"]),
    "classes as a text": changed("task", "classes", "cat,dog"),
    "classes that are no texts": changed("task", "classes", [1, 2]),
    "more labels than classes": changed("task", "labels_per_image", 3),
    "infinite mean": changed("task", "mean", [float("inf")]),
    "no deviation": changed("task", "std", [0.0]),
    "a huge source": changed("task", "source_shape", [3, 100_000, 100_000]),
    "a small source": changed("task", "source_shape", [3, 10, 10]),
    "routing without a name": changed("routing", "name", None),
    "routing settings as a list": changed("routing", "settings", [1]),
    "another routing": changed("routing", "name", "dynamic"),
    "unknown routing setting": changed("routing", "settings", {"sharpness": 1}),
    "routing setting as text": changed("routing", "settings", {"start": "one"}),
    "routing setting as a list": changed("routing", "settings", {"start": [1.0]}),
    "negative strength": changed("routing", "settings", {"strength": -1.0}),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_description_that_does_not_fit_is_refused(tmp_path, case):
    """Quickly, with little memory, and as bad input, not as a mistake of ours."""
    path = tmp_path / "network"
    write_tensors(path, DESCRIPTION.build().state_dict(), {"network": DAMAGED[case]})
    with pytest.raises(UserError) as caught:
        load(path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["dynamic", "em", "clustering"])
def test_endless_iterations_are_refused(tmp_path, name):
    network = CapsuleNetwork((1, 20, 20), 3, ROUTINGS[name](), **SMALL["CapsuleNetwork"])
    network.save(tmp_path / "network")
    tensors, state = read_tensors(tmp_path / "network")
    for iterations in (10**9, 1e9, 0, -1, "3", 10**100):
        state["network"]["routing"]["settings"] = {"iterations": iterations}
        write_tensors(tmp_path / "network", tensors, state)
        with pytest.raises(UserError, match="iterations"):
            load(tmp_path / "network")


def test_endless_iterations_of_matrix_capsules_are_refused(tmp_path):
    network = create_model("matrix-small", classes=3, **SMALL["MatrixCapsuleNetwork"])
    model = {**MatrixConfig(matrix_sizes=(4, 2, 2, 3)).to_mapping(), "iterations": 10**9}
    description = {"model": model, "task": network.task.to_mapping(), "routing": RoutingConfig().to_mapping()}
    write_tensors(tmp_path / "network", network.state_dict(), {"network": description})
    with pytest.raises(DamagedFile, match="iterations must be at most 100"):
        load(tmp_path / "network")


@pytest.mark.parametrize("damage", ["missing", "too many", "another shape", "renamed", "none"])
def test_other_tensors_than_described_are_refused(tmp_path, damage):
    tensors = dict(DESCRIPTION.build().state_dict())
    if damage == "missing":
        del tensors["layers.1.weight"]
    elif damage == "too many":
        tensors["layers.2.weight"] = torch.ones(2)
    elif damage == "another shape":
        tensors["layers.1.weight"] = tensors["layers.1.weight"].flatten()
    elif damage == "renamed":
        tensors["layers.1.wait"] = tensors.pop("layers.1.weight")
    else:
        tensors = {}
    write_tensors(tmp_path / "network", tensors, {"network": DESCRIPTION.to_mapping()})
    with pytest.raises(DamagedFile, match=r"describes another network than it holds: .* do not fit"):
        load(tmp_path / "network")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.full((2, 2), 1e300, dtype=torch.float64), "not finite"),
        (torch.ones(2, 2).to(torch.float8_e4m3fn), "float8"),
    ],
)
def test_numbers_that_a_network_cannot_hold_are_refused(tmp_path, values, words):
    tensors = dict(DESCRIPTION.build().state_dict())
    name = "layers.1.routing.coefficients"
    tensors[name] = values[:1, :1].expand_as(tensors[name])
    write_tensors(tmp_path / "network", tensors, {"network": DESCRIPTION.to_mapping()})
    with pytest.raises(DamagedFile, match=words):
        load(tmp_path / "network")


@pytest.mark.parametrize("depth", [100, 900, 980, 100_000])
@pytest.mark.parametrize("where", ["network", "layers", "settings"])
def test_deep_nesting_is_refused(tmp_path, depth, where):
    nested = "[" * depth + "]" * depth
    mapping = DESCRIPTION.to_mapping()
    if where == "layers":
        mapping["model"]["layers"] = "NESTED"
    if where == "settings":
        mapping["routing"]["settings"] = {"start": "NESTED"}
    encoded = json.dumps({"network": "NESTED" if where == "network" else mapping}).replace('"NESTED"', nested)
    tensors = {name: tensor.contiguous() for name, tensor in DESCRIPTION.build().state_dict().items()}
    envelope = json.dumps({"state": encoded, "sha256": _digest(tensors, encoded)})
    (tmp_path / "network").write_bytes(safetensors.torch.save(tensors, {KEY: envelope}))
    with pytest.raises(UserError) as caught:
        load(tmp_path / "network")
    assert len(str(caught.value)) < 1000


class Counting(Routing):
    """Reads numbers when it is made, which tensors without memory do not have."""

    def connect(self, inputs: int, outputs: int, output_size: int) -> None:
        self.rates = torch.linspace(1, 2, outputs).tolist()

    def forward(self, votes: Votes, activations: Tensor) -> Capsules:
        return capsules_from_totals(votes.combine(1.0) * torch.tensor(self.rates)[:, None])


class Reading(nn.Module):
    """A backbone that does so, too, and has a tensor of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.convolution = nn.Conv2d(1, 6, 5, stride=4)
        self.register_buffer("mask", torch.ones(1, 6, 1, 1, dtype=torch.int8))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.convolution(images).relu()
        return maps / (1 + float(maps.detach().abs().max())) * self.mask * torch.ones(1)


def test_a_routing_that_reads_numbers_is_loaded(tmp_path):
    network = CapsuleNetwork((1, 20, 20), 3, Counting(), **SMALL["CapsuleNetwork"])
    network.save(tmp_path / "network")
    assert_same(load(tmp_path / "network", routing=Counting), network)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_backbone_that_reads_numbers_is_loaded(tmp_path, precision):
    network = CapsuleNetwork((1, 20, 20), 3, backbone=Reading(), primary_capsules=2, reconstruction=False)
    network.save(tmp_path / "network", precision=precision)
    loaded = load(tmp_path / "network", backbone=Reading)
    assert loaded.front.stem.mask.dtype == torch.int8
    if precision == "float32":
        assert_same(loaded, network)


def test_a_backbone_that_is_given_is_copied(tmp_path):
    """Or the second network loaded with it would change the first."""
    stem = Reading()
    before = stem.convolution.weight.clone()
    CapsuleNetwork((1, 20, 20), 3, backbone=Reading(), primary_capsules=2).save(tmp_path / "network")
    assert load(tmp_path / "network", backbone=stem).front.stem is not stem
    assert torch.equal(stem.convolution.weight, before)


def test_a_file_asks_for_no_more_memory_than_it_has_tensors_even_with_a_routing_of_ones_own(tmp_path):
    made: list[int] = []

    class Watching(Counting):
        def connect(self, inputs: int, outputs: int, output_size: int) -> None:
            made.append(outputs)

    network = CapsuleNetwork((1, 20, 20), 3, Watching(), reconstruction=False, **SMALL["CapsuleNetwork"])
    made.clear()
    description = network.description()
    description["model"]["class_size"] = 4096
    write_tensors(tmp_path / "network", network.state_dict(), {"network": description})
    with pytest.raises(DamagedFile, match="do not fit"):
        load(tmp_path / "network", routing=Watching)
    assert not made


def test_what_is_no_tensor_is_not_stored(tmp_path):
    class Remembering(nn.Conv2d):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    network = CapsuleNetwork((1, 20, 20), 3, backbone=Remembering(1, 4, 5, 4), primary_capsules=2)
    with pytest.raises(UserError, match="_extra_state of this network is a dict: only tensors can be stored"):
        network.save(tmp_path / "network")
    assert not (tmp_path / "network").exists()
