"""The first try on one's own pictures: `torchcaps train --data folder:PATH`, no other option, beside two usual choices.

Makes folders of pictures of many kinds, and trains on each of them torchcaps with its defaults; a small ordinary CNN on
the same batches; and scikit-learn's support vector machine and logistic regression on the pixels. Prints test errors
and writes ``results/own_images.csv``.
Run: ``python benchmarks/own_images.py [NAME ...] [--seeds N] [--data-dir DIR] [--options ...]``.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from torchcaps.cli.main import main as torchcaps
from torchcaps.data.config import DataConfig
from torchcaps.data.datasets import load
from torchcaps.data.splits import Split
from torchcaps.trained.run import TrainedRun
from torchcaps.training.host import cpu_name
from torchcaps.training.plan import Plan
from torchcaps.training.result import RunResult

RESULTS = Path(__file__).parent / "results"
COLUMNS = ["folder", "seed", "torchcaps", "cnn", "svm", "logistic", "images", "steps"]
Pictures = Iterator[tuple[str, Image.Image]]
"""Class and picture."""


def shapes(random: np.random.Generator) -> Pictures:
    """Five classes of 48x48 outlines in any place, size, turn and colour, on noise."""
    for number in range(265):
        kind = number % 5
        ground, line = random.integers(0, 256, (2, 3))
        noise = random.integers(-40, 40, (48, 48, 3))
        picture = Image.fromarray(np.clip(ground + noise, 0, 255).astype(np.uint8))
        draw = ImageDraw.Draw(picture)
        (x, y), radius = random.uniform(16, 32, 2), random.uniform(7, 14)
        turn, colour = random.uniform(0, 2 * math.pi), tuple(int(value) for value in line)
        if kind == 0:
            draw.ellipse([x - radius, y - radius, x + radius, y + radius], outline=colour, width=3)
        else:
            count, reach = {1: (4, [1]), 2: (3, [1]), 3: (10, [1, 0.4]), 4: (12, [1, 1, 0.4])}[kind]
            corners = [
                (
                    x + radius * reach[corner % len(reach)] * math.cos(turn + 2 * math.pi * corner / count),
                    y + radius * reach[corner % len(reach)] * math.sin(turn + 2 * math.pi * corner / count),
                )
                for corner in range(count)
            ]
            draw.polygon(corners, outline=colour, width=3)
        yield ("circle", "square", "triangle", "star", "cross")[kind], picture


def two_digits(random: np.random.Generator) -> Pictures:
    """Forty pictures of two digits."""
    yield from _of_a_set("mnist", random, {3: "three", 8: "eight"}, 20)


def clothes(random: np.random.Generator) -> Pictures:
    """Five hundred pictures of clothes."""
    yield from _of_a_set("fashion-mnist", random, {label: f"kind {label}" for label in range(10)}, 50)


def photographs(random: np.random.Generator) -> Pictures:
    """Two thousand colour photographs of 32x32."""
    yield from _of_a_set("cifar-10", random, {label: f"kind {label}" for label in range(10)}, 200)


def larger_photographs(random: np.random.Generator) -> Pictures:
    """A thousand of them in four classes, brought to 96x96."""
    for name, picture in _of_a_set("cifar-10", random, {0: "plane", 1: "car", 6: "frog", 8: "ship"}, 250):
        yield name, picture.resize((96, 96), Image.Resampling.BICUBIC)


def signs(random: np.random.Generator) -> Pictures:
    """A hundred classes: pairs of characters of 40x40, moved and turned."""
    font = ImageFont.load_default(size=20)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    names = [letters[number % 36] + letters[number * 7 % 31] for number in range(100)]
    for name in names:
        for _ in range(20):
            picture = Image.new("L", (40, 40), int(random.integers(150, 256)))
            place = tuple(random.uniform(2, 12, 2))
            ImageDraw.Draw(picture).text(place, name, fill=int(random.integers(0, 90)), font=font)
            turn = float(random.uniform(-20, 20))
            yield name, picture.rotate(turn, Image.Resampling.BILINEAR, fillcolor=picture.getpixel((0, 0)))


def textures(random: np.random.Generator) -> Pictures:
    """Four uneven classes of 200 to 400 pixels: stripes, checks, spots and clouds."""
    for name, count in {"stripes": 120, "checks": 60, "spots": 30, "clouds": 90}.items():
        for _ in range(count):
            height, width = (int(side) for side in random.integers(200, 401, 2))
            y, x = np.mgrid[:height, :width]
            turn, wave = random.uniform(0, math.pi), random.uniform(15, 50)
            across, along = (
                (x * math.cos(turn) + y * math.sin(turn)) / wave,
                (y * math.cos(turn) - x * math.sin(turn)) / wave,
            )
            pattern = {
                "stripes": lambda a, b: np.sin(2 * math.pi * a),
                "checks": lambda a, b: np.sign(np.sin(2 * math.pi * a) * np.sin(2 * math.pi * b)),
                "spots": lambda a, b: np.where((a % 1 - 0.5) ** 2 + (b % 1 - 0.5) ** 2 < 0.08, 1.0, -1.0),
                "clouds": lambda a, b: np.sin(2 * a + 3 * np.sin(b)) * np.cos(2 * b + 2 * np.sin(1.7 * a)),
            }[name](across, along)
            dark, light = random.integers(0, 256, (2, 3))
            mixed = dark + (light - dark) * (pattern[..., None] + 1) / 2 + random.normal(0, 25, (height, width, 3))
            picture = Image.fromarray(np.clip(mixed, 0, 255).astype(np.uint8))
            yield name, picture.filter(ImageFilter.GaussianBlur(float(random.uniform(0, 2))))


FOLDERS: dict[str, Callable[[np.random.Generator], Pictures]] = {
    make.__name__.replace("_", "-"): make
    for make in (shapes, two_digits, clothes, photographs, larger_photographs, signs, textures)
}
DATA_FOLDER: list[str | None] = [None]


def _of_a_set(name: str, random: np.random.Generator, classes: dict[int, str], count: int) -> Pictures:
    split = load(DataConfig(name=name, folder=DATA_FOLDER[0])).train
    labels = split.fetch(torch.arange(len(split))).labels.numpy()
    for label, called in classes.items():
        for number in random.permutation(np.flatnonzero(labels == label))[:count]:
            image = split.fetch(torch.tensor([int(number)])).images[0].numpy()
            yield called, Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))


def write_folder(root: Path, pictures: Pictures) -> None:
    for number, (name, picture) in enumerate(pictures):
        (root / name).mkdir(parents=True, exist_ok=True)
        picture.save(root / name / f"{number:05}.png")


class SmallCNN(nn.Sequential):
    """Three convolutions with batch normalisation and pooling, and a linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        layers: list[nn.Module] = []
        for before, after in ((channels, 32), (32, 64), (64, 128)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, classes))


def cnn_error(trained: TrainedRun, seed: int) -> float:
    """The test error in percent of a small CNN that is shown the same batches as the run was."""
    plan = Plan.of(trained.folder.config())
    torch.manual_seed(seed)
    images, labels = arrays(plan.data.train)
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    network = SmallCNN(images.shape[1], len(plan.task.classes))
    optimizer = torch.optim.Adam(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=plan.total_steps)
    batches = plan.batches()
    for step in range(plan.total_steps):
        seen = batches.at(step).on("cpu")
        optimizer.zero_grad()
        nn.functional.cross_entropy(network((seen.images - mean) / std), seen.labels[:, 0]).backward()
        optimizer.step()
        schedule.step()
    network.eval()
    images, labels = arrays(plan.data.test)
    with torch.no_grad():
        found = torch.cat([network((part - mean) / std).argmax(1) for part in images.split(64)])
    return percent(found != labels)


def pixel_errors(trained: TrainedRun) -> tuple[float, float]:
    """Test errors in percent of a support vector machine and of logistic regression."""
    data = Plan.of(trained.folder.config()).data
    (images, labels), (test_images, test_labels) = arrays(data.train), arrays(data.test)
    errors = []
    for classifier in (SVC(C=10), LogisticRegression(max_iter=300)):
        model = make_pipeline(StandardScaler(), classifier).fit(images.flatten(1).numpy(), labels.numpy())
        errors.append(percent(torch.from_numpy(model.predict(test_images.flatten(1).numpy())) != test_labels))
    return errors[0], errors[1]


def arrays(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    batch = split.fetch(torch.arange(len(split))).on("cpu")
    return batch.images, batch.labels[:, 0]


def percent(wrong: torch.Tensor) -> float:
    return 100 * float(wrong.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FOLDERS), metavar="NAME", help=", ".join(FOLDERS))
    parser.add_argument("--seeds", type=int, default=1, metavar="N")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--data-dir", metavar="DIR", help="where MNIST, Fashion-MNIST and CIFAR-10 are")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--out", type=Path, default=RESULTS / "own_images.csv", metavar="FILE")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of torchcaps train, to try others")
    arguments = parser.parse_args()
    DATA_FOLDER[0] = arguments.data_dir
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*COLUMNS, "processor"])
        for name in arguments.names:
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                writer.writerow([*tried(name, seed, arguments.threads, arguments.options), cpu_name()])
                file.flush()


def tried(name: str, seed: int, threads: str, options: list[str]) -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder) / "pictures", FOLDERS[name](np.random.default_rng(seed)))
        run = Path(folder) / "run"
        words = ["--data", f"folder:{folder}/pictures", "--out", str(run), "--threads", threads, "--seed", str(seed)]
        assert torchcaps(["train", *words, *options]) == 0
        trained = TrainedRun(run)
        result = RunResult.read(run / "result.json")
        errors = [result.test_error_percent, cnn_error(trained, seed), *pixel_errors(trained)]
    print(
        f"{name}, seed {seed}: torchcaps {errors[0]:.1f}, CNN {errors[1]:.1f}, SVM {errors[2]:.1f}, "
        f"logistic regression {errors[3]:.1f} % wrong",
        flush=True,
    )
    counted = [round(error, 2) for error in errors]
    return [name, seed, *counted, result.images_seen, result.steps]


if __name__ == "__main__":
    main()
