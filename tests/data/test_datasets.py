"""`load` and the data sets it makes. MNIST and the like are replaced by small files of the same layout."""

import hashlib
from pathlib import Path

import pytest
import torch
from PIL import Image

from torchcaps.data import DATASETS, Batches, DataSet, ImageSplit, describe, load
from torchcaps.data.datasets import hold_out
from torchcaps.data.sources import SOURCES, File, Package, Source
from torchcaps.errors import UserError

NO_PACKAGE = Package("npm", "none@1", "none-*.tgz", 1)


def put(monkeypatch: pytest.MonkeyPatch, cache: Path, name: str, files: dict[str, bytes]) -> None:
    """Put files into a cache and make the tables believe that they are the data set."""
    (cache / name).mkdir(parents=True)
    facts = []
    for file, content in files.items():
        (cache / name / file).write_bytes(content)
        facts.append(File(file, len(content), hashlib.sha256(content).hexdigest()))
    monkeypatch.setitem(SOURCES, name, Source(tuple(facts), (), NO_PACKAGE))


def mnist_files(train: int, test: int) -> dict[str, bytes]:
    def idx(*shape: int) -> bytes:
        count = int(torch.tensor(shape).prod())
        body = bytes(i % 10 if len(shape) == 1 else i % 251 for i in range(count))
        return b"\0\0\x08" + bytes([len(shape)]) + b"".join(a.to_bytes(4, "big") for a in shape) + body

    parts = {"train": train, "t10k": test}
    images = {f"{part}-images-idx3-ubyte": idx(n, 28, 28) for part, n in parts.items()}
    return images | {f"{part}-labels-idx1-ubyte": idx(n) for part, n in parts.items()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put(monkeypatch, tmp_path, "mnist", mnist_files(100, 30))
    put(monkeypatch, tmp_path, "fashion-mnist", mnist_files(60, 20))
    record = [bytes([label]) + bytes([label * 20]) * 3072 for label in range(10)]
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    put(monkeypatch, tmp_path, "cifar-10", {name: b"".join(record) for name in names})
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))
    return tmp_path


def picture_folder(folder: Path, counts: dict[str, int], colour: bool = True) -> Path:
    for shade, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (12, 9), (shade * 50, i, 99) if colour else (i, i, i)).save(folder / name / f"{i:03}.png")
    return folder


SIZES = {
    "digits": (1437, 360),
    "mnist": (100, 30),
    "fashion-mnist": (60, 20),
    "cifar-10": (50, 10),
    "multi-mnist": (100_000, 30_000),
    "multi-digits": (1_437_000, 360_000),
    "folder": (40, 10),
}


@pytest.fixture(params=list(DATASETS))
def name(request: pytest.FixtureRequest, cache: Path, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"folder:{picture_folder(tmp_path / 'pictures', {'a': 25, 'b': 25})}"
    return str(request.param)


def check(data: DataSet) -> None:
    parts = [data.train, data.test, *([data.validation] if data.validation else [])]
    for split in parts:
        assert split.image_shape == data.image_shape
        batch = Batches(split, batch_size=8, seed=0).at(0)
        assert batch.images.shape == (8, *data.image_shape)
        assert batch.labels.max() < len(data.classes)
    assert len(data.mean) == len(data.std) == data.image_shape[0]
    assert all(s > 0 for s in data.std)


def test_every_data_set(name: str) -> None:
    kind = name.partition(":")[0]
    data = load(name)
    assert data.name == name
    assert (len(data.train), len(data.test)) == SIZES[kind]
    assert data.validation is None
    if (shape := DATASETS[kind].image_shape) is not None:
        assert data.image_shape == shape
        assert len(data.classes) == DATASETS[kind].classes
    check(data)


def test_validation_is_taken_from_training_only(name: str) -> None:
    whole, divided, again = load(name), load(name, validation=10), load(name, validation=10)
    check(divided)
    assert divided.validation is not None
    each = 1000 if name.startswith("multi-") else 1
    assert len(divided.validation) == 10 * each
    assert len(divided.train) == len(whole.train) - 10 * each
    some = torch.arange(10)
    assert torch.equal(divided.test.fetch(some).images, whole.test.fetch(some).images)
    assert again.validation is not None
    assert torch.equal(divided.validation.fetch(some).images, again.validation.fetch(some).images)
    if isinstance(whole.train, ImageSplit):
        assert isinstance(divided.train, ImageSplit)
        assert isinstance(divided.validation, ImageSplit)
        together = torch.cat([divided.train.pixels, divided.validation.pixels]).flatten(1).double()
        assert sorted(together.sum(1).tolist()) == sorted(whole.train.pixels.flatten(1).double().sum(1).tolist())


@pytest.mark.parametrize("count", [-1, 100, 1000])
def test_impossible_validation(cache: Path, count: int) -> None:
    with pytest.raises(UserError, match="of 100 training images"):
        load("mnist", validation=count)


def test_hold_out_keeps_the_proportions() -> None:
    labels = torch.tensor([0] * 100 + [1] * 50 + [2] * 10)
    held, rest = hold_out(labels, 32, "test")
    assert torch.bincount(labels[held]).tolist() == [20, 10, 2]
    assert torch.equal(torch.cat([held, rest]).sort().values, torch.arange(160))
    assert not torch.equal(held, hold_out(labels, 32, "something else")[0])


def test_overlapping_digits_of_one_split_are_in_no_other(cache: Path) -> None:
    data = load("multi-mnist", validation=20)
    assert data.validation is not None
    train, validation = (set(map(bytes, s.pixels.numpy())) for s in (data.train, data.validation))  # type: ignore[attr-defined]
    assert not train & validation


def test_digits_look_like_their_classes() -> None:
    data = load("digits")
    assert isinstance(data.train, ImageSplit)
    assert isinstance(data.test, ImageSplit)
    assert torch.bincount(data.test.labels).min() >= 34
    assert data.train.pixels.max() == 255
    assert (data.train.pixels[:, :, :4] == 0).all()
    train, test = (s.pixels.flatten(1).float() for s in (data.train, data.test))
    nearest = torch.cdist(test, train).argmin(1)
    assert (data.train.labels[nearest] == data.test.labels).float().mean() > 0.97


@pytest.mark.parametrize("name", ["mnst", "MNIST", "cifar10", "imagenet", "", "mnist:x"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(UserError, match=r"valid ones are: digits, mnist, .*folder:PATH") as error:
        load(name)
    guess = {"mnst": "mnist", "MNIST": "mnist", "cifar10": "cifar-10"}.get(name)
    assert guess is None or f"did you mean '{guess}'" in str(error.value)


def test_other_sizes_only_for_folders(cache: Path) -> None:
    assert load("mnist", image_size=28, channels=1).image_shape == (1, 28, 28)
    for wish in ({"image_size": 32}, {"channels": 3}):
        with pytest.raises(UserError, match="folder:PATH"):
            load("mnist", **wish)  # type: ignore[arg-type]


def test_without_download_says_how_to_get_it(cache: Path) -> None:
    (cache / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(b"short")
    for name in ("mnist", "multi-mnist"):
        with pytest.raises(UserError, match=rf"has 5 bytes instead of .* torchcaps data fetch {name}"):
            load(name, download=False)
    assert len(load("fashion-mnist", download=False).test) == 20


def test_broken_cache_is_never_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no npm
    path = cache / "mnist" / "train-images-idx3-ubyte"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="could not get mnist"):
        load("mnist")


class TestFolder:
    def test_options(self, tmp_path: Path) -> None:
        name = f"folder:{picture_folder(tmp_path / 'x', {'a': 5, 'b': 5})}"
        assert load(name).image_shape == (3, 32, 32)
        assert load(name, image_size=20, channels=1, fit="pad").image_shape == (1, 20, 20)
        grey = f"folder:{picture_folder(tmp_path / 'y', {'a': 5, 'b': 5}, colour=False)}"
        assert load(grey).image_shape == (1, 32, 32)
        for wish in ({"channels": 2}, {"image_size": 0}, {"fit": "tight"}):
            with pytest.raises(UserError):
                load(name, **wish)  # type: ignore[arg-type]
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
        assert data.test.image_shape == data.train.image_shape == (3, 32, 32)

    def test_class_mismatch(self, tmp_path: Path) -> None:
        picture_folder(tmp_path / "train", {"a": 2, "b": 2})
        picture_folder(tmp_path / "test", {"a": 1, "c": 2})
        with pytest.raises(UserError, match="only one of them has b, c"):
            load(f"folder:{tmp_path}")

    def test_too_few_to_split(self, tmp_path: Path) -> None:
        picture_folder(tmp_path, {"a": 5, "b": 1})
        with pytest.raises(UserError, match="'b' has only 1 image"):
            load(f"folder:{tmp_path}")


def test_describe(cache: Path) -> None:
    (cache / "cifar-10" / "test_batch.bin").unlink()
    (cache / "fashion-mnist" / "t10k-labels-idx1-ubyte").write_bytes(b"")
    rows = {row.name: row for row in describe()}
    assert list(rows) == list(DATASETS)
    assert rows["digits"].cached == "built in"
    assert rows["mnist"].cached == rows["multi-mnist"].cached == "yes"
    assert rows["fashion-mnist"].cached == rows["cifar-10"].cached == "damaged"
    assert {row.cached for row in describe(cache / "elsewhere")} == {"built in", "no"}
