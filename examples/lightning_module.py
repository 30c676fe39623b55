"""Discriminative routing in a LightningModule: Lightning drives, the ascent steps beside the optimiser.

Run it with

    pip install lightning scikit-learn
    python lightning_module.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from torchcaps import CapsuleNetwork, RoutingAscent, margin_loss

try:
    import lightning as L
except ImportError:
    import pytorch_lightning as L


class CapsuleModule(L.LightningModule):
    """A capsule network with Adam for its weights and :class:`torchcaps.RoutingAscent` for its coefficients."""

    def __init__(self, *, learning_rate: float = 1e-3, gamma: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False  # two kinds of steps on each batch
        self.network = CapsuleNetwork(
            (1, 20, 20), classes=10, conv_channels=32, primary_capsules=8, reconstruction=False
        )

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Both, so that Lightning puts both into its checkpoints."""
        optimizer = torch.optim.Adam(self.network.parameters(), lr=self.hparams.learning_rate)
        ascent = RoutingAscent(self.network, gamma=self.hparams.gamma, reduce=self.mean_over_processes)
        return [optimizer, ascent]

    def mean_over_processes(self, tensor: Tensor) -> Tensor:
        return self.trainer.strategy.reduce(tensor, reduce_op="mean")

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        optimizer, _ = self.optimizers()  # Lightning's wrapper, which counts the steps
        _, ascent = self.optimizers(use_pl_optimizer=False)  # RoutingAscent itself: its step takes capsules and labels
        optimizer.zero_grad()
        capsules = self.network(images).capsules
        loss = margin_loss(capsules.activations, labels)
        self.manual_backward(loss, retain_graph=True)
        ascent.step(capsules, labels)
        optimizer.step()
        self.log("loss", loss)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        found = self.network(images).capsules.activations.argmax(1)
        self.log("test_error", 100 * (found != labels).float().mean())


def main(epochs: int = 3) -> float:
    torch.manual_seed(0)
    digits = load_digits()
    module = CapsuleModule()
    data = TensorDataset(module.network.prepare(digits.images / 16), torch.tensor(digits.target))
    train, test = (torch.utils.data.Subset(data, part) for part in (range(1400), range(1400, len(data))))
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, DataLoader(train, batch_size=50, shuffle=True))
    error = trainer.test(module, DataLoader(test, batch_size=100))[0]["test_error"]
    assert trainer.global_step == epochs * 28
    return error


if __name__ == "__main__":
    main()
