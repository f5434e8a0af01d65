r"""Batched evaluation of the objective, marginals, and the two forms of a vertex set (mask and indices).

.. math:: f(S) = 1_S^\top W 1_S = \sum_{i \in S} W_{ii} + 2 \sum_{i < j \in S} W_{ij}

Use it in solvers and tests; users read `Solution.objective`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels.objective import indices as compiled_indices
from .kernels.objective import magnitude as magnitude
from .kernels.objective import mask_from_indices as mask_from_indices
from .kernels.objective import objective as one_per_instance


def evaluate(W: Tensor, mask: Tensor) -> Tensor:
    """Objective f(S) in float64.

    Parameters
    ----------
    W : Tensor, shape (..., n, n), float32 or float64
    mask : Tensor, shape (..., n), bool

    Returns
    -------
    Tensor, shape (...), float64
        Off by its last digit, however large the weights that cancel.

    Notes
    -----
    O(n²) per instance. Additions keep what rounding takes off them, and where nearly all cancels the sum is made once
    more without any rounding, by `math.fsum`: a large weight hides no small one.

    References
    ----------
    Ogita, Rump & Oishi, SIAM J. Sci. Comput. 26 (2005).
    """
    if W.shape[:-1] == mask.shape:
        return one_per_instance(W, mask)
    if W.ndim == 2:  # many choices of one instance
        return torch.stack([evaluate(W, one) for one in mask.reshape(-1, mask.shape[-1])]).reshape(mask.shape[:-1])
    return one_per_instance(W.expand(*mask.shape[:-1], *W.shape[-2:]), mask)


def evaluate_fast(W: Tensor, mask: Tensor) -> Tensor:
    """Objective f(S) in one pass over W and without a copy of it in float64: row sums in W's own precision, or better.

    Rounding error about ``n eps * sum |W_ij|`` over the chosen entries (eps of W's dtype). O(n²) per instance.
    """
    x = mask.to(W.dtype)
    rows = (x.unsqueeze(-2) @ W).squeeze(-2)  # W is symmetric; this side of it is the faster one
    return (rows * x).sum(-1, dtype=torch.float64)


def row_sums(W: Tensor, mask: Tensor) -> Tensor:
    """Row sums over the chosen columns, ``W 1_S``, shape (..., n), in float64; the marginals are made of these."""
    product: Tensor = torch.matmul(W.to(torch.float64), mask.to(torch.float64).unsqueeze(-1)).squeeze(-1)
    return product


def swap_costs(W: Tensor, mask: Tensor, sums: Tensor, candidates: Tensor, margin: Tensor | None = None) -> Tensor:
    r"""Change of f when a chosen vertex i leaves and a candidate j enters, for every pair at once.

    .. math:: \Delta_{ij} = W_{ii} - 2 s_i + W_{jj} + 2 s_j - 2 W_{ij}, \qquad s = W 1_S

    Parameters
    ----------
    W : Tensor, shape (..., n, n)
    mask, candidates : Tensor, shape (..., n), bool
    sums : Tensor, shape (..., n)
        s, `row_sums`.
    margin : Tensor, shape (..., n), optional
        What either end costs besides, say for rounding.

    Returns
    -------
    Tensor, shape (..., n, n)
        Row: the vertex that leaves; column: the vertex that enters; infinite where i is not chosen or j not available.
    """
    diagonal = W.diagonal(dim1=-2, dim2=-1)
    leave, enter = diagonal - 2 * sums, diagonal + 2 * sums
    if margin is not None:
        leave, enter = leave + margin, enter + margin
    leave, enter = leave.masked_fill(~mask, torch.inf), enter.masked_fill(mask | ~candidates, torch.inf)
    return (leave.unsqueeze(-1) + enter.unsqueeze(-2)).sub_(W, alpha=2)


def indices_from_mask(mask: Tensor, width: int) -> Tensor:
    """Sorted int64 indices (..., width) of a mask (..., n), padded with -1."""
    if (found := compiled_indices(mask, width)) is not None:
        return found
    n = mask.shape[-1]
    place = torch.where(mask, mask.cumsum(-1) - 1, width)  # unchosen vertices go to one spare column
    indices = torch.full((*mask.shape[:-1], width + 1), -1, dtype=torch.int64, device=mask.device)
    indices.scatter_(-1, place, torch.arange(n, device=mask.device).expand(mask.shape))
    return indices[..., :width]
