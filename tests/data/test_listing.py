import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from torchcaps.data.files import shown
from torchcaps.data.images import IMAGE_ENDINGS
from torchcaps.data.listing import Listing, is_listed, list_folder, list_table
from torchcaps.errors import UserError


def make(folder: Path, *names: str) -> Path:
    """Small images of these names in a folder, in formats by their endings."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (10, 10), len(name)).save(folder / name)
    return folder


def found(listing: Listing, split: str = "train") -> list[tuple[str, tuple[int, ...]]]:
    return [(os.path.relpath(path, listing.root), labels) for path, labels in listing.splits[split]]


class TestFolder:
    def test_classes_and_what_is_ignored(self, tmp_path: Path) -> None:
        make(tmp_path, "dogs/1.PNG", "dogs/0.jpg", "cats/a.webp", "stray.png")
        for name in ("dogs/.hidden.png", "dogs/notes.txt", "dogs/Thumbs.db", "cats/desktop.ini", "cats/.DS_Store"):
            (tmp_path / name).write_text("x")
        for name in (".git", "__MACOSX", "dogs/__MACOSX"):
            make(tmp_path / name, "x.png")
        listing = list_folder(tmp_path)
        assert listing.classes == ("cats", "dogs")
        assert found(listing) == [("cats/a.webp", (0,)), ("dogs/0.jpg", (1,)), ("dogs/1.PNG", (1,))]
        assert listing.ignored == {
            "hidden": 2,
            "__MACOSX": 2,
            "outside of the class folders": 1,
            "desktop.ini": 1,
            ".DS_Store": 1,
            "Thumbs.db": 1,
            ".txt": 1,
        }
        assert list(listing.splits) == ["train"]
        assert not listing.multi_label

    def test_all_images_below_a_class_belong_to_it(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1.png", "a/deep/deeper/2.png", "a/x.png/3.png", "b/1.png")
        assert [name for name, _ in found(list_folder(tmp_path))] == [
            *("a/1.png", "a/deep/deeper/2.png", "a/x.png/3.png", "b/1.png")
        ]

    def test_links_are_followed_and_loops_survived(self, tmp_path: Path) -> None:
        make(tmp_path / "elsewhere", "1.png", "more/2.png")
        root = make(tmp_path / "root", "a/1.png", "b/1.png")
        (root / "c").symlink_to(tmp_path / "elsewhere")
        (root / "a" / "file.png").symlink_to(tmp_path / "elsewhere" / "1.png")
        (root / "a" / "more").symlink_to(tmp_path / "elsewhere" / "more")
        for loop, target in (
            ("loop", "."),
            ("a/loop", ".."),
            ("a/self", "self"),
            ("b/up", "../b"),
            ("b/top", str(root)),
            ("b/nothing", "nowhere"),
        ):
            (root / loop).symlink_to(target)
        listing = list_folder(root)
        assert [name for name, _ in found(listing)] == [
            *("a/1.png", "a/file.png", "a/more/2.png", "b/1.png", "c/1.png", "c/more/2.png")
        ]
        assert not listing.bad

    @pytest.mark.parametrize("name", ["val", "valid", "validation", "Val", "test", "TEST"])
    def test_one_more_split_is_for_testing(self, tmp_path: Path, name: str) -> None:
        make(tmp_path, "train/a/1.png", "train/b/1.png", f"{name}/a/2.png", f"{name}/b/2.png")
        listing = list_folder(tmp_path)
        assert list(listing.splits) == ["train", "test"]
        assert [name for name, _ in found(listing, "test")] == [f"{name}/a/2.png", f"{name}/b/2.png"]

    def test_three_splits(self, tmp_path: Path) -> None:
        for split in ("train", "valid", "test"):
            make(tmp_path / split, "a/1.png", "b/1.png")
        make(tmp_path, "extra/1.png", "readme.png")
        listing = list_folder(tmp_path)
        assert set(listing.splits) == {"train", "validation", "test"}
        assert found(listing, "validation") == [("valid/a/1.png", (0,)), ("valid/b/1.png", (1,))]
        assert listing.ignored == {"outside of the class folders": 2}
        make(tmp_path, "val/a/1.png")
        with pytest.raises(UserError, match="mean the same"):
            list_folder(tmp_path)

    def test_a_split_without_images(self, tmp_path: Path) -> None:
        make(tmp_path, "train/a/1.png", "train/b/1.png")
        for name in ("a", "b"):
            (tmp_path / "test" / name).mkdir(parents=True)
        with pytest.raises(UserError, match="test has no images"):
            list_folder(tmp_path)

    def test_train_alone(self, tmp_path: Path) -> None:
        make(tmp_path, "train/a/1.png", "train/b/1.png")
        assert list_folder(tmp_path).classes == ("a", "b")
        make(tmp_path, "aeroplane/1.png")  # then it is a vehicle
        assert list_folder(tmp_path).classes == ("aeroplane", "train")

    def test_classes_must_agree(self, tmp_path: Path) -> None:
        make(tmp_path, "train/a/1.png", "train/b/1.png", "test/a/1.png", "test/c/1.png")
        with pytest.raises(UserError, match="test lacks b; train lacks c"):
            list_folder(tmp_path)

    def test_names_that_are_not_utf_8(self, tmp_path: Path) -> None:
        os.makedirs(os.fsencode(tmp_path) + b"/caf\xe9")
        with open(os.fsencode(tmp_path) + b"/caf\xe9/\xff.png", "wb") as file:
            Image.new("L", (9, 9)).save(file, "PNG")
        make(tmp_path, "tea\x1b[31m/1.png")
        listing = list_folder(tmp_path)
        assert [os.fsencode(name) for name in listing.classes] == [b"caf\xe9", b"tea\x1b[31m"]
        assert [shown(name) for name in listing.classes] == ["caf\\xe9", "tea\\x1b[31m"]
        assert len(found(listing)) == 2

    def test_that_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="does not exist"):
            list_folder(tmp_path / "none")
        with pytest.raises(UserError, match="is empty"):
            list_folder(tmp_path)
        (tmp_path / "file").write_text("x")
        with pytest.raises(UserError, match="holds only files"):
            list_folder(tmp_path)
        with pytest.raises(UserError, match="a file, not a folder"):
            list_folder(tmp_path / "file")
        (tmp_path / "cats").mkdir()
        with pytest.raises(UserError, match="only the class 'cats'"):
            list_folder(tmp_path)
        with pytest.raises(UserError, match="cannot be read"):
            list_folder(Path("a\0b"))

    def test_class_without_images(self, tmp_path: Path) -> None:
        make(tmp_path, "cats/1.png", "dogs/1.png")
        (tmp_path / "birds").mkdir()
        (tmp_path / "birds" / ".DS_Store").write_text("x")
        with pytest.raises(UserError, match=r"birds has no images \(found nothing\)"):
            list_folder(tmp_path)
        (tmp_path / "birds" / "a.svg").write_text("x")
        with pytest.raises(UserError, match=r"found only things like a\.svg") as error:
            list_folder(tmp_path)
        assert all(ending in str(error.value) for ending in IMAGE_ENDINGS)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_folder_that_must_not_be_read(self, tmp_path: Path) -> None:
        make(tmp_path, "a/1.png", "b/1.png", "b/locked/2.png")
        (tmp_path / "b" / "locked").chmod(0)
        assert [file.reason for file in list_folder(tmp_path).bad] == ["cannot be read (Permission denied)"]
        (tmp_path / "b" / "locked").chmod(0o755)


Write = Callable[[str], Path]


class TestTable:
    @pytest.fixture
    def write(self, tmp_path: Path) -> Write:
        make(tmp_path, *(f"{number}.png" for number in range(9)))

        def write(text: str) -> Path:
            (tmp_path / "table.csv").write_bytes(text.encode(errors="surrogateescape"))
            return tmp_path / "table.csv"

        return write

    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    @pytest.mark.parametrize("start", ["", "\ufeff"])
    def test_columns_by_name(self, write: Write, delimiter: str, start: str) -> None:
        lines = ["Label,extra, path ", "b,x,0.png", "", 'a,x,"1.png"', " b ,x,/absolute/2.png"]
        listing = list_table(write(start + "\r\n".join(lines).replace(",", delimiter)))
        assert listing.classes == ("a", "b")
        assert [labels for _, labels in found(listing)] == [(1,), (0,), (1,)]
        assert listing.splits["train"][0].path == listing.root / "0.png"
        assert listing.splits["train"][2].path == Path("/absolute/2.png")
        assert not listing.multi_label

    def test_splits(self, write: Write) -> None:
        rows = ["path,label,split", "0.png,a,train", "1.png,b,", "2.png,a,Val", "3.png,b,test", "4.png,a,valid"]
        listing = list_table(write("\n".join(rows)))
        assert {split: len(pictures) for split, pictures in listing.splits.items()} == {
            "train": 2,
            "validation": 2,
            "test": 1,
        }
        assert set(list_table(write("\n".join(rows[:4]))).splits) == {"train", "test"}
        with pytest.raises(UserError, match="never says train"):
            list_table(write("path,label,split\n1.png,a,test\n2.png,b,test"))

    def test_several_labels(self, write: Write) -> None:
        listing = list_table(write("path,label\n0.png,b|a\n1.png,c\n2.png,c; a ;a|\n"))
        assert listing.multi_label
        assert listing.classes == ("a", "b", "c")
        assert [labels for _, labels in found(listing)] == [(0, 1), (2,), (0, 2)]
        assert list_table(write('path;label\n0.png;"b;a"\n1.png;c|a\n')).multi_label

    def test_all_wrong_lines_in_one_error(self, write: Write) -> None:
        with pytest.raises(UserError) as error:
            list_table(write("path,label,split\n0.png,a,\n,b,\n2.png,,\n3.png\n4.png,a,never\n"))
        for problem in ("line 3 has no path", "line 4 has no label", "line 5 has no label", "line 6 has no split"):
            assert problem in str(error.value)
        with pytest.raises(UserError, match=r"\.\.\. and 30 more"):
            list_table(write("path,label\n" + "x,\n" * 50))

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "names its columns"),
            ("0.png,a\n1.png,b", "names its columns"),
            ("path\tname\n0.png\ta", "names its columns"),
            ("path,label\n", "names no images"),
            ("path,label\n0.png,a\n", "only the class 'a'"),
            ('path,label\n"0.png,a\n', "not a CSV file"),
            ("path,label\n" + "x" * 200_000 + ",a\n", "not a CSV file"),
        ],
    )
    def test_that_is_none(self, write: Write, text: str, problem: str) -> None:
        with pytest.raises(UserError, match=problem):
            list_table(write(text))

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("path,label\n0.png,cat,dog\n1.png,dog\n", "line 2 has more cells than the first line"),
            ("path;label\n0.png;cat\n1.png;dog;cat\n", "line 3 has more cells than the first line"),
            ("path,label,label\n0.png,cat,dog\n", "has the column label more than once"),
            ("path,label\n0.png,cat\n1.png,dog\n0.png,dog\n", "line 4 says something else of 0.png"),
            ("path,label,split\n0.png,cat,train\n1.png,dog,train\n0.png,cat,test\n", "line 4 says something else"),
        ],
    )
    def test_that_would_lose_labels_is_refused(self, write: Write, text: str, problem: str) -> None:
        with pytest.raises(UserError, match=problem):
            list_table(write(text))

    def test_cells_in_quotes_may_hold_what_separates_cells(self, write: Write) -> None:
        text = '"id, no", path, label\n1, 0.png, "cat, small"\n2, 1.png, "cat, big"\n3, 1.png, "cat, big",\n'
        listing = list_table(write(text))
        assert listing.classes == ("cat, big", "cat, small")
        assert found(listing) == [("0.png", (1,)), ("1.png", (0,)), ("1.png", (0,))]

    def test_names_that_are_not_utf_8(self, write: Write) -> None:
        listing = list_table(write("path,label\ncaf\udce9.png,\udcff\n1.png,b\n"))
        assert os.fsencode(listing.splits["train"][0].path.name) == b"caf\xe9.png"
        assert [shown(name) for name in listing.classes] == ["b", "\\xff"]

    def test_any_text_is_a_listing_or_an_error(self, write: Write) -> None:
        generator = random.Random(0)
        pieces = [
            "path",
            "label",
            "split",
            ",",
            ";",
            "\t",
            "\n",
            "\r",
            '"',
            "|",
            "\0",
            "a",
            "1.png",
            "train",
            "\udcff",
            " ",
        ]
        for _ in range(500):
            text = generator.choice(("", "path,label\n", "path;label;split\n")) + "".join(
                generator.choices(pieces, k=generator.randrange(60))
            )
            with contextlib.suppress(UserError):
                assert list_table(write(text)).splits["train"]


def test_which_places_are_listed(tmp_path: Path) -> None:
    classes = make(tmp_path / "classes", "cat/0.png")
    divided = make(tmp_path / "divided", "train/cat/0.png", "test/0.png")
    assert is_listed(classes, classes / "runs" / "new")
    assert not is_listed(classes, classes / ".runs" / "new")
    assert not is_listed(classes, tmp_path / "runs")
    assert not is_listed(classes, tmp_path / "classes-2")
    assert is_listed(divided, divided / "train" / "new")
    assert not is_listed(divided, divided / "runs")
