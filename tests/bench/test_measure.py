import pytest
from torchcaps.bench.cases import ClassLayerStep, Inference, TrainingStep
from torchcaps.bench.measure import Measurement, check_threads, gemm_rate, measure
from torchcaps.train.environment import cpu_name

from torchcaps.errors import UserError


def test_cases_are_measured_in_turns_in_processes_of_their_own():
    cases = [
        ClassLayerStep("dynamic", 4, 1, ordinary=True, classes=5, inputs=50),
        ClassLayerStep("l2", 4, 1, classes=5, inputs=50),
    ]
    said: list[str] = []
    outcomes = measure(cases, rounds=2, seconds=0.01, say=said.append)
    assert [each.case for each in outcomes] == cases
    for each in outcomes:
        assert len(each.seconds) == 2
        assert 0 < each.median < 1
        assert each.images_per_second == pytest.approx(4 / each.median)
        assert each.memory_mb > 0
    assert said == ["round 1 of 2", "round 2 of 2"]


def test_a_case_that_dies_has_no_times_and_does_not_take_the_others_with_it():
    said: list[str] = []
    outcomes = measure(
        [Inference("no such routing", 1, 1), ClassLayerStep("l2", 4, 1, classes=5, inputs=50)],
        rounds=1,
        seconds=0.01,
        say=said.append,
    )
    assert outcomes[0].seconds == ()
    assert len(outcomes[1].seconds) == 1
    assert "no such routing" in said[0]


def test_labels_tell_the_cases_apart():
    assert TrainingStep("l2", 128, 2, ordinary=True, keep=False).label == "l2, ordinary"
    assert TrainingStep("l2", 128, 2, ordinary=True).label == "l2, ordinary, memory kept"
    assert TrainingStep("l2", 128, 2, alternation="strict").label == "l2, strict"


def test_the_spread_is_half_the_range():
    outcome = Measurement(ClassLayerStep("l2", 10, 1), (1.0, 2.0, 4.0), 0.0)
    assert outcome.median == 2.0
    assert outcome.spread == 0.75
    assert outcome.images_per_second == 5.0


def test_the_machine_is_described():
    assert gemm_rate(1, rounds=1) > 0
    assert cpu_name()
    assert check_threads(1) == 1
    with pytest.raises(UserError, match="more than the"):
        check_threads(10_000)
