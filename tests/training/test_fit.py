"""Whole runs, in processes of their own: repeated, killed, interrupted, damaged, distributed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from commands import TINY_FLAGS, command_environment
from torchcaps import load
from torchcaps.cli.main import main
from torchcaps.storage import read_tensors

STEPS = 30
RUN = [*TINY_FLAGS, "--steps", STEPS, "--log-every", 4, "--checkpoint-every", 6, "--average", 0.9]
RUN += ["--ascent", "adam", "--gamma", 1e-3, "--backward-noise", 0.2]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load(folder).state_dict()


def learned(folder: Path) -> list[dict[str, str]]:
    """The rows of the metrics without what depends on the clock."""
    with (folder / "metrics.csv").open() as file:
        clock = ("seconds", "images_per_second")
        return [{name: value for name, value in row.items() if name not in clock} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    command = [sys.executable, "-P", "-m", "torchcaps", "train", *map(str, RUN), "--pictures", "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True, env=command_environment())
    return folder


def start(folder: Path, *more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "torchcaps", "train", *map(str, RUN), "--out", str(folder), *map(str, more)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=command_environment()
    )


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def test_the_run_folder_has_everything(undisturbed):
    names = {path.name for path in undisturbed.iterdir()}
    assert names == {
        *("config.yaml", "metrics.csv", "result.json", "model.safetensors", "checkpoints"),
        *("curves.png", "confusion.png", "reconstructions.png", "coefficients.png"),
    }
    result = json.loads((undisturbed / "result.json").read_text())
    assert result["steps"] == STEPS
    assert result["data"] == "digits"
    assert result["routing"] == "l2"
    assert 0 <= result["test_error_percent"] <= 100
    for name in ("train_images_per_second", "evaluate_images_per_second", "parameters", "peak_memory_mb", "seconds"):
        assert result[name] > 0, name
    assert set(result["versions"]) >= {"python", "torch", "torchcaps"}
    assert "commit" in result
    steps = [int(row["step"]) for row in learned(undisturbed)]
    assert steps == [4, 8, 12, 16, 20, 24, 28, 30]
    assert learned(undisturbed)[-1]["evaluation_error"]


def test_the_same_seed_gives_the_same_bits(undisturbed, torchcaps, tmp_path):
    assert torchcaps("train", *RUN, "--out", "again").returncode == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert learned(tmp_path / "again") == learned(undisturbed)


def test_another_seed_gives_other_weights(undisturbed, torchcaps, tmp_path):
    assert torchcaps("train", *RUN, "--seed", 1, "--out", "other").returncode == 0
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (undisturbed / "model.safetensors").read_bytes()


@pytest.mark.parametrize("checkpoint", [6, 18])
def test_killed_and_resumed_is_bit_identical_to_undisturbed(undisturbed, torchcaps, tmp_path, checkpoint):
    folder = tmp_path / "killed"
    process = start(folder)
    wait_for(folder / "checkpoints" / f"step-{checkpoint:09d}.safetensors", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (folder / "result.json").exists()
    resumed = torchcaps("train", "--resume", folder)
    assert resumed.returncode == 0, resumed.stderr
    assert "Continuing after step" in resumed.stdout
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert learned(folder) == learned(undisturbed)


def test_killed_before_the_first_checkpoint_starts_again_from_the_beginning(undisturbed, tmp_path):
    folder = tmp_path / "killed"
    process = start(folder)
    wait_for(folder / "config.yaml", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert main(["train", "--resume", str(folder)]) == 0
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_saves_says_how_to_resume_and_loses_nothing(undisturbed, tmp_path, number):
    folder = tmp_path / "stopped"
    process = start(folder)
    wait_for(folder / "metrics.csv", process)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert f"torchcaps train --resume {folder}" in errors
    assert "Traceback" not in errors
    assert list((folder / "checkpoints").glob("*.safetensors"))
    assert main(["train", "--resume", str(folder)]) == 0
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert learned(folder) == learned(undisturbed)


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_used(undisturbed, torchcaps, tmp_path):
    folder = tmp_path / "damaged"
    process = start(folder)
    wait_for(folder / "checkpoints" / "step-000000012.safetensors", process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    newest = sorted((folder / "checkpoints").glob("*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    content[-1000] ^= 0x10
    newest.write_bytes(content)
    resumed = torchcaps("train", "--resume", folder)
    assert resumed.returncode == 0
    assert "is damaged" in resumed.stdout
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_finished_run_is_not_run_again(undisturbed, torchcaps):
    before = (undisturbed / "result.json").stat().st_mtime_ns
    resumed = torchcaps("train", "--resume", undisturbed)
    assert resumed.returncode == 0
    assert "is finished" in resumed.stdout
    assert (undisturbed / "result.json").stat().st_mtime_ns == before


def test_numbers_that_are_not_finite_stop_the_run_and_leave_the_last_good_checkpoint(torchcaps, tmp_path):
    flags = [*TINY_FLAGS, "--steps", 60, "--checkpoint-every", 2, "--gamma", 1e6, "--start", 1e6, "--log-every", 5]
    flags += ["--constraint", "none"]  # or no step could be too large
    stopped = torchcaps("train", *flags, "--out", "run")
    assert stopped.returncode == 2
    assert "not finite" in stopped.stderr
    assert "step" in stopped.stderr
    assert "gamma" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert not (tmp_path / "run" / "result.json").exists()
    for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors"):
        tensors, _ = read_tensors(path)
        assert all(tensor.isfinite().all() for name, tensor in tensors.items() if name.startswith("network"))


@pytest.mark.parametrize("alternation", ["fused", "strict"])
def test_two_processes_follow_the_trajectory_of_one(torchcaps, tmp_path, alternation):
    flags = [*TINY_FLAGS, "--steps", 12, "--gamma", 0.01, "--alternation", alternation, "--optimizer", "adam"]
    assert torchcaps("train", *flags, "--out", "one").returncode == 0
    two = torchcaps("train", *flags, "--devices", 2, "--accelerator", "cpu", "--out", "two")
    assert two.returncode == 0, two.stderr
    assert json.loads((tmp_path / "two" / "result.json").read_text())["processes"] == 2
    one_weights, two_weights = weights(tmp_path / "one"), weights(tmp_path / "two")
    torch.testing.assert_close(two_weights, one_weights, rtol=1e-3, atol=2e-5)
    moved = (one_weights["layers.0.routing.coefficients"] - 1).abs().max()
    apart = (one_weights["layers.0.routing.coefficients"] - two_weights["layers.0.routing.coefficients"]).abs().max()
    assert apart < 1e-2 * moved  # the coefficients saw the global batch


def test_torchrun_starts_two_processes_too(tmp_path):
    flags = [*TINY_FLAGS, "--steps", 6, "--accelerator", "cpu", "--out", "run"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "torchcaps", "train", *map(str, flags)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env=command_environment() | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["processes"] == 2


def test_two_processes_resume_where_they_stopped(torchcaps, tmp_path):
    flags = ["--devices", 2, "--accelerator", "cpu"]
    process = start(tmp_path / "run", *flags)
    wait_for(tmp_path / "run" / "checkpoints" / "step-000000012.safetensors", process)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate()
    resumed = torchcaps("train", "--resume", tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    assert torchcaps("train", *RUN, *flags, "--out", "whole").returncode == 0
    torch.testing.assert_close(weights(tmp_path / "run"), weights(tmp_path / "whole"), rtol=0, atol=0)
    steps = json.loads((tmp_path / "run" / "result.json").read_text())["steps"]
    assert torchcaps("train", "--resume", tmp_path / "run", "--steps", steps + 2, *flags).returncode == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == steps + 2


BACKBONE = """
import os
import torch
from torch import nn


class Apart(nn.Conv2d):
    def __init__(self):
        super().__init__(1, 8, 5, stride=4)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, images):
        if self.training:  # as running means do, it comes out differently in each process
            self.scale.fill_(1 - int(os.environ.get("LOCAL_RANK", 0)))
        return super().forward(images) * self.scale
"""


def test_two_processes_judge_the_network_that_is_saved(torchcaps, tmp_path):
    """Each of them has running means of its own until its next step, and those of the first are saved."""
    (tmp_path / "own.py").write_text(BACKBONE)
    flags = ["--backbone", "own:Apart", "--threads", 1]
    more = ["--data", "multi-digits", "--test-images", 1200, "--steps", 15, "--batch-size", 32]  # a batch for each
    more += ["--primary-capsules", 4, "--no-pictures", "--no-reconstruction"]
    done = torchcaps("train", *flags, *more, "--devices", 2, "--accelerator", "cpu", "--out", "run")
    assert done.returncode == 0, done.stderr
    expected = json.loads((tmp_path / "run" / "result.json").read_text())["test_error_percent"]
    evaluated = torchcaps("evaluate", "run", "--json", *flags)
    assert json.loads(evaluated.stdout)["error_percent"] == pytest.approx(expected)


def test_low_precision_and_no_reconstruction(torchcaps, tmp_path):
    flags = [*TINY_FLAGS, "--pictures", "--steps", 4, "--precision", "bf16-mixed", "--no-reconstruction"]
    finished = torchcaps("train", *flags, "--routing", "dynamic", "--out", "run")
    assert finished.returncode == 0, finished.stderr
    assert not (tmp_path / "run" / "reconstructions.png").exists()


def test_double_precision_trains_too(torchcaps, tmp_path):
    finished = torchcaps("train", *TINY_FLAGS, "--steps", 2, "--precision", "64-true", "--out", "run")
    assert finished.returncode == 0, finished.stderr


def test_a_kill_while_the_first_row_is_written_does_no_harm(torchcaps, tmp_path):
    flags = [*TINY_FLAGS, "--steps", 2, "--out", "run"]
    assert torchcaps("train", *flags).returncode == 0
    for name in ("result.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / "metrics.csv").write_text("step,epo")
    resumed = torchcaps("train", "--resume", "run")
    assert resumed.returncode == 0, resumed.stderr


def test_a_validation_split_is_evaluated_on_instead_of_the_test_set(torchcaps, tmp_path):
    assert torchcaps("train", *TINY_FLAGS, "--steps", 4, "--validation", 100, "--out", "run").returncode == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["validation_error_percent"] == float(learned(tmp_path / "run")[-1]["evaluation_error"])
    assert result["test_images"] == 360
