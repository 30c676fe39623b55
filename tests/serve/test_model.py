"""Answers for one image: the same as the network's own, and exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

import torchcaps
from commands import TINY_FLAGS
from torchcaps.cli.main import main
from torchcaps.errors import UserError
from torchcaps.models.cnn import ConvolutionalNetwork
from torchcaps.models.matrix import MatrixCapsuleNetwork
from torchcaps.routing.em import EMRouting
from torchcaps.serve import wire
from torchcaps.serve.gallery import Gallery
from torchcaps.serve.model import ServedModel, check_side_by_side
from torchcaps.trained.run import TrainedRun


def pixels(shape=(1, 28, 28)) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def small(**settings) -> torchcaps.CapsuleNetwork:
    shape = settings.pop("image_shape", (1, 28, 28))
    return torchcaps.CapsuleNetwork(shape, ["a", "b", "c"], conv_channels=6, primary_capsules=2, **settings)


@pytest.mark.parametrize("routing", [torchcaps.L2Routing(), torchcaps.DynamicRouting()])
def test_answers_are_those_of_the_network(routing):
    network = small(routing=routing, negative_slope=0.1).eval()
    image = pixels()
    analysis = ServedModel("x", network).analyse(image, 1)
    with torch.no_grad():
        output = network(image[None] / 255, labels=torch.tensor([analysis.found[0]]))
    assert_close(analysis.lengths, output.capsules.activations[0], rtol=1e-4, atol=1e-6)
    assert_close(analysis.poses, output.capsules.poses[0], rtol=1e-4, atol=1e-5)
    assert_close(analysis.reconstructions[analysis.found[0]], output.reconstructions[0, 0], rtol=1e-4, atol=1e-5)
    contributions = analysis.contributions
    explanation = network.explain(image[None] / 255)
    assert_close(contributions.adds + contributions.takes, float(explanation.lengths[0, 1]), rtol=1e-4, atol=1e-5)
    assert_close(contributions.adds_map + contributions.takes_map, explanation.maps[0, 1], rtol=1e-3, atol=1e-5)


def test_the_network_itself_is_left_alone():
    network = small()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    ServedModel("x", network).analyse(pixels())
    assert_close(dict(network.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "network",
    [
        ConvolutionalNetwork((1, 28, 28), 3, conv_channels=4, second_channels=8),
        small(layers=((4, 4),)),
        small(routing=EMRouting()),
        MatrixCapsuleNetwork((1, 28, 28), 3, matrix_sizes=(4, 2, 2, 2)),
    ],
    ids=["cnn", "two layers", "em", "matrix"],
)
def test_networks_without_maps_are_answered_for_all_the_same(network):
    model = ServedModel("x", network)
    analysis = model.analyse(pixels())
    assert (analysis.contributions is None) == (not model.has_maps)
    assert analysis.lengths.shape == (3,)
    assert len(analysis.reconstructions) == 1


def test_both_of_overlapping_classes_are_drawn():
    model = ServedModel("x", small(labels_per_image=2))
    analysis = model.analyse(pixels())
    assert len(analysis.found) == 2
    assert list(analysis.reconstructions) == analysis.found


def test_a_sweep_has_the_pose_itself_in_the_middle():
    model = ServedModel("x", small(class_size=4))
    pose = torch.rand(4)
    strips = model.sweep(pose, 2)
    assert strips.shape == (4, 11, 1, 28, 28)
    middle = model.decode(pose[None], [2])[0]
    for strip in strips:
        assert_close(strip[5], middle, rtol=1e-4, atol=1e-5)
    assert_close(model.sweep(pose, 2, 3)[0], strips[3], rtol=1e-4, atol=1e-5)


def test_without_a_decoder_nothing_is_drawn():
    model = ServedModel("x", small(reconstruction=False))
    assert model.analyse(pixels()).reconstructions == {}
    with pytest.raises(UserError, match="no decoder"):
        model.decode(torch.zeros(1, 16), [0])


def test_networks_for_other_images_are_not_compared():
    with pytest.raises(UserError, match="cannot be compared"):
        check_side_by_side([ServedModel("x", small()), ServedModel("y", small(image_shape=(1, 30, 30)))])


def test_wrong_answers_are_wrong(model, gallery):
    for sample in gallery.wrong(3, model):
        assert sorted(model.analyse(sample.pixels).found) != sorted(sample.labels)
    assert gallery.looked_at(model)[0] > 0
    assert len(gallery.some(5)) == 5


def test_test_images_of_other_classes_are_not_shown(tmp_path):
    images, labels = np.random.default_rng(0).integers(256, size=(40, 20, 20), dtype=np.uint8), np.arange(40) % 2
    for label, name in enumerate(["cat", "dog"]):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in np.flatnonzero(labels == label):
            Image.fromarray(images[number]).save(tmp_path / "pets" / name / f"{number}.png")
    flags = ["--steps", "1", "--data", f"folder:{tmp_path / 'pets'}", "--no-reconstruction"]
    assert main(["train", *TINY_FLAGS, *flags, "--out", str(tmp_path / "run")]) == 0
    run = TrainedRun(tmp_path / "run", accelerator="cpu", threads=1)
    assert Gallery.of_run(run).some(1)
    (tmp_path / "pets" / "dog").rename(tmp_path / "pets" / "ant")
    with pytest.raises(UserError, match="knows the classes cat, dog"):
        Gallery.of_run(run)


def test_names_that_are_no_letters_are_escaped():
    model = ServedModel("x", torchcaps.CapsuleNetwork((1, 28, 28), ["caf\udce9", "b"], conv_channels=6))
    assert wire.info_of([model], None)["classes"][0] == "caf\\xe9"
