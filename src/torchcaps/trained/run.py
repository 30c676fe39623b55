"""A run folder, once trained: one object that offers all that can be done with it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchcaps.atomic import write_atomically, write_json
from torchcaps.data.augmentation import Augmentation
from torchcaps.data.batches import evaluated
from torchcaps.data.datasets import DataSet
from torchcaps.data.datasets import load as load_data
from torchcaps.data.splits import Split
from torchcaps.errors import UserError
from torchcaps.models.base import Network
from torchcaps.models.config import Own
from torchcaps.models.files import load, trained_with
from torchcaps.models.packing import pack, unpack
from torchcaps.trained.card import card, remark, stored_files, write_card
from torchcaps.trained.export import FORMATS, ExportReport, check_choices, export, export_path, rounded
from torchcaps.trained.predict import ImagePrediction, predict_files
from torchcaps.trained.prune import prune
from torchcaps.trained.scores import score
from torchcaps.training.checkpoint import changes
from torchcaps.training.config import RunConfig, TrainingConfig
from torchcaps.training.environment import make_fabric
from torchcaps.training.evaluation import Evaluation
from torchcaps.training.folder import RunFolder
from torchcaps.training.host import default_threads
from torchcaps.training.plan import Plan
from torchcaps.training.result import RunResult

PRUNING = "pruning.json"
SAMPLES_FILE = "samples.npz"
"""A few images of a run's data, for where the rest is not."""
CHECKED_IMAGES = 64
"""Test images that an exported network is compared on."""


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
        self, path: Path, *, own: Own | None = None, accelerator: str = "auto", threads: int | None = None
    ) -> None:
        self.folder = RunFolder.open(path)
        torch.set_num_threads(threads or default_threads())
        self.fabric = make_fabric(RunConfig(accelerator=accelerator))
        own = own or Own()
        self.network = load(path, routing=own.routing, backbone=own.backbone, device=self.fabric.device)

    def config(self, *, data: str | None = None, data_folder: str | None = None) -> TrainingConfig:
        """The run's settings, with all training images used for training, and possibly other data."""
        config = self.folder.config()
        stored = trained_with(self.folder.network)
        if stored is not None and (differing := changes(stored, config.determining())):
            if not self.folder.result.exists() and self.folder.checkpoints.paths():
                again = f"torchcaps train --resume {self.folder.path}"
                raise UserError(f"{self.folder.path} is being trained for longer. To finish that: {again}")
            raise UserError(f"config.yaml is not the one this network was trained with ({differing}).")
        name = config.data.name if data is None else data
        changed: dict[str, object] = {"name": name, "validation": 0}
        if data_folder is not None:
            changed["folder"] = data_folder
        if name.startswith(("folder:", "csv:")):  # brought to any shape
            channels, side, _ = self.network.task.source_shape or self.network.image_shape
            changed |= {"image_size": side, "channels": channels}
        run = config.run.replace(keep="last", patience=None)  # the best state has been chosen
        return config.replace(data=config.data.replace(**changed), run=run)

    def plan(self, *, data: str | None = None, data_folder: str | None = None, download: bool = True) -> Plan:
        """The run's data, or other data that fit the network."""
        config = self.config(data=data, data_folder=data_folder)
        found = load_data(config.data, download=download)
        self._check_fits(found)
        return Plan.of(config, found)

    def _check_fits(self, data: DataSet) -> None:
        """Raise :class:`UserError` if these are not images that the network was made for."""
        task, name = self.network.task, data.name
        shape, labels = data.test.image_shape, data.test.labels_per_image or 0
        expected = task.source_shape or task.image_shape
        if (shape, labels) != (expected, task.labels_per_image):
            raise UserError(
                f"The network takes images of {_by(expected)} that show {_count(task.labels_per_image)}; "
                f"those of {name} are {_by(shape)} and show {_count(labels)}."
            )
        if len(data.classes) != len(task.classes):
            raise UserError(f"The network knows {len(task.classes)} classes, {name} has {len(data.classes)}.")
        unnamed = name.startswith("npz:") and data.classes == tuple(map(str, range(len(data.classes))))
        if data.classes != task.classes and not unnamed:
            raise UserError(
                f"The network knows the classes {', '.join(task.classes)}; {name} has {', '.join(data.classes)}."
            )

    def images_at_hand(self, *, data_folder: str | None = None) -> DataSet:
        """The run's data if they are on this machine, else the few images that are kept beside the network."""
        try:
            data = load_data(self.config(data_folder=data_folder).data, download=False)
        except UserError:
            samples = self.folder.path / SAMPLES_FILE
            if not samples.is_file():
                raise
            data = load_data(f"npz:{samples}")
        self._check_fits(data)
        return data

    def evaluate(
        self, plan: Plan | None = None, *, limit: int | None = None, network: Network | None = None
    ) -> Evaluation:
        """The error on the test images of the run's own plan, or of another."""
        plan = plan or self.plan()
        return plan.evaluate(network or self.network, plan.data.test, self.fabric, limit)

    def predict(self, paths: Sequence[Path]) -> Iterator[ImagePrediction]:
        """Classify image files."""
        return predict_files(self.network.folded().to(self.fabric.device), paths)

    def prune(
        self, out: Path | None = None, *, precision: str = "float32", data_folder: str | None = None
    ) -> PruningReport:
        """Write the network without the capsules that no class uses to a folder of its own, and compare both.

        Args:
            out: the folder; by default one beside the run's.
            precision: of the weights there: "float32" as they are, "float16" or "int8" for a smaller file.
            data_folder: where data sets are kept.
        """
        check_choices("safetensors", precision)
        pruned = prune(self.network)
        smallest = pruned.network.copy_with(unpack(pack(pruned.network.state_dict(), precision)))
        path = out or Path(f"{self.folder.path.resolve()}-pruned")
        RunFolder.check_free(path)
        plan = self.plan(data_folder=data_folder)
        (before, found), (after, found_now) = (self._measured(plan, network) for network in (self.network, smallest))
        changed = int((found != found_now).any(1).sum())
        report = PruningReport(path, pruned.capsules_removed, pruned.types_removed, changed, before, after)
        smaller = RunFolder.create(path, self.folder.config())
        values = {**asdict(report), "folder": path.name}
        write_json(smaller.path / PRUNING, values)
        pruned.network.save(smaller.network, precision=precision, settings=trained_with(self.folder.network))
        if self.folder.metrics.is_file():
            write_atomically(smaller.metrics, self.folder.metrics.read_bytes())
        if self.folder.result.is_file():
            RunResult.read(self.folder.result).replace(**asdict(after)).write(smaller.result)
        return report

    def export(
        self, out: Path | None = None, *, to: str = "onnx", precision: str = "float32", data_folder: str | None = None
    ) -> ExportReport:
        """Write the network for other programs, with a model card beside it; compared on test images if there are any.

        Args:
            out: the file; by default one in the folder ``export`` of the run.
            to: "onnx", "pt2" or "safetensors".
            precision: of the stored weights: "float32", or "float16" or "int8", whose test error is measured, too.
            data_folder: where data sets are kept.
        """
        check_choices(to, precision)
        path = export_path(self.folder.path, to, precision) if out is None else out
        if path.suffix != FORMATS[to]:
            raise UserError(f"{path} has another ending than files of this format: call it {path.stem}{FORMATS[to]}.")
        own = (self.folder.network, self.folder.config_file, self.folder.metrics, self.folder.result)
        if path.exists() and any(file.exists() and path.samefile(file) for file in own):
            raise UserError(f"{path} is a file of the run itself: choose another one.")
        self.config()  # which is that of the network, or it is said here
        plan, reason = None, ""
        try:
            plan = self.plan(data_folder=data_folder, download=False)
        except UserError as error:  # the data are not on this machine, or have changed
            reason = str(error)
        images = None if plan is None else sample_images(plan.data.test, plan.augmentation, CHECKED_IMAGES)
        path.parent.mkdir(parents=True, exist_ok=True)
        report = export(self.network, path, to=to, precision=precision, images=images)
        report = replace(report, no_images=reason)
        if plan is not None and precision != "float32":
            before, after = (
                self.evaluate(plan, network=network) for network in (self.network, rounded(self.network, precision))
            )
            errors = before.error_percent, after.error_percent
            report = replace(report, error_percent=errors, test_images=after.images)
        self._write_card(report)
        return report

    def _write_card(self, report: ExportReport) -> None:
        folder = report.path.parent
        result = RunResult.read(self.folder.result) if self.folder.result.exists() else None
        error = (report.error_percent[0], report.test_images) if report.error_percent and result is None else None
        files = {report.path.name: remark(report)}
        if folder == export_path(self.folder.path, report.to, report.precision).parent:  # elsewhere others may lie
            files = stored_files(folder) | files
        write_card(folder, card(self.network, files=files, config=self.folder.config(), result=result, error=error))

    def _measured(self, plan: Plan, network: Network) -> tuple[Measured, Tensor]:
        """A network's size, error and speed, and the classes it finds in the test images."""
        folded, limit = network.folded().to(self.fabric.device), plan.evaluation_limit(plan.data.test)
        started = time.perf_counter()
        scores = score([folded], plan.data.test, augmentation=plan.augmentation, limit=limit)
        images = len(scores.lengths)
        speed = round(images / (time.perf_counter() - started), 1)
        return Measured(scores.error_percent, images, network.numbers(), speed), scores.found


def sample_images(split: Split, augmentation: Augmentation, count: int) -> Tensor:
    """At most this many images (B, C, H, W) as the network sees them, from all over a split."""
    return augmentation.centre(split.fetch(evaluated(split, count))).on("cpu").images


def _count(labels: int) -> str:
    return f"{labels} class(es)" if labels else "any number of classes"


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
