import pytest
import torch

from naive import naive_votes
from torchcaps.layers import CapsuleLayer
from torchcaps.routing import ROUTINGS, L2Routing, UniformRouting, make_routing


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


@pytest.mark.parametrize("name", ROUTINGS)
def test_folding_changes_no_answer(name):
    layer = CapsuleLayer(6, 4, 5, 8, make_routing(name, start=0.3)).eval()
    if isinstance(getattr(layer.routing, "coefficients", None), torch.nn.Parameter):
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
