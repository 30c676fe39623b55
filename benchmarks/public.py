"""Public PyTorch capsule networks beside ours, in one run: training steps and classification on the MNIST network.

    git clone https://github.com/danielhavir/capsule-network DIR/danielhavir-capsule-network
    git clone https://github.com/XifengGuo/CapsNet-Pytorch DIR/XifengGuo-CapsNet-Pytorch
    git clone https://github.com/adambielski/CapsNet-pytorch DIR/adambielski-CapsNet-pytorch
    python benchmarks/public.py --checkouts DIR

Their code runs as it is, with its own losses and Adam, three routing iterations and a decoder, as are those of
torchcaps and of the reference. Each is measured in processes of its own, with the allocator as it is and told to keep
its memory. A checkout that is not there is left out. Writes ``results/public-HARDWARE.csv``.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchcaps.lab.bench.cases import REFERENCE, Case, Inference, NetworkCase, TrainingStep
from torchcaps.lab.bench.measure import check_threads, measure
from torchcaps.lab.bench.report import slug
from torchcaps.lab.results import table
from torchcaps.training.host import commit, cpu_name, usable_cores

RESULTS = Path(__file__).parent / "results"
Loss = Callable[[Tensor, Tensor], Tensor]
Classify = Callable[[Tensor], Any]


def danielhavir(load: Callable[[str], Any]) -> tuple[nn.Module, Loss, Classify]:
    network = load("model").CapsuleNetwork((1, 28, 28), 256, 8, 10, 16, 3, device=torch.device("cpu"))
    criterion = load("loss").CapsuleLoss(loss_lambda=0.5, recon_loss_scale=5e-4)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        lengths, drawn = network(images)
        return criterion(lengths, torch.eye(10)[labels], images, drawn)

    return network, loss, network


def xifeng_guo(load: Callable[[str], Any]) -> tuple[nn.Module, Loss, Classify]:
    """It imports torchvision, for its data only, and moves tensors to CUDA; here both are without effect."""
    torchvision: Any = types.ModuleType("torchvision")
    torchvision.transforms = torchvision.datasets = None
    sys.modules.setdefault("torchvision", torchvision)
    torch.Tensor.cuda = lambda tensor, *arguments, **options: tensor
    module = load("capsulenet")
    network = module.CapsuleNet([1, 28, 28], 10, 3)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        shown = torch.eye(10)[labels]
        lengths, drawn = network(images, shown)
        return module.caps_loss(shown, lengths, images, drawn, 0.0005 * 784)

    return network, loss, network


def adambielski(load: Callable[[str], Any]) -> tuple[nn.Module, Loss, Classify]:
    """It does not count the first iteration: 2 is what others call 3."""
    module = load("net")
    network = module.CapsNetWithReconstruction(module.CapsNet(2), module.ReconstructionNet(16, 10))
    criterion = module.MarginLoss(0.9, 0.1, 0.5)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        drawn, lengths = network(images, labels)
        return 0.0005 * F.mse_loss(drawn, images.view(-1, 784)) + criterion(lengths, labels)

    return network, loss, network.capsnet


PUBLIC = {
    "danielhavir-capsule-network": danielhavir,
    "XifengGuo-CapsNet-Pytorch": xifeng_guo,
    "adambielski-CapsNet-pytorch": adambielski,
}


@dataclass(frozen=True, kw_only=True)
class PublicCase(NetworkCase):
    """A training step or a classification of a public network; ``kind`` is the name of its checkout."""

    checkouts: str
    training: bool

    def work(self) -> Callable[[], object]:
        warnings.simplefilter("ignore")  # of what torch has deprecated since they were written
        sys.path.insert(0, str(Path(self.checkouts) / self.kind))
        network, loss, classify = PUBLIC[self.kind](importlib.import_module)
        batch = self.batch()
        images, labels = batch.images, batch.labels[:, 0]
        if not self.training:
            network.eval()
            return torch.inference_mode()(lambda: classify(images))
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            torch.autograd.backward(loss(images, labels))
            optimizer.step()

        return step


def cases(what: str, checkouts: Path, batch_size: int, threads: int) -> list[Case]:
    common: dict[str, Any] = {"batch_size": batch_size, "threads": threads}
    ours = TrainingStep if what == "training" else Inference
    found = [name for name in PUBLIC if (checkouts / name).is_dir()]
    listed: list[Case] = []
    for keep in (False, True):
        for name in found:
            public = {"checkouts": str(checkouts), "training": what == "training"}
            listed.append(PublicCase(kind=name, keep=keep, **public, **common))
        listed += [ours(kind=kind, keep=keep, **common) for kind in (REFERENCE, "dynamic", "l2")]
    return listed


def version(case: Case) -> str:
    """The commit of what was measured."""
    if not isinstance(case, PublicCase):
        return commit() or ""
    command = ["git", "-C", str(Path(case.checkouts) / case.kind), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, metavar="DIR", help="where the repositories are")
    parser.add_argument("--batch-size", type=int, default=128, metavar="N")
    parser.add_argument("--threads", type=int, default=usable_cores(), metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    given = parser.parse_args()
    threads = check_threads(given.threads)
    rows = []
    for what in ("training", "inference"):
        for outcome in measure(cases(what, given.checkouts, given.batch_size, threads), rounds=given.rounds):
            name = outcome.case.kind
            row = {
                "what": what,
                "network": name if isinstance(outcome.case, PublicCase) or name == REFERENCE else f"torchcaps {name}",
                "memory_kept": outcome.case.keep,
                "threads": threads,
                "batch_size": given.batch_size,
                "images_per_second": round(outcome.images_per_second, 1),
                "seconds_median": round(outcome.median, 4),
                "seconds_min": round(min(outcome.seconds, default=float("nan")), 4),
                "seconds_max": round(max(outcome.seconds, default=float("nan")), 4),
                "memory_mb": round(outcome.memory_mb, 1),
                "torch": torch.__version__,
                "commit": version(outcome.case),
            }
            rows.append(row)
            print(f"{what:10} {row['network']:30} {row['images_per_second']:8} images/s, kept: {row['memory_kept']}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"public-{slug(f'{cpu_name()} {threads} threads')}.csv"
    path.write_bytes(table(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"Kept in {path}")


if __name__ == "__main__":
    main()
