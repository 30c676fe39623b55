import errno
import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import safetensors.torch
import torch

from torchcaps.atomic import DamagedFile, read_bytes, sweep, write_atomically
from torchcaps.errors import UserError
from torchcaps.storage import KEY, _digest, read_tensors, write_tensors

TENSORS = {
    "a": torch.randn(3, 4),
    "b": torch.tensor(2.0),
    "c": torch.randn(5).bfloat16(),
    "d": torch.arange(7),
    "e": torch.tensor([True, False]),
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


def test_equal_contents_are_equal_files(tmp_path):
    for name in ("one", "two"):
        write_tensors(tmp_path / name, TENSORS, {"step": 3, "name": "γ"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


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


def crafted(encoded: str) -> str:
    """An envelope that fits its content, as somebody who knows the format would make it."""
    return json.dumps({"state": encoded, "sha256": _digest(TENSORS, encoded)})


@pytest.mark.parametrize(
    "envelope",
    [
        "",
        "nonsense",
        "3",
        "[]",
        "null",
        "{}",
        '{"state": "{}"}',
        '{"sha256": "0"}',
        '{"state": 5, "sha256": "0"}',
        '{"state": null, "sha256": null}',
        '{"state": ["{}"], "sha256": "0"}',
        '{"state": "\\ud800", "sha256": "0"}',
        "[" * 100_000,
        crafted("nonsense"),
        crafted("[]"),
        crafted("null"),
        crafted('"text"'),
        crafted("{" + '"a":{' * 50_000),
        crafted('{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"),
        crafted('{"a": ' + "9" * 10_000 + "}"),
    ],
    ids=lambda envelope: envelope[:24],
)
def test_a_file_with_any_other_description_is_told_as_damaged(tmp_path, envelope):
    path = tmp_path / "x.safetensors"
    held = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    path.write_bytes(safetensors.torch.save(held, {KEY: envelope}))
    with pytest.raises(DamagedFile, match="damaged"):
        read_tensors(path)


@pytest.mark.parametrize("metadata", [None, {"other": "{}"}])
def test_a_file_of_somebody_else_is_told_as_such(tmp_path, metadata):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors.torch.save({"a": torch.ones(2)}, metadata))
    with pytest.raises(DamagedFile, match="not one of torchcaps' files"):
        read_tensors(path)


def no_file(path: Any) -> None:
    pass


def a_folder(path: Any) -> None:
    path.mkdir()


def a_pipe(path: Any) -> None:
    os.mkfifo(path)


def a_device(path: Any) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "error"),
    [(no_file, FileNotFoundError), (a_folder, DamagedFile), (a_pipe, DamagedFile), (a_device, DamagedFile)],
)
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, make, error):
    make(tmp_path / "x")
    with pytest.raises(error):
        read_tensors(tmp_path / "x")
    with pytest.raises(error):
        read_bytes(tmp_path / "x", most=100)


def test_bytes_are_read_up_to_a_limit(tmp_path):
    write_atomically(tmp_path / "x", b"12345")
    assert read_bytes(tmp_path / "x", most=5) == b"12345"
    with pytest.raises(DamagedFile, match="too large: at most 4 bytes"):
        read_bytes(tmp_path / "x", most=4)


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


def test_no_link_is_followed_even_if_its_name_is_guessed(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    (tmp_path / ".guessed.part").symlink_to(elsewhere)
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "x", b"new")
    assert elsewhere.read_bytes() == b"precious"


def test_two_writers_of_one_file_do_not_finish_each_others_work(tmp_path):
    path = tmp_path / "x"
    contents = [bytes([number]) * 200_000 for number in range(4)]

    def write(content: bytes) -> None:
        for _ in range(30):
            write_atomically(path, content)
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, contents))
    assert os.listdir(tmp_path) == ["x"]


def test_what_an_interrupted_write_left_behind_is_swept_up(tmp_path):
    (tmp_path / ".x.part").write_bytes(b"half")
    sweep(tmp_path)
    assert os.listdir(tmp_path) == []
