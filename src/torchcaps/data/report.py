"""What is in a data set, for people: printed before training and by ``torchcaps data check``."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from torchcaps.data.files import BadFile, shown
from torchcaps.data.images import ImageFacts, ImageShape

LISTED_CLASSES = 20  # more than that are summed up in a line
LISTED_FILES = 20
_NAME_WIDTH = 30


@dataclass(frozen=True)
class FileReport:
    """The image files behind a data set."""

    smallest: tuple[int, int]
    """(width, height) of the file with the fewest pixels."""
    median: tuple[int, int]
    """The median width and the median height."""
    largest: tuple[int, int]
    """(width, height) of the file with the most pixels."""
    modes: Mapping[str, int]
    """How many files have each of Pillow's modes: "L" is grey, "RGB" colour."""
    ignored: Mapping[str, int]
    """How many files are not looked at, by kind: an ending, or a name such as "Thumbs.db"."""
    bad: tuple[BadFile, ...]
    """Files that cannot be read."""

    @classmethod
    def of(cls, facts: Sequence[ImageFacts], ignored: Mapping[str, int], bad: Iterable[BadFile]) -> FileReport:
        """The report on files that could be read (at least one), files ignored, and files that could not."""
        sizes = sorted(((image.width, image.height) for image in facts), key=lambda size: (size[0] * size[1], size))
        widths, heights = zip(*sizes)
        median = int(statistics.median(widths)), int(statistics.median(heights))
        modes = dict(Counter(image.mode for image in facts).most_common())
        return cls(sizes[0], median, sizes[-1], modes, dict(ignored), tuple(bad))

    def rows(self) -> list[tuple[str, str]]:
        """Headings with what there is to say under them."""
        small, median, large = (f"{width} x {height}" for width, height in (self.smallest, self.median, self.largest))
        sizes = f"all {small}" if small == large else f"{small} to {large}, median {median}"
        rows = [("files", sizes), ("modes", _counts(self.modes))]
        if self.ignored:
            rows.append(("ignored", f"{counted(sum(self.ignored.values()), 'file')}: {_counts(self.ignored)}"))
        if self.bad:
            rows.append(("unreadable", counted(len(self.bad), "file")))
            rows += [("", line) for line in listed(self.bad)]
        return rows


@dataclass(frozen=True)
class DataReport:
    """How many images of each class a data set has, and what its files are like."""

    name: str
    classes: tuple[str, ...]
    image_shape: ImageShape
    images: Mapping[str, int]
    """How many images are in "train", "validation" and "test"; a split that is not there is left out."""
    class_counts: Mapping[str, tuple[int, ...]]
    """For the same splits, how many images show each class."""
    files: FileReport | None = None
    """Of folders and tables of image files."""

    @property
    def untested(self) -> tuple[str, ...]:
        """Classes without any test image."""
        return tuple(name for name, count in zip(self.classes, self.class_counts["test"]) if not count)

    def rows(self) -> list[tuple[str, str]]:
        """Headings with what there is to say under them."""
        channels, height, width = self.image_shape
        colour = {1: "grey", 3: "colour"}.get(channels, f"{channels} channels")
        rows = [
            ("data", f"{shown(self.name)}: {len(self.classes)} classes, {width} x {height} pixels, {colour}"),
            ("images", ", ".join(f"{count:,} {split}" for split, count in self.images.items())),
        ]
        rows += [("", line) for line in class_lines(self.classes, self.class_counts)]
        if self.untested:
            names = ", ".join(map(short, self.untested[:LISTED_CLASSES]))
            rows.append(("untested", f"no test image of {counted(len(self.untested), 'class')}: {names}"))
        return rows + (self.files.rows() if self.files else [])

    def __str__(self) -> str:
        return table(self.rows())


def class_lines(classes: Sequence[str], class_counts: Mapping[str, Sequence[int]]) -> list[str]:
    """A table of images by class and split, or a summary if there are many classes."""
    if len(classes) > LISTED_CLASSES:
        return [f"{split}: {_spread(counts)}" for split, counts in class_counts.items()]
    width = max(cell_len(short(name)) for name in classes)
    lines = [f"{'':{width}} " + "".join(f"{split:>12}" for split in class_counts)]
    for label, name in enumerate(classes):
        numbers = "".join(f"{counts[label]:>12,}" for counts in class_counts.values())
        lines.append(f"{set_cell_size(short(name), width)} {numbers}")
    return lines


def _spread(counts: Sequence[int]) -> str:
    if min(counts) == max(counts):
        return f"{counts[0]:,} of each class"
    return f"{min(counts):,} to {max(counts):,} of a class, median {statistics.median(counts):,g}"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Headings and what there is to say under them, as text."""
    return "\n".join(f"{heading:<11} {text}".rstrip() for heading, text in rows)


def short(name: str) -> str:
    """The name of a class as it may be printed in a table."""
    text = shown(name)
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 1]}…"


def counted(number: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "file"), counted(2000, "class")
    ('1 file', '2,000 classes')
    """
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"


def listed(problems: Sequence[BadFile | str]) -> list[str]:
    """A line for each of the first problems, and one for how many more there are."""
    lines = [str(problem) for problem in problems[:LISTED_FILES]]
    return lines if len(problems) <= LISTED_FILES else [*lines, f"... and {len(problems) - LISTED_FILES:,} more"]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {shown(kind)}" for kind, count in counts.items())
