"""Numbers of the report against cells whose results are known."""

import pytest
from torchcaps.reproduce import figures
from torchcaps.reproduce.cells import all_cells
from torchcaps.reproduce.figures import Comparison
from torchcaps.reproduce.paper import BENCHMARKS
from torchcaps.reproduce.report import Report

from pretend import finish

MNIST = BENCHMARKS["mnist"]


@pytest.fixture
def cells(tmp_path):
    cells = [cell for cell in all_cells("cpu", tmp_path / "cells", seeds=3) if cell.benchmark is MNIST]
    errors = {"dr": (1.0, 1.2, 1.4), "l2-fc": (0.8, 1.1, 1.1), "uniform-fc": (0.8, 1.2, 1.0)}
    for cell in cells:
        if cell.method in errors:
            error = errors[cell.method][cell.seed]
            finish(cell, error, {10: 3.0 + cell.seed, 20: 1.9 + error - 1.0, 30: error})
    return cells


def test_mean_and_spread(cells):
    found = figures.columns(cells, MNIST)
    assert list(found) == ["dr", "l2-fc", "uniform-fc"]
    assert found["dr"].mean == pytest.approx(1.2)
    assert found["dr"].deviation == pytest.approx(0.2)


def test_methods_are_compared_seed_by_seed(cells):
    found = figures.columns(cells, MNIST)
    against_dr = Comparison(found["l2-fc"], found["dr"])
    assert against_dr.differences == pytest.approx([-0.2, -0.1, -0.3])
    assert against_dr.mean == pytest.approx(-0.2)
    counting = 1.96 * 100 * ((0.01 * 0.99 + 0.012 * 0.988) / 30_000) ** 0.5
    assert against_dr.interval == pytest.approx(4.303 * 0.1 / 3**0.5, rel=1e-3)  # Student's t with 2 degrees of freedom
    assert against_dr.interval > counting
    assert against_dr.verdict == "no difference can be seen"
    assert Comparison(found["l2-fc"], found["uniform-fc"]).verdict == "no difference can be seen"


def test_seeds_that_agree_by_chance_do_not_make_a_difference_certain(tmp_path):
    cells = [cell for cell in all_cells("cpu", tmp_path / "cells", seeds=2) if cell.benchmark is MNIST]
    for cell in cells:
        if cell.method in ("dr", "l2"):
            finish(cell, 1.0 if cell.method == "dr" else 1.1, {10: 1.0})
    found = figures.columns(cells, MNIST)
    assert Comparison(found["l2"], found["dr"]).verdict == "no difference can be seen"


def test_a_difference_beyond_its_interval_is_told(tmp_path):
    cells = [cell for cell in all_cells("cpu", tmp_path / "cells", seeds=3) if cell.benchmark is MNIST]
    for cell in cells:
        if cell.method in ("dr", "l2"):
            finish(cell, (2.0 if cell.method == "dr" else 1.0) + 0.05 * cell.seed, {10: 1.0})
    found = figures.columns(cells, MNIST)
    assert Comparison(found["l2"], found["dr"]).verdict == "better"
    assert Comparison(found["dr"], found["l2"]).verdict == "worse"


def test_one_seed_has_the_uncertainty_of_counting(cells):
    found = figures.columns([cell for cell in cells if cell.seed == 0], MNIST)
    comparison = Comparison(found["l2-fc"], found["dr"])
    assert comparison.interval == pytest.approx(1.96 * 100 * ((0.008 * 0.992 + 0.01 * 0.99) / 10_000) ** 0.5)
    assert comparison.verdict == "no difference can be seen"


def test_when_an_error_was_reached(cells):
    cell = next(cell for cell in cells if cell.name == "mnist/dr/seed-0")
    assert figures.first_reached(cell, 2.0) == (20, 2.0)
    assert figures.first_reached(cell, 0.5) is None


def test_the_report_says_what_the_cells_say(cells, tmp_path):
    report = Report(tmp_path, "cpu", cells)
    report.write()
    text = (tmp_path / "report.md").read_text()
    assert "1.20 ± 0.20 (n = 3)" in text
    assert "| MNIST | L2/FC against DR | -0.20 ± 0.25 | 3 | +0.01 | no difference can be seen |" in text
    assert "0.32 % aimed at, 1.00 % by L2/FC, the lowest of 3 means: missed by 0.68 points, after" in text
    assert "of the 3,168,000 that the paper's settings have" in text  # 99,000 steps of 32 images
    assert "against dynamic routing: 1 comparisons, 1 of them over several seeds, in which it is better 0 and" in text
    assert "lies within the interval measured here in 1 of 1 cases" in text
    assert "| DR | 17 (2 s) | 27 (3 s) |" in text  # 3 % at the steps 10, 20 and 20, 2 % at 20, 30 and 30
    for cell in cells:
        assert (cell.name in text) == cell.done
    for part in ("recipe", "metrics", "result"):
        assert f"[{part}](cells/mnist/dr/seed-0" in text


def test_the_page_needs_nothing_but_itself(cells, tmp_path):
    Report(tmp_path, "cpu", cells).write()
    page = (tmp_path / "report.html").read_text()
    assert 'src="data:image/png;base64,' in page
    assert 'src="pictures' not in page
    assert "http" not in page
    assert "<table>" in page
