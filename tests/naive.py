"""The paper's formulas by explicit loops, explicit votes Û and explicit Gram matrices: slow, and easy to check."""

import math

import torch
from torch import Tensor


def naive_squash(vector: Tensor) -> Tensor:
    """Eq. squash for one vector."""
    square = sum(float(component) ** 2 for component in vector)
    if square == 0:
        return torch.zeros_like(vector)
    return square / (1 + square) * vector / math.sqrt(square)


def naive_votes(poses: Tensor, weight: Tensor) -> Tensor:
    """Eq. p2d: û_j|i = W_ij u_i."""
    B, I, D = poses.shape
    J, E = weight.shape[2:]
    votes = torch.zeros(B, I, J, E, dtype=poses.dtype)
    for k in range(B):
        for i in range(I):
            for j in range(J):
                for e in range(E):
                    votes[k, i, j, e] = sum(weight[i, d, j, e] * poses[k, i, d] for d in range(D))
    return votes


def naive_objective(votes: Tensor, coefficients: Tensor, signs: Tensor, penalty: str, strength: float) -> Tensor:
    """Σ_j r_j of Eq. obj-2 or obj-3, summed over the batch; the L1 penalty doubled as in Eq. gaobj3."""
    B, _, J, _ = votes.shape
    objective = torch.zeros((), dtype=votes.dtype)
    for j in range(J):
        b = coefficients[:, j]
        for k in range(B):
            U = votes[k, :, j]
            objective = objective + signs[k, j] * (b @ (U @ U.T) @ b)
        objective = objective - strength * (b @ b if penalty == "l2" else 2 * b.abs().sum())
    return objective


def naive_update(
    votes: Tensor, coefficients: Tensor, signs: Tensor, penalty: str, strength: float, gamma: float
) -> Tensor:
    """Eq. gaobj2 or gaobj3: the coefficients after one step, with the batch summed as printed."""
    B, _, J, _ = votes.shape
    updated = coefficients.clone()
    for j in range(J):
        b = coefficients[:, j]
        gram_sum = torch.zeros_like(b)
        for k in range(B):
            U = votes[k, :, j]
            gram_sum += signs[k, j] * (U @ U.T) @ b
        shrinkage = b if penalty == "l2" else b.sign()
        updated[:, j] = b + 2 * gamma * (gram_sum - strength * shrinkage)
    return updated


def naive_margin_loss(lengths: Tensor, shown: Tensor) -> float:
    """Eq. ml with m+ = 0.9, m- = 0.1, λ' = 0.5."""
    total = 0.0
    for k in range(len(lengths)):
        for j in range(lengths.shape[1]):
            length = float(lengths[k, j])
            if shown[k, j]:
                total += max(0.0, 0.9 - length) ** 2
            else:
                total += 0.5 * max(0.0, length - 0.1) ** 2
    return total / len(lengths)


def naive_dynamic_routing(votes: Tensor, iterations: int) -> Tensor:
    """The squashed output capsules of routing by agreement."""
    B, I, J, E = votes.shape
    outputs = torch.zeros(B, J, E, dtype=votes.dtype)
    for k in range(B):
        logits = torch.zeros(I, J, dtype=votes.dtype)
        for _ in range(iterations):
            for j in range(J):
                total = torch.zeros(E, dtype=votes.dtype)
                for i in range(I):
                    total_weight = sum(math.exp(logit) for logit in logits[i])
                    total += math.exp(logits[i, j]) / total_weight * votes[k, i, j]
                outputs[k, j] = naive_squash(total)
            for i in range(I):
                for j in range(J):
                    logits[i, j] += votes[k, i, j] @ outputs[k, j]
    return outputs


def naive_spread_loss(activations: Tensor, shown: Tensor, margin: float) -> float:
    """Eq. 3 of "Matrix capsules with EM routing", over all pairs of a class that is shown and one that is not."""
    B, J = activations.shape
    total = 0.0
    for k in range(B):
        for right in range(J):
            for wrong in range(J):
                if shown[k, right] and not shown[k, wrong]:
                    lead = float(activations[k, right] - activations[k, wrong])
                    total += max(0.0, margin - lead) ** 2
    return total / B


def naive_orthogonalised(matrix: Tensor) -> Tensor:
    """Five steps of Newton and Schulz with Muon's quintic on a matrix, as printed, scaled for its shape."""
    X = matrix / math.sqrt(float((matrix * matrix).sum()))
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
    rows, columns = matrix.shape
    return math.sqrt(max(1.0, rows / columns)) * X
