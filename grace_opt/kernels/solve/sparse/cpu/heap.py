"""A heap of vertices that can be changed anywhere: the least key first, the least rank among equal keys.

Four children to a node, and keys beside the vertices: a step down reads one or two cache lines. When: greedy choices
and exchanges in sparse graphs. Source: Johnson (1975), d-heaps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import f8, i4, i8, types

from ...._shared.jit import inlined


class Heap(NamedTuple):
    """Keys and vertices in heap order; the place of each vertex (-1: none); its rank; the number of entries (1,).

    Without ranks (length 0), the lowest index comes first among equal keys. Several heaps may share `place` if
    no vertex is in two of them.
    """

    keys: Any
    vertices: Any
    place: Any
    rank: Any
    held: Any


#: numba's type of one.
HEAP = types.NamedTuple((f8[::1], i4[::1], i4[::1], i4[::1], i8[::1]), Heap)


def new_heap(place: Any, rank: Any) -> Heap:
    """An empty heap for the vertices of `place`, (n,) int32; `rank` as long, or empty."""
    return Heap(np.empty(len(place)), np.empty(len(place), np.int32), place, rank, np.zeros(1, np.int64))


@inlined
def before(heap, key, vertex, position):
    """Return whether an entry comes before the one at a place."""
    if key != heap.keys[position]:
        return key < heap.keys[position]
    if len(heap.rank) == 0:
        return vertex < heap.vertices[position]
    return heap.rank[vertex] < heap.rank[heap.vertices[position]]


@inlined
def write(heap, position, key, vertex):
    """Write an entry to a place."""
    heap.keys[position], heap.vertices[position], heap.place[vertex] = key, vertex, position


@inlined
def up(heap, position):
    """Move an entry up to where it belongs; return where."""
    key, vertex = heap.keys[position], heap.vertices[position]
    while position > 0:
        above = (position - 1) >> 2
        if not before(heap, key, vertex, above):
            break
        write(heap, position, heap.keys[above], heap.vertices[above])
        position = above
    write(heap, position, key, vertex)
    return position


@inlined
def down(heap, position):
    """Move an entry down to where it belongs."""
    size, key, vertex = heap.held[0], heap.keys[position], heap.vertices[position]
    while True:
        first = 4 * position + 1
        if first >= size:
            break
        least = first
        for child in range(first + 1, min(first + 4, size)):
            if before(heap, heap.keys[child], heap.vertices[child], least):
                least = child
        if before(heap, key, vertex, least):
            break
        write(heap, position, heap.keys[least], heap.vertices[least])
        position = least
    write(heap, position, key, vertex)


@inlined
def put(heap, vertex, key):
    """Append a vertex; `arrange` makes a heap of all of them."""
    write(heap, heap.held[0], key, vertex)
    heap.held[0] += 1


@inlined
def arrange(heap):
    """Make a heap of entries in any order."""
    for position in range((heap.held[0] - 2) >> 2, -1, -1):
        down(heap, position)


@inlined
def push(heap, vertex, key):
    """Add a vertex."""
    put(heap, vertex, key)
    up(heap, heap.held[0] - 1)


@inlined
def take_out(heap, vertex):
    """Remove a vertex."""
    position, last = heap.place[vertex], heap.held[0] - 1
    heap.held[0] = last
    heap.place[vertex] = -1
    if position != last:
        write(heap, position, heap.keys[last], heap.vertices[last])
        down(heap, up(heap, position))


@inlined
def change(heap, vertex, key):
    """Give a vertex another key."""
    position = heap.place[vertex]
    earlier = key < heap.keys[position]
    heap.keys[position] = key
    if earlier:
        up(heap, position)
    else:
        down(heap, position)
