import math

import pytest
import torch

from torchcaps.routing import ClusteringRouting, DenseVotes, LinearVotes
from torchcaps.routing.clustering import best_coefficients, best_directions, clustering_objective, clustering_routing


def test_three_iterations_by_loops():
    votes = torch.randn(4, 3, 2, dtype=torch.float64)  # I, J, E
    alpha = 0.4
    shares = [[1 / 3] * 3 for _ in range(4)]
    for _ in range(2):
        totals = [sum(shares[i][j] * votes[i, j] for i in range(4)) for j in range(3)]
        directions = [total / math.sqrt(float(total @ total)) for total in totals]
        for i in range(4):
            raised = [shares[i][j] * math.exp(float(votes[i, j] @ directions[j]) / alpha) for j in range(3)]
            shares[i] = [share / sum(raised) for share in raised]
    totals = [sum(shares[i][j] * votes[i, j] for i in range(4)) for j in range(3)]
    lengths = [math.sqrt(float(total @ total)) for total in totals]

    routed = clustering_routing(DenseVotes(votes[None]), iterations=3, alpha=alpha)
    torch.testing.assert_close(routed.totals[0], torch.stack(totals))
    torch.testing.assert_close(routed.poses[0], torch.stack(totals) / (1 + max(lengths)))
    torch.testing.assert_close(routed.activations[0], routed.poses[0].norm(dim=-1))


@pytest.mark.parametrize("alpha", [0.3, 1.0, 10.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_no_step_raises_the_objective_or_the_loss_of_the_clustering(alpha, scale):
    rounding = 1e-6 * scale  # the direction of a total below 1e-6 is not fully taken
    votes = DenseVotes(scale * torch.randn(20, 7, 4, 5, dtype=torch.float64))
    coefficients = torch.full((20, 7, 4), 0.25, dtype=torch.float64)
    directions = best_directions(votes.combine(coefficients))
    losses = [clustering_objective(votes, coefficients, directions, coefficients, alpha=alpha)]  # no divergence yet
    for _ in range(10):
        last = coefficients
        coefficients = best_coefficients(votes, directions, last, alpha=alpha)
        after_shares = clustering_objective(votes, coefficients, directions, last, alpha=alpha)
        assert (after_shares <= losses[-1] + rounding).all()
        directions = best_directions(votes.combine(coefficients))
        after_directions = clustering_objective(votes, coefficients, directions, last, alpha=alpha)
        assert (after_directions <= after_shares + rounding).all()
        losses.append(clustering_objective(votes, coefficients, directions, coefficients, alpha=alpha))
    assert (torch.stack(losses).diff(dim=0) <= rounding).all()
    assert (losses[-1] < losses[0]).all()


def test_each_step_is_the_best_one():
    votes = DenseVotes(torch.randn(1, 5, 3, 4, dtype=torch.float64))
    directions = best_directions(torch.randn(1, 3, 4, dtype=torch.float64))
    last = torch.randn(1, 5, 3, dtype=torch.float64).softmax(2)
    coefficients = best_coefficients(votes, directions, last, alpha=0.5)
    least = clustering_objective(votes, coefficients, directions, last, alpha=0.5)
    for _ in range(50):
        others = (coefficients.log() + 0.3 * torch.randn_like(coefficients)).softmax(2)
        assert clustering_objective(votes, others, directions, last, alpha=0.5) > least
    best = best_directions(votes.combine(coefficients))
    least = clustering_objective(votes, coefficients, best, last, alpha=0.5)
    for _ in range(50):
        others = best_directions(torch.randn_like(directions)) * torch.rand(1, 3, 1, dtype=torch.float64)
        assert clustering_objective(votes, coefficients, others, last, alpha=0.5) > least


def test_shares_that_stay_have_no_divergence():
    votes = DenseVotes(torch.zeros(2, 5, 4, 3))
    even = torch.full((2, 5, 4), 0.25)
    nothing = torch.zeros(2, 4, 3)
    torch.testing.assert_close(clustering_objective(votes, even, nothing, even, alpha=3.0), torch.zeros(2))
    decided = torch.nn.functional.one_hot(torch.zeros(2, 5, dtype=torch.long), 4).float()
    objective = clustering_objective(votes, decided, nothing, even, alpha=3.0)
    torch.testing.assert_close(objective, torch.full((2,), 3.0 * 5 * math.log(4)))


def test_without_votes_equals_with_votes_and_so_do_the_gradients():
    poses = torch.randn(4, 6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    linear = LinearVotes(poses, weight)
    outcomes = [clustering_routing(votes).poses for votes in (linear, DenseVotes(linear.dense()))]
    torch.testing.assert_close(*outcomes)
    upstream = torch.randn_like(outcomes[0])
    gradients = [torch.autograd.grad(outcome, [poses, weight], upstream, retain_graph=True) for outcome in outcomes]
    torch.testing.assert_close(*gradients)


def test_gradients():
    votes = torch.randn(2, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda votes: clustering_routing(DenseVotes(votes), alpha=0.5), [votes])


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-7, 1e12])
@pytest.mark.parametrize("autocast", [False, True])
def test_nothing_overflows(scale, autocast):
    poses = (scale * torch.randn(3, 6, 4)).requires_grad_()
    weight = torch.randn(6, 4, 5, 3).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routed = clustering_routing(LinearVotes(poses, weight))
        assert all(tensor.isfinite().all() for tensor in routed)
        gradients = torch.autograd.grad(routed.activations.sum(), [poses, weight])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (routed.activations <= 1).all()


def test_the_order_of_the_input_capsules_does_not_matter():
    votes = torch.randn(2, 6, 3, 4, dtype=torch.float64)
    order = torch.randperm(6)
    torch.testing.assert_close(clustering_routing(DenseVotes(votes)), clustering_routing(DenseVotes(votes[:, order])))


def test_an_image_does_not_depend_on_its_neighbours():
    votes = torch.randn(4, 6, 3, 4)
    routing = ClusteringRouting(iterations=4)
    together = routing(DenseVotes(votes), torch.ones(4, 6))
    alone = routing(DenseVotes(votes[1:2]), torch.ones(1, 6))
    torch.testing.assert_close(together.poses[1:2], alone.poses)


@pytest.mark.parametrize("settings", [{"iterations": 0}, {"alpha": 0.0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match="must be"):
        ClusteringRouting(**settings)
