"""What a run will do, made and checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning_fabric import Fabric

from torchcaps.data.augmentation import Augmentation
from torchcaps.data.batches import Batches
from torchcaps.data.datasets import DataSet
from torchcaps.data.splits import OverlappingDigits, Split
from torchcaps.models.base import Network
from torchcaps.models.config import Own, TaskConfig
from torchcaps.settings import SettingError
from torchcaps.training.config import TrainingConfig
from torchcaps.training.defaults import default_sampling, filled_in
from torchcaps.training.evaluation import Evaluation, evaluate

OVERLAPPING_DIGITS_EVALUATED = 10_000  # of ten million: each test digit once below another


@dataclass(frozen=True)
class Plan:
    """A configuration with its data. All that can be found wrong before anything is written is found here."""

    config: TrainingConfig
    data: DataSet
    augmentation: Augmentation
    task: TaskConfig

    @classmethod
    def of(cls, config: TrainingConfig, data: DataSet | None = None) -> Plan:
        """The plan of a configuration, with the data it names or other data."""
        if data is None:
            data = config.data.load()
        else:
            if config.data.validation and data.validation is None:
                raise SettingError("validation", "must be 0: the data that were given have no validation images")
            config = config.replace(data=config.data.replace(name=data.name))
        if data.validation is None and (config.run.patience or config.run.keep == "best"):
            name = "patience" if config.run.patience else "keep"
            raise SettingError(name, "needs validation images to choose by: hold some out with --validation")
        augmentation = Augmentation(config.augmentation)
        source_shape = data.train.image_shape
        image_shape = augmentation.image_shape(source_shape)
        task = TaskConfig(
            image_shape=image_shape,
            source_shape=None if source_shape == image_shape else source_shape,
            classes=data.classes,
            fit=config.data.fit,
            labels_per_image=data.train.labels_per_image or 0,
            standardise=config.augmentation.standardise,
            mean=(0.0,) if config.augmentation.standardise else data.mean,
            std=(1.0,) if config.augmentation.standardise else data.std,
        )
        filled = filled_in(
            config, images=len(data.train), classes=len(data.classes), has_validation=data.validation is not None
        )
        if config.data.sampling == "auto":
            weighted = config.data.class_weights != "none"
            counts = data.train.class_counts(len(data.classes)).tolist()
            sampling = "even" if weighted else default_sampling(counts, data.train.labels_per_image)
            filled = filled.replace(data=config.data.replace(sampling=sampling))
        return cls(filled.replace(model=config.model.resolved(task)), data, augmentation, task)

    def batches(self, rank: int = 0, world_size: int = 1) -> Batches:
        assert self.config.run.batch_size is not None  # filled in
        return Batches(
            self.data.train,
            batch_size=self.config.run.batch_size,
            seed=self.config.run.seed,
            augmentation=self.augmentation,
            sampling=self.config.data.sampling,
            rank=rank,
            world_size=world_size,
        )

    @property
    def total_steps(self) -> int:
        run = self.config.run
        return run.steps or (run.epochs or 1) * self.batches().steps_per_epoch

    def evaluation_limit(self, split: Split) -> int | None:
        """How many images of a split to evaluate on; None for all of them."""
        usual = OVERLAPPING_DIGITS_EVALUATED if isinstance(split, OverlappingDigits) else None
        return self.config.run.test_images or usual

    def evaluate(self, network: Network, split: Split, fabric: Fabric, limit: int | None = None) -> Evaluation:
        """How good a network is on a split, of which the settings say how much is used unless there is a ``limit``."""
        return evaluate(
            network.folded().to(fabric.device),
            split,
            fabric=fabric,
            augmentation=self.augmentation,
            limit=limit or self.evaluation_limit(split),
        )

    def build_network(self, own: Own | None = None) -> Network:
        torch.manual_seed(self.config.run.seed)
        return self.config.model.build(self.task, self.config.routing, own)
