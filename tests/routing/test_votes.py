import pytest
import torch
from torch.autograd import gradcheck

from torchcaps import functional
from torchcaps.routing import DenseVotes, LinearVotes

B, I, J, D, E = 3, 6, 4, 3, 2


def pair(dtype: torch.dtype = torch.float64) -> tuple[LinearVotes, DenseVotes]:
    poses, weight = torch.randn(B, I, D, dtype=dtype), torch.randn(I, D, J, E, dtype=dtype)
    return LinearVotes(poses, weight), DenseVotes(functional.votes(poses, weight))


def test_linear_votes_are_the_dense_votes():
    linear, dense = pair()
    assert linear.shape == dense.shape == (B, I, J, E)
    torch.testing.assert_close(linear.dense(), dense.dense())


@pytest.mark.parametrize(
    "coefficients",
    [1.0, 0.3, torch.randn(I, J), torch.randn(B, I, J)],
    ids=["one", "another number", "shared", "of each image"],
)
def test_combine_is_the_weighted_sum(coefficients):
    linear, dense = pair()
    if isinstance(coefficients, torch.Tensor):
        coefficients = coefficients.double()
        expected = (dense.dense() * coefficients[..., None]).sum(1)
    else:
        expected = coefficients * dense.dense().sum(1)
    torch.testing.assert_close(linear.combine(coefficients), expected)
    torch.testing.assert_close(dense.combine(coefficients), expected)


@pytest.mark.parametrize("shape", [(1, J), (I, 1), (1, 1), (1, I, J), (B, 1, J), (B, I, 1)])
def test_coefficients_that_broadcast_have_their_gradients(shape):
    linear, dense = pair()
    coefficients = torch.randn(shape).double().requires_grad_()
    gradients = [
        torch.autograd.grad(votes.combine(coefficients).square().sum(), coefficients)[0] for votes in (linear, dense)
    ]
    torch.testing.assert_close(*gradients)


def test_the_sum_for_one_image_may_be_changed_in_place():
    poses, weight = torch.randn(1, I, D).requires_grad_(), torch.randn(I, D, J, E)
    totals = LinearVotes(poses, weight).combine(torch.rand(1, I, J))
    totals += 1
    totals.sum().backward()
    assert poses.grad is not None


def test_agreement_is_the_inner_product():
    linear, dense = pair()
    outputs = torch.randn(B, J, E, dtype=torch.float64)
    expected = torch.einsum("bije,bje->bij", dense.dense(), outputs)
    torch.testing.assert_close(linear.agreement(outputs), expected)
    torch.testing.assert_close(dense.agreement(outputs), expected)


def test_both_sums_pass_gradcheck():
    poses, weight = torch.randn(B, I, D).double(), torch.randn(I, D, J, E).double()
    coefficients, outputs = torch.randn(B, I, J).double(), torch.randn(B, J, E).double()
    inputs = [tensor.requires_grad_() for tensor in (poses, weight, coefficients)]
    assert gradcheck(lambda u, w, c: LinearVotes(u, w).combine(c), inputs)
    shared = torch.randn(I, J).double().requires_grad_()
    assert gradcheck(lambda u, w, b: LinearVotes(u, w).combine(b), [poses, weight, shared])
    assert gradcheck(lambda u, w, s: LinearVotes(u, w).agreement(s), [poses, weight, outputs.requires_grad_()])
    assert gradcheck(lambda u: LinearVotes(u, weight.detach()).combine(coefficients), [poses])  # weights need none


def test_coefficients_found_without_gradients_leave_those_of_the_sum():
    poses, weight = torch.randn(B, I, D).double().requires_grad_(), torch.randn(I, D, J, E).double().requires_grad_()
    outputs, gradients = torch.randn(B, J, E).double(), []
    for votes in (LinearVotes(poses, weight), DenseVotes(functional.votes(poses, weight))):
        with torch.no_grad():
            coefficients = votes.agreement(outputs).softmax(2)
        gradients.append(torch.autograd.grad(votes.combine(coefficients).square().sum(), (poses, weight)))
    for linear, dense in zip(*gradients):
        torch.testing.assert_close(linear, dense)


def test_the_size_of_the_chunks_does_not_matter(monkeypatch):
    poses, weight, shared = torch.randn(B, I, D).double(), torch.randn(I, D, J, E).double(), torch.randn(I, J).double()
    inputs = [tensor.requires_grad_() for tensor in (poses, weight, shared)]
    outcomes = []
    for chunk in (1, 2 * D * J * E, 10**6):  # one input capsule, two of six, all at once
        monkeypatch.setattr("torchcaps.ops.linear_votes.CHUNK", chunk)
        totals = LinearVotes(poses, weight).combine(shared)
        outcomes.append((totals, *torch.autograd.grad(totals.square().sum(), inputs)))
    torch.testing.assert_close(outcomes[0], outcomes[2])
    torch.testing.assert_close(outcomes[1], outcomes[2])


def test_autocast_gets_the_same_answer_in_lower_precision():
    linear, _ = pair(torch.float32)
    coefficients = torch.rand(B, I, J)
    exact = linear.combine(coefficients)
    with torch.autocast("cpu", torch.bfloat16):
        rough = linear.combine(coefficients)
    torch.testing.assert_close(rough.float(), exact, rtol=0.05, atol=0.1)
