"""Sparse graphs: what a million vertices take, and who finds the densest parts: ``python -m bench.sparse``.

Two measurements on generated graphs. *Size*: seconds and peak memory of making a problem from a scipy.sparse matrix, of
both greedy methods, of the certificate and of a portfolio with a limit, each size in a process of its own. *Densest
k-subgraphs*: graphs of several kinds (`bench.sparse_graphs`), k a tenth of the vertices; searches get equal time,
beside greedy methods and peers (`bench.sparse_peers`), of which igraph and dwave-samplers run where they are installed
(``pip install ".[peers]"``).

Writes docs/results/sparse.{json,md,png}.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from bench.provenance import require_clean
from bench.report import add_options, read_results, write_results
from bench.sparse_graphs import KINDS, uniform, weight_of
from bench.sparse_page import page
from bench.sparse_peers import there
from grace_opt import bounds, solve
from grace_opt._util.progress import progress_bar
from grace_opt.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
#: Vertices and edges of the first measurement, and seconds of its portfolio.
SIZES, LONG = ((10_000, 100_000), (100_000, 1_000_000), (1_000_000, 10_000_000)), 10.0
#: Vertices of the second, and seconds that a search gets.
VERTICES, SECONDS = (1000, 2000, 5000, 10_000), 5.0
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


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sparse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vertices", type=int, nargs="+", default=VERTICES, help="sizes of the graphs that are searched"
    )
    parser.add_argument("--largest", type=int, default=SIZES[-1][0], help="most vertices of the first measurement")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each search (default %(default)s)")
    parser.add_argument("--long", type=float, default=LONG, help="seconds of the first measurement's portfolio")
    parser.add_argument("--size", type=Path, help=argparse.SUPPRESS)
    add_options(parser, "sparse")
    args = parser.parse_args(given)
    if args.size:
        print(json.dumps(measure_size(args.size, args.long)))
        return
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return
    source = require_clean(args.allow_dirty)
    sizes = [size for size in SIZES if size[0] <= args.largest] or [(args.largest, 10 * args.largest)]
    value = {
        "provenance": source,
        "limit": args.seconds,
        "long": args.long,
        "sizes": measure_sizes(sizes, args.long),
        "parts": measure_parts(args.vertices, args.seconds),
    }
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty))


if __name__ == "__main__":
    main()
