"""The yardstick: the same network written plainly, as lean as ordinary PyTorch gets.

Library convolutions, all votes in memory as one batched product, dynamic routing with three iterations, the gradient
through the last of them only, fused Adam. Nothing here comes from torchcaps but the margin loss and the decoder, which
are plain PyTorch themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchcaps.functional import margin_loss, reconstruction_loss
from torchcaps.lab.bench.networks import BenchNetwork
from torchcaps.layers.decoder import Decoder

CHANNELS, ITERATIONS, RECONSTRUCTION_WEIGHT = 256, 3, 0.0005


def squash(totals: Tensor) -> Tensor:
    squares = totals.square().sum(-1, keepdim=True)
    return totals * ((squares + 1e-9).sqrt() / (1 + squares))


class ReferenceCapsules(nn.Module):
    """Class capsules (B, I, D) -> (B, J, E) by dynamic routing.

    Votes lie in memory as (B, J, I, E), in which both sums of the routing are matrix products.
    """

    def __init__(self, inputs: int, input_size: int, outputs: int, output_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(inputs, input_size, outputs, output_size))

    def forward(self, poses: Tensor) -> Tensor:
        votes = torch.einsum("bid,idje->bjie", poses, self.weight).contiguous()
        fixed = votes.detach()
        B, J, I, _ = votes.shape
        logits = votes.new_zeros(B, J, I, 1)
        shares = votes.new_full((B, J, 1, I), 1 / J)
        for _ in range(ITERATIONS - 1):
            logits = logits + fixed @ squash(shares @ fixed).mT
            shares = logits.softmax(1).mT
        return squash(shares @ votes).squeeze(2)


class ReferenceNetwork(nn.Module):
    """Two convolutions, primary capsules, class capsules, and a decoder if the network has one."""

    def __init__(self, network: BenchNetwork) -> None:
        super().__init__()
        model, task = network.model, network.task
        padding = model.kernel // 2 if model.padding == "same" else 0
        self.size, self.negative_slope = model.primary_size, model.negative_slope
        channels = model.primary_capsules * model.primary_size
        self.first = nn.Conv2d(task.image_shape[0], CHANNELS, model.kernel, padding=padding)
        self.second = nn.Conv2d(CHANNELS, channels, model.kernel, 2, padding)
        with torch.no_grad():
            inputs = self.primary(torch.zeros(1, *task.image_shape)).shape[1]
        self.capsules = ReferenceCapsules(inputs, self.size, len(task.classes), model.class_size)
        self.decoder = Decoder(len(task.classes), model.class_size, task.image_shape) if model.reconstruction else None

    def primary(self, images: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, I, D)."""
        maps = self.second(F.leaky_relu(self.first(images), self.negative_slope, inplace=True))
        return squash(maps.permute(0, 2, 3, 1).reshape(len(images), -1, self.size))

    def forward(self, images: Tensor) -> Tensor:
        """The class capsules (B, J, E)."""
        poses: Tensor = self.capsules(self.primary(images))
        return poses


def training_step(network: ReferenceNetwork, images: Tensor, labels: Tensor, parts: Tensor) -> Callable[[], None]:
    """What trains the network once on these images each time it is called."""
    optimizer = torch.optim.Adam(network.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad()
        poses = network(images)
        loss = margin_loss(poses.norm(dim=-1), labels)
        if network.decoder is not None:
            loss = loss + RECONSTRUCTION_WEIGHT * reconstruction_loss(network.decoder(poses, labels), parts)
        torch.autograd.backward(loss)
        optimizer.step()

    return step
