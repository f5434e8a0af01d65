"""Greedy selection orders: the loop of MIES and of drop-greedy, in torch for any device and compiled for the CPU
(:mod:`grace_opt.kernels.compiled.greedy`); and what a greedy order costs at every length.

Both loops make the same choices bit for bit: a score only ever grows by twice an entry of W, and doubling is exact, so
fused and separate multiply-adds round alike. Sums run over vertices in a fixed order, so that they do not depend on the
batch or the device either. Source: GRACE (arXiv 2604.16983), Algorithm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._util.arrays import first_argmin
from .dispatch import use_triton
from .passes import mask_from_indices
from .threads import ALONE_BELOW, in_threads, worth_compiling

#: As in the Triton kernel, which is not imported without need.
LARGEST_ON_CHIP = 256


class Greedy(NamedTuple):
    """What greedy took.

    Attributes
    ----------
    order : Tensor (B, k_max), int64
        The vertices in the order in which they were taken, padded with -1 where k is smaller.
    mask : Tensor (B, n), bool
        The same vertices.
    rise : Tensor (B,), float64
        Sum of the scores that they were taken at, each rounded as the scores are. In MIES this is f.
    """

    order: Tensor
    mask: Tensor
    rise: Tensor


def first_scores(W: Tensor, candidates: Tensor) -> Tensor:
    """What the first vertex costs, (B, n): the diagonal, infinite for vertices that are no candidates."""
    return W.diagonal(dim1=-2, dim2=-1).masked_fill(~candidates, torch.inf)


def greedy_order(W: Tensor, scores: Tensor | None, candidates: Tensor, k: Tensor, k_max: int) -> Greedy:
    """Take the vertex with the least score, add twice its row to the others' scores, and again.

    Parameters
    ----------
    W : Tensor (B, n, n), float32 or float64
    scores : Tensor (B, n), of W's dtype or wider, or None
        Scores at the start, whose dtype the sums keep; infinite for vertices that must not be taken. None: the
        diagonal, `first_scores`.
    candidates : Tensor (B, n), bool
        The vertices that may be taken.
    k : Tensor (B,), int64
        How many to take, per instance, at most `k_max`.
    k_max : int
        Width of the result.

    Returns
    -------
    Greedy
        Ties go to the lowest index.

    Notes
    -----
    O(k n) per instance. On the CPU a compiled loop for all but small batches, on a GPU one launch of a Triton kernel
    (n up to 256); elsewhere `torch_order`.
    """
    n = W.shape[-1]
    if use_triton("mies", W.device, f"n is larger than {LARGEST_ON_CHIP}" if n > LARGEST_ON_CHIP else None):
        from .triton.greedy import greedy_order as on_chip

        taken = on_chip(W, first_scores(W, candidates) if scores is None else scores, k, k_max)
        return Greedy(taken.order, mask_from_indices(taken.order, n), taken.rise)
    if W.device.type == "cpu" and worth_compiling(W.shape[0] * k_max * n):
        order = np.full((W.shape[0], k_max), -1, dtype=np.int64)
        mask, rise = np.zeros(W.shape[:-1], dtype=np.bool_), np.zeros(len(order))
        # By numpy: torch would wake its threads, which then are in our threads' way.
        free = np.ascontiguousarray(candidates.numpy())
        arrays = W.contiguous().numpy(), free, k.numpy(), order, mask, rise
        given = W.new_empty(len(W), 0) if scores is None else scores.contiguous()
        from .compiled.greedy import greedy

        in_threads(greedy, (arrays[0], given.numpy(), *arrays[1:]), alone=W.numel() < ALONE_BELOW)
        return Greedy(*map(torch.from_numpy, (order, mask, rise)))
    return torch_order(W, first_scores(W, candidates) if scores is None else scores, k, k_max)


def torch_order(W: Tensor, scores: Tensor, k: Tensor, k_max: int) -> Greedy:
    """The reference: k steps of a few tensor operations for the whole batch."""
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
