"""W by its edges: greedy choices, exchanges, sums and bounds, in loops over edges; compiled for the CPU only.

Callers import `cpu` where they use it. `Graph` is what the loops take; `grace_opt.problem.sparse` makes one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .._shared.operation import Compiled, Operation, trial_of

OPERATION = Operation(
    "sparse",
    "greedy, exchanges and bounds over the edges of a sparse W",
    reference=False,
    cpu=Compiled("always", trial_of(__name__, "cpu")),
)


class Graph(NamedTuple):
    """W by rows, as compiled loops take it.

    Attributes
    ----------
    indptr : (n + 1,) int64
        Where each row's edges begin.
    indices : (edges,) int32
        The other end of each edge, ascending in each row; every edge is in two rows.
    data : (edges,) float64
        W_ij, none of them 0.
    nodes : (n,) float64
        The diagonal.
    """

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[Any]
    data: npt.NDArray[np.float64]
    nodes: npt.NDArray[np.float64]
