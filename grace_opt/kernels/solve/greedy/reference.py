"""The greedy order in torch operations, for any device: the definition of the other loops.

Source: GRACE (arXiv 2604.16983), Algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...._util.arrays import first_argmin
from ..indices.reference import mask_from_indices


class Greedy(NamedTuple):
    """The result of greedy.

    Attributes
    ----------
    order : Tensor (B, k_max), int64
        The vertices in the order in which they were taken, padded with -1 if k is smaller.
    mask : Tensor (B, n), bool
        The same vertices.
    rise : Tensor (B,), float64
        Sum of the vertices' scores when they were taken, each rounded as the scores are. For MIES, this is f.
    """

    order: Tensor
    mask: Tensor
    rise: Tensor


def first_scores(W: Tensor, candidates: Tensor) -> Tensor:
    """Return the cost of a first vertex, (B, n): the diagonal, infinite for vertices that are not candidates."""
    return W.diagonal(dim1=-2, dim2=-1).masked_fill(~candidates, torch.inf)


def greedy_order(W: Tensor, scores: Tensor, k: Tensor, k_max: int) -> Greedy:
    """Run k steps of a few tensor operations on the whole batch."""
    n = W.shape[-1]
    rows, scores = W.reshape(-1, n), scores.clone()
    first_row = torch.arange(0, rows.shape[0], n, device=W.device)
    order = torch.full((W.shape[0], k_max), -1, dtype=torch.int64, device=W.device)
    rise = torch.zeros(W.shape[0], dtype=torch.float64, device=W.device)
    for step in range(k_max):
        best = first_argmin(scores)
        taken = step < k
        rise += torch.where(taken, scores.gather(-1, best.unsqueeze(-1)).squeeze(-1), 0.0)
        scores.add_(rows.index_select(0, first_row + best), alpha=2)
        scores.scatter_(-1, best.unsqueeze(-1), torch.inf)
        # Greedy sets are nested: an instance with a smaller k keeps its first picks.
        order[:, step] = torch.where(taken, best, -1)
    return Greedy(order, mask_from_indices(order, n), rise)
