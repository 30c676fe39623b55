"""Every reader of torchcaps with whole files for it, and what must hold of whatever it makes of a damaged one.

A :class:`Target` turns a source of random numbers into one attack. It returns normally if the outcome was right, and
raises otherwise: only :class:`torchcaps.errors.UserError` may come out of a reader.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from rich.console import Console

import torchcaps
from hostile.mutator import changed_value, mutated
from torchcaps.cli.options import merged
from torchcaps.data import fetch, readers
from torchcaps.data.config import DataConfig
from torchcaps.data.images import decode_image
from torchcaps.data.listing import list_table
from torchcaps.data.sources import SOURCES, File, Package, Source
from torchcaps.errors import UserError
from torchcaps.lab.results import CURVES, RESULTS, Results, RunRow
from torchcaps.models.files import load
from torchcaps.storage import read_tensors, write_tensors
from torchcaps.training.checkpoint import Checkpoints
from torchcaps.training.config import TrainingConfig
from torchcaps.training.environment import make_fabric
from torchcaps.training.files import read_config, read_mapping, to_yaml
from torchcaps.training.fit import _Run
from torchcaps.training.folder import COLUMNS, RunFolder
from torchcaps.training.plan import Plan
from torchcaps.training.result import RunResult

RESULT = {
    "data": "digits",
    "model": "capsnet",
    "routing": "l2",
    "reconstruction": True,
    "seed": 0,
    "steps": 30,
    "epochs": 1.5,
    "batch_size": 32,
    "images_seen": 960,
    "test_error_percent": 2.5,
    "test_images": 360,
    "validation_error_percent": None,
    "train_images_per_second": 10.0,
    "evaluate_images_per_second": 20.0,
    "parameters": 1000,
    "peak_memory_mb": 100.0,
    "train_seconds": 1.0,
    "seconds": 2.0,
    "threads": 1,
    "processes": 1,
    "device": "cpu",
    "processor": "some",
    "versions": {"torch": "2"},
    "commit": None,
}
TINY = {
    "model": {"conv_channels": 2, "primary_capsules": 2, "primary_size": 2, "class_size": 2, "reconstruction": False},
    "run": {"steps": 10, "batch_size": 8, "pictures": False},
}


@dataclass(frozen=True)
class Target:
    """A reader under attack."""

    name: str
    attack: Callable[[random.Random], bool]
    """Makes one damaged input and has it read; True if it was refused, False if it was read."""
    turn: int = 50
    """Inputs in a row: fewer where each takes long."""


def refused(read: Callable[[], object]) -> bool:
    """Whether a reader refused what it was given. Any other exception than the project's own goes on."""
    try:
        read()
    except UserError as error:
        told = str(error)
    else:
        return False
    assert told, "an error without a sentence"
    assert len(told) < 20_000, "an endless sentence"
    return True


def targets(folder: Path) -> list[Target]:
    """All readers, with their files in this folder."""
    made: list[Target] = []
    for make in (_models, _checkpoints, _settings, _records, _results, _arrays, _tables, _images, _archives):
        place = folder / make.__name__
        place.mkdir()
        made += make(place)
    return made


def _bytes_target(
    name: str, path: Path, wholes: list[bytes], read: Callable[[], object], pack: Callable[[bytes], bytes] | None = None
) -> Target:
    """Whole files changed byte by byte; ``pack`` is applied after that, to get past checksums."""

    def attack(source: random.Random) -> bool:
        content = mutated(source.choice(wholes), source, wholes)
        path.write_bytes(pack(content) if pack else content)
        return refused(read)

    return Target(name, attack)


def _models(folder: Path) -> list[Target]:
    path = folder / "x.safetensors"
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("capsnet", {"layers": [[3, 4]], "conv_channels": 2, "primary_capsules": 2}),
        ("matrix", {"matrix_sizes": (2, 2, 2, 2)}),
        ("cnn", {"conv_channels": 2, "second_channels": 2}),
    ]
    networks = []
    for number, (kind, sizes) in enumerate(kinds):
        network = TrainingConfig.from_mapping({"model": {"name": kind, **sizes}})
        task = torchcaps.CapsuleNetwork((1, 28, 28), ["a", "b"]).task
        built = network.model.build(task, network.routing)
        built.save(folder / f"{number}.safetensors", precision="int8" if number == 1 else "float32")
        networks.append(folder / f"{number}.safetensors")
    wholes = [whole.read_bytes() for whole in networks]
    signed = [read_tensors(whole) for whole in networks]

    def attack_signed(source: random.Random) -> bool:
        """What somebody writes who knows how checksums are made."""
        tensors, state = source.choice(signed)
        tensors = dict(tensors)
        if source.random() < 0.7:
            state = changed_value(state, source)
        if source.random() < 0.4:
            _change_tensors(tensors, source)
        try:
            write_tensors(path, tensors, state)
        except (ValueError, UnicodeError, RecursionError):  # not even JSON
            return True
        return refused(lambda: _all_finite(load(path)))

    return [
        _bytes_target("model file", path, wholes, lambda: _all_finite(load(path))),
        Target("model file, signed", attack_signed, turn=5),
    ]


def _all_finite(network: Any) -> None:
    assert all(bool(tensor.isfinite().all()) for tensor in network.state_dict().values())


def _change_tensors(tensors: dict[str, torch.Tensor], source: random.Random) -> None:
    name = source.choice(sorted(tensors))
    tensor = tensors[name]
    match source.randrange(7):
        case 0:
            del tensors[name]
        case 1:
            tensors[name] = tensor.reshape(-1)
        case 2:
            kinds = (torch.int64, torch.float64, torch.bool, torch.bfloat16, torch.int8, torch.complex64)
            tensors[name] = tensor.to(source.choice(kinds))
        case 3:
            tensors[name] = torch.full_like(tensor, 1) * source.choice((float("nan"), float("inf"), 1e38))
        case 4:
            tensors[name + source.choice((".x", ".scale", ""))] = torch.zeros(source.choice(((), (0,), (3, 3))))
        case 5:
            tensors[name] = tensor.unsqueeze(0)
        case 6:
            tensors[source.choice(sorted(tensors))] = tensor.clone()


def _checkpoints(folder: Path) -> list[Target]:
    settings = {"run.seed": 0, "ascent.gamma": 0.1}
    checkpoints = Checkpoints(folder / "raw")
    kept = {}
    for step in (5, 10):
        tensors = {"x": torch.arange(30.0) + step, "y": torch.tensor(step)}
        checkpoints.save(step, tensors, {"seconds": 1.5, "settings": settings})
        kept[step] = tensors
    older, newest = (path.read_bytes() for path in checkpoints.paths())
    names = [path.name for path in checkpoints.paths()]

    def attack_bytes(source: random.Random) -> bool:
        """The newest is damaged: the right one, or the one before, comes out."""
        for left in checkpoints.folder.iterdir():
            left.unlink()
        (checkpoints.folder / names[0]).write_bytes(older)
        (checkpoints.folder / names[1]).write_bytes(mutated(newest, source, [newest, older]))
        found = checkpoints.load_newest(settings, lambda line: None)
        assert found is not None
        tensors, state = found
        step = state["step"]
        assert tensors.keys() == kept[step].keys()
        assert all(torch.equal(tensors[name], kept[step][name]) for name in tensors)
        return step == 5

    config = TrainingConfig.from_mapping(TINY)
    plan = Plan.of(config)
    place = RunFolder(folder / "signed")
    place.path.mkdir()
    quiet = Console(file=io.StringIO())
    run = _Run(make_fabric(config.run), plan, plan.build_network(), place, (), quiet)
    for step in (4, 8):
        run._train_step(step - 1)
        run._checkpoint(step)
    good = {path: read_tensors(path) for path in place.checkpoints.paths()}

    def attack_signed(source: random.Random) -> bool:
        """The newest holds something else, signed: the run goes on from what fits it, or from the one before."""
        for left in place.checkpoints.folder.iterdir():
            left.unlink()
        (before, (tensors, state)), (after, (new, new_state)) = good.items()
        write_tensors(before, tensors, state)
        changed = dict(new)
        if source.random() < 0.6:
            new_state = changed_value(new_state, source)
        if source.random() < 0.6:
            _change_tensors(changed, source)
        try:
            write_tensors(after, changed, new_state)
        except (ValueError, UnicodeError, RecursionError):
            return True
        step = run._restore()
        assert step in (4, 8)
        assert run.trainer.is_finite()
        if step == 4:
            weights = run.trainer.network.state_dict()
            assert all(torch.equal(weights[name], tensors[f"network.{name}"]) for name in weights)
        if source.random() < 0.02:
            run._train_step(step)
        return step == 4

    return [Target("checkpoint", attack_bytes), Target("checkpoint, signed", attack_signed, turn=20)]


def _settings(folder: Path) -> list[Target]:
    path = folder / "config.yaml"
    mappings = [
        TrainingConfig.from_mapping(TINY).to_mapping(),
        TrainingConfig.from_mapping({"model": {"name": "matrix"}, "routing": {"name": "em"}}).to_mapping(),
    ]
    short = [yaml.safe_dump({"data": {"name": "digits"}, **TINY, "routing": {"name": "l1"}}).encode()]
    wholes = [to_yaml(TrainingConfig.from_mapping(mapping)).encode() for mapping in mappings] + short

    plan = Plan.of(TrainingConfig())

    def attack_values(source: random.Random) -> bool:
        values = changed_value(source.choice(mappings), source)

        def read() -> None:
            config = TrainingConfig.from_mapping(values)
            assert TrainingConfig.from_mapping(config.to_mapping()) == config
            if source.random() < 0.02 and _is_small(config):
                config.model.build(plan.task, config.routing)

        return refused(read)

    def read_recipe() -> None:
        recipe = read_mapping(path)
        TrainingConfig.from_mapping(merged(recipe, {"run": {"steps": 3}, "routing": {"settings": {"strength": 1.0}}}))

    def read_again() -> None:
        config = read_config(path)
        assert TrainingConfig.from_mapping(yaml.safe_load(to_yaml(config))) == config

    return [
        _bytes_target("config.yaml", path, wholes, read_again),
        _bytes_target("recipe", path, short, read_recipe),
        Target("settings", attack_values),
    ]


def _is_small(config: TrainingConfig) -> bool:
    model = config.model.to_mapping()
    sizes = [value for value in model.values() if isinstance(value, int)]
    return model["name"] == "capsnet" and all(size <= 64 for size in sizes) and not model["layers"]


def _records(folder: Path) -> list[Target]:
    run = RunFolder(folder)
    row = ",".join(["4", "0.5", "1.5", "20.0", "0.001", *["0.25"] * (len(COLUMNS) - 5)])
    metrics = "\n".join([",".join(COLUMNS), row, row.replace("4,", "8,", 1), row.replace("0.25", ""), ""]).encode()
    result = json.dumps(RESULT).encode()

    def read_metrics() -> None:
        rows = run.read_metrics()
        assert all(tuple(found) == COLUMNS for found in rows)
        run.forget_metrics_after(4)
        assert run.read_metrics() == [found for found in rows if (found["step"] or 0) <= 4]

    def attack_values(source: random.Random) -> bool:
        try:
            run.result.write_text(json.dumps(changed_value(RESULT, source)))
        except (ValueError, UnicodeError):
            return True
        return refused(lambda: RunResult.read(run.result))

    return [
        _bytes_target("metrics.csv", run.metrics, [metrics], read_metrics),
        _bytes_target("result.json", run.result, [result], lambda: RunResult.read(run.result)),
        Target("result.json, values", attack_values),
    ]


def _results(folder: Path) -> list[Target]:
    results = Results()
    for seed in range(2):
        row = RunRow.from_mapping({**RESULT, "experiment": "cpu", "run": f"a/b/seed-{seed}", "method": "b"})
        results.add(row, [dict.fromkeys(COLUMNS, 1.0)] * 3)
    results.write(folder)
    table, curves = (folder / RESULTS).read_bytes(), (folder / CURVES).read_bytes()

    def with_good(path: Path, good: bytes) -> Callable[[], None]:
        def read() -> None:
            (folder / (RESULTS if path.name == CURVES else CURVES)).write_bytes(good)
            Results.read(folder)

        return read

    plain = gzip.decompress(curves)
    return [
        _bytes_target(RESULTS, folder / RESULTS, [table], with_good(folder / RESULTS, curves)),
        _bytes_target(CURVES, folder / CURVES, [curves], with_good(folder / CURVES, table)),
        _bytes_target(f"{CURVES}, packed", folder / CURVES, [plain], with_good(folder / CURVES, table), gzip.compress),
    ]


def _arrays(folder: Path) -> list[Target]:
    pixels, labels = folder / "pixels", folder / "labels"
    idx = struct.pack(">4B3I", 0, 0, 8, 3, 5, 28, 28) + bytes(range(196)) * 20
    idx_labels = struct.pack(">4BI", 0, 0, 8, 1, 5) + bytes([0, 1, 2, 3, 9])
    cifar = folder / "cifar.bin"
    archive = folder / "x.npz"
    arrays = {
        "x_train": np.arange(24 * 64, dtype=np.uint8).reshape(24, 8, 8),
        "y_train": np.arange(24) % 3,
        "x_test": np.zeros((6, 8, 8), np.uint8),
        "y_test": np.array(list("abcabc")),
    }
    arrays["y_train"] = np.array(list("abc") * 8)
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    members: dict[str, bytes] = {}
    for name, array in arrays.items():
        one = io.BytesIO()
        np.save(one, array)
        members[name] = one.getvalue()

    def read_idx() -> None:
        images, numbers = readers.read_idx_images(pixels, labels, image_shape=(1, 28, 28), classes=10)
        assert images.shape[1:] == (1, 28, 28)
        assert len(images) == len(numbers)
        assert int(numbers.max()) < 10

    def attack_idx(source: random.Random) -> bool:
        which = source.randrange(2)
        pixels.write_bytes(mutated(idx, source, [idx, idx_labels]) if which else idx)
        labels.write_bytes(idx_labels if which else mutated(idx_labels, source, [idx, idx_labels]))
        return refused(read_idx)

    def read_npz() -> None:
        data = DataConfig(name=f"npz:{archive}").load()
        assert data.train.fetch(torch.arange(2)).images.dtype == torch.uint8

    def packed(source: random.Random) -> bytes:
        """The members changed inside an archive whose checksums are right."""
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as target:
            changed = source.choice(sorted(members))
            for name, content in members.items():
                whole = mutated(content, source, list(members.values())) if name == changed else content
                target.writestr(f"{name}.npy", whole)
        return out.getvalue()

    def attack_packed(source: random.Random) -> bool:
        archive.write_bytes(packed(source))
        return refused(read_npz)

    records = bytes(range(10)) + bytes(3063)
    return [
        Target("IDX", attack_idx),
        _bytes_target("CIFAR-10", cifar, [records * 2], lambda: readers.read_cifar([cifar])),
        _bytes_target("npz", archive, [stream.getvalue()], read_npz),
        Target("npz, packed", attack_packed),
    ]


def _tables(folder: Path) -> list[Target]:
    path = folder / "list.csv"
    wholes = [
        b"path,label\na.png,cat\nb.png,dog\nc.png,cat|dog\n",
        b"\xef\xbb\xbfPath;Label;Split\r\n'a.png';x;train\r\nb.png;y;test\r\nd.png;y;val\r\n",
        b'path\tlabel\n"a b.png"\tcaf\xe9\nb.png\tp_1$^$\n',
    ]

    def read() -> None:
        listing = list_table(path)
        assert len(listing.classes) >= 2
        assert all(label < len(listing.classes) for picture in listing.pictures() for label in picture.labels)

    return [_bytes_target("csv list", path, wholes, read)]


def _images(folder: Path) -> list[Target]:
    source = np.random.default_rng(0)
    pixels = source.integers(256, size=(13, 17, 4), dtype=np.uint8)
    made: list[Target] = []
    modes = {"PNG": "RGBA", "JPEG": "RGB", "GIF": "P", "BMP": "RGB", "TIFF": "RGB", "WEBP": "RGB", "PPM": "RGB"}
    wholes = {}
    for kind, mode in modes.items():
        stream = io.BytesIO()
        Image.fromarray(pixels, "RGBA").convert(mode).save(stream, kind)
        wholes[kind] = stream.getvalue()
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(ls) (r) file pop\n%%EOF\n"
    every = [*wholes.values(), eps]
    for kind, whole in wholes.items():
        made.append(_image_target(kind, [whole], every, lambda content: content))
    made.append(_image_target("PNG, checksums right", [wholes["PNG"]], every, _with_right_checksums))
    return made


def _image_target(kind: str, wholes: list[bytes], others: list[bytes], pack: Callable[[bytes], bytes]) -> Target:
    def attack(source: random.Random) -> bool:
        content = pack(mutated(source.choice(wholes), source, others))
        shape = source.choice(((1, 28, 28), (3, 20, 24)))
        fit = source.choice(("stretch", "pad", "crop"))

        def read() -> None:
            image = decode_image(content, image_shape=shape, fit=fit)
            assert image.shape == shape
            assert image.dtype == torch.uint8

        return refused(read)

    return Target(f"image {kind}", attack)


def _with_right_checksums(content: bytes) -> bytes:
    """A PNG file whose chunks have the checksums of what they hold, as far as there are chunks."""
    out, place = bytearray(content[:8]), 8
    while place + 12 <= len(content):
        size = int.from_bytes(content[place : place + 4], "big")
        if place + 12 + size > len(content):
            break
        body = content[place + 4 : place + 8 + size]
        out += content[place : place + 4] + body + zlib.crc32(body).to_bytes(4, "big")
        place += 12 + size
    return bytes(out + content[place:])


def _archives(folder: Path) -> list[Target]:
    """What is looked through for the files of a data set: it enters the cache whole and right, or not at all."""
    import hashlib

    content = bytes(range(256)) * 40
    facts = Source(
        files=(File("data.bin", len(content), hashlib.sha256(content).hexdigest()),),
        mirrors=(),
        package=Package("npm", "no-such", "no-such-*.tgz", 1, png=False),
        archives=("set.tar.gz", "set.tar", "set.deb"),
    )
    SOURCES["hostile"] = facts
    fetch._npm = _no_client  # nothing is asked for over the network
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, body in (("../../other", b"x" * 700), ("folder/data.bin", content)):
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
        link = tarfile.TarInfo("data.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    tar = stream.getvalue()
    local, cache = folder / "local", folder / "cache"
    local.mkdir()

    def target(name: str, file: str, whole: bytes, pack: Callable[[bytes], bytes]) -> Target:
        def attack(source: random.Random) -> bool:
            for left in local.iterdir():
                left.unlink()
            (cache / "hostile" / "data.bin").unlink(missing_ok=True)
            (local / file).write_bytes(pack(mutated(whole, source, [tar, content])))

            def read() -> None:
                fetch.fetch("hostile", cache=cache, source=local, progress=False, report=lambda line: None)

            outcome = refused(read)
            found = cache / "hostile" / "data.bin"
            assert found.exists() != outcome
            assert outcome or found.read_bytes() == content
            assert {path.name for path in (cache / "hostile").iterdir()} <= {"data.bin"}
            return outcome

        return Target(name, attack, turn=5 if file.endswith(".deb") else 50)

    return [
        target("archive tar", "set.tar", tar, lambda data: data),
        target("archive tar.gz", "set.tar.gz", gzip.compress(tar), lambda data: data),
        target("archive tar.gz, packed", "set.tar.gz", tar, gzip.compress),
        target("archive gz", "data.bin.gz", gzip.compress(content), lambda data: data),
        target("package of npm", "no-such-1.tgz", gzip.compress(tar), lambda data: data),
        target("package of apt", "set.deb", _deb(tar), lambda data: data),
    ]


def _deb(tar: bytes) -> bytes:
    """A Debian package with this content."""
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w:gz"):
        pass
    parts = {"debian-binary": b"2.0\n", "control.tar.gz": empty.getvalue(), "data.tar.gz": gzip.compress(tar)}
    out = b"!<arch>\n"
    for name, body in parts.items():
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(body):<10}`\n".encode() + body + b"\n" * (len(body) % 2)
    return out


def _no_client(package: Package, work: Path) -> Path:
    raise FileNotFoundError("npm is not installed")
