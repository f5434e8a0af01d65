r"""What every chosen vertex must cost at least, from the edges: bounds for `grace_opt.bounds.sparse`.

`rows`: a vertex with its k - 1 least entries. `balance`: every edge of negative weight is divided between its ends; a
vertex's load is its own weight and its shares, and no set costs less than its loads. Equalising the two loads of one
edge after the other, as far as its weight goes, minimises the sum of their squares, and with it the sum of the k
heaviest loads for every k at once: loads are a point of a base polytope, whose least-norm point is least majorised
(Fujishige, 1980; Boob et al., Flowless, 2020, for densest subgraphs). Stopping early loosens the bound, nothing more.
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i8, void

from ...._shared.jit import jit
from ...._shared.whole import sort
from .sums import GRAPH

#: A sum of m terms is off by at most this times (m + 2)·eps·Σ|terms|; half would do.
MARGIN, EPS = 2.0, 2.0**-52


@jit(ahead=[void(GRAPH, b1[::1], i8, f8[::1])])
def rows(g, free, k, cost):
    """Set the cost of each candidate to its weight and its k - 1 least entries, rounded downwards; inf for others."""
    candidates, widest = 0, 0
    for v in range(len(free)):
        candidates += free[v]
        widest = max(widest, g.indptr[v + 1] - g.indptr[v])
    entries = np.empty(widest)
    for v in range(len(free)):
        cost[v] = np.inf
        if not free[v]:
            continue
        count, below = 0, 0
        for p in range(g.indptr[v], g.indptr[v + 1]):
            if free[g.indices[p]]:
                entries[count] = g.data[p]
                below += g.data[p] < 0.0
                count += 1
        above = max(k - 1 - below - (candidates - 1 - count), 0)  # entries above 0 that cannot be avoided
        taken = min(below, k - 1)
        if taken < below or above > 0:
            sort(entries[:count])
        total, size = g.nodes[v], abs(g.nodes[v])
        for place in range(count):
            chosen = entries[place] < 0.0
            if taken < below or above > 0:
                chosen = place < taken or (place >= below and place < below + above)
            if chosen:
                total += entries[place]
                size += abs(entries[place])
        cost[v] = total - MARGIN * (count + 2) * EPS * size


@jit(ahead=[i8(GRAPH, b1[::1])])
def count_shared(g, free):
    """Return the number of edges of negative weight between candidates."""
    count = 0
    for v in range(len(free)):
        if free[v]:
            for p in range(g.indptr[v], g.indptr[v + 1]):
                count += g.indices[p] > v and g.data[p] < 0.0 and free[g.indices[p]]
    return count


@jit(ahead=[void(GRAPH, b1[::1], f8[::1], f8[::1])])
def begin(g, free, shares, load):
    """Give half of each edge to either end. `shares` has what the lower end of each edge gets, in order."""
    for v in range(len(free)):
        load[v] = -g.nodes[v]
    edge = 0
    for v in range(len(free)):
        if free[v]:
            for p in range(g.indptr[v], g.indptr[v + 1]):
                u = g.indices[p]
                if u > v and g.data[p] < 0.0 and free[u]:
                    shares[edge] = -g.data[p]
                    load[v] -= g.data[p]
                    load[u] -= g.data[p]
                    edge += 1


@jit(ahead=[void(GRAPH, b1[::1], f8[::1], f8[::1])])
def balance(g, free, shares, load):
    """Equalise the loads of each edge's ends, as far as its weight goes, one edge after the other."""
    edge = 0
    for v in range(len(free)):
        if not free[v]:
            continue
        own = load[v]
        for p in range(g.indptr[v], g.indptr[v + 1]):
            u = g.indices[p]
            if u > v and g.data[p] < 0.0 and free[u]:
                before = shares[edge]
                after = min(max(before - 0.5 * (own - load[u]), 0.0), -2.0 * g.data[p])
                own += after - before
                load[u] -= after - before
                shares[edge] = after
                edge += 1
        load[v] = own


@jit(ahead=[void(GRAPH, b1[::1], f8[::1], f8[::1])])
def sum_loads(g, free, shares, load):
    """Sum every candidate's load from the shares, rounded upwards; -inf for others."""
    n = len(free)
    size, count = np.empty(n), np.zeros(n, np.int64)
    for v in range(n):
        load[v], size[v] = -g.nodes[v], abs(g.nodes[v])
    edge = 0
    for v in range(n):
        if not free[v]:
            continue
        for p in range(g.indptr[v], g.indptr[v + 1]):
            u = g.indices[p]
            if u > v and g.data[p] < 0.0 and free[u]:
                whole = -2.0 * g.data[p]
                load[v] += shares[edge]
                load[u] += whole - shares[edge]
                size[v] += whole
                size[u] += whole
                count[v] += 1
                count[u] += 1
                edge += 1
    for v in range(n):
        load[v] = load[v] + MARGIN * (count[v] + 2) * EPS * size[v] if free[v] else -np.inf
