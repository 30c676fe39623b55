"""A capsule network as an estimator of scikit-learn."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torchcaps.errors import UserError

try:
    from rich.console import Console
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_array, check_is_fitted, check_X_y
except ImportError as error:
    raise UserError("The estimator needs more packages than the library: pip install 'torchcaps[train]'.") from error

from torchcaps.data.datasets import DataSet
from torchcaps.models.base import Network
from torchcaps.models.files import load
from torchcaps.settings import SettingError
from torchcaps.training.config import TrainingConfig
from torchcaps.training.fit import fit


class CapsNetClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """The paper's capsule network with ``fit``, ``predict``, ``predict_proba`` and ``score``.

    Args:
        image_shape: (H, W) or (C, H, W) of the images that rows of ``X`` are. If not given they are grey, and square
            or, if that is impossible, one line.
        routing: l2, l1, dynamic, uniform, learned, em or clustering.
        epochs: passes over the training images; as many as they need if not given.
        batch_size: images in a step; by their number if not given.
        conv_channels: of the first convolution, where images have up to 40 pixels a side.
        primary_capsules: types of them.
        reconstruction: whether a decoder is trained beside it.
        augment: largest random shift in pixels.
        random_state: seed of weights, order and shifts; None for another one every time.
        threads: of the CPU; all cores if not given.

    Rows of ``X`` are images, flat, with any range of numbers: they are brought to [0, 1] by the range of the training
    images. ``predict_proba`` gives the lengths of the class capsules divided by their sum. ``fit`` sets the seed and
    the number of threads of torch.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = CapsNetClassifier(conv_channels=16, primary_capsules=4, epochs=2, reconstruction=False, threads=1)
    >>> model.fit(X[:200], y[:200]).predict(X[200:202]).shape
    (2,)
    """

    SMALLEST_SIDE = 17  # of images that two 9x9 convolutions leave something of; smaller ones are enlarged

    def __init__(
        self,
        image_shape: tuple[int, ...] | None = None,
        *,
        routing: str = "l2",
        epochs: int | None = None,
        batch_size: int | None = None,
        conv_channels: int = 64,
        primary_capsules: int = 16,
        reconstruction: bool = False,
        augment: int = 0,
        random_state: int | None = 0,
        threads: int | None = None,
    ) -> None:
        self.image_shape = image_shape
        self.routing = routing
        self.epochs = epochs
        self.batch_size = batch_size
        self.conv_channels = conv_channels
        self.primary_capsules = primary_capsules
        self.reconstruction = reconstruction
        self.augment = augment
        self.random_state = random_state
        self.threads = threads

    def fit(self, X: ArrayLike, y: ArrayLike) -> CapsNetClassifier:
        """Train on images ``X`` (N, pixels) of the classes ``y`` (N,)."""
        rows, targets = check_X_y(X, y, dtype=np.float64)
        check_classification_targets(targets)
        self.classes_, labels = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"There is only one class, {self.classes_[0]!r}: a classifier needs at least two classes.")
        self.n_features_in_ = rows.shape[1]
        self.range_ = float(rows.min()), float(rows.max())
        images = self._images(rows)
        names = [str(name) for name in self.classes_]
        data = DataSet.from_arrays(images, labels, images[:1], labels[:1], classes=names)
        with tempfile.TemporaryDirectory() as folder:
            path = fit(self._config(folder), data=data, console=Console(quiet=True))
            self.network_: Network = load(path)
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The class of each image in ``X`` (N, pixels)."""
        longest = self.predict_proba(X).argmax(1)
        labels: NDArray[Any] = self.classes_[longest]
        return labels

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The lengths of the class capsules for each image, divided by their sum: (N, classes)."""
        check_is_fitted(self)
        rows: NDArray[np.float64] = check_array(X, dtype=np.float64)
        if rows.shape[1] != self.n_features_in_:
            expected = f"{type(self).__name__} is expecting {self.n_features_in_} features as input"
            raise ValueError(f"X has {rows.shape[1]} features, but {expected}")
        pixels = torch.from_numpy(self._images(rows)).float() / 255
        lengths = self.network_.predict(pixels).lengths.double().numpy()
        shares: NDArray[np.float64] = lengths / lengths.sum(1, keepdims=True).clip(1e-12)
        return shares

    def _config(self, folder: str) -> TrainingConfig:
        given = {
            name: value.item() if isinstance(value, np.generic) else value for name, value in self.get_params().items()
        }
        return TrainingConfig.from_mapping(
            {
                "augmentation": {"shift": given["augment"]},
                "model": {name: given[name] for name in ("conv_channels", "primary_capsules", "reconstruction")},
                "routing": {"name": given["routing"]},
                "run": {
                    "epochs": given["epochs"],
                    "batch_size": given["batch_size"],
                    "seed": secrets.randbelow(2**31) if given["random_state"] is None else given["random_state"],
                    "threads": given["threads"],
                    "accelerator": "cpu",
                    "out": str(Path(folder) / "run"),
                },
            }
        )

    def _images(self, X: NDArray[np.float64]) -> NDArray[np.uint8]:
        """Rows as bytes (N, C, H, W), small images enlarged by whole factors."""
        channels, height, width = self._shape()
        low, high = self.range_
        scaled = ((X - low) / max(high - low, 1e-12)).clip(0, 1) * 255
        images = scaled.round().astype(np.uint8).reshape(len(X), channels, height, width)
        factor = -(-self.SMALLEST_SIDE // min(height, width))
        return images.repeat(factor, axis=2).repeat(factor, axis=3)

    def _shape(self) -> tuple[int, int, int]:
        pixels = self.n_features_in_
        if self.image_shape is None:
            side = int(np.ceil(np.sqrt(pixels)))
            if side * side != pixels:
                return 1, 1, pixels
            return 1, side, side
        shape = (1, *self.image_shape) if len(self.image_shape) == 2 else tuple(self.image_shape)
        if len(shape) != 3 or int(np.prod(shape)) != pixels:
            raise SettingError("image_shape", f"{self.image_shape} does not have the {pixels} pixels of a row of X")
        channels, height, width = shape
        return channels, height, width
