"""Sparse graphs: what a million vertices take, and who finds the densest parts: ``python -m bench.sparse``.

Two measurements on generated graphs. *Size*: seconds and peak memory of making a problem from a scipy.sparse matrix, of
both greedy methods, of the certificate and of a portfolio with a limit, each size in a process of its own. *Densest
k-subgraphs*: graphs of several kinds, k a tenth of the vertices; searches get equal time, beside greedy methods and
peers (`bench.sparse_peers` has both), of which igraph and dwave-samplers run where they are installed (``pip install
".[peers]"``).

Writes docs/results/sparse.{json,md,png}.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from matplotlib.figure import Figure

from bench.report import BLACK, BLUE, GREY, ORANGE, Page, parser_of, publish, table
from bench.sparse_peers import DEGREE, KINDS, LARGEST_PENALTY, PEERS, there, uniform, weight_of
from grace_opt import bounds, solve
from grace_opt._util.progress import progress_bar
from grace_opt.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
#: Vertices and edges of the first measurement, and seconds of its portfolio.
SIZES, LONG = ((10_000, 100_000), (100_000, 1_000_000), (1_000_000, 10_000_000)), 10.0
#: Vertices of the second, and seconds that a search gets.
VERTICES, SECONDS = (1000, 2000, 5000, 10_000), 5.0
#: Steps of the first measurement and their colours.
STEPS = {"problem": GREY, "mies": BLUE, "drop_greedy": ORANGE, "bound": BLACK}
GREEDY, SEARCHES = ("mies", "drop_greedy"), ("local_search", "tabu", "annealing", "portfolio")


def measure_parts(vertices: Sequence[int], limit: float) -> list[dict[str, Any]]:
    """The weight that every method finds in every graph, seconds, and a certified bound."""
    rows, plan = [], [(n, kind) for n in vertices for kind in KINDS]
    with progress_bar(None, len(plan)) as show:
        for done, (n, kind) in enumerate(plan):
            show(f"n = {n:,}, {kind}", done)
            W, k = KINDS[kind](n, np.random.default_rng(0)), n // 10
            problem, found, seconds = Problem.of(W, k), {}, {}
            for name in (*GREEDY, *SEARCHES):
                options: dict[str, Any] = {"time_limit": limit} if name in SEARCHES else {}
                options |= {"start": "drop_greedy"} if name == "local_search" else {}
                began = time.perf_counter()
                solution = solve(problem, method=name, **options)
                found[name], seconds[name] = -float(solution.objective), time.perf_counter() - began
            for name, peer in there(n).items():
                began = time.perf_counter()
                chosen = peer(W, k, limit)
                found[name], seconds[name] = weight_of(W, chosen), time.perf_counter() - began
                if len(set(chosen.tolist())) != k:
                    raise SystemExit(f"{name} chose {len(set(chosen.tolist()))} vertices where k = {k}")
            bound = -float(bounds.certificate(problem.flatten()))
            rows.append(
                {"kind": kind, "n": n, "k": k, "edges": W.nnz // 2, "found": found, "seconds": seconds, "bound": bound}
            )
    return rows


def measure_size(path: Path, limit: float) -> dict[str, Any]:
    """In a process of its own: seconds of each step on the matrix in a file, and the peak of memory after each."""
    W = sp.load_npz(path)
    small = uniform(1000, np.random.default_rng(1))
    for method in (*GREEDY, "portfolio"):  # loads what is compiled
        solve(small, 100, method, time_limit=0.1)
    bounds.certificate(Problem.of(small, 100).flatten())
    result: dict[str, Any] = {"n": W.shape[0], "edges": W.nnz // 2, "seconds": {}, "peak": {"before": _peak()}}
    found: dict[str, Any] = {}
    steps: dict[str, Callable[[], Any]] = {
        "problem": lambda: Problem.of(W, W.shape[0] // 10),
        "mies": lambda: solve(found["problem"], method="mies"),
        "drop_greedy": lambda: solve(found["problem"], method="drop_greedy"),
        "bound": lambda: bounds.certificate(found["problem"].flatten()),
        "portfolio": lambda: solve(found["problem"], method="portfolio", time_limit=limit),
    }
    for name, step in steps.items():
        began = time.perf_counter()
        found[name] = step()
        result["seconds"][name], result["peak"][name] = time.perf_counter() - began, _peak()
    weights = {name: -float(found[name].objective) for name in (*GREEDY, "portfolio")}
    return result | {"found": weights, "bound": -float(found["bound"])}


def _peak() -> int:
    """Most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_sizes(sizes: Sequence[tuple[int, int]], limit: float) -> list[dict[str, Any]]:
    """`measure_size` of uniform graphs."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, progress_bar(None, len(sizes)) as show:
        for done, (n, edges) in enumerate(sizes):
            show(f"n = {n:,}, {edges:,} edges", done)
            path = Path(folder) / "w.npz"
            sp.save_npz(path, uniform(n, np.random.default_rng(0), edges), compressed=False)
            words = [sys.executable, "-m", "bench.sparse", "--size", str(path), "--long", repr(limit)]
            child = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
            if child.returncode:
                raise SystemExit(f"the process of n = {n:,} failed:\n{child.stderr}")
            rows.append(json.loads(child.stdout))
    return rows


def page(value: dict[str, Any]) -> Page:
    """Return the page."""
    sizes, parts, limit = value["sizes"], value["parts"], value["limit"]
    last = sizes[-1]
    best = [max(row["found"].values()) for row in parts]
    names = list(dict.fromkeys(name for row in parts for name in row["found"]))
    behind = {
        name: [1 - row["found"][name] / top for row, top in zip(parts, best, strict=True) if name in row["found"]]
        for name in names
    }
    mean = {name: f"{100 * statistics.fmean(each):.2f} %" for name, each in behind.items()}
    plain = "plain annealing"
    ahead = sum(row["found"]["portfolio"] >= row["found"][plain] for row in parts)
    absent = [name for name in PEERS if name not in names]
    gaps = [row["bound"] / top - 1 for row, top in zip(parts, best, strict=True)]
    return Page(
        title="Sparse graphs",
        picture="Left, seconds of each step by the number of edges, on logarithmic scales; right, how far each method "
        "stays behind the heaviest part found, in percent, for every graph",
        headline=f"In {limit:g} s, portfolio stays {mean['portfolio']} behind the heaviest part found on the mean, "
        f"plain annealing {mean[plain]}",
        draw=lambda figure: _draw(figure, value, behind),
        asked=f"What does W of a million vertices take, and who finds the densest tenth of a graph in {limit:g} s?",
        found=f"With {last['n']:,} vertices and {last['edges']:,} edges, `mies` takes {last['seconds']['mies']:.1f} s "
        f"and `drop_greedy` {last['seconds']['drop_greedy']:.1f} s after {last['seconds']['problem']:.1f} s for the "
        f"problem, in {last['peak']['drop_greedy'] / 2**30:.2f} GiB, Python and the matrix as given included; "
        f"`portfolio` keeps a limit of {value['long']:g} s in {last['seconds']['portfolio']:.1f} s. In {len(parts)} "
        f"smaller graphs, `portfolio` stays {mean['portfolio']} behind the best on the mean, `annealing` "
        f"{mean['annealing']}, `tabu` {mean['tabu']}, plain annealing {mean[plain]}, a k-core peel "
        f"{mean['k-core peel (networkx)']}; `portfolio` is at least as good as plain annealing in {ahead} of "
        f"{len(parts)}.",
        sure="Generated graphs with random weights, one of each kind and size, and one run of each method; optima are "
        f"not known. The certified bound is {100 * min(gaps):.1f} % to {100 * max(gaps):.0f} % above the best found: "
        "tight where a part of the graph is densest, loose on uniform graphs."
        + (f" Not installed here, so not run: {', '.join(absent)}." if absent else ""),
        tables=[
            *table(
                ["vertices", "edges", *(f"{name}, s" for name in (*STEPS, "portfolio")), "greedy, GiB", "all, GiB"],
                [
                    [
                        f"{row['n']:,}",
                        f"{row['edges']:,}",
                        *(f"{row['seconds'][name]:.2f}" for name in (*STEPS, "portfolio")),
                        f"{row['peak']['drop_greedy'] / 2**30:.2f}",
                        f"{max(row['peak'].values()) / 2**30:.2f}",
                    ]
                    for row in sizes
                ],
            ),
            "",
            "How far behind the heaviest part found, and how far above it the certified bound is:",
            "",
            *table(
                ["graph", "vertices", "heaviest", *names, "bound"],
                [
                    [
                        row["kind"],
                        f"{row['n']:,}",
                        f"{top:.2f}",
                        *(f"{100 * (1 - row['found'][n] / top):.2f} %" if n in row["found"] else "–" for n in names),
                        f"{100 * (row['bound'] / top - 1):+.1f} %",
                    ]
                    for row, top in zip(parts, best, strict=True)
                ],
            ),
            "",
            "Seconds:",
            "",
            *table(
                ["graph", "vertices", *names],
                [
                    [
                        row["kind"],
                        f"{row['n']:,}",
                        *(f"{row['seconds'][name]:.2f}" if name in row["seconds"] else "–" for name in names),
                    ]
                    for row in parts
                ],
            ),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"Uniform graphs in the first table, k a tenth of the vertices. In the others the mean degree is "
                    f"{DEGREE}; weights are uniform from 0 to 1. The searches get {limit:g} s each, and `portfolio` "
                    "computes its bound in that time too; greedy methods and peels end on their own, and a peel takes "
                    "the heaviest vertices of the last core that it needs. The plain annealing is thirty lines in "
                    "`bench/sparse_peers.py`, compiled, from the same start, with temperatures that suit these "
                    "weights. dwave-samplers turns the choice of k vertices into a penalty on all pairs, so it runs up "
                    f"to {LARGEST_PENALTY:,} vertices. Memory is the most that the process held."
                ],
            )
        ],
    )


def _draw(figure: Figure, value: dict[str, Any], behind: dict[str, list[float]]) -> None:
    left, right = figure.subplots(1, 2)
    for name, colour in STEPS.items():
        edges = [row["edges"] for row in value["sizes"]]
        left.plot(edges, [row["seconds"][name] for row in value["sizes"]], "o-", color=colour, label=name)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("edges")
    left.set_ylabel("seconds")
    left.legend()
    for place, each in enumerate(behind.values()):
        right.plot([100 * one for one in each], [place] * len(each), "o", color=BLUE, alpha=0.6)
    right.set_yticks(range(len(behind)), list(behind))
    right.set_xlabel("behind the heaviest part found, %")
    right.invert_yaxis()


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of("sparse", __doc__)
    parser.add_argument(
        "--vertices", type=int, nargs="+", default=VERTICES, help="sizes of the graphs that are searched"
    )
    parser.add_argument("--largest", type=int, default=SIZES[-1][0], help="most vertices of the first measurement")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each search (default %(default)s)")
    parser.add_argument("--long", type=float, default=LONG, help="seconds of the first measurement's portfolio")
    parser.add_argument("--size", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.size:
        print(json.dumps(measure_size(args.size, args.long)))
        return
    sizes = [size for size in SIZES if size[0] <= args.largest] or [(args.largest, 10 * args.largest)]

    def measured(source: dict[str, Any]) -> dict[str, Any]:
        found = {"sizes": measure_sizes(sizes, args.long), "parts": measure_parts(args.vertices, args.seconds)}
        return {"limit": args.seconds, "long": args.long, **found}

    publish(args, page, measured)


if __name__ == "__main__":
    main()
