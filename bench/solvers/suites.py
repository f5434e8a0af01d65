"""The suites: which instances, solved by which methods, how long; and how an instance's name becomes its matrix.

An instance is named by its file below the data folder, ``interaction/W_smollm2_135m.npz#17`` being one matrix of
several and ``#all`` the whole batch, or by its generator, ``random:mdp:5000:0``. `SUITES` maps each suite's name to a
function that looks at the data folder and returns a `Suite`.
"""

from __future__ import annotations

import csv
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.solvers.cells import Cell, spread
from bench.solvers.peers import PEERS
from grace_opt import bounds, instances

Array = npt.NDArray[Any]
#: Peers run on so many cases of a suite, the first suite aside.
SAMPLE = 8
LIMIT = 60.0
MDPLIB = ("MDG-a_1_n500_m50", "MDG-b_1_n500_m50", "GKD-c_1_n500_m50", "SOM-b_8_n200_m80", "SOM-b_20_n500_m200")


@dataclass(frozen=True)
class Case:
    """An instance with its k (for a batch, all its k) and its time limit."""

    instance: str
    ks: tuple[int, ...]
    limit: float | None = LIMIT


@dataclass(frozen=True)
class Plan:
    """What one method does in a suite: its cases, and seeds, limits and repeats where they are not the usual ones."""

    cases: Sequence[Case]
    limits: tuple[float | None, ...] = ()
    seeds: tuple[int, ...] = (0,)
    repeats: int = 1


@dataclass(frozen=True)
class Suite:
    """A suite by its name; `cases` is what a method runs on that it does not plan for."""

    name: str
    cases: Sequence[Case]
    plans: dict[str, Plan]

    def cells(self, methods: Sequence[str] | None = None, cap: float | None = None) -> list[Cell]:
        """The cells in the order of the cases, so that the methods take turns; limits at most `cap`."""
        order = {case: at for at, case in enumerate(self.cases)}
        found: list[tuple[int, Cell]] = []
        for method in self.plans if methods is None else methods:
            plan = self.plans.get(method, Plan(self.cases))
            for case in plan.cases:
                for limit in plan.limits or (case.limit,):
                    capped = limit if cap is None or limit is None else min(limit, cap)
                    for seed in plan.seeds:
                        cell = Cell(self.name, case.instance, case.ks, method, seed, capped, plan.repeats)
                        found.append((order.get(case, len(order)), cell))
        # Two limits that the cap makes one are one cell.
        return list(dict.fromkeys(cell for _, cell in sorted(found, key=lambda pair: pair[0])))


def real64(data: Path) -> Suite:
    """The 90 heads of SmolLM2 at k = n/2 and ⌈.6 n⌉."""
    cases = _stack(data, "interaction/W_smollm2_135m.npz")
    few = Plan(spread(cases, SAMPLE))
    return Suite(
        "real64",
        cases,
        {"branch_and_bound": Plan(cases), "gurobi": Plan(cases), "scip": few, "cpsat": few, "highs": few},
    )


def synthetic128(data: Path) -> Suite:
    """20 anisotropic matrices."""
    return _proving("synthetic128", _stack(data, "interaction/synthetic_n128.npz"))


def pairs128(data: Path) -> Suite:
    """Two heads' channels side by side, 20 times."""
    return _proving("pairs128", _stack(data, "interaction/pairs_smollm2_n128.npz"))


def synthetic256(data: Path) -> Suite:
    """4 anisotropic matrices, more than Gurobi's free licence takes."""
    return _proving("synthetic256", _stack(data, "interaction/synthetic_n256.npz"))


def kcluster(data: Path) -> Suite:
    """k-cluster up to n = 100, to be proved; ten minutes for n = 100."""
    cases = _kcluster(data, lambda n: LIMIT if n <= 80 else 600.0, largest=100)
    small = [case for case, n in _sizes(cases) if n <= 80]
    few = Plan(spread(small, SAMPLE))
    plans = {"branch_and_bound": Plan(cases), "gurobi": few, "scip": few, "cpsat": few, "highs": few}
    return Suite("kcluster", cases, plans)


def kcluster120(data: Path) -> Suite:
    """The largest k-cluster instances, half an hour each: only when asked for."""
    cases = [case for case, n in _sizes(_kcluster(data, lambda n: 1800.0)) if n > 100]
    return Suite("kcluster120", cases, {"branch_and_bound": Plan(cases)})


def kcluster_find(data: Path) -> Suite:
    """All k-cluster instances: is the optimum found within five seconds?"""
    cases = _kcluster(data, lambda n: 5.0)
    return Suite("kcluster_find", cases, {"tabu": Plan(cases), "portfolio": Plan(cases)})


def mdplib(data: Path) -> Suite:
    """Five MDPLIB instances: tabu from ten seeds, ten seconds each, beside the constructions."""
    cases = []
    for name in MDPLIB:
        path = data / "mdplib" / f"{name}.txt"
        if path.is_file():
            cases.append(Case(f"mdplib/{name}.txt", (int(path.open().readline().split()[1]),), 10.0))
    if not cases:
        raise FileNotFoundError(f"no instance of MDPLIB in {data / 'mdplib'}")
    plans = {name: Plan(cases, limits=(LIMIT,)) for name in ("mies", "drop_greedy", "local_search")}
    return Suite("mdplib", cases, {"tabu": Plan(cases, seeds=tuple(range(10))), "portfolio": Plan(cases), **plans})


def heuristics(data: Path) -> Suite:
    """The cases of `real64` as one batch, in one call: optimal how often, how fast."""
    cases = [_batch(data, "interaction/W_smollm2_135m.npz")]
    names = ("think", "mies", "local_search", "drop_greedy", "beam", "tabu", "portfolio")
    return Suite("heuristics", cases, {name: Plan(cases, repeats=3) for name in names})


def samplers(data: Path) -> Suite:
    """dwave-samplers on cases of `synthetic128`: how good, and how often of the wrong size."""
    cases = spread(_stack(data, "interaction/synthetic_n128.npz"), SAMPLE)
    return Suite("samplers", cases, {name: Plan(cases) for name in ("dwave_sa", "dwave_tabu", "portfolio")})


def tight(data: Path) -> Suite:
    """Lower bounds without search for the cases of `real64`, batched; `sdp` one by one on a sample."""
    cases = [_batch(data, "interaction/W_smollm2_135m.npz")]
    plans = {name: Plan(cases, repeats=3) for name in ladder()}
    return Suite("tight", cases, {**plans, "sdp": Plan(spread(_stack(data, "interaction/W_smollm2_135m.npz"), SAMPLE))})


def large(data: Path) -> Suite:
    """Two random instances with n = 5000, k = 500: the value after 10 s beside that after 60 s, and the memory."""
    cases = [Case(f"random:{kind}:5000:0", (500,)) for kind in ("mdp", "mixed")]
    plan = Plan(cases, limits=(10.0, 60.0))
    return Suite("large", cases, {"tabu": plan, "portfolio": plan})


#: Every suite by name, in the order in which they run.
SUITES: dict[str, Callable[[Path], Suite]] = {
    suite.__name__: suite
    for suite in (
        real64,
        synthetic128,
        pairs128,
        synthetic256,
        kcluster,
        kcluster_find,
        mdplib,
        heuristics,
        samplers,
        tight,
        large,
        kcluster120,
    )
}
#: Left out unless named.
OPTIONAL = ("kcluster120",)


def ladder() -> list[str]:
    """Every certificate and every bound that `grace_opt.bounds` offers, as the worker's methods."""
    found = [f"bound:certificate,level={level}" for level in bounds.LEVELS]
    for name, _ in inspect.getmembers(bounds, inspect.isfunction):
        if name.endswith("_bound") and not name.startswith("_"):
            found.append(f"bound:{name}")
    return [*found, "bound:continuous_bound,shift=none", "bound:continuous_bound,shift=uniform"]


def load(data: Path, instance: str) -> Array:
    """The matrix (n, n), or the batch (B, n, n), that a name stands for."""
    if instance.startswith("random:"):
        _, kind, n, seed = instance.split(":")
        return generate(kind, int(n), int(seed))
    name, _, index = instance.partition("#")
    W = instances.read(data / name).W
    return np.asarray(W if index in ("", "all") else W[int(index)])


def generate(kind: str, n: int, seed: int) -> Array:
    """Random instances: "mdp" has W = -d for integer distances d of 1 to 100, "mixed" normal W of both signs."""
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.integers(1, 101, (n, n)).astype(float) if kind == "mdp" else rng.normal(size=(n, n)), 1)
    W = -(upper + upper.T) if kind == "mdp" else upper + upper.T + np.diag(rng.normal(size=n))
    return np.asarray(W)


def optima(data: Path) -> dict[str, dict[str, Any]]:
    """What the collections publish: ``{instance: {"f": …, "tolerance": …}}`` for k-cluster and MDPLIB."""
    known: dict[str, dict[str, Any]] = {}
    for row in _rows(data / "k-cluster" / "optima.csv"):
        known[f"k-cluster/{row['instance']}.dat"] = {
            "f": float(row["min_f_for_W_eq_minus_adjacency"]),
            "tolerance": 0.0,
        }
    for row in _rows(data / "mdplib" / "best_known.csv"):
        stated = row["best_known_sum_over_pairs"]
        # Half a unit of the last decimal stated, twice (f counts each pair twice); or what single precision leaves
        # open: GKD-c_1's 19485.1875 is such a number, and the distances in the file add up to 0.0005 less.
        unit = 10.0 ** -len(stated.partition(".")[2])
        entry = {"f": -2 * float(stated), "tolerance": max(unit, 2.0**-23 * 2 * float(stated))}
        known[f"mdplib/{row['instance']}.txt"] = entry
    return known


def missing(method: str) -> str | None:
    """Why `method` can not run here, or None."""
    import importlib.util

    if method in PEERS:
        _, distribution, module = PEERS[method]
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        return None if found else f'pip install "{distribution}"'
    if method.startswith("bound:"):
        function = method.removeprefix("bound:").partition(",")[0]
        return None if hasattr(bounds, function) else f"grace_opt.bounds has no {function}"
    from grace_opt import registry
    from grace_opt.errors import UnknownSolverError

    try:
        registry.get(method)
    except UnknownSolverError as error:
        return str(error)
    return None


def _proving(name: str, cases: list[Case]) -> Suite:
    few = Plan(spread(cases, SAMPLE))
    return Suite(name, cases, {"branch_and_bound": Plan(cases), "gurobi": few, "scip": few})


def _stack(data: Path, name: str) -> list[Case]:
    """Each matrix of a file at k = n/2 and ⌈.6 n⌉."""
    count, n = _shape(data, name)
    return [Case(f"{name}#{i}", (k,)) for i in range(count) for k in _usual(n)]


def _batch(data: Path, name: str) -> Case:
    return Case(f"{name}#all", _usual(_shape(data, name)[1]), None)


def _usual(n: int) -> tuple[int, ...]:
    return n // 2, math.ceil(0.6 * n)


def _shape(data: Path, name: str) -> tuple[int, int]:
    path = data / name
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    W = instances.read(path).W
    return W.shape[0], W.shape[-1]


def _kcluster(data: Path, limit: Callable[[int], float], largest: int | None = None) -> list[Case]:
    found = []
    for row in _rows(data / "k-cluster" / "optima.csv"):
        n, name = int(row["n"]), f"k-cluster/{row['instance']}.dat"
        if (data / name).is_file() and (largest is None or n <= largest):
            found.append((n, name, Case(name, (int(row["k"]),), limit(n))))
    if not found:
        raise FileNotFoundError(f"no k-cluster instance with its optimum in {data / 'k-cluster'}")
    return [case for _, _, case in sorted(found, key=lambda entry: entry[:2])]


def _sizes(cases: Sequence[Case]) -> list[tuple[Case, int]]:
    """k-cluster cases with the n that their names state."""
    return [(case, size_of(case.instance)) for case in cases]


def size_of(instance: str) -> int:
    """n of ``k-cluster/kcluster40_025_10_1.dat``."""
    return int(Path(instance).name.removeprefix("kcluster").partition("_")[0])


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
