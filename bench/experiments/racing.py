"""Solve one instance by one method, ours or a peer, in one thread and warm; and profiles over several such answers.

When: `shootout`. Peers run in a process each, kept for the next instance, as `bench.solvers` runs them; ours run
here, watched by a callback, so that the time at which they reach a target is known. Sources: `bench.solvers.peers`;
Dolan and Moré, Mathematical Programming 91 (2002), for performance profiles.
"""

from __future__ import annotations

import atexit
import functools
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits

import grace_opt
from bench.solvers import measure
from bench.solvers.checks import check
from bench.solvers.peers import PEERS
from grace_opt import registry
from grace_opt.errors import SolverError
from grace_opt.solution import Status
from grace_opt.sweep import ProcessLostError, WarmProcesses

Array = npt.NDArray[Any]
#: Seconds beyond its limit after which a peer is ended.
PATIENCE = 120.0
#: Vertices, and seconds for each instance of the warm-up.
SMALL, WARM_UP = 8, 0.5
#: Peers that stop by themselves and prove nothing.
SAMPLERS = ("dwave_sa", "dwave_tabu")


@dataclass(frozen=True)
class Answer:
    """What a method did with an instance.

    Attributes
    ----------
    status : str
        "proved", "feasible", "limit", "refused" or "failed".
    objective, bound : float
        f recomputed from the vertices, infinite without any; and the lower bound, -inf without one.
    seconds : float
        Ours: the call to `solve`. Peers: their search, without building the model.
    trace : list of (seconds, f)
        When ours was at which objective; at least the end of it.
    """

    status: str
    objective: float
    bound: float
    seconds: float
    trace: list[tuple[float, float]] = field(default_factory=list)

    def reached(self, target: float) -> float:
        """Seconds after which f was at most `target`; infinite if never."""
        return min((seconds for seconds, f in self.trace if f <= target), default=math.inf)

    @property
    def proved(self) -> float:
        """Seconds after which the optimum was proved; infinite if it was not."""
        return self.seconds if self.status == "proved" else math.inf


def solved(method: str, W: Array, k: int, seed: int, limit: float) -> Answer:
    """The answer of any registered method or peer."""
    return _peer(method, W, k, seed, limit) if method in PEERS else _ours(method, W, k, seed, limit)


def family(method: str) -> str:
    """Heuristics of ours; of ours, what proves or bounds; or a peer."""
    if method in PEERS:
        return "peers"
    return "ours, proving" if registry.get(method).exact or method == "sdp" else "ours, heuristics"


def profile(times: Mapping[str, float], taus: Sequence[float]) -> list[dict[str, Any]]:
    """One instance's part of a performance profile: is a method's time within tau times the best?

    The mean over instances is Dolan and Moré's profile. Where no method has a finite time, none is within any tau.

    Examples
    --------
    >>> rows = profile({"a": 1.0, "b": 3.0, "c": float("inf")}, [1, 4])
    >>> [(row["method"], row["tau"], row["within"]) for row in rows if row["within"]]
    [('a', 1, 1), ('a', 4, 1), ('b', 4, 1)]
    """
    best = min(times.values(), default=math.inf)
    return [
        {"method": method, "tau": tau, "within": int(best < math.inf and seconds <= tau * best)}
        for method, seconds in times.items()
        for tau in taus
    ]


def by_time(times: Mapping[str, float], budgets: Sequence[float]) -> list[dict[str, Any]]:
    """Whether each method was there within each number of seconds; the mean is its run-time distribution."""
    return [
        {"method": method, "budget": budget, "within": int(seconds <= budget)}
        for method, seconds in times.items()
        for budget in budgets
    ]


def _ours(method: str, W: Array, k: int, seed: int, limit: float) -> Answer:
    trace: list[tuple[float, float]] = []
    with _one_thread():
        _warm(method, len(W))
        began = time.perf_counter()
        try:
            solution = grace_opt.solve(
                W, k, method, seed=seed, time_limit=limit, callback=lambda p: trace.append((p.time, p.objective))
            )
        except SolverError:  # too large for it
            return Answer("refused", math.inf, -math.inf, math.inf, [(math.inf, math.inf)])
        seconds = time.perf_counter() - began
    solution.verify()
    names = {Status.OPTIMAL: "proved", Status.FEASIBLE: "feasible", Status.LIMIT: "limit"}
    f, bound = float(solution.objective), float(solution.lower_bound)
    return Answer(names[solution.status], f, bound, seconds, [*trace, (seconds, f)])


def _peer(method: str, W: Array, k: int, seed: int, limit: float) -> Answer:
    request = {"ks": [k], "batch": False, "seed": seed, "limit": limit, "repeats": 1, "target": None}
    try:
        found = _processes().call(method, measure.answer, method, W, request, time_limit=limit + PATIENCE)
    except ProcessLostError as error:
        found = {"status": "failed", "message": str(error)}
    answer = check(W, k, found)
    f, bound, seconds = (answer.get(name) for name in ("objective", "bound", "time"))
    f, bound = math.inf if f is None else f, -math.inf if bound is None else bound
    seconds = math.inf if seconds is None else float(seconds)
    return Answer(answer["status"], f, bound, seconds, [(seconds, f)])


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def _warm(method: str, n: int) -> None:
    """Nothing is compiled or loaded on the clock: real and whole, definite and not; some loops depend on the size."""
    sizes = (SMALL, n) if registry.get(method).compiled else (SMALL,)
    rng = np.random.default_rng(0)
    for size in sizes:
        G = rng.normal(size=(size, size))
        for W in (G @ G.T, G + G.T, np.rint(G + G.T).astype(np.int64)):
            with suppress(SolverError):  # it will refuse the instance itself as well
                grace_opt.solve(W, size // 2, method, time_limit=WARM_UP)


@functools.cache
def _processes() -> WarmProcesses:
    """A process for each peer; what they print goes to a file that nobody keeps."""
    logs = tempfile.TemporaryDirectory(prefix="shootout-")
    atexit.register(logs.cleanup)
    processes = WarmProcesses(lambda config: str(config["method"]), warm_up=measure.warm_up, logs=Path(logs.name))
    atexit.register(processes.close)
    return processes
