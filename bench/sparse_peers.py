"""Generated sparse graphs of several kinds, and what others would do about their densest parts, for `bench.sparse`.

W = -A / 2, so that -f is the weight of a part; edges weigh from 0 to 1. Each peer (peels, plain annealing,
dwave-samplers) takes W, k and seconds, and returns k vertices. Peels end on their own. igraph and dwave-samplers are in
the extra `peers`, and left out where they are not installed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.spatial import cKDTree

from grace_opt import solve
from grace_opt.kernels._shared.jit import jit

#: A scipy.sparse.csr_array; scipy ships no types.
Graph: TypeAlias = Any
#: Steps of the plain annealing that tell its pace; up to how many vertices dwave-samplers runs.
TRIAL, LARGEST_PENALTY = 200_000, 1000
#: Mean degree.
DEGREE = 12


def of_pairs(n: int, ends: npt.NDArray[Any], rng: np.random.Generator) -> Graph:
    """W of a graph with these edges, in either order and perhaps twice, and weights from 0 to 1."""
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
    """A uniform graph, and within a tenth of its vertices so many edges more that their degree is half as large again.

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


def weight_of(W: Graph, chosen: npt.NDArray[Any]) -> float:
    """The weight of the edges within a part: minus f."""
    return float(-W[chosen][:, chosen].sum())


def peel(W: Graph, k: int, limit: float) -> npt.NDArray[Any]:
    """The k vertices of the highest cores, by networkx; the heaviest first among equals."""
    core = nx.core_number(nx.from_scipy_sparse_array(W))
    return highest(W, np.fromiter(map(core.get, range(W.shape[0])), np.int64), k)


def peel_igraph(W: Graph, k: int, limit: float) -> npt.NDArray[Any]:
    """The same by igraph."""
    import igraph

    half = sp.triu(W, 1).tocoo()
    graph = igraph.Graph(n=W.shape[0], edges=np.column_stack(half.coords))
    return highest(W, np.asarray(graph.coreness()), k)


def highest(W: Graph, core: npt.NDArray[Any], k: int) -> npt.NDArray[Any]:
    """The k vertices of the highest cores, the heaviest first among equals."""
    return np.asarray(np.lexsort((W.sum(axis=1), -core))[:k])


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
        if steps > TRIAL:
            return np.asarray(found)
        pace = steps / (time.perf_counter() - began)
        steps = TRIAL if steps < TRIAL else max(TRIAL + 1, int(0.9 * limit * pace))


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
        best = max((best, x.nonzero()[0]), key=lambda chosen: weight_of(W, chosen))
    return np.asarray(best)


#: How each is called on the page, and what runs it.
PEERS: dict[str, Callable[[Graph, int, float], npt.NDArray[Any]]] = {
    "k-core peel (networkx)": peel,
    "k-core peel (igraph)": peel_igraph,
    "plain annealing": plain,
    "dwave-samplers": dwave,
}
#: The modules that some of them need.
NEEDED = {"k-core peel (igraph)": ("igraph",), "dwave-samplers": ("dwave", "dimod")}


def there(n: int) -> dict[str, Callable[[Graph, int, float], npt.NDArray[Any]]]:
    """Those that are installed and can take n vertices."""
    return {
        name: peer
        for name, peer in PEERS.items()
        if all(map(importlib.util.find_spec, NEEDED.get(name, ())))
        and (name != "dwave-samplers" or n <= LARGEST_PENALTY)
    }
