"""What solvers claim of s W, for s from 1e-100 to 1e100, and what is true: ``python -m bench.scales``.

Every solver that is installed (``pip install ".[peers]"``, and scipy, cvxpy) gets the same instances, two heads of the
model that ships with grace_opt and two k-cluster graphs, multiplied by s and otherwise as they are. Its set is summed
again exactly; a claim is *contradicted* if a set is known that weighs less than its bound, or than the set that it
calls optimal. Each solver runs in a process of its own. Writes docs/results/scales.{json,md,png}.

When: to see why `bench.solvers.peers.in_scale` scales W for all solvers but ours, and whether ours need it.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import GREEN, GREY, ORANGE, RED, Page, parser_of, publish, table
from bench.scales_peers import SCALES_PEERS
from bench.solvers.checks import Array
from bench.solvers.fetch import capture_heads
from bench.solvers.peers import PEERS, as_given
from bench.solvers.report import free_limits
from bench.solvers.suites import missing
from grace_opt import instances, solve
from grace_opt.instances import generators

SCALES = (1.0, 1e-3, 1e-7, 1e-12, 1e-100, 1e100)
#: Seconds for each call; how many solvers run at once; relative error that is no contradiction.
LIMIT, AT_ONCE, RTOL = 3.0, 2, 1e-6
OURS = "grace_opt"
NAMES = {
    OURS: "ours (`branch_and_bound`)", "gurobi": "Gurobi", "cplex": "CPLEX", "copt": "COPT", "xpress": "Xpress",
    "scip": "SCIP", "cpsat": "CP-SAT", "highs": "HiGHS", "milp": "SciPy `milp`", "scs": "SCS (relaxation)",
    "clarabel": "Clarabel (relaxation)",
}  # fmt: skip
#: What came of a call, from the best to the worst, and its colour.
VERDICTS = {"right": GREEN, "open": GREY, "nothing": ORANGE, "contradicted": RED}


def make_instances(folder: Path) -> dict[str, tuple[Array, int]]:
    """W with its largest weight near 1 and k, by name."""
    capture_heads(folder, "pocket", lambda text: None)
    heads = np.asarray(instances.read(folder / "heads.npz").W)
    found = {f"head {at}": (heads[at], 32) for at in (0, len(heads) - 1)}
    found |= {f"k-cluster {seed}": (np.asarray(generators.k_cluster(14, seed, k=5).W, float), 5) for seed in (0, 1)}
    return {name: (np.ldexp(W, -math.frexp(np.abs(W).max())[1]), k) for name, (W, k) in found.items()}


def call(solver: str, W: Array, k: int) -> dict[str, Any]:
    """What a solver says of W: `status`, `indices`, `bound`, as in `bench.solvers.peers`."""
    if solver == OURS:
        sol = solve(W, k, "branch_and_bound", time_limit=LIMIT)
        status = "proved" if sol.status.name == "OPTIMAL" else "limit"
        return {"status": status, "indices": sol.indices.tolist(), "bound": float(sol.lower_bound)}
    peer = SCALES_PEERS[solver] if solver in SCALES_PEERS else PEERS[solver][0]
    try:
        return peer(W, k, LIMIT, 0)
    except Exception as error:  # a solver that refuses W is a result
        return {"status": "failed", "message": f"{type(error).__name__}: {error}"}


def claims(solver: str, folder: Path) -> list[dict[str, Any]]:
    """Rows of one solver: every instance at every scale, and the last time in the scale of `in_scale`."""
    rows = []
    for name, (W, k) in read_instances(folder).items():
        if solver in ("scs", "clarabel") and len(W) > 14:
            continue
        for s in SCALES:
            with as_given():
                rows.append(row_of(call(solver, W * s, k), W, s) | {"instance": name, "s": s, "scaled": False})
        if solver in PEERS:
            s = 1e-12
            rows.append(row_of(call(solver, W * s, k), W, s) | {"instance": name, "s": s, "scaled": True})
    return rows


def row_of(found: dict[str, Any], W: Array, s: float) -> dict[str, Any]:
    """An answer in units of W: the weight of its set, summed exactly, and its bound."""
    chosen, bound = found.get("indices"), found.get("bound")
    f = None if chosen is None else math.fsum(W[np.ix_(chosen, chosen)].ravel().tolist())
    size = None if chosen is None else len(chosen)
    finite = bound is not None and math.isfinite(bound)
    return {"status": found["status"], "f": f, "size": size, "bound": bound / s if finite else None}


def judged(row: dict[str, Any], best: float, k: int) -> str:
    """One of `VERDICTS`, beside the least weight that is known."""
    wrong_size = row["size"] is not None and row["size"] != k
    allowed = RTOL * abs(best)
    if row["bound"] is not None and row["bound"] > best + allowed:
        return "contradicted"
    if row["status"] == "proved" and row["f"] is not None and (wrong_size or row["f"] > best + allowed):
        return "contradicted"
    if row["status"] == "proved":
        return "right"
    return "nothing" if row["status"] in ("failed", "refused") else "open"


def read_instances(folder: Path) -> dict[str, tuple[Array, int]]:
    with np.load(folder / "scales.npz", allow_pickle=False) as file:
        return {name: (file[name], int(file["k"][at])) for at, name in enumerate(n for n in file.files if n != "k")}


def measure() -> dict[str, Any]:
    """All solvers' rows, judged beside the best set that any of them returned at any scale."""
    solvers = [OURS, *(name for name in NAMES if name in {**PEERS, **SCALES_PEERS} and missing_here(name) is None)]
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        made = make_instances(folder)
        np.savez(
            folder / "scales.npz", k=np.array([k for _, k in made.values()]), **{n: W for n, (W, _) in made.items()}
        )
        with ThreadPoolExecutor(AT_ONCE) as pool:
            rows = dict(zip(solvers, pool.map(functools.partial(in_process, folder=folder), solvers), strict=True))
    best = {
        name: min(r["f"] for each in rows.values() for r in each if r["instance"] == name and r["size"] == k)
        for name, (_, k) in made.items()
    }
    for each in rows.values():
        for row in each:
            row |= {
                "verdict": judged(row, best[row["instance"]], made[row["instance"]][1]),
                "best": best[row["instance"]],
            }
    return {
        "rows": rows,
        "instances": {name: {"n": len(W), "k": k, "best": best[name]} for name, (W, k) in made.items()},
        "versions": sorted({of(name) for name in solvers}),
    }


def in_process(solver: str, folder: Path) -> list[dict[str, Any]]:
    """`claims` in a process of the solver's own, since two of them cannot share one."""
    command = [sys.executable, "-m", "bench.scales", "--solver", solver, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{solver}: {done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    print(f"{solver}: {len(found)} calls", file=sys.stderr, flush=True)
    return found


def missing_here(solver: str) -> str | None:
    return missing(solver) if solver in PEERS else None


def of(solver: str) -> str:
    """A solver's distribution and version."""
    own = {OURS: "grace-opt", "milp": "scipy", "scs": "scs", "clarabel": "clarabel"}
    name = own[solver] if solver in own else PEERS[solver][1]
    return f"{name} {version(name)}"


def cell(rows: list[dict[str, Any]]) -> str:
    """Counts of verdicts, and the worst factor by which a set that was called optimal misses the best."""
    if not rows:
        return "–"
    counts = [f"{sum(r['verdict'] == v for r in rows)} {v}" for v in VERDICTS if any(r["verdict"] == v for r in rows)]
    return ", ".join(counts)


def worst(rows: list[dict[str, Any]]) -> str:
    """How far a contradicted claim is off at worst, relative to the best known f."""
    off = [
        max(
            (x - r["best"]) / abs(r["best"])
            for x in (r["bound"], r["f"] if r["status"] == "proved" else None)
            if x is not None
        )
        for r in rows
        if r["verdict"] == "contradicted" and not r["scaled"]
    ]
    return f"{max(off):.3g}" if off else "–"


def at(rows: list[dict[str, Any]], s: float, scaled: bool = False) -> list[dict[str, Any]]:
    return [row for row in rows if row["s"] == s and row["scaled"] == scaled]


def page(value: dict[str, Any]) -> Page:
    """What docs/results/scales.md says of the numbers."""
    rows = value["rows"]
    wrong = [NAMES[name] for name, each in rows.items() if any(r["verdict"] == "contradicted" for r in at(each, 1e-7))]
    ours = rows[OURS]
    scaled = [r for each in rows.values() for r in each if r["scaled"]]
    body = [
        [NAMES[name], *(cell(at(each, s)) for s in SCALES), cell(at(each, 1e-12, True)), worst(each)]
        for name, each in rows.items()
    ]
    return Page(
        title="What solvers claim of tiny and giant weights",
        picture="Share of calls that were right, open, without an answer or contradicted, by solver and scale of W",
        headline=f"Ours is right in {sum(r['verdict'] == 'right' for r in ours)} of {len(ours)} calls; at s = 1e-7, "
        f"known sets contradict {len(wrong)} of {len(rows) - 1} others",
        draw=lambda figure: draw(figure, rows),
        asked="If all weights are multiplied by s, the best set stays the same: do solvers still find it, and is what "
        "they claim to have proved true?",
        found=f"Ours is right in {sum(r['verdict'] == 'right' for r in ours)} of {len(ours)} calls; at s = 1e-7, known "
        f"sets contradict {', '.join(wrong) or 'nobody'}. In the scale that "
        f"`bench.solvers` gives W, {sum(r['verdict'] == 'contradicted' for r in scaled)} of {len(scaled)} answers of "
        "others to 1e-12 W are contradicted.",
        sure="A contradiction needs no trust in ours: the set that shows it is known, and summed exactly. Four "
        f"instances, one seed, {LIMIT:g} seconds each, every solver's tolerances set as tight as on the solvers' page; "
        "it says nothing of weights of ordinary size.",
        tables=table(["solver", *(f"s = {s:g}" for s in SCALES), "s = 1e-12, scaled", "worst claim"], body),
        details=[
            (
                "How it is counted",
                [
                    *(
                        f"- {name}: n = {one['n']}, k = {one['k']}, f = {one['best']:.9g} at s = 1"
                        for name, one in value["instances"].items()
                    ),
                    "",
                    "*Right*: called optimal, and no known set is lighter. *Open*: time ran out, and the bound holds. "
                    "*Nothing*: refused or failed. *Contradicted*: a known set is lighter than the bound, or than the "
                    f"set called optimal, by more than {RTOL:g} of f. *Worst claim*: how far such a bound or set lies "
                    "above the best, in units of f. *Scaled*: W times a number of `bench.solvers.peers.in_scale`. At "
                    "s = 1, the largest weight is from 1/2 to 1. SCS and Clarabel solve Shor's relaxation by cvxpy, "
                    "whose value is taken as the bound that users take it for; heads are too large for that.",
                    "",
                    *free_limits(value["versions"]),
                    f"Versions: {', '.join(value['versions'])}.",
                ],
            )
        ],
    )


def draw(figure: Any, rows: dict[str, list[dict[str, Any]]]) -> None:
    """A square for each solver and scale, shared by what came of its calls."""
    figure.set_size_inches(8, 0.42 * len(rows) + 1.2)
    axes = figure.subplots()
    columns: list[tuple[float, bool]] = [*((s, False) for s in SCALES), (1e-12, True)]
    for y, each in enumerate(rows.values()):
        for x, (s, scaled) in enumerate(columns):
            mine, left = at(each, s, scaled), x - 0.45
            for verdict, colour in VERDICTS.items():
                share = sum(r["verdict"] == verdict for r in mine) / max(len(mine), 1)
                axes.barh(y, 0.9 * share, left=left, height=0.8, color=colour)
                left += 0.9 * share
    axes.set_yticks(range(len(rows)), [NAMES[name].replace("`", "") for name in rows])
    axes.set_xticks(range(len(columns)), [f"{s:g}" + "\nscaled" * scaled for s, scaled in columns])
    axes.set_xlabel("all weights times")
    axes.invert_yaxis()
    axes.grid(visible=False)
    handles = [axes.barh([0], [0], color=colour, label=verdict) for verdict, colour in VERDICTS.items()]
    axes.get_figure().legend(handles=handles, loc="outside lower center", ncols=len(VERDICTS))


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("scales", __doc__)
    parser.add_argument("--solver", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.solver:
        print(json.dumps(claims(args.solver, args.folder)))
        return
    publish(args, page, lambda source: measure())


if __name__ == "__main__":
    main()
