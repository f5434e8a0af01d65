"""CPLEX, COPT and Xpress: the binary quadratic program as it stands, in one thread, in their free editions.

When: `bench.solvers.peers`, which scales W before and its answers after, so that all numbers here are in the scale of
``A``. Each function takes ``(A, k, limit, seed, gap)``, where a difference of `gap` between f and bound is a proof, and
returns a `Found`. A free edition refuses larger programs (`peers.FREE_LIMITS`): that is an `OverLimitError`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class OverLimitError(Exception):
    """The program is larger than the free edition takes; the message is the solver's own."""


@dataclass(frozen=True)
class Found:
    """What a solver says.

    Attributes
    ----------
    proved : bool
        Whether it calls its answer optimal.
    x : ndarray (n,) or None
        The best 0/1 values.
    bound : float or None
    time : float
        Seconds of the search alone.
    nodes : int
    """

    proved: bool
    x: Array | None
    bound: float | None
    time: float
    nodes: int


#: Solve min xᵀAx over 0/1 vectors with k ones.
Edition = Callable[[Array, int, float, int, float], Found]


def cplex(A: Array, k: int, limit: float, seed: int, gap: float) -> Found:
    """IBM's, the Community Edition."""
    import cplex as library

    n = len(A)
    with library.Cplex() as model:
        for quiet in (model.set_log_stream, model.set_results_stream, model.set_warning_stream, model.set_error_stream):
            quiet(None)
        settings = model.parameters
        settings.threads.set(1)
        settings.timelimit.set(limit)
        settings.randomseed.set(seed)
        settings.mip.tolerances.mipgap.set(1e-9)
        settings.mip.tolerances.absmipgap.set(gap)
        model.variables.add(types="B" * n)
        model.linear_constraints.add(lin_expr=[[list(range(n)), [1.0] * n]], senses="E", rhs=[float(k)])
        model.objective.set_quadratic([[list(range(n)), row] for row in (2 * A).tolist()])  # it takes xᵀQx / 2
        began = time.perf_counter()
        try:
            model.solve()
        except library.exceptions.CplexSolverError as error:
            if error.args[2] == library.exceptions.error_codes.CPXERR_RESTRICTED_VERSION:
                raise OverLimitError(str(error.args[0])) from None
            raise
        elapsed, answer = time.perf_counter() - began, model.solution
        proved = answer.get_status() in (answer.status.MIP_optimal, answer.status.optimal_tolerance)
        x = np.array(answer.get_values()) if answer.is_primal_feasible() else None
        nodes = int(answer.progress.get_num_nodes_processed())
        return Found(proved, x, float(answer.MIP.get_best_objective()), elapsed, nodes)


def copt(A: Array, k: int, limit: float, seed: int, gap: float) -> Found:
    """Cardinal's; it takes no seed."""
    import coptpy as library

    model = library.Envr().createModel("")
    settings = {"Logging": 0, "Threads": 1, "TimeLimit": limit, "RelGap": 1e-9, "AbsGap": gap}
    for name, value in settings.items():
        model.setParam(name, value)
    x = model.addMVar(len(A), vtype=library.COPT.BINARY)
    model.addConstr(x.sum() == k)
    model.setObjective(x @ A @ x, library.COPT.MINIMIZE)
    began = time.perf_counter()
    try:
        model.solve()
    except library.CoptError as error:
        if "LICENSE" in error.message:
            raise OverLimitError(error.message) from None
        raise
    elapsed = time.perf_counter() - began
    values = np.array([one.x for one in model.getVars()]) if model.hasmipsol else None
    return Found(model.status == library.COPT.OPTIMAL, values, float(model.bestbnd), elapsed, int(model.nodecnt))


def xpress(A: Array, k: int, limit: float, seed: int, gap: float) -> Found:
    """FICO's, under its Community licence."""
    import xpress as library

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using the Community license", library.LicenseWarning)
        model = library.problem()
    model.setOutputEnabled(False)
    x = model.addVariables(len(A), vartype=library.binary)
    model.addConstraint(library.Sum(x) == k)
    model.setObjective(library.Dot(x, A, x))
    settings = {"threads": 1, "timelimit": limit, "randomseed": seed, "miprelstop": 1e-9, "mipabsstop": gap}
    # By default it drops nodes within 1e-6 of f, and its bound stays that far below.
    for name, value in {**settings, "mipaddcutoff": 0.0, "miprelcutoff": 0.0}.items():
        setattr(model.controls, name, value)
    began = time.perf_counter()
    try:
        _, status = model.optimize()
    except library.SolverError as error:
        if "?120 Error" in str(error):  # that of too many rows and columns
            raise OverLimitError(str(error)) from None
        raise
    elapsed, said = time.perf_counter() - began, model.attributes
    known = status in (library.SolStatus.OPTIMAL, library.SolStatus.FEASIBLE)
    values = np.array(model.getSolution(x), float) if known else None
    return Found(status == library.SolStatus.OPTIMAL, values, float(said.bestbound), elapsed, int(said.nodes))
