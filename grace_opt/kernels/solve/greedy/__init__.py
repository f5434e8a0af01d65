"""The greedy order, the loop of MIES and drop-greedy; and the objective at every length of an order.

All loops make the same choices, bit for bit: each update adds twice an entry of W, and doubling is exact, so fused and
separate multiply-adds round alike. Sums run over vertices in a fixed order and do not depend on batch or device.
Source: GRACE (arXiv 2604.16983), Algorithm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._shared.dispatch import use_triton
from ..._shared.limits import LARGEST_ON_CHIP
from ..._shared.operation import Compiled, Operation, Triton, trial_of
from ..._shared.threads import COMPILE_FROM, worth_compiling
from ..indices.reference import mask_from_indices
from . import reference
from .reference import Greedy as Greedy
from .reference import first_scores as first_scores

KERNEL = Triton("mies", f"n up to {LARGEST_ON_CHIP}", trial_of(__name__, "gpu"))
OPERATION = Operation(
    "greedy",
    "the order of MIES, of drop_greedy and of beam's start",
    cpu=Compiled(f"from {COMPILE_FROM:,} steps on, all calls together", trial_of(__name__, "cpu"), "plain loops"),
    gpu=(KERNEL,),
)


def greedy_order(W: Tensor, scores: Tensor | None, candidates: Tensor, k: Tensor, k_max: int) -> Greedy:
    """Repeat: take the vertex with the least score, and add twice its row to the other scores.

    Parameters
    ----------
    W : Tensor (B, n, n), float32 or float64
    scores : Tensor (B, n), of W's dtype or wider, or None
        Initial scores, infinite for vertices that must not be taken; sums keep their dtype. None means the diagonal,
        `first_scores`.
    candidates : Tensor (B, n), bool
        The vertices that may be taken.
    k : Tensor (B,), int64
        Number of vertices to take, per instance, at most `k_max`.
    k_max : int
        Width of the result.

    Returns
    -------
    Greedy
        Ties go to the lowest index.

    Notes
    -----
    O(k n) per instance. Runs a compiled loop on the CPU for all but small batches, and one launch of a Triton kernel on
    a GPU (n up to 256); otherwise `reference.greedy_order`.
    """
    n = W.shape[-1]
    if use_triton(KERNEL, W.device, f"n is larger than {LARGEST_ON_CHIP}" if n > LARGEST_ON_CHIP else None):
        from .gpu import greedy_order as on_chip

        taken = on_chip(W, first_scores(W, candidates) if scores is None else scores, k, k_max)
        return Greedy(taken.order, mask_from_indices(taken.order, n), taken.rise)
    if W.device.type == "cpu" and worth_compiling(W.shape[0] * k_max * n):
        from .cpu import greedy_order as compiled

        return Greedy(*compiled(W, scores, candidates, k, k_max))
    return reference.greedy_order(W, first_scores(W, candidates) if scores is None else scores, k, k_max)


def removal_scores(W: Tensor, candidates: Tensor) -> Tensor:
    r"""Return the change of f when a vertex leaves the set of all candidates, :math:`W_{ii} - 2 (W 1_C)_i`.

    Parameters
    ----------
    W : Tensor (B, n, n), float32 or float64
    candidates : Tensor (B, n), bool

    Returns
    -------
    Tensor (B, n), float64
        Infinite for vertices that are not candidates. Removing j adds ``2 W[:, j]`` to the others: `greedy_order` with
        these scores is the order in which drop-greedy removes vertices. float64, because sums run over all vertices and
        the result may be far smaller.

    Notes
    -----
    O(n²) per instance.
    """
    sums = torch.zeros(W.shape[:-1], dtype=torch.float64, device=W.device)
    for j in range(W.shape[-1]):  # one row at a time: a library's sum may round differently in another batch
        sums += torch.where(candidates[:, j : j + 1], W[:, j], 0.0)
    scores = W.diagonal(dim1=-2, dim2=-1) - 2 * sums
    return scores.masked_fill_(~candidates, torch.inf)


def cost_path(W: Tensor, order: Tensor) -> Tensor:
    """Return the objective of every prefix of an order of vertices.

    Parameters
    ----------
    W : Tensor (B, n, n), float32 or float64
    order : Tensor (B, m), int64
        Distinct vertices, padded with -1 at the end.

    Returns
    -------
    Tensor (B, m + 1), float64
        Entry j: f of the first j vertices, summed from W in float64; infinite if the order is shorter than j.

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
        place = taken.unsqueeze(-1)
        rise = (diagonal.gather(-1, place) + 2 * sums.gather(-1, place)).squeeze(-1)
        path[:, step + 1] = torch.where(vertex < 0, torch.inf, path[:, step] + rise)
        sums += rows.index_select(0, first_row + taken)
    return path
