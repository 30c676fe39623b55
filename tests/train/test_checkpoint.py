import pytest
import torch

from torchcaps.errors import UserError
from torchcaps.train.checkpoint import Checkpoints


def saved(tmp_path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in steps:
        checkpoints.save(step, {"x": torch.tensor(float(step))}, {"seconds": 1.5})
    return checkpoints


def test_the_newest_is_loaded_and_the_two_newest_are_kept(tmp_path):
    checkpoints = saved(tmp_path, 5, 10, 15)
    assert [path.name for path in checkpoints.paths()] == ["step-000000010.safetensors", "step-000000015.safetensors"]
    found = checkpoints.load_newest(pytest.fail)
    assert found == ({"x": torch.tensor(15.0)}, {"step": 15, "seconds": 1.5})


def test_a_damaged_one_is_passed_over_saying_so(tmp_path):
    checkpoints = saved(tmp_path, 5, 10)
    newest = checkpoints.paths()[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    said: list[str] = []
    found = checkpoints.load_newest(said.append)
    assert found is not None
    assert found[1]["step"] == 5
    assert len(said) == 1
    assert "step-000000010.safetensors is damaged" in said[0]


def test_if_all_are_damaged_the_run_cannot_be_resumed(tmp_path):
    checkpoints = saved(tmp_path, 5, 10)
    for path in checkpoints.paths():
        path.write_bytes(b"rubbish")
    with pytest.raises(UserError, match=r"No checkpoint .* is intact"):
        checkpoints.load_newest(lambda line: None)


def test_what_a_kill_left_half_written_is_swept_up(tmp_path):
    checkpoints = saved(tmp_path, 5)
    leftover = checkpoints.folder / ".step-000000007.safetensors.part"
    leftover.write_bytes(b"half")
    checkpoints.save(10, {"x": torch.zeros(1)}, {})
    assert not leftover.exists()


def test_a_run_without_checkpoints_starts_at_the_beginning(tmp_path):
    assert Checkpoints(tmp_path / "checkpoints").load_newest(pytest.fail) is None
