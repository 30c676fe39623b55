import pytest
import torch

from torchcaps.data.stateless import key, permute, random_bits, random_integers, random_uniform


def splitmix64(state: int, index: int) -> int:
    """The published generator in plain Python, at one place of its stream."""
    mask = (1 << 64) - 1
    z = (state + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@pytest.mark.parametrize("state", [0, 1, -5, 2**62, -(2**63)])
def test_random_bits_are_those_of_splitmix64(state: int) -> None:
    counters = torch.tensor([0, 1, 2, 59_999_999, 10**15])
    bits = random_bits(state, counters).tolist()
    assert [b % 2**64 for b in bits] == [splitmix64(state % 2**64, c) for c in counters.tolist()]


def test_keys_are_fixed_forever_and_depend_on_every_part() -> None:
    assert key(0, 0, "order") == -6598295217357053942  # a changed key would break resuming old runs
    several = [key(0, 0, "a"), key(0, 1, "a"), key(1, 0, "a"), key(0, 0, "b"), key(-1, 0, "a"), key(0, 0)]
    assert len(set(several)) == len(several)


@pytest.mark.parametrize("high", [1, 2, 3, 9, 1000])
def test_integers_are_spread_evenly(high: int) -> None:
    drawn = random_integers(key("test"), torch.arange(100_000), high)
    counts = torch.bincount(drawn, minlength=high).double()
    assert len(counts) == high
    expected = 100_000 / high
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < high + 5 * (2 * high) ** 0.5


def test_uniform_numbers_fill_their_range() -> None:
    drawn = random_uniform(key("test"), torch.arange(100_000))
    assert -1 <= drawn.min() < -0.999
    assert 0.999 < drawn.max() < 1
    assert abs(drawn.mean()) < 0.01


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 10, 16, 17, 100, 1437, 60_000])
def test_permutation_is_one_to_one(length: int) -> None:
    order = permute(torch.arange(length), length, key("p", length))
    assert torch.equal(order.sort().values, torch.arange(length))


def test_permutation_of_sixty_million_without_holding_it() -> None:
    length = 60_000_000
    positions = torch.cat([torch.arange(50_000), torch.arange(length - 50_000, length)])
    order = permute(positions, length, key(0, 0, "order"))
    assert len(order.unique()) == len(order)
    assert order.min() >= 0
    assert order.max() < length
    assert abs(order.double().mean() / length - 0.5) < 0.01
    assert torch.equal(order[70_000:70_010], permute(positions[70_000:70_010], length, key(0, 0, "order")))


def test_permutation_looks_shuffled() -> None:
    order = permute(torch.arange(10_000), 10_000, key(3)).double()
    neighbours = torch.corrcoef(torch.stack([order[:-1], order[1:]]))[0, 1]
    trend = torch.corrcoef(torch.stack([order, torch.arange(10_000).double()]))[0, 1]
    assert abs(neighbours) < 0.04
    assert abs(trend) < 0.04
    assert (order == torch.arange(10_000)).sum() < 10


def test_every_order_of_three_occurs_and_every_place_gets_every_item() -> None:
    orders = {tuple(permute(torch.arange(3), 3, key(seed)).tolist()) for seed in range(200)}
    assert len(orders) == 6
    first = torch.tensor([int(permute(torch.tensor([0]), 10, key(seed))) for seed in range(2000)])
    assert torch.bincount(first, minlength=10).min() > 130
