"""What goes wrong in somebody's own loop is said at once, about the argument it was."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchcaps
from torchcaps import CapsuleLayer, CapsuleNetwork, DynamicRouting, EMRouting, L2Routing, LearnedRouting, RoutingAscent
from torchcaps.ascent import FixedNorm, GroupPenalty
from torchcaps.functional import margin_loss, reconstruction_loss, spread_loss
from torchcaps.optim import Muon
from torchcaps.routing import Routing
from torchcaps.routing.registry import ROUTINGS

IMAGES, LABELS = torch.rand(6, 1, 20, 20), torch.tensor([0, 1, 2, 3, 0, 1])
LENGTHS = torch.rand(6, 4)


def small_network(**settings: Any) -> CapsuleNetwork:
    torch.manual_seed(0)
    return CapsuleNetwork((1, 20, 20), 4, conv_channels=8, primary_capsules=2, reconstruction=False, **settings)


def backbone() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8))


class Anything(Routing):
    """A routing that passes on what it does not know."""

    def __init__(self, *, own: int = 1, **others: Any) -> None:
        super().__init__()
        self.own, self.others = own, others

    def forward(self, votes, activations):
        return torchcaps.functional.capsules_from_totals(votes.combine(1.0))


def muon(outputs: Any) -> Muon:
    return Muon([{"params": [nn.Parameter(torch.ones(3, 3))], "outputs": outputs}])


MISTAKES = {
    "one-hot numbers": (lambda: margin_loss(LENGTHS, F.one_hot(LABELS, 4)), ValueError, "look like presence"),
    "one-hot, spread": (
        lambda: spread_loss(LENGTHS, F.one_hot(LABELS, 4), margin=0.5),
        ValueError,
        "look like presence",
    ),
    "labels of another batch": (lambda: margin_loss(LENGTHS, LABELS[:1]), ValueError, "labels of 1 images"),
    "a list of labels": (lambda: margin_loss(LENGTHS, LABELS.tolist()), TypeError, "list"),
    "an output for lengths": (lambda: margin_loss(small_network()(IMAGES), LABELS), TypeError, "Output"),
    "weights with an axis": (
        lambda: margin_loss(LENGTHS, LABELS, image_weights=torch.ones(6, 1)),
        ValueError,
        r"image_weights must be \(6,\)",
    ),
    "targets without an axis": (
        lambda: reconstruction_loss(torch.rand(6, 1, 1, 4, 4), torch.rand(6, 1, 4, 4)),
        ValueError,
        "targets must be",
    ),
    "bytes": (lambda: small_network()((IMAGES * 255).byte()), ValueError, r"numbers in \[0, 1\]"),
    "explained bytes": (lambda: small_network().explain((IMAGES * 255).byte()), ValueError, r"numbers in \[0, 1\]"),
    "capsules of another network": (
        lambda: RoutingAscent(small_network()).step(small_network()(IMAGES).capsules, LABELS),
        RuntimeError,
        "no graph",
    ),
    "parameters for a network": (lambda: RoutingAscent(small_network().parameters()), TypeError, "must be a module"),
    "a routing for a network": (lambda: RoutingAscent(L2Routing()), ValueError, "in a layer"),
    "an objective's name": (lambda: RoutingAscent(small_network(), objective="ratio"), TypeError, "objective must be"),
    "no directions": (lambda: RoutingAscent(small_network()).move([]), ValueError, "shorter"),
    "no types": (lambda: GroupPenalty(1.0, types=0), ValueError, "types must be"),
    "no inputs": (lambda: CapsuleLayer(0, 8, 5, 16), ValueError, "inputs must be at least 1"),
    "no outputs": (lambda: CapsuleLayer(36, 8, 0, 16), ValueError, "outputs must be at least 1"),
    "half an iteration": (lambda: DynamicRouting(iterations=2.5), TypeError, "integer"),
    "no number": (lambda: L2Routing(start=float("nan")), ValueError, "start must be finite"),
    "no number for beta": (lambda: EMRouting(beta_u=float("inf")), ValueError, "beta_u must be finite"),
    "no decay": (lambda: EMRouting(decay=2.0), ValueError, "decay"),
    "two sides": (lambda: CapsuleNetwork((1, 28), 4), ValueError, "image_shape must be a list of 3"),
    "a word for classes": (lambda: CapsuleNetwork((1, 28, 28), "ab"), ValueError, "classes must be"),
    "the same class twice": (lambda: CapsuleNetwork((1, 28, 28), ["a", "a"]), ValueError, "different names"),
    "a backbone's name": (
        lambda: CapsuleNetwork((1, 28, 28), 4, backbone="timm:resnet18"),
        TypeError,
        "backbone must be a module",
    ),
    "axes that are not there": (lambda: muon((5,)), ValueError, "outputs must be"),
    "a number for axes": (lambda: muon(0), ValueError, "outputs must be"),
    "no axes": (lambda: muon(()), ValueError, "outputs must be"),
    "a negative rate": (
        lambda: Muon([{"params": [nn.Parameter(torch.ones(3))], "lr": -1}]),
        ValueError,
        "lr must be zero or more",
    ),
    "a routing's name": (lambda: torchcaps.load("there.safetensors", routing="a:B"), TypeError, "must be a class"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    make, kind, words = MISTAKES[mistake]
    with pytest.raises(kind, match=words):
        make()


@pytest.mark.parametrize("shape", [(2, 8, 36), (2, 6, 6, 8), (2, 35, 8)])
@pytest.mark.parametrize("name", ROUTINGS)
def test_a_layer_says_which_poses_it_takes(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"poses must be \(B, 36, 8\)"):
        CapsuleLayer(36, 8, 5, 16, ROUTINGS[name]())(torch.rand(shape))


def test_a_layer_says_which_activations_it_takes() -> None:
    with pytest.raises(ValueError, match=r"activations must be \(B, 36\)"):
        CapsuleLayer(36, 8, 5, 16)(torch.rand(2, 36, 8), torch.rand(2, 36, 1))


def test_presence_may_be_numbers_or_truth_values() -> None:
    expected = margin_loss(LENGTHS, LABELS)
    for dtype in (torch.float32, torch.bool):
        assert margin_loss(LENGTHS, F.one_hot(LABELS, 4).to(dtype)) == expected


def test_coefficients_that_were_replaced_are_noticed() -> None:
    network = small_network()
    ascent = RoutingAscent(network)
    network.load_state_dict(small_network().state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="make a new RoutingAscent"):
        ascent.step(network(IMAGES).capsules, LABELS)


def test_an_ascent_refuses_another_kinds_state_and_keeps_its_own() -> None:
    network = small_network()
    ascent = RoutingAscent(network, constraint=FixedNorm())
    with pytest.raises(ValueError, match="no norms"):
        ascent.load_state_dict(RoutingAscent(network).state_dict())
    with pytest.raises(ValueError, match="gamma must be"):
        ascent.gamma = -1
    ascent.load_state_dict(copy.deepcopy(ascent.state_dict()))
    ascent.step(network(IMAGES).capsules, LABELS)


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_a_backbone_that_counts_comes_back(precision: str, tmp_path) -> None:
    network = small_network(backbone=backbone).train()
    network(IMAGES)
    network.save(tmp_path / "model.safetensors", precision=precision)
    loaded = torchcaps.load(tmp_path / "model.safetensors", backbone=backbone)
    assert int(loaded.front.stem[1].num_batches_tracked) == 1
    same = torchcaps.load(tmp_path / "model.safetensors", backbone=backbone())  # a module serves as well
    assert same(IMAGES).capsules.activations.equal(loaded(IMAGES).capsules.activations)


def test_explaining_leaves_a_backbone_in_training_as_it_was() -> None:
    network = small_network(backbone=backbone).train()
    network.explain(IMAGES)
    assert int(network.front.stem[1].num_batches_tracked) == 0
    assert network.training


def test_whole_numbers_serve_as_start_values() -> None:
    for routing in (L2Routing(start=1), LearnedRouting(start=1), EMRouting(beta_a=0)):
        CapsuleLayer(3, 3, 3, 3, routing)
    assert len(CapsuleNetwork((1, 20, 20), np.int64(4), mean=0.5).classes) == 4


def test_a_routing_that_takes_anything_comes_back_with_it(tmp_path) -> None:
    small_network(routing=Anything(share=2)).save(tmp_path / "model.safetensors")
    assert torchcaps.load(tmp_path / "model.safetensors", routing=Anything).layers[0].routing.others == {"share": 2}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # by torch.func itself
@pytest.mark.parametrize("name", ROUTINGS)
def test_transforms_of_functions_see_ordinary_operations(name: str) -> None:
    layer, poses = CapsuleLayer(36, 8, 5, 16, ROUTINGS[name]()), torch.rand(2, 36, 8)

    def lengths(poses: torch.Tensor) -> torch.Tensor:
        return layer(poses).activations

    (expected,) = torch.autograd.grad(lengths(poses.requires_grad_()).sum(), poses)
    poses = poses.detach()
    torch.testing.assert_close(torch.func.grad(lambda given: lengths(given).sum())(poses), expected)
    value, _ = torch.func.jvp(lengths, (poses,), (poses,))
    torch.testing.assert_close(value, lengths(poses))
    assert lengths(poses[:0]).shape == (0, 5)


def test_a_network_without_memory_gets_it_with_all_its_numbers() -> None:
    make = partial(small_network, mean=0.3, std=0.5)
    given = make()
    with torch.device("meta"):
        network = make()
    network.to_empty(device="cpu").load_state_dict(given.state_dict())
    assert network(IMAGES).capsules.activations.equal(given(IMAGES).capsules.activations)


def test_no_image_is_a_batch_too() -> None:
    network = small_network()
    assert network.predict(IMAGES[:0]).lengths.shape == (0, 4)


def test_layers_are_stacked_as_modules_are() -> None:
    first, second, third = (
        torchcaps.PrimaryCapsules(8, 2, 4, kernel=3),
        CapsuleLayer(8, 4, 3, 5, EMRouting()),  # which asks for activations
        CapsuleLayer(3, 5, 2, 6),
    )
    features = torch.rand(2, 8, 5, 5)
    capsules = first(features)
    between = second(capsules.poses, capsules.activations)
    expected = third(between.poses, between.activations)
    assert nn.Sequential(first, second, third)(features).poses.equal(expected.poses)


@pytest.mark.parametrize("kind", ["matrix-small", "cnn"])
def test_without_a_number_of_classes_there_is_no_decoder(kind: str) -> None:
    network = torchcaps.create_model(kind, classes=4, labels_per_image=0)
    assert network.decoder is None


def test_a_network_of_another_kind_is_not_taken_for_this_one(tmp_path) -> None:
    pytest.importorskip("huggingface_hub")
    torchcaps.create_model("cnn", classes=4, conv_channels=8, second_channels=8).save_pretrained(tmp_path / "cnn")
    with pytest.raises(torchcaps.errors.UserError, match="ConvolutionalNetwork"):
        CapsuleNetwork.from_pretrained(tmp_path / "cnn")
