"""Greedy orders of a sparse W: the loops of `cpu.greedy`, from tensors to tensors.

When: `mies` and `drop_greedy`, for a problem whose W is sparse, a batch of one. The choices are those of the dense
loops on the same W. Once time is up, the vertices of the least scores complete the order at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .forms import Graph

if TYPE_CHECKING:
    from .cpu.heap import Heap

#: Vertices and edges that a slice goes through between two looks at the clock: some hundredths of a second.
SLICE = 200_000


def added(graph: Graph, candidates: Tensor, count: int, expired: Callable[[], bool]) -> tuple[Tensor, float, bool]:
    """Return the first `count` vertices that MIES takes, (1, count) int64, f of them, and whether it was cut.

    candidates : Tensor (1, n), bool

    If it was cut, f is that of the vertices before.
    """
    from .cpu import greedy

    order, rise, heap = np.empty(count, np.int64), 0.0, _heap(len(graph.nodes))
    greedy.begin_add(graph, np.ascontiguousarray(candidates[0].numpy()), heap)
    for first, last in _slices(graph, count):
        if expired():
            _complete(order, first, heap)
            return torch.from_numpy(order)[None], rise, True
        rise = float(greedy.add(graph, heap, order, first, last, rise))
    return torch.from_numpy(order)[None], rise, False


def dropped_at_once(scores: Tensor, candidates: Tensor, count: int) -> Tensor:
    """Return the `count` candidates of the least scores in any order, (1, count) int64: `dropped`, cut at once.

    scores : Tensor (1, n), float64
    """
    free = np.flatnonzero(candidates[0].numpy())
    return torch.from_numpy(free[least(scores[0].numpy()[free], free, count)])[None]


def dropped(graph: Graph, candidates: Tensor, count: int, expired: Callable[[], bool]) -> tuple[Tensor, bool]:
    """Return the first `count` vertices that drop-greedy drops, (1, count) int64, and whether it was cut."""
    from .cpu import greedy

    order, heap, (held, rest) = np.empty(count, np.int64), _heap(len(graph.nodes)), np.empty((2, len(graph.nodes)))
    grain, dwarfed = greedy.begin_drop(graph, np.ascontiguousarray(candidates[0].numpy()), heap, held, rest)
    for first, last in _slices(graph, count):
        if expired():
            _complete(order, first, heap)
            return torch.from_numpy(order)[None], True
        greedy.drop(graph, heap, held, rest, grain, dwarfed, order, first, last)
    return torch.from_numpy(order)[None], False


def _heap(n: int) -> Heap:
    """An empty heap in which the lowest index comes first among equal keys."""
    from .cpu.heap import new_heap

    return new_heap(np.full(n, -1, np.int32), np.empty(0, np.int32))


def _slices(graph: Graph, count: int) -> list[tuple[int, int]]:
    steps = max(1, SLICE * len(graph.nodes) // (len(graph.nodes) + len(graph.data)))
    return [(first, min(first + steps, count)) for first in range(0, count, steps)]


def _complete(order: npt.NDArray[np.int64], first: int, heap: Heap) -> None:
    """Fill the rest of an order with the vertices of the least keys."""
    keys, vertices = heap.keys[: int(heap.held[0])], heap.vertices[: int(heap.held[0])]
    places = least(keys, vertices, len(order) - first)
    places = places[np.lexsort((vertices[places], keys[places]))]
    order[first:] = vertices[places]


def least(keys: npt.NDArray[np.float64], vertices: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Return the places of the least keys, of equals those of the lowest vertices; in any order, O(n)."""
    if count == 0:
        return np.empty(0, np.int64)
    last = np.partition(keys, count - 1)[count - 1]
    below, equal = np.flatnonzero(keys < last), np.flatnonzero(keys == last)
    return np.concatenate([below, equal[np.argsort(vertices[equal])][: count - len(below)]])


def path_of(graph: Graph, order: Tensor) -> Tensor:
    """Return f of the first j vertices of an order, (1, n + 1) float64; infinite beyond the order's end.

    order : Tensor (1, m), int64
    """
    from .cpu import greedy

    values = np.full(len(graph.nodes) + 1, np.inf)
    greedy.path(graph, order[0].numpy(), values[: order.shape[-1] + 1])
    return torch.from_numpy(values)[None]
