"""Makes a trained run the network that comes with the package.

Run: ``python tools/box.py RUN NAME --data-dir DIR``. The network is pruned and stored in 8 bits, with the record of its
run and a few images to show: the first of each split, and every test image that it gets wrong.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import torch

from torchcaps.atomic import write_atomically
from torchcaps.data.datasets import DataSet
from torchcaps.data.splits import Split
from torchcaps.models.files import BOX
from torchcaps.trained.run import SAMPLES_FILE, TrainedRun
from torchcaps.trained.scores import score
from torchcaps.training.files import to_yaml

IMAGES = 500
"""Of each split."""
PRECISION = "int8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--data-dir")
    arguments = parser.parse_args()
    out = BOX / arguments.name
    report = TrainedRun(arguments.run).prune(out, precision=PRECISION, data_folder=arguments.data_dir)
    smaller = TrainedRun(out)
    plan = smaller.plan(data_folder=arguments.data_dir)
    right = score([smaller.network], plan.data.test, augmentation=plan.augmentation).right
    write_atomically(out / SAMPLES_FILE, samples(plan.data, (~right).nonzero().flatten()))
    config = smaller.folder.config()
    anywhere = config.replace(data=config.data.replace(folder=None), run=config.run.replace(out=None))
    write_atomically(smaller.folder.config_file, to_yaml(anywhere).encode())
    (out / ".lock").unlink(missing_ok=True)
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{report.after.test_error_percent:.2f} % test error, {smaller.folder.network.stat().st_size:,} bytes")
    print(f"{size:,} bytes with its record and images")


def samples(data: DataSet, wrong: torch.Tensor) -> bytes:
    """Both splits' first images, and the test images with these numbers, as the content of an ``.npz`` file."""
    shown = torch.cat([torch.arange(IMAGES), wrong[wrong >= IMAGES]])
    arrays = {}
    for name, split, numbers in (("train", data.train, torch.arange(IMAGES)), ("test", data.test, shown)):
        arrays[f"x_{name}"], arrays[f"y_{name}"] = taken(split, numbers)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def taken(split: Split, numbers: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    batch = split.fetch(numbers)
    return batch.images.numpy(), batch.labels[:, 0].numpy()


if __name__ == "__main__":
    main()
