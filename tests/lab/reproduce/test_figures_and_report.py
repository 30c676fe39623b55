"""Numbers of the report against runs whose results are known."""

import base64
import dataclasses
import json
import shutil

import pytest
from pretend import finish, keep

from torchcaps.errors import UserError
from torchcaps.lab.reproduce import figures
from torchcaps.lab.reproduce.cells import all_cells
from torchcaps.lab.reproduce.figures import Comparison
from torchcaps.lab.reproduce.paper import BENCHMARKS
from torchcaps.lab.reproduce.report import Report, rebuild
from torchcaps.lab.results import Results

MNIST = BENCHMARKS["mnist"]


def mnist_cells(root, seeds):
    return [cell for cell in all_cells("cpu", root / "cells", seeds=seeds) if cell.benchmark is MNIST]


@pytest.fixture
def cells(tmp_path):
    cells = mnist_cells(tmp_path, 3)
    errors = {"dr": (1.0, 1.2, 1.4), "l2-fc": (0.8, 1.1, 1.1), "uniform-fc": (0.8, 1.2, 1.0)}
    for cell in cells:
        if cell.method in errors:
            error = errors[cell.method][cell.seed]
            finish(cell, error, {10: 3.0 + cell.seed, 20: 1.9 + error - 1.0, 30: error})
    return cells


@pytest.fixture
def found(cells):
    return figures.columns(keep(cells), MNIST)


def test_mean_and_spread(found):
    assert list(found) == ["dr", "l2-fc", "uniform-fc"]
    assert found["dr"].mean == pytest.approx(1.2)
    assert found["dr"].deviation == pytest.approx(0.2)


def test_methods_are_compared_seed_by_seed(found):
    against_dr = Comparison(found["l2-fc"], found["dr"])
    assert against_dr.differences == pytest.approx([-0.2, -0.1, -0.3])
    assert against_dr.mean == pytest.approx(-0.2)
    counting = 1.96 * 100 * ((0.01 * 0.99 + 0.012 * 0.988) / 30_000) ** 0.5
    assert against_dr.interval == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)  # Student's t with 2 degrees of freedom
    assert against_dr.interval > counting
    assert against_dr.verdict == "no difference can be seen"
    assert Comparison(found["l2-fc"], found["uniform-fc"]).verdict == "no difference can be seen"


def test_seeds_that_agree_by_chance_do_not_make_a_difference_certain(tmp_path):
    cells = mnist_cells(tmp_path, 2)
    for cell in cells:
        if cell.method in ("dr", "l2"):
            finish(cell, 1.0 if cell.method == "dr" else 1.1, {10: 1.0})
    found = figures.columns(keep(cells), MNIST)
    assert Comparison(found["l2"], found["dr"]).verdict == "no difference can be seen"


def test_a_difference_beyond_its_interval_is_told(tmp_path):
    cells = mnist_cells(tmp_path, 3)
    for cell in cells:
        if cell.method in ("dr", "l2"):
            finish(cell, (2.0 if cell.method == "dr" else 1.0) + 0.05 * cell.seed, {10: 1.0})
    found = figures.columns(keep(cells), MNIST)
    assert Comparison(found["l2"], found["dr"]).verdict == "better"
    assert Comparison(found["dr"], found["l2"]).verdict == "worse"


def test_one_seed_has_the_uncertainty_of_counting(cells):
    for cell in cells:
        if cell.seed:
            shutil.rmtree(cell.folder.path, ignore_errors=True)
    found = figures.columns(keep(cells), MNIST)
    comparison = Comparison(found["l2-fc"], found["dr"])
    assert comparison.interval == pytest.approx(1.96 * 100 * ((0.008 * 0.992 + 0.01 * 0.99) / 10_000) ** 0.5)
    assert comparison.verdict == "no difference can be seen"


def test_when_an_error_was_reached(found):
    curve = found["dr"].curves[0]
    assert figures.first_reached(curve, 2.0) == (20, 2.0)
    assert figures.first_reached(curve, 0.5) is None


def test_seconds_come_from_one_version_of_the_code(found):
    """Older, slower code would make a method look slow."""
    assert figures.timed(found) == found
    dr = found["dr"]
    older = dataclasses.replace(dr, runs=(dr.runs[0].replace(commit="an-older-one"), *dr.runs[1:]))
    assert figures.timed({**found, "dr": older})["dr"].curves == dr.curves[1:]
    others = dataclasses.replace(dr, runs=tuple(run.replace(processor="another") for run in dr.runs))
    assert list(figures.timed({**found, "dr": others})) == ["l2-fc", "uniform-fc"]


def test_the_report_says_what_the_runs_say(cells, tmp_path):
    keep(cells)
    Report(tmp_path).write()
    text = (tmp_path / "report.md").read_text()
    assert "1.20 ± 0.20 (n = 3)" in text
    assert "| MNIST | L2/FC against DR | -0.20 ± 0.25 | 3 | +0.01 | no difference can be seen |" in text
    assert "0.32 % aimed at, 1.00 % by L2/FC, the lowest of 3 means: 0.68 points above it, after" in text
    assert "of the 3,168,000 that the paper's settings have" in text  # 99,000 steps of 32 images
    assert "against dynamic routing: it is better 0 and worse 0 times (comparisons over several seeds: 1)" in text
    assert "lies within the interval measured here in 1 of 1 cases" in text
    assert "| DR | 17 (2 s) | 27 (3 s) |" in text  # 3 % at the steps 10, 20 and 20, 2 % at 20, 30 and 30
    assert "`optimiser.schedule` staircase → " in text
    assert "iews averaged" not in text
    for cell in cells:
        assert (cell.name in text) == cell.done
    for file in ("results.csv", "curves.csv.gz"):
        assert f"]({file})" in text


def test_a_single_method_is_compared_with_nothing(tmp_path):
    cells = mnist_cells(tmp_path, 1)
    for cell in cells:
        if cell.method == "l2":
            finish(cell, 1.0, {10: 1.0})
    keep(cells)
    Report(tmp_path).write()
    text = (tmp_path / "report.md").read_text()
    assert "Nothing yet: no method has run beside" in text
    assert "0 comparisons" not in text


def test_errors_with_views_averaged_have_a_line_of_their_own(cells, tmp_path):
    results = keep(cells)
    for row in list(results.rows.values()):
        if row.method == "dr":
            results.add(row.replace(views_error_percent=row.test_error_percent - 0.5), results.curves[row.key])
    results.write(tmp_path)
    Report(tmp_path).write()
    text = (tmp_path / "report.md").read_text()
    assert "|  | here, views averaged | 0.70 | – | – |" in text
    assert "Views averaged: each test image" in text


def test_the_report_is_made_anew_from_its_files_alone(cells, tmp_path):
    """Without the runs, in another place: the same bytes."""
    keep(cells)
    seconds = {"dr": 20.0, "l2": 10.0}
    runtime = {"budget": "cpu", "cpu": "pocket calculator", "threads": 1, "torch": "2", "batch_size": 8, "rounds": 1}
    spread = {"spread_percent": {"dr": 1.0, "l2": 2.0}}
    (tmp_path / "runtime.json").write_text(json.dumps({**runtime, **spread, "seconds_per_100_steps": seconds}))
    Report(tmp_path).write()
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("results.csv", "curves.csv.gz", "runtime.json"):
        shutil.copy(tmp_path / name, moved)
    assert rebuild(moved) == moved / "report.md"
    for name in ("report.md", "report.html", "pictures/convergence-mnist.png", "pictures/runtime.png"):
        assert (moved / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_settings_under_older_names_are_told_as_they_were(cells, tmp_path):
    results = keep(cells)
    for row in list(results.rows.values()):
        results.add(row.replace(settings={"schedule": "cosine", "log_every": 7}), results.curves[row.key])
    results.write(tmp_path)
    text = rebuild(tmp_path).read_text()
    assert "MNIST, DR, L2/FC, uniform/FC: `schedule` cosine\n" in text


def test_a_folder_without_the_papers_runs_is_told(tmp_path):
    with pytest.raises(UserError, match=r"no .*results\.csv"):
        rebuild(tmp_path)
    Results().write(tmp_path)
    with pytest.raises(UserError, match="no runs of the paper's table"):
        rebuild(tmp_path)


def test_results_of_strangers_bring_neither_scripts_nor_files_into_the_page(cells, tmp_path):
    results = keep(cells)
    (tmp_path / "secret.txt").write_text("secret")
    trap = '<script>alert(1)</script><img src="pictures/../secret.txt">![x](pictures/../secret.txt)'
    for row in list(results.rows.values()):
        results.add(row.replace(processor=trap, versions={}), results.curves[row.key])
    results.write(tmp_path)
    rebuild(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert base64.b64encode(b"secret").decode() not in page


@pytest.mark.parametrize("seconds", [{}, {"l2": 1.0}, {"dr": 0.0}, [1], {"dr": 1.0, "other": 1.0}])
def test_a_damaged_measurement_is_told(cells, tmp_path, seconds):
    keep(cells)
    runtime = {"budget": "cpu", "cpu": "?", "threads": 1, "torch": "2", "batch_size": 8, "rounds": 1}
    spread = {"spread_percent": {"dr": 1.0, "l2": 2.0}}
    (tmp_path / "runtime.json").write_text(json.dumps({**runtime, **spread, "seconds_per_100_steps": seconds}))
    with pytest.raises(UserError, match=r"runtime\.json is damaged"):
        Report(tmp_path).write()


def test_the_page_needs_nothing_but_itself(cells, tmp_path):
    keep(cells)
    Report(tmp_path).write()
    page = (tmp_path / "report.html").read_text()
    assert 'src="data:image/png;base64,' in page
    assert 'src="pictures' not in page
    assert "http" not in page
    assert "<table>" in page
