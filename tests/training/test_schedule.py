import pytest

from torchcaps.training.config import OptimiserConfig
from torchcaps.training.schedule import rate_factor


def rates(total: int, **settings: object) -> list[float]:
    return [rate_factor(step, total, OptimiserConfig(**settings)) for step in range(total)]


def test_constant():
    assert set(rates(10, schedule="constant", warmup=0)) == {1.0}


def test_the_papers_staircase():
    assert rates(6, schedule="staircase", warmup=0, decay=0.5, decay_every=2) == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decays_to_zero_after_the_warm_up(schedule):
    curve = rates(100, schedule=schedule, warmup=10)
    assert curve[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert curve[10] == 1.0
    assert curve[10:] == sorted(curve[10:], reverse=True)
    assert 0 < curve[-1] < 0.02
    assert curve[55] == pytest.approx(0.5)


def test_a_short_run_spends_at_most_half_of_it_warming_up():
    assert rates(10, schedule="constant", warmup=50) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 1])
