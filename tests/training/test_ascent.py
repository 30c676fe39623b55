import copy

import pytest
import torch
from lightning_fabric import Fabric

from naive import naive_update, naive_votes
from torchcaps.functional import class_signs, discriminative_power, multi_hot
from torchcaps.layers import CapsuleLayer
from torchcaps.routing import L1Routing, L2Routing
from torchcaps.train import TrainOptions
from torchcaps.train.ascent import Ascent

FABRIC = Fabric(accelerator="cpu", devices=1)


@pytest.mark.parametrize("routing", [L2Routing, L1Routing])
def test_a_plain_step_is_the_papers_update(routing):
    layer = CapsuleLayer(6, 3, 4, 2, routing(strength=0.3)).double()
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.routing.coefficients)
    before = layer.routing.coefficients.detach().clone()
    poses = torch.randn(5, 6, 3, dtype=torch.float64)
    present = multi_hot(torch.randint(4, (5, 1)), 4).double()
    ascent = Ascent(FABRIC, [layer.routing], TrainOptions(gamma=0.01))
    ascent.step(ascent.directions(layer(poses, torch.ones(5, 6)).totals, present))
    votes = naive_votes(poses, layer.weight)
    # The library takes the mean over the batch: the paper's γ divided, its λ multiplied by the batch size.
    expected = naive_update(votes, before, class_signs(present), routing.penalty, 0.3 * 5, gamma=0.01 / 5)
    torch.testing.assert_close(layer.routing.coefficients.detach(), expected, rtol=1e-12, atol=1e-12)


def test_every_layer_of_a_deep_network_follows_the_chain_rule():
    """Against finite differences of the objective in float64."""
    layers = [CapsuleLayer(5, 3, 4, 3, L2Routing(strength=0.1)), CapsuleLayer(4, 3, 2, 3, L2Routing(strength=0.1))]
    for layer in layers:
        layer.double()
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.normal_(layer.routing.coefficients)
    poses = torch.randn(3, 5, 3, dtype=torch.float64)
    signs = class_signs(multi_hot(torch.tensor([[0], [1], [1]]), 2).double())

    def totals() -> torch.Tensor:
        hidden = layers[0](poses, torch.ones(3, 5))
        return layers[1](hidden.poses, hidden.activations).totals

    @torch.no_grad()
    def objective() -> float:
        power = (signs * totals().square().sum(-1)).sum(1).mean()
        return float(power - sum(0.1 * layer.routing.coefficients.square().sum() for layer in layers))

    ascent = Ascent(FABRIC, [layer.routing for layer in layers], TrainOptions())
    directions = ascent.directions(totals(), (signs > 0).double())
    for layer, direction in zip(layers, directions):
        coefficients = layer.routing.coefficients.data
        for place in [(0, 0), (2, 1), (3, 0)]:
            slope = 0.0
            for sign in (1, -1):
                coefficients[place] += sign * 1e-6
                slope += sign * objective() / 2e-6
                coefficients[place] -= sign * 1e-6
            assert direction[place].item() == pytest.approx(slope, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("rule", ["plain", "adam"])
def test_ascending_raises_the_objective(rule):
    layer = CapsuleLayer(8, 4, 3, 5, L2Routing())
    poses, present = torch.randn(20, 8, 4), multi_hot(torch.randint(3, (20, 1)), 3)
    ascent = Ascent(FABRIC, [layer.routing], TrainOptions(gamma=1e-2, ascent=rule))

    @torch.no_grad()
    def power() -> float:
        totals = layer(poses, torch.ones(20, 8)).totals
        return float((class_signs(present) * totals.square().sum(-1)).sum(1).mean())

    before = power()
    for _ in range(20):
        ascent.step(ascent.directions(layer(poses, torch.ones(20, 8)).totals, present))
    assert power() > before


def test_proximal_l1_steps_reach_exact_zeros_where_gradient_steps_do_not():
    zeros = {}
    for shrinkage in ("gradient", "proximal"):
        torch.manual_seed(0)
        layer = CapsuleLayer(30, 4, 3, 5, L1Routing(start=0.05, strength=0.5))
        poses, present = torch.randn(20, 30, 4), multi_hot(torch.randint(3, (20, 1)), 3)
        ascent = Ascent(FABRIC, [layer.routing], TrainOptions(gamma=1e-2, shrinkage=shrinkage))
        for _ in range(10):
            ascent.step(ascent.directions(layer(poses, torch.ones(20, 30)).totals, present))
        zeros[shrinkage] = int((layer.routing.coefficients == 0).sum())
    assert zeros["gradient"] == 0
    assert zeros["proximal"] > 45


@pytest.mark.parametrize(("routing", "expected"), [(L2Routing, 0.5 / 1.2), (L1Routing, 0.3)])
def test_a_proximal_step_solves_its_problem(routing, expected):
    """argmin of (x - 0.5)² / 2γ + λ·penalty(x) with γ = 0.1 and λ = 1; the L1 penalty is doubled, as printed."""
    layer = CapsuleLayer(2, 3, 2, 3, routing(start=0.5, strength=1.0))
    layer.routing.shrink(0.1)
    torch.testing.assert_close(layer.routing.coefficients.detach(), torch.full((2, 2), expected))


def test_a_group_step_solves_its_problem():
    """argmin over a row x of ‖x - b‖² / 2γ + 2λ√4 ‖x‖: shorter by 2γλ√4, or zero."""
    layer = CapsuleLayer(2, 3, 4, 3, L1Routing(strength=1.0))
    layer.routing.coefficients.data = torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.2, 0.1, 0.0, -0.1]])
    layer.routing.shrink_groups(0.1, groups=2)  # shorter by 0.4; the rows are 2 and 0.245 long
    expected = torch.tensor([[0.8, -0.8, 0.8, 0.8], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(layer.routing.coefficients.detach(), expected)


@pytest.mark.parametrize(("shrinkage", "groups"), [("capsules", 30), ("types", 6)])
def test_group_steps_remove_whole_groups(shrinkage, groups):
    layer = CapsuleLayer(30, 4, 3, 5, L1Routing(start=0.05, strength=0.5))
    poses, present = torch.randn(20, 30, 4), multi_hot(torch.randint(3, (20, 1)), 3)
    ascent = Ascent(FABRIC, [layer.routing], TrainOptions(gamma=1e-2, shrinkage=shrinkage), types=6)
    for _ in range(5):
        ascent.step(ascent.directions(layer(poses, torch.ones(20, 30)).totals, present))
    zeros = (layer.routing.coefficients == 0).view(30 // groups, groups, 3)
    gone = zeros.all(2).all(0)
    assert 0 < gone.sum() < groups
    assert (zeros.any(2).any(0) == gone).all()


def _class_layer(start: float = 1.0) -> tuple[CapsuleLayer, torch.Tensor, torch.Tensor]:
    """A float64 layer, poses for it, and which of its 4 classes they show."""
    layer = CapsuleLayer(6, 3, 4, 2, L2Routing(start=start, strength=0.0)).double()
    torch.nn.init.normal_(layer.weight)
    return layer, torch.randn(8, 6, 3, dtype=torch.float64), multi_hot(torch.arange(8)[:, None] % 4, 4).double()


def _stepped(layer: CapsuleLayer, poses: torch.Tensor, present: torch.Tensor, steps: int = 1, **options) -> Ascent:
    ascent = Ascent(FABRIC, [layer.routing], TrainOptions(**options))
    for _ in range(steps):
        ascent.step(ascent.directions(layer(poses, torch.ones(8, 6)).totals, present))
    return ascent


def test_the_ratio_is_ascended_along_its_own_gradient():
    layer, poses, present = _class_layer()
    torch.nn.init.normal_(layer.routing.coefficients)
    ascent = Ascent(FABRIC, [layer.routing], TrainOptions(objective="ratio"))
    totals = layer(poses, torch.ones(8, 6)).totals
    (direction,) = ascent.directions(totals, present, retain_graph=True)
    squares = totals.square().sum(-1)
    logarithm = ((present * squares).sum(0).log() - ((1 - present) * squares).sum(0).log()).sum()
    (expected,) = torch.autograd.grad(logarithm, layer.routing.coefficients)
    torch.testing.assert_close(direction, expected)


def test_the_ratio_ignores_the_scale_of_the_coefficients():
    layer, poses, present = _class_layer()
    (direction,) = Ascent(FABRIC, [layer.routing], TrainOptions(objective="ratio")).directions(
        layer(poses, torch.ones(8, 6)).totals, present
    )
    # A step along the coefficients themselves would change nothing but their scale.
    along = (direction * layer.routing.coefficients.detach()).sum(0)
    torch.testing.assert_close(along, torch.zeros_like(along))


def test_a_class_that_the_batch_does_not_show_takes_no_part_in_the_ratio():
    layer, poses, _ = _class_layer()
    present = multi_hot(torch.zeros(8, 1, dtype=torch.long), 4).double()
    (direction,) = Ascent(FABRIC, [layer.routing], TrainOptions(objective="ratio")).directions(
        layer(poses, torch.ones(8, 6)).totals, present
    )
    assert direction.eq(0).all()  # class 0 is in every image, the others in none


def test_projected_steps_keep_the_norms_and_still_raise_the_objective():
    layer, poses, present = _class_layer(start=0.5)
    signs = class_signs(present)
    before = discriminative_power(layer(poses, torch.ones(8, 6)).totals, signs)
    _stepped(layer, poses, present, steps=20, gamma=0.01, projected=True)
    norms = torch.linalg.vector_norm(layer.routing.coefficients.detach(), dim=0)
    torch.testing.assert_close(norms, torch.full((4,), 0.5 * 6**0.5, dtype=torch.float64))
    assert discriminative_power(layer(poses, torch.ones(8, 6)).totals, signs) > before


def test_projecting_what_a_penalty_has_made_zero_leaves_it_zero():
    layer, poses, present = _class_layer()
    layer.routing.strength = 100.0
    _stepped(layer, poses, present, gamma=0.01, projected=True, shrinkage="capsules")
    assert layer.routing.coefficients.eq(0).all()


def test_momentum_goes_further_the_same_way():
    plain, poses, present = _class_layer()
    moving = copy.deepcopy(plain)
    _stepped(plain, poses, present, steps=3, gamma=1e-4)
    _stepped(moving, poses, present, steps=3, gamma=1e-4, ascent="momentum")
    way, further = (each.routing.coefficients.detach() - 1 for each in (plain, moving))
    # Nearly the same direction at every step: 1 + 1.9 + 2.71 of them instead of 3.
    torch.testing.assert_close(further / way, torch.full_like(way, 5.61 / 3), rtol=0.05, atol=0)


def test_a_decaying_gamma_follows_the_learning_rate():
    layer, poses, present = _class_layer()
    whole, half = copy.deepcopy(layer), copy.deepcopy(layer)
    for each, factor in ((whole, 1.0), (half, 0.5)):
        ascent = Ascent(FABRIC, [each.routing], TrainOptions(decaying_gamma=True))
        ascent.step(ascent.directions(each(poses, torch.ones(8, 6)).totals, present), factor)
    whole_step, half_step = (each.routing.coefficients.detach() - 1 for each in (whole, half))
    torch.testing.assert_close(half_step, whole_step / 2)
