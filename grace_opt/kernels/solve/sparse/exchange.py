"""`Exchanges`: the local search of `cpu.exchange` on one sparse graph, some steps at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..exchange.rounding import tolerance
from .forms import Graph


class Exchanges:
    """A local search that can be continued.

    Parameters
    ----------
    graph : Graph
        Of the candidates alone.
    x : ndarray (n,), bool
        Where to start; changed in place.
    """

    def __init__(self, graph: Graph, x: npt.NDArray[np.bool_]) -> None:
        from .cpu.crossing import new_crossing
        from .cpu.heap import new_heap

        n = len(x)
        self.graph, self.x = graph, x
        self.tolerance = tolerance(int(np.diff(graph.indptr).max(initial=0)))
        place, none = np.full(n, -1, np.int32), np.empty(0, np.int32)
        self.leave, self.enter = new_heap(place, none), new_heap(place, none)
        self.crossing = new_crossing(none, n, float(graph.data.max(initial=0.0)))
        self.cost, self.size, self.age = np.empty(n), np.empty(n), np.full(n, -1, np.int64)

    def improve(self, steps: int) -> int:
        """Make up to `steps` exchanges, the best each time; return how many. Fewer: no exchange improves f."""
        from .cpu.exchange import improve

        sums = self.cost, self.size, self.age, self.leave, self.enter
        return int(improve(self.graph, self.tolerance, self.x, *sums, self.crossing, steps))
