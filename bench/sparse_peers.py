"""What others would do about densest k-subgraphs, for `bench.sparse`: peels, plain annealing, dwave-samplers.

Each takes W of `bench.sparse_graphs`, k and seconds, and returns k vertices. Peels end on their own. igraph and
dwave-samplers are in the extra `peers`, and left out where they are not installed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from bench.sparse_graphs import Graph, weight_of
from grace_opt import solve
from grace_opt.kernels._shared.jit import jit

#: Steps of the plain annealing that tell its pace; up to how many vertices dwave-samplers runs.
TRIAL, LARGEST_PENALTY = 200_000, 1000


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
