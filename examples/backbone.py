"""Class capsules on top of any backbone that turns images into feature maps.

With a small backbone of this file's own, or with any of timm's (``pip install timm``):

    python backbone.py
    python backbone.py resnet18
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchcaps import CapsuleLayer, L2Routing, PrimaryCapsules, RoutingAscent, margin_loss
from torchcaps.functional import Capsules
from torchcaps.routing import Routing


class CapsuleClassifier(nn.Module):
    """Images -> backbone -> feature maps -> primary capsules -> class capsules.

    Args:
        backbone: any module (B, C, H, W) -> (B, F, rows, columns).
        image_shape: (C, H, W) of the images, from which all sizes follow.
        classes: how many.
        routing: by default :class:`torchcaps.L2Routing`.
    """

    def __init__(
        self, backbone: nn.Module, image_shape: Sequence[int], classes: int, routing: Routing | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        with torch.no_grad():  # one image tells all sizes
            maps = backbone.eval()(torch.zeros(1, *image_shape))
            self.primary = PrimaryCapsules(maps.shape[1], types=16, size=8, kernel=1, stride=1)
            inputs = self.primary(maps).poses.shape[1]
        self.classes = CapsuleLayer(inputs, 8, classes, 16, routing or L2Routing())
        self.train()

    def forward(self, images: Tensor) -> Capsules:
        capsules: Capsules = self.classes(self.primary(self.backbone(images)).poses)
        return capsules


def small_backbone() -> nn.Module:
    """(B, 3, H, W) -> (B, 64, H/8, W/8)."""
    layers: list[nn.Module] = []
    for below, above in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(below, above, 3, stride=2, padding=1), nn.BatchNorm2d(above), nn.ReLU()]
    return nn.Sequential(*layers)


def timm_backbone(name: str) -> nn.Module:
    """One of timm's networks without its pooling and its classifier. ``pretrained=True`` downloads weights."""
    import timm

    return timm.create_model(name, pretrained=False, num_classes=0, global_pool="")


def main(name: str | None = None, *, image_shape: Sequence[int] = (3, 64, 64), steps: int = 20) -> list[float]:
    """A few steps on one batch of noise: the loss falls."""
    torch.manual_seed(0)
    backbone = timm_backbone(name) if name else small_backbone()
    network = CapsuleClassifier(backbone, image_shape, classes=5)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    ascent = RoutingAscent(network, gamma=0.1)
    images, labels = torch.rand(10, *image_shape), torch.arange(10) % 5
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        capsules = network(images)
        loss = margin_loss(capsules.activations, labels)
        loss.backward(retain_graph=True)
        ascent.step(capsules, labels)
        optimizer.step()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
