"""What a run will do, made and checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from torchcaps.data import Augmentation, Batches, DataSet, Split, load
from torchcaps.models import Network, NetworkSpec
from torchcaps.train.options import TrainOptions

MANY_IMAGES = 100_000  # evaluating more than that would take longer than training
FEW_IMAGES = 10_000


@dataclass(frozen=True)
class Plan:
    """All that can be found wrong before anything is written."""

    options: TrainOptions
    data: DataSet
    augmentation: Augmentation
    spec: NetworkSpec

    @classmethod
    def of(cls, options: TrainOptions) -> Plan:
        data = load(
            options.data,
            cache=Path(options.data_dir) if options.data_dir else None,
            validation=options.validation,
            image_size=options.image_size,
            channels=options.channels,
            fit=options.fit,
        )
        augmentation = Augmentation(
            shift=options.shift,
            flip=options.flip,
            crop=options.crop,
            cutout=options.cutout,
            rotate=options.rotate,
            scale=options.scale,
        )
        spec = NetworkSpec(
            image_shape=augmentation.image_shape(data.train.image_shape),
            source_shape=data.train.image_shape,
            classes=data.classes,
            fit=options.fit,
            present=data.train.labels_per_image,
            mean=data.mean,
            std=data.std,
            model=options.model,
            matrix_sizes=options.matrix_network_sizes(),
            routing=options.routing,
            routing_settings=options.routing_settings(),
            hidden=options.hidden_layers(),
            conv_channels=options.conv_channels,
            primary_capsules=options.primary_capsules,
            primary_size=options.primary_size,
            class_size=options.class_size,
            kernel=options.kernel,
            negative_slope=0.2 if options.activation == "leaky-relu" else 0.0,
            weight_std=options.weight_std,
            decoder=options.reconstruction,
        )
        return cls(options, data, augmentation, spec)

    def batches(self, rank: int = 0, world_size: int = 1) -> Batches:
        return Batches(
            self.data.train,
            batch_size=self.options.batch_size,
            seed=self.options.seed,
            augmentation=self.augmentation,
            rank=rank,
            world_size=world_size,
        )

    def evaluation_limit(self, split: Split) -> int | None:
        """How many images of a split to evaluate on; None for all of them."""
        return self.options.test_images or (FEW_IMAGES if len(split) > MANY_IMAGES else None)

    def build_network(self) -> Network:
        torch.manual_seed(self.options.seed)
        return self.spec.build()
