r"""Semidefinite relaxation: a certified bound, usually the tightest of all, and a choice rounded from its solution.

Maths: Shor's relaxation with X1 = kx and diag(X) = x, on the face that these equations leave, where the cone has an
interior; ``relaxation="dnn"`` adds X ≥ 0 and ``"rlt"`` also X_ij ≤ x_i and X_ij ≥ x_i + x_j - 1. The objective that a
first-order solver reports is not a bound. The bound returned is computed from its multipliers in float64, with
rounding margins, and holds whatever they are (`grace_opt.bounds.sdp_dual`). Rounding: the k largest x_i, and Gaussian
samples with mean x and covariance X - xxᵀ, each polished by `local_search`. Complexity: O(m³) per iteration with SCS,
O(m⁶) per instance with Clarabel, for m candidates. Guarantee: the bound. Good for one instance, or a few hundred, of
up to about 300 vertices, if the gap of cheaper bounds is too wide: on attention's W ``"rlt"`` often closes it.
References: Shor (1987); Goemans & Williamson, J. ACM 42 (1995); Rendl & Sotirov, Math. Program. 109 (2007).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grace_opt import objective, registry
from grace_opt._util.arrays import power_of_two_scale
from grace_opt._util.memory import free_memory
from grace_opt.bounds import sdp_dual, sdp_primal
from grace_opt.errors import SolverError
from grace_opt.problem import DenseWeights, Problem
from grace_opt.registry import check_fields, choice, flag, integer, number, register_solver
from grace_opt.run import Run
from grace_opt.solution import SolverResult

#: "auto" uses Clarabel up to this number of candidates: there it is faster, and it is always more accurate.
CLARABEL_MAX_CANDIDATES = 12
#: Times m³: seconds to build the model and make the first steps of SCS; a shorter limit skips both.
SECONDS_TO_START = 4e-8
SOLVERS = ("auto", "clarabel", "scs")


@dataclass(frozen=True)
class SdpOptions:
    """Options of `sdp`.

    Attributes
    ----------
    relaxation : {"rlt", "dnn", "shor"}
        From the tightest to the one with the fewest constraints. The tightest often needs the fewest iterations.
    solver : {"auto", "clarabel", "scs"}
        ``"auto"``: Clarabel for a dozen candidates or fewer, else SCS; the next one if the first fails.
    eps : float or None
        The solver's tolerance; a larger one only makes the bound looser. None: 1e-8 (Clarabel), 1e-6 (SCS).
    max_iters : int or None
        Maximum number of the solver's iterations; None: 200 (Clarabel), 5000 (SCS).
    roundings : int
        Number of random roundings, in addition to the k largest x_i.
    polish : bool
        Improve every rounding by `local_search`.
    max_memory : float or None
        Refuse instances that need more GiB than this; None: more than is free now.
    """

    relaxation: str = "rlt"
    solver: str = "auto"
    eps: float | None = None
    max_iters: int | None = None
    roundings: int = 8
    polish: bool = True
    max_memory: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, choice, "relaxation", allowed=sdp_primal.RELAXATIONS)
        check_fields(self, choice, "solver", allowed=SOLVERS)
        check_fields(self, number, "eps", above=0, below=1, optional=True, hint="a tolerance such as 1e-6")
        check_fields(self, integer, "max_iters", at_least=1, optional=True)
        check_fields(self, integer, "roundings", at_least=0)
        check_fields(self, flag, "polish")
        check_fields(self, number, "max_memory", above=0, optional=True, hint="GiB")


@register_solver(
    "sdp", options=SdpOptions, batched=True, requires=("cvxpy",), guarantee="certified lower bound", compiled=True
)
def sdp(problem: Problem, options: SdpOptions, run: Run) -> SolverResult:
    """Certified bound by semidefinite relaxation (shor, dnn, rlt), rounded and polished."""
    counts = zip(problem.candidates.sum(-1).tolist(), problem.k.tolist(), strict=True)
    sizes = [m for m, k in counts if 1 < k < m - 1]
    if sizes:
        _check_memory(max(sizes), options)
    run = run.beside_search()  # target and patience do not apply to a bound, and polishing takes no time
    run.ctrl_c_stops()  # there is always a choice to return: the k lightest vertices
    found = [_one(problem.instance(b), options, run) for b in range(problem.W.shape[0])]
    masks, bounds, limits, each = zip(*found, strict=True)
    stats: dict[str, Any] = {key: [one[key] for one in each] for key in ("relaxation", "solver", "solver_status")}
    stats["iterations"] = sum(one["iterations"] for one in each)
    lower = torch.tensor(bounds, dtype=torch.float64, device="cpu")
    limit = torch.tensor(limits, dtype=torch.bool, device="cpu")
    return SolverResult(torch.stack(masks), lower, limit, stats, objective_stats=("relaxation",))


def _one(problem: Problem, options: SdpOptions, run: Run) -> tuple[Tensor, float, bool, dict[str, Any]]:
    """One instance: relax the candidates' part of W, certify, round, polish; mask, bound, limit, stats."""
    vertices, k = problem.candidates.nonzero().squeeze(-1), problem.k_max
    part = problem.W[vertices][:, vertices].to("cpu", torch.float64).numpy()
    scale, m = power_of_two_scale(part), len(vertices)
    W = part / scale

    def result(choices: Any, bound: float, stats: dict[str, Any], limit: bool = False) -> tuple[Any, ...]:
        masks = torch.zeros(len(choices), problem.n, dtype=torch.bool, device=problem.W.device)
        masks[:, vertices] = torch.as_tensor(np.asarray(choices), device=problem.W.device)
        best, stopped = _best(problem, masks, options.polish and 1 < k < m - 1, run)
        return best, bound, limit or stopped, stats

    stats: dict[str, Any] = {"relaxation": None, "solver": None, "solver_status": "not needed", "iterations": 0}
    if not (1 < k < m - 1) or not W.any():
        choices, bound = _trivial(part, k)  # without scaling: a large weight must not hide small ones
        return result(choices, bound, stats)
    fallback = np.argsort(np.diag(W), kind="stable")[:k]
    if run.expired() or run.deadline - time.monotonic() < SECONDS_TO_START * m**3:
        return result([_mask(m, fallback)], -math.inf, stats | {"solver_status": "no time left"}, limit=True)
    found = _relaxation_solved(W, k, options, run)
    if found.status == sdp_primal.INTERRUPTED:
        run.interrupt()
    # Without multipliers the bound is k λ_min(W): it may beat that of a solver stopped early.
    bound = max(sdp_dual.dual_bound(W, k, each) for each in (found.multipliers, sdp_dual.SdpMultipliers.zero(m)))
    value = None if math.isnan(found.value) else found.value * scale
    stats = {"relaxation": value, "solver": found.solver, "solver_status": found.status}
    return result(
        _round(found.X, k, options.roundings, run.seed) if np.isfinite(found.X).all() else [_mask(m, fallback)],
        scale * bound,
        stats | {"iterations": found.iterations},
        limit=not found.converged,
    )


def _trivial(W: np.ndarray[Any, Any], k: int) -> tuple[list[np.ndarray[Any, Any]], float]:
    """The optimum if at most m sets have k vertices, or if W is zero; its value is the bound."""
    m = len(W)
    if not W.any() or k in (0, m):
        return [_mask(m, np.arange(k))], float(W.sum()) if k == m and m else 0.0
    if k == 1:
        return [_mask(m, [int(np.diag(W).argmin())])], float(np.diag(W).min())
    # k = m - 1: leaving i out leaves the total less its row, its column, and W_ii counted twice.
    left = W.sum() - 2 * W.sum(1) + np.diag(W)
    margin = sdp_dual.SUM_MARGIN * m * float(np.finfo(np.float64).eps) * float(np.abs(W).sum())
    return [~_mask(m, [int(left.argmin())])], float(left.min()) - margin


def _relaxation_solved(W: np.ndarray[Any, Any], k: int, options: SdpOptions, run: Run) -> sdp_primal.SdpSolution:
    """The first answer with multipliers; SolverError with every solver's status if there is none."""
    failures = []
    for solver in _order(len(W), options):
        try:
            return sdp_primal.solve_sdp(
                W,
                k,
                options.relaxation,
                solver=solver,
                eps=options.eps,
                max_iters=options.max_iters,
                time_limit=max(run.deadline - time.monotonic(), 1e-3),
                stopped=run.expired,
            )
        except SolverError as error:
            failures.append(str(error))
    raise SolverError(
        f"{' '.join(failures)} Try another solver= or a larger eps=, or method='local_search' with certify=True "
        f"(n = {len(W)}, k = {k}, relaxation={options.relaxation!r})."
    )


def _order(m: int, options: SdpOptions) -> tuple[str, ...]:
    if options.solver != "auto":
        return (options.solver,)
    return ("clarabel", "scs") if m <= CLARABEL_MAX_CANDIDATES else ("scs",)


def _round(X: np.ndarray[Any, Any], k: int, count: int, seed: int) -> np.ndarray[Any, Any]:
    """Masks of the k largest of x, and of Gaussian samples with mean x and covariance X - xxᵀ."""
    m, x = len(X), np.diag(X).copy()
    values, vectors = np.linalg.eigh((X + X.T) / 2 - np.outer(x, x))
    noise = np.random.default_rng(seed).standard_normal((count, m)) * np.sqrt(np.maximum(values, 0.0)) @ vectors.T
    scores = np.concatenate([x[None], x + noise])
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.stack([_mask(m, row[:k]) for row in order])


def _best(problem: Problem, masks: Tensor, polish: bool, run: Run) -> tuple[Tensor, bool]:
    """The best of the masks, each polished first, and whether polishing was cut short."""
    stopped = False
    W = problem.W.expand(len(masks), -1, -1)
    if polish:
        k, candidates = problem.k.expand(len(masks)), problem.candidates.expand(len(masks), -1)
        copies = Problem(DenseWeights(W), k, candidates, problem.k_max, problem.backend)
        search = registry.get("local_search")
        polished = search.solve(copies, search.make_options({"start": masks}), run)
        masks, stopped = polished.mask, polished.limit is not None and bool(polished.limit.any())
    return masks[int(objective.evaluate(W, masks).argmin())], stopped


def _mask(m: int, chosen: Any) -> np.ndarray[Any, Any]:
    mask = np.zeros(m, bool)
    mask[chosen] = True
    return mask


def _check_memory(m: int, options: SdpOptions) -> None:
    """Refuse before anything is allocated."""
    solver, gib = _order(m, options)[0], 2.0**30
    needed = sdp_primal.memory_needed(m, options.relaxation, solver) / gib
    allowed = free_memory() / gib if options.max_memory is None else options.max_memory
    if needed <= allowed:
        return
    frugal = sdp_primal.memory_needed(m, options.relaxation, "scs") / gib
    instead = (
        f"solver='scs' needs {frugal:.2g} GiB"
        if solver != "scs" and frugal <= allowed
        else "method='local_search' with certify=True gives a certified gap in O(n²) memory"
    )
    raise SolverError(
        f"sdp with relaxation={options.relaxation!r} on n = {m} candidates needs about {needed:.2g} GiB with {solver}, "
        f"but {'max_memory =' if options.max_memory is not None else 'free memory is'} {allowed:.2g} GiB: {instead}."
    )
