"""`Graph`: W by rows, as the compiled loops take it; `grace_opt.problem.sparse` makes one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


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
