"""The greedy loops of MIES and drop-greedy over edges, with a heap; f of every prefix of an order.

Every score is summed in the order of the dense loops, less the zeros: the choices are the same, bit for bit, where W
is float64. Loops run from one step to another, so that a limit can end them between. Complexity O((n + edges) log n).
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i8, types, void

from ...._shared.inner import prefetch
from ...._shared.jit import inlined, jit
from .heap import HEAP, arrange, change, put, take_out
from .sums import GRAPH

#: If a sum has shrunk by this factor, only a few digits of it are right: it is summed again.
DWARFING_RATIO = 2.0**36


@inlined
def prefetch_neighbours(g, heap, vertex):
    """Have a vertex's neighbours in the cache when their keys change: each is somewhere else in memory."""
    for p in range(g.indptr[vertex], g.indptr[vertex + 1]):
        prefetch(heap.place, g.indices[p])
    for p in range(g.indptr[vertex], g.indptr[vertex + 1]):
        prefetch(heap.keys, max(heap.place[g.indices[p]], 0))


@jit(ahead=[void(GRAPH, b1[::1], HEAP)])
def begin_add(g, free, heap):
    """Fill an empty heap with the scores of MIES's first step."""
    for v in range(len(free)):
        if free[v]:
            put(heap, v, g.nodes[v])
    arrange(heap)


@jit(ahead=[f8(GRAPH, HEAP, i8[::1], i8, i8, f8)])
def add(g, heap, taken, first, last, rise):
    """Fill `taken` from `first` to `last` with the vertices that MIES takes, in order; return `rise` plus scores.

    g : Graph; heap : Heap; taken : (k,) int64; first, last : int64; rise : float64
    """
    for step in range(first, last):
        vertex = heap.vertices[0]
        rise += heap.keys[0]
        taken[step] = vertex
        prefetch_neighbours(g, heap, vertex)
        take_out(heap, vertex)
        for p in range(g.indptr[vertex], g.indptr[vertex + 1]):
            other = g.indices[p]
            if heap.place[other] >= 0:
                change(heap, other, heap.keys[heap.place[other]] + 2.0 * g.data[p])
    return rise


@jit(ahead=[types.Tuple((f8, b1))(GRAPH, b1[::1], HEAP, f8[::1], f8[::1])])
def begin_drop(g, free, heap, held, rest):
    """Fill an empty heap with drop-greedy's first scores; return the least weight, and whether some may be dwarfed.

    held, rest (n,) : the size of what a score was summed from, and of what is left of it
    """
    grain, most = np.inf, 0.0
    for v in range(len(free)):
        if free[v]:
            put(heap, v, 0.0)
        if g.nodes[v] != 0.0:
            grain = min(grain, abs(g.nodes[v]))
    for p in range(len(g.data)):
        grain = min(grain, abs(g.data[p]))
    for position in range(heap.held[0]):
        heap.keys[position] = _leaving(g, heap.place, heap.vertices[position], held, rest)
        most = max(most, held[heap.vertices[position]])
    arrange(heap)
    return grain, most / DWARFING_RATIO > grain  # else no sum can shrink that far


@jit(ahead=[void(GRAPH, HEAP, f8[::1], f8[::1], f8, b1, i8[::1], i8, i8)])
def drop(g, heap, held, rest, grain, dwarfed, dropped, first, last):
    """Fill `dropped` from `first` to `last` with the vertices that drop-greedy drops, in order.

    g : Graph; heap : Heap; held, rest : (n,) float64, as `begin_drop` filled them; grain : float64; dwarfed : bool
    dropped : (n - k,) int64; first, last : int64
    """
    for step in range(first, last):
        vertex = heap.vertices[0]
        dropped[step] = vertex
        prefetch_neighbours(g, heap, vertex)
        take_out(heap, vertex)
        for p in range(g.indptr[vertex], g.indptr[vertex + 1]):
            other = g.indices[p]
            if heap.place[other] < 0:
                continue
            key = heap.keys[heap.place[other]] + 2.0 * g.data[p]
            if dwarfed:
                rest[other] -= abs(g.data[p])
                if held[other] / DWARFING_RATIO > max(rest[other], grain):
                    key = _leaving(g, heap.place, other, held, rest)
            change(heap, other, key)


@inlined
def _leaving(g, place, vertex, held, rest):
    """Return W_vv - 2 (W 1_C)_v with C the vertices left, summed from the first to the last."""
    own, passed, total, size = g.nodes[vertex], False, 0.0, 0.0
    for p in range(g.indptr[vertex], g.indptr[vertex + 1]):
        other = g.indices[p]
        if not passed and other > vertex:
            total, size, passed = total + own, size + abs(own), True
        if place[other] >= 0:
            total += g.data[p]
            size += abs(g.data[p])
    if not passed:
        total, size = total + own, size + abs(own)
    held[vertex] = rest[vertex] = size
    return own - 2.0 * total


@jit(ahead=[void(GRAPH, i8[::1], f8[::1])])
def path(g, taken, output):
    """Fill `output` (len(taken) + 1,) with f of the first vertices of an order, for every length."""
    sums = np.zeros(len(g.nodes))
    output[0] = 0.0
    for step in range(len(taken)):
        vertex = taken[step]
        output[step + 1] = output[step] + (g.nodes[vertex] + 2.0 * sums[vertex])
        for p in range(g.indptr[vertex], g.indptr[vertex + 1]):
            sums[g.indices[p]] += g.data[p]
