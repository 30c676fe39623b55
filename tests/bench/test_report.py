import json

import pytest
from torchcaps.bench import report
from torchcaps.bench.cases import ClassLayerStep, Inference, TrainingStep
from torchcaps.bench.measure import Measurement

from torchcaps.errors import UserError


@pytest.fixture(autouse=True)
def _no_real_measuring(monkeypatch):
    def pretend(cases, **options):
        return [
            Measurement(case, (0.4, 0.5, 0.6) if case.ordinary else (0.1, 0.1, 0.1), 900.0 if case.ordinary else 300.0)
            for case in cases
        ]

    monkeypatch.setattr(report, "measure", pretend)
    monkeypatch.setattr(report, "gemm_rate", lambda threads: 100.0)
    monkeypatch.setattr(report, "_memory_mb", lambda: 24_000.0)


def test_ratios_are_to_what_everyone_writes(capsys, tmp_path):
    report.run_bench(threads=1, routings=["l2", "dynamic"], out=tmp_path / "results", as_json=True)
    summary = json.loads(capsys.readouterr().out)
    rows = {row["routing"]: row for row in summary["networks"]["mnist"]["training"]}
    assert rows["l2"]["speed_ratio"] == 5.0
    assert rows["l2"]["speed_ratio_to_own_dynamic"] == 1.0
    assert rows["l2"]["memory_ratio"] == pytest.approx(1 / 3, abs=1e-3)
    assert set(rows) == {"dynamic, ordinary", "dynamic, ordinary, memory kept", "dynamic", "l2", "l2, strict"}
    kept = {path.suffix for path in (tmp_path / "results").iterdir()}
    assert kept == {".csv", ".json", ".png"}
    (table,) = (tmp_path / "results").glob("*.csv")
    assert len(table.read_text().splitlines()) == 1 + 5 + 4 + 3 * len(report.CLASS_COUNTS)


def test_what_cannot_fit_into_memory_is_not_tried(capsys):
    outcomes = report.measure_classes(128, 1, 1)
    largest = {each.case.label: each for each in outcomes if each.case.classes == 1000}
    assert largest["dynamic, ordinary"].seconds == ()
    assert largest["l2"].seconds
    assert "not tried" in capsys.readouterr().err


def test_the_table_is_printed(capsys):
    report.run_bench(threads=1)
    text = capsys.readouterr().out
    assert "dynamic, ordinary" in text
    assert "Share of this limit" in text


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="mnist"):
        report.run_bench(architectures=["imagenet"])
    with pytest.raises(UserError, match="l2"):
        report.run_bench(routings=["l3"])


@pytest.mark.parametrize(
    "case",
    [TrainingStep("l2", 2, 1), TrainingStep("cnn", 2, 1), Inference("dynamic", 2, 1), ClassLayerStep("l1", 2, 1)],
)
def test_every_kind_of_case_works(case):
    work = case.prepare()
    work()
    work()
