"""The process that one method runs in: ``python -m bench.solvers.worker METHOD``, requests and answers as JSON lines.

It takes one thread, warms the method up (so that nothing is compiled or loaded on the clock), says that it is ready,
and then solves what it is sent: ``{"path": W.npy, "ks": […], "batch": …, "seed": …, "limit": …, "repeats": …}``.
Whatever the libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bench.solvers.cells import finite
from bench.solvers.peers import PEERS

#: Every library that might start threads reads one of these before it is imported.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")
WARM_UP_LIMIT = 3.0
#: A peer that the plan gives no limit gets this one.
PEER_LIMIT = 60.0


def peak_memory() -> int:
    """Bytes that this process held at its peak.

    ``ru_maxrss`` starts, after fork and exec, from what the parent held; Linux' own account of this program does not.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def peer(name: str, W: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One instance by another project's solver; ``time`` is its search alone, ``wall`` includes building its model."""
    solver, distribution, _ = PEERS[name]
    began = time.perf_counter()
    answer = solver(W, request["ks"][0], request["limit"] or PEER_LIMIT, request["seed"])
    return {"wall": time.perf_counter() - began, "version": f"{distribution} {version(distribution)}", **answer}


def ours(name: str, W: Any, request: dict[str, Any]) -> dict[str, Any]:
    """One instance, or a batch in one call, by a method of the registry; ``wall`` is the whole call."""
    import grace_opt

    k = request["ks"] if request["batch"] else request["ks"][0]
    solution: Any = None
    walls: list[float] = []
    stop = {"target": request["target"]} if "target" in request else {}
    for _ in range(request["repeats"]):
        began = time.perf_counter()
        solution = grace_opt.solve(W, k, name, seed=request["seed"], time_limit=request["limit"], **stop)
        walls.append(time.perf_counter() - began)
    solution.verify()
    stats = {key: value for key, value in solution.stats.items() if isinstance(value, bool | int | float | str)}
    common = {"wall": statistics.median(walls), "time": stats.get("time"), "stats": stats, "nodes": stats.get("nodes")}
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
    common["version"] = f"grace-opt {version('grace-opt')}"
    return {**common, "status": "batch", "answers": answers} if request["batch"] else {**common, **answers[0]}


def bound(name: str, W: Any, request: dict[str, Any]) -> dict[str, Any]:
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
    return {"status": "bounds", "bounds": values.tolist(), "wall": wall, "time": wall, "nodes": None}


def answer(name: str, W: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Solve one request; what goes wrong is an answer too, and is on record."""
    solve = peer if name in PEERS else bound if name.startswith("bound:") else ours
    try:
        return {**solve(name, W, request), "memory": peak_memory()}
    except Exception as error:  # a solver that fails is a result of this benchmark, not its end
        traceback.print_exc()
        return {"status": "failed", "message": f"{type(error).__name__}: {error}"}


def warm_up(name: str) -> None:
    """Small instances of every kind that the suites have: real and integer, definite and not, one and several."""
    rng = np.random.default_rng(0)
    batch = name not in PEERS
    for n in (8, 8, 40):
        G = rng.normal(size=(n, n))
        edges = np.triu(rng.integers(0, 2, (n, n)), 1)
        for W in (G @ G.T, G + G.T, -(edges + edges.T)):
            single = {"ks": [n // 2], "batch": False, "seed": 0, "limit": WARM_UP_LIMIT, "repeats": 1}
            if n == 8 or batch:
                answer(name, W, single)
            if batch:
                several = {**single, "ks": [n // 2] * 3, "batch": True}
                answer(name, np.stack([W] * 3), several)


def serve(name: str, requests: TextIO, replies: TextIO) -> None:
    """Warm up, then answer until the requests end.

    Kernels may be compiled only from some size on, so ours solve the first instance of each shape once off the clock.
    """
    warm_up(name)
    print(json.dumps({"ready": name}), file=replies, flush=True)
    shapes: set[tuple[int, ...]] = set()
    for line in requests:
        request = json.loads(line)
        W = np.load(request["path"], allow_pickle=False)
        if name not in PEERS and W.shape not in shapes:
            shapes.add(W.shape)
            answer(name, W, {**request, "limit": min(request["limit"] or WARM_UP_LIMIT, WARM_UP_LIMIT), "repeats": 1})
        print(json.dumps(finite(answer(name, W, request))), file=replies, flush=True)


def main() -> None:
    method = sys.argv[1]
    # Libraries print banners from C: give them standard error, and keep the real standard output for the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if method not in PEERS:
        import torch

        torch.set_num_threads(1)
    serve(method, sys.stdin, replies)


if __name__ == "__main__":
    main()
