r"""Certified lower bounds on the optimum, batched: no k-vertex set has a smaller objective than these.

* `entry_bound`: any W, one pass over it.
* `row_bound`: any W, sorting only.
* `eigenvalue_bound`: any W, one symmetric eigenvalue problem.
* `continuous_bound`: the convex quadratic relaxation over :math:`\{0 \le x \le 1, 1^\top x = k\}`, made convex or
  tighter by a diagonal shift, :math:`x^\top (W - \mathrm{Diag}\, d) x + d^\top x`, which agrees with f on 0/1 points.
  Duality turns its value at any x into a bound, so stopping early makes it looser, never wrong.

`grace_opt.bounds.tight` has the compiled bounds, which work on one instance at a time.

All arithmetic is in float64. Rounding is covered by explicit margins (`EIGENVALUE_MARGIN`, `SUM_MARGIN`), subtracted
from every returned value. Sources: Billionnet & Elloumi, Math. Program. 109 (2007) for the shift; Platt (1998) for the
pairwise steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .._util.arrays import NEGLIGIBLE, least_eigenvalue
from .._util.parameters import choice, integer, number
from ..errors import ProblemError
from ..parallel import map_in_threads
from ..problem import Problem
from ..run import Run
from .convexity import EIGENVALUE_MARGIN
from .of_batch import of_batch

#: Number of entries that `row_bound` and `entry_bound` hold at a time.
ROW_BLOCK = 1 << 22
#: Approximate seconds they take per entry of W.
ROW_SECONDS, ENTRY_SECONDS = 6e-8, 4e-9
#: torch shares work on more entries than this among its threads; waking them takes longer than a small instance does.
ALONE = 1 << 15
#: Up to this many vertices `eigenvalue_bound` is cheap, and it beats a relaxation if W is nearly of rank one.
LARGEST_EIGEN = 500
#: A bound that takes no longer than this (seconds) is computed even when time is up.
AT_ONCE = 0.05
#: Sums of n products are off by at most this times n·eps·Σ|terms|.
SUM_MARGIN = 8.0
_EPS = torch.finfo(torch.float64).eps
_NotConverged: type[Exception] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


@of_batch
def entry_bound(problem: Problem) -> Tensor:
    r"""Lower bound from single entries: the k least vertex weights, plus k(k - 1) times the least off-diagonal entry.

    Parameters
    ----------
    problem : Problem
        A flattened batch.

    Returns
    -------
    Tensor, shape (B,), float64

    Notes
    -----
    O(n²) per instance: one pass over W. Never negative if no entry is.

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[2.0, 1.0, 3.0], [1.0, 2.0, 5.0], [3.0, 5.0, 0.0]]), 2).flatten()
    >>> round(float(entry_bound(p)), 6)  # the optimum is 6
    4.0
    """
    problem = problem.as_matrix("entry_bound")
    n, alive, k = problem.n, problem.candidates, problem.k.to(torch.float64)
    least = torch.full_like(problem.diagonal[:, 0], torch.inf, dtype=torch.float64)
    block = max(1, ROW_BLOCK // (problem.W.shape[0] * n))
    for first in range(0, n, block):
        rows = problem.W[:, first : first + block].clone()
        rows[:, range(rows.shape[1]), range(first, first + rows.shape[1])] = torch.inf
        rows.masked_fill_(~alive.unsqueeze(-2), torch.inf)
        least = torch.minimum(least, torch.where(alive[:, first : first + block], rows.amin(-1), torch.inf).amin(-1))
    pairs = torch.where(problem.k > 1, k * (k - 1) * least, 0.0)
    ordered = torch.where(alive, problem.diagonal.to(torch.float64), torch.inf).sort(-1).values
    chosen = torch.where(torch.arange(n, device=alive.device) < problem.k.unsqueeze(-1), ordered, 0.0)
    size = chosen.abs().sum(-1) + pairs.abs()
    return chosen.sum(-1) + pairs - SUM_MARGIN * (n + 1) * _EPS * size


@of_batch
def row_bound(problem: Problem) -> Tensor:
    r"""Lower bound from each row's least entries: every chosen vertex has k - 1 chosen neighbours.

    .. math:: f(S) \ge \sum_{i \in k\ \text{smallest}} c_i,\quad c_i = W_{ii} + \sum_{(k-1)\ \text{smallest}} W_{ij}

    Parameters
    ----------
    problem : Problem
        A flattened batch.

    Returns
    -------
    Tensor, shape (B,), float64

    Notes
    -----
    O(n² log n) per instance, a block of rows at a time. References: Gilmore (1962) and Lawler (1963).

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[2.0, 1.0, 3.0], [1.0, 2.0, 5.0], [3.0, 5.0, 0.0]]), 2).flatten()
    >>> round(float(row_bound(p)), 6)  # the optimum is 6
    6.0
    """
    problem = problem.as_matrix("row_bound")
    n, alive = problem.n, problem.candidates
    most = max(problem.k_max - 1, 0)
    taken = torch.arange(most, device=alive.device) < (problem.k - 1).unsqueeze(-1)
    cost = torch.empty_like(problem.diagonal, dtype=torch.float64)
    block = max(1, ROW_BLOCK // (problem.W.shape[0] * n))
    for first in range(0, n, block):
        rows = problem.W[:, first : first + block].to(torch.float64, copy=True)
        diagonal = rows[:, range(rows.shape[1]), range(first, first + rows.shape[1])]
        rows[:, range(rows.shape[1]), range(first, first + rows.shape[1])] = torch.inf
        least = _least(rows.masked_fill_(~alive.unsqueeze(-2), torch.inf), most)
        least = torch.where(taken.unsqueeze(-2), least, 0.0)
        sums = diagonal + least.sum(-1)
        margin = SUM_MARGIN * n * _EPS * (diagonal.abs() + least.abs().sum(-1))
        cost[:, first : first + block] = sums - margin
    least = torch.where(alive, cost, torch.inf).sort(-1).values
    chosen = torch.arange(n, device=alive.device) < problem.k.unsqueeze(-1)
    least = torch.where(chosen, least, 0.0)
    return least.sum(-1) - SUM_MARGIN * n * _EPS * least.abs().sum(-1)


def _least(rows: Tensor, count: int) -> Tensor:
    """The least entries of every row, ascending; on the CPU by numpy, which sorts several times faster."""
    if rows.device.type == "cpu":
        return torch.from_numpy(np.sort(rows.detach().numpy(), axis=-1)[..., :count])
    return rows.topk(count, largest=False).values


@of_batch
def row_bound_in_time(problem: Problem, run: Run) -> Tensor:
    """`row_bound` if the time limit allows it, else `entry_bound`, else -inf."""
    problem = problem.as_matrix("row_bound_in_time")
    for bound, seconds in ((row_bound, ROW_SECONDS), (entry_bound, ENTRY_SECONDS)):
        if seconds * problem.W.numel() <= AT_ONCE or run.has_time(seconds * problem.W.numel()):
            return in_chunks(bound, problem)
    return torch.full_like(problem.k, -torch.inf, dtype=torch.float64)


def in_chunks(bound: Callable[[Problem], Tensor], problem: Problem) -> Tensor:
    """`bound` of every instance; small ones on the CPU a few at a time, in torch's number of threads."""
    size = ALONE // max(1, problem.n**2)
    if problem.W.device.type != "cpu" or size < 1 or size >= len(problem.k):
        return bound(problem)
    rows = torch.arange(len(problem.k), device="cpu")
    chunks = [rows[first : first + size] for first in range(0, len(problem.k), size)]
    return torch.cat(map_in_threads(lambda rows: bound(problem.instances(rows)), chunks))


@of_batch
def eigenvalue_bound(problem: Problem) -> Tensor:
    r"""Lower bound from the least eigenvalue of W on the space orthogonal to the all-ones vector.

    With :math:`x = (k/n) 1 + y`, :math:`y \perp 1`, :math:`\|y\|^2 = k - k^2/n` and P the projector onto
    :math:`1^\perp`,

    .. math:: f \ge \tfrac{k^2}{n^2} 1^\top W 1 - \tfrac{2k}{n} \|P W 1\| \|y\| + \lambda_{\min}(W|_{1^\perp}) \|y\|^2,

    or :math:`f \ge k \lambda_{\min}(W)`, whichever is larger. Protected vertices are left out.

    Parameters
    ----------
    problem : Problem
        A flattened batch.

    Returns
    -------
    Tensor, shape (B,), float64

    Notes
    -----
    O(n³) per instance.

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.diag([1.0, 2.0, 3.0]), 2).flatten()
    >>> round(float(eigenvalue_bound(p)), 4)  # the optimum is 3
    2.0755
    """
    problem = problem.as_matrix("eigenvalue_bound")
    W, alive, scale = _candidate_matrix(problem)
    ones, k = alive.to(W), problem.k.to(W)
    m = ones.sum(-1).clamp_min(1.0)
    size = torch.linalg.matrix_norm(W)
    n = W.shape[-1]
    margin = EIGENVALUE_MARGIN * n * _EPS * size
    # Vertices left out get a large diagonal entry: never the least eigenvalue, yet too small to cost digits.
    out = torch.diag_embed((1 - ones) * (4 * size).unsqueeze(-1))
    plain = k * (_least_eigenvalue(W + out) - margin)
    sums = W.sum(-1)
    total = sums.sum(-1)
    u = ones / m.sqrt().unsqueeze(-1)
    Wu = sums / m.sqrt().unsqueeze(-1)
    uWu = total / m
    # P W P + big·uuᵀ: the least eigenvalue is that of W on the complement of u.
    outer = u.unsqueeze(-1) * Wu.unsqueeze(-2)
    projected_W = W - outer - outer.mT + (uWu + 4 * size)[..., None, None] * (u.unsqueeze(-1) * u.unsqueeze(-2))
    least = _least_eigenvalue(projected_W + out) - 4 * margin
    spread = (k - k * k / m).clamp_min(0.0)
    slope = (Wu - uWu.unsqueeze(-1) * u).norm(dim=-1)
    projected = k * k / m * uWu - 2 * k / m.sqrt() * slope * spread.sqrt() + least * spread
    projected = projected - SUM_MARGIN * n * _EPS * size * (k + 1)
    return scale * torch.maximum(plain, projected)


@of_batch
def continuous_bound(problem: Problem, *, shift: str = "scaled", steps: int = 400, rtol: float = 1e-3) -> Tensor:
    r"""Lower bound from the convex quadratic relaxation, by pairwise (SMO) steps that can stop at any time.

    At any x with gradient g of the convex q, :math:`f(S) \ge q(x) - g^\top x + \sum_{k\ \mathrm{smallest}} g_i`.

    Parameters
    ----------
    problem : Problem
        A flattened batch.
    shift : {"scaled", "uniform", "none"}
        How d is chosen. ``"scaled"``: ``d = λ_min(C) diag(W)`` with C the unit-diagonal scaling of W, where all
        candidates' ``W_ii`` are positive, else as ``"uniform"``: ``d = λ_min(W) 1``. ``"none"``: d = 0, which needs W
        to be positive semidefinite, up to rounding.
    steps : int
        Maximum number of pairwise steps.
    rtol : float
        Stop when every instance's relaxation is solved to this relative accuracy.

    Returns
    -------
    Tensor, shape (B,), float64

    Raises
    ------
    ProblemError
        With ``shift="none"``, if W is not positive semidefinite.
    OptionError
        If `shift`, `steps` or `rtol` is none of these.

    Notes
    -----
    O(n³) for the shift and O(n) per step and instance.

    Examples
    --------
    >>> import numpy as np
    >>> p = Problem.of(np.array([[2.0, 1.0], [1.0, 2.0]]), 1).flatten()
    >>> round(float(continuous_bound(p)), 6)
    2.0
    """
    choice("shift", shift, ("scaled", "uniform", "none"))
    steps, rtol = integer("steps", steps, at_least=0), number("rtol", rtol, at_least=0)
    problem = problem.as_matrix("continuous_bound")
    W, alive, scale = _candidate_matrix(problem)
    d, possible = _diagonal_shift(W, alive, shift)
    if not bool(possible.all()):
        b = int((~possible).nonzero()[0])
        raise ProblemError(
            f"shift='none' needs a positive semidefinite W; the least eigenvalue of instance {b} is "
            f"{float(scale[b] * d[b].min()):.3g}. Write shift='scaled' or 'uniform', which shift its diagonal."
        )
    A = W - torch.diag_embed(d)
    best = _solve_relaxation(A, d, alive, problem.k, steps, rtol)
    return scale * best


def _candidate_matrix(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """W / scale in float64 with the rows and columns of protected vertices zeroed; the candidates; and the scale.

    The scale is the power of two below max |W|: dividing is exact, and margins neither underflow nor vanish.
    """
    alive = problem.candidates
    both = alive.unsqueeze(-1) & alive.unsqueeze(-2)
    W = problem.W.to(torch.float64).masked_fill(~both, 0.0)
    largest = W.abs().amax((-1, -2))
    scale = torch.where(largest > 0, largest / (2 * largest.frexp().mantissa), 1.0)
    return W / scale[..., None, None], alive, scale


def _diagonal_shift(W: Tensor, alive: Tensor, shift: str) -> tuple[Tensor, Tensor]:
    """d with W - Diag d positive semidefinite on the candidates, and for which instances such a d exists."""
    n, diagonal = W.shape[-1], W.diagonal(dim1=-2, dim2=-1)
    size = torch.linalg.matrix_norm(W)
    big = torch.diag_embed((~alive).to(W) * (4 * size).unsqueeze(-1))
    least = _least_eigenvalue(W + big) - EIGENVALUE_MARGIN * n * _EPS * size
    if shift == "none":
        # For singular W the margin alone makes `least` negative; a shift of that size makes up for it.
        d = torch.where(alive, least.clamp_max(0.0).unsqueeze(-1), 0.0)
        return d, least >= -4 * EIGENVALUE_MARGIN * n * _EPS * size
    uniform = torch.where(alive, least.unsqueeze(-1), 0.0)
    if shift == "uniform":
        return uniform, torch.ones_like(alive[..., 0])
    positive = ((diagonal > 0) | ~alive).all(-1) & alive.any(-1)
    root = torch.where(alive & positive.unsqueeze(-1), diagonal, 1.0).sqrt()
    C = W / root.unsqueeze(-1) / root.unsqueeze(-2)
    positive &= torch.isfinite(torch.linalg.matrix_norm(C))  # else the diagonal entries are too far apart to scale
    C = torch.where(positive[..., None, None], C, W)
    norm = torch.linalg.matrix_norm(C)
    big = torch.diag_embed((~alive).to(W) * (4 * norm).unsqueeze(-1))
    least = _least_eigenvalue(C + big) - 2 * EIGENVALUE_MARGIN * n * _EPS * norm
    scaled = torch.where(alive, least.unsqueeze(-1) * diagonal, 0.0)
    return torch.where(positive.unsqueeze(-1), scaled, uniform), torch.ones_like(positive)


def _solve_relaxation(A: Tensor, d: Tensor, alive: Tensor, k: Tensor, steps: int, rtol: float) -> Tensor:
    """Best any-time dual value of min xᵀAx + dᵀx over the capped simplex of the candidates."""
    rows = torch.arange(A.shape[0], device=A.device)
    curvature = A.diagonal(dim1=-2, dim2=-1)
    m = alive.sum(-1).clamp_min(1)
    x = alive * (k.to(A) / m).unsqueeze(-1)
    gradient = d + 2 * _times(A, x)
    best = torch.full_like(x[:, 0], -torch.inf)
    done = torch.zeros_like(best, dtype=torch.bool)
    check_every = 32
    for step in range(steps + 1):
        if step % check_every == 0:
            gradient = d + 2 * _times(A, x)  # recomputed: the certificate must not suffer from drift
            value, dual = _dual_value(A, d, x, gradient, alive, k)
            # A finished instance stays as it is while the rest of the batch continues.
            best = torch.where(done, best, torch.maximum(best, dual))
            done |= value - best <= rtol * value.abs()
            if bool(done.all()):
                break
        up = torch.where(alive & (x < 1), gradient, torch.inf)
        low, i = up.min(-1)
        rise = gradient - low.unsqueeze(-1)
        Ai = A[rows, i]
        bend = (curvature[rows, i].unsqueeze(-1) + curvature - 2 * Ai).clamp_min(1e-300)
        room = (1 - x[rows, i]).unsqueeze(-1)
        # Infinite `low` means that nothing can grow (k = all candidates): no step is taken.
        length = torch.where(
            torch.isfinite(rise) & (rise > 0), torch.minimum(torch.minimum(rise / (2 * bend), x), room), 0.0
        )
        gain = torch.where(length > 0, rise * length - bend * length * length, 0.0)
        j = gain.argmax(-1)
        by = length[rows, j]
        x[rows, i] += by
        x[rows, j] -= by
        x.clamp_(0.0, 1.0)
        gradient += 2 * by.unsqueeze(-1) * (Ai - A[rows, j])
    return best


def _dual_value(A: Tensor, d: Tensor, x: Tensor, gradient: Tensor, alive: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The relaxation's value at x, and the bound from the tangent plane at x, less its rounding margin."""
    n = A.shape[-1]
    quadratic = 0.5 * (x * (gradient - d)).sum(-1)
    ordered = torch.where(alive, gradient, torch.inf).sort(-1).values
    taken = torch.arange(n, device=A.device) < k.unsqueeze(-1)
    smallest = torch.where(taken, ordered, 0.0).sum(-1)
    # q(x) - gᵀx = -xᵀAx, so the tangent plane's least value over the k-subsets is:
    dual = smallest - quadratic
    sums = _times(A.abs(), x)
    size = (x * sums).sum(-1)
    reach = sums.amax(-1) + d.abs().amax(-1)
    margin = SUM_MARGIN * n * _EPS * (size + k * reach)
    return quadratic + (d * x).sum(-1), dual - margin


def _times(A: Tensor, x: Tensor) -> Tensor:
    """A x per instance, with sums that do not depend on how many instances there are (a batched product's may)."""
    return (A * x.unsqueeze(-2)).sum(-1)


def _least_eigenvalue(W: Tensor) -> Tensor:
    """The least eigenvalue per instance; on the CPU one by one, by numpy, which wakes no threads for small ones."""
    if W.device.type != "cpu":
        size = W.abs()
        kept = size >= NEGLIGIBLE * size.amax((-2, -1), keepdim=True)  # as `least_eigenvalue` does
        try:
            values: Tensor = torch.linalg.eigvalsh(torch.where(kept, W, 0.0))
        except _NotConverged:  # entries too far apart for LAPACK
            pass
        else:
            return values[..., 0]
    return W.new_tensor([least_eigenvalue(one) for one in W.detach().cpu().numpy()])
