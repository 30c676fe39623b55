"""A thorough look at your own images before training: ``torchcaps data check folder:PATH``."""

from __future__ import annotations

import hashlib
import importlib.util
import io
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.cells import cell_len

from torchcaps.atomic import write_atomically
from torchcaps.data.config import DataConfig
from torchcaps.data.datasets import list_pictures
from torchcaps.data.files import BadFile, shown
from torchcaps.data.images import ImageFacts, read_whole
from torchcaps.data.listing import Picture
from torchcaps.data.report import LISTED_FILES, FileReport, class_lines, counted, listed, short, table
from torchcaps.errors import UserError

FEW = 10  # images of a class, below which little can be learned
MOST_ROWS = 200  # of a contact sheet
_MARGIN = 4


@dataclass(frozen=True)
class CheckReport:
    """What a thorough look found."""

    name: str
    classes: tuple[str, ...]
    class_counts: dict[str, tuple[int, ...]]
    """For each split that is there, how many readable images show each class."""
    files: FileReport | None
    """None if no file could be read."""
    bad: tuple[BadFile, ...]
    duplicates: tuple[tuple[str, ...], ...]
    """Groups of files that show the same pixels, all in one split."""
    leaks: tuple[tuple[str, ...], ...]
    """Groups of files that show the same pixels, in several splits: what is tested was learned."""

    @property
    def small_classes(self) -> tuple[str, ...]:
        """Classes with fewer than 10 images in all."""
        totals = map(sum, zip(*self.class_counts.values()))
        return tuple(name for name, total in zip(self.classes, totals) if total < FEW)

    @property
    def problems(self) -> bool:
        """Whether there is anything to mend."""
        return bool(self.bad or self.leaks or self.duplicates or self.small_classes)

    def rows(self) -> list[tuple[str, str]]:
        """Headings with what there is to say under them."""
        rows = [("data", f"{shown(self.name)}: {len(self.classes)} classes")]
        rows += [("", line) for line in class_lines(self.classes, self.class_counts)]
        if list(self.class_counts) == ["train"]:
            rows.append(("", "a fifth of each class will be held out for testing"))
        if self.small_classes:
            names = ", ".join(map(short, self.small_classes[:LISTED_FILES]))
            rows.append(("small", f"fewer than {FEW} images of {counted(len(self.small_classes), 'class')}: {names}"))
        if self.files:
            rows += self.files.rows()
        elif self.bad:
            rows += [("unreadable", counted(len(self.bad), "file")), *(("", line) for line in listed(self.bad))]
        for heading, groups, what in (
            ("leaks", self.leaks, "in several splits"),
            ("duplicates", self.duplicates, "there more than once"),
        ):
            if groups:
                rows.append((heading, f"{counted(len(groups), 'image')} {what}"))
                rows += [("", " = ".join(group)) for group in groups[:LISTED_FILES]]
        return rows

    def __str__(self) -> str:
        return table(self.rows())


def check_data(config: DataConfig) -> CheckReport:
    """Read every image of "folder:PATH" or "csv:FILE" at its full size, and report what is there.

    Bad files are listed, never raised. Duplicates are found by their pixels, whatever the format of the files.
    """
    listing = list_pictures(config.name)
    bad = list(listing.bad)
    facts: list[ImageFacts] = []
    counts = {split: [0] * len(listing.classes) for split in listing.splits}
    places: defaultdict[bytes, list[tuple[str, Path]]] = defaultdict(list)
    for split, pictures in listing.splits.items():
        for picture in pictures:
            try:
                image, image_facts = read_whole(picture.path)
            except BadFile as error:
                bad.append(error)
                continue
            facts.append(image_facts)
            places[_pixel_hash(image)].append((split, picture.path))
            for label in picture.labels:
                counts[split][label] += 1
    groups = [group for group in places.values() if len(group) > 1]
    leaks = [group for group in groups if len({split for split, _ in group}) > 1]
    return CheckReport(
        name=config.name,
        classes=listing.classes,
        class_counts={split: tuple(numbers) for split, numbers in counts.items()},
        files=FileReport.of(facts, listing.ignored, bad) if facts else None,
        bad=tuple(bad),
        duplicates=_named([group for group in groups if group not in leaks], listing.root),
        leaks=_named(leaks, listing.root),
    )


def _pixel_hash(image: Image.Image) -> bytes:
    colour = image.convert("RGB")  # so that a grey image saved in colour is the same
    return hashlib.blake2b(colour.tobytes(), digest_size=16, salt=repr(colour.size).encode()[:16]).digest()


def _named(groups: Sequence[Sequence[tuple[str, Path]]], root: Path) -> tuple[tuple[str, ...], ...]:
    def name(path: Path) -> str:
        return shown(path.relative_to(root) if path.is_relative_to(root) else path)

    return tuple(tuple(name(path) for _, path in group) for group in groups)


def draw_contact_sheet(config: DataConfig, path: Path, *, columns: int = 10, side: int = 64) -> int:
    """Draw the first images of each class, a row for each, into a PNG file; returns how many classes are drawn.

    Args:
        config: what to draw, "folder:PATH" or "csv:FILE".
        path: the PNG file to write.
        columns: images of a class.
        side: of an image, in pixels.
    """
    if path.suffix.lower() != ".png":
        raise UserError(f"a contact sheet is a PNG file, and {shown(path)} does not end in .png")
    listing = list_pictures(config.name)
    font = label_font()
    text_width = 160
    step = side + _MARGIN
    classes = listing.classes[:MOST_ROWS]
    sheet = Image.new("RGB", (text_width + columns * step + _MARGIN, len(classes) * step + _MARGIN), "white")
    drawing = ImageDraw.Draw(sheet)
    drawn = 0
    for row, name in enumerate(classes):
        top = _MARGIN + row * step
        # Letters of two columns are those of scripts that the font does not have.
        label = "".join(letter if cell_len(letter) == 1 else ascii(letter)[1:-1] for letter in short(name))
        drawing.text((_MARGIN, top + side // 2 - 7), label[:22], fill="black", font=font)
        for column, image in enumerate(_thumbnails(listing.pictures(), row, columns, side)):
            corner = text_width + column * step + (side - image.width) // 2, top + (side - image.height) // 2
            sheet.paste(image, corner)
            drawn += 1
    if not drawn:
        raise UserError(f"{shown(config.name)} has no image that can be read")
    content = io.BytesIO()
    sheet.save(content, "PNG")
    write_atomically(path, content.getvalue())
    return len(classes)


def label_font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Matplotlib's own font, which knows more letters than Pillow's. Matplotlib itself is not imported."""
    found = importlib.util.find_spec("matplotlib")
    folders = found.submodule_search_locations if found else None
    file = Path(folders[0] if folders else "") / "mpl-data/fonts/ttf/DejaVuSans.ttf"
    return ImageFont.truetype(str(file), 12) if file.is_file() else ImageFont.load_default()


def _thumbnails(pictures: Sequence[Picture], label: int, count: int, side: int) -> list[Image.Image]:
    """The first readable images of a class, in their proportions."""
    found: list[Image.Image] = []
    for picture in pictures:
        if len(found) == count:
            break
        if label in picture.labels:
            try:
                image, _ = read_whole(picture.path)
            except BadFile:
                continue
            if max(image.size) <= side // 2:  # or it could not be seen
                times = side // max(image.size)
                image = image.resize((times * image.width, times * image.height), Image.Resampling.NEAREST)
            image.thumbnail((side, side))
            found.append(image.convert("RGB"))
    return found
