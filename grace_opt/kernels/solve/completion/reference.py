"""Greedy completions in torch operations, for any device: the definition of the compiled loop."""

from __future__ import annotations

import torch
from torch import Tensor

from ...._util.arrays import first_argmin


def completions(W: Tensor, owner: Tensor, scores: Tensor, need: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Run `width` steps of a few tensor operations on all partial sets."""
    n = W.shape[-1]
    rows, scores, first_row = W.reshape(-1, n), scores.clone(), owner * n
    order = torch.full((scores.shape[0], width), -1, dtype=torch.int64, device=W.device)
    cost = torch.zeros(scores.shape[0], dtype=torch.float64, device=W.device)
    for step in range(width):
        best = first_argmin(scores)
        rise = scores.gather(-1, best.unsqueeze(-1)).squeeze(-1)
        needed = step < need
        cost += torch.where(needed, rise, 0.0)
        order[:, step] = torch.where(needed & rise.isfinite(), best, -1)
        scores.add_(rows.index_select(0, first_row + best), alpha=2)
        scores.scatter_(-1, best.unsqueeze(-1), torch.inf)
    return order, cost
