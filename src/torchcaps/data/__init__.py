"""Data sets in memory as bytes, and batches as a pure function of (seed, epoch, position).

The way of an image: `sources` (facts) -> `fetch` (files) -> `images`, `readers` (bytes to tensors) ->
`datasets` (splits) -> `augmentation` and `batches`. What to load is said by `config.DataConfig`.

>>> from torchcaps import data
>>> data.load("digits").image_shape
(1, 28, 28)
"""

from __future__ import annotations

# ruff: noqa: F401 (these names are for others)
from typing import TYPE_CHECKING

from torchcaps._lazy import attach

if TYPE_CHECKING:
    from torchcaps.data.augmentation import Augmentation
    from torchcaps.data.batches import Batches, evaluation_batches
    from torchcaps.data.check import CheckReport, check_data, draw_contact_sheet
    from torchcaps.data.config import AugmentationConfig, DataConfig
    from torchcaps.data.datasets import DATASETS, DataSet, describe, load
    from torchcaps.data.images import decode_image, read_image
    from torchcaps.data.report import DataReport
    from torchcaps.data.splits import Batch, ImageSplit, MultiLabelSplit, OverlappingDigits, Split

# Imported when first used, so that the settings can be had without torch.
_MODULES = {
    "augmentation": ("Augmentation",),
    "batches": ("Batches", "evaluation_batches"),
    "check": ("CheckReport", "check_data", "draw_contact_sheet"),
    "config": ("AugmentationConfig", "DataConfig"),
    "datasets": ("DATASETS", "DataSet", "describe", "load"),
    "images": ("decode_image", "read_image"),
    "report": ("DataReport",),
    "splits": ("Batch", "ImageSplit", "MultiLabelSplit", "OverlappingDigits", "Split"),
}
__getattr__, __dir__, __all__ = attach(__name__, _MODULES)
