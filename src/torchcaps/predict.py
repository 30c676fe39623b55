"""Prediction on a user's own images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from torchcaps.data import Augmentation, Batch, read_image
from torchcaps.models import load_network


@dataclass(frozen=True)
class Prediction:
    """The classes of one image with the lengths of their capsules, longest first."""

    image: str
    classes: tuple[str, ...]
    lengths: tuple[float, ...]
    present: int

    @property
    def found(self) -> tuple[str, ...]:
        """The class the network decides for, or classes if its images show several."""
        return self.classes[: self.present]


class Predictor:
    """A trained network and how images are brought to the form it was trained on."""

    def __init__(self, path: Path, *, device: torch.device | str = "cpu") -> None:
        network, self.spec = load_network(path)
        self.network = network.folded().to(device)
        self.device = device
        # The centre of the image, as in evaluation; nothing if training saw whole images.
        whole = self.spec.image_shape == self.spec.source_shape
        self._crop = Augmentation(crop=0 if whole else self.spec.image_shape[1])

    @torch.inference_mode()
    def __call__(self, paths: Sequence[Path]) -> Iterator[Prediction]:
        """Classify image files of any size and mode."""
        size = self.network.evaluation_batch
        for start in range(0, len(paths), size):
            chosen = paths[start : start + size]
            pixels = [read_image(path, image_shape=self.spec.source_shape, fit=self.spec.fit) for path in chosen]
            images = torch.stack(pixels)
            nothing = torch.zeros(len(images), 1, dtype=torch.long)
            batch = self._crop.centre(Batch(images, nothing, images[:, None])).on(self.device)
            lengths, order = self.network(batch.images).capsules.activations.sort(1, descending=True)
            for path, ranked, values in zip(chosen, order.tolist(), lengths.tolist()):
                names = tuple(self.spec.classes[each] for each in ranked)
                yield Prediction(str(path), names, tuple(values), self.spec.present)
