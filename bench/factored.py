"""W in factors beside W formed: seconds and peak memory by the number of vertices, ``python -m bench.factored``.

W = (QᵀQ) ∘ (KᵀK) with 64 rows each, made from a seed: columns of Q and K have directions in common and lengths that
differ, as keys do. A quarter of the vertices is chosen. Each measurement is a process of its own; its memory is what it
takes at most beyond the factors. W is formed up to 8,192 vertices. Writes docs/results/factored.{json,md,png}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.provenance import require_clean
from bench.report import BLUE, GREEN, ORANGE, Page, add_options, read_results, table, write_results
from grace_opt._util.progress import progress_bar

ROOT = Path(__file__).resolve().parent.parent
#: Numbers of vertices, and the most of which W is formed; rows of a factor; vertices for each one that is chosen.
SIZES, FORMED, ROWS, SHARE = (2048, 4096, 8192, 16384, 32768), 8192, 64, 4
#: What a child prints before its numbers.
MARK = "factored:"
_CHILD = """
import json, resource, sys, time
import numpy as np
import grace_opt
from grace_opt import FactoredWeights, Problem, bounds
n, rows, k, form = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
rng = np.random.default_rng(0)
Q, K = (rng.normal(size=(rows, n)) + 0.25 * rng.normal(size=(rows, 1)) for _ in range(2))
K *= rng.lognormal(sigma=0.5, size=n)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for small in (FactoredWeights.product(Q[:, :64], K[:, :64]), np.eye(256)):  # compiles the loops, and loads libraries
    for method in ("mies", "local_search"):
        grace_opt.solve(small, 16, method, certify=True)
before, found = peak(), {}
def took(name, began, **more):
    found[name] = {"seconds": time.perf_counter() - began, "bytes": max(peak() - before, 0), **more}
began = time.perf_counter()
W = FactoredWeights.product(Q, K) if form == "factored" else (Q.T @ Q) * (K.T @ K)
problem = Problem.of(W, k)
took("making", began)
began = time.perf_counter()
greedy = grace_opt.solve(problem, method="mies")
took("mies", began, f=float(greedy.objective))
began = time.perf_counter()
local = grace_opt.solve(problem, method="local_search", start=greedy.mask, time_limit=LIMIT)
took("local_search", began, f=float(local.objective), status=local.status.name)
began = time.perf_counter()
if form == "factored":
    took("bound", began, f=float(bounds.factored_bound(problem.flatten())))
print("MARK" + json.dumps(found), flush=True)
"""


def measure(n: int, form: str, limit: float) -> dict[str, Any]:
    """Return seconds, bytes and f of each step, from a process of its own."""
    code = _CHILD.replace("MARK", MARK).replace("LIMIT", repr(limit))
    command = [sys.executable, "-c", code, str(n), str(ROWS), str(max(1, n // SHARE)), form]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    line = next((each for each in done.stdout.splitlines() if each.startswith(MARK)), None)
    if done.returncode or line is None:
        raise SystemExit(f"the process of n = {n}, {form}, failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return found


def page(value: dict[str, Any]) -> Page:
    """Return what docs/results/factored.md says of the numbers."""
    runs = value["runs"]
    last = max((run for run in runs if run["form"] == "factored"), key=lambda run: run["n"])
    formed = [run for run in runs if run["form"] == "formed"]
    rows = []
    for run in runs:
        peak = max(step["bytes"] for step in run["steps"].values())
        gain = 1 - run["steps"]["local_search"]["f"] / run["steps"]["mies"]["f"]
        bound, own = run["steps"].get("bound"), run["form"] == "factored"
        ended = "" if run["steps"]["local_search"]["status"] == "FEASIBLE" else " (cut short)"
        rows.append(
            [
                f"{run['n']:,}, {'in factors' if own else 'formed'}",
                f"{run['steps']['making']['seconds']:.2f}",
                f"{run['steps']['mies']['seconds']:.2f}",
                f"{run['steps']['local_search']['seconds']:.2f}{ended}",
                f"{gain:.2%}",
                f"{bound['seconds']:.2f}" if own else "–",
                f"{bound['f'] / run['steps']['local_search']['f']:.3f}" if own else "–",
                f"{peak / 2**20:,.0f}",
                f"{8 * run['n'] ** 2 / 2**20:,.0f}",
            ]
        )
    head = ["vertices", "making", "mies", "local_search from there", "f falls by", "bound", "bound / f"]
    peak = max(step["bytes"] for step in last["steps"].values()) / 2**30
    beside = ""
    if formed:
        most = max(formed, key=lambda run: run["n"])
        same = next(run for run in runs if run["n"] == most["n"] and run["form"] == "factored")
        beside = (
            f" With {most['n']:,} it takes {same['steps']['mies']['seconds']:.2g} s; to form W and then choose, "
            f"{most['steps']['making']['seconds'] + most['steps']['mies']['seconds']:.2g} s."
        )
    return Page(
        title="W in factors, beside W formed",
        picture="Seconds and peak memory by the number of vertices, on logarithmic scales: in factors, and formed",
        draw=lambda figure: _draw(figure, value),
        asked="How long do greedy, exchanges and a bound take on W that is never formed, and in how much memory?",
        found=f"With {last['n']:,} vertices and {ROWS} rows in each factor, `mies` takes "
        f"{last['steps']['mies']['seconds']:.1f} s; all takes at most {peak:.2f} GiB, where W would take "
        f"{8 * last['n'] ** 2 / 2**30:.0f} GiB.{beside}",
        sure="One W of each size, made from a seed, and one run of each.",
        tables=[
            "Seconds. *f falls by*: what `local_search` gains on `mies`; *bound / f*: `factored_bound` beside its f. "
            "Memory is the most that was taken beyond the factors.",
            "",
            *table([*head, "peak, MiB", "W, MiB"], rows),
        ],
    )


def _draw(figure: Any, value: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    looks = (("mies", BLUE), ("local_search", GREEN), ("bound", ORANGE))
    for form, line in (("factored", "-"), ("formed", "--")):
        runs = [run for run in value["runs"] if run["form"] == form]
        sizes = [run["n"] for run in runs]
        for name, colour in looks:
            if not (form == "formed" and name == "bound"):
                seconds = [run["steps"][name]["seconds"] for run in runs]
                label = f"{name}, {'in factors' if form == 'factored' else 'formed'}"
                left.plot(sizes, seconds, "o" + line, color=colour, label=label)
        peaks = [max(1, *(step["bytes"] for step in run["steps"].values())) / 2**20 for run in runs]
        right.plot(sizes, peaks, "o" + line, color=BLUE, label="in factors" if form == "factored" else "formed")
    for axes, what in ((left, "seconds"), (right, "peak memory, MiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("vertices")
        axes.set_ylabel(what)
        axes.legend(fontsize=7)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.factored", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of vertices")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds of local_search (default %(default)g)")
    add_options(parser, "factored")
    args = parser.parse_args(given)
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return
    source = require_clean(args.allow_dirty)
    plan = [(n, form) for n in args.sizes for form in ("factored", "formed") if form == "factored" or n <= FORMED]
    runs = []
    with progress_bar(None, len(plan)) as show:
        show("compiling", 0)
        for form in ("factored", "formed"):  # loops that these sizes need are compiled once, and kept
            measure(min(args.sizes), form, args.limit)
        for done, (n, form) in enumerate(plan):
            show(f"n = {n:,}, {form}", done)
            runs.append({"n": n, "form": form, "steps": measure(n, form, args.limit)})
    print(write_results(args.out, {"provenance": source, "runs": runs}, page, allow_dirty=args.allow_dirty))


if __name__ == "__main__":
    main()
