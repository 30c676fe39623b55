"""Algorithm 1 of the paper: weights and routing coefficients in turns, on the same batch."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from lightning_fabric.wrappers import _FabricOptimizer
from torch import Tensor, nn

from torchcaps.data import Batch
from torchcaps.functional import at_least_float32, multi_hot, reconstruction_loss
from torchcaps.models import Network, Output
from torchcaps.optim import Muon, parameter_groups
from torchcaps.train.ascent import Ascent, Directions
from torchcaps.train.options import TrainOptions
from torchcaps.train.schedule import rate_factor

STATISTICS = ("loss", "reconstruction_loss", "train_error", "length_right", "length_wrong")


class AlternatingTrainer:
    """Takes the steps of Algorithm 1 on a network.

    Without discriminative routing there are no coefficient steps, and it is ordinary training with Adam.
    """

    def __init__(self, fabric: Fabric, network: Network, options: TrainOptions, total_steps: int) -> None:
        self._fabric = fabric
        self._options = options
        self._total_steps = total_steps
        self.network = network
        routings = network.ascending()
        self.ascent = None
        if routings and options.routing_steps:
            self.ascent = Ascent(fabric, routings, options, types=network.map_shape[-1])
        kept_apart = {id(routing.coefficients) for routing in routings}
        self._weights = [each for each in network.parameters() if id(each) not in kept_apart]
        self._module = fabric.setup_module(network)  # moves the weights to the device: only then can they be viewed
        self._stepped = [_in_memory_order(each) for each in self._weights]
        adam: torch.optim.Optimizer = torch.optim.Adam(self._stepped, lr=options.learning_rate, fused=True)
        if options.optimizer == "muon":
            self._stepped = self._weights
            matrices = network.matrices()
            known = {id(parameter) for parameter, _ in matrices}
            others = [each for each in self._weights if id(each) not in known]
            groups = parameter_groups(matrices, others, rate=options.matrix_rate)
            adam = Muon(groups, lr=options.learning_rate, weight_decay=options.weight_decay)
        self._rates = [group["lr"] for group in adam.param_groups]
        self.optimizer: _FabricOptimizer = fabric.setup_optimizers(adam)  # type: ignore[assignment]
        self.average: dict[str, Tensor] | None = None
        if options.average:
            self.average = {name: each.clone() for name, each in network.state_dict().items()}

    def step(self, batch: Batch, step: int) -> Tensor:
        """One iteration of Algorithm 1; returns the :data:`STATISTICS` of its batch."""
        options = self._options
        factor = rate_factor(step, self._total_steps, options)
        for group, rate in zip(self.optimizer.param_groups, self._rates):
            group["lr"] = rate * factor
        present = multi_hot(batch.labels, self.network.classes)
        labels = batch.labels if options.reconstruction else None
        pending = options.routing_steps if self.ascent is not None else 0
        directions: Directions | None = None

        for turn in range(options.weight_steps):  # Algorithm 1, lines 3 to 6
            self._module.zero_grad()  # first, so that the old gradients' memory is free for what follows
            self.optimizer.zero_grad()
            output: Output = self._module(batch.images, labels)
            losses = self._losses(output, batch, present, step)
            if self.ascent and pending and options.alternation == "fused" and turn == options.weight_steps - 1:
                directions = self.ascent.directions(output.capsules.totals, present, retain_graph=True)
            self._fabric.backward(losses[0])
            for weight, stepped in zip(self._weights, self._stepped):
                if stepped is not weight and weight.grad is not None:
                    stepped.grad = weight.grad.permute(_memory_order(weight))
            self.optimizer.step()
        if self.ascent and directions is not None:
            self.ascent.step(directions, factor)
            pending -= 1
        if self.ascent and pending:
            self._route(batch, present, pending, factor)
        self._update_average(step)
        return self._statistics(output, batch, present, losses)

    def _losses(self, output: Output, batch: Batch, present: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The loss to descend and, for the record, the reconstruction's part before its weight."""
        loss = self.network.loss(output.capsules, present, step / self._total_steps)
        if output.reconstructions is None:
            return loss, torch.zeros_like(loss)
        reconstruction = reconstruction_loss(at_least_float32(output.reconstructions), batch.parts)
        return loss + self._options.reconstruction_weight * reconstruction, reconstruction

    def _route(self, batch: Batch, present: Tensor, steps: int, factor: float) -> None:
        """Coefficient steps with forward passes of their own (Algorithm 1, lines 7 to 9).

        The coefficients do not reach below the primary capsules, which are computed once, without a graph.
        """
        assert self.ascent is not None
        with self._fabric.autocast():
            with torch.no_grad():
                primary = self.network.primary_capsules(batch.images)
            for _ in range(steps):
                totals = self.network.route(primary).totals
                self.ascent.step(self.ascent.directions(totals, present), factor)

    @torch.no_grad()
    def _update_average(self, step: int) -> None:
        if self.average is None:
            return
        # A young average follows closely, or it would remember the random start for long.
        decay = min(self._options.average, (1 + step) / (10 + step))
        current = self.network.state_dict()
        torch._foreach_lerp_(list(self.average.values()), [current[name] for name in self.average], 1 - decay)

    @torch.no_grad()
    def _statistics(self, output: Output, batch: Batch, present: Tensor, losses: tuple[Tensor, Tensor]) -> Tensor:
        lengths = output.capsules.activations.detach().float()
        found = multi_hot(self.network.predict(output.capsules), self.network.classes)
        wrong = 100 * (found != present).any(1).float().mean()
        right_length = (lengths * present).sum() / present.sum()
        wrong_length = (lengths * (1 - present)).sum() / (1 - present).sum()
        return torch.stack([each.detach().float() for each in (*losses, wrong, right_length, wrong_length)])

    def is_finite(self) -> bool:
        """Whether all weights and coefficients are."""
        return all(bool(each.isfinite().all()) for each in self.network.parameters())

    def trained_network(self) -> Network:
        """The network to use: with the averaged weights if they are kept."""
        return self.network if self.average is None else self.network.copy_with(self.average)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the next step depends on."""
        tensors = {f"network.{name}": each for name, each in self.network.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": each for name, each in self.average.items()}
        for prefix, optimizer in self._optimizers().items():
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{prefix}.{index}.{name}": each for name, each in state.items() if each is not None}
        return tensors | {"random": torch.get_rng_state()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what :meth:`tensors` returned."""
        torch.set_rng_state(tensors["random"])
        self.network.load_state_dict(_within(tensors, "network"))
        if self.average is not None:
            for name, each in _within(tensors, "average").items():
                self.average[name].copy_(each)
        for prefix, optimizer in self._optimizers().items():
            state: dict[int, dict[str, Tensor]] = {}
            for name, each in _within(tensors, prefix).items():
                index, _, entry = name.partition(".")
                state.setdefault(int(index), {})[entry] = each
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        optimizers = {"optimizer": self.optimizer.optimizer}
        if self.ascent is not None:
            optimizers["ascent"] = self.ascent.optimizer
        return optimizers


def _in_memory_order(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or the same memory seen with its axes in memory order.

    Fused Adam copies whatever is not contiguous to and fro, which takes longer than the step itself.
    """
    return parameter if parameter.is_contiguous() else nn.Parameter(parameter.data.permute(_memory_order(parameter)))


def _memory_order(tensor: Tensor) -> list[int]:
    """The axes of a densely stored tensor, the one with the longest strides first."""
    strides = tensor.stride()
    return sorted(range(tensor.ndim), key=lambda axis: -strides[axis])


def _within(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = prefix + "."
    return {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
