"""Check the loops over edges on a small case of whole numbers: greedy choices, exchanges, tabu search."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import csr_array

from ..._shared.cases import least_of_all, small_instance
from ..greedy import reference, removal_scores
from .exchange import Exchanges
from .forms import Graph
from .greedy import added, dropped
from .tabu import TabuSearch

K, ITERATIONS = 4, 500


def cpu() -> bool:
    """Check that greedy chooses as the reference, local search finds a local optimum, and tabu search the optimum."""
    W = small_instance()
    n = len(W)
    edges, start = csr_array(W), np.arange(n) < K
    graph = Graph(edges.indptr.astype(np.int64), edges.indices.astype(np.int32), edges.data, np.zeros(n))
    dense, free = torch.from_numpy(W)[None], torch.ones(1, n, dtype=torch.bool, device="cpu")
    k = torch.tensor([K], dtype=torch.int64, device="cpu")
    rises = reference.greedy_order(dense, reference.first_scores(dense, free), k, K).order
    drops = reference.greedy_order(dense, removal_scores(dense, free), k, K).order
    local, tabu = Exchanges(graph, start.copy()), TabuSearch(graph, start, 100, 1, np.ones(1, np.uint64))
    local.improve(1000)
    tabu.advance(ITERATIONS)
    best = tabu.settle()
    return (
        torch.equal(added(graph, free, K, lambda: False)[0], rises)
        and torch.equal(dropped(graph, free, K, lambda: False)[0], drops)
        and _is_local_optimum(W, local.x)
        and bool(tabu.value == W[np.ix_(best, best)].sum() == least_of_all(W, K))
    )


def _is_local_optimum(W: np.ndarray, x: np.ndarray) -> bool:
    cost = W.diagonal() + 2 * (W @ x)
    change = cost[~x][None, :] - cost[x][:, None] - 2 * W[x][:, ~x]
    return bool((change >= 0).all())
