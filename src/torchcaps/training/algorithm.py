"""Algorithm 1 of the paper: weights and routing coefficients in turns, on the same batch."""

from __future__ import annotations

import contextlib
import copy
from typing import cast

import torch
from lightning_fabric import Fabric
from lightning_fabric.wrappers import _FabricOptimizer
from torch import Tensor, nn

from torchcaps.backward import SampledBackward
from torchcaps.data import stateless
from torchcaps.data.splits import Batch
from torchcaps.functional import Capsules, at_least_float32, presence, reconstruction_loss
from torchcaps.models.base import Network, Output
from torchcaps.models.capsnet import CapsuleNetwork
from torchcaps.training.config import TrainingConfig
from torchcaps.training.schedule import rate_factor

STATISTICS = ("loss", "reconstruction_loss", "train_error", "length_right", "length_wrong")
COEFFICIENT_STATISTICS = tuple(f"coefficient_{name}" for name in ("mean", "std", "min", "max", "negative", "zero"))


class AlternatingTrainer:
    """Takes the steps of Algorithm 1 on a network.

    Without discriminative routing there are no coefficient steps, and it is ordinary training.
    """

    def __init__(
        self,
        fabric: Fabric,
        network: Network,
        config: TrainingConfig,
        total_steps: int,
        class_weights: Tensor | None = None,
    ) -> None:
        """``class_weights`` (J,) say how much images of each class count; by default all the same."""
        self._fabric = fabric
        self._config = config
        self._total_steps = total_steps
        self._class_weights = None if class_weights is None else class_weights.to(fabric.device)
        self._device_random = None if fabric.device.type == "cpu" else torch.get_device_module(fabric.device)
        self.network = network
        self._module = fabric.setup_module(network)  # moves the weights to the device
        optimiser = config.optimiser.build(network)
        self._rates = [group["lr"] for group in optimiser.param_groups]
        self.optimiser: _FabricOptimizer = fabric.setup_optimizers(optimiser)  # type: ignore[assignment]
        self.ascent = config.ascent.build(
            network,
            types=network.map_shape[-1],
            reduce=lambda tensor: fabric.all_reduce(tensor, reduce_op="mean"),  # type: ignore[arg-type,return-value]
        )
        self.average = copy.deepcopy(network) if config.optimiser.average else None
        self._first_shapes = {
            prefix: _shapes(optimiser.state_dict()["state"]) for prefix, optimiser in self._optimisers().items()
        }

    def step(self, batch: Batch, step: int) -> Tensor:
        """One iteration of Algorithm 1; returns the :data:`STATISTICS` of its batch."""
        config = self._config.ascent
        self._set_rates(rate_factor(step, self._total_steps, self._config.optimiser))
        labels_to_draw = batch.labels if self.network.decoder is not None else None
        coefficient_steps = config.routing_steps if self.ascent is not None else 0
        directions: list[Tensor] | None = None

        for turn in range(config.weight_steps):  # Algorithm 1, lines 3 to 6
            self.optimiser.zero_grad()  # first, so that the old gradients' memory is free for what follows
            if self.ascent is not None:
                self.ascent.zero_grad()
            with self._sampled_backward(step, turn):
                output, capsules = self._forward(batch.images, labels_to_draw)
            losses = self._losses(output, batch, step)
            last = turn == config.weight_steps - 1
            if self.ascent and coefficient_steps and config.alternation == "fused" and last:
                directions = self.ascent.directions(capsules, batch.labels)
            self._fabric.backward(losses[0])
            self.optimiser.step()
        if self.ascent and directions is not None:
            self.ascent.move(directions)
            coefficient_steps -= 1
        if coefficient_steps:
            self._route(batch, coefficient_steps)
        self._update_average(step)
        return self._statistics(output, batch, losses)

    def _forward(self, images: Tensor, labels_to_draw: Tensor | None) -> tuple[Output, Capsules]:
        """What the network gives, and its class capsules for the ascent.

        With mixed precision, Fabric refuses every gradient of its outputs but the loss's. The ascent follows the class
        capsules themselves, and the loss follows views of them.
        """
        kept: list[Capsules] = []

        def keep(module: nn.Module, inputs: object, output: Output) -> Output:
            kept.append(output.capsules)
            return output._replace(capsules=Capsules(*(tensor.view_as(tensor) for tensor in output.capsules)))

        with self.network.register_forward_hook(keep):  # and no longer: copies of the network have no hooks
            output: Output = self._module(images, labels_to_draw)
        return output, kept[-1]

    def _sampled_backward(self, step: int, turn: int) -> contextlib.AbstractContextManager[object]:
        """Within it, a forward pass whose backward pass will leave out images, if that is wanted."""
        noise = self._config.optimiser.backward_noise
        if not noise:
            return contextlib.nullcontext()
        key = stateless.key(self._config.run.seed, step, turn, "backward")
        sample = SampledBackward(
            noise,
            draw=lambda: (1 + stateless.random_uniform(key, torch.zeros((), dtype=torch.long)).item()) / 2,
            gather=lambda sizes: cast(Tensor, self._fabric.all_gather(sizes)).flatten(),
            rank=self._fabric.global_rank,
        )

        def hook(front: nn.Module, images: object, capsules: Capsules) -> None:
            capsules.totals.register_hook(sample)  # type: ignore[no-untyped-call]

        assert isinstance(self.network, CapsuleNetwork)  # as the configuration has checked
        return self.network.front.register_forward_hook(hook)

    def _set_rates(self, factor: float) -> None:
        for group, rate in zip(self.optimiser.param_groups, self._rates):
            group["lr"] = rate * factor
        if self.ascent is not None:
            config = self._config.ascent
            self.ascent.gamma = config.gamma * factor if config.decaying_gamma else config.gamma

    def _losses(self, output: Output, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """The loss to descend and, for the record, the reconstruction's part before its weight."""
        weights = None
        if self._class_weights is not None:
            shown = presence(batch.labels, len(self.network.classes))
            classes = shown.sum(1)
            weights = (shown * self._class_weights).sum(1) / classes.clamp_min(1)
            weights = torch.where(classes > 0, weights, 1.0)  # that nothing is there is to be learned, too
        loss = self.network.loss(output.capsules, batch.labels, step / self._total_steps, weights)
        if output.reconstructions is None:
            return loss, torch.zeros_like(loss)
        reconstruction = reconstruction_loss(at_least_float32(output.reconstructions), batch.parts)
        return loss + self._config.optimiser.reconstruction_weight * reconstruction, reconstruction

    def _route(self, batch: Batch, steps: int) -> None:
        """Coefficient steps with forward passes of their own (Algorithm 1, lines 7 to 9).

        The coefficients do not reach below the primary capsules, which are computed once, without a graph.
        """
        assert self.ascent is not None
        with self._fabric.autocast():
            with torch.no_grad():
                before = [buffer.clone() for buffer in self.network.buffers()]
                primary = self.network.primary_capsules(batch.images)
                for buffer, value in zip(self.network.buffers(), before):
                    buffer.copy_(value)  # the running means of a backbone have these images already
            for _ in range(steps):
                self.ascent.step(self.network.route(primary), batch.labels)

    @torch.no_grad()
    def _update_average(self, step: int) -> None:
        if self.average is None:
            return
        # A young average follows closely, or it would remember the random start for long.
        decay = min(self._config.optimiser.average, (1 + step) / (10 + step))
        average, current = self.average.state_dict(), self.network.state_dict()
        weights = {name: tensor for name, tensor in average.items() if tensor.is_floating_point()}
        torch._foreach_lerp_(list(weights.values()), [current[name] for name in weights], 1 - decay)
        for name in average.keys() - weights.keys():  # what a backbone counts
            average[name].copy_(current[name])

    @torch.no_grad()
    def _statistics(self, output: Output, batch: Batch, losses: tuple[Tensor, Tensor]) -> Tensor:
        lengths = output.capsules.activations.detach().float()
        shown, found = (
            presence(labels, len(self.network.classes))
            for labels in (batch.labels, self.network.found(output.capsules))
        )
        wrong = 100 * (found != shown).any(1).float().mean()
        right_length = (lengths * shown).sum() / shown.sum().clamp_min(1)
        wrong_length = (lengths * (1 - shown)).sum() / (1 - shown).sum().clamp_min(1)
        return torch.stack([value.detach().float() for value in (*losses, wrong, right_length, wrong_length)])

    def coefficient_statistics(self) -> dict[str, float]:
        """The :data:`COEFFICIENT_STATISTICS` of all coefficients that ascend; nothing if there are none."""
        if self.ascent is None:
            return {}
        everything = torch.cat([coefficients.detach().flatten() for coefficients in self.ascent.coefficients])
        values = [everything.mean(), everything.std(), everything.min(), everything.max()]
        values += [(everything < 0).float().mean(), (everything == 0).float().mean()]
        return dict(zip(COEFFICIENT_STATISTICS, torch.stack(values).tolist()))

    def is_finite(self) -> bool:
        """Whether all weights and coefficients are."""
        return all(bool(tensor.isfinite().all()) for tensor in self.network.state_dict().values())

    def trained_network(self) -> Network:
        """The network to use: with the averaged weights if they are kept."""
        return self.network if self.average is None else self.average

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the next step depends on."""
        tensors = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.state_dict().items()}
        for prefix, optimiser in self._optimisers().items():
            for index, state in optimiser.state_dict()["state"].items():
                tensors |= {f"{prefix}.{index}.{name}": tensor for name, tensor in state.items()}
        if self._device_random is not None:
            tensors["random.device"] = self._device_random.get_rng_state()
        return tensors | {"random": torch.get_rng_state()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what :meth:`tensors` returned; ``ValueError`` or the like if it is not that."""
        own = ("network", "average", *self._optimisers())
        if stray := [name for name in tensors if name.partition(".")[0] not in (*own, "random", "sums", "best")]:
            raise ValueError(f"there is nothing that {stray[0]!a} would belong to")
        state_now = self.network.state_dict()
        for name, tensor in within(tensors, "network").items():
            if name in state_now and tensor.dtype != state_now[name].dtype:
                raise ValueError(f"{name!a} holds {tensor.dtype}")
        torch.set_rng_state(tensors["random"])
        if self._device_random is not None:
            self._device_random.set_rng_state(tensors["random.device"])
        self.network.load_state_dict(within(tensors, "network"))
        if self.average is not None:
            self.average.load_state_dict(within(tensors, "average"))
        for prefix, optimiser in self._optimisers().items():
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in within(tensors, prefix).items():
                index, _, entry = name.partition(".")
                state.setdefault(int(index), {})[entry] = tensor
            _check_state(optimiser, state, self._first_shapes[prefix])
            optimiser.load_state_dict({**optimiser.state_dict(), "state": state})

    def _optimisers(self) -> dict[str, torch.optim.Optimizer]:
        optimisers = {"optimiser": self.optimiser.optimizer}
        if self.ascent is not None:
            optimisers["ascent"] = self.ascent
        return optimisers


def _shapes(state: dict[int, dict[str, Tensor]]) -> dict[tuple[int, str], torch.Size]:
    """The shapes of an optimiser's state, by number of the parameter and name."""
    return {(index, name): tensor.shape for index, entries in state.items() for name, tensor in entries.items()}


def _check_state(
    optimiser: torch.optim.Optimizer, state: dict[int, dict[str, Tensor]], first: dict[tuple[int, str], torch.Size]
) -> None:
    """Whether the state is one for these parameters: what was there at first, numbers, and tensors like them."""
    shapes = [parameter.shape for group in optimiser.param_groups for parameter in group["params"]]
    given = _shapes(state)
    for index, name in first.keys() | given.keys():
        known = 0 <= index < len(shapes)
        allowed = [first[index, name]] if (index, name) in first else [torch.Size(), shapes[index]] if known else []
        if given.get((index, name)) not in allowed:
            raise ValueError(f"the optimiser has no {index}.{name!a} of shape {given.get((index, name))}")


def within(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors of a part of a checkpoint, by the names they have there."""
    start = prefix + "."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
