"""Which image files a folder or a table names, and which class and split each belongs to. Nothing is decoded."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torchcaps.data.files import BadFile, read_bytes, shown
from torchcaps.data.images import IMAGE_ENDINGS
from torchcaps.data.report import listed
from torchcaps.errors import UserError

MAX_TABLE_BYTES = 256 << 20
SPLITS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}
_CLUTTER = {"thumbs.db": "Thumbs.db", "desktop.ini": "desktop.ini", "__macosx": "__MACOSX", ".ds_store": ".DS_Store"}
_DELIMITERS = ",;\t"


class Picture(NamedTuple):
    """An image file and the numbers of the classes it shows."""

    path: Path
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Listing:
    """Image files by split. "train" is always there, "test" and "validation" if there is a division already."""

    root: Path
    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[Picture]]
    multi_label: bool = False
    ignored: Mapping[str, int] = field(default_factory=dict)
    bad: Sequence[BadFile] = ()

    def pictures(self) -> list[Picture]:
        """All pictures of all splits."""
        return [picture for pictures in self.splits.values() for picture in pictures]


def list_folder(root: Path) -> Listing:
    """The images of a folder.

    It has a sub-folder for each class, or a folder ``train`` with such sub-folders and others beside it: ``test``,
    and ``val``, ``valid`` or ``validation``. All images below a class's folder belong to it. Links are followed.
    """
    scan = _Scan()
    divided = _split_folders(scan.subfolders(root))
    if divided:
        scan.note_others(root, [path.name for path in divided.values()])
        scan.above.update(map(_identity, divided.values()))
    train = divided.pop("train", root)
    classes = _class_names(train, scan)
    splits = {"train": scan.pictures(train, classes)}
    for split, folder in divided.items():
        others = {path.name for path in scan.subfolders(folder)}
        lacking = {folder.name: set(classes) - others, train.name: others - set(classes)}
        if any(lacking.values()):
            parts = (
                f"{where} lacks {', '.join(map(shown, sorted(names)))}" for where, names in lacking.items() if names
            )
            raise UserError(f"{shown(root)}: all parts must have the same classes; {'; '.join(parts)}")
        splits[split] = scan.pictures(folder, classes, needed=False)
        if not splits[split]:
            raise UserError(f"{shown(folder)} has no images: add some, or remove the folder")
    return scan.listing(root, classes, resolved(splits))


def is_listed(root: Path, place: Path) -> bool:
    """Whether images in some place would be taken for images of the folder ``root``."""
    root, place = root.resolve(), place.resolve()
    if root not in place.parents:
        return False
    parts = place.relative_to(root).parts
    divided = _split_folders(_Scan().subfolders(root))
    return not any(map(_clutter, parts)) and (not divided or parts[0] in {folder.name for folder in divided.values()})


def resolved(splits: Mapping[str, list[Picture]]) -> dict[str, list[Picture]]:
    """The splits with the validation images as test images if there are no others."""
    found = dict(splits)
    if "test" not in found and "validation" in found:
        found["test"] = found.pop("validation")
    return found


def _split_folders(folders: Sequence[Path]) -> dict[str, Path]:
    """The folders of train, validation and test; none if the folders are classes."""
    found: dict[str, Path] = {}
    for folder in folders:
        split = SPLITS.get(folder.name.casefold())
        if split in found:
            raise UserError(f"{shown(found[split])} and {shown(folder)} mean the same; keep one of them")
        if split:
            found[split] = folder
    only_a_class = len(found) == 1 and len(folders) > 1  # a class may well be called "train"
    return found if "train" in found and not only_a_class else {}


def _class_names(folder: Path, scan: _Scan) -> tuple[str, ...]:
    names = tuple(path.name for path in scan.subfolders(folder))
    if not names:
        found = "holds only files" if any(folder.iterdir()) else "is empty"
        raise UserError(
            f"the image folder {shown(folder)} {found}; put the images of each class in their own sub-folder"
        )
    if len(names) == 1:
        raise UserError(f"the image folder {shown(folder)} has only the class '{shown(names[0])}'; 2 are needed")
    return names


class _Scan:
    """A walk through a folder that notes what it passes over."""

    def __init__(self) -> None:
        self.ignored: Counter[str] = Counter()
        self.bad: list[BadFile] = []
        self.above: set[tuple[int, int]] = set()  # folders that hold classes: a link to one would be a loop

    def listing(self, root: Path, classes: tuple[str, ...], splits: Mapping[str, Sequence[Picture]]) -> Listing:
        return Listing(root, classes, splits, ignored=dict(self.ignored.most_common()), bad=self.bad)

    def subfolders(self, folder: Path) -> list[Path]:
        """The visible folders in a folder, sorted."""
        try:
            self.above.add(_identity(folder))
            inside = [folder / name for name in sorted(os.listdir(folder)) if _clutter(name) is None]
            return [path for path in inside if path.is_dir() and _identity(path) not in self.above]
        except FileNotFoundError:
            raise UserError(f"the image folder {shown(folder)} does not exist") from None
        except NotADirectoryError:
            raise UserError(f"the image folder {shown(folder)} is a file, not a folder") from None
        except (OSError, ValueError) as error:
            raise UserError(f"the image folder {shown(folder)} cannot be read ({_reason(error)})") from error

    def pictures(self, folder: Path, classes: Sequence[str], *, needed: bool = True) -> list[Picture]:
        """The images of all classes, class after class. If they are needed, a class without any is an error."""
        self.note_others(folder, classes)
        pictures = []
        for label, name in enumerate(classes):
            paths, example = self.below(folder / name)
            if needed and not paths and not self.bad:
                found = f"only things like {shown(example)}" if example else "nothing"
                raise UserError(
                    f"the class folder {shown(folder / name)} has no images (found {found}); "
                    f"add some with one of the endings {' '.join(IMAGE_ENDINGS)}, or remove the folder"
                )
            pictures += [Picture(path, (label,)) for path in paths]
        return pictures

    def note_others(self, folder: Path, used: Sequence[str]) -> None:
        """Count what is in a folder beside the sub-folders that are used."""
        for name in set(os.listdir(folder)) - set(used):
            self.ignored[_clutter(name) or "outside of the class folders"] += 1

    def below(self, folder: Path) -> tuple[list[Path], str]:
        """All image files below a folder, sorted, and the name of some other file there."""
        images, example = [], ""
        seen = set(self.above)
        pending = [folder]
        while pending:
            current = pending.pop()
            try:
                if (identity := _identity(current)) in seen:
                    continue
                seen.add(identity)
                names = sorted(os.listdir(current))
            except OSError as error:
                self.bad.append(BadFile(shown(current), f"cannot be read ({_reason(error)})"))
                continue
            for name in names:
                path = current / name
                if clutter := _clutter(name):
                    self.ignored[clutter] += 1
                elif os.path.isdir(path):  # unlike `path.is_dir()`, no error for a link to itself
                    pending.append(path)
                elif path.suffix.lower() in IMAGE_ENDINGS:
                    images.append(path)
                else:
                    self.ignored[path.suffix.lower() or "without an ending"] += 1
                    example = example or name
        return sorted(images), example


def images_below(folder: Path) -> list[Path]:
    """All image files below a folder, sorted. Links are followed, hidden files and clutter left out."""
    return _Scan().below(folder)[0]


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _clutter(name: str) -> str | None:
    """What a file or folder that belongs to the system is counted as; None if it is none."""
    known = _CLUTTER.get(name.casefold())
    return known or ("hidden" if name.startswith(".") else None)


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def list_table(path: Path) -> Listing:
    """The images that a CSV file names.

    Its first line names the columns: ``path`` and ``label``, and perhaps ``split``, whose values are train, val or
    test. Commas, semicolons or tabs separate them. Paths are relative to the file. Several labels of an image are
    separated by ``|`` or ``;`` in one cell, and make all of it a multi-label set.
    """
    text = bytes(read_bytes(path, MAX_TABLE_BYTES)).decode("utf-8-sig", errors="surrogateescape")
    rows, problems = _table_rows(path, text)
    if problems:
        raise UserError("\n  ".join([f"{shown(path)} has lines that cannot be used:", *listed(problems)]))
    if not rows:
        raise UserError(f"{shown(path)} names no images: add a line with path and label for each")
    classes = tuple(sorted({label for row in rows for label in row.labels}))
    if len(classes) < 2:
        raise UserError(f"{shown(path)} has only the class '{shown(classes[0])}'; at least 2 are needed")
    numbers = {name: number for number, name in enumerate(classes)}
    splits: dict[str, list[Picture]] = {}
    for row in rows:
        labels = tuple(sorted({numbers[label] for label in row.labels}))
        splits.setdefault(row.split, []).append(Picture(path.parent / row.path, labels))
    if "train" not in splits:
        raise UserError(f"{shown(path)} has no line for training: its column split never says train")
    return Listing(path.parent, classes, resolved(splits), multi_label=any(len(row.labels) > 1 for row in rows))


class _Row(NamedTuple):
    path: str
    labels: tuple[str, ...]
    split: str


def _table_rows(path: Path, text: str) -> tuple[list[_Row], list[str]]:
    """The rows of a table, and what is wrong with those that are left out."""
    header, delimiter = _header(path, text)
    rows: list[_Row] = []
    problems: list[str] = []
    known: dict[str, _Row] = {}
    reader = _reader(text, delimiter)
    try:
        next(reader)
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            values = {name: cell.strip() for name, cell in zip(header, cells)}
            labels = tuple(dict.fromkeys(filter(None, map(str.strip, re.split(r"[|;]", values.get("label", ""))))))
            split = SPLITS.get((values.get("split") or "train").casefold())
            if any(cell.strip() for cell in cells[len(header) :]):
                problems.append(
                    f"line {reader.line_num} has more cells than the first line: put several labels into one, "
                    "separated by |, and what has a comma into quotes"
                )
            elif not values.get("path") or not labels or split is None:
                lacking = "path" if not values.get("path") else "label" if not labels else "split (train, val or test)"
                problems.append(f"line {reader.line_num} has no {lacking}")
            else:
                row = _Row(values["path"], labels, split)
                if known.setdefault(row.path, row) != row:
                    problems.append(
                        f"line {reader.line_num} says something else of {shown(row.path)} than a line before: put all "
                        "labels of an image into one cell, separated by |"
                    )
                rows.append(row)
    except csv.Error as error:
        raise UserError(f"{shown(path)} is not a CSV file: line {reader.line_num}: {error}") from error
    return rows, problems


def _reader(text: str, delimiter: str) -> Any:
    return csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)


def _header(path: Path, text: str) -> tuple[list[str], str]:
    """The names of the columns in the first line, and what separates them."""
    first = re.match(r"[^\r\n]{0,10000}", text)
    assert first is not None
    for delimiter in _DELIMITERS:
        with contextlib.suppress(csv.Error, StopIteration):
            header = [cell.strip(" \"'").casefold() for cell in next(_reader(first[0], delimiter))]
            if twice := [name for name in ("path", "label", "split") if header.count(name) > 1]:
                raise UserError(f"{shown(path)} has the column {twice[0]} more than once")
            if {"path", "label"} <= set(header):
                return header, delimiter
    raise UserError(
        f"{shown(path)} must begin with a line that names its columns: path and label, and perhaps split, "
        f"separated by commas, semicolons or tabs; it begins with '{shown(first[0][:60])}'"
    )
