"""Training: options, Algorithm 1, and the loop around it."""

from torchcaps.train.folder import RunFolder
from torchcaps.train.options import TrainOptions, read_options
from torchcaps.train.run import Interrupted, fit

__all__ = ["Interrupted", "RunFolder", "TrainOptions", "fit", "read_options"]
