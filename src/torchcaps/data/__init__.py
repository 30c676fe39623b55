"""Data sets in memory as bytes, and batches as a pure function of (seed, epoch, position).

The way of an image: `sources` (facts) -> `fetch` (files) -> `images`, `readers` (bytes to tensors) ->
`datasets` (splits) -> `augmentation` and `batches`. What to load is said by `config.DataConfig`.

>>> from torchcaps import data
>>> data.load("digits").image_shape
(1, 28, 28)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchcaps.data.augmentation import Augmentation
    from torchcaps.data.batches import Batches, evaluation_batches
    from torchcaps.data.check import CheckReport, check_data, draw_contact_sheet
    from torchcaps.data.config import AugmentationConfig, DataConfig
    from torchcaps.data.datasets import DATASETS, DataSet, describe, load
    from torchcaps.data.images import decode_image, read_image
    from torchcaps.data.report import DataReport
    from torchcaps.data.splits import Batch, ImageSplit, MultiLabelSplit, OverlappingDigits, Split

__all__ = [
    "DATASETS",
    "Augmentation",
    "AugmentationConfig",
    "Batch",
    "Batches",
    "CheckReport",
    "DataConfig",
    "DataReport",
    "DataSet",
    "ImageSplit",
    "MultiLabelSplit",
    "OverlappingDigits",
    "Split",
    "check_data",
    "decode_image",
    "describe",
    "draw_contact_sheet",
    "evaluation_batches",
    "load",
    "read_image",
]

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
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
