r"""The best exchange along an edge of positive weight, kept at hand while vertices move.

The change of f along an edge is ``leave[i] + enter[j] - 2 W_ij``: with W_ij > 0 it is less than the two costs tell, so
that any such edge between both sides might be the best. Each edge counts for that end which has more edges. A vertex
holds a lower bound of ``key - 2 W`` over the other ends of the edges that count for it, and a heap holds these bounds
plus the vertex's own key. When a key falls, the bounds that it is part of fall with it; when a key rises, they stay as
they are, too low, and are found again from the edges if they come first. So a key costs the number of its vertex's
edges, and usually none of its neighbours' is looked at. Source: Minoux (1978), lazy evaluation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import f8, types

from ...._shared.jit import inlined
from .heap import HEAP, Heap, arrange, change, new_heap, push, put, take_out


class Crossing(NamedTuple):
    """The heap, and the bounds (n,), those of vertices in the heap; empty if no weight is above 0."""

    heap: Heap
    bound: Any


#: numba's type of one.
CROSSING = types.NamedTuple((HEAP, f8[::1]), Crossing)


def new_crossing(rank: Any, n: int, most: float) -> Crossing:
    """Return an empty one, for n vertices; `most` is the largest weight, `rank` that of `new_heap`."""
    count = n if most > 0.0 else 0
    return Crossing(new_heap(np.full(count, -1, np.int32), rank), np.empty(count))


@inlined
def begin(g, crossing, x, leave, enter):
    """Find all bounds; the vertices are in their heaps."""
    for v in range(len(crossing.bound)):
        crossing.heap.place[v] = -1
    crossing.heap.held[0] = 0
    for v in range(len(crossing.bound)):
        if leave.place[v] >= 0:
            bound, u = _least(g, x, leave.place, leave.keys, enter.keys, leave.rank, v)
            if u >= 0:
                crossing.bound[v] = bound
                put(crossing.heap, v, key_of(x, leave.place, leave.keys, enter.keys, v) + bound)
    arrange(crossing.heap)


@inlined
def entered(g, crossing, x, leave, enter, v):
    """Take note of a vertex that was put into its heap."""
    bound, u = _least(g, x, leave.place, leave.keys, enter.keys, leave.rank, v)
    if u >= 0:
        crossing.bound[v] = bound
        push(crossing.heap, v, key_of(x, leave.place, leave.keys, enter.keys, v) + bound)
    _fell(g, crossing, x, leave.place, leave.keys, enter.keys, v)


@inlined
def gone(crossing, v):
    """Take note of a vertex that was taken out of its heap."""
    if crossing.heap.place[v] >= 0:
        take_out(crossing.heap, v)


@inlined
def note_key(g, crossing, x, leave, enter, v, before):
    """Take note that a vertex has another key in its heap than `before`."""
    key = key_of(x, leave.place, leave.keys, enter.keys, v)
    if crossing.heap.place[v] >= 0:
        change(crossing.heap, v, key + crossing.bound[v])
    if key < before:
        _fell(g, crossing, x, leave.place, leave.keys, enter.keys, v)


@inlined
def along_edge(g, crossing, x, leave, enter, best):
    """Return the least change of f along an edge of positive weight, if below `best`, and its vertices, or -1."""
    heap = crossing.heap
    while heap.held[0] > 0 and heap.keys[0] < best:
        v = heap.vertices[0]
        bound, u = _least(g, x, leave.place, leave.keys, enter.keys, leave.rank, v)
        if u < 0:
            take_out(heap, v)
        elif bound > crossing.bound[v]:
            crossing.bound[v] = bound
            change(heap, v, key_of(x, leave.place, leave.keys, enter.keys, v) + bound)
        elif x[v]:
            return heap.keys[0], v, u
        else:
            return heap.keys[0], u, v
    return best, -1, -1


@inlined
def key_of(x, place, out, into, v):
    """Return a vertex's key in its heap."""
    return out[place[v]] if x[v] else into[place[v]]


@inlined
def _least(g, x, place, out, into, rank, v):
    """Return the least ``key - 2 W`` over the edges that count for v, and the other end; -1: there are none.

    Of equals, the one of the least rank, or if there are no ranks, the first.
    """
    bound, vertex = np.inf, -1
    first, last = g.indptr[v], g.indptr[v + 1]
    for p in range(first, last):
        u = g.indices[p]
        if g.data[p] > 0.0 and x[u] != x[v] and place[u] >= 0:
            more = (last - first) - (g.indptr[u + 1] - g.indptr[u])
            if more > 0 or (more == 0 and v > u):
                one = key_of(x, place, out, into, u) - 2.0 * g.data[p]
                if one < bound or (one == bound and len(rank) > 0 and rank[u] < rank[vertex]):
                    bound, vertex = one, u
    return bound, vertex


@inlined
def _fell(g, crossing, x, place, out, into, v):
    """Lower the bounds that a vertex's key is part of."""
    key, bounds, places = key_of(x, place, out, into, v), crossing.bound, crossing.heap.place
    first, last = g.indptr[v], g.indptr[v + 1]
    for p in range(first, last):
        u = g.indices[p]
        if g.data[p] > 0.0 and x[u] != x[v] and place[u] >= 0:
            one, more = key - 2.0 * g.data[p], (g.indptr[u + 1] - g.indptr[u]) - (last - first)
            if (places[u] < 0 or one < bounds[u]) and (more > 0 or (more == 0 and u > v)):
                bounds[u] = one
                if places[u] < 0:
                    push(crossing.heap, u, key_of(x, place, out, into, u) + one)
                else:
                    change(crossing.heap, u, key_of(x, place, out, into, u) + one)
