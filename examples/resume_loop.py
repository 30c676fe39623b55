"""Stopping a loop of your own and resuming it: three state dicts and the random numbers are all it takes.

    python resume_loop.py

It trains once in one go and once with a stop in the middle, and finds the same numbers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from torchcaps import CapsuleNetwork, RoutingAscent, margin_loss


class Loop:
    """A network, what moves it, and how far it has come."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = CapsuleNetwork(
            (1, 20, 20), classes=10, conv_channels=16, primary_capsules=4, reconstruction=False
        )
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)
        self.ascent = RoutingAscent(self.network, gamma=1e-3, rule="adam")
        self.step = 0
        digits = load_digits()
        self.images = self.network.prepare(digits.images / 16)
        self.labels = torch.tensor(digits.target)

    def train(self, until: int) -> None:
        while self.step < until:
            batch = torch.randint(1400, (32,))
            self.optimizer.zero_grad()
            capsules = self.network(self.images[batch]).capsules
            margin_loss(capsules.activations, self.labels[batch]).backward(retain_graph=True)
            self.ascent.step(capsules, self.labels[batch])
            self.optimizer.step()
            self.step += 1

    def save(self, path: Path) -> None:
        state = {
            "network": self.network.state_dict(),  # the coefficients are in it
            "optimizer": self.optimizer.state_dict(),
            "ascent": self.ascent.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ascent.load_state_dict(state["ascent"])
        torch.set_rng_state(state["random"])
        self.step = state["step"]


def main(steps: int = 20) -> None:
    whole = Loop()
    whole.train(until=steps)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.pt"
        first = Loop()
        first.train(until=steps // 2)
        first.save(file)
        second = Loop()
        second.load(file)
        second.train(until=steps)
    for name, tensor in whole.network.state_dict().items():
        assert torch.equal(tensor, second.network.state_dict()[name]), name
    print(f"The same numbers after {steps} steps, stopped or not.")


if __name__ == "__main__":
    main()
