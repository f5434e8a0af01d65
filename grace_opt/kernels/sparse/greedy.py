"""Greedy orders of a sparse W: the loops of `cpu.greedy`, from tensors to tensors.

When: `mies` and `drop_greedy`, for a problem whose W is sparse, a batch of one. The choices are those of the dense
loops on the same W.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import Graph


def added(graph: Graph, candidates: Tensor, count: int) -> tuple[Tensor, float]:
    """Return the first `count` vertices that MIES takes, (1, count) int64, and the sum of their scores.

    candidates : Tensor (1, n), bool
    """
    from .cpu import greedy

    order = np.empty(count, np.int64)
    rise = greedy.add(graph, np.ascontiguousarray(candidates[0].numpy()), order)
    return torch.from_numpy(order)[None], float(rise)


def dropped(graph: Graph, candidates: Tensor, count: int) -> Tensor:
    """Return the first `count` vertices that drop-greedy drops, (1, count) int64."""
    from .cpu import greedy

    order = np.empty(count, np.int64)
    greedy.drop(graph, np.ascontiguousarray(candidates[0].numpy()), order)
    return torch.from_numpy(order)[None]


def path_of(graph: Graph, order: Tensor) -> Tensor:
    """Return f of the first j vertices of an order, (1, n + 1) float64; infinite beyond the order's end.

    order : Tensor (1, m), int64
    """
    from .cpu import greedy

    found = np.full(len(graph.nodes) + 1, np.inf)
    greedy.path(graph, order[0].numpy(), found[: order.shape[-1] + 1])
    return torch.from_numpy(found)[None]
