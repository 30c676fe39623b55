import os
from pathlib import Path

import pytest

from torchcaps.atomic import sync_folder
from torchcaps.data.files import BadFile, open_regular, read_bytes, shown
from torchcaps.errors import UserError


def test_names_are_printable_and_tell_apart() -> None:
    assert shown("plain é 漢.png") == "plain é 漢.png"
    assert shown("a\nb\x1b[2J\x7f\u202e") == r"a\nb\x1b[2J\x7f\u202e"
    assert shown(Path(os.fsdecode(b"\xff\xfe"))) == r"\xff\xfe"
    assert shown("\ud800") == r"\ud800"
    shown("\ud800\udcff").encode()


def test_reading_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", 5) == b"12345"
    with pytest.raises(BadFile, match="has 5 bytes, the limit is 4"):
        read_bytes(tmp_path / "x", 4)
    if Path("/proc/self/maps").exists():  # a file that says it is empty, and is not
        with pytest.raises(BadFile, match="too large"):
            read_bytes(Path("/proc/self/maps"), 10)


def test_what_is_wrong_is_told_apart_from_the_name(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        open_regular(tmp_path / "no\nne")
    assert isinstance(error.value, BadFile)
    assert error.value.name == f"{tmp_path}/no\\nne"
    assert error.value.reason.startswith("does not exist")
    assert str(error.value) == f"{error.value.name} {error.value.reason}"
    with pytest.raises(BadFile, match="is a folder"):
        open_regular(tmp_path)


def test_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    sync_folder(tmp_path)
    assert synced == [tmp_path.stat().st_ino]
    sync_folder(tmp_path / "none")  # nothing to do, no error
