"""All that can be chosen about a training run, each part defined beside what it configures. Nothing imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchcaps.data.config import AugmentationConfig, DataConfig
from torchcaps.models.config import CapsNetConfig, MatrixConfig, ModelConfig
from torchcaps.routing.config import RoutingConfig
from torchcaps.settings import SettingError, Settings, setting

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from torchcaps.ascent import Penalty, RoutingAscent
    from torchcaps.models.base import Network

DEFAULT_EPOCHS = 10
DEFAULT_WARMUP = 50
MANY = 10**12
EXECUTION = (
    "run.threads",
    "run.devices",
    "run.accelerator",
    "run.out",
    "run.pictures",
    "run.tensorboard",
    "data.folder",
)
"""What may differ between the start of a run and its continuation without changing what is computed."""


class OptimiserConfig(Settings):
    """Who moves the weights, and how far."""

    title = "optimiser"

    name: str = setting(
        "muon: orthogonalised momentum for the large matrices, Adam for the rest; or adam or sgd for all",
        default="muon",
        choices=("muon", "adam", "sgd"),
        option="optimizer",
    )
    learning_rate: float = setting("of adam and sgd, at its highest", default=1e-3, least=0, most=10)
    matrix_rate: float = setting("learning rate of the large matrices with muon", default=0.01, least=0, most=10)
    momentum: float = setting("of muon and sgd", default=0.95, least=0, below=1)
    weight_decay: float = setting(
        "share of a weight, times its rate, that a step takes away; with sgd a part of the gradient",
        default=0.0,
        least=0,
        most=100,
    )
    schedule: str = setting(
        "learning rate over time: cosine or linear to zero, staircase (the paper's), or constant",
        default="cosine",
        choices=("cosine", "linear", "staircase", "constant"),
    )
    warmup: int | None = setting(
        "steps over which the learning rate rises from zero, half of all at most [50, a tenth of a short run]",
        default=None,
        least=0,
        most=MANY,
    )
    decay: float = setting("staircase: factor of each stair", default=0.96, least=0, most=1)
    decay_every: int = setting("staircase: steps between stairs", default=1000, least=1, most=MANY)
    average: float = setting(
        "decay of a running average of the weights, which is then used (0: none)", default=0.0, least=0, below=1
    )
    backward_noise: float = setting(
        "noise that gradients may gain, as a share of their mean square, by leaving most images with small gradients "
        "out of the convolutions' backward pass; capsnet only, faster with the extra 'fast' (0: all images)",
        default=0.0,
        least=0,
        most=10,
    )
    reconstruction_weight: float = setting(
        "weight of the summed squared reconstruction error", default=0.0005, least=0, most=1000
    )

    def build(self, network: Network) -> Optimizer:
        """The optimiser of a network's weights."""
        from torch.optim import SGD

        from torchcaps.optim import Muon, parameter_groups

        if self.name == "sgd":
            return SGD(
                network.parameters(),
                lr=self.learning_rate,
                momentum=self.momentum,
                nesterov=self.momentum > 0,
                weight_decay=self.weight_decay,
            )
        rate = self.matrix_rate if self.name == "muon" else None
        groups = parameter_groups(network, lr=self.learning_rate, matrix_lr=rate)
        return Muon(groups, lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay)


class AscentConfig(Settings):
    """How the coefficients of discriminative routing are moved."""

    title = "discriminative routing"

    gamma: float = setting("γ, the size of a coefficient step", default=0.1, least=0, most=1e6)
    decaying_gamma: bool = setting(
        "let γ rise and fall with the learning rate; otherwise it stays as it is, as in the paper", default=True
    )
    objective: str = setting(
        "right minus wrong squared lengths (the paper's), balanced: one right class weighs as much as all wrong ones, "
        "or the logarithm of the ratio for each class",
        default="balanced",
        choices=("difference", "balanced", "ratio"),
    )
    rule: str = setting(
        "of a coefficient step: plain (the paper's) or adam",
        default="plain",
        choices=("plain", "adam"),
        option="ascent",
    )
    constraint: str = setting(
        "fixed-norm: keep the norm of every class capsule's coefficients as it was at the start; the paper has none",
        default="fixed-norm",
        choices=("none", "fixed-norm"),
    )
    shrinkage: str = setting(
        "the penalty as part of the gradient (the paper's), as a proximal step, with which L1 reaches exact zeros, or "
        "as one on all coefficients of a capsule or of a type of capsules together, which removes them as a whole",
        default="gradient",
        choices=("gradient", "proximal", "capsules", "types"),
    )
    alternation: str = setting(
        "coefficient steps use the weight step's forward pass (fused), or one of their own (strict)",
        default="fused",
        choices=("fused", "strict"),
    )
    weight_steps: int = setting("n_b, weight steps on each batch", default=1, least=1, most=1000)
    routing_steps: int = setting("n_r, coefficient steps on each batch", default=1, least=0, most=1000)

    def check(self) -> None:
        if self.shrinkage != "gradient" and self.rule != "plain":
            raise SettingError("shrinkage", f"{self.shrinkage} goes with plain steps only: Adam rescales them")

    def build(
        self, network: nn.Module, *, types: int | None = None, reduce: Callable[[Tensor], Tensor] | None = None
    ) -> RoutingAscent | None:
        """The ascent of a network's coefficients; None if it has none, or they are not to be moved.

        Args:
            network: the network.
            types: of primary capsules, for a penalty on all capsules of a type together.
            reduce: gives the mean of a tensor over all processes.
        """
        from torchcaps import ascent
        from torchcaps.routing.discriminative import DiscriminativeRouting

        routings = [module for module in network.modules() if isinstance(module, DiscriminativeRouting)]
        if not (routings and self.routing_steps):
            return None
        penalty: Penalty | None = None
        strength = routings[0].strength
        if self.shrinkage in ("capsules", "types"):
            penalty = ascent.GroupPenalty(strength, types if self.shrinkage == "types" else None)
        elif self.shrinkage == "proximal":
            kind = ascent.L1Penalty if routings[0].penalty == "l1" else ascent.L2Penalty
            penalty = kind(strength, proximal=True)
        objectives: dict[str, type[ascent.Objective]] = {
            "difference": ascent.Difference,
            "balanced": ascent.Balanced,
            "ratio": ascent.Ratio,
        }
        return ascent.RoutingAscent(
            network,
            gamma=self.gamma,
            objective=objectives[self.objective](),
            penalty=penalty,
            constraint=ascent.FixedNorm() if self.constraint == "fixed-norm" else None,
            rule="adam" if self.rule == "adam" else "plain",
            reduce=reduce,
        )


class RunConfig(Settings):
    """How long, where, and what is kept."""

    title = "run"

    epochs: int | None = setting(
        f"passes over the training images [{DEFAULT_EPOCHS}, more of a few images]", default=None, least=1, most=10**9
    )
    steps: int | None = setting("training steps, instead of epochs", default=None, least=1, most=MANY)
    batch_size: int | None = setting(
        "images in a step, over all devices [128, fewer of a few images]", default=None, least=1, most=10**6
    )
    seed: int = setting("of weights, order and augmentation", default=0, least=0, most=2**63 - 1)
    threads: int | None = setting("CPU threads of each process [cores / devices]", default=None, least=1, most=1024)
    devices: int = setting("processes, one for each device", default=1, least=1, most=4096)
    accelerator: str = setting("auto, cpu, cuda, mps: whatever Lightning Fabric knows", default="auto")
    precision: str = setting(
        "Lightning Fabric's name for it", default="32-true", choices=("32-true", "bf16-mixed", "16-mixed", "64-true")
    )
    out: str | None = setting("folder for the run [runs/DATA-ROUTING-TIME]", default=None)
    log_every: int = setting("steps between rows of metrics.csv", default=20, least=1, most=MANY)
    evaluate_every: int | None = setting(
        "steps between evaluations [an epoch or a fiftieth of the run, 2000 at the most]",
        default=None,
        least=1,
        most=MANY,
    )
    evaluation_images: int | None = setting(
        "images to evaluate on before the last step [all]", default=None, least=1, most=MANY
    )
    checkpoint_every: int = setting("steps between checkpoints", default=500, least=1, most=MANY)
    keep: str | None = setting(
        "which state becomes the network: best on the validation images, or last [best if there are any]",
        default=None,
        choices=("best", "last"),
    )
    patience: int | None = setting(
        "stop after this many evaluations without a better one on the validation images",
        default=None,
        least=1,
        most=MANY,
    )
    start_from: str | None = setting(
        "start with the weights of another run or model file, as far as they fit", default=None, option="from"
    )
    tensorboard: bool = setting("write TensorBoard logs into the run folder too", default=False)
    pictures: bool = setting("draw the run when it is done", default=True)
    test_images: int | None = setting(
        "evaluate on this many images only [all; multi-mnist: 10000]", default=None, least=1, most=MANY
    )

    def check(self) -> None:
        for name in ("out", "start_from"):
            if getattr(self, name) == "":
                raise SettingError(name, "is empty")
        if self.epochs is not None and self.steps is not None:
            raise SettingError("epochs", "and steps cannot both be given")
        if self.batch_size is not None and self.batch_size % self.devices:
            raise SettingError("batch_size", f"{self.batch_size} cannot be shared evenly by {self.devices} devices")


class TrainingConfig(Settings):
    """One training run."""

    data: DataConfig = setting(default=DataConfig())
    augmentation: AugmentationConfig = setting(default=AugmentationConfig())
    model: ModelConfig = setting(default=CapsNetConfig())
    routing: RoutingConfig = setting(default=RoutingConfig())
    optimiser: OptimiserConfig = setting(default=OptimiserConfig())
    ascent: AscentConfig = setting(default=AscentConfig())
    run: RunConfig = setting(default=RunConfig())

    def check(self) -> None:
        own = (RoutingConfig().name, "em" if self.model.name == MatrixConfig.name else None)
        if self.model.name != CapsNetConfig.name and (self.routing.settings or self.routing.name not in own):
            given = ", ".join(self.routing.settings) or self.routing.name
            raise SettingError("routing", f"of the model {self.model.name} cannot be changed: take away {given}")
        if self.model.name != CapsNetConfig.name and self.optimiser.backward_noise:
            raise SettingError("backward_noise", f"cannot be had with the model {self.model.name}")
        if self.ascent.shrinkage != "gradient" and self.optimiser.average:
            raise SettingError("average", f"would blur the zeros that shrinkage {self.ascent.shrinkage} makes")

    def determining(self) -> dict[str, Any]:
        """The settings that decide what is computed, as ``section.name`` with plain values."""
        flat = {
            f"{section}.{name}": value
            for section, values in self.to_mapping().items()
            for name, value in values.items()
        }
        return {name: value for name, value in flat.items() if name not in EXECUTION}
