"""Optimisers for capsule networks, with torch's own interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from torchcaps.functional import at_least_float32
from torchcaps.layers.capsule import CapsuleLayer
from torchcaps.ops.products import multiply
from torchcaps.routing.base import USUAL_FAN_IN

QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b, c of X <- aX + b(XXᵀ)X + c(XXᵀ)²X, which brings all singular values of X near one in five steps."""
LARGEST_BLOCK = 256
"""Rows of a matrix that are made orthogonal together."""
SMALLEST = 1e-15
"""Norm below which a matrix counts as this large: momentum that has nearly gone moves nothing any more."""
LARGEST_SHARE = 16.0
"""How many times smaller than usual a layer's inputs may be before its rate stops growing."""


def orthogonaliser(gram: Tensor, *, steps: int = 5) -> Tensor:
    """The symmetric matrix P for which P X has singular values near one, from the Gram matrix X Xᵀ of a wide X.

    All iterates of Newton and Schulz are a polynomial in X Xᵀ times X. So the iteration runs on small matrices, and
    the wide one is touched twice: once to make its Gram matrix, once to apply P.

    >>> X = torch.randn(4, 50)
    >>> values = torch.linalg.svdvals(orthogonaliser(X @ X.T) @ X)
    >>> bool((values > 0.6).all() and (values < 1.3).all())
    True
    """
    a, b, c = QUINTIC
    size = gram.diagonal().sum().clamp_min(SMALLEST**2)  # ‖X‖², at least the largest singular value's
    gram = gram / size
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    product = identity
    for _ in range(steps):
        factor = a * identity + b * gram + c * multiply(gram, gram)
        product = multiply(factor, product)
        gram = multiply(multiply(factor, gram), factor)
    return product * size.rsqrt()


def orthogonalised(update: Tensor, outputs: Sequence[int], *, steps: int = 5) -> Tensor:
    """The nearest matrix with all singular values (near) one, scaled for its shape.

    ``outputs`` are the axes that count as rows of the matrix; all others are its columns. They are the first axes, or
    the last. Of more than 256 rows, those of several blocks are made orthogonal, so that many classes do not cost their
    square. The scale √(max(1, rows / columns)) of a block gives each output the same change whatever the shape.
    """
    _check_outputs(outputs, update.ndim)
    dtype, update = update.dtype, at_least_float32(update)
    rows = math.prod(update.shape[axis] for axis in outputs)
    blocks = -(-rows // LARGEST_BLOCK)
    columns = update.numel() // max(1, rows)
    if sorted(outputs) == list(range(len(outputs))):
        parts = [
            multiply(_scaled(orthogonaliser(multiply(part, part.T), steps=steps), columns), part)
            for part in update.reshape(rows, -1).chunk(blocks)
        ]
        result = parts[0] if blocks == 1 else torch.cat(parts)
    else:
        parts = [
            multiply(part, _scaled(orthogonaliser(multiply(part.T, part), steps=steps), columns))
            for part in update.reshape(-1, rows).chunk(blocks, dim=1)
        ]
        result = parts[0] if blocks == 1 else torch.cat(parts, dim=1)
    return result.view(update.shape).to(dtype)


def _scaled(small: Tensor, columns: int) -> Tensor:
    return small.mul_(math.sqrt(max(1.0, len(small) / max(1, columns))))


def _check_outputs(outputs: Sequence[int], axes: int) -> None:
    count = len(outputs) if isinstance(outputs, Sequence) else 0
    if not 0 < count <= axes or sorted(outputs) not in (list(range(count)), list(range(axes - count, axes))):
        raise ValueError(f"outputs must be the first axes of a tensor with {axes}, or the last, not {outputs!r}")


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for large matrices, Adam for everything else.

    A parameter group with ``outputs``, the axes that count as rows, is moved by orthogonalised momentum
    (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024): of the running mean of its
    gradients all directions count the same. Groups without it are moved by Adam. :func:`parameter_groups` makes
    the groups of a capsule network.

    Args:
        params: parameter groups; a group's ``outputs`` is a tuple of axes, or None for Adam.
        lr: learning rate of the groups that name none.
        momentum: of the running mean of the gradients.
        weight_decay: fraction of a weight, times the learning rate, that a step takes away; Adam's biases keep theirs.
        betas, eps: Adam's.

    >>> layer = nn.Linear(8, 4)
    >>> optimizer = Muon([{"params": [layer.weight], "outputs": (0,), "lr": 0.02}, {"params": [layer.bias]}], lr=1e-3)
    >>> layer(torch.ones(1, 8)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0):
            raise ValueError(f"lr={lr}, momentum={momentum}, weight_decay={weight_decay}: out of range")
        if not (all(0 <= beta < 1 for beta in betas) and eps >= 0):
            raise ValueError(f"betas={betas}, eps={eps}: out of range")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "outputs": None,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with settings of its own."""
        if not param_group.get("lr", 0) >= 0:
            raise ValueError(f"lr must be zero or more, not {param_group['lr']}")
        super().add_param_group(param_group)
        outputs = self.param_groups[-1]["outputs"]
        for parameter in self.param_groups[-1]["params"] if outputs is not None else ():
            _check_outputs(outputs, parameter.ndim)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step along the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["outputs"] is None:
                self._adam(moved, group)
            else:
                for parameter in moved:
                    self._orthogonal(parameter, group)
        return loss

    def _orthogonal(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        mean = state["momentum"]
        gradient = parameter.grad
        mean.lerp_(gradient, 1 - group["momentum"])
        ahead = torch.lerp(gradient, mean, group["momentum"])  # Nesterov's
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(orthogonalised(ahead, group["outputs"]), alpha=-group["lr"])

    def _adam(self, moved: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        for parameter in moved:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            for name in ("exp_avg", "exp_avg_sq"):  # which a file may have brought in another memory order
                state[name] = _ordered(state[name], like=parameter)
        if not moved:
            return
        states = [self.state[parameter] for parameter in moved]
        if group["weight_decay"]:
            for parameter in moved:
                if parameter.ndim > 1:  # weights, not biases
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
        fused = all(
            parameter.device.type in ("cpu", "cuda") and _dense(parameter).is_contiguous() for parameter in moved
        )
        if fused and moved[0].device.type != "cpu":
            for state in states:
                state["step"] = state["step"].to(moved[0].device)
        adam(
            [_dense(parameter) for parameter in moved],
            [_dense(_ordered(parameter.grad, like=parameter)) for parameter in moved if parameter.grad is not None],
            [_dense(state["exp_avg"]) for state in states],
            [_dense(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            fused=fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )


def _dense(tensor: Tensor) -> Tensor:
    """The tensor's memory as it lies there: fused Adam goes wrong or copies where it is not contiguous."""
    strides = tensor.stride()
    return tensor.detach().permute(sorted(range(tensor.ndim), key=lambda axis: -strides[axis]))


def _ordered(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, or a copy of it in the memory order of another."""
    return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)


def parameter_groups(network: nn.Module, *, lr: float = 1e-3, matrix_lr: float | None = 0.01) -> list[dict[str, Any]]:
    """The weights of a network in groups for :class:`Muon`.

    Capsule weights that sum over more numbers take smaller steps, and those that sum over fewer take larger ones, so
    that class capsules change equally fast whatever feeds them (Yang and Hu, "Tensor programs IV", 2021). With the
    inputs of the paper's MNIST network the rates are those given.

    Args:
        network: any module; its convolution kernels and capsule weights are the large matrices.
        lr: learning rate of everything that Adam moves.
        matrix_lr: of the large matrices; None moves them by Adam, too.

    >>> import torchcaps
    >>> optimizer = Muon(parameter_groups(torchcaps.CapsuleNetwork((1, 28, 28), classes=10)))
    """
    groups: dict[tuple[tuple[int, ...] | None, float], list[nn.Parameter]] = {}
    taken: set[int] = set()
    for module in network.modules():
        outputs: tuple[int, ...] | None = None
        if isinstance(module, CapsuleLayer):
            fan_in = module.weight.shape[0] * module.weight.shape[1]
            share = min(LARGEST_SHARE, USUAL_FAN_IN / fan_in)
            outputs, rate = ((2, 3), matrix_lr * math.sqrt(share)) if matrix_lr is not None else (None, lr * share)
        elif isinstance(module, nn.Conv2d) and matrix_lr is not None:
            outputs, rate = (0,), matrix_lr
        else:
            continue
        # One that is tied to another's, or made of other parameters, is not moved here.
        if isinstance(module.weight, nn.Parameter) and id(module.weight) not in taken:
            groups.setdefault((outputs, rate), []).append(module.weight)
            taken.add(id(module.weight))
    others = [parameter for parameter in network.parameters() if id(parameter) not in taken]
    groups.setdefault((None, lr), []).extend(others)
    return [{"params": parameters, "outputs": outputs, "lr": rate} for (outputs, rate), parameters in groups.items()]
