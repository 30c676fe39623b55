"""A capsule layer as the head of a convolutional network of your own, trained on the embedded digits.

Run it with

    python own_cnn.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torchcaps import CapsuleLayer, L2Routing, PrimaryCapsules, RoutingAscent, margin_loss
from torchcaps.functional import Capsules


class DigitNetwork(nn.Module):
    """Images (B, 1, 8, 8) -> feature maps (B, 32, 8, 8) -> 72 primary capsules -> 10 class capsules."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()
        )
        self.primary = PrimaryCapsules(32, types=8, size=8, kernel=3, stride=2)  # a map of 3x3 places
        self.classes = CapsuleLayer(3 * 3 * 8, 8, 10, 16, L2Routing())

    def forward(self, images: Tensor) -> Capsules:
        primary = self.primary(self.features(images))
        capsules: Capsules = self.classes(primary.poses)
        return capsules


def main(epochs: int = 10) -> float:
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16).float().unsqueeze(1), torch.tensor(digits.target)
    network = DigitNetwork()
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    ascent = RoutingAscent(network, gamma=0.1)
    for _ in range(epochs):
        for batch in torch.randperm(1400).split(50):
            optimizer.zero_grad()
            capsules = network(images[batch])
            margin_loss(capsules.activations, labels[batch]).backward(retain_graph=True)
            ascent.step(capsules, labels[batch])
            optimizer.step()
    with torch.no_grad():
        found = network(images[1400:]).activations.argmax(1)
    error = 100 * (found != labels[1400:]).float().mean().item()
    print(f"test error: {error:.1f} %")
    return error


if __name__ == "__main__":
    main()
