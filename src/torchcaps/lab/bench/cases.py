"""What is measured: one training step, one forward pass, or one step of a class-capsule layer alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lightning_fabric import Fabric
from torch import nn

from torchcaps.ascent import RoutingAscent
from torchcaps.data.splits import Batch
from torchcaps.functional import margin_loss, squash
from torchcaps.lab.bench.networks import NETWORKS
from torchcaps.lab.bench.reference import ReferenceCapsules, ReferenceNetwork, training_step
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.ops import keep_memory
from torchcaps.routing.config import RoutingConfig
from torchcaps.routing.discriminative import DiscriminativeRouting
from torchcaps.training.algorithm import AlternatingTrainer
from torchcaps.training.config import AscentConfig, OptimiserConfig, TrainingConfig

REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """Something to measure, in a process of its own."""

    kind: str
    """The reference, a routing of the capsnet, or another model."""
    batch_size: int = 128
    threads: int = 1
    keep: bool = True
    """Whether the allocator is told to keep its memory, as the command line does."""

    @property
    def label(self) -> str:
        return f"{self.kind}, memory kept" if self.kind == REFERENCE and self.keep else self.kind

    def prepare(self) -> Callable[[], object]:
        """Set up this process, for good, and return what is to be timed."""
        if self.keep:
            keep_memory()
        torch.set_num_threads(self.threads)
        torch.manual_seed(0)
        return self.work()

    @abstractmethod
    def work(self) -> Callable[[], object]:
        """What is to be timed; it will be called any number of times."""


@dataclass(frozen=True, kw_only=True)
class NetworkCase(Case):
    network: str = "mnist"

    def batch(self) -> Batch:
        """Random images with random labels."""
        task = NETWORKS[self.network].task
        images = torch.rand(self.batch_size, *task.image_shape)
        labels = torch.rand(self.batch_size, len(task.classes)).topk(task.labels_per_image).indices
        return Batch(images, labels, images[:, None].expand(-1, task.labels_per_image, -1, -1, -1))


@dataclass(frozen=True, kw_only=True)
class TrainingStep(NetworkCase):
    """One iteration of Algorithm 1."""

    alternation: str = "fused"
    optimiser: str = "adam"

    @property
    def label(self) -> str:
        strict = ", strict" if self.alternation == "strict" else ""
        return super().label + strict + (", muon" if self.optimiser == "muon" else "")

    def work(self) -> Callable[[], object]:
        network, batch = NETWORKS[self.network], self.batch()
        if self.kind == REFERENCE:
            return training_step(ReferenceNetwork(network), batch.images, batch.labels, batch.parts)
        model, routing = network.settings(self.kind)
        config = TrainingConfig(
            model=model,
            routing=routing,
            optimiser=OptimiserConfig(name=self.optimiser, warmup=0),
            ascent=AscentConfig(alternation=self.alternation),
        )
        fabric = Fabric(accelerator="cpu", devices=1)
        trainer = AlternatingTrainer(fabric, network.build(self.kind), config, total_steps=10**6)
        return lambda: trainer.step(batch, 0)


@dataclass(frozen=True, kw_only=True)
class Inference(NetworkCase):
    """Classification of a batch; ours with coefficients folded and kernels transformed beforehand."""

    def work(self) -> Callable[[], object]:
        network, images = NETWORKS[self.network], self.batch().images
        if self.kind == REFERENCE:
            plain = ReferenceNetwork(network).eval()
            return torch.inference_mode()(lambda: plain(images).norm(dim=-1))
        folded = network.build(self.kind).folded()
        return torch.inference_mode()(lambda: folded(images).capsules.activations)


@dataclass(frozen=True, kw_only=True)
class ClassLayerStep(Case):
    """Forward, backward, ascent and Adam on a class-capsule layer alone, with any number of classes."""

    classes: int = 10
    inputs: int = 1152
    input_size: int = 8
    output_size: int = 16

    def work(self) -> Callable[[], object]:
        poses = squash(torch.randn(self.batch_size, self.inputs, self.input_size)).requires_grad_()
        labels = torch.randint(self.classes, (self.batch_size,))
        sizes = self.inputs, self.input_size, self.classes, self.output_size
        layer: nn.Module
        ascent: RoutingAscent | None = None
        if self.kind == REFERENCE:
            layer = ReferenceCapsules(*sizes)
        else:
            routing = RoutingConfig(name=self.kind).build()
            layer = CapsuleLayer(*sizes, routing)
            ascent = RoutingAscent(layer) if isinstance(routing, DiscriminativeRouting) else None
        optimizer = torch.optim.Adam(layer.parameters(), fused=True)

        def step() -> None:
            optimizer.zero_grad()
            capsules = layer(poses)
            lengths = capsules.norm(dim=-1) if self.kind == REFERENCE else capsules.activations
            directions = None if ascent is None else ascent.directions(capsules, labels)
            torch.autograd.backward(margin_loss(lengths, labels))
            optimizer.step()
            if ascent is not None and directions is not None:
                ascent.move(directions)

        return step

    def state_mb(self) -> float:
        """Weights, gradients and Adam's two moments, and the poses with their gradient."""
        weights = self.inputs * self.input_size * self.classes * self.output_size
        return 4 * (4 * weights + 2 * self.batch_size * self.inputs * self.input_size) / 2**20

    def votes_mb(self) -> float:
        return 4 * self.batch_size * self.inputs * self.classes * self.output_size / 2**20
