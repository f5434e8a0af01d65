"""Other people's solvers on our problem, one thread each: exact ones, in their free editions, and dwave-samplers.

Each function takes ``(W, k, limit, seed)`` and returns a dict: ``status`` ("proved", "limit", "refused" or "failed"),
``indices``, ``claimed`` (the objective it states), ``bound``, ``time`` (its own search, without building the model),
``nodes``, ``message``. W is multiplied by a power of two (`in_scale`), because their absolute tolerances suppose
objectives of ordinary size, and "proved" means the same as ours: f - bound at most 1e-9 max(|f|, trace W), or less
than one step for integer W. ``pip install ".[peers]"``; ortools and highspy cannot share a process. CPLEX, COPT and
Xpress are in `bench.solvers.editions`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.solvers import editions
from bench.solvers.editions import Edition, OverLimitError

Array = npt.NDArray[Any]
Answer = dict[str, Any]
Peer = Callable[[Array, int, float, int], Answer]


#: What a free edition takes; a larger program is refused.
FREE_LIMITS = {
    "gurobi": "200 variables, if the objective is quadratic",
    "cplex": "1,000 variables",
    "copt": "2,000 variables",
    "xpress": "200 rows and columns together, if the objective is quadratic: 199 variables here",
}
#: Solvers state bounds beyond this where they have none.
INFINITE = 1e19


def in_scale(W: Array, k: int) -> tuple[Array, float]:
    """W in float64 times a power of two that brings the k smallest ``|W_ii|`` to a sum of about 1000; and that power.

    Integer W stays as it is.
    """
    W = W.astype(np.float64)
    if (np.rint(W) == W).all():
        return W, 1.0
    usual = float(np.sort(np.abs(np.diag(W)))[:k].sum())
    scale = 2.0 ** round(math.log2(1000.0 / usual)) if usual > 0 else 1.0
    return W * scale, scale


def absolute_gap(W: Array, k: int) -> float:
    """The difference between f and bound that counts as proof."""
    return 1 - 1e-6 if (np.rint(W) == W).all() else 1e-9 * max(abs(float(np.trace(W))), 1e-300)


def gurobi(W: Array, k: int, limit: float, seed: int) -> Answer:
    """The binary quadratic program as it stands."""
    import gurobipy as gp

    A, scale = in_scale(W, k)
    try:
        with gp.Env(params={"OutputFlag": 0}) as env, gp.Model(env=env) as model:
            settings = {"Threads": 1, "TimeLimit": limit, "NonConvex": 2, "MIPGap": 1e-9, "Seed": seed}
            for name, value in {**settings, "MIPGapAbs": absolute_gap(A, k)}.items():
                model.setParam(name, value)
            x = model.addMVar(len(A), vtype="B")
            model.addConstr(x.sum() == k)
            model.setObjective(x @ A @ x)
            model.optimize()
            found = {"time": model.Runtime, "nodes": int(model.NodeCount), "bound": model.ObjBound / scale}
            return _answer(model.Status == gp.GRB.OPTIMAL, found, np.asarray(x.X) if model.SolCount else None, A, scale)
    except gp.GurobiError as error:
        refused = "size-limited" in str(error) or "too large" in str(error).lower()
        return {"status": "refused" if refused else "failed", "message": str(error)}


def scip(W: Array, k: int, limit: float, seed: int) -> Answer:
    """The quadratic objective as a constraint on an epigraph variable, because SCIP's objectives are linear."""
    from pyscipopt import Model, quicksum

    A, scale = in_scale(W, k)
    n, model = len(A), Model()
    model.hideOutput()
    x = [model.addVar(vtype="B") for _ in range(n)]
    z = model.addVar(lb=None, ub=None)
    # x² = x for binaries: the diagonal is linear.
    edges = (2 * A[i, j] * x[i] * x[j] for i in range(n) for j in range(i + 1, n) if A[i, j])
    model.addCons(z >= quicksum(A[i, i] * x[i] for i in range(n)) + quicksum(edges))
    model.addCons(quicksum(x) == k)
    model.setObjective(z, "minimize")
    settings = {"limits/time": limit, "limits/gap": 1e-9, "limits/absgap": absolute_gap(A, k)}
    for name, value in {**settings, "parallel/maxnthreads": 1, "randomization/randomseedshift": seed}.items():
        model.setParam(name, value)
    model.optimize()
    found = {
        "time": model.getSolvingTime(),
        "nodes": int(model.getNTotalNodes()),
        "bound": model.getDualbound() / scale if model.getDualbound() > -INFINITE else None,
    }
    values = np.array([model.getVal(v) for v in x]) if model.getNSols() else None
    return _answer(model.getStatus() in ("optimal", "gaplimit"), found, values, A, scale)


def cpsat(W: Array, k: int, limit: float, seed: int) -> Answer:
    """Products as Booleans; W scaled to integers so large that rounding it costs less than the tolerance."""
    from ortools.sat.python import cp_model

    A = W.astype(np.float64)
    integer = bool((np.rint(A) == A).all())
    scale = 1.0 if integer else 2.0 ** math.floor(50 - math.log2(float(np.abs(A).sum())))
    C = np.rint(A * scale).astype(np.int64)
    model, n = cp_model.CpModel(), len(A)
    x = [model.new_bool_var(f"x{i}") for i in range(n)]
    model.add(sum(x) == k)
    terms, weights = list(x), [int(C[i, i]) for i in range(n)]
    for i, j in _edges(A):
        y = model.new_bool_var(f"y{i},{j}")
        if C[i, j] < 0:
            model.add_implication(y, x[i])
            model.add_implication(y, x[j])
        else:
            model.add_bool_or(y, x[i].negated(), x[j].negated())
        terms.append(y)
        weights.append(2 * int(C[i, j]))
    model.minimize(cp_model.LinearExpr.weighted_sum(terms, weights))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.max_time_in_seconds = 1, limit
    solver.parameters.random_seed, solver.parameters.relative_gap_limit = seed, 0.0
    solver.parameters.absolute_gap_limit = absolute_gap(A, k) * scale
    status = solver.solve(model)
    known = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    if not known and status != cp_model.UNKNOWN:
        return {"status": "failed", "message": solver.status_name(status)}
    # What rounding W to integers can have cost is taken off the bound.
    rounding = 0.0 if integer else 0.5 * k * k / scale
    found = {
        "time": solver.wall_time,
        "nodes": solver.num_branches,
        "bound": solver.best_objective_bound / scale - rounding,
    }
    values = np.array([solver.value(v) for v in x], float) if known else None
    return _answer(status == cp_model.OPTIMAL, found, values, A, 1.0)


def highs(W: Array, k: int, limit: float, seed: int) -> Answer:
    """The linearised (McCormick) program: HiGHS takes no quadratic objective with binaries."""
    import highspy

    A, scale = in_scale(W, k)
    n, edges = len(A), _edges(A)
    m, inf = len(edges), highspy.kHighsInf
    cost = np.concatenate([np.diag(A), [2 * A[i, j] for i, j in edges]])
    rows: list[tuple[list[int], list[float], float, float]] = [(list(range(n)), [1.0] * n, k, k)]
    for e, (i, j) in enumerate(edges):
        if A[i, j] < 0:
            rows += [([n + e, v], [1.0, -1.0], -inf, 0.0) for v in (i, j)]
        else:
            rows.append(([n + e, i, j], [1.0, -1.0, -1.0], -1.0, inf))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = n + m, len(rows)
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(n + m), np.ones(n + m)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * n + [highspy.HighsVarType.kContinuous] * m
    lp.row_lower_ = np.array([row[2] for row in rows], float)
    lp.row_upper_ = np.array([row[3] for row in rows], float)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(row[0]) for row in rows)])
    lp.a_matrix_.index_ = np.concatenate([row[0] for row in rows])
    lp.a_matrix_.value_ = np.concatenate([row[1] for row in rows])
    model = highspy.Highs()
    settings = {"output_flag": False, "threads": 1, "time_limit": float(limit), "random_seed": seed}
    for name, value in {**settings, "mip_rel_gap": 1e-9, "mip_abs_gap": absolute_gap(A, k)}.items():
        model.setOptionValue(name, value)
    model.passModel(lp)
    began = time.perf_counter()
    model.run()
    elapsed, info = time.perf_counter() - began, model.getInfo()
    status = model.getModelStatus()
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit):
        return {"status": "failed", "message": model.modelStatusToString(status), "time": elapsed}
    found = {"time": elapsed, "nodes": int(info.mip_node_count), "bound": info.mip_dual_bound / scale}
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(model.getSolution().col_value[:n]) if feasible else None
    return _answer(status == highspy.HighsModelStatus.kOptimal, found, values, A, scale)


def _edition(solve: Edition) -> Peer:
    """A solver of `editions` as one of `PEERS`."""

    def peer(W: Array, k: int, limit: float, seed: int) -> Answer:
        A, scale = in_scale(W, k)
        try:
            found = solve(A, k, limit, seed, absolute_gap(A, k))
        except OverLimitError as error:
            return {"status": "refused", "message": str(error)}
        bound = None if found.bound is None or abs(found.bound) >= INFINITE else found.bound / scale
        said = {"time": found.time, "nodes": found.nodes, "bound": bound}
        return _answer(found.proved, said, found.x, A, scale)

    return peer


def dwave_sa(W: Array, k: int, limit: float, seed: int) -> Answer:
    """Simulated annealing with its defaults, `READS` samples for every penalty."""
    from dwave.samplers import SimulatedAnnealingSampler

    sampler = SimulatedAnnealingSampler()
    return _sampled(lambda bqm: sampler.sample(bqm, num_reads=READS, seed=seed), W, k)


def dwave_tabu(W: Array, k: int, limit: float, seed: int) -> Answer:
    """Tabu search with its defaults: one sample of 20 ms for every penalty."""
    from dwave.samplers import TabuSampler

    sampler = TabuSampler()
    return _sampled(lambda bqm: sampler.sample(bqm, seed=seed), W, k)


#: Penalties tried, in units of the mean weight that a chosen vertex adds; the best answer over all is taken.
PENALTIES = (1.0, 2.0, 5.0)
#: Samples of simulated annealing for each.
READS = 20


def _sampled(sample: Callable[[Any], Any], W: Array, k: int) -> Answer:
    """The best sample of the right size under (sum x - k)² times a penalty, and how many had a wrong one."""
    import dimod

    A, scale = in_scale(W, k)
    light = np.argsort(np.abs(np.diag(A)), kind="stable")[:k]
    inside = A[np.ix_(light, light)]
    unit = max(float(np.abs(2 * inside.sum(1) - np.diag(inside)).mean()), 1e-12) if k else 1.0
    samples: list[Array] = []
    began = time.perf_counter()
    for factor in PENALTIES:
        penalty = factor * unit
        Q = A + penalty * np.ones_like(A)
        Q[np.diag_indices(len(A))] = np.diag(A) + penalty * (1 - 2 * k)
        upper = np.triu(Q) + np.triu(Q, 1)
        bqm = dimod.BinaryQuadraticModel(upper, "BINARY")
        drawn = sample(bqm)
        samples.append(drawn.record.sample[:, np.argsort(drawn.variables)].astype(bool))
    elapsed = time.perf_counter() - began
    masks = np.concatenate(samples)
    weight = np.where(masks.sum(-1) == k, ((masks @ A) * masks).sum(-1) / scale, np.inf)
    penalties = [
        {"penalty": factor, "wrong size": float(np.isinf(part).mean()), "best": float(part.min())}
        for factor, part in zip(PENALTIES, np.split(weight, len(PENALTIES)), strict=True)
    ]
    extra = {"time": elapsed, "nodes": None, "bound": None, "penalties": penalties}
    if np.isinf(weight).all():
        return {"status": "failed", "message": "not one sample of the right size", **extra}
    return {**_answer(False, extra, masks[int(weight.argmin())], A, scale), "status": "feasible"}


def _edges(A: Array) -> list[tuple[int, int]]:
    """The pairs i < j with an edge."""
    rows, columns = np.nonzero(np.triu(A, 1))
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _answer(proved: bool, found: Answer, values: Array | None, A: Array, scale: float) -> Answer:
    """The common form: vertices from the 0/1 values, and the objective that they have in W's own scale."""
    if values is None:
        return {"status": "limit", "message": "no solution found", **found}
    x = np.asarray(values) > 0.5
    claimed = float(A[np.ix_(x, x)].sum()) / scale
    return {
        "status": "proved" if proved else "limit",
        "indices": np.flatnonzero(x).tolist(),
        "claimed": claimed,
        **found,
    }


#: Name -> (solver, the distribution that it comes from, the module that it needs).
PEERS: dict[str, tuple[Peer, str, str]] = {
    "gurobi": (gurobi, "gurobipy", "gurobipy"),
    "cplex": (_edition(editions.cplex), "cplex", "cplex"),
    "copt": (_edition(editions.copt), "coptpy", "coptpy"),
    "xpress": (_edition(editions.xpress), "xpress", "xpress"),
    "scip": (scip, "pyscipopt", "pyscipopt"),
    "cpsat": (cpsat, "ortools", "ortools"),
    "highs": (highs, "highspy", "highspy"),
    "dwave_sa": (dwave_sa, "dwave-samplers", "dwave.samplers"),
    "dwave_tabu": (dwave_tabu, "dwave-samplers", "dwave.samplers"),
}
