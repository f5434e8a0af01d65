"""How far from optimal each method's answer is, on generated instances: the smallest experiment, a pattern for others.

A cell is one instance, with all methods: so pairs are always complete. The optimum is proved by `branch_and_bound`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.experiments.registry import Experiment, Settings
from grace_opt import solve
from grace_opt.errors import GraceError, OptionError
from grace_opt.instances import generators
from grace_opt.solution import Status
from grace_opt.sweep import Plot, Table

METHODS = ("think", "mies", "local_search", "tabu")


@dataclass(frozen=True)
class Options:
    """What is solved.

    Attributes
    ----------
    kinds : tuple of str
        Names of `grace_opt.instances.generators`; not those with f(S*) = 0.
    n : int
    instances : int
        Of each kind.
    """

    kinds: tuple[str, ...] = ("attention", "cancellation", "k_cluster", "dispersion")
    n: int = 24
    instances: int = 20


def cells(settings: Settings) -> list[dict[str, Any]]:
    """One for each instance."""
    options: Options = settings.options
    if unknown := [kind for kind in options.kinds if kind not in generators.GENERATORS]:
        raise OptionError(f"--set kinds={unknown[0]}: no such generator; there are {', '.join(generators.GENERATORS)}.")
    return [
        {"kind": kind, "n": options.n, "seed": settings.seed + at}
        for kind in options.kinds
        for at in range(options.instances)
    ]


def run(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Solve one instance by all methods."""
    n, seed = config["n"], config["seed"]
    k = n // 4 * 2  # even, as `cancellation` wants it
    made = generators.GENERATORS[config["kind"]](n, seed=seed, k=k)
    best = solve(made.W, k, "branch_and_bound", seed=seed, time_limit=60.0)
    if best.status is not Status.OPTIMAL:
        raise GraceError(f"the optimum was not proved within 60 s at n = {n}: give a smaller one with --set n=...")
    optimum = float(best.objective)
    if optimum == 0:
        raise GraceError(
            f"f(S*) = 0 for {config}: nothing to relate an excess to; leave the kind out of --set kinds=..."
        )
    found = {method: float(solve(made.W, k, method, seed=seed).objective) for method in METHODS}
    return [
        {"method": method, "k": k, "f": f, "optimum": optimum, "excess": 100 * (f - optimum) / abs(optimum)}
        for method, f in found.items()
    ]


def views(settings: Settings) -> list[Table | Plot]:
    """A table by kind, and a plot."""
    return [
        Table(
            "Excess over the optimum (%)",
            metrics=["excess"],
            rows=["kind", "n"],
            by="method",
            baseline="think",
            pair=["seed"],
            note="Excess: (f(S) - f(S*)) / |f(S*)|, where S* is optimal.",
        ),
        Plot("box", "Excess over the optimum", x="method", y="excess", facet="kind", labels={"excess": "excess (%)"}),
    ]


EXPERIMENT = Experiment(
    name="solver_quality",
    title="How far from optimal the methods are",
    paper="",
    about="How far from the optimum are the answers of each method? All methods solve the same generated instances, "
    "small enough for branch and bound to prove the optimum. The difference from THINK is paired by instance.",
    sizes={"smoke": Options(n=12, instances=2), "pocket": Options(), "full": Options(n=32, instances=100)},
    cells=cells,
    run=run,
    views=views,
)
