"""Every network that can be made can be taken elsewhere, and gives the same answers there."""

from __future__ import annotations

import json

import pytest
import torch

import torchcaps
from torchcaps import CapsuleNetwork, ClusteringRouting, L1Routing, UniformRouting
from torchcaps.atomic import DamagedFile
from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.models.cnn import ConvolutionalNetwork
from torchcaps.models.matrix import MatrixCapsuleNetwork
from torchcaps.models.packing import pack, unpack
from torchcaps.routing.registry import ROUTINGS
from torchcaps.storage import read_tensors, write_tensors
from torchcaps.trained import export as exporting
from torchcaps.trained.export import FORMATS, export, metadata, rounded

CLASSES = ("ant", "bee", "cow")
TINY = {"conv_channels": 4, "primary_capsules": 3}


def capsnet(routing=None, shape=(1, 20, 18), **settings) -> CapsuleNetwork:
    return CapsuleNetwork(shape, CLASSES, routing, **TINY, **settings)


NETWORKS = {
    **{name: lambda name=name: capsnet(ROUTINGS[name]()) for name in ROUTINGS},
    "entropy": lambda: capsnet(ClusteringRouting(regulariser="entropy")),
    "one iteration": lambda: capsnet(ROUTINGS["dynamic"](iterations=1)),
    "padding": lambda: capsnet(padding="same"),
    "layers": lambda: capsnet(layers=((5, 4),), kernel=5),
    "dynamic layers": lambda: capsnet(ROUTINGS["dynamic"](), layers=((5, 4),), kernel=5),
    "colour": lambda: capsnet(
        shape=(3, 18, 20), negative_slope=0.2, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), labels_per_image=2
    ),
    "pruned": lambda: CapsuleNetwork((1, 20, 18), CLASSES, L1Routing(), **TINY, kept_capsules=[0, 2, 3]),
    "matrix": lambda: MatrixCapsuleNetwork((1, 20, 20), CLASSES, matrix_sizes=(4, 2, 3, 2)),
    "cnn": lambda: ConvolutionalNetwork((1, 20, 18), CLASSES, conv_channels=4, second_channels=6),
}


def network_of(name: str) -> Network:
    """A network with weights that make a difference, which its start values may not."""
    network = NETWORKS[name]().eval()
    with torch.no_grad():
        for tensor in network.state_dict().values():
            tensor += 0.05 * torch.randn_like(tensor)
    return network


def needed(to: str) -> None:
    if to == "onnx":
        for module in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(module)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_exported_and_answers_alike(name, to, tmp_path):
    needed(to)
    network = network_of(name)
    images = torch.rand(5, *network.image_shape)
    report = export(network, tmp_path / f"model{FORMATS[to]}", to=to, images=images)
    assert report.largest_difference < 1e-4
    assert report.images == 5
    assert report.real_images
    assert [path.name for path in tmp_path.iterdir()] == [f"model{FORMATS[to]}"]
    assert report.bytes == report.path.stat().st_size


@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("name", ["l2", "em", "cnn"])
def test_weights_in_fewer_bits_are_rounded_and_nothing_else(name, to, precision, tmp_path):
    needed(to)
    network = network_of(name)
    images = torch.rand(4, *network.image_shape)
    report = export(network, tmp_path / "small", to=to, precision=precision, images=images)
    assert report.rounding_difference < 1e-4
    assert 0 < report.largest_difference < 0.3


def test_the_onnx_file_says_what_it_takes_and_gives(tmp_path):
    onnx, onnxruntime = (pytest.importorskip(name) for name in ("onnx", "onnxruntime"))
    pytest.importorskip("onnxscript")
    network = network_of("colour")
    export(network, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model)
    facts = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(facts["classes"]) == list(CLASSES)
    assert json.loads(facts["labels_per_image"]) == 2
    assert json.loads(facts["image_shape"]) == [3, 18, 20]
    assert json.loads(facts["mean"]) == [0.4, 0.5, 0.6]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.shape) == ("image", ["batch", 3, 18, 20])
    outputs = {output.name: output.shape for output in session.get_outputs()}
    assert outputs == {"lengths": ["batch", 3], "poses": ["batch", 3, 16]}
    for count in (1, 2, 7):
        images = torch.rand(count, 3, 18, 20)
        lengths, poses = session.run(None, {"image": images.numpy()})
        capsules = network(images).capsules
        torch.testing.assert_close(torch.from_numpy(lengths), capsules.activations.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(poses), capsules.poses.detach(), rtol=1e-4, atol=1e-5)


def test_the_pt2_file_holds_the_metadata(tmp_path):
    network = network_of("dynamic")
    export(network, tmp_path / "model.pt2", to="pt2")
    extra = {"torchcaps.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra)
    assert json.loads(extra["torchcaps.json"]) == metadata(network)
    lengths, poses = program.module()(torch.rand(1, 1, 20, 18))
    assert (lengths.shape, poses.shape) == ((1, 3), (1, 3, 16))


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_the_safetensors_file_is_a_network_with_decoder_for_load(precision, tmp_path):
    network = network_of("l1")
    export(network, tmp_path / "model.safetensors", to="safetensors", precision=precision)
    loaded = torchcaps.load(tmp_path / "model.safetensors")
    assert loaded.classes == CLASSES
    assert isinstance(loaded.layers[0].routing, UniformRouting)
    assert all(tensor.dtype == torch.float32 for tensor in loaded.state_dict().values())
    images = torch.rand(3, 1, 20, 18)
    torch.testing.assert_close(loaded.predict(images).lengths, rounded(network, precision).predict(images).lengths)
    assert loaded.reconstruct(loaded(images).capsules).shape == (3, 1, 1, 20, 18)


def test_fewer_bits_make_smaller_files(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    network = CapsuleNetwork((1, 20, 18), CLASSES, conv_channels=64, primary_capsules=16)
    for to in FORMATS:
        sizes = [
            export(network, tmp_path / f"{precision}{FORMATS[to]}", to=to, precision=precision).bytes
            for precision in ("float32", "float16", "int8")
        ]
        assert sizes[1] < 0.56 * sizes[0], to
        assert sizes[2] < 0.33 * sizes[0], to


def test_rounding_is_to_the_nearest_step_of_each_row():
    tensor = torch.randn(5, 4, 3) * torch.tensor([1e-6, 1.0, 0.0, 1e3, 1.0]).view(-1, 1, 1)
    restored = unpack(pack({"weight": tensor}, "int8"))["weight"]
    steps = tensor.abs().flatten(1).amax(1).view(-1, 1, 1) / 127
    assert ((restored - tensor).abs() <= 0.5001 * steps).all()
    bias = torch.randn(7)
    assert unpack(pack({"bias": bias}, "int8"))["bias"].equal(bias)
    state = {"weight": tensor, "bias": bias}
    assert unpack(pack(state, "int8")).keys() == state.keys()


def test_weights_that_fewer_bits_cannot_hold_are_refused(tmp_path):
    network = capsnet()
    network.front.first.weight.data[0, 0, 0, 0] = 1e9
    with pytest.raises(UserError, match="float16 cannot hold"):
        export(network, tmp_path / "m.pt2", to="pt2", precision="float16")
    network.front.first.weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        network.save(tmp_path / "m.safetensors", precision="int8")
    with pytest.raises(UserError, match="not finite"):
        export(network, tmp_path / "m.safetensors", to="safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("front.first.weight.scale"),
        lambda tensors: tensors.update({"front.first.weight.scale": torch.ones(4, 1, 1, 2)}),
        lambda tensors: tensors.update({"front.first.weight.scale": torch.ones(4, 1, 1, 1, dtype=torch.float64)}),
        lambda tensors: tensors.update({"front.first.bias": torch.ones(4, dtype=torch.int8)}),
        lambda tensors: tensors.update({"front.first.bias": torch.ones(4, dtype=torch.int64)}),
        lambda tensors: tensors.update({"front.first.weight": torch.ones(4, 1, 9, 8, dtype=torch.int8)}),
        lambda tensors: tensors.update({"more": torch.ones(2)}),
        lambda tensors: tensors.update({"more.scale": torch.ones(2, 1)}),
    ],
)
def test_hostile_files_in_eight_bits_are_refused(change, tmp_path):
    path = tmp_path / "model.safetensors"
    network_of("l2").save(path, precision="int8")
    tensors, state = read_tensors(path)
    change(tensors)
    write_tensors(path, tensors, state)
    with pytest.raises(DamagedFile):
        torchcaps.load(path)


def test_a_file_with_other_answers_is_an_error_and_the_old_one_stays(tmp_path, monkeypatch):
    path = tmp_path / "model.pt2"
    path.write_text("what was there")
    monkeypatch.setitem(exporting.WRITERS, "pt2", lambda network, *rest: exporting._write_pt2(network_of("l2"), *rest))
    with pytest.raises(UserError, match="differs from the original"):
        export(network_of("l2"), path, to="pt2")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt2"]
    assert path.read_text() == "what was there"


def test_choices_and_places_are_checked(tmp_path, monkeypatch):
    network = capsnet()
    with pytest.raises(UserError, match="choose one of onnx, pt2, safetensors"):
        export(network, tmp_path / "m", to="tflite")
    with pytest.raises(UserError, match="choose one of float32, float16, int8"):
        export(network, tmp_path / "m", to="pt2", precision="int4")
    with pytest.raises(ValueError, match="images must have shape"):
        export(network, tmp_path / "m", to="pt2", images=torch.rand(1, 1, 5, 5))
    for to in ("safetensors", "pt2"):
        with pytest.raises(UserError, match="Cannot write to"):
            export(network, tmp_path / "nowhere" / f"m.{to}", to=to)
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"pip install 'torchcaps\[export\]'"):
        export(network, tmp_path / "m.onnx")


def test_the_network_is_left_as_it_is(tmp_path):
    network = network_of("l2").train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    export(network, tmp_path / "m.pt2", to="pt2", precision="int8")
    assert network.training
    assert network.decoder is not None
    for name, tensor in network.state_dict().items():
        assert tensor.equal(before[name])
