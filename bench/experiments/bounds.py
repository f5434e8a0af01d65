"""What the paper's approximation bound says of MIES, beside its true ratio to the optimum and to certificates.

The bound is kappa = mu_max / mu_min times the optimum. It holds for every k-subset (docs/theory/approximation.md), so a
random set is shown beside MIES; where all sets can be visited, the worst one as well. The optimum is proved by
`branch_and_bound`. Source: GRACE (arXiv 2604.16983), the theory section; the families are ours.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.experiments.problems import Array, Config, Named, from_files, from_heads, generated, make
from bench.experiments.registry import Experiment, Settings
from bench.experiments.restricted import restricted_eigenvalues, scaled
from grace_opt import solve
from grace_opt.errors import GraceError, ProblemError
from grace_opt.solution import Status
from grace_opt.sweep import Plot, Table

#: What is drawn against kappa, few enough to tell apart.
SCATTERED = ("kappa", "worst set", "random set", "certified tight", "mies")
#: The weight of the vertices that greedy takes, in the family where it is bad.
WEIGHT = 0.9
#: Studies in the table; the others vary a parameter, and are plotted.
TABLED = ("real", "generated")


@dataclass(frozen=True)
class Options:
    """What is evaluated.

    Attributes
    ----------
    prompts, tokens : int
        Needle prompts for the model, and their length; 0 prompts: no model.
    ratio : float
        Share of channels to prune, for the heads and for files that state no k.
    instances : str
        An instance file, or a folder of them, with positive semidefinite W; empty for none.
    kinds : tuple of str
        Generators of positive semidefinite W.
    n : int
        Their size.
    count : int
        Instances of each kind, correlation, n and k.
    correlations : tuple of float
        Of equicorrelated channels.
    ns : tuple of int
        Sizes at k = n / 2.
    shares : tuple of float
        k / n at the largest of `ns`.
    ridges : tuple of float
        Of the families where greedy is bad: the smaller, the worse.
    ks : tuple of int
        Of the same.
    enumerate_up_to : int
        Supports that are visited for exact restricted eigenvalues; beyond, ranges.
    limit : float
        Seconds for proving one optimum.
    """

    prompts: int = 8
    tokens: int = 512
    ratio: float = 0.6
    instances: str = ""
    kinds: tuple[str, ...] = ("attention", "cancellation")
    n: int = 16
    count: int = 8
    correlations: tuple[float, ...] = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.99)
    ns: tuple[int, ...] = (8, 10, 12, 14, 16)
    shares: tuple[float, ...] = (0.25, 0.375, 0.5, 0.625, 0.75)
    ridges: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001)
    ks: tuple[int, ...] = (2, 4, 6)
    enumerate_up_to: int = 20_000
    limit: float = 60.0


def cells(settings: Settings) -> list[Config]:
    """Studies "real" and "generated", and one for each parameter that is varied."""
    o: Options = settings.options
    real = from_heads(settings, o.prompts, o.tokens, o.ratio) + (
        from_files(o.instances, o.ratio) if o.instances else []
    )
    for config in real:
        if config["kind"] == "file":
            _check(config)
    seeds = [settings.seed + at for at in range(o.count)]
    top = max(o.ns)
    studies = {
        "real": real,
        "generated": generated(o.kinds, o.n, o.count, settings.seed)
        + [{"kind": "ridged", "n": 12, "k": 6, "ridge": 1.0, "seed": seed} for seed in seeds]
        + [{"kind": "low_rank", "n": 12, "k": 6, "correlation": 0.5, "seed": seed} for seed in seeds],
        "correlation": [
            {"kind": "equicorrelated", "n": 12, "k": 6, "correlation": rho, "seed": seed}
            for rho in o.correlations
            for seed in seeds
        ],
        "n": [{"kind": "attention", "n": n, "k": n // 2, "seed": seed} for n in o.ns for seed in seeds],
        "k": [{"kind": "attention", "n": top, "k": round(x * top), "seed": seed} for x in o.shares for seed in seeds],
        "ridge": [{"kind": "simplex", "k": k, "ridge": ridge, "weight": WEIGHT} for k in o.ks for ridge in o.ridges],
    }
    common = {"enumerate_up_to": o.enumerate_up_to, "limit": o.limit}
    return [{**config, "study": study, **common} for study, configs in studies.items() for config in configs]


def run(config: Config) -> list[dict[str, Any]]:
    """All factors for the instances of a config; for the heads and files with protected channels and without."""
    rows = []
    for named in make(config):
        rows += evaluate(named, None, config)
        if config["study"] == "real" and named.protected.any():
            if named.k + int(named.protected.sum()) > len(named.W):
                raise GraceError(
                    f"{named.instance}: k = {named.k} leaves no room for protection; give a smaller ratio."
                )
            rows += evaluate(named, named.protected, config)
    return rows


def evaluate(named: Named, kept: Array | None, config: Config) -> list[dict[str, Any]]:
    """A row for each thing that is said of f: by how much it exceeds, or says that f may exceed, the proved optimum."""
    W, k, name = named.W, named.k, named.instance
    free = np.ones(len(W), dtype=bool) if kept is None else ~kept
    seed = config.get("seed", 0)
    best = solve(W, k, "branch_and_bound", protected=kept, seed=seed, time_limit=config["limit"])
    if best.status is not Status.OPTIMAL:
        raise GraceError(f"{name}: the optimum was not proved in {config['limit']:g} s; give more with --set limit=...")
    optimum = float(best.objective)
    found = restricted_eigenvalues(W, k, free, enumerate_up_to=config["enumerate_up_to"])
    relative = restricted_eigenvalues(scaled(W), k, free, enumerate_up_to=config["enumerate_up_to"])
    mies = {level: solve(W, k, "mies", protected=kept, certify=level) for level in ("fast", "tight")}
    f = float(mies["fast"].objective)
    # In the order in which they are drawn: what they are about comes last, on top.
    factors = {
        "kappa": found.kappa[1],
        "kappa of W/diag": relative.kappa[1],
        **({"worst set": worst(W, k, free, optimum)} if found.exact else {}),
        "random set": ratio(float(solve(W, k, "random", protected=kept, seed=seed).objective), optimum),
        "think": ratio(float(solve(W, k, "think", protected=kept).objective), optimum),
        **{f"certified {level}": ratio(f, float(answer.lower_bound)) for level, answer in mies.items()},
        "mies": ratio(f, optimum),
    }
    facts = {
        "instance": name,
        "unit": named.unit,
        "vertices": len(W),
        "size": k,
        "protection": "on" if kept is not None else "off",
        "rank": int(np.linalg.matrix_rank(W)),
        "exact": found.exact,
        "kappa": found.kappa[1],
        "kappa_low": found.kappa[0],
        "optimum": optimum,
        "f(mies)": f,
        "share": k / len(W),
    }
    # A column for each study, so that each has its plot; an instance may be in several.
    column = "log10" if config["study"] in TABLED else f"by {config['study']}"
    rows = []
    for what, factor in factors.items():
        digits = math.log10(factor)
        row = {**facts, "what": what, "factor": factor, column: digits}
        if what in SCATTERED and max(factor, found.kappa[1]) < math.inf:
            row |= {"log10 kappa": math.log10(found.kappa[1]), "log10 factor": digits}
        rows.append(row)
    return rows


def ratio(f: float, least: float) -> float:
    """f over a bound or an optimum, of a W that is positive semidefinite; infinite where that is zero and f is not."""
    if least > 0:
        return max(f / least, 1.0)
    return 1.0 if f <= 0 else math.inf


def views(settings: Settings) -> list[Table | Plot]:
    """Tables by kind, the bound against the truth, and what it depends on."""
    labels = {"log10": "log10(factor)", "what": "", "share": "k / n", "vertices": "n", "size": "k"}
    labels |= {f"by {study}": "log10(factor over the optimum)" for study in ("correlation", "n", "k", "ridge")}
    note = (
        "Each point is the mean of log10(factor) with its 95 % bootstrap interval; 0 is optimal, 4 is ten thousand "
        "times the optimum."
    )
    return [
        Table(
            "log10 of the factor over the optimum",
            metrics=["log10"],
            rows=["kind", "protection"],
            by="what",
            baseline="mies",
            pair=["unit", "instance"],
            unit=["unit"],
            note="0: optimal; 4: ten thousand times the optimum. mies, think, random set, worst set: f(S) / f(S*). "
            "certified: f(MIES) divided by a lower bound for the instance. kappa: the paper's factor; kappa of W/diag: "
            "the one for THINK, with W scaled to a unit diagonal. Infinite if W is singular on a support of size k.",
        ),
        Plot(
            "scatter",
            "The bound and the truth",
            x="log10 kappa",
            y="log10 factor",
            hue="what",
            facet="kind",
            labels={"what": "", "log10 factor": "log10(factor over the optimum)"},
            note="The paper's bound is the diagonal, with the points of kappa on it. Singular instances are left out.",
        ),
        Plot("line", "Against correlation", x="correlation", y="by correlation", hue="what", labels=labels, note=note),
        Plot("line", "Against n, k = n / 2", x="vertices", y="by n", hue="what", labels=labels, note=note),
        Plot("line", "Against k / n", x="share", y="by k", hue="what", labels=labels, note=note),
        Plot(
            "line",
            "Where greedy is provably bad",
            x="ridge",
            y="by ridge",
            hue="what",
            facet="size",
            log=["x"],
            labels=labels,
            note=f"The family of docs/theory/approximation.md: MIES is at 1 + {WEIGHT:g} / ridge, whatever k, kappa "
            "at 1 + k / ((k - 1) ridge).",
        ),
    ]


def _check(config: Config) -> None:
    """Before anything starts: the bound is about positive semidefinite W."""
    W = np.asarray(make(config)[0].W, dtype=np.float64)
    least, most = np.linalg.eigvalsh(W)[[0, -1]]
    if least < -1e-9 * max(abs(most), 1e-300):
        raise ProblemError(
            f"{config['path']}, matrix {config['matrix']}: the eigenvalue {least:.3g} is negative. The bound supposes "
            "a positive semidefinite W, as attention's is."
        )


def worst(W: Array, k: int, free: Array, optimum: float) -> float:
    """The largest f of all sets, over the optimum."""
    sets = np.array(list(itertools.combinations(np.flatnonzero(free), k)))
    return ratio(float(W[sets[:, :, None], sets[:, None, :]].sum((1, 2)).max()), optimum)


EXPERIMENT = Experiment(
    name="bounds",
    title="What the paper's approximation bound is worth",
    paper="theory section",
    about="How close is the paper's approximation bound to what MIES really reaches? The paper bounds f(MIES) by kappa "
    "times the optimum; kappa is the ratio of the restricted eigenvalues of W on supports of size k. The tables "
    "compare kappa with the true factors of MIES, THINK and random sets, relative to proved optima, and with a "
    "certificate for each instance. Restricted eigenvalues are exact where all supports can be enumerated; otherwise "
    "kappa is the certified upper end of its range.",
    sizes={
        "smoke": Options(
            prompts=1,
            tokens=160,
            n=8,
            count=2,
            correlations=(0.0, 0.9),
            ns=(6, 8),
            shares=(0.5,),
            ridges=(0.1,),
            ks=(2,),
        ),
        "pocket": Options(),
        "full": Options(prompts=30, tokens=1024, count=30, ns=(8, 10, 12, 14, 16, 18), enumerate_up_to=50_000),
    },
    cells=cells,
    run=run,
    views=views,
)
