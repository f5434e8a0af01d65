"""The greedy order on W that is never formed: as `grace_opt.kernels.greedy`, with columns computed when wanted.

On the CPU an instance at a time, with columns computed ahead; on a GPU all instances together, a column each. Sums
round as those of `grace_opt.kernels.greedy` on columns that may differ in the last digits; whole numbers are the same.
Source: GRACE (arXiv 2604.16983), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...._util.arrays import first_argmin
from ...greedy.reference import Greedy
from ...indices.reference import mask_from_indices
from ..source import Columns, ColumnWeights, blocks


def greedy_order(
    W: ColumnWeights, scores: Tensor, k: Tensor, k_max: int, expired: Callable[[], bool]
) -> tuple[Greedy, Tensor]:
    """Repeat: take the vertex with the least score, and add twice its column to the other scores.

    Parameters
    ----------
    W : ColumnWeights (B, n, n)
    scores : Tensor (B, n), float64
        Infinite for vertices that must not be taken.
    k : Tensor (B,), int64
    k_max : int
    expired : callable
        Asked at every step; once it is true, the vertices of the least scores complete the order at once.

    Returns
    -------
    Greedy
        Ties go to the lowest index.
    Tensor (B,), bool
        Which instances were completed at once.

    Notes
    -----
    O(k n d) per instance, d the number of rows of the factors.
    """
    if W.device.type != "cpu":
        return _together(W, scores.clone(), k, k_max, expired)
    order = torch.full((len(k), k_max), -1, dtype=torch.int64, device="cpu")
    rise = torch.zeros(len(k), dtype=torch.float64, device="cpu")
    cut = torch.zeros(len(k), dtype=torch.bool, device="cpu")
    for b, count in enumerate(k.tolist()):
        cut[b], rise[b] = _one(W[b], scores[b].clone(), order[b, :count], expired)
    return Greedy(order, mask_from_indices(order, W.n), rise), cut


def _one(W: ColumnWeights, scores: Tensor, order: Tensor, expired: Callable[[], bool]) -> tuple[bool, float]:
    """Fill the order of a single instance on the CPU; whether it was cut short, and the sum of the scores."""
    columns, rise, seen = Columns(W), 0.0, scores.numpy()
    for step in range(len(order)):
        if expired():
            rest = scores.argsort(stable=True)[: len(order) - step]
            order[step:] = rest
            return True, rise + float(scores[rest].sum())
        vertex = int(seen.argmin())  # the first of equals
        order[step] = vertex
        rise += float(seen[vertex])
        if step + 1 < len(order):
            scores.add_(columns.column(vertex, scores), alpha=2)
            seen[vertex] = torch.inf
    return False, rise


def _together(
    W: ColumnWeights, scores: Tensor, k: Tensor, k_max: int, expired: Callable[[], bool]
) -> tuple[Greedy, Tensor]:
    """Take a vertex of every instance at each step: for devices that wait for each other's steps."""
    order = torch.full((len(k), k_max), -1, dtype=torch.int64, device=W.device)
    rise = torch.zeros(len(k), dtype=torch.float64, device=W.device)
    cut = torch.zeros(len(k), dtype=torch.bool, device=W.device)
    for step in range(k_max):
        taken = step < k
        if expired():
            rest = scores.argsort(dim=-1, stable=True)[:, : k_max - step]
            wanted = torch.arange(step, k_max, device=W.device) < k.unsqueeze(-1)
            order[:, step:] = torch.where(wanted, rest, -1)
            rise += torch.where(wanted, scores.gather(-1, rest), 0.0).sum(-1)
            cut = taken
            break
        best = first_argmin(scores).unsqueeze(-1)
        rise += torch.where(taken, scores.gather(-1, best).squeeze(-1), 0.0)
        scores.add_(W.columns(best).squeeze(-1), alpha=2)
        scores.scatter_(-1, best, torch.inf)
        order[:, step] = torch.where(taken, best.squeeze(-1), -1)
    return Greedy(order, mask_from_indices(order, W.n), rise), cut


def cost_path(W: ColumnWeights, order: Tensor) -> Tensor:
    """Return f of every prefix of an order of vertices, (B, m + 1); infinite beyond the order's end.

    O(m n d) per instance, a block of columns at a time.
    """
    path = torch.full((order.shape[0], order.shape[1] + 1), torch.inf, dtype=torch.float64, device=order.device)
    for b, row in enumerate(order):
        one, taken = W[b], row[row >= 0]
        rises, place = one.diagonal()[taken], torch.arange(len(taken), device=order.device)
        for at in blocks(len(taken), len(taken), order.device):
            before = place.unsqueeze(-1) < at
            rises[at] += 2 * torch.where(before, one.block(taken, taken[at]), 0.0).sum(0)
        path[b, 0] = 0.0
        path[b, 1 : len(taken) + 1] = rises.cumsum(0)
    return path
