"""What is measured: one training step, one forward pass, or one step of a class-capsule layer alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor

from torchcaps import functional
from torchcaps.data import Batch
from torchcaps.functional import class_signs, discriminative_power, margin_loss, multi_hot
from torchcaps.layers import CapsuleLayer
from torchcaps.models import MODELS, Network, NetworkSpec, capsnet
from torchcaps.ops import keep_memory
from torchcaps.routing import DenseVotes, DiscriminativeRouting, make_routing
from torchcaps.train import TrainOptions
from torchcaps.train.algorithm import AlternatingTrainer

OTHER_MODELS = tuple(name for name in MODELS if name != "capsnet")


@dataclass(frozen=True)
class Architecture:
    """One of the paper's networks."""

    image_shape: tuple[int, int, int]
    primary_capsules: int
    negative_slope: float
    decoder: bool
    present: int = 1

    def build(self, kind: str) -> Network:
        """The capsnet with a routing, or one of the other models."""
        spec = NetworkSpec(
            image_shape=self.image_shape,
            source_shape=self.image_shape,
            classes=tuple("0123456789"),
            model=kind if kind in OTHER_MODELS else "capsnet",
            routing="uniform" if kind in OTHER_MODELS else kind,
            routing_settings={"iterations": 3},
            primary_capsules=self.primary_capsules,
            negative_slope=self.negative_slope,
            decoder=self.decoder,
            present=self.present,
        )
        return spec.build()


ARCHITECTURES: dict[str, Architecture] = {
    "mnist": Architecture((1, 28, 28), 32, 0.0, decoder=True),
    "mnist-fc": Architecture((1, 28, 28), 32, 0.0, decoder=False),
    "multi-mnist": Architecture((1, 36, 36), 32, 0.0, decoder=True, present=2),
    "cifar-10-24": Architecture((3, 24, 24), 64, 0.2, decoder=False),
    "cifar-10-32": Architecture((3, 32, 32), 64, 0.2, decoder=False),
}


@dataclass(frozen=True)
class Case(ABC):
    """Something to measure, in a process of its own."""

    routing: str
    """A routing of the capsnet, or another model."""
    batch_size: int
    threads: int
    ordinary: bool = False
    """Library convolutions and all votes in memory: what everyone writes."""
    keep: bool = True
    """Whether the allocator is told to keep its memory, which hardly anyone does."""

    @property
    def label(self) -> str:
        if not self.ordinary:
            return self.routing
        return f"{self.routing}, ordinary" + (", memory kept" if self.keep else "")

    def prepare(self) -> Callable[[], object]:
        """Set up this process and return what is to be timed, to be called any number of times."""
        self.set_up()
        return self._work()

    def set_up(self) -> None:
        """Threads, random numbers, and which implementation is used: for the whole process, and for good."""
        torch.set_num_threads(self.threads)
        torch.manual_seed(0)
        if self.ordinary:
            capsnet.conv_pair = _ordinary_conv_pair  # type: ignore[attr-defined]
            CapsuleLayer.make_votes = _broadcast_votes
        if self.keep:
            keep_memory()

    @abstractmethod
    def _work(self) -> Callable[[], object]: ...


@dataclass(frozen=True)
class TrainingStep(Case):
    """One iteration of Algorithm 1 on one of the paper's networks."""

    architecture: str = "mnist"
    alternation: str = "fused"

    @property
    def label(self) -> str:
        return super().label + (", strict" if self.alternation == "strict" else "")

    def _work(self) -> Callable[[], object]:
        architecture = ARCHITECTURES[self.architecture]
        options = TrainOptions(reconstruction=architecture.decoder, alternation=self.alternation)
        network = architecture.build(self.routing)
        fabric = Fabric(accelerator="cpu", devices=1)
        trainer = AlternatingTrainer(fabric, network, options, total_steps=10**6)
        batch = _random_batch(architecture, self.batch_size)
        return lambda: trainer.step(batch, 0)


@dataclass(frozen=True)
class Inference(Case):
    """Classification of a batch, with coefficients folded and kernels transformed beforehand."""

    architecture: str = "mnist"

    def _work(self) -> Callable[[], object]:
        architecture = ARCHITECTURES[self.architecture]
        network = architecture.build(self.routing).eval()
        if not self.ordinary:
            network = network.folded()
        images = _random_batch(architecture, self.batch_size).images
        return torch.inference_mode()(lambda: network(images).capsules.activations)


@dataclass(frozen=True)
class ClassLayerStep(Case):
    """Forward, backward, ascent and Adam on a class-capsule layer alone, with any number of classes.

    Here the ordinary form is a lean one, which holds the votes and no more: the question is what votes cost.
    """

    classes: int = 10
    inputs: int = 1152
    input_size: int = 8
    output_size: int = 16

    def set_up(self) -> None:
        super().set_up()
        if self.ordinary:
            CapsuleLayer.make_votes = _lean_votes

    def _work(self) -> Callable[[], object]:
        routing = make_routing(self.routing)
        layer = CapsuleLayer(self.inputs, self.input_size, self.classes, self.output_size, routing)
        poses = functional.squash(torch.randn(self.batch_size, self.inputs, self.input_size)).requires_grad_()
        activations = torch.linalg.vector_norm(poses.detach(), dim=-1)
        present = multi_hot(torch.randint(self.classes, (self.batch_size, 1)), self.classes)
        optimizer = torch.optim.Adam([layer.weight], fused=True)

        def step() -> None:
            optimizer.zero_grad()
            capsules = layer(poses, activations)
            loss = margin_loss(capsules.activations, present)
            direction: Tensor | None = None
            if isinstance(routing, DiscriminativeRouting):
                objective = discriminative_power(capsules.totals, class_signs(present)) - routing.regulariser()
                (direction,) = torch.autograd.grad(objective, routing.coefficients, retain_graph=True)
            torch.autograd.backward(loss)
            optimizer.step()
            if isinstance(routing, DiscriminativeRouting) and direction is not None:
                routing.coefficients.data.add_(direction, alpha=1e-3)

        return step

    def state_mb(self) -> float:
        """Weights, gradients and Adam's two moments, and the poses with their gradient."""
        weights = self.inputs * self.input_size * self.classes * self.output_size
        return 4 * (4 * weights + 2 * self.batch_size * self.inputs * self.input_size) / 2**20

    def votes_mb(self) -> float:
        return 4 * self.batch_size * self.inputs * self.classes * self.output_size / 2**20


def _random_batch(architecture: Architecture, size: int) -> Batch:
    images = torch.rand(size, *architecture.image_shape)
    labels = torch.rand(size, 10).topk(architecture.present).indices
    return Batch(images, labels, images[:, None].expand(-1, architecture.present, -1, -1, -1))


def _ordinary_conv_pair(
    images: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    *,
    stride: int,
    negative_slope: float = 0.0,
    kernel: object = None,
) -> Tensor:
    features = F.leaky_relu(F.conv2d(images, weight1, bias1), negative_slope)
    return F.conv2d(features, weight2, bias2, stride).permute(0, 2, 3, 1)


def _lean_votes(poses: Tensor, weight: Tensor) -> DenseVotes:
    """Votes in the least memory that holds them."""
    return DenseVotes(functional.votes(poses, weight))


def _broadcast_votes(poses: Tensor, weight: Tensor) -> DenseVotes:
    """Votes by one broadcast matrix product over (B, I, J), the form that public implementations have in common."""
    matrices = weight.permute(0, 2, 3, 1)  # (I, J, E, D)
    return DenseVotes(torch.matmul(matrices[None], poses[:, :, None, :, None]).squeeze(-1))
