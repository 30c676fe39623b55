"""Two processes that share each batch, with a reduce function of your own for the coefficients.

    python two_processes.py

They find the coefficients of one process that sees whole batches.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchcaps import CapsuleNetwork, RoutingAscent, margin_loss
from torchcaps.ascent import Ratio

PROCESSES = 2
STEPS = 5


def mean_over_processes(tensor: Tensor) -> Tensor:
    """What :class:`torchcaps.RoutingAscent` asks of a reduce function: the mean of all processes' tensors."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def train(rank: int, processes: int) -> dict[str, Tensor]:
    """A few steps on the part of every batch that belongs to this process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = CapsuleNetwork((1, 20, 20), classes=4, conv_channels=8, primary_capsules=4, reconstruction=False)
    shared = DistributedDataParallel(network) if processes > 1 else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    reduce = mean_over_processes if processes > 1 else None
    ascent = RoutingAscent(network, gamma=1.0, objective=Ratio(), reduce=reduce)
    for _ in range(STEPS):
        images, labels = torch.rand(16, 1, 20, 20), torch.randint(4, (16,))
        images, labels = images[rank::processes], labels[rank::processes]
        optimizer.zero_grad()
        capsules = shared(images).capsules
        margin_loss(capsules.activations, labels).backward(retain_graph=True)  # averages the weights' gradients
        ascent.step(capsules, labels)
        optimizer.step()
    return network.state_dict()


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES)
    torch.save(train(rank, PROCESSES), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=PROCESSES)
        first, second = (torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(PROCESSES))
    alone = train(0, 1)
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor)
    print("Two processes that share each batch find what one finds alone.")


if __name__ == "__main__":
    main()
