"""Two real processes with half of the batch each learn what one process learns from the whole, for every routing."""

from pathlib import Path

import torch
from lightning_fabric import Fabric

from torchcaps.data.splits import Batch
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.routing import ROUTINGS
from torchcaps.routing.config import RoutingConfig
from torchcaps.training.algorithm import AlternatingTrainer
from torchcaps.training.config import OptimiserConfig, TrainingConfig

SAMPLED = "l2, going backward through some images only"


def some_batch() -> Batch:
    generator = torch.Generator().manual_seed(2)
    images = torch.rand(8, 1, 20, 20, generator=generator, dtype=torch.float64)
    return Batch(images, torch.arange(8)[:, None] % 3, images[:, None])


def learn(fabric: Fabric, name: str, noise: float = 0.0) -> dict[str, torch.Tensor]:
    """Two steps on this process's share of the batch, in float64 so that only the mathematics can differ."""
    torch.manual_seed(1)
    optimiser = OptimiserConfig(warmup=0, backward_noise=noise)
    config = TrainingConfig(routing=RoutingConfig(name=name), optimiser=optimiser)
    network = CapsuleNetwork((1, 20, 20), 3, config.routing.build(), conv_channels=4, primary_capsules=2).double()
    trainer = AlternatingTrainer(fabric, network, config, total_steps=10)
    batch = Batch(*(tensor.chunk(fabric.world_size)[fabric.global_rank] for tensor in some_batch()))
    for step in range(2):
        trainer.step(batch, step)
    return {key: tensor.detach().clone() for key, tensor in network.state_dict().items()}


def learn_all(fabric: Fabric) -> dict[str, dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    return {name: learn(fabric, name) for name in ROUTINGS} | {SAMPLED: learn(fabric, "l2", noise=1.0)}


def learn_into(fabric: Fabric, file: Path) -> None:
    """Into a file, because a process that ends cannot hand over tensors otherwise."""
    learned = learn_all(fabric)
    if fabric.is_global_zero:
        torch.save(learned, file)


def test_two_processes_learn_what_one_does(tmp_path):
    Fabric(accelerator="cpu", devices=2, strategy="ddp_spawn").launch(learn_into, tmp_path / "two.pt")
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    one = learn_all(Fabric(accelerator="cpu", devices=1))
    assert not torch.equal(one[SAMPLED]["front.second.weight"], one["l2"]["front.second.weight"])
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-6, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")
