import pytest
import torch

from torchcaps.ascent import L1Penalty, L2Penalty, RoutingAscent
from torchcaps.functional import class_signs, l1_penalty, l2_penalty, presence, routing_objective
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.routing import L1Routing, L2Routing, UniformRouting


@pytest.mark.parametrize("routing", [L2Routing, L1Routing])
def test_starts_equal_to_uniform_coefficients(routing):
    poses, activations = torch.randn(3, 6, 4), torch.rand(3, 6)
    layer = CapsuleLayer(6, 4, 5, 8, routing(start=0.7))
    uniform = CapsuleLayer(6, 4, 5, 8, UniformRouting(start=0.7))
    uniform.weight = layer.weight
    torch.testing.assert_close(layer(poses, activations).poses, uniform(poses, activations).poses)


@pytest.mark.parametrize(("routing", "kind", "formula"), [
    (L2Routing, L2Penalty, l2_penalty),
    (L1Routing, L1Penalty, l1_penalty),
])  # fmt: skip
def test_the_penalty_of_a_layer_is_what_the_objective_subtracts(routing, kind, formula):
    layer = CapsuleLayer(6, 4, 5, 8, routing(start=-0.5, strength=0.2))
    totals, signs = torch.zeros(2, 5, 8), class_signs(presence(torch.tensor([[0], [1]]), 5))
    objective = routing_objective(totals, signs, [formula(layer.routing.coefficients, 0.2)])
    (penalty,) = RoutingAscent(layer).penalties
    assert penalty == kind(0.2)
    torch.testing.assert_close(-objective, penalty.value(layer.routing.coefficients))


def test_coefficients_may_turn_negative_and_hold_a_capsule_back():
    layer = CapsuleLayer(2, 3, 1, 3, L2Routing())
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3).expand(2, 3, 3)[:, :, None])
        layer.routing.coefficients[1] = -1.0
    same = torch.ones(1, 2, 3)
    assert layer(same, torch.ones(1, 2)).activations.item() == 0.0


@pytest.mark.parametrize("strength", [-1.0, float("nan")])
def test_strength_must_not_be_negative(strength):
    with pytest.raises(ValueError, match="must not be negative"):
        L2Routing(strength=strength)


@pytest.mark.parametrize("routing", [L2Routing, L1Routing])
def test_the_coefficients_are_stored_but_are_no_parameters(routing):
    layer = CapsuleLayer(6, 4, 5, 8, routing())
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert set(layer.state_dict()) == {"weight", "routing.coefficients"}
    assert layer.routing.coefficients.requires_grad
