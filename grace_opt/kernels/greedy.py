"""Greedy selection orders: the loop of MIES and of drop-greedy, in torch for any device and compiled for the CPU; and
what a greedy order costs at every length.

Both loops make the same choices bit for bit: a score only ever grows by twice an entry of W, and doubling is exact, so
fused and separate multiply-adds round alike. Sums run over vertices in a fixed order, so that they do not depend on the
batch or the device either. Source: GRACE (arXiv 2604.16983), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..arrays import first_argmin

#: Below this many score updates torch is done before numba would be imported (about half a second, once).
COMPILE_FROM = 200_000


def greedy_order(W: Tensor, scores: Tensor, k: Tensor, k_max: int) -> Tensor:
    """The vertices in the order in which greedy takes them.

    Parameters
    ----------
    W : Tensor (B, n, n), float32 or float64
    scores : Tensor (B, n), of W's dtype or wider
        Scores at the start, whose dtype the sums keep; infinite for vertices that must not be taken.
    k : Tensor (B,), int64
        How many to take, per instance, at most `k_max`.
    k_max : int
        Width of the result.

    Returns
    -------
    Tensor (B, k_max), int64
        Padded with -1 where k is smaller. Ties go to the lowest index.

    Notes
    -----
    O(k n) per instance. On the CPU a compiled loop for all but small batches; elsewhere `torch_order`.
    """
    if W.device.type == "cpu" and W.shape[0] * k_max * W.shape[-1] >= COMPILE_FROM:
        order = np.full((W.shape[0], k_max), -1, dtype=np.int64)
        arrays = W.contiguous().numpy(), scores.clone(memory_format=torch.contiguous_format).numpy(), k.numpy(), order
        in_threads(_compiled(), arrays)
        return torch.from_numpy(order)
    return torch_order(W, scores, k, k_max)


def torch_order(W: Tensor, scores: Tensor, k: Tensor, k_max: int) -> Tensor:
    """The reference: k steps of a few tensor operations for the whole batch."""
    n = W.shape[-1]
    rows, scores = W.reshape(-1, n), scores.clone()
    first_row = torch.arange(0, rows.shape[0], n, device=W.device)
    order = torch.full((W.shape[0], k_max), -1, dtype=torch.int64, device=W.device)
    for step in range(k_max):
        best = first_argmin(scores)
        scores.add_(rows.index_select(0, first_row + best), alpha=2)
        scores.scatter_(-1, best.unsqueeze(-1), torch.inf)
        # Greedy sets are nested: an instance with a smaller k keeps its first picks.
        order[:, step] = torch.where(step < k, best, -1)
    return order


def removal_scores(W: Tensor, candidates: Tensor) -> Tensor:
    r"""What f changes by when a vertex leaves the set of all candidates, :math:`W_{ii} - 2 (W 1_C)_i`.

    Parameters
    ----------
    W : Tensor (B, n, n), float32 or float64
    candidates : Tensor (B, n), bool

    Returns
    -------
    Tensor (B, n), float64
        Infinite for vertices that are no candidates. Removing j adds ``2 W[:, j]`` to the others: `greedy_order` with
        these scores is the order in which drop-greedy removes vertices. float64, because the sums are over all
        vertices and what is left at the end may be far smaller.

    Notes
    -----
    O(n²) per instance.
    """
    sums = torch.zeros(W.shape[:-1], dtype=torch.float64, device=W.device)
    for j in range(W.shape[-1]):  # a row at a time: a library's sum may round differently in another batch
        sums += torch.where(candidates[:, j : j + 1], W[:, j], 0.0)
    scores = W.diagonal(dim1=-2, dim2=-1) - 2 * sums
    return scores.masked_fill_(~candidates, torch.inf)


def cost_path(W: Tensor, order: Tensor) -> Tensor:
    """Objective of every prefix of an order of vertices.

    Parameters
    ----------
    W : Tensor (B, n, n), float32 or float64
    order : Tensor (B, m), int64
        Distinct vertices, padded with -1 at the end.

    Returns
    -------
    Tensor (B, m + 1), float64
        Entry j: f of the first j vertices, summed from W in float64; infinite where the order is shorter than j.

    Notes
    -----
    O(m n) per instance.
    """
    n, (size, m) = W.shape[-1], order.shape
    rows, diagonal = W.reshape(-1, n), W.diagonal(dim1=-2, dim2=-1).to(torch.float64)
    first_row = torch.arange(0, rows.shape[0], n, device=W.device)
    sums = torch.zeros(size, n, dtype=torch.float64, device=W.device)  # W 1_S
    path = torch.zeros(size, m + 1, dtype=torch.float64, device=W.device)
    for step in range(m):
        vertex = order[:, step]
        taken = vertex.clamp_min(0)
        at = taken.unsqueeze(-1)
        rise = (diagonal.gather(-1, at) + 2 * sums.gather(-1, at)).squeeze(-1)
        path[:, step + 1] = torch.where(vertex < 0, torch.inf, path[:, step] + rise)
        sums += rows.index_select(0, first_row + taken)
    return path


def in_threads(kernel: Callable[..., None], arrays: tuple[npt.NDArray[Any], ...]) -> None:
    """Call `kernel` on equal shares of the batch, as many as torch has threads; it releases the interpreter."""
    shares = list(zip(*(np.array_split(a, torch.get_num_threads()) for a in arrays), strict=True))
    with ThreadPoolExecutor(len(shares)) as pool:
        for done in [pool.submit(kernel, *share) for share in shares]:
            done.result()


@cache
def _compiled() -> Callable[..., None]:
    """The compiled loop. Not parallel itself: numba's threads can not be used from several Python threads at once."""
    from numba import njit

    compiled: Callable[..., None] = njit(cache=True, nogil=True)(_loop)
    return compiled


def _loop(
    W: npt.NDArray[Any], scores: npt.NDArray[Any], k: npt.NDArray[np.int64], order: npt.NDArray[np.int64]
) -> None:
    """Fill `order`; `scores` is scratch."""
    n = W.shape[-1]
    for b in range(W.shape[0]):
        score = scores[b]
        best = 0
        for i in range(1, n):
            if score[i] < score[best]:
                best = i
        for step in range(k[b]):
            order[b, step] = best
            row = W[b, best]
            score[best] = np.inf
            best, least = 0, score[best]
            for i in range(n):  # update and look for the next minimum in one pass
                value = score[i] + (row[i] + row[i])
                score[i] = value
                if value < least:
                    best, least = i, value
