"""Muon in float32: momentum whose matrix updates are orthogonalised by a Newton-Schulz iteration.

`torch.optim.Muon` iterates in bfloat16, which CPUs without native bfloat16 run far more slowly than float32;
this is the same method for such machines. Matrices of equal shape go through the iteration together. Source: Jordan et
al. (2024), "Muon: an optimizer for hidden layers in neural networks".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS, MOMENTUM = 5, 0.95


class Muon(torch.optim.Optimizer):
    """For hidden matrices only; embeddings and norms belong to AdamW."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - MOMENTUM)
                by_shape[tuple(sorted(p.shape))].append((p, p.grad.lerp(momentum, MOMENTUM)))
            for members in by_shape.values():
                updates = orthogonalise(torch.stack([u if u.shape[0] <= u.shape[1] else u.T for _, u in members]))
                for (p, u), update in zip(members, updates, strict=True):
                    scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                    p.add_(update if u.shape[0] <= u.shape[1] else update.T, alpha=-group["lr"] * scale)


def orthogonalise(X: Tensor) -> Tensor:
    """Approximately U Vᵀ of each wide matrix's singular value decomposition."""
    a, b, c = QUINTIC
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X
