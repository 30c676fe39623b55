import pytest
import torch

from naive import naive_dynamic_routing
from torchcaps.routing import DenseVotes, DynamicRouting, LinearVotes
from torchcaps.routing.dynamic import dynamic_routing


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_equals_the_naive_loops(iterations):
    votes = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    routed = dynamic_routing(DenseVotes(votes), iterations=iterations)
    torch.testing.assert_close(routed.poses, naive_dynamic_routing(votes, iterations))


def test_without_votes_equals_with_votes_and_so_do_the_gradients():
    poses = torch.randn(4, 6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, 5, 4, dtype=torch.float64, requires_grad=True)
    linear = LinearVotes(poses, weight)
    outcomes = [dynamic_routing(votes).poses for votes in (linear, DenseVotes(linear.dense()))]
    torch.testing.assert_close(*outcomes)
    upstream = torch.randn_like(outcomes[0])
    gradients = [torch.autograd.grad(outcome, [poses, weight], upstream, retain_graph=True) for outcome in outcomes]
    torch.testing.assert_close(*gradients)


def test_agreement_draws_the_coefficients_together():
    votes = torch.zeros(1, 3, 2, 2)
    votes[0, :, 0] = torch.tensor([1.0, 0.0])  # all agree on the first output capsule
    votes[0, :, 1] = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])  # and not on the second
    first = dynamic_routing(DenseVotes(votes), iterations=1).activations
    later = dynamic_routing(DenseVotes(votes), iterations=3).activations
    assert later[0, 0] > first[0, 0]


def test_weights_start_smaller_the_more_feed_a_capsule_and_never_so_large_that_the_first_softmax_decides():
    assert DynamicRouting().start_std(9216) == pytest.approx(0.1)
    assert DynamicRouting().start_std(4 * 9216) == pytest.approx(0.05)
    assert DynamicRouting().start_std(18) == 0.5


def test_needs_an_iteration():
    with pytest.raises(ValueError, match="at least 1"):
        DynamicRouting(iterations=0)
