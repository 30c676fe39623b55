"""All that can be chosen about a training run: one flat dataclass that checks itself.

The command line's options, a run's ``config.yaml`` and the recipes are all made from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from torchcaps.errors import UserError
from torchcaps.models import MODELS
from torchcaps.routing import ROUTINGS, make_routing

DEFAULT_EPOCHS = 10
# What may differ between the start of a run and its continuation without changing what is computed.
EXECUTION = ("threads", "devices", "accelerator", "data_dir")


def _option(default: Any, group: str, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"group": group, "help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One training run."""

    data: str = _option("digits", "data", "data set: see 'torchcaps data list', or folder:PATH")
    data_dir: str | None = _option(None, "data", "where fetched data sets are kept [the user's cache folder]")
    validation: int = _option(0, "data", "training images to hold out and evaluate on instead of the test set")
    image_size: int | None = _option(None, "data", "side in pixels that a folder's images are resized to [32]")
    channels: int | None = _option(None, "data", "1 for grey, 3 for colour [as a folder's images are]", (1, 3))
    fit: str = _option("stretch", "data", "how a folder's images are brought to a square", ("stretch", "pad", "crop"))
    shift: int = _option(2, "data", "augmentation: random shift by up to this many pixels")
    flip: bool = _option(False, "data", "augmentation: random left-right mirroring")
    crop: int = _option(0, "data", "train on random crops of this side, evaluate on the centre (0: whole images)")
    cutout: int = _option(0, "data", "augmentation: blank a random square of this side")
    rotate: float = _option(0.0, "data", "augmentation: random rotation by up to this many degrees")
    scale: float = _option(0.0, "data", "augmentation: random enlargement or shrinking by up to this fraction")

    model: str = _option(
        "capsnet",
        "network",
        "capsnet (the paper's), matrix (capsules with EM routing), cnn (an ordinary network of the capsnet's size)",
        tuple(MODELS),
    )
    routing: str = _option("l2", "network", f"of the capsnet: {', '.join(ROUTINGS)}, or module:Class of your own")
    iterations: int = _option(3, "network", "iterations of an iterative routing")
    alpha: float = _option(1.0, "network", "strength of the clustering routing's regularisation")
    layers: str = _option(
        "", "network", "capsule layers between primary and class capsules, as COUNTxSIZE,... such as 32x8"
    )
    conv_channels: int = _option(256, "network", "channels of the first convolution")
    primary_capsules: int = _option(32, "network", "types of primary capsules (the paper: 32, 64 for CIFAR-10)")
    primary_size: int = _option(8, "network", "components of a primary capsule")
    class_size: int = _option(16, "network", "components of a class capsule")
    kernel: int = _option(9, "network", "side of both convolution kernels")
    matrix_sizes: str = _option("64,8,16,16", "network", "of the matrix network: A,B,C,D as its paper calls them")
    activation: str = _option("relu", "network", "after the first convolution", ("relu", "leaky-relu"))
    reconstruction: bool = _option(True, "network", "train a decoder beside the classifier")
    weight_std: float | None = _option(
        None, "network", "standard deviation that starts the capsule weights [the routing's own]"
    )

    epochs: int | None = _option(None, "training", f"passes over the training images [{DEFAULT_EPOCHS}]")
    steps: int | None = _option(None, "training", "training steps, instead of epochs")
    batch_size: int = _option(128, "training", "images in a step, over all devices")
    optimizer: str = _option(
        "adam", "training", "adam, or muon: orthogonalised momentum for the large matrices", ("adam", "muon")
    )
    learning_rate: float = _option(1e-3, "training", "Adam's, at its highest")
    matrix_rate: float = _option(0.01, "training", "learning rate of the large matrices with --optimizer muon")
    weight_decay: float = _option(0.0, "training", "share of the large matrices that a step takes away, times the rate")
    schedule: str = _option(
        "cosine",
        "training",
        "learning rate over time: cosine or linear to zero, staircase (the paper's), or constant",
        ("cosine", "linear", "staircase", "constant"),
    )
    warmup: int = _option(50, "training", "steps over which the learning rate rises from zero")
    decay: float = _option(0.96, "training", "staircase: factor of each stair")
    decay_every: int = _option(1000, "training", "staircase: steps between stairs")
    average: float = _option(0.0, "training", "decay of a running average of the weights, which is then used (0: none)")
    reconstruction_weight: float = _option(0.0005, "training", "weight of the summed squared reconstruction error")

    gamma: float = _option(0.1, "discriminative routing", "γ, the size of a coefficient step")
    strength: float = _option(1e-5, "discriminative routing", "λ, the strength of the penalty")
    start: float = _option(1.0, "discriminative routing", "start value of the coefficients (uniform and learned too)")
    objective: str = _option(
        "difference",
        "discriminative routing",
        "right minus wrong squared lengths (the paper's), or the logarithm of their ratio for each class",
        ("difference", "ratio"),
    )
    ascent: str = _option(
        "plain", "discriminative routing", "rule of a coefficient step", ("plain", "momentum", "adam")
    )
    projected: bool = _option(
        False, "discriminative routing", "keep the norm of every class capsule's coefficients as it was at the start"
    )
    decaying_gamma: bool = _option(
        False, "discriminative routing", "let γ rise and fall with the learning rate instead of staying as it is"
    )
    shrinkage: str = _option(
        "gradient",
        "discriminative routing",
        "the penalty as part of the gradient (the paper's), as a proximal step, with which L1 reaches exact zeros, or "
        "as one on all coefficients of a capsule or of a type of capsules together, which removes them as a whole",
        ("gradient", "proximal", "capsules", "types"),
    )
    alternation: str = _option(
        "fused",
        "discriminative routing",
        "coefficient steps use the weight step's forward pass (fused), or one of their own (strict)",
        ("fused", "strict"),
    )
    weight_steps: int = _option(1, "discriminative routing", "n_b, weight steps on each batch")
    routing_steps: int = _option(1, "discriminative routing", "n_r, coefficient steps on each batch")
    balanced: bool = _option(
        False, "discriminative routing", "let one right class weigh as much as all wrong ones together"
    )

    seed: int = _option(0, "run", "of weights, order and augmentation")
    threads: int | None = _option(None, "run", "CPU threads of each process [cores / devices]")
    devices: int = _option(1, "run", "processes, one for each device")
    accelerator: str = _option("auto", "run", "auto, cpu, cuda, mps: whatever Lightning Fabric knows")
    precision: str = _option(
        "32-true", "run", "Lightning Fabric's name for it", ("32-true", "bf16-mixed", "16-mixed", "64-true")
    )
    out: str | None = _option(None, "run", "folder for the run [runs/DATA-ROUTING-TIME]")
    log_every: int = _option(20, "run", "steps between rows of metrics.csv")
    evaluate_every: int | None = _option(None, "run", "steps between evaluations [an epoch, 2000 at the most]")
    evaluation_images: int | None = _option(None, "run", "images to evaluate on before the last step [all]")
    checkpoint_every: int = _option(500, "run", "steps between checkpoints")
    pictures: bool = _option(True, "run", "draw the run when it is done")
    test_images: int | None = _option(None, "run", "evaluate on this many images only [all; multi-mnist: 10000]")

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            choices, value = each.metadata["choices"], getattr(self, each.name)
            if choices and value is not None and value not in choices:
                raise UserError(f"{flag(each.name)} must be one of {', '.join(map(str, choices))}, not {value}.")
        self._require_at_least(
            1,
            "batch_size conv_channels primary_capsules primary_size class_size kernel iterations epochs steps "
            "weight_steps decay_every devices threads log_every evaluate_every evaluation_images checkpoint_every "
            "test_images image_size",
        )
        self._require_at_least(
            0,
            "alpha validation shift crop cutout warmup routing_steps gamma strength decay learning_rate matrix_rate weight_decay average seed",
        )
        if self.epochs is not None and self.steps is not None:
            raise UserError("Give --epochs or --steps, not both.")
        if self.average >= 1:
            raise UserError(f"--average is a decay below 1 such as 0.999, not {self.average}.")
        if self.batch_size % self.devices:
            raise UserError(f"--batch-size {self.batch_size} cannot be shared evenly by {self.devices} devices.")
        if self.shrinkage != "gradient" and self.ascent != "plain":
            raise UserError(f"--shrinkage {self.shrinkage} goes with --ascent plain: other rules rescale its step.")
        if self.shrinkage != "gradient" and self.average:
            raise UserError(
                f"--shrinkage {self.shrinkage} makes zeros that --average would blur: leave one of them out."
            )
        if self.model != "capsnet" and self.layers:
            raise UserError(f"--layers is for the capsnet: the {self.model} has layers of its own.")
        if self.objective == "ratio" and self.balanced:
            raise UserError("--balanced is for --objective difference: the ratio is balanced as it is.")
        self.hidden_layers()
        self.matrix_network_sizes()
        make_routing(self.routing, **self.routing_settings())

    def _require_at_least(self, least: int, names: str) -> None:
        for name in names.split():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"{flag(name)} must be at least {least}, not {value}.")

    def routing_settings(self) -> dict[str, Any]:
        """What a routing's constructor may ask for."""
        names = ("iterations", "alpha", "start", "strength")
        return {name: getattr(self, name) for name in names}

    def hidden_layers(self) -> tuple[tuple[int, int], ...]:
        """``--layers`` as pairs (capsules, size)."""
        try:
            pairs = [tuple(map(int, each.split("x"))) for each in self.layers.split(",") if each]
            if any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
                raise ValueError
        except ValueError:
            raise UserError(f"--layers takes COUNTxSIZE,... such as 32x8, not '{self.layers}'.") from None
        return tuple((capsules, size) for capsules, size in pairs)

    def matrix_network_sizes(self) -> tuple[int, int, int, int]:
        """``--matrix-sizes`` as numbers."""
        try:
            A, B, C, D = map(int, self.matrix_sizes.split(","))
            if min(A, B, C, D) < 1:
                raise ValueError
        except ValueError:
            raise UserError(f"--matrix-sizes takes four numbers A,B,C,D, not '{self.matrix_sizes}'.") from None
        return A, B, C, D

    def to_yaml(self) -> str:
        return yaml.safe_dump(dataclasses.asdict(self), sort_keys=False, allow_unicode=True)


def flag(name: str) -> str:
    """An option's name on the command line.

    >>> flag("batch_size")
    '--batch-size'
    """
    return "--" + name.replace("_", "-")


def read_options(path: Path) -> dict[str, Any]:
    """The options set in a YAML file, checked for names that do not exist."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is not readable as YAML: {error}") from None
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise UserError(f"{path} must hold a mapping of options to values.")
    known = {each.name: each for each in dataclasses.fields(TrainOptions)}
    unknown = [str(name) for name in values if name not in known]
    if unknown:
        raise UserError(f"{path} sets unknown option(s) {', '.join(unknown)}. Known are {', '.join(known)}.")
    return {name: _typed(path, known[name], value) for name, value in values.items()}


def _typed(path: Path, option: dataclasses.Field[Any], value: Any) -> Any:
    """The value as the option's type; YAML reads 1e-3 as a string, and 1 where a float is meant."""
    kinds: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}
    kind, _, optional = str(option.type).partition(" | ")
    if value is None and optional:
        return None
    try:
        converted = kinds[kind](value)
        if isinstance(value, bool) != (kind == "bool") or (converted != value and kind != "float"):
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(f"{path}: {option.name} takes {option.type}, not {value!r}.") from None
    return converted
