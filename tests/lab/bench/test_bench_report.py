import csv
import json

import pytest

from torchcaps.errors import UserError
from torchcaps.lab.bench import report
from torchcaps.lab.bench.cases import REFERENCE, ClassLayerStep, Inference, TrainingStep
from torchcaps.lab.bench.measure import Measurement


@pytest.fixture(autouse=True)
def _no_real_measuring(monkeypatch):
    def pretend(cases, **options):
        times = {(True, False): (0.4, 0.5, 0.6), (True, True): (0.3, 0.3, 0.3)}
        return [
            Measurement(
                case,
                times.get((case.kind == REFERENCE, case.keep), (0.1, 0.1, 0.1)),
                900.0 if case.kind == REFERENCE else 300.0,
            )
            for case in cases
        ]

    monkeypatch.setattr(report, "measure", pretend)
    monkeypatch.setattr(report, "gemm_rate", lambda threads: 100.0 * threads)
    monkeypatch.setattr(report, "physical_memory", lambda: 24_000 * 2**20)


def test_ratios_are_to_the_reference_with_both_allocator_settings(capsys, tmp_path):
    report.run_bench(threads=[1], kinds=["l2", "dynamic"], out=tmp_path / "results", as_json=True)
    summary = json.loads(capsys.readouterr().out)
    training = {row["case"]: row for row in summary["rows"] if (row["network"], row["what"]) == ("mnist", "training")}
    assert set(training) == {"reference", "reference, memory kept", "dynamic", "l2", "l2, strict", "l2, muon"}
    assert training["l2"]["times_reference"] == 5.0
    assert training["l2"]["times_reference_kept"] == 3.0
    assert training["l2"]["memory_mb"] == 300.0
    assert training["l2"]["limit_percent"] > 0
    assert "limit_percent" not in training["dynamic"]
    assert {path.suffix for path in (tmp_path / "results").iterdir()} == {".csv", ".json", ".png"}
    (table,) = (tmp_path / "results").glob("*-1-threads-torch-*-mnist.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 6 + 4 + 3 * len(report.CLASS_COUNTS)
    assert next(row for row in rows if row["case"] == "l2")["times_reference"] == "5.0"


@pytest.mark.usefixtures("two_cores")
def test_several_numbers_of_threads_have_their_own_limit(capsys):
    report.run_bench(threads=[1, 2], kinds=["l2"], classes=False, as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    one, two = (row["limit_percent"] for row in rows if row["case"] == "l2" and row["what"] == "training")
    assert one == pytest.approx(2 * two, rel=0.01)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr("torchcaps.lab.bench.measure.usable_cores", lambda: 2)


def test_what_cannot_fit_into_memory_is_not_tried(capsys):
    rows = report.class_rows(128, 1, 1)
    largest = {row["case"]: row for row in rows if row["classes"] == 1000}
    assert "milliseconds" not in largest["reference, memory kept"]
    assert largest["l2"]["milliseconds"]
    assert "not tried" in capsys.readouterr().err


def test_the_table_is_printed(capsys):
    report.run_bench(threads=[1])
    text = capsys.readouterr().out
    assert "reference, memory kept" in text
    assert "times the reference" in text
    assert "% of limit" in text


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="mnist"):
        report.run_bench(networks=["imagenet"])
    with pytest.raises(UserError, match="l2"):
        report.run_bench(kinds=["l3"])


@pytest.mark.parametrize(
    "case",
    [
        TrainingStep(kind="reference", batch_size=2, keep=False),
        TrainingStep(kind="l2", batch_size=2, keep=False),
        TrainingStep(kind="l2", batch_size=2, keep=False, alternation="strict"),
        TrainingStep(kind="cnn", batch_size=2, keep=False),
        Inference(kind="reference", batch_size=2, keep=False, network="cifar-10-24-same"),
        Inference(kind="dynamic", batch_size=2, keep=False),
        ClassLayerStep(kind="reference", batch_size=2, keep=False),
        ClassLayerStep(kind="l1", batch_size=2, keep=False),
    ],
    ids=lambda case: f"{type(case).__name__}-{case.label}",
)
def test_every_kind_of_case_works(case):
    work = case.prepare()
    work()
    work()
