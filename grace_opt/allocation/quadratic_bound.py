r"""A certified lower bound on allocations with an interaction: a price for the budget, and a convex relaxation.

At any price :math:`\mu \ge 0`, an allocation within the budget B has at least the objective

.. math:: \sum_i a_i - \mu B + \min_P \Bigl\{ 1_P^\top W 1_P - \sum_{i \in P} (a_i - \mu c_{i0}) \Bigr\},
    \qquad a_i = \min_{l \ge 1} (f_{il} + \mu c_{il}).

With a diagonal d for which :math:`A = W - \mathrm{Diag}\,d` is positive semidefinite, the minimum is at least that of
the convex :math:`x^\top A x + (d - a + \mu c_0)^\top x` over the box :math:`0 \le x \le 1`, and the tangent plane at
any x bounds that. The diagonal comes from coordinate ascent with a barrier; groups whose dropping, or keeping, the
plane rules out are fixed. Whatever the price, diagonal and x, the bound holds. Sources: Billionnet & Elloumi, Math.
Program. 109 (2007), for the diagonal; Hammer, Hansen & Simeone (1984) for fixing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..bounds.batched import SUM_MARGIN
from ..bounds.convexity import made_convex
from ..bounds.qcr import SETTLED
from ..parallel import map_in_threads
from ..solution import OPTIMALITY_RTOL
from .problem import AllocationProblem
from .quadratic import changed_costs, interaction_of, priced_costs
from .sums import EPS

Array = npt.NDArray[np.float64]
#: Barrier weights of the rounds of the ascent, relative to the gap over n; sweeps in each; least x (1 - x).
WEIGHTS, SWEEPS, LEAST_SPREAD = (0.1, 0.03, 0.01, 0.003, *6 * (0.001,)), 8, 1e-3
#: Steps of coordinate descent on x per group.
STEPS = 6
#: Prices tried with the last diagonal, relative to the given one.
PRICES = (0.85, 0.95, 1.05, 1.2)
#: Scales of groups are at least this share of the largest; gaps at least this share of the objective.
LEAST_SCALE, LEAST_GAP = 1e-12, 1e-6


@dataclass
class _Open:
    """What is still open: groups with ``low < high`` may be dropped or kept."""

    off: Tensor  # W without its diagonal, and without the groups that are kept
    low: Tensor
    high: Tensor


def quadratic_bound(problem: AllocationProblem, value: Tensor, price: Tensor) -> Tensor:
    """Certified lower bound (B,) on a scaled problem with an interaction; at most `value`.

    Parameters
    ----------
    problem : AllocationProblem
    value : Tensor (B,)
        Objective of an allocation within the budget.
    price : Tensor (B,)
        Price of the budget; any is valid, the best is that of the relaxation.

    Notes
    -----
    O(n³) for each sweep of the ascent.
    """
    diagonal = interaction_of(problem).diagonal(dim1=-2, dim2=-1)
    _, _, low, high = changed_costs(problem, price)
    left = _Open(interaction_of(problem) - torch.diag_embed(diagonal), low, high)
    left.off = left.off * high.unsqueeze(-1) * high.unsqueeze(-2)
    scale = torch.where(diagonal > 0, diagonal, left.off.abs().sum(-1))
    scale = torch.maximum(scale, LEAST_SCALE * scale.amax(-1, keepdim=True))
    scale = torch.where(scale > 0, scale, 1.0).sqrt()
    x, entries = 0.5 * (low + high), diagonal / scale.square()
    best, spread = torch.full_like(price, -torch.inf), torch.full_like(diagonal, 0.25)
    done = torch.zeros_like(price, dtype=torch.bool)
    for weight in (0.0, *WEIGHTS):
        gap = torch.maximum(value - best, LEAST_GAP * value.abs()).clamp(min=torch.finfo(value.dtype).tiny)
        barrier = weight * gap / scale.shape[-1] if weight else torch.zeros_like(gap)
        added = _convex_diagonals(left.off, entries, scale, spread, barrier)
        entries = added / scale.square()
        found, x = _at_price(problem, left, added, price, x, value)
        best = torch.where(done, best, torch.maximum(best, found))
        spread = (0.5 * (spread + x * (1.0 - x)) if weight else x * (1.0 - x)).clamp(min=LEAST_SPREAD)
        done = value - best <= OPTIMALITY_RTOL * value.abs()  # others of the batch must not change the answer
        if bool(done.all()):
            break
    added = _convex_diagonals(left.off, entries, scale, spread, torch.zeros_like(price))
    for factor in PRICES:
        found, _ = _at_price(problem, left, added, price * factor, x, value)
        best = torch.where(done, best, torch.maximum(best, found))
    return torch.minimum(best, value)


def _convex_diagonals(off: Tensor, entries: Tensor, scale: Tensor, spread: Tensor, weight: Tensor) -> Tensor:
    """Diagonals (B, n) with which `off` is proved positive semidefinite.

    Sweeps from `entries` on lower ``spread @ diagonal`` as far as a barrier of this weight (B,) allows; 0 for no sweep.
    """
    arrays = [values.detach().cpu().numpy() for values in (off, entries, scale, spread, weight)]

    def one(b: int) -> Tensor:
        W, start, s, w, mu = (values[b] for values in arrays)
        found = _ascended(W / np.outer(s, s), start, w * s**2, float(mu)) if mu > 0 else start
        return torch.from_numpy(made_convex(W, found * s**2, s, penalty=0.0))

    return torch.stack(map_in_threads(one, range(len(off)))).to(off.device)


def _ascended(unit: Array, start: Array, spread: Array, mu: float) -> Array:
    from ..kernels.shift.cpu import ascend

    entries = start * (1.0 + 1e-9)
    try:
        inverse = np.linalg.inv(unit + np.diag(entries))
    except np.linalg.LinAlgError:
        return start
    inverse = 0.5 * (inverse + inverse.T)
    for _ in range(SWEEPS):
        if not ascend(inverse, entries, spread, mu, 0, len(entries)) >= SETTLED:
            break
    return entries if np.isfinite(entries).all() else start


def _at_price(
    problem: AllocationProblem, left: _Open, added: Tensor, price: Tensor, x: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """The bound (B,) with the diagonal `added`, and the x (B, n) whose tangent plane gives it; fixes groups in `left`.

    Fixing loses only allocations with an objective above `value`.
    """
    kept, gain, _, _ = changed_costs(problem, price)
    low, high, diagonal = left.low, left.high, interaction_of(problem).diagonal(dim1=-2, dim2=-1)
    linear = diagonal - added - gain
    A = left.off + torch.diag_embed(added)
    x = x.clamp(low, high)
    x = _descended(A, linear + 2.0 * (A * x.unsqueeze(-2)).sum(-1), added, x, low, high)
    products = (A * x.unsqueeze(-2)).sum(-1)
    gradient = linear + 2.0 * products
    plane = torch.minimum(low * gradient, high * gradient)
    budget = torch.where(price > 0, price * problem.families[0].limits[:, 0], 0.0)
    total = kept.sum(-1) - budget + plane.sum(-1) - (x * products).sum(-1)
    reach = (A.abs() * x.unsqueeze(-2)).sum(-1)
    dear = priced_costs(problem, price).amax(-1)
    size = kept.abs() + dear + diagonal.abs() + added.abs() + gain.abs() + 3.0 * reach
    margin = 2.0 * SUM_MARGIN * (x.shape[-1] + 1) * EPS * (size.sum(-1) + budget)
    bound = torch.where((total - margin).isfinite(), total - margin, -torch.inf)
    open_, over = high > low, (bound - margin).unsqueeze(-1)
    out = open_ & (over + gradient > value.unsqueeze(-1)) & (gradient > 0)
    inside = open_ & (over - gradient > value.unsqueeze(-1)) & (gradient < 0)
    left.low, left.high = torch.where(inside, 1.0, low), torch.where(out, 0.0, high)
    left.off = left.off * left.high.unsqueeze(-1) * left.high.unsqueeze(-2)
    return bound, x


@np.errstate(all="ignore")  # as torch: a bound that is not finite says nothing
def _descended(A: Tensor, gradient: Tensor, added: Tensor, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """x after steps of coordinate descent, in each the one that gains most; in numpy, whose calls cost far less."""
    W, g, d, at, least, most = (values.detach().cpu().numpy() for values in (A, gradient, added, x, low, high))
    at, rows, bend = at.copy(), np.arange(len(at)), np.maximum(d, np.finfo(d.dtype).tiny)
    for _ in range(STEPS * at.shape[-1]):
        new = np.minimum(np.maximum(at - 0.5 * g / bend, least), most)
        by = new - at
        place = (by * (g + bend * by)).argmin(-1)
        step = by[rows, place]
        if not step.any():  # settled: the rest would change nothing
            break
        at[rows, place] = new[rows, place]
        g = g + (2.0 * step)[:, None] * W[rows, place]
    return torch.from_numpy(at).to(x.device)
