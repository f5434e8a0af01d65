"""`TabuSearch`: the search of `cpu.tabu` on one sparse graph, some iterations at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .forms import Graph

#: Sets kept to combine at restarts.
ELITE_SETS = 8


class TabuSearch:
    """A tabu search that can be continued.

    Parameters
    ----------
    graph : Graph
        Of the candidates alone; k and n - k are at least 1.
    start : ndarray (n,), bool
    restart_after, tenure : int
    random : ndarray (1,), uint64
        State of the random numbers, not 0.
    """

    def __init__(
        self,
        graph: Graph,
        start: npt.NDArray[np.bool_],
        restart_after: int,
        tenure: int,
        random: npt.NDArray[np.uint64],
    ) -> None:
        from .cpu import tabu
        from .cpu.best_set import new_best_set
        from .cpu.crossing import new_crossing
        from .cpu.exchange import largest
        from .cpu.heap import new_heap
        from .cpu.sums import least_weight

        n, x = len(start), start.copy()
        top, cost, values, until = np.empty(n), np.empty(n), np.full(4, np.inf), np.zeros(n, np.int64)
        most, grain = largest(graph, top), least_weight(graph)
        place, rank = np.full(n, -1, np.int32), np.empty(n, np.int32)
        heaps = new_heap(place, rank), new_heap(place, rank), new_heap(place.copy(), rank)
        moving = *heaps, new_crossing(rank, n, most)
        size = tabu.start(graph, x, cost, *moving, values, random)
        values[1:] = values[0]
        self.graph, self.values = graph, values
        self.best, self.sure = new_best_set(x), x.copy()
        sets = self.best, self.sure, new_best_set(x)
        elites = np.zeros((ELITE_SETS, n), bool), np.zeros(ELITE_SETS), np.zeros(4, np.int64)
        self._before = graph, top, most, grain, int(start.sum()), x, cost, until, *moving, *sets, values
        self._sizes = np.array([size])
        self._after = restart_after, tenure, n + len(graph.data)
        self._elites, self._random = elites, random

    def advance(self, count: int) -> None:
        """Search for `count` iterations."""
        from .cpu.tabu import run

        run(*self._before, self._sizes, *self._elites, self._random, count, *self._after)

    @property
    def value(self) -> float:
        """The best set's f so far, which rounding may have changed a little."""
        return float(self.values[1])

    def settle(self) -> npt.NDArray[np.bool_]:
        """Return the best set so far, after its f was summed exactly: never worse than the start."""
        from .cpu.best_set import settle

        settle(self.graph, self.best, self.sure, self.values)
        return self.sure
