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
    items: Any
    place: Any
    rank: Any
    held: Any


#: numba's type of one.
HEAP = types.NamedTuple((f8[::1], i4[::1], i4[::1], i4[::1], i8[::1]), Heap)


def new_heap(place: Any, rank: Any) -> Heap:
    """An empty heap for the vertices of `place`, (n,) int32; `rank` as long, or empty."""
    return Heap(np.empty(len(place)), np.empty(len(place), np.int32), place, rank, np.zeros(1, np.int64))


@part
def before(heap, key, item, at):
    """Whether an entry comes before the one at a place."""
    if key != heap.keys[at]:
        return key < heap.keys[at]
    if len(heap.rank) == 0:
        return item < heap.items[at]
    return heap.rank[item] < heap.rank[heap.items[at]]


@part
def write(heap, at, key, item):
    """Write an entry to a place."""
    heap.keys[at], heap.items[at], heap.place[item] = key, item, at


@part
def up(heap, at):
    """Move an entry up to where it belongs; return where."""
    key, item = heap.keys[at], heap.items[at]
    while at > 0:
        above = (at - 1) >> 2
        if not before(heap, key, item, above):
            break
        write(heap, at, heap.keys[above], heap.items[above])
        at = above
    write(heap, at, key, item)
    return at


@part
def down(heap, at):
    """Move an entry down to where it belongs."""
    size, key, item = heap.held[0], heap.keys[at], heap.items[at]
    while True:
        first = 4 * at + 1
        if first >= size:
            break
        least = first
        for child in range(first + 1, min(first + 4, size)):
            if before(heap, heap.keys[child], heap.items[child], least):
                least = child
        if before(heap, key, item, least):
            break
        write(heap, at, heap.keys[least], heap.items[least])
        at = least
    write(heap, at, key, item)


@part
def put(heap, item, key):
    """Append a vertex; `arrange` makes a heap of all of them."""
    write(heap, heap.held[0], key, item)
    heap.held[0] += 1


@part
def arrange(heap):
    """Make a heap of entries in any order."""
    for at in range((heap.held[0] - 2) >> 2, -1, -1):
        down(heap, at)


@part
def push(heap, item, key):
    """Add a vertex."""
    put(heap, item, key)
    up(heap, heap.held[0] - 1)


@part
def take_out(heap, item):
    """Remove a vertex."""
    at, last = heap.place[item], heap.held[0] - 1
    heap.held[0] = last
    heap.place[item] = -1
    if at != last:
        write(heap, at, heap.keys[last], heap.items[last])
        down(heap, up(heap, at))


@part
def change(heap, item, key):
    """Give a vertex another key."""
    at = heap.place[item]
    earlier = key < heap.keys[at]
    heap.keys[at] = key
    if earlier:
        up(heap, at)
    else:
        down(heap, at)
