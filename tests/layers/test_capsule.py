import copy

import pytest
import torch

from naive import naive_votes
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.routing import ROUTINGS, DiscriminativeRouting, L2Routing, UniformRouting


def test_the_total_of_a_class_capsule_is_the_weighted_sum_of_its_votes():
    layer = CapsuleLayer(4, 3, 2, 5, L2Routing()).double()
    with torch.no_grad():
        layer.routing.coefficients.copy_(torch.randn(4, 2))
    poses = torch.randn(3, 4, 3, dtype=torch.float64)
    expected = torch.einsum("bije,ij->bje", naive_votes(poses, layer.weight), layer.routing.coefficients)
    torch.testing.assert_close(layer(poses, torch.rand(3, 4)).totals, expected)


def test_layers_stack():
    first, second = CapsuleLayer(6, 4, 5, 8, L2Routing()), CapsuleLayer(5, 8, 3, 16, L2Routing())
    hidden = first(torch.randn(2, 6, 4), torch.rand(2, 6))
    assert second(hidden.poses, hidden.activations).poses.shape == (2, 3, 16)


def test_without_a_routing_it_is_discriminative():
    assert type(CapsuleLayer(6, 4, 5, 8).routing) is L2Routing


@pytest.mark.parametrize("name", ROUTINGS)
def test_poses_alone_are_enough(name):
    layer = CapsuleLayer(6, 4, 5, 8, ROUTINGS[name]())
    poses = torch.randn(2, 6, 4)
    lengths = torch.linalg.vector_norm(poses, dim=-1)
    torch.testing.assert_close(layer(poses), layer(poses, lengths), rtol=0, atol=0)


@pytest.mark.parametrize("name", ROUTINGS)
def test_folding_changes_no_answer(name):
    settings = {"start": 0.3} if name in ("l2", "l1", "uniform", "learned") else {}
    layer = CapsuleLayer(6, 4, 5, 8, ROUTINGS[name](**settings)).eval()
    if isinstance(getattr(layer.routing, "coefficients", None), torch.Tensor):
        torch.nn.init.normal_(layer.routing.coefficients)
    poses, activations = torch.randn(2, 6, 4), torch.rand(2, 6)
    before = layer(poses, activations)
    layer.fold()
    torch.testing.assert_close(layer(poses, activations), before)


def test_folded_coefficients_are_gone():
    layer = CapsuleLayer(6, 4, 5, 8, L2Routing())
    layer.fold()
    assert isinstance(layer.routing, UniformRouting)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert [*layer.buffers()] == []


def test_weights_start_with_the_deviation_given_or_the_routings():
    assert CapsuleLayer(50, 8, 10, 16, weight_std=0.3).weight.std().item() == pytest.approx(0.3, rel=0.02)
    for routing in (L2Routing(), ROUTINGS["em"]()):
        layer = CapsuleLayer(50, 8, 10, 16, routing)
        assert layer.weight.std().item() == pytest.approx(routing.start_std(400), rel=0.02)


@pytest.mark.parametrize("name", ["l2", "l1"])
def test_coefficients_stay_the_same_tensor_wherever_the_layer_goes(name):
    layer = CapsuleLayer(6, 4, 5, 8, ROUTINGS[name](start=0.5))
    assert isinstance(layer.routing, DiscriminativeRouting)
    coefficients = layer.routing.coefficients
    for move in (layer.double, layer.bfloat16, layer.float, layer.cpu, layer.share_memory):
        move()
        assert layer.routing.coefficients is coefficients
        assert coefficients.requires_grad
        assert coefficients.is_leaf
        assert coefficients.dtype == layer.weight.dtype
    assert coefficients.eq(0.5).all()


def test_a_copy_has_coefficients_of_its_own_that_can_be_moved():
    layer = CapsuleLayer(6, 4, 5, 8, L2Routing())
    layer(torch.randn(2, 6, 4)).totals.sum().backward()
    copied = copy.deepcopy(layer)
    assert copied.routing.coefficients is not layer.routing.coefficients
    assert copied.routing.coefficients.requires_grad
    assert copied.routing.coefficients.is_leaf
    assert copied.routing.settings == layer.routing.settings


def test_a_layer_made_without_memory_can_be_given_some():
    with torch.device("meta"):
        layer = CapsuleLayer(6, 4, 5, 8, L2Routing())
    layer.to_empty(device="cpu")
    whole = CapsuleLayer(6, 4, 5, 8, L2Routing())
    layer.load_state_dict(whole.state_dict())
    poses = torch.randn(2, 6, 4)
    torch.testing.assert_close(layer(poses), whole(poses), rtol=0, atol=0)
    assert layer.routing.coefficients.requires_grad
