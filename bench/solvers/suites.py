"""The suites: which methods solve which instances, and for how long, in three sizes.

A suite is a function of the data folder and the size. It returns the settings of its cells in order, one case after
another, so that methods take turns. `SUITES` lists the suites in the order in which they run. A suite without its
instances raises FileNotFoundError, which says how to make them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.solvers.checks import spread
from bench.solvers.peers import PEERS
from bench.solvers.sets import CAPTURED, COLLECTIONS, origin, published, shape, target
from grace_opt import bounds

Config = dict[str, Any]
#: Heuristics, in the order of the tables.
HEURISTICS = ("think", "mies", "local_search", "drop_greedy", "beam", "tabu", "annealing", "portfolio")
#: Searches that draw, and stop at a published value.
SEARCHES = ("tabu", "annealing")
#: Exact solvers that take the quadratic program as it stands; and all of them.
QUADRATIC = ("gurobi", "cplex", "copt", "xpress", "scip")
EXACT = (*QUADRATIC, "cpsat", "highs")


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes
    ----------
    heads : int or None
        Captured heads that are proved one by one, and pairs of them at most; None: all. Batches hold all of them.
    synthetic : tuple of (n, count)
        Synthetic attention matrices.
    clusters : tuple of int
        n of the k-cluster instances made by seed.
    proof, peer : float
        Seconds for a proof: ours, theirs.
    sample : int
        Cases of a suite that peers are given; Gurobi gets more of the heads, see `gurobi`.
    gurobi : int or None
        Heads that Gurobi is given.
    beside : int
        Heads that every exact solver is given, on the page of `bench.peers`.
    search : float
        Seconds for a search on public instances.
    seeds : int
        Seeds of the search on public instances.
    repeats : int
        Calls for a batch, of which the median counts.
    dispersion : int
        n of the dispersion instances that samplers are given.
    large : int
        n of the large instances.
    short, long : float
        The two time limits of the large instances.
    """

    heads: int | None
    synthetic: tuple[tuple[int, int], ...]
    clusters: tuple[int, ...]
    proof: float
    peer: float
    sample: int
    gurobi: int | None
    beside: int
    search: float
    seeds: int
    repeats: int
    dispersion: int
    large: int
    short: float
    long: float


SIZES = {
    "smoke": Size(2, ((12, 2),), (12,), 5.0, 5.0, 2, 2, 2, 1.0, 2, 1, 40, 200, 0.5, 1.0),
    "small": Size(None, ((128, 10), (256, 2)), (40, 80, 100), 60.0, 10.0, 4, 30, 10, 5.0, 5, 1, 500, 5000, 10.0, 30.0),
    "full": Size(
        None, ((128, 20), (256, 4)), (40, 80, 100, 120), 600.0, 60.0, 8, None, 10, 10.0, 10, 3, 500, 5000, 10.0, 60.0
    ),
}


@dataclass(frozen=True)
class Case:
    """An instance with its n, every k that it is solved with at once, and what its file holds."""

    instance: str
    n: int
    ks: tuple[int, ...]
    data: str = ""


#: What each method runs on, and its time limit.
Plans = Mapping[str, tuple[Sequence[Case], float | None]]


def heads(data: Path, size: Size) -> list[Config]:
    """Every head of a real model, proved one by one."""
    cases = _captured(data, "heads", size.heads)
    few = spread(cases, size.sample)
    plans = {"branch_and_bound": (cases, size.proof), "gurobi": (spread(cases, size.gurobi), size.peer)}
    return _turns("heads", cases, plans | {name: (few, size.peer) for name in EXACT if name != "gurobi"})


def pairs(data: Path, size: Size) -> list[Config]:
    """Two heads side by side: twice as many vertices, and far harder."""
    cases = _captured(data, "pairs", size.heads)
    return _turns("pairs", cases, _proving(cases, size, QUADRATIC))


def synthetic(data: Path, size: Size) -> list[Config]:
    """Synthetic attention, up to more vertices than the free editions of Gurobi and Xpress take."""
    cases = [
        Case(f"attention:{n}:{seed}", n, (k,))
        for n, count in size.synthetic
        for seed in range(count)
        for k in _usual(n)
    ]
    by_n = [[case for case in cases if case.n == n] for n, _ in size.synthetic]
    few = [case for part in by_n for case in spread(part, size.sample)]
    plans = {"branch_and_bound": (cases, size.proof), **dict.fromkeys(QUADRATIC, (few, size.peer))}
    return _turns("synthetic", cases, plans)


def clusters(data: Path, size: Size) -> list[Config]:
    """Random graphs in the form of Lambert's k-cluster library: any density, any k; found, and proved."""
    cases = [
        Case(f"k_cluster:{n}:{density}:{at}", n, (k,))
        for n in size.clusters
        for density in (0.25, 0.5, 0.75)
        for at, k in enumerate((n // 4, n // 2, 3 * n // 4))
    ]
    small = [case for case in cases if case.n <= 80]
    plans = {"branch_and_bound": (cases, size.proof), **dict.fromkeys(EXACT, (spread(small, size.sample), size.peer))}
    return _turns("clusters", cases, plans | dict.fromkeys((*SEARCHES, "portfolio"), (cases, size.search)))


def kcluster(data: Path, size: Size) -> list[Config]:
    """Lambert's library itself, whose optima are published: found by search, and proved where that is quick."""
    cases = _public(data, "kcluster")
    quick = [case for case in cases if case.n <= 80]
    plans = {"branch_and_bound": (quick, size.proof)}
    return _turns("kcluster", cases, plans | dict.fromkeys((*SEARCHES, "portfolio"), (cases, size.search)))


def mdplib(data: Path, size: Size) -> list[Config]:
    """MDPLIB: search from several seeds, beside the constructions; against the best known values."""
    cases = _public(data, "mdplib")
    names = ("portfolio", "mies", "drop_greedy", "local_search")
    plans = dict.fromkeys((*SEARCHES, *names), (cases, size.search))
    return _turns("mdplib", cases, plans, seeds=dict.fromkeys(SEARCHES, size.seeds))


def heuristics(data: Path, size: Size) -> list[Config]:
    """All heads as one batch, in one call: optimal how often, how fast."""
    cases = [_batch(data)]
    return _turns("heuristics", cases, dict.fromkeys(HEURISTICS, (cases, None)), repeats=size.repeats)


def certificates(data: Path, size: Size) -> list[Config]:
    """Lower bounds without search for all heads as one batch; `sdp` one by one on a sample."""
    cases = [_batch(data)]
    few = _captured(data, "heads", size.sample)
    plans = dict.fromkeys(ladder(), (cases, None))
    return _turns("certificates", [*cases, *few], plans | {"sdp": (few, size.proof)}, repeats=size.repeats)


def samplers(data: Path, size: Size) -> list[Config]:
    """dwave-samplers on synthetic attention and on dispersion: how good, and how often of the wrong size."""
    n, count = size.synthetic[0]
    cases = spread([Case(f"attention:{n}:{seed}", n, (k,)) for seed in range(count) for k in _usual(n)], size.sample)
    m = size.dispersion  # random distances, as MDPLIB's MDG-a has them: n = 500, k = 50
    far = [Case(f"dispersion:{m}:{seed}", m, (m // 10,)) for seed in (0, 1)]
    plans: Plans = dict.fromkeys(("dwave_sa", "dwave_tabu"), ([*cases, *far], None))  # they stop by themselves
    searches: Plans = dict.fromkeys(SEARCHES, (far, size.search))
    return _turns("samplers", [*cases, *far], {**plans, **searches, "portfolio": ([*cases, *far], size.search)})


def large(data: Path, size: Size) -> list[Config]:
    """Two large random instances: the value after a short time beside that after a long one, and the memory."""
    cases = [Case(f"{kind}:{size.large}:0", size.large, (size.large // 10,)) for kind in ("dispersion", "mixed")]
    found: list[Config] = []
    for limit in (size.short, size.long):
        found += _turns("large", cases, dict.fromkeys((*SEARCHES, "portfolio"), (cases, limit)))
    return found


def beside(data: Path, size: Size) -> list[Config]:
    """Real heads and k-cluster instances, each proved by every exact solver: k-cluster, as heads alone flatter all."""
    n = size.clusters[0]
    real = [case for case in _captured(data, "heads", size.beside) if case.ks == (case.n // 2,)]
    cases = [*real, *(Case(f"k_cluster:{n}:{density}:0", n, (n // 2,)) for density in (0.25, 0.5, 0.75))]
    return _turns("beside", cases, dict.fromkeys(("branch_and_bound", *EXACT), (cases, size.peer)))


#: Every suite by name, in the order in which they run.
SUITES: dict[str, Callable[[Path, Size], list[Config]]] = {
    suite.__name__: suite
    for suite in (
        heads,
        pairs,
        synthetic,
        clusters,
        kcluster,
        mdplib,
        heuristics,
        certificates,
        samplers,
        large,
    )
}


#: Suites of another page, `bench.peers`: `bench.solvers all` leaves them out.
OTHERS: dict[str, Callable[[Path, Size], list[Config]]] = {"beside": beside}


#: Which of the sets that have to be fetched a suite needs; all others make their instances from seeds.
FETCHED = {
    "heads": "heads", "heuristics": "heads", "certificates": "heads",
    "pairs": "pairs", "kcluster": "kcluster", "mdplib": "mdplib",
}  # fmt: skip


def ladder() -> list[str]:
    """Every certificate and every bound of a tensor that `grace_opt.bounds` offers, as methods of the measurement."""
    found = [f"bound:certificate,level={level}" for level in bounds.LEVELS]
    of_other_forms = ("factored_bound", "form_bound")
    found += [
        f"bound:{name}" for name in sorted(bounds.__all__) if name.endswith("_bound") and name not in of_other_forms
    ]
    return [*found, "bound:continuous_bound,shift=none", "bound:continuous_bound,shift=uniform"]


def missing(method: str) -> str | None:
    """Why `method` cannot run here, or None."""
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


def _turns(
    suite: str,
    cases: Sequence[Case],
    plans: Plans,
    *,
    seeds: dict[str, int] | None = None,
    repeats: int = 1,
) -> list[Config]:
    """The settings of every cell: case by case, the methods one after another."""
    found: list[Config] = []
    for case in cases:
        for method, (chosen, limit) in plans.items():
            if case not in chosen:
                continue
            for seed in range((seeds or {}).get(method, 1)):
                config = {"suite": suite, "instance": case.instance, "n": case.n, "ks": case.ks, "data": case.data}
                found.append({**config, "method": method, "seed": seed, "limit": limit, "repeats": repeats})
    return [config | _target(config) for config in found]


def _target(config: Config) -> Config:
    """A search that reaches a published value has nothing more to look for: what is measured is the time to it."""
    name, _, file = config["instance"].partition("/")
    if config["method"] not in SEARCHES or name not in COLLECTIONS:
        return {"target": None}
    return {"target": sum(target(name, next(one for one in published(name) if one.file == file)))}


def _proving(cases: Sequence[Case], size: Size, peers: Iterable[str]) -> Plans:
    few = spread(cases, size.sample)
    return {"branch_and_bound": (cases, size.proof), **dict.fromkeys(peers, (few, size.peer))}


def _captured(data: Path, name: str, count: int | None) -> list[Case]:
    """Matrices of a file at k = n/2 and ⌈.6 n⌉."""
    number, n = shape(data, CAPTURED[name])
    digest = origin(data / CAPTURED[name])
    wanted = spread(range(number), count)
    return [Case(f"{CAPTURED[name]}#{at}", n, (k,), digest) for at in wanted for k in _usual(n)]


def _batch(data: Path) -> Case:
    _, n = shape(data, CAPTURED["heads"])
    return Case(f"{CAPTURED['heads']}#all", n, _usual(n), origin(data / CAPTURED["heads"]))


def _usual(n: int) -> tuple[int, ...]:
    return n // 2, math.ceil(0.6 * n)


def _public(data: Path, name: str) -> list[Case]:
    """The files of a collection that are there; `fetch` has checked them, and `bench.solvers.run` does again."""
    found = [
        Case(f"{name}/{one.file}", one.n, (one.k,)) for one in published(name) if (data / name / one.file).is_file()
    ]
    if not found:
        raise FileNotFoundError(f"no file of {COLLECTIONS[name].title} is in {data / name}: {COLLECTIONS[name].page}")
    return found
