import errno
import os

import pytest
import torch

from torchcaps.errors import UserError
from torchcaps.storage import DamagedFile, read_tensors, write_atomically, write_tensors

TENSORS = {
    "a": torch.randn(3, 4),
    "b": torch.tensor(2.0),
    "c": torch.randn(5).bfloat16(),
    "d": torch.arange(7),
    "empty": torch.zeros(0),
    "view": torch.randn(4, 4).T,
}


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {"step": 3, "name": "γ"})
    tensors, state = read_tensors(path)
    assert state == {"step": 3, "name": "γ"}
    torch.testing.assert_close(tensors, TENSORS, rtol=0, atol=0)
    assert os.listdir(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.99])
def test_any_flipped_byte_is_detected(tmp_path, where):
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {"step": 3})
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile):
        read_tensors(path)


@pytest.mark.parametrize("length", [0, 5, 100, -1])
def test_a_short_file_is_detected(tmp_path, length):
    path = tmp_path / "x.safetensors"
    write_tensors(path, TENSORS, {"step": 3})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedFile):
        read_tensors(path)


def test_when_space_runs_out_the_old_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, b"old")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]
