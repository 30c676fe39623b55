import copy
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from naive import naive_update, naive_votes
from torchcaps import CapsuleLayer, CapsuleNetwork, DynamicRouting, L1Routing, L2Routing, RoutingAscent, margin_loss
from torchcaps.ascent import (
    Balanced,
    Difference,
    FixedNorm,
    GroupPenalty,
    L1Penalty,
    L2Penalty,
    Objective,
    Penalty,
    Ratio,
)
from torchcaps.functional import ascent_direction, class_signs, discriminative_power, presence

TINY = {"conv_channels": 4, "primary_capsules": 2, "reconstruction": False}


class Stack(nn.Module):
    """Two capsule layers, one above the other."""

    def __init__(self, strength: float = 0.1) -> None:
        super().__init__()
        self.first = CapsuleLayer(5, 3, 4, 3, L2Routing(strength=strength), weight_std=1.0)
        self.second = CapsuleLayer(4, 3, 2, 3, L2Routing(strength=strength), weight_std=1.0)
        for layer in (self.first, self.second):
            nn.init.normal_(layer.routing.coefficients)

    def forward(self, poses: Tensor):
        hidden = self.first(poses)
        return self.second(hidden.poses, hidden.activations)


@pytest.mark.parametrize("routing", [L2Routing, L1Routing])
def test_a_plain_step_is_the_papers_update(routing):
    layer = CapsuleLayer(6, 3, 4, 2, routing(strength=0.3)).double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.routing.coefficients)
    before = layer.routing.coefficients.detach().clone()
    poses = torch.randn(5, 6, 3, dtype=torch.float64)
    shown = presence(torch.randint(4, (5, 1)), 4).double()
    RoutingAscent(layer, gamma=0.01).step(layer(poses, torch.ones(5, 6)), shown)
    votes = naive_votes(poses, layer.weight)
    # The library takes the mean over the batch: the paper's γ divided, its λ multiplied by the batch size.
    expected = naive_update(votes, before, class_signs(shown), routing.penalty, 0.3 * 5, gamma=0.01 / 5)
    torch.testing.assert_close(layer.routing.coefficients.detach(), expected, rtol=1e-12, atol=1e-12)


def test_every_layer_of_a_deep_network_follows_the_chain_rule():
    """Against finite differences of the objective in float64."""
    network = Stack().double()
    poses = torch.randn(3, 5, 3, dtype=torch.float64)
    labels = torch.tensor([[0], [1], [1]])
    signs = class_signs(presence(labels, 2).double())
    layers = [network.first, network.second]

    @torch.no_grad()
    def objective() -> float:
        power = (signs * network(poses).totals.square().sum(-1)).sum(1).mean()
        return float(power - sum(0.1 * layer.routing.coefficients.square().sum() for layer in layers))

    directions = RoutingAscent(network).directions(network(poses), labels)
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
    poses, labels = torch.randn(20, 8, 4), torch.randint(3, (20, 1))
    ascent = RoutingAscent(layer, gamma=1e-2, rule=rule)

    @torch.no_grad()
    def power() -> float:
        totals = layer(poses, torch.ones(20, 8)).totals
        return float((class_signs(presence(labels, 3)) * totals.square().sum(-1)).sum(1).mean())

    before = power()
    for _ in range(20):
        ascent.step(layer(poses, torch.ones(20, 8)), labels)
    assert power() > before


def test_adam_steps_are_those_of_torch():
    ours, reference = (CapsuleLayer(8, 4, 3, 5, L2Routing()) for _ in range(2))
    reference.load_state_dict(ours.state_dict())
    poses, labels = torch.randn(20, 8, 4), torch.randint(3, (20,))
    ascent, directions = RoutingAscent(ours, gamma=0.1, rule="adam"), RoutingAscent(reference)
    adam = torch.optim.Adam([reference.routing.coefficients], lr=0.1, maximize=True)
    for _ in range(5):
        ascent.step(ours(poses), labels)
        (reference.routing.coefficients.grad,) = directions.directions(reference(poses), labels)
        adam.step()
    torch.testing.assert_close(ours.routing.coefficients, reference.routing.coefficients, rtol=0, atol=0)


def test_proximal_l1_steps_reach_exact_zeros_where_gradient_steps_do_not():
    zeros = {}
    for proximal in (False, True):
        torch.manual_seed(0)
        layer = CapsuleLayer(30, 4, 3, 5, L1Routing(start=0.05, strength=0.5))
        poses, labels = torch.randn(20, 30, 4), torch.randint(3, (20, 1))
        ascent = RoutingAscent(layer, gamma=1e-2, penalty=L1Penalty(0.5, proximal=proximal))
        for _ in range(10):
            ascent.step(layer(poses, torch.ones(20, 30)), labels)
        zeros[proximal] = int((layer.routing.coefficients == 0).sum())
    assert zeros[False] == 0
    assert zeros[True] > 45


@pytest.mark.parametrize(("penalty", "expected"), [(L2Penalty, 0.5 / 1.2), (L1Penalty, 0.3)])
def test_a_proximal_step_solves_its_problem(penalty, expected):
    """argmin of (x - 0.5)² / 2γ + λ·penalty(x) with γ = 0.1 and λ = 1; the L1 penalty is doubled, as printed."""
    coefficients = torch.full((2, 2), 0.5)
    assert penalty(1.0, proximal=True).value(coefficients) is None
    penalty(1.0, proximal=True).shrink(coefficients, 0.1, 0)
    torch.testing.assert_close(coefficients, torch.full((2, 2), expected))


@pytest.mark.parametrize("penalty", [L2Penalty(1.0), L1Penalty(1.0)])
def test_a_penalty_that_is_part_of_the_gradient_does_not_shrink_as_well(penalty):
    coefficients = torch.full((2, 2), 0.5)
    penalty.shrink(coefficients, 0.1, 0)
    assert coefficients.eq(0.5).all()


def test_a_group_step_solves_its_problem():
    """argmin over a row x of ‖x - b‖² / 2γ + 2λ√4 ‖x‖: shorter by 2γλ√4, or zero."""
    coefficients = torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.2, 0.1, 0.0, -0.1]])
    GroupPenalty(1.0).shrink(coefficients, 0.1, 0)  # shorter by 0.4; the rows are 2 and 0.245 long
    expected = torch.tensor([[0.8, -0.8, 0.8, 0.8], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(coefficients, expected)


@pytest.mark.parametrize(("types", "groups"), [(None, 30), (6, 6)])
def test_group_steps_remove_whole_groups(types, groups):
    layer = CapsuleLayer(30, 4, 3, 5, L1Routing(start=0.05, strength=0.5))
    poses, labels = torch.randn(20, 30, 4), torch.randint(3, (20, 1))
    ascent = RoutingAscent(layer, gamma=1e-2, penalty=GroupPenalty(0.5, types))
    for _ in range(5):
        ascent.step(layer(poses, torch.ones(20, 30)), labels)
    zeros = (layer.routing.coefficients == 0).view(30 // groups, groups, 3)
    gone = zeros.all(2).all(0)
    assert 0 < gone.sum() < groups
    assert (zeros.any(2).any(0) == gone).all()


def test_types_are_those_of_the_first_layer_only():
    first, above = torch.ones(6, 2), torch.ones(6, 2)
    first[0], above[0] = 10.0, 10.0
    penalty = GroupPenalty(1.0, types=3)
    penalty.shrink(first, 0.1, 0)
    penalty.shrink(above, 0.1, 1)
    torch.testing.assert_close(first[3] / first[0], torch.full((2,), 0.1))  # capsules 0 and 3 are of one type
    assert (above[3] / above[0] < 0.09).all()  # each capsule for itself: the short ones lose a larger share


def _class_layer(start: float = 1.0, strength: float = 0.0) -> tuple[CapsuleLayer, Tensor, Tensor]:
    """A float64 layer, poses for it, and which of its 4 classes they show."""
    layer = CapsuleLayer(6, 3, 4, 2, L2Routing(start=start, strength=strength)).double()
    nn.init.normal_(layer.weight)
    return layer, torch.randn(8, 6, 3, dtype=torch.float64), presence(torch.arange(8)[:, None] % 4, 4).double()


def _stepped(layer: CapsuleLayer, poses: Tensor, shown: Tensor, steps: int = 1, **options) -> RoutingAscent:
    ascent = RoutingAscent(layer, **options)
    for _ in range(steps):
        ascent.step(layer(poses, torch.ones(8, 6)), shown)
    return ascent


@pytest.mark.parametrize(("objective", "balanced"), [(None, False), (Difference(), False), (Balanced(), True)])
def test_the_differences_follow_the_closed_form(objective, balanced):
    layer, poses, shown = _class_layer(strength=0.2)
    nn.init.normal_(layer.routing.coefficients)
    (direction,) = RoutingAscent(layer, objective=objective).directions(layer(poses), shown)
    signs = class_signs(shown, balanced=balanced)
    coefficients = layer.routing.coefficients.detach()
    expected = ascent_direction(poses, layer.weight.detach(), coefficients, signs, penalty="l2", strength=0.2)
    torch.testing.assert_close(direction, expected, rtol=1e-12, atol=1e-12)


def test_the_ratio_is_ascended_along_its_own_gradient():
    layer, poses, shown = _class_layer()
    nn.init.normal_(layer.routing.coefficients)
    capsules = layer(poses, torch.ones(8, 6))
    (direction,) = RoutingAscent(layer, objective=Ratio()).directions(capsules, shown)
    squares = capsules.totals.square().sum(-1)
    logarithm = ((shown * squares).sum(0).log() - ((1 - shown) * squares).sum(0).log()).sum()
    (expected,) = torch.autograd.grad(logarithm, layer.routing.coefficients)
    torch.testing.assert_close(direction, expected)


def test_the_ratio_ignores_the_scale_of_the_coefficients():
    layer, poses, shown = _class_layer()
    (direction,) = RoutingAscent(layer, objective=Ratio()).directions(layer(poses, torch.ones(8, 6)), shown)
    # A step along the coefficients themselves would change nothing but their scale.
    along = (direction * layer.routing.coefficients.detach()).sum(0)
    torch.testing.assert_close(along, torch.zeros_like(along))


def test_a_class_that_the_batch_does_not_show_takes_no_part_in_the_ratio():
    layer, poses, _ = _class_layer()
    labels = torch.zeros(8, 1, dtype=torch.long)
    (direction,) = RoutingAscent(layer, objective=Ratio()).directions(layer(poses, torch.ones(8, 6)), labels)
    assert direction.eq(0).all()  # class 0 is in every image, the others in none


def test_steps_of_fixed_norm_keep_the_norms_and_still_raise_the_objective():
    layer, poses, shown = _class_layer(start=0.5)
    signs = class_signs(shown)
    before = discriminative_power(layer(poses, torch.ones(8, 6)).totals, signs)
    _stepped(layer, poses, shown, steps=20, gamma=0.01, constraint=FixedNorm())
    norms = torch.linalg.vector_norm(layer.routing.coefficients.detach(), dim=0)
    torch.testing.assert_close(norms, torch.full((4,), 0.5 * 6**0.5, dtype=torch.float64))
    assert discriminative_power(layer(poses, torch.ones(8, 6)).totals, signs) > before


def test_a_fixed_norm_leaves_zero_what_a_penalty_has_made_zero():
    layer, poses, shown = _class_layer()
    _stepped(layer, poses, shown, gamma=0.01, constraint=FixedNorm(), penalty=GroupPenalty(100.0))
    assert layer.routing.coefficients.eq(0).all()


def test_gamma_is_the_size_of_a_step():
    layer, poses, shown = _class_layer()
    whole, half = copy.deepcopy(layer), copy.deepcopy(layer)
    for moved, gamma in ((whole, 0.1), (half, 0.05)):
        ascent = RoutingAscent(moved)
        ascent.gamma = gamma
        assert ascent.gamma == ascent.param_groups[0]["lr"] == gamma
        ascent.step(moved(poses, torch.ones(8, 6)), shown)
    whole_step, half_step = (moved.routing.coefficients.detach() - 1 for moved in (whole, half))
    torch.testing.assert_close(half_step, whole_step / 2)


# What it is given, and what it refuses.


@pytest.mark.parametrize("objective", [Difference(), Balanced(), Ratio()])
def test_labels_may_be_numbers_several_numbers_or_presence(objective):
    layer, poses, _ = _class_layer(strength=0.1)
    numbers = torch.arange(8) % 4
    ascent = RoutingAscent(layer, objective=objective)
    forms = [numbers, numbers[:, None], numbers.int(), presence(numbers, 4), presence(numbers, 4).double()]
    padded = torch.stack([numbers, torch.full((8,), -1)], 1)
    directions = [ascent.directions(layer(poses), labels)[0] for labels in [*forms, padded]]
    for direction in directions[1:]:
        torch.testing.assert_close(direction, directions[0], rtol=0, atol=0)


def test_images_may_show_several_classes():
    layer, poses, _ = _class_layer(strength=0.1)
    labels = torch.stack([torch.randperm(4)[:2] for _ in range(8)])
    (direction,) = RoutingAscent(layer).directions(layer(poses), labels)
    signs = class_signs(presence(labels, 4).double())
    coefficients = layer.routing.coefficients.detach()
    expected = ascent_direction(poses, layer.weight.detach(), coefficients, signs, penalty="l2", strength=0.1)
    torch.testing.assert_close(direction, expected, rtol=1e-12, atol=1e-12)


def test_a_network_without_discriminative_routing_has_nothing_to_ascend():
    with pytest.raises(ValueError, match="no discriminative routing"):
        RoutingAscent(CapsuleLayer(6, 3, 4, 2, DynamicRouting()))


@pytest.mark.parametrize("options", [{"gamma": -0.1}, {"gamma": float("nan")}, {"rule": "momentum"}])
def test_bad_arguments_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        RoutingAscent(CapsuleLayer(6, 3, 4, 2), **options)


def test_the_coefficients_are_left_to_it():
    network = CapsuleNetwork((1, 20, 20), 3, layers=[(6, 4)], **TINY)
    ascent = RoutingAscent(network)
    assert [tuple(coefficients.shape) for coefficients in ascent.coefficients] == [(8, 6), (6, 3)]
    known = {id(parameter) for parameter in network.parameters()}
    assert not known & {id(coefficients) for coefficients in ascent.coefficients}
    adam = torch.optim.Adam(network.parameters(), lr=0.1)
    before = [coefficients.detach().clone() for coefficients in ascent.coefficients]
    margin_loss(network(torch.rand(4, 1, 20, 20)).capsules.activations, torch.tensor([0, 1, 2, 0])).backward()
    adam.step()
    torch.testing.assert_close([coefficients.detach() for coefficients in ascent.coefficients], before, rtol=0, atol=0)


def test_each_layer_has_its_own_penalty_unless_one_is_given():
    network = CapsuleNetwork(
        (1, 20, 20), 3, [L1Routing(strength=0.5), L2Routing(strength=0.25)], layers=[(6, 4)], **TINY
    )
    assert RoutingAscent(network).penalties == [L1Penalty(0.5), L2Penalty(0.25)]
    assert RoutingAscent(network, penalty=L2Penalty(1.0)).penalties == [L2Penalty(1.0)] * 2


def test_parts_of_ones_own():
    class Attention(Objective):
        """Only the first class counts."""

        def weights(self, totals: Tensor, shown: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
            weights = torch.zeros_like(shown)
            weights[:, 0] = class_signs(shown)[:, 0]
            return weights

    class Positive(Penalty):
        """No coefficient below zero."""

        def shrink(self, coefficients: Tensor, gamma: float, layer: int) -> None:
            coefficients.clamp_(min=0)

    layer, poses, shown = _class_layer()
    before = layer.routing.coefficients.detach().clone()
    _stepped(layer, poses, shown, steps=3, gamma=1.0, objective=Attention(), penalty=Positive())
    after = layer.routing.coefficients.detach()
    assert (after[:, 0] != before[:, 0]).any()
    assert (after[:, 1:] == before[:, 1:]).all()
    assert (after >= 0).all()


# Both readings of Algorithm 1, in a loop of one's own.


def _paper_step(layer: CapsuleLayer, before: Tensor, weight: Tensor, poses: Tensor, shown: Tensor) -> Tensor:
    """The paper's update with γ = 0.01 and λ = 0.3, the batch taken as a mean."""
    votes = naive_votes(poses, weight)
    B = len(poses)
    return naive_update(votes, before, class_signs(shown), "l2", 0.3 * B, gamma=0.01 / B)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("weight_steps", "routing_steps"), [(1, 1), (3, 1), (1, 3), (2, 2)])
def test_algorithm_1_in_both_readings(fused, weight_steps, routing_steps):
    """Fused, the first coefficient step is that of the last weight step's forward pass; strict, it sees the new W."""
    layer, poses, shown = _class_layer(strength=0.3)
    ascent = RoutingAscent(layer, gamma=0.01)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    expected = layer.routing.coefficients.detach().clone()
    for _ in range(2):  # batches
        for turn in range(weight_steps):
            optimizer.zero_grad()
            capsules = layer(poses)
            last = turn == weight_steps - 1
            margin_loss(capsules.activations, shown).backward(retain_graph=fused and last)
            if fused and last:
                expected = _paper_step(layer, expected, layer.weight.detach(), poses, shown)
                ascent.step(capsules, shown)
            optimizer.step()
        for _ in range(routing_steps - fused):
            expected = _paper_step(layer, expected, layer.weight.detach(), poses, shown)
            ascent.step(layer(poses), shown)
        torch.testing.assert_close(layer.routing.coefficients.detach(), expected, rtol=1e-12, atol=1e-12)
        assert layer.routing.coefficients.grad is None


def test_directions_may_be_found_before_the_weights_move_and_followed_after():
    once, apart = (Stack().double() for _ in range(2))
    apart.load_state_dict(once.state_dict())
    poses, labels = torch.randn(6, 5, 3, dtype=torch.float64), torch.arange(6) % 2
    first, second = RoutingAscent(once), RoutingAscent(apart)
    capsules = once(poses)
    margin_loss(capsules.activations, labels).backward(retain_graph=True)
    first.step(capsules, labels)
    torch.optim.SGD(once.parameters(), lr=0.1).step()
    capsules = apart(poses)
    directions = second.directions(capsules, labels)
    margin_loss(capsules.activations, labels).backward()  # directions() has kept the graph
    torch.optim.SGD(apart.parameters(), lr=0.1).step()
    second.move(directions)
    torch.testing.assert_close(dict(apart.state_dict()), dict(once.state_dict()), rtol=0, atol=0)


def _used_up(layer: CapsuleLayer, poses: Tensor, labels: Tensor):
    capsules = layer(poses)
    margin_loss(capsules.activations, labels).backward()
    return capsules


def _after_the_weights(layer: CapsuleLayer, poses: Tensor, labels: Tensor):
    capsules = layer(poses)
    margin_loss(capsules.activations, labels).backward(retain_graph=True)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    return capsules


def _without_a_graph(layer: CapsuleLayer, poses: Tensor, labels: Tensor):
    with torch.no_grad():
        return layer(poses)


@pytest.mark.parametrize("made", [_used_up, _after_the_weights, _without_a_graph])
@pytest.mark.parametrize("proximal", [False, True])
def test_capsules_in_the_wrong_order_give_a_clear_error_and_no_step(made, proximal):
    layer = CapsuleLayer(6, 3, 4, 2, L2Routing())
    labels = torch.arange(8) % 4
    capsules = made(layer, torch.randn(8, 6, 3), labels)
    ascent = RoutingAscent(layer, penalty=L2Penalty(0.1, proximal=proximal))
    with pytest.raises(RuntimeError, match="new forward pass"):
        ascent.step(capsules, labels)
    assert layer.routing.coefficients.eq(1).all()


# As an optimiser.

VARIANTS = {
    "plain": {},
    "adam": {"rule": "adam"},
    "fixed norm": {"constraint": FixedNorm()},
    "adam of fixed norm": {"rule": "adam", "constraint": FixedNorm()},
    "proximal ratio": {"objective": Ratio(), "penalty": L1Penalty(1e-3, proximal=True)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_resumed_from_state_dicts_is_bit_identical(variant):
    poses, labels = torch.randn(6, 16, 5, 3), torch.arange(16) % 2

    def start(seed: int) -> tuple[Stack, RoutingAscent]:
        torch.manual_seed(seed)
        network = Stack()
        return network, RoutingAscent(network, gamma=0.05, **VARIANTS[variant])

    whole, ascent = start(0)
    for batch in poses:
        ascent.step(whole(batch), labels)
    interrupted, first = start(0)
    for batch in poses[:3]:
        first.step(interrupted(batch), labels)
    first.gamma = 0.05
    file = io.BytesIO()
    torch.save([interrupted.state_dict(), first.state_dict()], file)
    file.seek(0)
    resumed, second = start(9)
    states = torch.load(file, weights_only=True)
    resumed.load_state_dict(states[0])
    second.load_state_dict(states[1])
    for batch in poses[3:]:
        second.step(resumed(batch), labels)
    torch.testing.assert_close(dict(resumed.state_dict()), dict(whole.state_dict()), rtol=0, atol=0)


def test_gamma_is_part_of_the_state():
    layer = CapsuleLayer(6, 3, 4, 2)
    state = RoutingAscent(layer, gamma=0.7).state_dict()
    other = RoutingAscent(layer, gamma=0.1)
    other.load_state_dict(state)
    assert other.gamma == 0.7


@pytest.mark.parametrize("schedule", [
    lambda ascent: torch.optim.lr_scheduler.StepLR(ascent, 1, 0.5),
    lambda ascent: torch.optim.lr_scheduler.LambdaLR(ascent, lambda step: 0.5**step),
    lambda ascent: torch.optim.lr_scheduler.ExponentialLR(ascent, 0.5),
])  # fmt: skip
def test_torchs_schedules_change_gamma(schedule):
    layer, poses, shown = _class_layer()
    ascent = RoutingAscent(layer, gamma=0.8)
    schedule = schedule(ascent)
    for gamma in (0.8, 0.4, 0.2):
        assert ascent.gamma == pytest.approx(gamma)
        before = layer.routing.coefficients.detach().clone()
        capsules = layer(poses)
        (direction,) = ascent.directions(capsules, shown)
        ascent.step(capsules, shown)
        torch.testing.assert_close(layer.routing.coefficients.detach() - before, gamma * direction)
        schedule.step()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_network_that_changes_its_type_is_still_the_one_it_knows(variant):
    network = Stack()
    ascent = RoutingAscent(network, gamma=0.05, **VARIANTS[variant])
    network.to(torch.float64)
    assert ascent.coefficients[0] is network.first.routing.coefficients
    assert ascent.coefficients[1] is network.second.routing.coefficients
    before = [coefficients.detach().clone() for coefficients in ascent.coefficients]
    ascent.step(network(torch.randn(16, 5, 3, dtype=torch.float64)), torch.arange(16) % 2)
    for old, coefficients in zip(before, ascent.coefficients):
        assert coefficients.dtype == torch.float64
        assert not torch.equal(old, coefficients)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_network_and_its_ascent_are_copied_together(variant):
    poses, labels = torch.randn(2, 16, 5, 3), torch.arange(16) % 2
    network = Stack()
    ascent = RoutingAscent(network, gamma=0.05, **VARIANTS[variant])
    ascent.step(network(poses[0]), labels)
    copied, copied_ascent = copy.deepcopy((network, ascent))
    assert copied_ascent.coefficients[0] is copied.first.routing.coefficients
    assert copied_ascent.coefficients[0] is not network.first.routing.coefficients
    ascent.step(network(poses[1]), labels)
    copied_ascent.step(copied(poses[1]), labels)
    torch.testing.assert_close(dict(copied.state_dict()), dict(network.state_dict()), rtol=0, atol=0)


def test_weights_that_are_assigned_can_ascend():
    layer, stored = CapsuleLayer(6, 3, 4, 2), CapsuleLayer(6, 3, 4, 2).state_dict()
    layer.load_state_dict(stored, assign=True)
    RoutingAscent(layer, gamma=1.0).step(layer(torch.randn(8, 6, 3)), torch.arange(8) % 4)
    assert not layer.routing.coefficients.eq(1).all()


def test_under_autocast_the_directions_keep_the_precision_of_the_coefficients():
    layer, poses, labels = CapsuleLayer(6, 8, 4, 8, weight_std=0.5), torch.randn(32, 6, 8), torch.arange(32) % 4
    ascent = RoutingAscent(layer)
    (exact,) = ascent.directions(layer(poses), labels)
    with torch.autocast("cpu", torch.bfloat16):
        capsules = layer(poses)
        (rough,) = ascent.directions(capsules, labels)
    assert capsules.totals.dtype == torch.bfloat16
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0.05 * float(exact.abs().max()))


# Several processes.


@contextmanager
def simulated(processes: int) -> Iterator[Callable[[int], Callable[[Tensor], Tensor]]]:
    """Gives each of several threads a reduce function, as if it were a process."""
    barrier = threading.Barrier(processes, timeout=600)
    slots: list[Tensor] = [torch.empty(0)] * processes

    def reduce_of(rank: int) -> Callable[[Tensor], Tensor]:
        def reduce(tensor: Tensor) -> Tensor:
            slots[rank] = tensor.detach()
            barrier.wait()
            mean = torch.stack(slots).mean(0)
            barrier.wait()
            return mean

        return reduce

    yield reduce_of


def _shared_steps(rank: int, processes: int, objective: Objective, reduce: Callable[[Tensor], Tensor] | None) -> Stack:
    """Three steps on a process's share of each batch, in float64 so that only the mathematics can differ."""
    generator = torch.Generator().manual_seed(3)
    poses = torch.randn(3, 16, 5, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(2, (3, 16), generator=generator)
    network = Stack().double()
    for tensor in [*network.parameters(), *network.buffers()]:
        with torch.no_grad():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
    ascent = RoutingAscent(network, gamma=0.05, objective=objective, reduce=reduce)
    for batch, shown in zip(poses, labels):
        ascent.step(network(batch[rank::processes]), shown[rank::processes])
    return network


@pytest.mark.parametrize("objective", [Difference(), Balanced(), Ratio()])
def test_two_processes_step_as_one_does(objective):
    one = _shared_steps(0, 1, objective, None)
    networks: dict[int, Stack] = {}
    with simulated(2) as reduce_of:

        def work(rank: int) -> None:
            networks[rank] = _shared_steps(rank, 2, objective, reduce_of(rank))

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rank in range(2):
        torch.testing.assert_close(dict(networks[rank].state_dict()), dict(one.state_dict()), rtol=1e-9, atol=1e-12)


def _mean_over_processes(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    torch.distributed.all_reduce(tensor)
    return tensor / torch.distributed.get_world_size()


def _real_process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    torch.save(_shared_steps(rank, 2, Ratio(), _mean_over_processes).state_dict(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_real_processes_step_as_one_does(tmp_path):
    torch.multiprocessing.spawn(_real_process, (tmp_path,), nprocs=2)
    one = dict(_shared_steps(0, 1, Ratio(), None).state_dict())
    for rank in range(2):
        torch.testing.assert_close(
            dict(torch.load(tmp_path / f"{rank}.pt", weights_only=True)), one, rtol=1e-9, atol=1e-12
        )


def test_without_a_function_the_mean_is_that_of_torchs_processes(monkeypatch):
    network = CapsuleLayer(6, 8, 3, 16)
    poses, labels = torch.rand(4, 6, 8), torch.tensor([0, 1, 2, 0])
    (alone,) = RoutingAscent(network).directions(network(poses), labels)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(3))  # as if the other had found twice as much
    (together,) = RoutingAscent(network).directions(network(poses), labels)
    torch.testing.assert_close(together, 1.5 * alone)


def test_adam_goes_on_after_a_change_of_precision():
    layer = CapsuleLayer(6, 3, 4, 2)
    ascent = RoutingAscent(layer, rule="adam")
    poses, labels = torch.randn(8, 6, 3), torch.arange(8) % 4
    ascent.step(layer(poses), labels)
    layer.double()
    before = layer.routing.coefficients.detach().clone()
    ascent.step(layer(poses.double()), labels)
    assert layer.routing.coefficients.dtype == torch.float64
    assert not torch.equal(layer.routing.coefficients, before)
