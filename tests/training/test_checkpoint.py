import os

import pytest
import torch

from torchcaps.atomic import DamagedFile
from torchcaps.errors import UserError
from torchcaps.training.checkpoint import Checkpoints, changes
from torchcaps.training.config import TrainingConfig

SETTINGS = {"run.seed": 0, "ascent.gamma": 0.1}


def saved(tmp_path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in steps:
        checkpoints.save(step, {"x": torch.tensor(float(step))}, {"seconds": 1.5, "settings": SETTINGS})
    return checkpoints


def test_the_newest_is_loaded_and_the_two_newest_are_kept(tmp_path):
    checkpoints = saved(tmp_path, 5, 10, 15)
    assert [path.name for path in checkpoints.paths()] == ["step-000000010.safetensors", "step-000000015.safetensors"]
    found = checkpoints.load_newest(SETTINGS, pytest.fail)
    assert found == ({"x": torch.tensor(15.0)}, {"step": 15, "seconds": 1.5, "settings": SETTINGS})


def test_a_damaged_one_is_passed_over_saying_so(tmp_path):
    checkpoints = saved(tmp_path, 5, 10)
    newest = checkpoints.paths()[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    said: list[str] = []
    found = checkpoints.load_newest(SETTINGS, said.append)
    assert found is not None
    assert found[1]["step"] == 5
    assert len(said) == 1
    assert "step-000000010.safetensors is damaged" in said[0]


def test_if_all_are_damaged_the_run_cannot_be_resumed(tmp_path):
    checkpoints = saved(tmp_path, 5, 10)
    for path in checkpoints.paths():
        path.write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"No checkpoint .* is intact"):
        checkpoints.load_newest(SETTINGS, lambda line: None)


def test_what_a_kill_left_half_written_is_swept_up(tmp_path):
    checkpoints = saved(tmp_path, 5)
    leftover = checkpoints.folder / ".step-000000007.safetensors.part"
    leftover.write_bytes(b"half")
    checkpoints.save(10, {"x": torch.zeros(1)}, {})
    assert not leftover.exists()


def test_a_run_without_checkpoints_starts_at_the_beginning(tmp_path):
    assert Checkpoints(tmp_path / "checkpoints").load_newest(SETTINGS, pytest.fail) is None


def test_other_settings_than_those_it_was_made_with_are_refused_by_name(tmp_path):
    checkpoints = saved(tmp_path, 5)
    with pytest.raises(UserError, match=r"ascent\.gamma was 0\.1, is 0\.2"):
        checkpoints.load_newest({**SETTINGS, "ascent.gamma": 0.2}, pytest.fail)
    assert len(checkpoints.paths()) == 1


def test_a_checkpoint_that_does_not_say_its_settings_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(5, {"x": torch.zeros(1)}, {})
    said: list[str] = []
    with pytest.raises(UserError, match="is intact"):
        checkpoints.load_newest(SETTINGS, said.append)
    assert "which settings" in said[0]


def test_one_of_another_run_is_passed_over_if_there_is_one_of_this(tmp_path):
    checkpoints = saved(tmp_path, 5)
    checkpoints.save(10, {"x": torch.zeros(1)}, {"settings": {**SETTINGS, "run.seed": 1}})
    said: list[str] = []
    found = checkpoints.load_newest(SETTINGS, said.append)
    assert found is not None
    assert found[1]["step"] == 5
    assert "belongs to another run" in said[0]
    assert [path.name for path in checkpoints.paths()] == ["step-000000005.safetensors"]


def test_one_that_cannot_be_used_is_passed_over(tmp_path):
    checkpoints = saved(tmp_path, 5, 10)

    def use(tensors, state):
        if state["step"] == 10:
            raise DamagedFile("It does not fit.")

    found = checkpoints.load_newest(SETTINGS, lambda line: None, use)
    assert found is not None
    assert found[1]["step"] == 5


@pytest.mark.parametrize("kind", ["dangling link", "fifo", "folder"])
def test_what_is_no_checkpoint_is_passed_over(tmp_path, kind):
    checkpoints = saved(tmp_path, 5)
    path = checkpoints.folder / "step-000000010.safetensors"
    if kind == "dangling link":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    found = checkpoints.load_newest(SETTINGS, lambda line: None)
    assert found is not None
    assert found[1]["step"] == 5


def test_a_setting_that_came_later_was_as_it_is_by_default():
    now = TrainingConfig().determining()
    before = {name: value for name, value in now.items() if name != "optimiser.backward_noise"}
    assert changes(before, now) == ""
    assert changes(before, now | {"optimiser.backward_noise": 0.5}) == "optimiser.backward_noise was 0.0, is 0.5"
    assert "run.seed" in changes(before, now | {"run.seed": 7})
    assert "model.gone" in changes(before | {"model.gone": 1}, now)
