r"""Best exchanges in torch operations, for any device: marginals, every pair's change of f, and the search itself.

Source: Ghosh (1996), and any work on maximum diversity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .rounding import tolerance


def row_sums(W: Tensor, mask: Tensor) -> Tensor:
    """Return row sums over the chosen columns, ``W 1_S``, shape (..., n), in float64."""
    product: Tensor = torch.matmul(W.to(torch.float64), mask.to(torch.float64).unsqueeze(-1)).squeeze(-1)
    return product


def swap_costs(W: Tensor, mask: Tensor, sums: Tensor, candidates: Tensor, margin: Tensor | None = None) -> Tensor:
    r"""Return the change of f when a chosen vertex i leaves and a candidate j enters, for every pair at once.

    .. math:: \Delta_{ij} = W_{ii} - 2 s_i + W_{jj} + 2 s_j - 2 W_{ij}, \qquad s = W 1_S

    Parameters
    ----------
    W : Tensor, shape (..., n, n)
    mask, candidates : Tensor, shape (..., n), bool
    sums : Tensor, shape (..., n)
        s, `row_sums`.
    margin : Tensor, shape (..., n), optional
        Additional cost of each of the two vertices, for example for rounding.

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


def improve(W: Tensor, mask: Tensor, candidates: Tensor, going_on: Callable[[int, Tensor], Tensor]) -> int:
    """Make best exchanges in `mask`, in place, one at a time with fresh sums, until none improves f.

    Parameters
    ----------
    W : Tensor (B, n, n)
    mask, candidates : Tensor (B, n), bool
    going_on : callable
        Given before every step the number of steps made and the instances that may still move (int64); returns those
        that are to go on.

    Returns
    -------
    int
        Number of steps.
    """
    wide, n = W.to(torch.float64), W.shape[-1]
    rounding, steps = tolerance(n), 0
    active = torch.arange(W.shape[0], device=W.device)
    while (active := going_on(steps, active)).numel():
        here, chosen, free = wide[active], mask[active], candidates[active]
        sums = row_sums(here, chosen)
        size = here.diagonal(dim1=-2, dim2=-1).abs() + 2 * row_sums(here.abs(), chosen)
        change, pair = swap_costs(here, chosen, sums, free).flatten(1).min(-1)
        ends = torch.stack([pair // n, pair % n], -1)
        sure = change + rounding * size.gather(-1, ends).sum(-1) < 0
        doubt = ~sure & (change < 0)
        if doubt.any():
            margin = rounding * size[doubt]
            cost = swap_costs(here[doubt], chosen[doubt], sums[doubt], free[doubt], margin)
            change[doubt], pair[doubt] = cost.flatten(1).min(-1)
            sure = sure | (doubt & (change < 0))
        active, pair = active[sure], pair[sure]
        mask[active, pair // n], mask[active, pair % n] = False, True
        steps += bool(active.numel())
    return steps
