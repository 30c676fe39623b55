"""Results as files: what is written is read, and what is collected twice is there once."""

import gzip

import pytest
from pretend import finish

from torchcaps.errors import UserError
from torchcaps.lab.reproduce.cells import all_cells
from torchcaps.lab.results import CURVES, RESULTS, Results, RunRow, agrees, all_settings, collect
from torchcaps.models.config import CnnConfig
from torchcaps.routing.config import RoutingConfig
from torchcaps.training.config import TrainingConfig


@pytest.fixture
def cells(tmp_path):
    cells = [cell for cell in all_cells("smoke", tmp_path / "cells", seeds=2) if cell.benchmark.data == "mnist"]
    for number, cell in enumerate(cells):
        finish(cell, 1.0 + number / 3, {2: 5.0, 4: 1.0 / 3})
    return cells


def test_results_come_back_as_they_were_written(cells, tmp_path):
    results = collect(tmp_path / "cells", experiment="smoke")
    results.write(tmp_path / "kept")
    again = Results.read(tmp_path / "kept")
    assert again.rows == results.rows
    assert list(again.rows) == list(results.rows)
    assert len(again.rows) == len(cells)
    for key, curve in results.curves.items():
        assert [row["step"] for row in again.curves[key]] == [2, 4]
        assert again.curves[key][1]["evaluation_error"] == pytest.approx(curve[1]["evaluation_error"], rel=1e-6)
        assert again.curves[key][1]["loss"] is None
    row = again.rows["smoke", "mnist/l2-fc/seed-1"]
    assert (row.method, row.data, row.seed, row.reconstruction) == ("l2-fc", "digits", 1, False)
    assert row.settings["model.conv_channels"] == 8
    assert row.settings["run.seed"] == 1
    assert "run.threads" not in row.settings
    assert row.views_error_percent is None


def test_texts_of_any_kind_survive(tmp_path):
    cell = all_cells("smoke", tmp_path / "cells")[0]
    finish(cell, 1.0, {2: 1.0})
    (row,) = collect(tmp_path / "cells", experiment="smoke").rows.values()
    odd = row.replace(processor='a "quoted", comma\nand line; ü', commit="12345", settings={"x": [1, None, "a,b"]})
    results = Results()
    results.add(odd, [])
    results.write(tmp_path)
    assert list(Results.read(tmp_path).rows.values()) == [odd]


def test_collecting_again_changes_nothing_and_a_new_run_replaces_its_old_row(cells, tmp_path):
    def kept() -> tuple[bytes, bytes]:
        results = Results.read(tmp_path)
        results.update(collect(tmp_path / "cells", experiment="smoke"))
        results.write(tmp_path)
        return (tmp_path / RESULTS).read_bytes(), (tmp_path / CURVES).read_bytes()

    kept()
    first = kept()
    assert kept() == first
    result = cells[0].result()
    result.replace(test_error_percent=0.5).write(cells[0].folder.result)
    assert kept() != first
    rows = Results.read(tmp_path).rows
    assert len(rows) == len(cells)
    assert rows["smoke", cells[0].name].test_error_percent == 0.5
    for cell in cells[1:]:
        cell.folder.result.unlink()
    kept()
    assert len(Results.read(tmp_path).rows) == len(cells)  # what is recorded stays when its folder goes


def test_runs_that_are_not_finished_have_no_row(cells, tmp_path):
    cells[0].folder.result.unlink()
    assert ("smoke", cells[0].name) not in collect(tmp_path / "cells", experiment="smoke").rows


def test_damaged_files_are_told(cells, tmp_path):
    collect(tmp_path / "cells", experiment="smoke").write(tmp_path)
    whole = (tmp_path / CURVES).read_bytes()
    for damage in (whole[:-10], b"no gzip", gzip.compress(b"experiment,run,step\na,b,c\n"), gzip.compress(b"x\n1\n")):
        (tmp_path / CURVES).write_bytes(damage)
        with pytest.raises(UserError, match="damaged"):
            Results.read(tmp_path)
    (tmp_path / CURVES).write_bytes(whole)
    table = (tmp_path / RESULTS).read_text()
    for damage in (table.replace("digits", "", 1), table.replace("steps", "stairs", 1), table[:-20]):
        (tmp_path / RESULTS).write_text(damage)
        with pytest.raises(UserError, match="damaged"):
            Results.read(tmp_path)


def test_a_folder_without_results_has_none(tmp_path):
    assert Results.read(tmp_path).rows == {}
    assert collect(tmp_path / "nowhere", experiment="x").rows == {}


def test_settings_at_their_defaults_are_kept_too():
    plain = all_settings(TrainingConfig())
    assert plain["optimiser.name"] == "muon"
    assert plain["routing.strength"] == 1e-5
    same = RoutingConfig(name="l2", settings={"strength": 1e-5})
    assert all_settings(TrainingConfig(routing=same)) == plain
    changed = all_settings(TrainingConfig(model=CnnConfig(conv_channels=8)))
    assert changed["model.name"] == "cnn"
    assert changed["model.conv_channels"] == 8


def test_what_a_configuration_leaves_open_may_be_anything():
    asked = TrainingConfig(routing=RoutingConfig(name="dynamic"))
    trained = asked.replace(run=asked.run.replace(batch_size=8, epochs=3))
    assert agrees(asked, all_settings(trained))
    assert agrees(trained, all_settings(trained))
    assert not agrees(trained, all_settings(asked))
    assert not agrees(asked, {**all_settings(trained), "augmentation.shift": 1})
    later = {name: value for name, value in all_settings(trained).items() if name != "augmentation.cutout"}
    assert agrees(asked, later)  # a row that is older than the setting, and what it did is the default
    assert not agrees(asked, {**all_settings(trained), "routing.iterations": 1})
    assert not agrees(asked, {"routing": "dynamic", "steps": 900})  # older names: another routing than that of today


def test_a_row_has_all_that_a_result_has():
    assert {"parameters", "commit", "versions", "images_seen"} <= set(RunRow.__dataclass_fields__)
