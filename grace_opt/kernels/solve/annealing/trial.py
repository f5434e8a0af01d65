"""Check that the compiled annealing finds a small optimum, of a tensor and by edges, and keeps its sums accurate."""

from __future__ import annotations

import numpy as np
from scipy.sparse import csr_array

from ..._shared.cases import least_of_all, small_instance
from ..sparse.forms import Graph
from .moves import DenseMoves, SparseMoves

K, PROPOSALS = 4, 20_000


def cpu() -> bool:
    """Check that both find the least f of all subsets, and a choice with that f."""
    W = small_instance()
    edges, start = csr_array(W), np.arange(len(W)) < K
    graph = Graph(edges.indptr.astype(np.int64), edges.indices.astype(np.int32), edges.data, np.zeros(len(W)))
    least = least_of_all(W, K)
    actual = True
    for moves in (DenseMoves(W, start, np.ones(1, np.uint64)), SparseMoves(graph, start, np.ones(1, np.uint64))):
        moves.anneal(20.0, 1.0, PROPOSALS)
        x = moves.best.x
        actual &= bool(moves.values[1] == W[np.ix_(x, x)].sum() == least and x.sum() == K)
    return actual
