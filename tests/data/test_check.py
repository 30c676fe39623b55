from pathlib import Path

import pytest
from data_examples import picture_folder
from PIL import Image

from torchcaps.data.check import CheckReport, check_data, draw_contact_sheet, label_font
from torchcaps.data.config import DataConfig
from torchcaps.errors import UserError


def check(folder: Path) -> CheckReport:
    return check_data(DataConfig(name=f"folder:{folder}"))


def test_nothing_wrong(tmp_path: Path) -> None:
    picture_folder(tmp_path, {"a": 12, "b": 10})
    report = check(tmp_path)
    assert report.class_counts == {"train": (12, 10)}
    assert report.files is not None
    assert report.files.modes == {"RGB": 22}
    assert report.files.median == (12, 9)
    assert not report.problems
    assert str(report).splitlines()[2].split() == ["a", "12"]


def test_everything_wrong(tmp_path: Path) -> None:
    picture_folder(tmp_path / "train", {"a": 12, "b": 9})
    picture_folder(tmp_path / "test", {"a": 2, "b": 0})
    with Image.open(tmp_path / "train" / "a" / "003.png") as image:
        image.save(tmp_path / "train" / "a" / "again.bmp")
        image.resize((9, 12)).save(tmp_path / "train" / "a" / "other-shape.png")
    (tmp_path / "train" / "a" / "broken.png").write_text("x")
    (tmp_path / "train" / "a" / "notes.txt").write_text("x")
    report = check(tmp_path)
    assert report.small_classes == ("b",)
    assert report.leaks == (("train/a/000.png", "test/a/000.png"), ("train/a/001.png", "test/a/001.png"))
    assert report.duplicates == (("train/a/003.png", "train/a/again.bmp"),)
    assert [file.name for file in report.bad] == [str(tmp_path / "train" / "a" / "broken.png")]
    assert report.class_counts == {"train": (14, 9), "test": (2, 0)}
    assert report.problems
    text = str(report)
    for line in (
        "fewer than 10 images of 1 class: b",
        "2 images in several splits",
        "train/a/003.png = train/a/again.bmp",
        "unreadable  1 file",
        "1 file: 1 .txt",
    ):
        assert line in text


def test_nothing_readable(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_text("x")
    report = check(tmp_path)
    assert report.files is None
    assert len(report.bad) == 2
    assert "2 files" in str(report)
    with pytest.raises(UserError, match="no image that can be read"):
        draw_contact_sheet(DataConfig(name=f"folder:{tmp_path}"), tmp_path / "sheet.png")


def test_only_for_image_files() -> None:
    for name in ("digits", "folder:", "npz:x.npz"):
        with pytest.raises(UserError, match="folder:PATH or csv:FILE"):
            check_data(DataConfig(name=name))


def test_contact_sheet(tmp_path: Path) -> None:
    picture_folder(tmp_path / "images", {"a": 12, "b\udcff é": 3})
    (tmp_path / "images" / "a" / "000.png").write_text("broken")
    draw_contact_sheet(DataConfig(name=f"folder:{tmp_path / 'images'}"), tmp_path / "sheet.png", columns=5, side=24)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (160 + 5 * 28 + 4, 2 * 28 + 4)
        assert sheet.getpixel((160 + 12, 4 + 12)) == (0, 1, 99)  # the first that can be read
        assert sheet.getpixel((160 + 2 * 28 + 12, 32 + 12)) == (50, 2, 99)
        assert sheet.getpixel((160 + 3 * 28 + 12, 32 + 12)) == (255, 255, 255)
        assert len(set(sheet.crop((0, 0, 150, 60)).get_flattened_data())) > 1  # the names


def test_the_labels_of_a_sheet_have_letters_of_many_languages():
    def drawn(letter):
        mask = label_font().getmask(letter)
        return mask.size, bytes(mask)

    unknown = drawn("\uffff")
    assert all(drawn(letter) != unknown for letter in "ößçšДλא")
