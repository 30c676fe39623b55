"""The compiled squash against the formula in float64."""

import pytest
import torch

from torchcaps.functional import capsules_from_totals
from torchcaps.ops import compiled
from torchcaps.ops.squash import can_squash, compiled_squash

pytestmark = pytest.mark.skipif(compiled.native() is None, reason="there are no compiled kernels here")


@pytest.mark.parametrize("size", [2, 3, 8, 16])
@pytest.mark.parametrize("scale", [1e-15, 1e-3, 1.0, 30.0, 1e6])
def test_is_the_formula(size: int, scale: float) -> None:
    torch.manual_seed(0)
    totals = (scale * torch.randn(5, 7, size)).requires_grad_()
    exact = totals.detach().double().requires_grad_()
    results, references = compiled_squash(totals), capsules_from_totals(exact)[:2]
    upstreams = [torch.randn_like(result) for result in results]
    (gradient,) = torch.autograd.grad(results, totals, upstreams)
    (reference,) = torch.autograd.grad(references, exact, [upstream.double() for upstream in upstreams])
    for ours, double in zip((*results, gradient), (*references, reference)):
        torch.testing.assert_close(ours.double(), double, rtol=1e-4, atol=1e-6 * float(double.detach().abs().max()))


def test_one_output_alone() -> None:
    totals = torch.randn(4, 6, 8).requires_grad_()
    exact = totals.detach().double().requires_grad_()
    for number in range(2):
        (gradient,) = torch.autograd.grad(compiled_squash(totals)[number].sum(), totals)
        (reference,) = torch.autograd.grad(capsules_from_totals(exact)[number].sum(), exact)
        torch.testing.assert_close(gradient.double(), reference, rtol=1e-4, atol=1e-5)


def test_zero_and_huge_vectors() -> None:
    largest = torch.finfo(torch.float32).max
    totals = torch.tensor([[0.0, 0.0], [largest, largest], [largest, 0.0], [0.0, -1e30]]).requires_grad_()
    poses, lengths = compiled_squash(totals)
    half = 0.5**0.5
    torch.testing.assert_close(poses.detach(), torch.tensor([[0.0, 0.0], [half, half], [1.0, 0.0], [0.0, -1.0]]))
    torch.testing.assert_close(lengths.detach(), torch.tensor([0.0, 1.0, 1.0, 1.0]))
    (gradient,) = torch.autograd.grad((poses.sum() + lengths.sum()), totals)
    assert gradient.isfinite().all()
    assert not gradient[0].any()


def test_not_contiguous() -> None:
    totals = torch.randn(8, 5, 4).permute(2, 1, 0)
    torch.testing.assert_close(compiled_squash(totals), tuple(capsules_from_totals(totals)[:2]))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    totals = torch.randn(11, 13, 8)
    expected = compiled_squash(totals)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = compiled_squash(totals)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(results, expected))


def test_many_capsules_of_single_precision() -> None:
    many = torch.empty(128, 1152, 8)
    assert can_squash(many)
    assert not can_squash(many[:1])
    assert not can_squash(many.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_squash(many)
    assert not can_squash(many.to("meta"))
