"""Every registered method and other people's solvers on the same instances: gaps, time to a target, time to a proof.

A cell is one instance (for a model: one prompt, with all its heads), solved by all methods, so that comparisons are
always complete. `solver_quality` is the small version of it. A peer that is not installed is left out, and the report
says what brings it. Sources: `bench.solvers` for the peers; Dolan and Moré (2002) for the profiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

import grace_opt
from bench.experiments.problems import Array, Config, Named, from_files, from_heads, generated, make
from bench.experiments.racing import SAMPLERS, Answer, by_time, family, profile, solved
from bench.experiments.registry import Experiment, Settings
from bench.solvers.peers import PEERS
from bench.solvers.suites import missing
from grace_opt import registry
from grace_opt.errors import OptionError
from grace_opt.sweep import Plot, Table

#: Times relative to the fastest method's at which profiles are evaluated, and the first second of run-time ones.
TAUS, FIRST = tuple(float(2**at) for at in range(13)), 1e-3


@dataclass(frozen=True)
class Options:
    """What is solved, and by what.

    Attributes
    ----------
    methods : tuple of str
        Registered methods; empty for all of them.
    peers : tuple of str
        Of `bench.solvers.peers`: gurobi, cplex, copt, xpress, scip, cpsat, highs, dwave_sa, dwave_tabu; empty for none.
    kinds : tuple of str
        Generators; none with an empty list.
    n, count : int
        Their size, and how many instances of each.
    prompts, heads, tokens : int
        Needle prompts for the model, KV heads of each (0: all), and tokens; 0 prompts: no model.
    ratio : float
        Share to prune, for heads and for files that state no k.
    instances : str
        An instance file (.npz, .dat, .txt, .mtx, ...) or a folder of them.
    limit : float
        Seconds for a method on an instance.
    target : float
        Relative excess over the best known f that counts as reached.
    enumerate_up_to : int
        Largest number of sets for which `exhaustive` runs.
    """

    methods: tuple[str, ...] = ()
    peers: tuple[str, ...] = ("gurobi", "scip", "dwave_sa")
    kinds: tuple[str, ...] = ("attention", "cancellation", "planted", "k_cluster")
    n: int = 40
    count: int = 6
    prompts: int = 6
    heads: int = 1
    tokens: int = 512
    ratio: float = 0.6
    instances: str = ""
    limit: float = 0.5
    target: float = 0.01
    enumerate_up_to: int = 200_000


def cells(settings: Settings) -> list[Config]:
    """One for each instance, or prompt."""
    o: Options = settings.options
    ours = list(o.methods) or [spec.name for spec in grace_opt.methods()]
    for method in ours:
        registry.get(method)  # says what there is
    if "mies" not in ours:
        raise OptionError("--set methods=...: leave mies in, it is what the others are compared to.")
    if unknown := [peer for peer in o.peers if peer not in PEERS]:
        raise OptionError(f"--set peers={unknown[0]}: no such peer; there are {', '.join(PEERS)}.")
    configs = generated(o.kinds, o.n, o.count, settings.seed)
    configs += from_heads(settings, o.prompts, o.tokens, o.ratio, o.heads)
    configs += from_files(o.instances, o.ratio) if o.instances else []
    found = [peer for peer in o.peers if missing(peer) is None]
    # Heuristics first: the plots give the first eight a colour each.
    methods = sorted(ours, key=family) + found
    common = {"limit": o.limit, "target": o.target, "enumerate_up_to": o.enumerate_up_to, "methods": methods}
    return [{**config, **common} for config in configs]


def run(config: Config) -> list[dict[str, Any]]:
    """Solve the instances of a config by all methods."""
    rows = []
    for named in make(config):
        small = math.comb(len(named.W), named.k) <= config["enumerate_up_to"]
        racing = [method for method in config["methods"] if small or method != "exhaustive"]
        answers = {method: solved(method, named.W, named.k, config["seed"], config["limit"]) for method in racing}
        rows += compare(named, answers, config["target"], config["limit"])
    return rows


def compare(named: Named, answers: dict[str, Answer], target: float, limit: float) -> list[dict[str, Any]]:
    """Rows of one instance: an answer by each method, and its part of each profile."""
    budgets = np.geomspace(FIRST, max(limit, 10 * FIRST), 13).round(6).tolist()
    W, k = named.W, named.k
    best = min(answer.objective for answer in answers.values())
    proved = any(a.status == "proved" and a.objective <= best + _rounding(W, best) for a in answers.values())
    goal = best + target * abs(best) + _rounding(W, best)
    usual = expected(W, k)
    about = {"instance": named.instance, "unit": named.unit}
    rows: list[dict[str, Any]] = []
    for method, answer in answers.items():
        row = {**about, "method": method, "family": family(method), "vertices": len(W), "size": k}
        row |= {"status": answer.status, "seconds": answer.seconds, "best": best, "best proved": proved}
        if answer.status != "refused":  # by a licence, or as too large: that says nothing of quality
            row["hit"] = int(answer.objective <= goal)
        if answer.objective < math.inf:
            excess = answer.objective - best if answer.objective > best + _rounding(W, best) else 0.0
            row |= {"f": answer.objective, "bound": answer.bound}
            row |= {"excess": 100 * excess / abs(best)} if abs(best) > _rounding(W, best) else {}
            row |= {"share": 100 * excess / (usual - best)} if usual - best > _rounding(W, best) else {}
        rows.append(row)
    watched = {m: a.reached(goal) for m, a in answers.items() if m not in PEERS or m in SAMPLERS}
    proving = {m: a.proved for m, a in answers.items() if m not in SAMPLERS and proves(m)}
    for what, times in (("target", watched), ("proof", proving)):
        for row in [*profile(times, TAUS), *by_time(times, budgets)]:
            column = f"{what} by {'ratio' if 'tau' in row else 'time'}"
            rows.append({**about, "family": family(str(row["method"])), column: row.pop("within"), **row})
    return rows


def proves(method: str) -> bool:
    """Whether the method can prove optima: by search, or because its bound meets f."""
    return method in (*PEERS, "portfolio", "sdp") or registry.get(method).exact


def expected(W: Array, k: int) -> float:
    """f of a random k-set, in the mean.

    Examples
    --------
    >>> expected(np.array([[1.0, 4.0], [4.0, 3.0]]), 1)
    2.0
    """
    n, trace = len(W), float(np.trace(W))
    pairs = (float(W.sum()) - trace) * (k - 1) / (n - 1) if n > 1 else 0.0
    return k / n * (trace + pairs)


def views(settings: Settings) -> list[Table | Plot]:
    """Gaps by kind, and profiles."""
    o: Options = settings.options
    absent = [f"{peer} ({why})" for peer in o.peers if peer in PEERS and (why := missing(peer))]
    left = f" Not run here: {', '.join(absent)}." if absent else ""
    pair: dict[str, Any] = {
        "rows": ["kind"],
        "by": "method",
        "baseline": "mies",
        "pair": ["unit", "instance"],
        "unit": ["unit"],
    }
    reach = f"Target: f at most {100 * o.target:g} % above the best that any method found."
    ours = "For methods that search, the time is when they first reached it. "
    exact = f"At most {o.limit:g} s. Times of other solvers do not include building their models. "
    exact += f"An instance that a solver refuses (licence, size) counts as not proved.{left}"
    labels = {"tau": "time / time of the fastest", "budget": "seconds", "method": ""}
    labels |= {f"{what} by {x}": "share of instances" for what in ("target", "proof") for x in ("ratio", "time")}
    common: dict[str, Any] = {"hue": "method", "log": ["x"], "labels": labels}
    return [
        Table(
            "Excess over the best known (%)",
            metrics=["excess"],
            **pair,
            note=f"(f(S) - best) / |best|, without instances with best = 0 and answers that are not a set of size k. "
            f"At most {o.limit:g} s each.{left}",
        ),
        Table(
            "Excess as a share of a random set's (%)",
            metrics=["share"],
            **pair,
            note="(f(S) - best) / (mean f of all k-sets - best): 0 is the best known, 100 no better than chance. "
            "Instances with best = 0 are included.",
        ),
        Table("Target reached", metrics=["hit"], **pair | {"better": "higher"}, note=reach),
        Table(
            "Seconds",
            metrics=["seconds"],
            **pair,
            note="Our methods: the whole call. Other solvers: their search only.",
        ),
        Plot(
            "line",
            "Performance profile: time to target",
            x="tau",
            y="target by ratio",
            facet="family",
            **common,
            note=f"{reach} {ours}Without other exact solvers: they do not report when they reach it.",
        ),
        Plot(
            "line",
            "Time to target",
            x="budget",
            y="target by time",
            facet="family",
            **common,
            note=f"{reach} {ours}The curve is the share of instances on which that took at most this many seconds.",
        ),
        Plot("line", "Performance profile: time to proof", x="tau", y="proof by ratio", **common, note=exact),
        Plot("line", "Time to proof", x="budget", y="proof by time", **common, note=exact),
    ]


def _rounding(W: Array, f: float) -> float:
    """What float64 leaves open of f, with room to spare."""
    return 1e-12 * max(abs(f), float(np.abs(np.diag(W)).sum()))


EXPERIMENT = Experiment(
    name="shootout",
    title="Solvers side by side",
    paper="",
    about="How good and how fast are all methods on the same instances? Every registered method, and other projects' "
    "solvers if they are installed, solve KV heads of a model, generated instances, and instance files. Each runs in "
    "one thread, compiled and warm before the clock starts; f is recomputed from the vertices. Differences from MIES "
    "are paired by instance; heads of one prompt are one unit.",
    sizes={
        "smoke": Options(peers=(), kinds=("attention", "k_cluster"), n=12, count=1, prompts=0, limit=0.5),
        "pocket": Options(),
        "full": Options(peers=tuple(PEERS), n=80, count=10, prompts=30, heads=0, tokens=1024, limit=60.0),
    },
    cells=cells,
    run=run,
    views=views,
)
