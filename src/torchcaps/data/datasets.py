"""The data sets: how each becomes a `DataSet` with a training, a validation and a test split."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from torchcaps.data import arrays, fetch, readers
from torchcaps.data.config import DataConfig
from torchcaps.data.files import shown
from torchcaps.data.images import ImageShape
from torchcaps.data.listing import Listing, list_folder, list_table
from torchcaps.data.pictures import read_listing
from torchcaps.data.readers import Images
from torchcaps.data.report import DataReport, FileReport
from torchcaps.data.sources import SAME_FILES, SOURCES
from torchcaps.data.splits import ImageSplit, MultiLabelSplit, OverlappingDigits, Split, hold_out
from torchcaps.errors import UserError
from torchcaps.settings import SettingError

_DIGITS = tuple("0123456789")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class DataSet:
    """Images for training, validation (if any are held out) and testing."""

    name: str
    classes: tuple[str, ...]
    train: Split
    validation: Split | None
    test: Split
    mean: tuple[float, ...]
    """Of each channel, for images in [0, 1]."""
    std: tuple[float, ...]
    files: FileReport | None = None
    """What the image files are like, if the set was made of any."""
    test_names: tuple[str, ...] = ()
    """The files of the test images, below the folder of the data, if they come from files."""

    @property
    def image_shape(self) -> ImageShape:
        """(C, H, W) of the images, before any augmentation."""
        return self.train.image_shape

    @property
    def multi_label(self) -> bool:
        """Whether the number of classes that an image shows differs from image to image."""
        return self.train.labels_per_image is None

    @property
    def report(self) -> DataReport:
        """What is in the data set, to be printed."""
        splits = {"train": self.train, "validation": self.validation, "test": self.test}
        there = {name: split for name, split in splits.items() if split is not None}
        return DataReport(
            name=self.name,
            classes=self.classes,
            image_shape=self.image_shape,
            images={name: len(split) for name, split in there.items()},
            class_counts={name: tuple(split.class_counts(len(self.classes)).tolist()) for name, split in there.items()},
            files=self.files,
        )

    def balanced_weights(self) -> Tensor:
        """(J,) float32: weights of the classes in the loss, larger where there are fewer training images.

        Weight times number of images is the same for all classes. Where images show one class, their mean weight is 1.
        """
        counts = self.train.class_counts(len(self.classes)).double()
        there = counts > 0
        weights = torch.where(there, counts.sum() / (counts.clamp_min(1) * there.sum()), 1.0)
        return weights.float()

    @classmethod
    def from_arrays(
        cls,
        train_images: Any,
        train_labels: Any,
        test_images: Any,
        test_labels: Any,
        classes: Sequence[str] | None = None,
        *,
        name: str = "arrays",
        validation: int = 0,
    ) -> DataSet:
        """A data set of arrays or tensors.

        Args:
            train_images, test_images: uint8, or floats in [0, 1]; (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3
                channels.
            train_labels, test_labels: (N,) whole numbers from 0 or texts; or (N, J) of 0 and 1, which classes each
                image shows.
            classes: their names. If not given: the texts in order, or the numbers.
            name: of the data set.
            validation: how many training images to hold out, always the same ones.
        """
        pixels = arrays.to_pixels("train_images", train_images), arrays.to_pixels("test_images", test_images)
        if pixels[0].shape[1:] != pixels[1].shape[1:]:
            shapes = " and ".join(str(tuple(part.shape[1:])) for part in pixels)
            raise SettingError("test_images", f"must have the shape of the training images: they are {shapes}")
        names, train, test = arrays.to_labels(train_labels, test_labels, classes)
        for setting, images, labels in (("train_labels", pixels[0], train), ("test_labels", pixels[1], test)):
            if len(images) != len(labels):
                raise SettingError(setting, f"must be as many as the images: {len(labels):,} for {len(images):,}")
        config = DataConfig(name=name, validation=validation)
        return _data_set(config, names, {"train": (pixels[0], train), "test": (pixels[1], test)})


@dataclass(frozen=True)
class Entry:
    """A line of the registry. The sizes of your own images are not known before they are read."""

    load: Callable[[DataConfig, bool], DataSet]
    summary: str
    images: str
    image_shape: ImageShape | None
    classes: int | None
    argument: str = ""
    """What follows the name and a colon, if anything does."""


def load(config: DataConfig | str, *, download: bool = True, **settings: Any) -> DataSet:
    """A data set.

    >>> len(load("digits", validation=100).train)
    1337

    Args:
        config: which one; or just its name, one of `DATASETS`.
        settings: settings of `DataConfig` by name, which go before those in ``config``.
        download: fetch what is not there yet; otherwise that is an error.
    """
    config = DataConfig(name=config, **settings) if isinstance(config, str) else config.replace(**settings)
    kind, colon, argument = config.name.partition(":")
    entry = DATASETS.get(kind)
    if entry is None or bool(colon) != bool(entry.argument):
        close = difflib.get_close_matches(kind.lower(), DATASETS, n=1)
        hint = f" (did you mean '{_valid_name(close[0])}'?)" if close else ""
        valid = ", ".join(map(_valid_name, DATASETS))
        raise UserError(f"unknown data set '{shown(config.name)}'{hint}; valid ones are: {valid}")
    if entry.argument and not argument:
        what = "folder" if entry.argument == "PATH" else "file"
        raise UserError(f"say which {what}, for example {kind}:my-images")
    _check_shape(config, entry)
    return entry.load(config, download)


def _valid_name(kind: str) -> str:
    return f"{kind}:{DATASETS[kind].argument}" if DATASETS[kind].argument else kind


def _check_shape(config: DataConfig, entry: Entry) -> None:
    """Images of files can have any size; all others have the one they have."""
    if entry.load is load_pictures or (config.image_size is None and config.channels is None):
        return
    if entry.image_shape:
        channels, side, _ = entry.image_shape
        if config.image_size in (None, side) and config.channels in (None, channels):
            return
        what = f"the images of {shown(config.name)} are {side} x {side} with {channels} channel(s)"
    else:
        what = f"the images of {shown(config.name)} are used as they are"
    raise UserError(f"{what}; another image size or number of channels can only be asked for with folder:PATH")


def load_digits(config: DataConfig, download: bool) -> DataSet:
    """The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn, enlarged to 28 x 28."""
    return _data_set(config, _DIGITS, _read_digits())


def _read_digits() -> dict[str, Images]:
    # Its file is read as it is: importing scikit-learn takes longer than training a small network.
    file = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(file), delimiter=",", dtype=np.int64)
    small = (table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    pixels = torch.zeros(len(small), 1, 28, 28, dtype=torch.uint8)
    for canvas, image in zip(pixels, small):  # Pillow rounds the same way on every machine
        large = Image.fromarray(image).resize((20, 20), Image.Resampling.BICUBIC)
        canvas[0, 4:24, 4:24] = torch.from_numpy(np.array(large))
    labels = torch.from_numpy(table[:, -1].copy())
    test, train = hold_out(labels, 360, "digits")
    return {"train": (pixels[train], labels[train]), "test": (pixels[test], labels[test])}


def load_mnist(config: DataConfig, download: bool) -> DataSet:
    """Handwritten digits. LeCun, Cortes and Burges."""
    return _data_set(config, _DIGITS, _read_mnist(config, download))


def load_fashion_mnist(config: DataConfig, download: bool) -> DataSet:
    """Pictures of clothes. Xiao, Rasul and Vollgraf (2017)."""
    return _data_set(config, _FASHION, _read_mnist(config, download))


def _read_mnist(config: DataConfig, download: bool) -> dict[str, Images]:
    folder = _fetched(config, download)

    def read(part: str) -> Images:
        images, labels = folder / f"{part}-images-idx3-ubyte", folder / f"{part}-labels-idx1-ubyte"
        return readers.read_idx_images(images, labels, image_shape=(1, 28, 28), classes=10)

    return {"train": read("train"), "test": read("t10k")}


def load_cifar_10(config: DataConfig, download: bool) -> DataSet:
    """Small colour photographs. Krizhevsky (2009)."""
    folder = _fetched(config, download)
    train = readers.read_cifar([folder / f"data_batch_{number}.bin" for number in range(1, 6)])
    test = readers.read_cifar([folder / "test_batch.bin"])
    mean = (0.49139968, 0.48215841, 0.44653091)
    std = (0.24703223, 0.24348513, 0.26158784)
    return _data_set(config, _CIFAR, {"train": train, "test": test}, mean=mean, std=std)


def load_multi_mnist(config: DataConfig, download: bool) -> DataSet:
    """Two overlapping digits on 36 x 36. No digit serves in two splits."""
    return _overlapping(config, _read_mnist(config, download))


def load_multi_digits(config: DataConfig, download: bool) -> DataSet:
    """As `load_multi_mnist`, from the embedded digits."""
    return _overlapping(config, _read_digits())


def _overlapping(config: DataConfig, images: Mapping[str, Images]) -> DataSet:
    return _data_set(config, _DIGITS, images, make_split=lambda part, name: OverlappingDigits(*part, name=name))


def load_pictures(config: DataConfig, download: bool) -> DataSet:
    """Your own image files: "folder:PATH" or "csv:FILE"."""
    listing = list_pictures(config.name)
    images, files, names = read_listing(config, listing)
    return _data_set(config, listing.classes, images, files=files, test_names=names)


def list_pictures(name: str) -> Listing:
    """The image files that "folder:PATH" or "csv:FILE" names, without reading them."""
    kind, _, argument = name.partition(":")
    if kind not in ("folder", "csv") or not argument:
        meant = f" (folder:{shown(name)}?)" if Path(name).is_dir() else ""
        raise UserError(f"'{shown(name)}' is not made of image files of yours; give folder:PATH or csv:FILE{meant}")
    path = Path(os.path.expanduser(argument))
    return list_folder(path) if kind == "folder" else list_table(path)


def load_npz(config: DataConfig, download: bool) -> DataSet:
    """Arrays x_train, y_train, x_test and y_test of a file that `numpy.savez` wrote; see `DataSet.from_arrays`."""
    path = Path(os.path.expanduser(config.name.partition(":")[2]))
    x_train, y_train, x_test, y_test = readers.read_arrays(path, ("x_train", "y_train", "x_test", "y_test"))
    try:
        return DataSet.from_arrays(x_train, y_train, x_test, y_test, name=config.name, validation=config.validation)
    except SettingError as error:
        names = {"train_images": "x_train", "train_labels": "y_train", "test_images": "x_test", "test_labels": "y_test"}
        raise UserError(f"{shown(path)}: {names.get(error.setting, error.setting)} {error.problem}") from error


DATASETS: dict[str, Entry] = {
    "digits": Entry(load_digits, "handwritten digits that come with scikit-learn", "1,437 + 360", (1, 28, 28), 10),
    "mnist": Entry(load_mnist, "handwritten digits", "60,000 + 10,000", (1, 28, 28), 10),
    "fashion-mnist": Entry(load_fashion_mnist, "pictures of clothes", "60,000 + 10,000", (1, 28, 28), 10),
    "cifar-10": Entry(load_cifar_10, "small colour photographs", "50,000 + 10,000", (3, 32, 32), 10),
    "multi-mnist": Entry(
        load_multi_mnist, "two overlapping digits, made from mnist", "60,000,000 + 10,000,000", (1, 36, 36), 10
    ),
    "multi-digits": Entry(
        load_multi_digits, "two overlapping digits, made from digits", "1,437,000 + 360,000", (1, 36, 36), 10
    ),
    "folder": Entry(
        load_pictures, "your own images: folder:PATH, with a sub-folder for each class", "yours", None, None, "PATH"
    ),
    "csv": Entry(load_pictures, "your own images: csv:FILE, with columns path and label", "yours", None, None, "FILE"),
    "npz": Entry(
        load_npz, "your own arrays: npz:FILE, with x_train, y_train, x_test, y_test", "yours", None, None, "FILE"
    ),
}


class Row(NamedTuple):
    """A line of `torchcaps data list`."""

    name: str
    summary: str
    images: str
    image_shape: str
    classes: str
    megabytes: int  # on disk
    cached: str  # "yes", "no", "damaged", or "built in" if there is nothing to fetch


def describe(folder: Path | None = None) -> list[Row]:
    """What can be loaded, and what is already there.

    Args:
        folder: where fetched data sets are kept, if not in the usual place.
    """
    rows = []
    for name, entry in DATASETS.items():
        source = SOURCES.get(SAME_FILES.get(name, name))
        shape = " x ".join(map(str, entry.image_shape)) if entry.image_shape else "as asked"
        classes = str(entry.classes) if entry.classes else "yours"
        size = source.megabytes if source else 0
        cached = _cached(name, folder) if source else "built in"
        rows.append(Row(name, entry.summary, entry.images, shape, classes, size, cached))
    return rows


def _cached(name: str, folder: Path | None) -> str:
    problems = set(fetch.verify(name, folder).values())
    return "yes" if problems == {""} else "no" if problems == {fetch.MISSING} else "damaged"


def _fetched(config: DataConfig, download: bool) -> Path:
    """The folder with the verified files of a data set."""
    folder = Path(os.path.expanduser(config.folder)) if config.folder else None
    if download:
        return fetch.fetch(config.name, cache=folder)
    for file, problem in fetch.verify(config.name, folder).items():
        if problem:
            raise UserError(f"{config.name}: {file} {problem}; run: torchcaps data fetch {config.name}")
    return fetch.cache_root(folder) / fetch.source_of(config.name)[0]


def _plain_split(images: Images, name: str) -> Split:
    pixels, labels = images
    return ImageSplit(pixels, labels) if labels.ndim == 1 else MultiLabelSplit(pixels, labels)


def _data_set(
    config: DataConfig,
    classes: tuple[str, ...],
    images: Mapping[str, Images],
    *,
    make_split: Callable[[Images, str], Split] = _plain_split,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    files: FileReport | None = None,
    test_names: tuple[str, ...] = (),
) -> DataSet:
    """All three splits, the validation images taken from the training images unless they are there already.

    Without ``mean`` and ``std``, grey images stay as they are and colours are brought to [-1, 1].
    """
    divided = _with_validation(images, config.validation)
    channels = divided["train"][0].shape[1]
    splits = {name: make_split(part, name) for name, part in divided.items()}
    return DataSet(
        name=config.name,
        classes=classes,
        train=splits["train"],
        validation=splits.get("validation"),
        test=splits["test"],
        mean=mean or ((0.0,) if channels == 1 else (0.5,) * channels),
        std=std or ((1.0,) if channels == 1 else (0.5,) * channels),
        files=files,
        test_names=test_names,
    )


def _with_validation(images: Mapping[str, Images], count: int) -> Mapping[str, Images]:
    """Hold ``count`` images out of the training images, for validation."""
    if not count:
        return images
    if "validation" in images:
        raise SettingError("validation", "must be 0: this data set brings its own validation images")
    pixels, labels = images["train"]
    if count >= len(labels):
        raise UserError(f"cannot hold {count} of {len(labels)} training images out for validation; give fewer")
    held, rest = hold_out(labels, count, "validation")
    lost = _classes_of(labels) - _classes_of(labels[rest])
    if lost:
        raise UserError(f"holding {count} images out leaves {len(lost)} class(es) no training image; give fewer")
    return {**images, "train": (pixels[rest], labels[rest]), "validation": (pixels[held], labels[held])}


def _classes_of(labels: Tensor) -> set[int]:
    """The classes that images with these labels (N,) or (N, J) show."""
    there = labels.any(0).nonzero() if labels.ndim == 2 else torch.unique(labels)
    return set(there.flatten().tolist())
