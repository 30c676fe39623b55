import pytest

from torchcaps.errors import UserError
from torchcaps.lab.bench.cases import ClassLayerStep, Inference, TrainingStep
from torchcaps.lab.bench.measure import Measurement, check_threads, gemm_rate, measure
from torchcaps.training.host import cpu_name


def test_cases_are_measured_in_turns_in_processes_of_their_own():
    cases = [
        ClassLayerStep(kind="reference", batch_size=4, keep=False, classes=5, inputs=50),
        ClassLayerStep(kind="l2", batch_size=4, classes=5, inputs=50),
    ]
    said: list[str] = []
    outcomes = measure(cases, rounds=2, seconds=0.01, say=said.append)
    assert [outcome.case for outcome in outcomes] == cases
    for outcome in outcomes:
        assert len(outcome.seconds) == 2
        assert 0 < outcome.median < 1
        assert outcome.images_per_second == pytest.approx(4 / outcome.median)
        assert outcome.memory_mb > 0
    assert said == ["round 1 of 2", "round 2 of 2"]


def test_a_case_that_dies_has_no_times_and_does_not_take_the_others_with_it():
    said: list[str] = []
    outcomes = measure(
        [Inference(kind="no such routing"), ClassLayerStep(kind="l2", batch_size=4, classes=5, inputs=50)],
        rounds=1,
        seconds=0.01,
        say=said.append,
    )
    assert outcomes[0].seconds == ()
    assert len(outcomes[1].seconds) == 1
    assert "no such routing" in said[0]


def test_labels_tell_the_cases_apart():
    assert TrainingStep(kind="reference", keep=False).label == "reference"
    assert TrainingStep(kind="reference").label == "reference, memory kept"
    assert TrainingStep(kind="l2", alternation="strict").label == "l2, strict"
    assert TrainingStep(kind="l2", optimiser="muon").label == "l2, muon"


def test_the_spread_is_half_the_range():
    outcome = Measurement(ClassLayerStep(kind="l2", batch_size=10), (1.0, 2.0, 4.0), 0.0)
    assert outcome.median == 2.0
    assert outcome.spread == 0.75
    assert outcome.images_per_second == 5.0


def test_the_machine_is_described():
    assert gemm_rate(1, rounds=1) > 0
    assert cpu_name()
    assert check_threads(1) == 1
    with pytest.raises(UserError, match="more than the"):
        check_threads(10_000)
