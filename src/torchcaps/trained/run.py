"""A run folder, once trained: one object that offers all that can be done with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from torchcaps.atomic import write_atomically
from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.models.config import Own
from torchcaps.models.files import load
from torchcaps.trained.predict import ImagePrediction, predict_files
from torchcaps.trained.prune import prune
from torchcaps.training.config import RunConfig, TrainingConfig
from torchcaps.training.environment import make_fabric
from torchcaps.training.evaluation import Evaluation, disagreements, evaluate
from torchcaps.training.folder import RunFolder
from torchcaps.training.host import usable_cores
from torchcaps.training.plan import Plan

PRUNING = "pruning.json"


@dataclass(frozen=True)
class Measured:
    """A network's size, error and speed."""

    test_error_percent: float
    test_images: int
    parameters: int
    evaluate_images_per_second: float


@dataclass(frozen=True)
class PruningReport:
    """What pruning did."""

    folder: Path
    capsules_removed: int
    types_removed: int
    answers_changed: int
    before: Measured
    after: Measured


class TrainedRun:
    """The network of a finished run, with its data and settings.

    Args:
        path: the run folder.
        own: a routing or a backbone of your own, if the run was trained with one.
        accelerator: where to compute: auto, cpu, cuda, mps.
        threads: of the CPU; all cores if not given.
    """

    def __init__(
        self,
        path: Path,
        *,
        own: Own | None = None,
        accelerator: str = "auto",
        threads: int | None = None,
    ) -> None:
        self.folder = RunFolder.open(path)
        torch.set_num_threads(threads or usable_cores())
        self.fabric = make_fabric(RunConfig(accelerator=accelerator))
        own = own or Own()
        self.network = load(self.folder.network, routing=own.routing, backbone=own.backbone, device=self.fabric.device)

    def config(self, *, data: str | None = None, data_folder: str | None = None) -> TrainingConfig:
        """The run's settings, with all training images used for training, and possibly other data."""
        config = self.folder.config()
        changed: dict[str, object] = {"validation": 0}
        if data_folder is not None:
            changed["folder"] = data_folder
        if data is not None and data != config.data.name:
            changed["name"] = data
        if not _has_own_shape(str(changed.get("name", config.data.name))):
            channels, side, _ = self.network.task.source_shape or self.network.image_shape
            changed |= {"image_size": side, "channels": channels}
        return config.replace(data=config.data.replace(**changed))

    def plan(self, *, data: str | None = None, data_folder: str | None = None) -> Plan:
        """The run's data, or other data that fit the network."""
        plan = Plan.of(self.config(data=data, data_folder=data_folder))
        task, given = self.network.task, plan.task
        name = plan.config.data.name
        if (given.image_shape, given.labels_per_image) != (task.image_shape, task.labels_per_image):
            raise UserError(
                f"The network takes images of {_by(task.image_shape)} that show {_count(task.labels_per_image)}; "
                f"those of {name} are {_by(given.image_shape)} and show {_count(given.labels_per_image)}."
            )
        if len(given.classes) != len(task.classes):
            raise UserError(f"The network knows {len(task.classes)} classes, {name} has {len(given.classes)}.")
        if not _has_own_shape(name) and given.classes != task.classes:
            raise UserError(
                f"The network knows the classes {', '.join(task.classes)}; {name} has {', '.join(given.classes)}."
            )
        return plan

    def evaluate(
        self, plan: Plan | None = None, *, limit: int | None = None, network: Network | None = None
    ) -> Evaluation:
        """The error on the test images of the run's own plan, or of another."""
        plan = plan or self.plan()
        return evaluate(
            (network or self.network).folded().to(self.fabric.device),
            plan.data.test,
            fabric=self.fabric,
            augmentation=plan.augmentation,
            limit=limit or plan.evaluation_limit(plan.data.test),
        )

    def predict(self, paths: Sequence[Path]) -> Iterator[ImagePrediction]:
        """Classify image files."""
        return predict_files(self.network.folded().to(self.fabric.device), paths)

    def prune(self, out: Path | None = None, *, data_folder: str | None = None) -> PruningReport:
        """Write the network without the capsules that no class uses to a folder of its own, and compare both."""
        pruned = prune(self.network)
        path = out or Path(f"{self.folder.path.resolve()}-pruned")
        RunFolder.check_free(path)
        plan = self.plan(data_folder=data_folder)
        changed = disagreements(
            self.network.folded(),
            pruned.network.folded(),
            plan.data.test,
            fabric=self.fabric,
            augmentation=plan.augmentation,
            limit=plan.evaluation_limit(plan.data.test),
        )
        before, after = (self._measured(plan, network) for network in (self.network, pruned.network))
        report = PruningReport(path, pruned.capsules_removed, pruned.types_removed, changed, before, after)
        smaller = RunFolder.create(path, plan.config)
        values = {**asdict(report), "folder": path.name}
        write_atomically(smaller.path / PRUNING, (json.dumps(values, indent=2) + "\n").encode())
        pruned.network.save(smaller.network)
        return report

    def _measured(self, plan: Plan, network: Network) -> Measured:
        outcome = self.evaluate(plan, network=network)
        return Measured(outcome.error_percent, outcome.images, network.numbers(), round(outcome.images_per_second, 1))


def _has_own_shape(data: str) -> bool:
    """Whether a data set's images have a size of their own, unlike a folder's, which are brought to any."""
    return ":" not in data


def _count(labels: int) -> str:
    return f"{labels} class(es)" if labels else "any number of classes"


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
