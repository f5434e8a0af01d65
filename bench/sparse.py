"""Sparse graphs: what a million vertices take, and who finds the densest parts: ``python -m bench.sparse``.

Two measurements on generated graphs. *Size*: seconds and peak memory of making a problem from a scipy.sparse matrix, of
both greedy methods and of the certificate, each size in a process of its own. *Densest k-subgraphs*: graphs of several
kinds, weights from 0 to 1, k a tenth of the vertices; the searches get equal time, beside greedy methods, the k-core
peel of networkx, a plain annealing of thirty lines, and dwave-samplers where it is installed and n is small enough for
its penalty, which makes the graph complete (`pip install "grace-opt[peers]"`). igraph's cores are those of networkx.

Writes docs/results/sparse.{json,md,png}.
"""

from __future__ import annotations

import argparse
import importlib.util
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

import networkx as nx
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from matplotlib.figure import Figure
from scipy.spatial import cKDTree

from bench.provenance import require_clean
from bench.report import BLACK, BLUE, GREY, ORANGE, Page, add_options, read_results, table, write_results
from grace_opt import bounds, solve
from grace_opt.kernels._shared.jit import jit
from grace_opt.problem import Problem

Graph = Any  # scipy.sparse.csr_array
#: Vertices and edges of the first measurement; vertices of the second, and seconds that a search gets.
SIZES, VERTICES, SECONDS = ((10_000, 100_000), (100_000, 1_000_000), (1_000_000, 10_000_000)), (1000, 5000, 20_000), 5.0
#: Mean degree of the graphs of the second; up to this many vertices dwave-samplers runs.
DEGREE, LARGEST_PENALTY = 12, 1000
#: Steps of the plain annealing that tell its pace.
PLAIN_TRIAL = 200_000
SEARCHES = ("local_search", "tabu", "annealing", "portfolio")
NAMES = {"peel": "k-core peel (networkx)", "plain": "plain annealing", "dwave": "dwave-samplers"}


def of_pairs(n: int, ends: npt.NDArray[Any], rng: np.random.Generator) -> Graph:
    """W = -A / 2 of a graph with these edges, in either order and perhaps twice, and weights from 0 to 1."""
    low, high = np.sort(ends, axis=1).T
    keys = np.unique((low * n + high)[low != high])
    half = sp.coo_array((-rng.random(len(keys)) / 2, (keys // n, keys % n)), shape=(n, n)).tocsr()
    return (half + half.T).tocsr()


def uniform(n: int, rng: np.random.Generator, edges: int | None = None) -> Graph:
    """Every pair of vertices with the same probability."""
    return of_pairs(n, rng.integers(0, n, (edges or n * DEGREE // 2, 2)), rng)


def power_law(n: int, rng: np.random.Generator) -> Graph:
    """Ends drawn in proportion to rank^-0.6: degrees follow a power law."""
    weights = np.arange(1.0, n + 1) ** -0.6
    return of_pairs(n, rng.choice(n, (n * DEGREE // 2, 2), p=weights / weights.sum()), rng)


def planted(n: int, rng: np.random.Generator) -> Graph:
    """A uniform graph, and as many edges again within a tenth of the vertices as make their degree half as large again.

    The part is denser, but not so much that greedy methods must find it.
    """
    part = rng.permutation(n)[: n // 10]
    more = part[rng.integers(0, len(part), (len(part) * DEGREE // 4, 2))]
    return of_pairs(n, np.concatenate([rng.integers(0, n, (n * DEGREE // 2, 2)), more]), rng)


def geometric(n: int, rng: np.random.Generator) -> Graph:
    """Points in a square, joined where they are near."""
    radius = (DEGREE / np.pi / n) ** 0.5
    return of_pairs(n, cKDTree(rng.random((n, 2))).query_pairs(radius, output_type="ndarray"), rng)


KINDS: dict[str, Callable[[int, np.random.Generator], Graph]] = {
    "uniform": uniform,
    "power law": power_law,
    "planted": planted,
    "geometric": geometric,
}


def value_of(W: Graph, chosen: npt.NDArray[Any]) -> float:
    """The weight of a part: minus f."""
    return float(-W[chosen][:, chosen].sum())


def peel(W: Graph, k: int, limit: float) -> npt.NDArray[Any]:
    """The k vertices of the highest cores, the heaviest first among equals."""
    graph = nx.from_scipy_sparse_array(W)
    core, weight = nx.core_number(graph), -W.sum(axis=1)
    return np.array(sorted(range(W.shape[0]), key=lambda v: (-core[v], -weight[v]))[:k])


@jit
def anneal_plainly(indptr, indices, data, inside, chosen, gain, hot, cold, steps, seed):  # type: ignore[no-untyped-def]
    """Simulated annealing as anybody would write it: random pairs, a falling temperature; returns the best set."""
    n, k = len(chosen), len(inside)
    np.random.seed(seed)
    outside = np.flatnonzero(~chosen)
    value, best, found = 0.0, 0.0, inside.copy()
    for step in range(steps):
        T = hot * (cold / hot) ** (step / steps)
        a, b = np.random.randint(k), np.random.randint(n - k)
        i, j = inside[a], outside[b]
        between = 0.0
        for p in range(indptr[i], indptr[i + 1]):
            if indices[p] == j:
                between = data[p]
        change = gain[j] - gain[i] - 2 * between
        if change < 0 or np.random.random() < np.exp(-change / T):
            inside[a], outside[b] = j, i
            value += change
            for p in range(indptr[i], indptr[i + 1]):
                gain[indices[p]] -= 2 * data[p]
            for p in range(indptr[j], indptr[j + 1]):
                gain[indices[p]] += 2 * data[p]
            if value < best:
                best, found = value, inside.copy()
    return found


def plain(W: Graph, k: int, limit: float) -> npt.NDArray[Any]:
    """`anneal_plainly` from MIES, with as many steps as fit into the time."""
    start, steps = solve(W, k).indices, 1000
    while True:  # compiled by the first round, timed by the second
        chosen = np.zeros(W.shape[0], bool)
        chosen[start] = True
        gain, began = 2 * (W @ chosen.astype(float)), time.perf_counter()
        found = anneal_plainly(W.indptr, W.indices, W.data, start.copy(), chosen, gain, 1.0, 0.1, steps, 0)
        if steps > PLAIN_TRIAL:
            return np.asarray(found)
        pace = steps / (time.perf_counter() - began)
        steps = PLAIN_TRIAL if steps < PLAIN_TRIAL else max(PLAIN_TRIAL + 1, int(0.9 * limit * pace))


def dwave(W: Graph, k: int, limit: float) -> npt.NDArray[Any]:
    """Simulated annealing of dwave-samplers under a penalty for other sizes, read after read; mended to k vertices."""
    import dimod
    from dwave.samplers import SimulatedAnnealingSampler

    n, penalty = W.shape[0], 0.5
    Q = W.toarray() + penalty
    Q[np.diag_indices(n)] += -2 * penalty * k
    model = dimod.BinaryQuadraticModel(np.triu(Q) + np.triu(Q, 1), "BINARY")
    began, best, seed = time.perf_counter(), solve(W, k, "think").indices, 0
    while time.perf_counter() - began < limit:
        seed += 1
        x = SimulatedAnnealingSampler().sample(model, num_reads=1, num_sweeps=1000, seed=seed).record.sample[0] > 0
        while x.sum() != k:
            cost = 2 * (W @ x.astype(float))
            worst = np.where(x, cost, -np.inf).argmax() if x.sum() > k else np.where(x, np.inf, cost).argmin()
            x[worst] = not x[worst]
        best = max((best, x.nonzero()[0]), key=lambda chosen: value_of(W, chosen))
    return np.asarray(best)


def measure_parts(vertices: Sequence[int], limit: float) -> list[dict[str, Any]]:
    """The weight that every method finds in every graph, and a certified bound."""
    rows = []
    peers: dict[str, Callable[[Graph, int, float], npt.NDArray[Any]]] = {"peel": peel, "plain": plain}
    for n in vertices:
        for kind, make in KINDS.items():
            W, k = make(n, np.random.default_rng(0)), n // 10
            problem = Problem.of(W, k)
            found, seconds = {}, {}
            for name in ("mies", "drop_greedy", *SEARCHES):
                timed = {} if name in ("mies", "drop_greedy") else {"time_limit": limit}
                start = {"start": "drop_greedy"} if name == "local_search" else {}
                solution = solve(problem, method=name, **timed, **start)
                found[name], seconds[name] = -float(solution.objective), solution.stats["time"]
            for name, peer in peers.items() if n > LARGEST_PENALTY else (peers | _installed()).items():
                began = time.perf_counter()
                found[name], seconds[name] = value_of(W, peer(W, k, limit)), time.perf_counter() - began
            bound = -float(bounds.certificate(problem.flatten()))
            rows.append(
                {"kind": kind, "n": n, "k": k, "edges": W.nnz // 2, "found": found, "seconds": seconds, "bound": bound}
            )
    return rows


def _installed() -> dict[str, Callable[[Graph, int, float], npt.NDArray[Any]]]:
    there = importlib.util.find_spec("dwave") and importlib.util.find_spec("dimod")
    return {"dwave": dwave} if there else {}


def measure_size(path: Path) -> dict[str, Any]:
    """In a process of its own: seconds of each step on the matrix in a file, and the peak of memory after each."""
    W = sp.load_npz(path)
    small = uniform(1000, np.random.default_rng(1))
    for method in ("mies", "drop_greedy"):
        solve(small, 100, method, certify=True)  # loads what is compiled
    result: dict[str, Any] = {"n": W.shape[0], "edges": W.nnz // 2, "seconds": {}, "peak": {"before": _peak()}}
    steps: dict[str, Callable[[], Any]] = {
        "problem": lambda: Problem.of(W, W.shape[0] // 10),
        "mies": lambda: solve(problem, method="mies"),
        "drop_greedy": lambda: solve(problem, method="drop_greedy"),
        "bound": lambda: bounds.certificate(problem.flatten()),
    }
    found: dict[str, Any] = {}
    for name, step in steps.items():
        began = time.perf_counter()
        found[name] = step()
        result["seconds"][name], result["peak"][name] = time.perf_counter() - began, _peak()
        problem = found["problem"]
    best = max(-float(found[name].objective) for name in ("mies", "drop_greedy"))
    return result | {"found": best, "bound": -float(found["bound"])}


def _peak() -> int:
    """Most bytes that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_sizes(sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """`measure_size` of uniform graphs."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n, edges in sizes:
            path = Path(folder) / "w.npz"
            sp.save_npz(path, uniform(n, np.random.default_rng(0), edges), compressed=False)
            words = [sys.executable, "-m", "bench.sparse", "--size", str(path)]
            rows.append(json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout))
    return rows


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    sizes, parts, limit = value["sizes"], value["parts"], value["limit"]
    last = sizes[-1]
    best = [max(row["found"].values()) for row in parts]
    names = list(dict.fromkeys(name for row in parts for name in row["found"]))
    behind = {
        name: [1 - row["found"][name] / top for row, top in zip(parts, best, strict=True) if name in row["found"]]
        for name in names
    }
    mean = {name: statistics.fmean(each) for name, each in behind.items()}
    ahead = sum(row["found"]["portfolio"] >= row["found"]["plain"] for row in parts)
    gaps = [row["bound"] / top - 1 for row, top in zip(parts, best, strict=True)]
    return Page(
        title="Sparse graphs",
        picture="Left, seconds of each step by the number of edges, on logarithmic scales; right, how far each method "
        "stays behind the heaviest part found, in percent, for every kind of graph",
        draw=lambda figure: _draw(figure, value, behind),
        asked=f"What does W of a million vertices take, and who finds the densest tenth of a graph in {limit:g} s?",
        found=f"With {last['n']:,} vertices and {last['edges']:,} edges, MIES takes {last['seconds']['mies']:.1f} s, "
        f"`drop_greedy` {last['seconds']['drop_greedy']:.1f} s after {last['seconds']['problem']:.1f} s for the "
        f"problem, with {max(last['peak'].values()) / 2**30:.2f} GiB at most, Python and the matrix as given included. "
        f"In {len(parts)} graphs, `portfolio` stays {100 * mean['portfolio']:.2f} % behind the best on the mean, "
        f"`annealing` {100 * mean['annealing']:.2f} %, `tabu` {100 * mean['tabu']:.2f} %, plain annealing "
        f"{100 * mean['plain']:.2f} %, the k-core peel {100 * mean['peel']:.1f} %; `portfolio` is at least as good as "
        f"plain annealing in {ahead} of {len(parts)}.",
        sure=f"These are generated graphs with random weights, one of each kind and size; optima are not known. The "
        f"certified bound is {100 * min(gaps):.1f} % to {100 * max(gaps):.0f} % above the best found: it is tight "
        "where a part of the graph is dense, and loose on uniform graphs.",
        tables=[
            *table(
                ["vertices", "edges", "problem, s", "mies, s", "drop_greedy, s", "bound, s", "peak, GiB"],
                [
                    [
                        f"{row['n']:,}",
                        f"{row['edges']:,}",
                        *(f"{row['seconds'][name]:.2f}" for name in ("problem", "mies", "drop_greedy", "bound")),
                        f"{max(row['peak'].values()) / 2**30:.2f}",
                    ]
                    for row in sizes
                ],
            ),
            "",
            *table(
                ["graph", "vertices", "best found", *(NAMES.get(name, name) for name in names), "bound"],
                [
                    [
                        row["kind"],
                        f"{row['n']:,}",
                        f"{top:.2f}",
                        *(f"{100 * (row['found'][n] / top - 1):.2f} %" if n in row["found"] else "–" for n in names),
                        f"{100 * (row['bound'] / top - 1):+.1f} %",
                    ]
                    for row, top in zip(parts, best, strict=True)
                ],
            ),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"Mean degree {DEGREE}, weights uniform from 0 to 1, k a tenth of the vertices. Percentages are "
                    f"relative to the heaviest part that any method found. The searches get {limit:g} s each, and "
                    "`portfolio` computes its bound in that time too; greedy methods and the peel end on their own. "
                    "The plain annealing is thirty lines in `bench/sparse.py`, compiled, with temperatures that suit "
                    "these weights. A peer that is not listed was not installed, or does not fit: dwave-samplers turns "
                    "the choice of k vertices into a penalty on all pairs. Memory is the most that the process held."
                ],
            )
        ],
    )


def _draw(figure: Figure, value: dict[str, Any], behind: dict[str, list[float]]) -> None:
    left, right = figure.subplots(1, 2)
    for name, colour in (("problem", GREY), ("mies", BLUE), ("drop_greedy", ORANGE), ("bound", BLACK)):
        edges = [row["edges"] for row in value["sizes"]]
        left.plot(edges, [row["seconds"][name] for row in value["sizes"]], "o-", color=colour, label=name)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("edges")
    left.set_ylabel("seconds")
    left.legend()
    names = [name for name in behind if len(behind[name]) == len(value["parts"])]
    for place, name in enumerate(names):
        right.plot([100 * each for each in behind[name]], [place] * len(behind[name]), "o", color=BLUE, alpha=0.6)
    right.set_yticks(range(len(names)), [NAMES.get(name, name) for name in names])
    right.set_xlabel("behind the heaviest part found, %")
    right.invert_yaxis()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sparse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vertices", type=int, nargs="+", default=VERTICES, help="sizes of the graphs that are searched"
    )
    parser.add_argument("--largest", type=int, default=SIZES[-1][0], help="most vertices of the first measurement")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each search (default %(default)s)")
    parser.add_argument("--size", type=Path, help=argparse.SUPPRESS)
    add_options(parser, "sparse")
    args = parser.parse_args(given)
    if args.size:
        print(json.dumps(measure_size(args.size)))
        return
    if args.report_only:
        value = read_results(args.out)
    else:
        source = require_clean(args.allow_dirty)
        sizes = [size for size in SIZES if size[0] <= args.largest] or [(args.largest, 10 * args.largest)]
        value = {
            "provenance": source,
            "limit": args.seconds,
            "sizes": measure_sizes(sizes),
            "parts": measure_parts(args.vertices, args.seconds),
        }
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty, measured=not args.report_only))


if __name__ == "__main__":
    main()
