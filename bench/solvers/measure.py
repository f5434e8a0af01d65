"""`measure` solves, times and checks one cell in the process of its method; `grace_opt.sweep.run_sweep` calls it.

Every method is warmed up before its first cell, and ours also on the first instance of each shape, so nothing is
compiled or loaded while the clock runs. A record has one row for each matrix and k of the cell.
"""

from __future__ import annotations

import functools
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bench.solvers.checks import Array, check
from bench.solvers.peers import PEERS
from bench.solvers.sets import load
from grace_opt.sweep import ProcessLostError

Config = dict[str, Any]
Row = dict[str, Any]
WARM_UP_LIMIT = 3.0
#: A peer that the plan gives no limit gets this one.
PEER_LIMIT = 60.0
#: Seconds for a cell without a limit; one that takes longer is ended.
CALL_LIMIT = 1800.0
_SHAPES: set[tuple[int, ...]] = set()


def measure(data: str, config: Config) -> list[Row]:
    """Solve a cell and return its rows.

    Parameters
    ----------
    data : str
        The data folder.
    config : dict
        As `bench.solvers.suites` writes it.
    """
    method, ks = config["method"], config["ks"]
    W = _matrix(data, config["instance"])
    batch = W.ndim == 3
    sizes = [k for k in ks for _ in range(len(W))] if batch else list(ks)
    if batch:
        W = np.concatenate([W] * len(ks))
    request = {"ks": sizes, "batch": batch, **{name: config[name] for name in ("seed", "limit", "repeats", "target")}}
    if method not in PEERS and W.shape not in _SHAPES:
        _SHAPES.add(W.shape)
        answer(method, W, {**request, "limit": min(config["limit"] or WARM_UP_LIMIT, WARM_UP_LIMIT), "repeats": 1})
    reset_peak_memory()
    found = answer(method, W, request)
    common = {name: found.get(name) for name in ("wall", "cpu", "time", "nodes", "memory", "version")}
    ones = found.get("answers") or [found]
    rows = []
    for at, one in enumerate(ones):
        k, matrix = sizes[at], W[at] if batch else W
        case = config["instance"].removesuffix("all") + str(at % (len(W) // len(ks))) if batch else config["instance"]
        checked = one if one["status"] in ("bound", "failed", "refused") else check(matrix, k, one)
        rows.append({"case": case, "k": k, "together": len(ones), **common, **_flat(checked)})
    return rows


def lost(config: Config, error: ProcessLostError) -> list[Row]:
    """Return the row of a cell whose process died or was ended."""
    case = config["instance"]
    return [
        {"case": case, "k": config["ks"][0], "status": "failed", "message": f"{error} (see logs/)", "ended": error.late}
    ]


def patience(config: Config) -> float:
    """Return the seconds after which a cell's process is ended: far beyond its limit, it has no result any more."""
    return CALL_LIMIT if config["limit"] is None else 3 * max(config["limit"], PEER_LIMIT) + 120.0


def warm_up(method: str) -> None:
    """Solve small instances of every kind in the suites: real and integer, definite and not, one and several."""
    rng = np.random.default_rng(0)
    batch = method not in PEERS
    for n in (8, 8, 40):
        G = rng.normal(size=(n, n))
        edges = np.triu(rng.integers(0, 2, (n, n)), 1)
        for W in (G @ G.T, G + G.T, -(edges + edges.T)):
            single = {"ks": [n // 2], "batch": False, "seed": 0, "limit": WARM_UP_LIMIT, "repeats": 1, "target": None}
            if n == 8 or batch:
                answer(method, W, single)
            if batch:
                answer(method, np.stack([W] * 3), {**single, "ks": [n // 2] * 3, "batch": True})


def answer(method: str, W: Array, request: dict[str, Any]) -> dict[str, Any]:
    """Solve one request; a failure is an answer too, and is recorded."""
    solve = _peer if method in PEERS else _bound if method.startswith("bound:") else _ours
    try:
        return {**solve(method, W, request), "memory": peak_memory()}
    except Exception as error:  # a solver that fails is a result of this benchmark, not its end
        traceback.print_exc()
        return {"status": "failed", "message": f"{type(error).__name__}: {error}"}


def reset_peak_memory() -> None:
    """Count the peak from now on, without what was loaded and warmed up before."""
    with suppress(OSError):  # elsewhere than on Linux, the peak of the whole process counts
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the bytes that this process held at its peak.

    ``ru_maxrss`` starts, after fork and exec, from what the parent held; Linux' own account of this program does not.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _peer(name: str, W: Array, request: dict[str, Any]) -> dict[str, Any]:
    """One instance by another project's solver; ``time`` is its search alone, ``wall`` includes building its model."""
    solver, distribution, _ = PEERS[name]
    began, spent = time.perf_counter(), time.process_time()
    found = solver(W, request["ks"][0], request["limit"] or PEER_LIMIT, request["seed"])
    took = {"wall": time.perf_counter() - began, "cpu": time.process_time() - spent}
    return {**took, "version": f"{distribution} {version(distribution)}", **found}


def _ours(name: str, W: Array, request: dict[str, Any]) -> dict[str, Any]:
    """One instance, or a batch in one call, by a method of the registry; ``wall`` is the whole call."""
    import grace_opt

    k = request["ks"] if request["batch"] else request["ks"][0]
    solution: Any = None
    walls: list[float] = []
    options = {} if request["target"] is None else {"target": request["target"]}
    for _ in range(request["repeats"]):
        began = time.perf_counter()
        solution = grace_opt.solve(W, k, name, seed=request["seed"], time_limit=request["limit"], **options)
        walls.append(time.perf_counter() - began)
    solution.verify()
    names = {"OPTIMAL": "proved", "FEASIBLE": "feasible", "LIMIT": "limit"}
    answers = [
        {"status": names[status.name], "indices": [i for i in indices if i >= 0], "claimed": f, "bound": bound}
        for status, indices, f, bound in zip(
            np.atleast_1d(solution.status),
            np.atleast_2d(solution.indices).tolist(),
            np.atleast_1d(solution.objective).tolist(),
            np.atleast_1d(solution.lower_bound).tolist(),
            strict=True,
        )
    ]
    said = {"time": solution.stats.get("time"), "nodes": solution.stats.get("nodes")}
    common = {"wall": statistics.median(walls), **said, "version": f"grace-opt {version('grace-opt')}"}
    return {**common, "answers": answers} if request["batch"] else {**common, **answers[0]}


def _bound(name: str, W: Array, request: dict[str, Any]) -> dict[str, Any]:
    """Lower bounds of a batch: ``bound:certificate,level=tight`` or ``bound:continuous_bound,shift=none``."""
    from grace_opt import bounds
    from grace_opt.problem import Problem

    function, *options = name.removeprefix("bound:").split(",")
    problem = Problem.of(W, request["ks"] if request["batch"] else request["ks"][0]).flatten()
    call: Callable[..., Any] = getattr(bounds, function)
    keywords = dict(option.split("=") for option in options)
    walls: list[float] = []
    values: Any = None
    for _ in range(request["repeats"]):
        began = time.perf_counter()
        values = call(problem, **keywords)
        walls.append(time.perf_counter() - began)
    wall = statistics.median(walls)
    return {"wall": wall, "time": wall, "answers": [{"status": "bound", "bound": float(value)} for value in values]}


def _flat(one: dict[str, Any]) -> Row:
    """An answer as a row has it: numbers and text."""
    kept = {name: one.get(name) for name in ("status", "objective", "bound", "tolerance", "message", "note")}
    if one.get("indices") is not None:
        kept["vertices"] = " ".join(map(str, one["indices"]))
    for penalty in one.get("penalties", []):
        kept |= {f"{what} at penalty {penalty['penalty']:g}": penalty[what] for what in ("wrong size", "best")}
    return kept


@functools.lru_cache(maxsize=1)
def _matrix(data: str, instance: str) -> Array:
    """The matrix that is being worked on; methods take turns on it, each in its process."""
    return load(Path(data), instance)
