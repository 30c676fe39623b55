"""What goes wrong in somebody's own loop is said at once, about the argument it was."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import torchcaps
from torchcaps import CapsuleLayer, CapsuleNetwork, DynamicRouting, EMRouting, L2Routing, LearnedRouting, RoutingAscent
from torchcaps.ascent import FixedNorm, GroupPenalty, L1Penalty, Objective, Penalty
from torchcaps.errors import UserError
from torchcaps.functional import margin_loss, reconstruction_loss, spread_loss
from torchcaps.layers.matrix import ConvMatrixCapsules
from torchcaps.models.cnn import ConvolutionalNetwork
from torchcaps.optim import Muon, orthogonalised, parameter_groups
from torchcaps.routing import Routing
from torchcaps.routing.config import RoutingConfig
from torchcaps.routing.discriminative import DiscriminativeRouting
from torchcaps.routing.registry import ROUTINGS
from torchcaps.storage import read_tensors, write_tensors
from torchcaps.testing import check_routing

IMAGES, LABELS = torch.rand(6, 1, 20, 20), torch.tensor([0, 1, 2, 3, 0, 1])
LENGTHS = torch.rand(6, 4)
SHARED = EMRouting()


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


def convolutional(**settings: Any) -> ConvolutionalNetwork:
    return ConvolutionalNetwork((1, 20, 20), 4, conv_channels=8, second_channels=8, **settings)


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
    "labels of more images than are drawn": (
        lambda: torchcaps.Decoder(4, 16, (1, 8, 8))(torch.rand(3, 4, 16), LABELS),
        ValueError,
        r"labels must be \(3,\)",
    ),
    "one label for all images": (
        lambda: convolutional(labels_per_image=1).loss(convolutional()(IMAGES).capsules, LABELS[:1]),
        ValueError,
        "labels of 1 images",
    ),
    "numbers up to 255": (lambda: small_network().prepare(255 * IMAGES), ValueError, r"numbers in \[0, 1\], not"),
    "a decoder for any number of classes": (
        lambda: CapsuleNetwork((1, 20, 20), 4, labels_per_image=0, reconstruction=True),
        ValueError,
        "any number of classes",
    ),
    "Adam with a proximal penalty": (
        lambda: RoutingAscent(small_network(), rule="adam", penalty=L1Penalty(1e-3, proximal=True)),
        ValueError,
        "plain steps only",
    ),
    "one routing for two layers of matrices": (
        lambda: [ConvMatrixCapsules(2, 2, SHARED), ConvMatrixCapsules(2, 2, SHARED)],
        ValueError,
        "belongs to another layer",
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
    for shape in ((2, 36, 1), (1, 36)):
        with pytest.raises(ValueError, match=r"activations must be \(2, 36\)"):
            CapsuleLayer(36, 8, 5, 16)(torch.rand(2, 36, 8), torch.rand(shape))


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


@pytest.mark.parametrize("use", ["explain", "predict"])
def test_explaining_and_predicting_leave_every_module_in_its_mode(use: str) -> None:
    network = small_network(backbone=backbone).train()
    getattr(network, use)(IMAGES)
    assert int(network.front.stem[1].num_batches_tracked) == 0
    assert network.training
    network.front.stem[1].eval()
    getattr(network, use)(IMAGES)
    assert network.training
    assert not network.front.stem[1].training


def test_a_frozen_backbone_stays_as_it_is() -> None:
    network = small_network(backbone=backbone, freeze_backbone=True).train()
    before = copy.deepcopy(network.front.stem.state_dict())
    network(IMAGES)
    torch.testing.assert_close(dict(network.front.stem.state_dict()), dict(before), rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in network.front.stem.parameters())


def test_what_the_user_froze_stays_frozen() -> None:
    stem = backbone()
    stem[0].weight.requires_grad_(False)
    network = small_network(backbone=stem)
    assert not network.front.stem[0].weight.requires_grad
    assert network.front.stem[0].bias.requires_grad


def test_the_file_of_a_backbone_is_needed_once(tmp_path) -> None:
    torch.save(backbone().state_dict(), tmp_path / "stem.pt")
    network = small_network(backbone=backbone, backbone_weights=str(tmp_path / "stem.pt"))
    network.save(tmp_path / "model.safetensors")
    (tmp_path / "stem.pt").unlink()
    loaded = torchcaps.load(tmp_path / "model.safetensors", backbone=backbone)
    assert loaded.front.stem[0].weight.equal(network.front.stem[0].weight)


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
    with pytest.raises(UserError, match="ConvolutionalNetwork"):
        CapsuleNetwork.from_pretrained(tmp_path / "cnn")


def test_modes_that_watch_operations_see_ordinary_ones() -> None:
    network = CapsuleNetwork((1, 28, 28), 10, conv_channels=32, primary_capsules=4, reconstruction=False)
    with FlopCounterMode(display=False) as counter:
        network(torch.rand(64, 1, 28, 28))
    assert counter.get_total_flops() > 64 * 32 * 32 * 81 * 36
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert network(torch.rand(64, 1, 28, 28)).capsules.activations.shape == (64, 10)


def test_a_folded_network_follows_what_is_loaded_and_where_it_goes() -> None:
    images = torch.rand(64, 1, 28, 28)
    first, second = (CapsuleNetwork((1, 28, 28), 4, conv_channels=32, primary_capsules=8) for _ in range(2))
    folded = first.folded()
    folded.load_state_dict(second.folded().state_dict())
    expected = second(images).capsules.activations
    torch.testing.assert_close(folded(images).capsules.activations, expected, rtol=1e-4, atol=1e-5)
    double = second.folded().double()(images.double()).capsules.activations
    torch.testing.assert_close(double.float(), expected, rtol=1e-4, atol=1e-5)


def test_a_module_with_something_called_fold_is_left_alone() -> None:
    stem = backbone()
    stem.fold = 3
    small_network(backbone=stem).folded()


def test_matrix_capsules_without_memory_get_it_with_their_coordinates() -> None:
    sizes = {"classes": 4, "image_shape": (1, 20, 20)}
    given = torchcaps.create_model("matrix-small", **sizes).eval()
    with torch.device("meta"):
        network = torchcaps.create_model("matrix-small", **sizes).eval()
    network.to_empty(device="cpu").load_state_dict(given.state_dict())
    expected = given(IMAGES).capsules.poses
    assert network(IMAGES).capsules.poses.equal(expected)
    network.to(memory_format=torch.channels_last)
    torch.testing.assert_close(network(IMAGES).capsules.poses, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", ["capsnet-mnist", "matrix-small", "cnn"])
def test_networks_of_other_precisions_draw_and_predict(kind: str, dtype: torch.dtype) -> None:
    network = torchcaps.create_model(kind, classes=4, image_shape=(1, 20, 20)).to(dtype)
    assert network(IMAGES.to(dtype), LABELS).reconstructions.dtype == dtype
    assert network.predict(network.prepare(IMAGES)).lengths.shape == (6, 4)


def test_a_network_may_find_several_classes_or_none_where_any_number_is_shown() -> None:
    network = convolutional(labels_per_image=0)
    shown = torch.tensor([[1.0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]).repeat(2, 1)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        network.loss(network(IMAGES).capsules, shown).backward()
        optimizer.step()
    found = torchcaps.functional.presence(network.predict(IMAGES).labels, 4)
    assert found.equal(shown)


def test_parameters_of_any_memory_are_moved_alike() -> None:
    start = torch.randn(4, 8)[:, :4]
    strided, dense = nn.Parameter(start), nn.Parameter(start.clone())
    ours, theirs = Muon([{"params": [strided]}], lr=0.1), torch.optim.Adam([dense], lr=0.1)
    for _ in range(3):
        for parameter in (strided, dense):
            parameter.grad = parameter.detach().sin()
        ours.step()
        theirs.step()
    torch.testing.assert_close(strided, dense)


def test_large_updates_in_few_bits_are_made_orthogonal() -> None:
    update = 30 * torch.randn(32, 200)
    result = orthogonalised(update.half(), (0,))
    assert result.dtype == torch.float16
    torch.testing.assert_close(result.float(), orthogonalised(update, (0,)), rtol=0.05, atol=0.01)


def test_tied_and_composed_weights_are_moved_and_stored_once(tmp_path) -> None:
    first, second, composed = (nn.Conv2d(4, 4, 3) for _ in range(3))
    second.weight = first.weight
    network = nn.Sequential(first, second, nn.utils.parametrizations.weight_norm(composed))
    moved = [id(parameter) for group in parameter_groups(network) for parameter in group["params"]]
    assert sorted(moved) == sorted(map(id, network.parameters()))
    write_tensors(tmp_path / "tied.safetensors", network.state_dict(), {})
    tensors, _ = read_tensors(tmp_path / "tied.safetensors")
    assert tensors["0.weight"].equal(tensors["1.weight"])


def test_an_ascent_goes_on_after_its_network_has_changed_its_precision() -> None:
    layer, poses = CapsuleLayer(6, 4, 3, 5), torch.rand(4, 6, 4)
    ascent = RoutingAscent(layer, constraint=FixedNorm())
    margin_loss(layer(poses).activations, LABELS[:4] % 3).backward()
    layer.double()
    assert layer.routing.coefficients.grad is None
    ascent.step(layer(poses.double()), LABELS[:4] % 3)
    assert layer.routing.coefficients.dtype == torch.float64


def test_too_little_memory_is_not_taken_for_a_missing_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    network = small_network()
    capsules = network(IMAGES).capsules
    monkeypatch.setattr(torch.autograd, "grad", fail)
    with pytest.raises(torch.OutOfMemoryError):
        RoutingAscent(network).step(capsules, LABELS)


def test_modules_are_attributes_of_the_package() -> None:
    code = "import torchcaps; torchcaps.functional.squash; assert not hasattr(torchcaps, 'nothing')"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_what_was_changed_on_a_routing_is_saved(tmp_path: Path) -> None:
    network = small_network(routing=torchcaps.DynamicRouting(iterations=np.int64(2)))
    network.save(tmp_path / "as-made.safetensors")
    assert torchcaps.load(tmp_path / "as-made.safetensors").layers[0].routing.iterations == 2
    network.layers[0].routing.iterations = 1
    network.save(tmp_path / "changed.safetensors")
    assert torchcaps.load(tmp_path / "changed.safetensors").layers[0].routing.iterations == 1


def test_arguments_that_a_routing_keeps_converted_are_saved_as_given(tmp_path: Path) -> None:
    class Turned(Routing):
        def __init__(self, *, degrees: float = 30.0) -> None:
            super().__init__()
            self.degrees = degrees / 57.3

        def forward(self, votes, activations):
            return torchcaps.functional.capsules_from_totals(votes.combine(self.degrees))

    network = small_network(routing=Turned(degrees=60.0))
    network.save(tmp_path / "model.safetensors")
    assert torchcaps.load(tmp_path / "model.safetensors", routing=Turned).layers[0].routing.degrees == 60 / 57.3


def test_double_precision_is_stored_as_single(tmp_path: Path) -> None:
    sizes = []
    for network in (small_network(), small_network().double()):
        network.save(tmp_path / "model.safetensors")
        sizes.append((tmp_path / "model.safetensors").stat().st_size)
    assert sizes[0] == sizes[1]


def test_integers_that_look_like_one_hot_labels_of_two_classes() -> None:
    lengths = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    with pytest.raises(ValueError, match="look like presence"):
        torchcaps.margin_loss(lengths, torch.tensor([[1, 0], [0, 1]]))
    assert torchcaps.margin_loss(lengths, torch.tensor([[0, 1], [0, 1]])) > 0  # both classes


def test_an_ascent_takes_no_state_of_other_coefficients() -> None:
    def ascent(inputs: int) -> RoutingAscent:
        return RoutingAscent(torchcaps.CapsuleLayer(inputs, 4, 3, 4), constraint=FixedNorm())

    state = ascent(16).state_dict()
    ascent(16).load_state_dict(state)
    other = RoutingAscent(torchcaps.CapsuleLayer(16, 4, 5, 4), constraint=FixedNorm())
    with pytest.raises(ValueError, match="other coefficients"):
        other.load_state_dict(state)


def test_an_ascent_has_the_coefficients_of_its_network_and_no_others() -> None:
    ascent = RoutingAscent(torchcaps.CapsuleLayer(6, 4, 3, 4))
    with pytest.raises(RuntimeError, match="make a new RoutingAscent"):
        ascent.add_param_group({"params": [torch.ones(2, requires_grad=True)]})


def test_moving_along_directions_counts_as_a_step(recwarn: pytest.WarningsRecorder) -> None:
    layer = torchcaps.CapsuleLayer(6, 4, 3, 4)
    ascent = RoutingAscent(layer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(ascent, T_max=10)
    ascent.move(ascent.directions(layer(torch.rand(2, 6, 4)), torch.tensor([0, 1])))
    schedule.step()
    assert not recwarn.list


def test_weights_of_an_objective_have_the_shape_of_its_labels() -> None:
    class Wrong(Objective):
        def weights(self, totals, shown, reduce):
            return shown[:, :1, None] * shown

    layer = torchcaps.CapsuleLayer(6, 4, 3, 4)
    with pytest.raises(ValueError, match=r"weights must be \(2, 3\), not \(2, 2, 3\)"):
        RoutingAscent(layer, objective=Wrong()).step(layer(torch.rand(2, 6, 4)), torch.tensor([0, 1]))


def test_a_mistake_in_a_penalty_is_told_as_it_is() -> None:
    class Forgetful(Penalty):
        def value(self, coefficients):
            return coefficients.square()

    layer = torchcaps.CapsuleLayer(6, 4, 3, 4)
    with pytest.raises(RuntimeError, match="scalar outputs"):
        RoutingAscent(layer, penalty=Forgetful()).step(layer(torch.rand(2, 6, 4)), torch.tensor([0, 1]))


def test_muon_comes_to_rest_without_gradients() -> None:
    weight = nn.Parameter(torch.randn(16, 64))
    optimizer = Muon([{"params": [weight], "outputs": (0,)}], lr=0.01)
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer.step()
    weight.grad = torch.zeros_like(weight)
    for _ in range(1000):
        optimizer.step()
    before = weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before, rtol=0, atol=1e-5)


def test_the_contract_wants_a_class() -> None:
    with pytest.raises(TypeError, match="give the class"):
        check_routing(torchcaps.UniformRouting())


def test_the_contract_finds_coefficients_that_are_not_those_of_the_sum() -> None:
    class Liar(Routing):
        def forward(self, votes, activations):
            return torchcaps.functional.capsules_from_totals(votes.combine(0.5))

        def coefficients_for(self, votes, activations):
            return -3.0

    with pytest.raises(AssertionError, match="contract on coefficients"):
        check_routing(Liar, only=["coefficients"])


def test_loading_a_network_does_not_import_the_compiler() -> None:
    code = "import sys, torchcaps; torchcaps.pretrained(); print('torch._dynamo' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_misspelt_options_of_a_routing_list_the_valid_ones() -> None:
    with pytest.raises(TypeError, match=r"L2Routing: strenght is not a setting \(did you mean strength\?\)"):
        L2Routing(strenght=1)

    class Plain(Routing):
        forward = DynamicRouting.forward

    with pytest.raises(TypeError, match="Plain: start is not a setting: there are none"):
        Plain(start=1.0)


def test_numbers_become_the_texts_and_floats_that_a_routing_of_ones_own_asks_for() -> None:
    class Mine(DiscriminativeRouting):
        def __init__(self, *, share: float = 0.5, mode: str = "a", deep: bool = False, any=None) -> None:
            super().__init__()

    given = {"share": 1, "mode": 7, "deep": True, "any": 3}
    made = RoutingConfig(name="here:Mine", settings=given).build(Mine).settings
    assert made == {"share": 1.0, "mode": "7", "deep": True, "any": 3}
    assert isinstance(made["share"], float)


@pytest.mark.parametrize("shape", [(2, 1, 28, 28), (2, 1, 10, 10), (1, 20, 20), (2, 3, 20, 20)])
def test_images_of_another_shape_are_told_as_such(shape: tuple[int, ...]) -> None:
    network = CapsuleNetwork((1, 20, 20), 4, conv_channels=16, primary_capsules=4)
    with pytest.raises(ValueError, match=r"images must be numbers in \[0, 1\], \(B, 1, 20, 20\), not torch.float32"):
        network(torch.rand(shape))


@pytest.mark.parametrize("make", [partial(L1Penalty, "x"), lambda: RoutingAscent(CapsuleLayer(8, 4, 3, 4), gamma="a")])
def test_texts_are_no_sizes(make: Any) -> None:
    with pytest.raises(ValueError, match=r"must be zero or more, and finite, not '[xa]'"):
        make()
