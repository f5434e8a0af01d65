"""A heap of vertices that can be changed anywhere: the least key first, the least rank among equal keys.

Four children to a node, and keys beside the vertices: a step down reads one or two cache lines. When: greedy choices
and exchanges in sparse graphs. Source: Johnson (1975), d-heaps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import f8, i4, i8, types

from ...._shared.jit import part


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


@part
def before(heap, key, vertex, at):
    """Whether an entry comes before the one at a place."""
    if key != heap.keys[at]:
        return key < heap.keys[at]
    if len(heap.rank) == 0:
        return vertex < heap.vertices[at]
    return heap.rank[vertex] < heap.rank[heap.vertices[at]]


@part
def write(heap, at, key, vertex):
    """Write an entry to a place."""
    heap.keys[at], heap.vertices[at], heap.place[vertex] = key, vertex, at


@part
def up(heap, at):
    """Move an entry up to where it belongs; return where."""
    key, vertex = heap.keys[at], heap.vertices[at]
    while at > 0:
        above = (at - 1) >> 2
        if not before(heap, key, vertex, above):
            break
        write(heap, at, heap.keys[above], heap.vertices[above])
        at = above
    write(heap, at, key, vertex)
    return at


@part
def down(heap, at):
    """Move an entry down to where it belongs."""
    size, key, vertex = heap.held[0], heap.keys[at], heap.vertices[at]
    while True:
        first = 4 * at + 1
        if first >= size:
            break
        least = first
        for child in range(first + 1, min(first + 4, size)):
            if before(heap, heap.keys[child], heap.vertices[child], least):
                least = child
        if before(heap, key, vertex, least):
            break
        write(heap, at, heap.keys[least], heap.vertices[least])
        at = least
    write(heap, at, key, vertex)


@part
def put(heap, vertex, key):
    """Append a vertex; `arrange` makes a heap of all of them."""
    write(heap, heap.held[0], key, vertex)
    heap.held[0] += 1


@part
def arrange(heap):
    """Make a heap of entries in any order."""
    for at in range((heap.held[0] - 2) >> 2, -1, -1):
        down(heap, at)


@part
def push(heap, vertex, key):
    """Add a vertex."""
    put(heap, vertex, key)
    up(heap, heap.held[0] - 1)


@part
def take_out(heap, vertex):
    """Remove a vertex."""
    at, last = heap.place[vertex], heap.held[0] - 1
    heap.held[0] = last
    heap.place[vertex] = -1
    if at != last:
        write(heap, at, heap.keys[last], heap.vertices[last])
        down(heap, up(heap, at))


@part
def change(heap, vertex, key):
    """Give a vertex another key."""
    at = heap.place[vertex]
    earlier = key < heap.keys[at]
    heap.keys[at] = key
    if earlier:
        up(heap, at)
    else:
        down(heap, at)
