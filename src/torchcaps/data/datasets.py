"""The data sets: how each becomes a `DataSet` with a training, a validation and a test split."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from torchcaps.data import fetch, readers, stateless
from torchcaps.data.batches import ImageSplit, OverlappingDigits, Shape, Split
from torchcaps.errors import UserError

_DIGITS = tuple("0123456789")
_FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_TEST_SHARE = 0.2  # of a folder that does not bring its own split


@dataclass(frozen=True)
class DataSet:
    name: str
    classes: tuple[str, ...]
    train: Split
    validation: Split | None
    test: Split
    mean: tuple[float, ...]  # of each channel, for images in [0, 1]
    std: tuple[float, ...]

    @property
    def image_shape(self) -> Shape:
        return self.train.image_shape


@dataclass(frozen=True)
class Request:
    """What the caller of `load` asked for; every loader uses what concerns it."""

    name: str
    cache: Path | None
    validation: int
    image_size: int | None
    channels: int | None
    fit: str
    download: bool


@dataclass(frozen=True)
class Entry:
    """A line of the registry. A folder's sizes are not known before it is read."""

    load: Callable[[Request], DataSet]
    summary: str
    images: str
    image_shape: Shape | None
    classes: int | None


Images = tuple[Tensor, Tensor]  # pixels (N, C, H, W) uint8, labels (N,) int64


def load_digits(request: Request) -> DataSet:
    """The 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn, enlarged to 28 x 28."""
    return _data_set(request, _DIGITS, *_read_digits())


def _read_digits() -> tuple[Images, Images]:
    from sklearn.datasets import load_digits as bundled  # slow to import

    digits = bundled()
    small = (digits.images * (255 / 16)).round().astype(np.uint8)
    pixels = torch.zeros(len(small), 1, 28, 28, dtype=torch.uint8)
    for canvas, image in zip(pixels, small):  # Pillow rounds the same way on every machine
        large = Image.fromarray(image).resize((20, 20), Image.Resampling.BICUBIC)
        canvas[0, 4:24, 4:24] = torch.from_numpy(np.array(large))
    labels = torch.from_numpy(digits.target).long()
    test, train = hold_out(labels, 360, "digits")
    return (pixels[train], labels[train]), (pixels[test], labels[test])


def load_mnist(request: Request) -> DataSet:
    """Handwritten digits. LeCun, Cortes and Burges."""
    return _data_set(request, _DIGITS, *_read_mnist(request))


def load_fashion_mnist(request: Request) -> DataSet:
    """Pictures of clothes. Xiao, Rasul and Vollgraf (2017)."""
    return _data_set(request, _FASHION, *_read_mnist(request))


def load_cifar_10(request: Request) -> DataSet:
    """Small colour photographs. Krizhevsky (2009)."""
    folder = _files(request)
    train = readers.read_cifar([folder / f"data_batch_{i}.bin" for i in range(1, 6)])
    test = readers.read_cifar([folder / "test_batch.bin"])
    mean = (0.49139968, 0.48215841, 0.44653091)
    std = (0.24703223, 0.24348513, 0.26158784)
    return _data_set(request, _CIFAR, train, test, mean=mean, std=std)


def load_multi_mnist(request: Request) -> DataSet:
    """Two overlapping digits on 36 x 36. No digit serves in two splits."""
    return _overlapping(request, *_read_mnist(request))


def load_multi_digits(request: Request) -> DataSet:
    """As `load_multi_mnist`, from the embedded digits."""
    return _overlapping(request, *_read_digits())


def _overlapping(request: Request, train: Images, test: Images) -> DataSet:
    def pairs(images: Images, name: str) -> Split:
        return OverlappingDigits(*images, name=name)

    return _data_set(request, _DIGITS, train, test, make_split=pairs)


def load_folder(request: Request) -> DataSet:
    """Your own images: a sub-folder for each class, or `train` and `test` with such sub-folders."""
    path = request.name.partition(":")[2]
    if not path:
        raise UserError("say which folder, for example folder:my-images")
    if request.channels not in (None, 1, 3):
        raise UserError(f"images can have 1 channel (grey) or 3 (colour), not {request.channels}")
    size = 32 if request.image_size is None else request.image_size
    if size < 1:
        raise UserError(f"the image size is {size}: give 1 or more pixels")
    folder = Path(path).expanduser()

    def read(where: Path, channels: int | None) -> Images:
        return readers.read_folder(where, classes, image_size=size, channels=channels, fit=request.fit)

    if (folder / "train").is_dir() and (folder / "test").is_dir():
        classes = readers.class_names(folder / "train")
        if different := set(classes) ^ set(readers.class_names(folder / "test")):
            names = ", ".join(sorted(different))
            raise UserError(f"{folder}: train and test must have the same classes; only one of them has {names}")
        train = read(folder / "train", request.channels)
        test = read(folder / "test", train[0].shape[1])
    else:
        classes = readers.class_names(folder)
        train, test = _split_folder(folder, classes, read(folder, request.channels))

    if train[0].shape[1] == 1:
        return _data_set(request, classes, train, test)
    return _data_set(request, classes, train, test, mean=(0.5,) * 3, std=(0.5,) * 3)


def _split_folder(folder: Path, classes: tuple[str, ...], images: Images) -> tuple[Images, Images]:
    pixels, labels = images
    for name, count in zip(classes, torch.bincount(labels).tolist()):
        if count < 2:
            raise UserError(
                f"{folder}: the class '{name}' has only {count} image, too few to keep one for testing; "
                "add some, or bring your own split in sub-folders train and test"
            )
    rank, share = _places_in_class(labels, "folder")
    held_out = (share < _TEST_SHARE) | (rank == 0)
    return (pixels[~held_out], labels[~held_out]), (pixels[held_out], labels[held_out])


def hold_out(labels: Tensor, count: int, purpose: str) -> tuple[Tensor, Tensor]:
    """Numbers of `count` images with the classes in proportion, and of all others. Always the same ones."""
    _, share = _places_in_class(labels, purpose)
    order = torch.argsort(share, stable=True)
    return order[:count].sort().values, order[count:].sort().values


def _places_in_class(labels: Tensor, purpose: str) -> tuple[Tensor, Tensor]:
    """Each image's place in a shuffled line of its class: as a number, and as a fraction of the line."""
    shuffled = stateless.permute(torch.arange(len(labels)), len(labels), stateless.key("hold out", purpose))
    line = shuffled[torch.argsort(labels[shuffled], stable=True)]  # class after class
    sizes = torch.bincount(labels)
    starts = sizes.cumsum(0) - sizes
    rank = torch.empty_like(labels)
    rank[line] = torch.arange(len(labels)) - starts[labels[line]]
    return rank, (rank + 0.5) / sizes[labels]


def _divided(train: Images, count: int) -> tuple[Images, Images | None]:
    """Hold `count` images out of the training images, for validation."""
    pixels, labels = train
    if not 0 <= count < len(labels):
        raise UserError(f"cannot hold {count} of {len(labels)} training images out for validation; give fewer")
    if not count:
        return train, None
    held, rest = hold_out(labels, count, "validation")
    return (pixels[rest], labels[rest]), (pixels[held], labels[held])


def _single(images: Images, name: str) -> Split:
    return ImageSplit(*images)


def _data_set(
    request: Request,
    classes: tuple[str, ...],
    train: Images,
    test: Images,
    *,
    make_split: Callable[[Images, str], Split] = _single,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[float, ...] = (1.0,),
) -> DataSet:
    """All three splits, the validation images taken from the training images; grey images stay as they are."""
    train, validation = _divided(train, request.validation)
    return DataSet(
        name=request.name,
        classes=classes,
        train=make_split(train, "train"),
        validation=make_split(validation, "validation") if validation else None,
        test=make_split(test, "test"),
        mean=mean,
        std=std,
    )


def _read_mnist(request: Request) -> tuple[Images, Images]:
    folder = _files(request)

    def read(part: str) -> Images:
        pixels = readers.read_idx(folder / f"{part}-images-idx3-ubyte")[:, None]
        return pixels, readers.read_idx(folder / f"{part}-labels-idx1-ubyte").long()

    return read("train"), read("t10k")


def _files(request: Request) -> Path:
    if request.download:
        return fetch.fetch(request.name, cache=request.cache)
    for file, ok, problem in fetch.verify(request.name, request.cache):
        if not ok:
            raise UserError(f"{request.name}: {file} {problem}; run: torchcaps data fetch {request.name}")
    return fetch.cache_root(request.cache) / fetch.source_of(request.name)[0]
