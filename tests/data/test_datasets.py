"""`load` and the data sets it makes. MNIST and the like are replaced by small files of the same layout."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data_examples import picture_folder

from torchcaps.data.batches import Batches
from torchcaps.data.config import DataConfig
from torchcaps.data.datasets import DATASETS, DataSet, describe, load
from torchcaps.data.sources import SOURCES, File, Package, Source
from torchcaps.data.splits import ImageSplit, MultiLabelSplit, OverlappingDigits, hold_out
from torchcaps.errors import UserError
from torchcaps.settings import SettingError

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
        body = bytes(number % 10 if len(shape) == 1 else number % 251 for number in range(count))
        return b"\0\0\x08" + bytes([len(shape)]) + b"".join(a.to_bytes(4, "big") for a in shape) + body

    parts = {"train": train, "t10k": test}
    images = {f"{part}-images-idx3-ubyte": idx(n, 28, 28) for part, n in parts.items()}
    return images | {f"{part}-labels-idx1-ubyte": idx(n) for part, n in parts.items()}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put(monkeypatch, tmp_path, "mnist", mnist_files(100, 30))
    put(monkeypatch, tmp_path, "fashion-mnist", mnist_files(60, 20))
    record = [bytes([label]) + bytes([label * 20]) * 3072 for label in range(10)]
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    put(monkeypatch, tmp_path, "cifar-10", {name: b"".join(record) for name in names})
    monkeypatch.setenv("TORCHCAPS_DATA", str(tmp_path))
    return tmp_path


SIZES = {
    "digits": (1437, 360),
    "mnist": (100, 30),
    "fashion-mnist": (60, 20),
    "cifar-10": (50, 10),
    "multi-mnist": (100_000, 30_000),
    "multi-digits": (1_437_000, 360_000),
    "folder": (40, 10),
    "csv": (40, 10),
    "npz": (40, 10),
}


@pytest.fixture(params=list(DATASETS))
def name(request: pytest.FixtureRequest, cache: Path, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"folder:{picture_folder(tmp_path / 'pictures', {'a': 25, 'b': 25})}"
    if request.param == "csv":
        pictures = picture_folder(tmp_path / "pictures", {"a": 25, "b": 25})
        lines = [f"{path.relative_to(tmp_path)},{path.parent.name}" for path in sorted(pictures.rglob("*.png"))]
        (tmp_path / "table.csv").write_text("\n".join(["path,label", *lines]))
        return f"csv:{tmp_path / 'table.csv'}"
    if request.param == "npz":
        images = np.random.default_rng(0).integers(0, 256, (50, 20, 20, 3), dtype=np.uint8)
        labels = np.arange(50) % 4
        parts = {"x_train": images[10:], "y_train": labels[10:], "x_test": images[:10], "y_test": labels[:10]}
        np.savez(tmp_path / "arrays.npz", **parts)
        return f"npz:{tmp_path / 'arrays.npz'}"
    return str(request.param)


def check(data: DataSet) -> None:
    parts = [data.train, data.test, *([data.validation] if data.validation else [])]
    for split in parts:
        assert split.image_shape == data.image_shape
        batch = Batches(split, batch_size=8, seed=0).at(0)
        assert batch.images.shape == (8, *data.image_shape)
        assert batch.labels.max() < len(data.classes)
    assert len(data.mean) == len(data.std) == data.image_shape[0]
    assert all(deviation > 0 for deviation in data.std)


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
    copies = 1000 if name.startswith("multi-") else 1
    assert len(divided.validation) == 10 * copies
    assert len(divided.train) == len(whole.train) - 10 * copies
    some = torch.arange(10)
    assert torch.equal(divided.test.fetch(some).images, whole.test.fetch(some).images)
    assert again.validation is not None
    assert torch.equal(divided.validation.fetch(some).images, again.validation.fetch(some).images)
    if isinstance(whole.train, ImageSplit):
        assert isinstance(divided.train, ImageSplit)
        assert isinstance(divided.validation, ImageSplit)
        together = torch.cat([divided.train.pixels, divided.validation.pixels]).flatten(1).double()
        assert sorted(together.sum(1).tolist()) == sorted(whole.train.pixels.flatten(1).double().sum(1).tolist())


@pytest.mark.parametrize("count", [100, 1000])
def test_impossible_validation(cache: Path, count: int) -> None:
    with pytest.raises(UserError, match="of 100 training images"):
        load("mnist", validation=count)
    with pytest.raises(SettingError, match="validation must be at least 0"):
        load("mnist", validation=-1)


def test_no_class_is_left_without_training_images() -> None:
    pixels, labels = np.zeros((21, 9, 9), dtype=np.uint8), [0] * 10 + [1] * 10 + [2]
    with pytest.raises(UserError, match=r"leaves 1 class\(es\) no training image"):
        DataSet.from_arrays(pixels, labels, pixels, labels, validation=15)


def test_hold_out_keeps_the_proportions() -> None:
    labels = torch.tensor([0] * 100 + [1] * 50 + [2] * 10)
    held, rest = hold_out(labels, 32, "test")
    assert torch.bincount(labels[held]).tolist() == [20, 10, 2]
    assert torch.equal(torch.cat([held, rest]).sort().values, torch.arange(160))
    assert not torch.equal(held, hold_out(labels, 32, "something else")[0])


def test_overlapping_digits_of_one_split_are_in_no_other(cache: Path) -> None:
    data = load("multi-mnist", validation=20)
    assert data.validation is not None
    train, validation = (set(map(bytes, split.pixels.numpy())) for split in (data.train, data.validation))
    assert not train & validation


def test_digits_look_like_their_classes() -> None:
    data = load("digits")
    assert isinstance(data.train, ImageSplit)
    assert isinstance(data.test, ImageSplit)
    assert torch.bincount(data.test.labels).min() >= 34
    assert data.train.pixels.max() == 255
    assert (data.train.pixels[:, :, :4] == 0).all()
    train, test = (split.pixels.flatten(1).float() for split in (data.train, data.test))
    nearest = torch.cdist(test, train).argmin(1)
    assert (data.train.labels[nearest] == data.test.labels).float().mean() > 0.97


@pytest.mark.parametrize("name", ["mnst", "MNIST", "cifar10", "imagenet", "", "mnist:x", "folder", "npz", "\x1b[31m"])
def test_unknown_name(name: str) -> None:
    with pytest.raises(UserError, match=r"valid ones are: digits, mnist, .*folder:PATH, csv:FILE, npz:FILE") as error:
        load(name)
    guess = {"mnst": "mnist", "MNIST": "mnist", "cifar10": "cifar-10"}.get(name)
    assert guess is None or f"did you mean '{guess}'" in str(error.value)
    assert "\x1b" not in str(error.value)


def test_settings_by_name_go_before_those_given() -> None:
    config = DataConfig(name="digits", validation=10)
    assert len(load(config, validation=20).train) == len(load("digits", validation=20).train) == 1417


@pytest.mark.parametrize("kind", ["folder", "csv", "npz"])
@pytest.mark.parametrize("path", ["none", "~nobody-of-that-name/x", "a\0b", "x" * 5000, "\udcff"])
def test_impossible_paths(kind: str, path: str) -> None:
    with pytest.raises(UserError, match=r"does not exist|cannot be read") as error:
        load(f"{kind}:{path}")
    str(error.value).encode()


def test_impossible_cache() -> None:
    with pytest.raises(UserError, match="cannot write to the data folder"):
        load("mnist", folder="a\0b")


def test_other_sizes_only_for_folders(cache: Path) -> None:
    assert load("mnist", image_size=28, channels=1).image_shape == (1, 28, 28)
    for wish in ({"image_size": 32}, {"channels": 3}):
        with pytest.raises(UserError, match="folder:PATH"):
            load("mnist", **wish)


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


def test_describe(cache: Path) -> None:
    (cache / "cifar-10" / "test_batch.bin").unlink()
    (cache / "fashion-mnist" / "t10k-labels-idx1-ubyte").write_bytes(b"")
    rows = {row.name: row for row in describe()}
    assert list(rows) == list(DATASETS)
    assert rows["digits"].cached == "built in"
    assert rows["mnist"].cached == rows["multi-mnist"].cached == "yes"
    assert rows["fashion-mnist"].cached == rows["cifar-10"].cached == "damaged"
    assert {row.cached for row in describe(cache / "elsewhere")} == {"built in", "no"}


def test_a_data_set_says_what_is_in_it(name: str) -> None:
    data = load(DataConfig(name=name, validation=10))
    report = data.report
    assert list(report.images) == ["train", "validation", "test"]
    assert report.images["train"] == len(data.train)
    labels_per_image = 2 if name.startswith("multi-") else 1
    for split, counts in report.class_counts.items():
        assert len(counts) == len(data.classes)
        assert abs(sum(counts) - labels_per_image * report.images[split]) <= len(counts)
    assert f"{len(data.classes)} classes" in str(report)
    assert max(len(line) for line in str(report).splitlines()[1:]) <= 80


def test_malformed_files_of_a_known_set(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are what the tables expect, but not what the layout expects."""
    good = mnist_files(100, 30)
    for change, problem in (
        ({"train-labels-idx1-ubyte": good["t10k-labels-idx1-ubyte"]}, "30 labels for 100 images"),
        ({"t10k-labels-idx1-ubyte": good["t10k-labels-idx1-ubyte"][:-1] + b"\x0a"}, "label 10"),
        ({"t10k-images-idx3-ubyte": good["t10k-labels-idx1-ubyte"]}, "no pixels"),
        ({"train-images-idx3-ubyte": b""}, "not an IDX file"),
    ):
        shutil.rmtree(cache / "mnist")
        put(monkeypatch, cache, "mnist", good | change)
        with pytest.raises(UserError, match=problem):
            load("mnist")


class TestFromArrays:
    def test_every_layout_and_type(self) -> None:
        generator = np.random.default_rng(0)
        pixels = generator.integers(0, 256, (30, 3, 9, 11), dtype=np.uint8)
        labels = np.arange(30) % 3
        for images in (pixels, pixels.transpose(0, 2, 3, 1), pixels / 255, (pixels / 255).astype(np.float32)):
            data = DataSet.from_arrays(images, labels, images[:6], labels[:6])
            assert isinstance(data.train, ImageSplit)
            assert torch.equal(data.train.pixels, torch.from_numpy(pixels))
            assert data.classes == ("0", "1", "2")
        data = DataSet.from_arrays(torch.from_numpy(pixels), torch.from_numpy(labels), pixels, labels, "xyz")
        assert data.classes == ("x", "y", "z")
        assert data.image_shape == (3, 9, 11)
        grey = DataSet.from_arrays(pixels[:, 0], labels, pixels[:, 0], labels, validation=6)
        assert grey.image_shape == (1, 9, 11)
        assert grey.validation is not None
        assert (len(grey.train), len(grey.validation), grey.mean, grey.std) == (24, 6, (0.0,), (1.0,))

    def test_names_as_labels(self) -> None:
        pixels = np.zeros((4, 9, 9), dtype=np.uint8)
        data = DataSet.from_arrays(pixels, ["b", "a", "b", "c"], pixels[:1], ["c"])
        assert data.classes == ("a", "b", "c")
        assert isinstance(data.train, ImageSplit)
        assert data.train.labels.tolist() == [1, 0, 1, 2]

    def test_several_labels_an_image(self) -> None:
        pixels = np.zeros((4, 9, 9), dtype=np.uint8)
        presence = [[1, 0, 1], [0, 1, 0], [0, 0, 1], [1, 1, 1]]
        data = DataSet.from_arrays(pixels, presence, pixels, presence, ["a", "b", "c"], validation=1)
        assert data.multi_label
        assert isinstance(data.train, MultiLabelSplit)
        assert data.test.fetch(torch.arange(4)).labels.tolist() == [[0, 2, -1], [1, -1, -1], [2, -1, -1], [0, 1, 2]]

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ({"train_images": np.zeros((4, 9, 9), dtype=np.int32)}, "train_images must be uint8"),
            ({"train_images": np.full((4, 9, 9), 1.5)}, "train_images must be from 0 to 1"),
            ({"train_images": np.full((4, 9, 9), np.nan)}, "train_images must be from 0 to 1"),
            ({"train_images": np.zeros((4, 9, 9, 2), dtype=np.uint8)}, "1 or 3 channels"),
            ({"train_images": np.zeros((4, 0, 9), dtype=np.uint8)}, "at least one pixel"),
            ({"train_images": np.zeros((4, 9), dtype=np.uint8)}, r"must be \(N, H, W\)"),
            ({"train_images": np.zeros((5, 9, 9), dtype=np.uint8)}, "train_labels must be as many"),
            ({"train_images": "nonsense"}, "train_images must be"),
            ({"train_images": [[1], [2, 3]]}, "train_images must be an array"),
            ({"test_images": np.zeros((4, 9, 8), dtype=np.uint8)}, "shape of the training images"),
            ({"train_labels": [0, 1, 2, -1]}, "train_labels must be whole numbers from 0 to 2"),
            ({"train_labels": [0, 1, 2, 10**12]}, "not up to 1000000000000"),
            ({"train_labels": [0.0, 1.0, 0.5, 1.0]}, "whole numbers from 0 or texts, not float64"),
            ({"train_labels": [True, False, True, False]}, "whole numbers from 0 or texts, not bool"),
            ({"train_labels": [0, 0, 0, 0]}, "classes must be at least 2"),
            ({"train_labels": [[0, 2]] * 4, "test_labels": [[0, 1]] * 4}, "0 or 1 for each of the 2"),
            ({"test_labels": [0, 1, 2, 3]}, "test_labels must be whole numbers from 0 to 2"),
            ({"test_labels": ["a", "b", "c", "d"]}, "test_labels must be names"),
            ({"test_labels": [[0, 1]] * 4}, "as many axes"),
            ({"test_labels": []}, "test_labels must be"),
            ({"classes": ["a", "a", "b"]}, "all different"),
        ],
    )
    def test_what_is_wrong_is_said(self, arguments: dict[str, object], problem: str) -> None:
        pixels, labels = np.zeros((4, 9, 9), dtype=np.uint8), [0, 1, 2, 0]
        good = {"train_images": pixels, "train_labels": labels, "test_images": pixels, "test_labels": labels}
        with pytest.raises(SettingError, match=problem):
            DataSet.from_arrays(**{**good, **arguments})

    def test_npz_names_its_own_arrays(self, tmp_path: Path) -> None:
        pixels = np.zeros((4, 9, 9), dtype=np.uint8)
        np.savez(tmp_path / "x.npz", x_train=pixels, y_train=[0, 1, 0], x_test=pixels, y_test=[0, 1, 0, 1])
        with pytest.raises(UserError, match=r"x\.npz: y_train must be as many as the images: 3 for 4"):
            load(f"npz:{tmp_path / 'x.npz'}")
        with pytest.raises(UserError, match="used as they are"):
            load(f"npz:{tmp_path / 'x.npz'}", image_size=20)
        with pytest.raises(UserError, match="which file"):
            load("npz:")


def test_balanced_weights() -> None:
    pixels = np.zeros((12, 9, 9), dtype=np.uint8)
    labels = [0] * 8 + [1] * 3 + [3]
    weights = DataSet.from_arrays(pixels, labels, pixels, labels, "abcd").balanced_weights()
    assert weights.dtype == torch.float32
    products = (weights * torch.tensor([8.0, 3.0, 0.0, 1.0])).tolist()
    assert products == pytest.approx([4.0, 4.0, 0.0, 4.0])  # 12 images in all: 1 an image on average
    assert load("multi-digits").balanced_weights() == pytest.approx(torch.ones(10), abs=0.1)
    assert isinstance(load("multi-digits").train, OverlappingDigits)
