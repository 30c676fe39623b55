"""Your own images: "folder:PATH" and "csv:FILE" from the files to a data set."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from data_examples import picture_folder
from PIL import Image

from torchcaps.data import pictures
from torchcaps.data.config import DataConfig
from torchcaps.data.datasets import DataSet, load
from torchcaps.data.images import ImageFacts
from torchcaps.data.pictures import usual_side
from torchcaps.data.report import FileReport
from torchcaps.data.splits import ImageSplit, MultiLabelSplit
from torchcaps.errors import UserError
from torchcaps.settings import SettingError


class TestFolder:
    def test_options(self, tmp_path: Path) -> None:
        name = f"folder:{picture_folder(tmp_path / 'x', {'a': 5, 'b': 5})}"
        assert load(name).image_shape == (3, 20, 20)
        assert load(name, image_size=20, channels=1, fit="pad").image_shape == (1, 20, 20)
        grey = f"folder:{picture_folder(tmp_path / 'y', {'a': 5, 'b': 5}, colour=False)}"
        assert load(grey).image_shape == (1, 20, 20)
        for wish in ({"channels": 2}, {"image_size": 0}, {"fit": "tight"}):
            with pytest.raises(UserError):
                load(name, **wish)
        with pytest.raises(UserError, match="which folder"):
            load("folder:")

    def test_a_fifth_of_each_class_is_for_testing(self, tmp_path: Path) -> None:
        name = f"folder:{picture_folder(tmp_path / 'x', {'a': 20, 'b': 10, 'c': 2})}"
        data = load(name)
        assert isinstance(data.train, ImageSplit)
        assert isinstance(data.test, ImageSplit)
        assert torch.bincount(data.test.labels).tolist() == [4, 2, 1]
        assert torch.bincount(data.train.labels).tolist() == [16, 8, 1]
        again = load(name)
        assert isinstance(again.test, ImageSplit)
        assert torch.equal(again.test.pixels, data.test.pixels)

    def test_own_split(self, tmp_path: Path) -> None:
        picture_folder(tmp_path / "train", {"a": 4, "b": 4})
        picture_folder(tmp_path / "test", {"a": 1, "b": 2}, colour=False)
        data = load(f"folder:{tmp_path}")
        assert (len(data.train), len(data.test), data.classes) == (8, 3, ("a", "b"))
        assert data.test.image_shape == data.train.image_shape == (3, 20, 20)

    def test_class_mismatch(self, tmp_path: Path) -> None:
        picture_folder(tmp_path / "train", {"a": 2, "b": 2})
        picture_folder(tmp_path / "test", {"a": 1, "c": 2})
        with pytest.raises(UserError, match="test lacks b; train lacks c"):
            load(f"folder:{tmp_path}")

    def test_a_single_image_is_for_training(self, tmp_path: Path) -> None:
        picture_folder(tmp_path, {"a": 5, "b": 1})
        data = load(f"folder:{tmp_path}")
        assert data.report.class_counts == {"train": (4, 1), "test": (1, 0)}
        assert data.report.untested == ("b",)
        assert "no test image of 1 class: b" in str(data.report)

    def test_single_images_only(self, tmp_path: Path) -> None:
        picture_folder(tmp_path, {"a": 1, "b": 1})
        with pytest.raises(UserError, match="no image to test with"):
            load(f"folder:{tmp_path}")

    def test_the_held_out_fifth_depends_on_names_not_on_order_or_place(self, tmp_path: Path) -> None:
        def tested(folder: Path) -> set[int]:
            test = load(f"folder:{folder}").test
            assert isinstance(test, ImageSplit)
            return set(test.pixels[:, 1, 0, 0].tolist())  # the green of an image is its number

        first = picture_folder(tmp_path / "one", {"a": 40, "b": 40})
        second = picture_folder(tmp_path / "two" / "deep", {"a": 40, "b": 40})
        assert tested(first) == tested(second)
        (first / "a" / "000.png").rename(first / "a" / "zzz.png")  # only this one's place is drawn anew
        assert len(tested(first) ^ tested(second)) <= 3

    def test_own_validation(self, tmp_path: Path) -> None:
        for split, count in (("train", 5), ("val", 3), ("test", 2)):
            picture_folder(tmp_path / split, {"a": count, "b": count})
        data = load(f"folder:{tmp_path}")
        assert data.validation is not None
        assert (len(data.train), len(data.validation), len(data.test)) == (10, 6, 4)
        with pytest.raises(SettingError, match="brings its own"):
            load(f"folder:{tmp_path}", validation=2)
        for path in (tmp_path / "val").rglob("*.png"):
            path.write_text("broken")
        with pytest.raises(UserError, match="no readable image to validate with"):
            load(f"folder:{tmp_path}", skip_unreadable=True)

    def test_unreadable_files_in_one_error(self, tmp_path: Path) -> None:
        picture_folder(tmp_path, {"a": 30, "b": 10})
        for number in range(25):
            (tmp_path / "a" / f"{number:03}.png").write_text("broken")
        (tmp_path / "b" / "bad\x1b.jpg").write_bytes(b"\xff\xd8\xff not really")
        with pytest.raises(UserError) as error:
            load(f"folder:{tmp_path}")
        message = str(error.value)
        assert "26 image files cannot be read" in message
        assert message.count("000.png") == 1
        assert message.count("none of PNG") == 20
        assert "... and 6 more" in message
        assert "--skip-unreadable" in message
        assert "\x1b" not in message

        data = load(f"folder:{tmp_path}", skip_unreadable=True)
        assert len(data.train) + len(data.test) == 15
        assert data.report.class_counts["test"] == (1, 2)
        assert data.files is not None
        assert len(data.files.bad) == 26
        assert "26 files" in str(data.report)

    def test_unreadable_files_of_all_splits_in_one_error(self, tmp_path: Path) -> None:
        for split in ("train", "test"):
            picture_folder(tmp_path / split, {"a": 2, "b": 2})
            (tmp_path / split / "a" / "000.png").write_text("broken")
        with pytest.raises(UserError, match=r"(?s)2 image files.*train.*test"):
            load(f"folder:{tmp_path}")

    def test_training_folders_that_must_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for split in ("train", "test"):
            picture_folder(tmp_path / split, {"a": 2, "b": 2})
        entries = os.listdir

        def refusing(folder: Path) -> list[str]:
            if Path(folder).parent == tmp_path / "train":
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return entries(folder)

        monkeypatch.setattr(os, "listdir", refusing)
        with pytest.raises(UserError, match=r"(?s)2 image files.*Permission denied"):
            load(f"folder:{tmp_path}")
        with pytest.raises(UserError, match="no training image that can be read of a, b"):
            load(f"folder:{tmp_path}", skip_unreadable=True)

    def test_class_of_unreadable_files_only(self, tmp_path: Path) -> None:
        picture_folder(tmp_path, {"a": 5, "b": 2})
        for path in (tmp_path / "b").iterdir():
            path.write_bytes(b"")
        with pytest.raises(UserError, match="no training image that can be read of b"):
            load(f"folder:{tmp_path}", skip_unreadable=True)

    def test_grey_training_images_decide_for_the_test_images(self, tmp_path: Path) -> None:
        picture_folder(tmp_path / "train", {"a": 3, "b": 3}, colour=False)
        picture_folder(tmp_path / "test", {"a": 1, "b": 1})
        data = load(f"folder:{tmp_path}")
        assert isinstance(data.test, ImageSplit)
        assert data.image_shape == data.test.image_shape == (1, 20, 20)
        assert data.test.pixels[1, 0, 0, 0] == round(0.299 * 50 + 0.114 * 99)  # not just its red

    def test_report(self, tmp_path: Path) -> None:
        picture_folder(tmp_path, {"a": 6, "b": 5})
        Image.new("L", (100, 50)).save(tmp_path / "b" / "large.png")
        (tmp_path / "a" / "notes.txt").write_text("x")
        report = load(f"folder:{tmp_path}").report
        assert report.files is not None
        assert (report.files.smallest, report.files.median, report.files.largest) == ((12, 9), (12, 9), (100, 50))
        assert report.files.modes == {"RGB": 11, "L": 1}
        assert report.files.ignored == {".txt": 1}
        text = str(report)
        for line in ("12 x 9 to 100 x 50, median 12 x 9", "11 RGB, 1 L", "1 file: 1 .txt", "2 classes, 20 x 20 pixels"):
            assert line in text

    def test_report_of_many_classes_is_short(self, tmp_path: Path) -> None:
        picture_folder(tmp_path, {f"class {number}": 2 for number in range(60)})
        lines = str(load(f"folder:{tmp_path}").report).splitlines()
        assert len(lines) < 10
        assert any("1 of each class" in line for line in lines)


def test_more_images_than_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture_folder(tmp_path, {"a": 5, "b": 5})
    assert (pictures.physical_memory() or 1) > 0
    monkeypatch.setattr(pictures, "physical_memory", lambda: 20_000)
    with pytest.raises(UserError, match="choose a smaller --image-size"):
        load(f"folder:{tmp_path}")
    assert len(load(f"folder:{tmp_path}", channels=1).train) == 8


class TestUsualSide:
    @pytest.mark.parametrize(
        ("sizes", "side"),
        [
            ([(48, 48)] * 3, 48),
            ([(28, 28)], 28),
            ([(10, 12)], 20),
            ([(400, 300)], 64),
            ([(40, 90), (50, 50), (30, 31)], 40),
            ([], 20),
        ],
    )
    def test_is_the_median_within_bounds(self, tmp_path: Path, sizes: list[tuple[int, int]], side: int) -> None:
        for number, size in enumerate(sizes):
            Image.new("L", size).save(tmp_path / f"{number}.png")
        (tmp_path / "broken.png").write_text("x")
        assert usual_side(list(tmp_path.iterdir())) == side


class TestTable:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for number in range(20):
            Image.new("L", (30, 30), number).save(tmp_path / f"{number}.png")
        return tmp_path

    def load(self, folder: Path, rows: list[str], **settings: object) -> DataSet:
        (folder / "table.csv").write_text("\n".join(rows))
        return load(f"csv:{folder / 'table.csv'}", **settings)

    def test_one_label_an_image(self, folder: Path) -> None:
        data = self.load(folder, ["path,label", *(f"{number}.png,{'ab'[number % 2]}" for number in range(20))])
        assert (len(data.train), len(data.test), data.image_shape) == (16, 4, (1, 30, 30))
        assert not data.multi_label
        batch = data.train.fetch(torch.arange(16))
        assert torch.equal(batch.images[:, 0, 0, 0] % 2, batch.labels[:, 0])

    def test_several_labels_an_image(self, folder: Path) -> None:
        names = ["a", "b|c", "a|b|c", "c"]
        rows = ["path,label", *(f"{number}.png,{names[number % 4]}" for number in range(20))]
        data = self.load(folder, rows, validation=3)
        assert data.multi_label
        assert isinstance(data.train, MultiLabelSplit)
        assert data.classes == ("a", "b", "c")
        assert data.validation is not None
        assert len(data.train) + len(data.validation) + len(data.test) == 20
        whole = [data.train, data.validation, data.test]
        right = {0: {0}, 1: {1, 2}, 2: {0, 1, 2}, 3: {2}}
        for split in whole:
            batch = split.fetch(torch.arange(len(split)))
            for number, labels in zip(batch.images[:, 0, 0, 0].tolist(), batch.labels.tolist()):
                assert set(labels) - {-1} == right[number % 4]

    @pytest.mark.parametrize("place", range(20))
    def test_the_only_image_of_a_class_is_for_training(self, folder: Path, place: int) -> None:
        labels = ["a", "b"] * 10
        labels[place] += "|rare"
        data = self.load(folder, ["path,label", *(f"{number}.png,{label}" for number, label in enumerate(labels))])
        assert data.train.class_counts(3).tolist()[2] == 1

    def test_split_column_and_missing_files(self, folder: Path) -> None:
        rows = ["path,label,split", "0.png,a,train", "1.png,b,train", "2.png,a,test", "none.png,b,test"]
        with pytest.raises(UserError, match=r"1 image file cannot be read:\n.*none\.png does not exist"):
            self.load(folder, rows)
        data = self.load(folder, rows, skip_unreadable=True)
        assert (len(data.train), len(data.test)) == (2, 1)


def test_sizes_that_are_turned_are_told_apart() -> None:
    report = FileReport.of([ImageFacts(*size, "L") for size in ((40, 30), (30, 40), (40, 30))], {}, [])
    assert report.rows()[0] == ("files", "30 x 40 to 40 x 30, median 40 x 30")


def test_photographs_become_64_pixels(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            photograph = Image.fromarray(generator.integers(0, 256, (1500, 2000, 3), dtype=np.uint8))
            photograph.save(tmp_path / name / f"{number}.jpg")
    data = DataConfig(name=f"folder:{tmp_path}").load()
    assert data.image_shape == (3, 64, 64)
