"""The compiled sums over votes against those by ordinary operations in float64."""

import pytest
import torch
from torch import Tensor

from torchcaps.ops import blocked_votes, compiled
from torchcaps.ops.blocked_votes import can_block, in_blocks
from torchcaps.ops.linear_votes import by_output
from torchcaps.routing import LinearVotes
from torchcaps.routing.dynamic import dynamic_routing

pytestmark = pytest.mark.skipif(compiled.native("native_votes") is None, reason="there are no compiled kernels here")

# B, I, D, J, E: images that make no whole group, one of everything, more images and outputs than are in hand at once
SHAPES = [(7, 32, 4, 3, 6), (1, 16, 2, 1, 2), (8, 48, 8, 10, 16), (37, 16, 2, 40, 16), (2, 16, 8, 2, 4200)]


def tensors(B: int, I: int, D: int, J: int, E: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, I, D), torch.randn(I, D, J, E), torch.randn(B, I, J), torch.randn(B, J, E)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_sums_and_their_gradients_are_those_of_ordinary_operations(shape: tuple[int, int, int, int, int]) -> None:
    given = tensors(*shape)
    outcomes = []
    for lay_out, dtype in ((in_blocks, torch.float32), (by_output, torch.float64)):
        poses, weight, coefficients, outputs = (tensor.to(dtype).requires_grad_() for tensor in given)
        votes = lay_out(poses, weight)
        sums, agreement = votes.weighted_sum(coefficients), votes.agreement(outputs)
        of_sums, of_agreement = (torch.cos(torch.arange(tensor.numel())).to(dtype) for tensor in (sums, agreement))
        upstream = (of_sums.view_as(sums), of_agreement.view_as(agreement))
        inputs = (poses, weight, coefficients, outputs)
        outcomes.append((sums, agreement, *torch.autograd.grad((sums, agreement), inputs, upstream)))
    for ours, exact in zip(*outcomes):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=2e-6 * float(exact.detach().abs().max()))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    poses, weight, coefficients, outputs = (tensor.requires_grad_() for tensor in tensors(11, 48, 8, 3, 16))

    def outcome() -> tuple[Tensor, ...]:
        votes = in_blocks(poses, weight)
        sums, agreement = votes.weighted_sum(coefficients), votes.agreement(outputs)
        total = sums.square().sum() + agreement.square().sum()
        return sums, agreement, *torch.autograd.grad(total, (poses, weight, coefficients, outputs))

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = outcome()
        torch.set_num_threads(threads)
        results = outcome()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, reference) for result, reference in zip(results, expected))


def test_coefficients_and_outputs_of_another_kind_are_converted_and_those_of_another_shape_refused() -> None:
    poses, weight, coefficients, outputs = tensors(5, 32, 4, 3, 6)
    votes = in_blocks(poses, weight)
    assert torch.equal(votes.weighted_sum(coefficients.double()), votes.weighted_sum(coefficients))
    assert torch.equal(votes.agreement(outputs.double()), votes.agreement(outputs))
    for ask, given in ((votes.weighted_sum, coefficients[:4]), (votes.agreement, outputs[:, :, :5])):
        with pytest.raises(RuntimeError, match="expand"):
            ask(given)


def test_dynamic_routing_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    poses, weight, _, _ = tensors(5, 32, 8, 4, 16)
    exact = dynamic_routing(LinearVotes(poses.double(), weight.double())).poses
    monkeypatch.setattr(blocked_votes, "MANY", 1)
    votes = LinearVotes(poses, weight)
    torch.testing.assert_close(dynamic_routing(votes).poses.double(), exact, rtol=1e-4, atol=1e-5)
    assert isinstance(votes._sums, blocked_votes.BlockedVotes)


@pytest.mark.parametrize(
    "shape", [(64, 1151, 8, 10, 16), (64, 1152, 7, 10, 16), (64, 1152, 8, 10, 15), (1, 16, 8, 2, 4)]
)
def test_others_are_left_to_ordinary_operations(shape: tuple[int, int, int, int, int]) -> None:
    poses, weight, _, _ = tensors(*shape)
    assert not can_block(poses, weight)


def test_other_types_of_numbers_are_left_to_ordinary_operations() -> None:
    poses, weight, _, _ = tensors(64, 1152, 8, 10, 16)
    assert can_block(poses, weight)
    assert not can_block(poses.double(), weight.double())
    assert not can_block(poses.to("meta"), weight.to("meta"))
