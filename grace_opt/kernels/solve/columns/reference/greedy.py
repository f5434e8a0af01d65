"""The greedy order on W that is never formed: as `grace_opt.kernels.solve.greedy`, with columns computed when wanted.

On the CPU an instance at a time, with columns computed ahead; on a GPU all instances together, a column each. Sums
round as those of `grace_opt.kernels.solve.greedy` on columns that may differ in the last digits; whole numbers are the
same. Source: GRACE (arXiv 2604.16983), Algorithm 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ....._util.arrays import first_argmin
from ...greedy.reference import Greedy
from ...indices.reference import mask_from_indices
from ..source import Columns, ColumnSource, blocks

#: Share of the time after which it is checked whether the rest goes one by one, and most vertices of a block.
CHECKED_AFTER, MOST_IN_BLOCK = 0.25, 512
#: Number of vertices among which those of a block are chosen, for each of them.
SHORTLIST = 2
#: No round is taken for shorter, in seconds: clocks may stand still.
SHORTEST = 1e-6


def greedy_order(
    W: ColumnSource, scores: Tensor, k: Tensor, k_max: int, left: Callable[[], float]
) -> tuple[Greedy, Tensor]:
    """Repeat: take the vertex with the least score, and add twice its column to the other scores.

    Parameters
    ----------
    W : ColumnSource (B, n, n)
    scores : Tensor (B, n), float64
        Infinite for vertices that must not be taken.
    k : Tensor (B,), int64
    k_max : int
    left : callable
        Called at every step: seconds that are left. If they do not suffice for one vertex after the other, the CPU
        takes as many at a time as it must; once there are none, the vertices of the least scores complete the order at
        once.

    Returns
    -------
    Greedy
        Ties go to the lowest index. `rise` is f of what was taken one by one.
    Tensor (B,), bool
        Which instances were cut short.

    Notes
    -----
    O(k n d) per instance, d the number of rows of the factors.
    """
    if W.device.type != "cpu":
        return _together(W, scores.clone(), k, k_max, left)
    order = torch.full((len(k), k_max), -1, dtype=torch.int64, device="cpu")
    rise = torch.zeros(len(k), dtype=torch.float64, device="cpu")
    cut = torch.zeros(len(k), dtype=torch.bool, device="cpu")
    for b, count in enumerate(k.tolist()):
        own = scores[b].clone()
        done, rise[b] = _one_by_one(W[b], own, order[b, :count], left)
        if done < count:
            cut[b] = True
            _in_blocks(W[b], own, order[b, done:count], left)
    return Greedy(order, mask_from_indices(order, W.n), rise), cut


def _one_by_one(W: ColumnSource, scores: Tensor, order: Tensor, left: Callable[[], float]) -> tuple[int, float]:
    """Fill the order of a single instance on the CPU, while there is time; how far, and the sum of the scores."""
    columns, rise, seen = Columns(W), 0.0, scores.numpy()
    began, seconds, checked = time.monotonic(), left(), False
    for step in range(len(order)):
        now = left()
        if not checked and now < (1 - CHECKED_AFTER) * seconds:
            checked, rest = True, len(order) - step
            if (time.monotonic() - began) * rest > now * step:
                return step, rise
        if now <= 0:
            return step, rise
        vertex = int(seen.argmin())  # the first of equals
        order[step] = vertex
        rise += float(seen[vertex])
        if step + 1 < len(order):
            scores.add_(columns.column(vertex, scores), alpha=2)
            seen[vertex] = torch.inf
    return len(order), rise


def _in_blocks(W: ColumnSource, scores: Tensor, order: Tensor, left: Callable[[], float]) -> None:
    """Fill the rest of the order, as many vertices at a time as there must be.

    Vertices of a block are chosen one by one from those of the least scores, whose weights are formed; then a product
    of W with the block changes all other scores.
    """
    step, pace = 0, W.product_seconds()
    while step < len(order):
        rest, began = len(order) - step, time.monotonic()
        rounds = int(left() / pace)
        if rounds < 1:
            order[step:] = scores.argsort(stable=True)[:rest]
            return
        count = min(-(-rest // rounds), MOST_IN_BLOCK)
        listed = scores.topk(min(SHORTLIST * count, W.n), largest=False).indices.sort().values
        near, own = scores[listed], W.block(listed, listed)
        seen, taken = near.numpy(), list[int]()
        for _ in range(count):
            place = int(seen.argmin())
            taken.append(place)
            near.add_(own[place], alpha=2)
            seen[place] = torch.inf
        block = listed[taken]
        order[step : step + count] = block
        step += count
        if step < len(order):
            chosen = torch.zeros_like(scores)
            chosen[block] = 1.0
            scores.add_(W.times(chosen), alpha=2)
            scores[block] = torch.inf
        pace = max(time.monotonic() - began, SHORTEST)


def _together(
    W: ColumnSource, scores: Tensor, k: Tensor, k_max: int, left: Callable[[], float]
) -> tuple[Greedy, Tensor]:
    """Take a vertex of every instance at each step: for devices that wait for each other's steps."""
    order = torch.full((len(k), k_max), -1, dtype=torch.int64, device=W.device)
    rise = torch.zeros(len(k), dtype=torch.float64, device=W.device)
    cut = torch.zeros(len(k), dtype=torch.bool, device=W.device)
    for step in range(k_max):
        taken = step < k
        if left() <= 0:
            rest = scores.argsort(dim=-1, stable=True)[:, : k_max - step]
            needed = torch.arange(step, k_max, device=W.device) < k.unsqueeze(-1)
            order[:, step:] = torch.where(needed, rest, -1)
            cut = taken
            break
        best = first_argmin(scores).unsqueeze(-1)
        rise += torch.where(taken, scores.gather(-1, best).squeeze(-1), 0.0)
        scores.add_(W.columns(best).squeeze(-1), alpha=2)
        scores.scatter_(-1, best, torch.inf)
        order[:, step] = torch.where(taken, best.squeeze(-1), -1)
    return Greedy(order, mask_from_indices(order, W.n), rise), cut


def cost_path(W: ColumnSource, order: Tensor) -> Tensor:
    """Return f of every prefix of an order of vertices, (B, m + 1); infinite beyond the order's end.

    O(m n d) per instance, a block of columns at a time.
    """
    path = torch.full((order.shape[0], order.shape[1] + 1), torch.inf, dtype=torch.float64, device=order.device)
    for b, row in enumerate(order):
        one, taken = W[b], row[row >= 0]
        rises, place = one.diagonal()[taken], torch.arange(len(taken), device=order.device)
        for block in blocks(len(taken), len(taken), order.device):
            before = place.unsqueeze(-1) < block
            rises[block] += 2 * torch.where(before, one.block(taken, taken[block]), 0.0).sum(0)
        path[b, 0] = 0.0
        path[b, 1 : len(taken) + 1] = rises.cumsum(0)
    return path
