"""f of a choice from the edges, by compensated sums; and a vertex's cost, W_vv + 2 (weight of its edges to the choice).

A cost c says both what entering adds, c, and what leaving does, -c: an exchange of i for j changes f by
``c[j] - c[i] - 2 W_ij``. Source of the sums: Knuth's exact addition; Ogita, Rump & Oishi (2005).
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i4, i8, types, void

from ...._shared.jit import inlined, jit
from ..forms import Graph

#: numba's type of a graph.
GRAPH = types.NamedTuple((i8[::1], i4[::1], f8[::1], f8[::1]), Graph)
#: A weight that leaves spoils a cost that is smaller by this factor: the cost is summed again.
DWARFS = 2.0**36


@jit(ahead=[types.Tuple((f8, f8, f8))(GRAPH, b1[::1])])
def objective(g, mask):
    """Return f, what its rounding left, and the sum of \\|W_ij\\| over the choice, to which 32 digits are relative."""
    total, lost, size = 0.0, 0.0, 0.0
    for i in range(len(mask)):
        if mask[i]:
            size += abs(g.nodes[i])
            after = total + g.nodes[i]
            back = after - total
            lost += (total - (after - back)) + (g.nodes[i] - back)
            total = after
            for p in range(g.indptr[i], g.indptr[i + 1]):
                if mask[g.indices[p]]:
                    more = g.data[p]
                    size += abs(more)
                    after = total + more
                    back = after - total
                    lost += (total - (after - back)) + (more - back)
                    total = after
    value = total + lost
    return value, lost - (value - total), size


@jit(ahead=[f8(GRAPH)])
def least_weight(g):
    """Return the least absolute weight that is not 0; infinite if there is none."""
    least = np.inf
    for weights in (g.nodes, g.data):
        for p in range(len(weights)):
            if weights[p] != 0.0:
                least = min(least, abs(weights[p]))
    return least


@jit(ahead=[void(GRAPH, b1[::1], f8[::1])])
def fill_costs(g, x, cost):
    """Set every vertex's cost."""
    for v in range(len(x)):
        cost[v] = cost_of(g, x, v)


@inlined
def cost_of(g, x, v):
    """Sum one vertex's cost, with its rounding errors."""
    total, lost = 0.0, 0.0
    for p in range(g.indptr[v], g.indptr[v + 1]):
        if x[g.indices[p]]:
            more = g.data[p]
            after = total + more
            back = after - total
            lost += (total - (after - back)) + (more - back)
            total = after
    total *= 2.0
    after = total + g.nodes[v]
    back = after - total
    lost = 2.0 * lost + ((total - (after - back)) + (g.nodes[v] - back))
    return after + lost


@inlined
def weight_of(g, i, j):
    """Return W_ij; 0 without an edge. Row i is sorted: O(log degree)."""
    low, high = g.indptr[i], g.indptr[i + 1]
    while low < high:
        middle = (low + high) >> 1
        if g.indices[middle] < j:
            low = middle + 1
        else:
            high = middle
    return g.data[low] if low < g.indptr[i + 1] and g.indices[low] == j else 0.0


@jit(ahead=[void(GRAPH, i4[::1], i4[::1], f8[::1])])
def fill_weights(g, first, second, output):
    """Set the weights of pairs of vertices."""
    for p in range(len(output)):
        output[p] = weight_of(g, first[p], second[p])


@inlined
def moved(g, x, v, cost, weight, grain):
    """Return the cost of v after a neighbour was added (weight > 0 or < 0) or taken away (its negative)."""
    after = cost + 2.0 * weight
    if abs(weight) > DWARFS * max(abs(after), grain):
        return cost_of(g, x, v)
    return after
