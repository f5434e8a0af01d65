r"""Certified lower bounds for W in factors, from products with vectors alone: O(n d²) each, W is never formed.

W is split into :math:`P - N + \mathrm{Diag}\,\delta` with P and N semidefinite: terms :math:`(A^\top A) \circ
(B^\top B)` are (Schur), and others become differences of two such, by the symmetric part of :math:`4 A^\top C = (A +
C)^\top (A + C) - (A - C)^\top (A - C)`.

* `continuous_bound`: for any z, convexity gives :math:`x^\top P x \ge 2 z^\top P x - z^\top P z`, and for any v > 0
  :math:`x^\top N x \le \sum_i s_i x_i^2` with :math:`s = (|N| v) / v` (the difference is diagonally dominant, scaled by
  v), so that f is at least the k least of :math:`2 P z + \delta - s`, less :math:`z^\top P z`. z comes from projected
  gradients (Nesterov, in the diagonal's scale), v from power steps: stopping early loosens the bound, never breaks it.
* `nonnegative_bound`: where no factor has a negative entry, f is at least the k least node weights.

Rounding: `FactoredWeights.additions` times 2⁻⁵² times the same sums without signs is subtracted. A Lanczos iteration
cannot prove a least eigenvalue, so there is none here. Sources: Schur (1911); Nesterov (1983); Collatz (1942) for s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._util.arrays import power_of_two_scale
from ..kernels.solve.columns.source import EPS
from ..problem import FactoredWeights, Problem
from ..problem.factors import Term
from .of_batch import of_batch

#: Most gradient steps, and power steps for v.
STEPS, POWER_STEPS = 200, 12
#: Products of one instance from when time is up to its bound: it should be up so much earlier.
CLOSING = 4
#: Stop when the dual value rises by less than this share of itself in so many steps.
RTOL, PATIENCE = 1e-4, 20
#: The root of one half, rounded upwards.
HALF = math.nextafter(math.sqrt(0.5), 1.0)
#: Multipliers tried at once by the projection, and times that their interval is narrowed: it need not be exact.
TRIED, NARROWED = 16, 12


@of_batch
def factored_bound(problem: Problem, expired: Callable[[], bool] = lambda: False) -> Tensor:
    """The best bound of this file for every instance of a flattened batch, (B,) float64.

    `expired` is asked between products of W with a vector. Once it is true, there are at most `CLOSING` more, and 0 or
    -inf for instances not yet begun.

    Examples
    --------
    >>> W = FactoredWeights.product([[1.0, 2.0, 3.0]], [[1.0, 1.0, 1.0]])
    >>> round(float(factored_bound(Problem.of(W, 2).flatten())), 6)  # the optimum is 9
    9.0
    """
    W = problem.weights.in_form(FactoredWeights, "factored_bound")
    found = [continuous_bound(problem, expired)]
    if not expired():
        found.append(nonnegative_bound(problem))
    if W.is_semidefinite:
        found.append(torch.zeros_like(found[0]))
    return torch.stack(found).amax(0)


def nonnegative_bound(problem: Problem) -> Tensor:
    """The k least node weights, where no factor of an instance has a negative entry; elsewhere -inf."""
    W = problem.weights.in_form(FactoredWeights, "nonnegative_bound")
    least = [factor.amin((-2, -1)) for term in W.terms for factor in term[:4]]
    valid = (torch.stack(least) >= 0).all(0) & all(term.sign > 0 for term in W.terms)
    if not bool(valid.any()):
        return torch.full(valid.shape, -torch.inf, dtype=torch.float64, device=valid.device)
    weights = W.diagonal()
    error = W.additions * EPS * (W.magnitude_rows() if W.nodes is None else weights.abs())
    return torch.where(valid, _least_sum(weights - error, problem.candidates, problem.k, weights.abs()), -torch.inf)


def continuous_bound(problem: Problem, expired: Callable[[], bool] = lambda: False) -> Tensor:
    """The bound of the continuous relaxation, (B,) float64; see the module."""
    W = problem.weights.in_form(FactoredWeights, "continuous_bound")
    parts = [_one(W[b], problem.candidates[b], int(problem.k[b]), expired) for b in range(len(problem.k))]
    return torch.stack(parts)


def _one(W: FactoredWeights, alive: Tensor, k: int, expired: Callable[[], bool]) -> Tensor:
    """The continuous bound of a single instance."""
    if k == 0:
        return torch.zeros((), dtype=torch.float64, device=alive.device)
    if expired():
        return torch.full((), -torch.inf, dtype=torch.float64, device=alive.device)
    P, N, delta, doubt = _split(W if bool(alive.all()) else W.without(~alive))
    linear = delta if N is None else delta - _diagonal_above(N, delta, alive, k, expired)
    z = alive.to(delta) * (k / int(alive.sum()))
    if P is None:
        return _least_sum(linear - doubt, alive, torch.tensor(k, dtype=torch.int64, device=alive.device), linear.abs())
    z = _descend(P, linear, alive, k, z, expired)
    margin, positive = P.additions * EPS, P.positive()
    size = positive.times(z.abs())
    error = 2 * margin * size + doubt
    Pz = P.times(z)
    gradient = 2 * Pz + linear
    least = _least_sum(gradient - error, alive, torch.tensor(k, dtype=torch.int64, device=alive.device), gradient.abs())
    return least - float(z @ Pz) - 2 * margin * float(z.abs() @ size)


class Split(NamedTuple):
    """W = P - N + Diag δ at least, P and N semidefinite and None if there is nothing of them; δ is off by doubt."""

    P: FactoredWeights | None
    N: FactoredWeights | None
    delta: Tensor
    doubt: Tensor


def _split(W: FactoredWeights) -> Split:
    """Split W of a single instance."""
    none = torch.zeros(W.n, dtype=torch.float64, device=W.device)
    if W.is_semidefinite:
        return Split(W, None, none, none)
    parts = [part for term in W.terms for part in _grams(term)]
    P, N = (
        W.of_terms([part._replace(sign=1.0) for part in parts if part.sign == sign]) if found else None
        for sign, found in ((1.0, any(p.sign > 0 for p in parts)), (-1.0, any(p.sign < 0 for p in parts)))
    )
    if W.nodes is None:
        return Split(P, N, none, none)
    own = W.of_terms(W.terms)
    doubt = 2 * W.additions * EPS * (own.positive().diagonal() + W.nodes.abs())
    return Split(P, N, W.nodes - own.diagonal(), doubt)


def _grams(term: Term) -> list[Term]:
    """Terms (AᵀA) ∘ (BᵀB), with signs, whose sum is at most the term's symmetric part, as quadratic forms."""
    if term.is_gram:
        return [term]
    A, C, B, D, sign = term
    if A is C:  # the pair that is not shared comes first
        A, C, B, D = B, D, A, C
    left, right = (_log2_size(x) + _log2_size(y) for x, y in ((A, B), (C, D)))
    if math.isinf(left) or math.isinf(right):
        return []
    # Exact, and both are about as large. Logarithms round: 0.3 lies where no ratio of small whole numbers is a tie.
    balance = 2.0 ** math.floor((right - left) / 2 + 0.3)
    A, C = A * balance, C / balance
    if B is D:
        both, apart = (A + C) / 2, (A - C) / 2
        return [Term(both, both, B, B, sign), Term(apart, apart, B, B, -sign)]
    A, C = A * HALF, C * HALF
    return [Term(A, A, B, B, -1.0), Term(C, C, D, D, -1.0)]


def _log2_size(x: Tensor) -> float:
    """The binary logarithm of the square root of the sum of squares; -inf for zeros."""
    largest = float(x.abs().max())
    return math.log2(largest) + math.log2(float((x / largest).norm())) if largest else -math.inf


def _diagonal_above(N: FactoredWeights, delta: Tensor, alive: Tensor, k: int, expired: Callable[[], bool]) -> Tensor:
    """s with Diag s - N semidefinite on the candidates, the best of some v."""
    size, best, found = N.positive(), -torch.inf, delta
    ones = torch.where(alive, 1.0, 0.0).to(delta)
    own = N.diagonal()
    own = own / power_of_two_scale(own)  # a root of numbers beyond any range, and twice W has another one to round
    for first, steps in ((ones, POWER_STEPS), (own.clamp_min(0).sqrt(), 0)):
        v = first
        for _ in range(steps + 1):
            v = v / torch.where(v.max() > 0, v.max(), 1.0) + 1e-9
            product = size.times(torch.where(alive, v, 0.0))
            s = torch.where(alive, product / v, 0.0) * (1 + 4 * N.additions * EPS)
            value = float(_least_sum(delta - s, alive, torch.tensor(k, dtype=torch.int64, device=s.device), s))
            if value > best:
                best, found = value, s
            if expired():
                return found
            v = product
    return found


def _descend(
    P: FactoredWeights, linear: Tensor, alive: Tensor, k: int, z: Tensor, expired: Callable[[], bool]
) -> Tensor:
    """Where the dual value of min zᵀPz + linearᵀz over 0 ≤ z ≤ 1, 1ᵀz = k is best, as far as the steps came."""
    weights = P.diagonal()
    unit = power_of_two_scale(weights)
    scale = torch.where(alive, (weights / unit).clamp_min(1e-9 * (float(weights.max()) / unit or 1.0)), torch.inf)
    v = scale.rsqrt()
    for _ in range(POWER_STEPS):
        if expired():
            return z
        v = v / v.norm()
        v = P.times(v * scale.rsqrt()) / unit * scale.rsqrt()
    lipschitz = 1.1 * max(float(v.norm()), 1e-300)
    best, at, stale = -torch.inf, z, 0
    y, momentum = z, 1.0
    for _ in range(STEPS):
        Py = P.times(y)
        gradient = 2 * Py + linear
        least = torch.where(alive, gradient, torch.inf).topk(k, largest=False, sorted=False).values
        dual = float(least.sum() - y @ Py)
        stale = 0 if dual > best + RTOL * abs(best) or best == -torch.inf else stale + 1
        if dual > best:
            best, at = dual, y
        if stale > PATIENCE or expired():
            break
        new = _projected(y - gradient / unit / (2 * lipschitz * scale), scale, alive, k)
        if float(gradient @ (new - z)) > 0:  # uphill: momentum starts again
            momentum = 1.0
        faster = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        y, z, momentum = new + (momentum - 1) / faster * (new - z), new, faster
    return at


def _projected(u: Tensor, scale: Tensor, alive: Tensor, k: int) -> Tensor:
    """The nearest point of 0 ≤ z ≤ 1, 1ᵀz = k in the scale, nearly."""
    weight = torch.where(alive, 1 / scale, 0.0)
    high = float(((u.abs() + 1) * torch.where(alive, scale, 0.0)).max())
    low, shares = -high, torch.linspace(0, 1, TRIED, dtype=torch.float64, device=u.device)
    for _ in range(NARROWED):
        tried = low + (high - low) * shares
        sums = (u + tried.unsqueeze(-1) * weight).clamp(0, 1)[:, alive].sum(-1)
        at = min(int((sums < k).sum()), TRIED - 1)
        low, high = float(tried[max(at - 1, 0)]), float(tried[at])
    return torch.where(alive, (u + high * weight).clamp(0, 1), 0.0)


def _least_sum(values: Tensor, alive: Tensor, k: Tensor, sizes: Tensor) -> Tensor:
    """At most the sum of the k least values of candidates; sizes are those of the numbers that the values came from."""
    ordered = torch.where(alive, values, torch.inf).sort(-1)
    taken = torch.arange(values.shape[-1], device=values.device) < k.unsqueeze(-1)
    total = torch.where(taken, ordered.values, 0.0).sum(-1)
    largest = torch.where(taken, (values.abs() + sizes).gather(-1, ordered.indices), 0.0).sum(-1)
    return total - 2 * values.shape[-1] * EPS * largest
