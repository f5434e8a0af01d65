r"""The best exchange of a chosen vertex for another in a sparse graph, and the local search that makes it.

The change of f is ``leave[i] + enter[j] - 2 W_ij``. Both costs are in heaps: without an edge, the best exchange is that
of the first entries. An edge with W_ij < 0 makes it worse: a heap is searched from its top, past neighbours, and never
below an entry that is too costly. One with W_ij > 0 makes it better: those are in a heap of their own (`crossing`). An
exchange costs about the degrees of its two vertices and, with weights above 0, those of their neighbours, not k.

Rounding: beside each cost is its size, :math:`|W_{vv}| + 2 \sum |W_{uv}|` over every u added or subtracted since it was
last summed, which happens at the latest after ``REFRESH`` changes. Keys hold ``tolerance * size`` besides: an exchange
is made only if it improves f whatever the rounding (`grace_opt.kernels.solve.exchange.rounding`). Source: Ghosh (1996).
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i8

from ...._shared.jit import inlined, jit
from ...exchange.rounding import REFRESH
from .crossing import CROSSING, along_edge, begin, entered, gone, key_of, note_key
from .heap import HEAP, arrange, change, push, put, take_out
from .sums import GRAPH, weight_of


@jit(ahead=[f8(GRAPH, f8[::1])])
def largest(g, top):
    """Set each row's largest edge weight, at least 0; return the largest of all."""
    most = 0.0
    for v in range(len(top)):
        top[v] = 0.0
        for p in range(g.indptr[v], g.indptr[v + 1]):
            top[v] = max(top[v], g.data[p])
        most = max(most, top[v])
    return most


@inlined
def best_exchange(g, crossing, x, leave, enter, best, stack):
    """Return the least change of f below `best`, and its vertices; i = -1: none.

    `stack` (2, 128) int64 is scratch: a heap of 4^30 entries needs less than 94 at once.
    """
    if leave.held[0] == 0 or enter.held[0] == 0:
        return best, -1, -1
    bi, bj = -1, -1
    if crossing.heap.held[0] > 0:
        best, bi, bj = along_edge(g, crossing, x, leave, enter, best)
    low, waiting = enter.keys[0], 1
    stack[0, 0] = 0
    while waiting > 0:
        waiting -= 1
        position = stack[0, waiting]
        key = leave.keys[position]
        if key + low >= best:
            continue
        for child in range(min(4 * position + 4, leave.held[0] - 1), 4 * position, -1):
            stack[0, waiting] = child
            waiting += 1
        change, j = partner(g, leave.vertices[position], key, enter, best, stack[1])
        if j >= 0:
            best, bi, bj = change, leave.vertices[position], j
    return best, bi, bj


@inlined
def partner(g, v, key, heap, best, stack):
    """Return the best exchange of v, which costs `key`, with an entry of the heap, if below `best`."""
    vertex, waiting = -1, 1
    stack[0] = 0
    if heap.held[0] == 0:
        return best, vertex
    while waiting > 0:
        waiting -= 1
        position = stack[waiting]
        if key + heap.keys[position] >= best:
            continue
        for child in range(min(4 * position + 4, heap.held[0] - 1), 4 * position, -1):
            stack[waiting] = child
            waiting += 1
        total = (key + heap.keys[position]) - 2.0 * weight_of(g, v, heap.vertices[position])
        if total < best:
            best, vertex = total, heap.vertices[position]
    return best, vertex


@jit(ahead=[i8(GRAPH, f8, b1[::1], f8[::1], f8[::1], i8[::1], HEAP, HEAP, CROSSING, i8)])
def improve(g, tolerance, x, cost, size, age, leave, enter, crossing, steps):
    """Make up to `steps` exchanges in `x`; return how many. Fewer: it is a local optimum.

    cost, size (n,); age (n,) int64, changes since the cost was summed, -1 before the first call; leave, enter : Heap
    crossing : Crossing
    """
    stack = np.empty((2, 128), np.int64)
    fresh, upwards = age[0] < 0, len(crossing.bound) > 0
    if fresh:
        _begin(g, tolerance, x, cost, size, age, leave, enter, crossing)
    done = 0
    while done < steps:
        _, i, j = best_exchange(g, crossing, x, leave, enter, 0.0, stack)
        if i < 0:
            if fresh:
                break
            _begin(g, tolerance, x, cost, size, age, leave, enter, crossing)
            fresh = True
            continue
        take_out(leave, i)
        take_out(enter, j)
        if upwards:
            gone(crossing, i)
            gone(crossing, j)
        x[i], x[j] = False, True
        for v, sign in ((i, -2.0), (j, 2.0)):
            for p in range(g.indptr[v], g.indptr[v + 1]):
                u = g.indices[p]
                age[u] += 1
                if age[u] > 2 * REFRESH:
                    _sum(g, x, u, cost, size, age)
                else:
                    cost[u] += sign * g.data[p]
                    size[u] += 2.0 * abs(g.data[p])
                if leave.place[u] < 0:  # i or j
                    continue
                before = key_of(x, leave.place, leave.keys, enter.keys, u) if upwards else 0.0
                if x[u]:
                    change(leave, u, tolerance * size[u] - cost[u])
                else:
                    change(enter, u, tolerance * size[u] + cost[u])
                if upwards:
                    note_key(g, crossing, x, leave, enter, u, before)
        push(leave, j, tolerance * size[j] - cost[j])
        if upwards:
            entered(g, crossing, x, leave, enter, j)
        push(enter, i, tolerance * size[i] + cost[i])
        if upwards:
            entered(g, crossing, x, leave, enter, i)
        done += 1
        fresh = False
    return done


@inlined
def _begin(g, tolerance, x, cost, size, age, leave, enter, crossing):
    leave.held[0] = enter.held[0] = 0
    for v in range(len(x)):
        _sum(g, x, v, cost, size, age)
        if x[v]:
            put(leave, v, tolerance * size[v] - cost[v])
        else:
            put(enter, v, tolerance * size[v] + cost[v])
    arrange(leave)
    arrange(enter)
    if len(crossing.bound) > 0:
        begin(g, crossing, x, leave, enter)


@inlined
def _sum(g, x, v, cost, size, age):
    total, held = 0.0, abs(g.nodes[v])
    for p in range(g.indptr[v], g.indptr[v + 1]):
        if x[g.indices[p]]:
            total += g.data[p]
            held += 2.0 * abs(g.data[p])
    cost[v], size[v], age[v] = g.nodes[v] + 2.0 * total, held, 0
