"""The model card: one page beside a stored network that says what it is, how good it is, and how to load it."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torchcaps
from torchcaps.atomic import read_bytes, write_atomically
from torchcaps.models.base import Network

if TYPE_CHECKING:
    from torchcaps.trained.export import ExportReport
    from torchcaps.training.config import TrainingConfig
    from torchcaps.training.result import RunResult

CARD = "README.md"
FRONT = """---
library_name: torchcaps
pipeline_tag: image-classification
tags:
- capsule-network
---
"""
"""How a card of ours begins; by this one is known from a README that somebody wrote."""
LOADING = {
    ".safetensors": """import torchcaps

network = torchcaps.load("{file}")
prediction = network.predict(network.prepare(images))  # bytes or numbers in [0, 1], of any size
names = [[network.classes[label] for label in row if label >= 0] for row in prediction.labels]""",
    ".onnx": """import onnxruntime

session = onnxruntime.InferenceSession("{file}")
lengths, poses = session.run(["lengths", "poses"], {{"image": images}})  # float32, (B, {shape})
facts = session.get_modelmeta().custom_metadata_map  # classes, pre-processing""",
    ".pt2": """import torch

facts = {{"torchcaps.json": ""}}  # classes, pre-processing
program = torch.export.load("{file}", extra_files=facts)
lengths, poses = program.module()(images)  # float32, (B, {shape})""",
}
LARGEST_CARD = 2**20
PLACES = {"data": ("folder",), "model": ("backbone_weights",), "run": ("out", "start_from")}
"""Settings that say where something was on the machine of the training: nobody else's business."""
SHOWN_CLASSES = 100


def card(
    network: Network,
    *,
    files: Mapping[str, str] | None = None,
    config: TrainingConfig | None = None,
    result: RunResult | None = None,
    error: tuple[float, int] | None = None,
) -> str:
    """A model card in Markdown.

    Args:
        network: what the card is about.
        files: names of the files it is stored in, each with a remark or "".
        config: the settings it was trained with.
        result: what came out of the training.
        error: test error in percent and the number of test images, if they are not the result's.
    """
    on = f" on {_plain(_without_place(result.data))}" if result else ""
    sections = [
        f"{FRONT}# torchcaps {network.config.name}{on}",
        _summary(network),
        _facts(network, result, error),
        _loading(network, files or {}),
        _input(network),
        *([] if config is None else [_recipe(config)]),
        _versions(result),
        "## Licence\n\nThe code of torchcaps is under the Apache License 2.0. For the weights and for the data that "
        "they were trained on, it is for whoever publishes them to say.",
    ]
    return "\n\n".join(sections) + "\n"


def write_card(folder: Path, text: str) -> Path | None:
    """Put a card into a folder. A README there that is no card of ours is left alone, and None returned."""
    path = folder / CARD
    if os.path.lexists(path) and not _written(folder):
        return None
    write_atomically(path, text.encode())
    return path


def _written(folder: Path) -> str:
    """The card in a folder; nothing if there is none of ours."""
    try:
        text = read_bytes(folder / CARD, most=LARGEST_CARD).decode(errors="replace")
    except Exception:  # no file, too large, not to be read: not ours in any case
        return ""
    return text if text.startswith(FRONT) else ""


def stored_files(folder: Path) -> dict[str, str]:
    """The networks in a folder, each with its size and what the card there says of it."""
    written, files = _written(folder), {}
    for path in sorted(folder.iterdir()):
        if path.suffix in LOADING and path.is_file() and not path.name.startswith("."):
            size = f"{path.stat().st_size / 1e6:.2f} MB"
            known = re.search(rf"^`{re.escape(path.name)}`: ({re.escape(size)}, weights .*)\.$", written, re.MULTILINE)
            files[path.name] = known[1] if known else size
    return files


def remark(report: ExportReport) -> str:
    """What is known of a file that has just been exported."""
    kind = "test" if report.real_images else "random"
    remark = (
        f"{report.bytes / 1e6:.2f} MB, weights in {report.precision}, largest difference from the trained network "
        f"{report.largest_difference:.1e} on {report.images} {kind} images"
    )
    if report.error_percent is not None:
        before, after = report.error_percent
        remark += f", test error {before:.2f} % -> {after:.2f} % of {report.test_images:,} images"
    return remark


def _summary(network: Network) -> str:
    kind = {"capsnet": "capsule network", "matrix": "network of matrix capsules", "cnn": "convolutional network"}
    drawing = "It has no decoder."
    if network.decoder is not None:
        drawing = "Its decoder draws what it sees; files of other formats than safetensors are without it."
    classes = len(network.classes)
    return f"A {kind.get(network.config.name, 'network')} that tells {classes} classes of images apart. {drawing}"


def _facts(network: Network, result: RunResult | None, error: tuple[float, int] | None) -> str:
    if error is None and result is not None:
        error = result.test_error_percent, result.test_images
    rows = {} if result is None else {"data": _plain(_without_place(result.data))}
    rows["parameters"] = f"{network.numbers():,}"
    if network.config.name == "capsnet":
        trained = result.routing if result is not None else None
        rows["routing"] = _plain(trained or network.routing_config().name)
    if error is not None:
        rows["test error"] = f"{error[0]:.2f} % of {error[1]:,} images" + (
            f" (n = 1 run, seed {result.seed})" if result else ""
        )
    if result is not None:
        rows["training"] = (
            f"{result.steps:,} steps of {result.batch_size} images, {result.epochs:g} epochs, "
            f"{result.train_seconds / 60:.1f} minutes on {_plain(result.processor)}"
        )
    names = ", ".join(f"`{_plain(name)}`" for name in network.classes[:SHOWN_CLASSES])
    rows["classes"] = names + (", …" if len(network.classes) > SHOWN_CLASSES else "")
    return "| | |\n| --- | --- |\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _loading(network: Network, files: Mapping[str, str]) -> str:
    shape = ", ".join(map(str, network.image_shape))
    parts = ["## How to load"]
    for name, remark in files.items():
        parts.append(f"`{_plain(name)}`" + (f": {remark}." if remark else ":"))
        parts.append(f"```python\n{LOADING[Path(name).suffix].format(file=_plain(name), shape=shape)}\n```")
    return "\n\n".join(parts)


def _input(network: Network) -> str:
    task = network.task
    channels, height, width = task.image_shape
    colour = "grey" if channels == 1 else "colour"
    lines = [
        f"Images are {colour}, {height} x {width} pixels, numbers from 0 to 1, as (B, {channels}, {height}, {width})."
    ]
    if task.source_shape:
        lines.append(
            f"They are the centre of an image brought to {task.source_shape[1]} x {task.source_shape[2]} ({task.fit})."
        )
    else:
        lines.append(f"Images of another size are brought to it ({task.fit}).")
    if task.standardise:
        lines.append("Each image is then brought to mean 0 and standard deviation 1.")
    if (set(task.mean), set(task.std)) != ({0.0}, {1.0}):
        mean, std = (", ".join(f"{value:.4g}" for value in values) for values in (task.mean, task.std))
        lines.append(f"The network itself subtracts {mean} and divides by {std}.")
    shown = task.labels_per_image
    decides = {0: "every class with a length above 0.5 is shown", 1: "the longest capsule is the answer"}
    lines.append(f"Of the class capsules, {decides.get(shown, f'the {shown} longest are the answer')}.")
    return "## Input and answer\n\n" + "\n".join(lines)


def _recipe(config: TrainingConfig) -> str:
    import yaml

    text = yaml.safe_dump(_changed(config), sort_keys=False, allow_unicode=True).strip()
    return (
        "## Recipe\n\n`torchcaps train --recipe recipe.yaml` with this `recipe.yaml`; the rest has its defaults:\n\n"
        f"```yaml\n{text.replace('```', '')}\n```"
    )


def _changed(config: TrainingConfig) -> dict[str, Any]:
    """The settings that are not the default ones, and the name of the data and the model. No folder of this machine."""
    given, usual = config.to_mapping(), type(config)().to_mapping()
    usual["model"] = type(config.model)().to_mapping()
    changed: dict[str, Any] = {}
    for section, values in given.items():
        different = {
            name: value
            for name, value in values.items()
            if value != usual[section].get(name) or (section in ("data", "model", "routing") and name == "name")
        }
        for place in PLACES.get(section, ()):
            different.pop(place, None)
        if different:
            changed[section] = different
    changed["data"]["name"] = _without_place(config.data.name)
    return changed


def _without_place(data: str) -> str:
    """The name of a data set without the folder it was in.

    >>> _without_place("folder:/home/somebody/flowers"), _without_place("mnist")
    ('folder:flowers', 'mnist')
    """
    kind, colon, place = data.partition(":")
    return f"{kind}{colon}{Path(place).name}"


def _versions(result: RunResult | None) -> str:
    import torch

    here = {"torchcaps": torchcaps.__version__, "torch": torch.__version__, "python": platform.python_version()}
    trained = {_plain(str(name)): _plain(str(value)) for name, value in result.versions.items()} if result else {}
    lines = ["- stored with " + ", ".join(f"{name} {value}" for name, value in here.items())]
    if trained:
        lines.append("- trained with " + ", ".join(f"{name} {value}" for name, value in trained.items()))
    if result is not None and result.commit:
        lines.append(f"- commit {_plain(result.commit)}")
    return "## Versions\n\n" + "\n".join(lines)


def _plain(text: str) -> str:
    """A name that somebody gave, on one line and without what Markdown would take for its own."""
    return "".join(letter if letter.isprintable() and letter not in "`|<>[]" else " " for letter in text)[:200]
