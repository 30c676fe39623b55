import pickle

import pytest
import torch

from torchcaps.backward import SampledBackward, keeping_chances

torch.manual_seed(0)
UNEVEN = torch.rand(50, dtype=torch.float64).pow(6)


def added_variance(sizes: torch.Tensor, chances: torch.Tensor) -> float:
    """What sampling adds, as a share of the mean square: Σ g² (1/p - 1) / Σ g²."""
    return float((sizes.square() * (1 / chances - 1)).sum() / sizes.square().sum())


@pytest.mark.parametrize("noise", [0.01, 0.1, 1.0])
def test_the_noise_is_what_was_allowed(noise):
    chances = keeping_chances(UNEVEN, noise)
    assert chances.max() <= 1
    assert chances.sum() < len(UNEVEN)
    assert added_variance(UNEVEN, chances) == pytest.approx(noise)


def test_no_other_chances_with_as_many_kept_add_less():
    best = keeping_chances(UNEVEN, 0.3)
    for _ in range(100):
        other = (best * torch.rand(len(best)).add(0.5)).clamp(max=1)
        other = (other * best.sum() / other.sum()).clamp(max=1)
        assert added_variance(UNEVEN, other) >= 0.3 * (1 - 1e-9) or other.sum() > best.sum()


@pytest.mark.parametrize(
    ("sizes", "noise", "expected"),
    [
        ([2.0, 2.0], 0.0, [1.0, 1.0]),
        ([2.0, 2.0], 1.0, [0.5, 0.5]),
        ([0.0, 3.0], 0.1, [0.0, 1 / 1.1]),
        ([5.0], 0.0, [1.0]),
        ([1, 1, 8], 0.0, [1.0, 1.0, 1.0]),
        ([1e30, 1e30], 1.0, [0.5, 0.5]),
    ],
)
def test_small_cases(sizes, noise, expected):
    chances = keeping_chances(torch.tensor(sizes), noise)
    torch.testing.assert_close(chances, torch.tensor(expected, dtype=torch.float64))


def sampled(gradient: torch.Tensor, noise: float, draws: int) -> list[torch.Tensor]:
    return [SampledBackward(noise, draw=lambda k=k: k / draws)(gradient) for k in range(draws)]


def test_the_gradient_is_right_on_average():
    gradient = torch.randn(50, 2, 3, dtype=torch.float64) * UNEVEN.view(-1, 1, 1)
    samples = sampled(gradient, 0.5, draws=3000)
    assert (torch.stack(samples).mean(0) - gradient).norm() < 0.03 * gradient.norm()
    left_out = [(sample == 0).flatten(1).all(1).sum() for sample in samples]
    assert min(left_out) > 20
    assert max(left_out) - min(left_out) <= 1


def test_an_order_in_the_batch_adds_no_noise():
    """Images of two kinds in turn: whoever left out every second one would see one kind only."""
    gradient = torch.tensor([1.0, -1.0]).repeat(32)
    sums = torch.stack([sample.sum() for sample in sampled(gradient, 1.0, draws=1000)])
    assert float(sums.var()) / 64 < 1.2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_do_not_overflow(dtype):
    gradient = torch.tensor([6e-8, 1.0], dtype=dtype)
    for sample in sampled(gradient, 0.1, draws=500):
        assert sample.dtype == dtype
        assert sample.isfinite().all()


def test_processes_keep_what_one_process_would():
    gradient = torch.randn(8, 4) * torch.arange(8).view(-1, 1)
    sizes = torch.linalg.vector_norm(gradient, dim=1)
    whole = SampledBackward(1.0, draw=lambda: 0.3)(gradient)
    halves = [
        SampledBackward(1.0, draw=lambda: 0.3, gather=lambda own: sizes, rank=rank)(part)
        for rank, part in enumerate(gradient.chunk(2))
    ]
    assert torch.equal(torch.cat(halves), whole)
    assert (whole == 0).all(1).sum() > 1  # the first has none to begin with
    with pytest.raises(ValueError, match="equally many"):
        SampledBackward(gather=lambda own: sizes, rank=1)(gradient[5:])


@pytest.mark.parametrize("shape", [(0, 3), (4,), (1, 2)])
def test_unusual_shapes(shape):
    gradient = torch.ones(shape)
    assert SampledBackward(noise=0)(gradient).equal(gradient)


def test_hooks_can_be_stored():
    assert pickle.loads(pickle.dumps(SampledBackward(0.3))).noise == 0.3


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_gradients_that_have_no_size_stay_as_they_are(value):
    gradient = torch.full((4, 2), value)
    torch.testing.assert_close(SampledBackward()(gradient), gradient, equal_nan=True)


@pytest.mark.parametrize("noise", [-0.1, float("nan"), float("inf")])
def test_noise_is_not_negative(noise):
    with pytest.raises(ValueError, match="noise must be zero or more"):
        SampledBackward(noise)
