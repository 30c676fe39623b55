"""Whole reproductions at the smoke budget, in processes of their own: done, killed, stopped, spread over Ray."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from commands import command_environment
from torchcaps.train.environment import usable_cores

SMOKE = ("--budget", "smoke", "--out", "out", "--threads", "1")


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torchcaps", "reproduce", *arguments]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=command_environment()
    )


def wait_for(pattern: str, folder: Path, process: subprocess.Popen[str]) -> Path:
    deadline = time.monotonic() + 120
    while not (found := list(folder.glob(pattern))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]


def error_of(folder: Path, cell: str) -> float:
    return json.loads((folder / "out/cells" / cell / "result.json").read_text())["test_error_percent"]


def test_a_cell_that_is_done_is_not_run_again(torchcaps, tmp_path):
    first = torchcaps("reproduce", "table", *SMOKE, "--only", "mnist/l2-fc")
    assert first.returncode == 0, first.stderr
    result = tmp_path / "out/cells/mnist/l2-fc/seed-0/result.json"
    written = result.stat().st_mtime_ns
    assert not (result.parent / "checkpoints").exists()  # a finished cell needs none
    second = torchcaps("reproduce", "convergence", *SMOKE, "--only", "mnist/l2-fc", "multi-mnist/uniform")
    assert second.returncode == 0, second.stderr
    assert "2 cells, of which 1 are done" in second.stdout
    assert "multi-mnist/uniform/seed-0: starts" in second.stdout
    assert "mnist/l2-fc/seed-0: starts" not in second.stdout
    assert result.stat().st_mtime_ns == written
    report = (tmp_path / "out/report.md").read_text()
    assert "mnist/l2-fc/seed-0" in report
    assert "multi-mnist/uniform/seed-0" in report
    assert (tmp_path / "out/pictures/convergence-multi-mnist.png").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_reproduction_goes_on_where_it_was(torchcaps, tmp_path, number):
    """Even if it is killed, what it had started stops by itself and leaves a checkpoint."""
    arguments = ("table", *SMOKE, "--only", "mnist/l2-fc", "mnist/dr")
    process = started(tmp_path, *arguments)
    wait_for("out/cells/mnist/*/seed-0/checkpoints/step-*.safetensors", tmp_path, process)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in told
    again = torchcaps("reproduce", *arguments)
    assert again.returncode == 0, again.stderr
    assert "mnist/dr/seed-0: goes on" in again.stdout
    assert "Continuing after step" in (tmp_path / "out/cells/mnist/dr/seed-0.log").read_text()
    whole = torchcaps("train", "--recipe", "out/cells/mnist/dr/seed-0.yaml", "--out", "whole", "--threads", 1)
    assert whole.returncode == 0, whole.stderr
    result = json.loads((tmp_path / "whole/result.json").read_text())
    assert error_of(tmp_path, "mnist/dr/seed-0") == result["test_error_percent"]


def test_everything_about_some_cells(torchcaps, tmp_path):
    """Reconstructions need cells of their own: without them there is a report all the same."""
    done = torchcaps("reproduce", "all", *SMOKE, "--only", "multi-mnist/l1")
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "out/report.md").read_text()
    assert "multi-mnist/l1/seed-0" in report
    measured = json.loads((tmp_path / "out/runtime.json").read_text())
    assert set(measured["seconds_per_100_steps"]) == {"dr", "l2", "l1", "l2-fc", "l1-fc", "uniform-fc"}
    assert "## Time per 100 steps" in report
    assert "## Reconstruction" not in report
    other = torchcaps("reproduce", "runtime", "--budget", "cpu", "--out", "out", "--threads", "1")
    assert other.returncode == 2
    assert "other settings" in other.stderr


def test_reconstruction(torchcaps, tmp_path):
    drawn = torchcaps("reproduce", "reconstruction", *SMOKE)
    assert drawn.returncode == 0, drawn.stderr
    numbers = json.loads((tmp_path / "out/reconstruction.json").read_text())
    assert 0 < numbers["images"] <= 100
    report = (tmp_path / "out/report.md").read_text()
    assert "pictures/reconstruction.png" in report


def test_cells_are_spread_over_a_local_ray_with_two_workers(torchcaps, tmp_path):
    done = torchcaps("reproduce", "table", *SMOKE, "--only", "cifar-10", "--ray", "local")
    assert done.returncode == 0, done.stderr
    for method in ("dr", "l2-fc", "l1-fc", "uniform-fc"):
        assert 0 <= error_of(tmp_path, f"cifar-10/{method}/seed-0") <= 100


@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_two_ray_workers_train_at_the_same_time(torchcaps, tmp_path):
    """Their runs overlap: each began before the other had ended."""
    done = torchcaps("reproduce", "table", *SMOKE, "--only", "mnist/dr", "mnist/l2-fc", "--ray", "local")
    assert done.returncode == 0, done.stderr
    spans = []
    for method in ("dr", "l2-fc"):
        folder = tmp_path / f"out/cells/mnist/{method}"
        spans.append(((folder / "seed-0/config.yaml").stat().st_mtime, (folder / "seed-0/result.json").stat().st_mtime))
    (start, end), (other_start, other_end) = spans
    assert start < other_end
    assert other_start < end


def test_a_cell_trains_on_several_devices(torchcaps, tmp_path):
    done = torchcaps("reproduce", "table", *SMOKE, "--only", "mnist/l2-fc", "--devices", 2)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out/cells/mnist/l2-fc/seed-0/result.json").read_text())
    assert result["processes"] == 2


def test_the_list_tells_how_to_train_a_cell_elsewhere(torchcaps, tmp_path):
    listed = torchcaps("reproduce", "table", *SMOKE, "--only", "mnist/l2-fc", "--list")
    assert listed.returncode == 0, listed.stderr
    name, _, command = listed.stdout.strip().partition(": torchcaps ")
    assert name == "mnist/l2-fc/seed-0"
    assert torchcaps(*command.split()).returncode == 0
    assert "% test error" in torchcaps("reproduce", "table", *SMOKE, "--only", "mnist/l2-fc", "--list").stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("table", *SMOKE, "--only", "imagenet"), "matches no cell"),
        (("table", "--budget", "smoke", "--out", "file", "--only", "mnist/dr"), "another --out"),
        (("table", *SMOKE, "--only", "mnist/dr", "--ray", "nowhere:1"), "Cannot reach Ray"),
        (
            ("table", *SMOKE, "--only", "mnist/dr", "--ray", "local", "--devices", "500"),
            "more than this Ray cluster has",
        ),
        (("table", *SMOKE, "--only", "mnist/dr", "--accelerator", "nonsense"), "1 of 1 cells could not be trained"),
    ],
)
def test_bad_input_is_told(torchcaps, tmp_path, arguments, words):
    (tmp_path / "file").write_text("here first")
    outcome = torchcaps("reproduce", *arguments)
    assert outcome.returncode == 2, outcome.stderr
    assert words in outcome.stderr
    assert "Traceback" not in outcome.stderr
