"""From arrays of the caller to bytes and labels, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcaps.settings import SettingError


def to_pixels(setting: str, images: Any) -> Tensor:
    """Images as (N, C, H, W) uint8. ``setting`` is what an error calls them; see `DataSet.from_arrays`."""
    array = _array(setting, images)
    if array.ndim == 3:
        array = array[:, None]
    elif array.ndim == 4 and array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    elif array.ndim != 4 or array.shape[1] not in (1, 3):
        raise SettingError(
            setting, f"must be (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels, not {array.shape}"
        )
    if 0 in array.shape:
        raise SettingError(setting, f"must hold at least one pixel, not {array.shape}")
    if array.dtype.kind == "f":
        if not (np.isfinite(array).all() and array.min() >= 0 and array.max() <= 1):
            raise SettingError(setting, "must be from 0 to 1 if they are not whole numbers")
        array = np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise SettingError(setting, f"must be uint8, or floats from 0 to 1, not {array.dtype}")
    return torch.from_numpy(np.array(array, order="C"))


def to_labels(train: Any, test: Any, classes: Sequence[str] | None) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """The names of the classes, and the labels for training and testing: (N,) int64, or (N, J) bool."""
    arrays = {"train_labels": _labels("train_labels", train), "test_labels": _labels("test_labels", test)}
    if arrays["train_labels"].ndim != arrays["test_labels"].ndim:
        raise SettingError("test_labels", "must have as many axes as the training labels")
    if classes is None:
        classes = _class_names(arrays["train_labels"])
    names = tuple(map(str, classes))
    if len(names) < 2 or len(set(names)) < len(names):
        raise SettingError("classes", f"must be at least 2, all different; there are {len(names)}")
    train_labels, test_labels = (_numbers(setting, array, names) for setting, array in arrays.items())
    return names, train_labels, test_labels


def _array(setting: str, values: Any) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except Exception as error:
        raise SettingError(setting, f"must be an array ({error})") from error
    if array.dtype.kind not in "biufU":
        raise SettingError(setting, f"must be an array of numbers or texts, not {array.dtype}")
    return array


def _labels(setting: str, values: Any) -> NDArray[Any]:
    """The labels as an array; a column of numbers, as some libraries have them, is as good as a row."""
    array = _array(setting, values)
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _class_names(labels: NDArray[Any]) -> list[str]:
    if labels.ndim == 2:
        return [str(number) for number in range(labels.shape[1])]
    if labels.dtype.kind == "U":
        return sorted(set(labels.tolist()))
    if labels.dtype.kind not in "iu":
        raise SettingError("train_labels", f"must be whole numbers from 0 or texts, not {labels.dtype}")
    highest = int(labels.max()) if labels.size else 0
    if highest >= max(2, labels.size):
        raise SettingError("train_labels", f"must be numbers of classes from 0, not up to {highest}; or give classes")
    return [str(number) for number in range(highest + 1)]


def _numbers(setting: str, labels: NDArray[Any], classes: tuple[str, ...]) -> Tensor:
    if labels.ndim == 2:
        if labels.shape[1] != len(classes) or not np.isin(labels, (0, 1)).all():
            raise SettingError(setting, f"must be 0 or 1 for each of the {len(classes)} classes")
        return torch.from_numpy(labels.astype(bool))
    if labels.ndim != 1 or not labels.size:
        raise SettingError(setting, f"must be (N,) or (N, {len(classes)}), not {labels.shape}")
    if labels.dtype.kind == "U":
        known = {name: number for number, name in enumerate(classes)}
        if unknown := sorted(set(labels.tolist()) - set(known)):
            raise SettingError(setting, f"must be names of classes; {unknown[0]!r} is none")
        return torch.tensor([known[name] for name in labels.tolist()])
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(classes):
        raise SettingError(setting, f"must be whole numbers from 0 to {len(classes) - 1}")
    return torch.from_numpy(labels.astype(np.int64))
