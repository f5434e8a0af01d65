"""The semidefinite relaxations of `grace_opt.bounds.sdp_dual`, solved approximately by cvxpy with Clarabel or SCS.

Use it through ``method="sdp"``, or directly with `grace_opt.bounds.sdp_dual.dual_bound` for one dense instance of up to
about 300 vertices. cvxpy is imported on the first call. Sources: Goulart & Chen, Clarabel (arXiv 2405.12762);
O'Donoghue, Chu, Parikh & Boyd, SCS, J. Optim. Theory Appl. 169 (2016); Ruiz, A scaling algorithm to equilibrate both
rows and columns norms in matrices (2001).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.arrays import power_of_two_scale
from .._util.ctrl_c import kept_ctrl_c
from ..errors import SolverError, UnknownSolverError
from .sdp_dual import SdpMultipliers

Array = npt.NDArray[np.float64]

#: The relaxations, from the weakest to the strongest.
RELAXATIONS = ("shor", "dnn", "rlt")
#: SCS's status after Ctrl-C.
INTERRUPTED = "interrupted"
#: Seconds that SCS takes to set itself up, to its next look at the clock, and what is then made of its answer, for each
#: that building its model took.
AROUND_SCS = 4
#: Row and column scales stay within this factor of the scale of the k-th smallest vertex.
SCALING_RANGE = 1e3


@dataclass(frozen=True)
class SdpSolution:
    """The result of a conic solver for one instance; nothing in it is certified.

    Attributes
    ----------
    value : float
        The solver's objective. Not a bound: it may lie above the optimum. NaN if it was stopped before it had any.
    X : (m, m) array
        The approximate primal solution, or NaN.
    multipliers : SdpMultipliers
    solver, status : str
        The solver's name, and the status it reports.
    iterations : int
    converged : bool
        Whether the solver reports that it reached its tolerance.
    """

    value: float
    X: Array
    multipliers: SdpMultipliers
    solver: str
    status: str
    iterations: int
    converged: bool


def solve_sdp(
    W: Array,
    k: int,
    relaxation: str = "shor",
    *,
    solver: str = "clarabel",
    eps: float | None = None,
    max_iters: int | None = None,
    time_limit: float = math.inf,
    stopped: Callable[[], bool] = lambda: False,
) -> SdpSolution:
    """Solve one relaxation approximately with cvxpy.

    The rows and columns of X are scaled to make the largest entry of every row of the scaled W about 1. First-order
    solvers need this: on attention's W, with a diagonal that spans five decades, SCS makes no progress without it.

    Parameters
    ----------
    W : (m, m) float64 array, symmetric, not all zero
    k : int, 2 <= k <= m - 2
        Outside this range the relaxations have no interior, and the problem is trivial.
    relaxation : {"shor", "dnn", "rlt"}
    solver : {"clarabel", "scs"}
        Clarabel is an interior-point method: accurate, O(m⁶) time and O(m⁴) memory. SCS is a first-order method:
        O(m³) per iteration, O(m²) memory.
    eps : float, optional
        The solver's tolerance; default 1e-8 for Clarabel, 1e-6 for SCS.
    max_iters : int, optional
        Default 200 for Clarabel, 5000 for SCS.
    time_limit : float
        Seconds, checked between iterations, for all that it and the bound take. The first call in a process also
        imports cvxpy, a second or two.
    stopped : callable
        Called once the model is built, and once SCS is set up; if it returns true, the model is not solved. While SCS
        iterates it handles Ctrl-C itself and ends as at a limit, with status ``"interrupted"``.

    Raises
    ------
    UnknownSolverError
        If the conic solver is not installed.
    SolverError
        If it ends without a solution; the message has its status.

    Examples
    --------
    >>> from grace_opt.bounds.sdp_dual import dual_bound
    >>> W = np.array([[2.0, 1, 0, 1], [1, 3, 1, 0], [0, 1, 2, 1], [1, 0, 1, 4]])
    >>> found = solve_sdp(W, 2)
    >>> round(found.value, 4), round(dual_bound(W, 2, found.multipliers), 4)  # the optimum is 4
    (4.0, 4.0)
    """
    if importlib.util.find_spec(solver) is None:
        raise UnknownSolverError(f"solver={solver!r} is not installed: pip install {solver}.")
    began = time.monotonic()
    cp: Any = importlib.import_module("cvxpy")
    m, s, building = len(W), row_scaling(W, k), time.monotonic()
    r, pairs = 1 / s, np.outer(s, s)
    unit = float(np.abs(W / pairs).max())
    X = cp.Variable((m, m), PSD=True)  # of X_ij s_i s_j
    x = cp.diag(X)
    rows = [cp.multiply(r, x) - X @ (r / k) == 0, r @ X @ r == k * k]
    i, j = np.triu_indices(m, 1)
    if relaxation != "shor":
        rows.append(X[i, j] >= 0)
    if relaxation == "rlt":
        x_i, x_j = cp.multiply(s[j] / s[i], x[i]), cp.multiply(s[i] / s[j], x[j])
        rows += [X[i, j] <= x_i, X[i, j] <= x_j, X[i, j] >= x_i + x_j - pairs[i, j]]
    model = cp.Problem(cp.Minimize(cp.sum(cp.multiply(W / pairs / unit, X))), rows)
    status, settings = "", _settings(solver, eps, max_iters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "may be inaccurate": the certified bound is valid anyway
        try:
            data, chain, inverse = model.get_problem_data(solver.upper(), solver_opts=settings)
            if stopped():
                return _nothing(m, solver, "stopped")
            if math.isfinite(time_limit):
                now = time.monotonic()
                around = AROUND_SCS * (now - building) if solver == "scs" else 0.0
                left = max(time_limit - (now - began) - around, 1e-3)
                settings["time_limit" if solver == "clarabel" else "time_limit_secs"] = left
            if solver == "scs":
                raw = _by_scs(data, settings, stopped)
                if raw is None:
                    return _nothing(m, solver, "stopped")
            else:
                raw = chain.solve_via_data(model, data, warm_start=False, verbose=False, solver_opts=settings)
            status = _words(raw)
            model.unpack_results(raw, chain, inverse)
        except (cp.error.SolverError, ValueError) as error:
            if not _cut_short(status):
                raise SolverError(f"{solver} ended without a solution: {status or error}.") from error
    duals = [row.dual_value for row in rows]
    if X.value is None or any(dual is None for dual in duals):
        if not _cut_short(status):
            raise SolverError(f"{solver} ended without a solution: {status}.")
        return _nothing(m, solver, status)  # SCS was stopped within its first steps
    weights = [np.maximum(np.asarray(dual, np.float64), 0.0) * (unit * pairs[i, j]) for dual in duals[2:]]
    both, one, neither = (None if len(weights) <= at else np.zeros((m, m)) for at in (0, 1, 1))
    if both is not None:
        both[i, j] = both[j, i] = weights[0] / 2
    if one is not None and neither is not None:
        one[i, j], one[j, i] = weights[1], weights[2]
        neither[i, j] = neither[j, i] = weights[3] / 2
    multipliers = SdpMultipliers(np.asarray(duals[0]) * (unit * s), float(duals[1]) * unit, both, one, neither)
    primal = np.asarray(X.value, np.float64) / pairs
    count = int(model.solver_stats.num_iters or 0)
    converged = model.status == cp.OPTIMAL
    return SdpSolution(float(model.value) * unit, primal, multipliers, solver, status, count, converged)


def _by_scs(data: Mapping[str, Any], settings: Mapping[str, Any], stopped: Callable[[], bool]) -> Any:
    """What SCS finds, called as cvxpy calls it; None if it is to stop once it has set itself up.

    While it does so it listens to Ctrl-C, too, and forgets that it heard one.
    """
    scs: Any = importlib.import_module("scs")
    cones: Any = importlib.import_module("cvxpy.reductions.solvers.conic_solvers.scs_conif")
    given = {name: data[name] for name in ("A", "b", "c", "P") if name in data}
    with kept_ctrl_c():
        made = scs.SCS(given, cones.dims_to_solver_dict(data["dims"]), verbose=False, **settings)
    return None if stopped() else made.solve()


def _cut_short(status: str) -> bool:
    """Whether this status means a limit or Ctrl-C, rather than a failure."""
    return "reached" in status or status == INTERRUPTED


def _nothing(m: int, solver: str, status: str) -> SdpSolution:
    return SdpSolution(math.nan, np.full((m, m), math.nan), SdpMultipliers.zero(m), solver, status, 0, False)


def row_scaling(W: Array, k: int) -> Array:
    """Positive s, 1 for the k-th smallest, with ``max_j |W_ij| / (s_i s_j)`` about equal for all i (Ruiz, 2001)."""
    A = np.abs(W) / power_of_two_scale(W)
    s = np.ones(len(W))
    for _ in range(10):  # converges like 2^-t
        largest = (A / s / s[:, None]).max(1)  # one after the other: their product may underflow
        s *= np.sqrt(np.where(largest > 0, largest, 1.0))
    filled = np.where(A.max(1) > 0, s, np.median(s[A.max(1) > 0]))  # zero rows have no scale
    middle = np.sort(filled)[k - 1]
    return np.asarray(np.clip(filled / middle, 1 / SCALING_RANGE, SCALING_RANGE))


def memory_needed(m: int, relaxation: str, solver: str) -> float:
    """Bytes that `solve_sdp` needs for m vertices, fitted to measurements up to m = 96 (Clarabel) and 256 (SCS)."""
    entries, pairs = m * (m + 1) / 2, m * (m - 1) / 2
    if solver == "clarabel":
        return 64.0 * entries**2
    return 2048.0 * (2 * entries + {"shor": 0, "dnn": 1, "rlt": 4}[relaxation] * pairs)


def _settings(solver: str, eps: float | None, max_iters: int | None) -> dict[str, Any]:
    if solver == "clarabel":
        tolerance = 1e-8 if eps is None else eps
        settings: dict[str, Any] = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), tolerance)
        # "Insufficient progress" still returns multipliers, and any multipliers give a bound.
        return settings | {"max_iter": max_iters or 200, "accept_unknown": True}
    tolerance = 1e-6 if eps is None else eps
    return {"eps_abs": tolerance, "eps_rel": tolerance, "max_iters": max_iters or 5000}


def _words(raw: Any) -> str:
    """The solver's status, as text."""
    if isinstance(raw, dict):
        return str(raw.get("info", {}).get("status", "unknown"))
    return str(getattr(raw, "status", "unknown"))
