"""`check` recomputes f of every answer and rejects proofs that do not hold, before the answer is recorded.

A solver may state one objective and return the vertices of another, or claim a proof that its own bound contradicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
#: A time limit counts as kept within 10 % and this many seconds.
LIMIT_SLACK = 0.2


def check(W: Array, k: int, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer with f recomputed from its vertices, and its status corrected if it does not hold.

    Parameters
    ----------
    W : ndarray (n, n)
    k : int
    answer : dict
        What a solver returned: ``status``, ``indices``, ``claimed``, ``bound``, …

    Returns
    -------
    dict
        With ``objective`` (`math.fsum` over W in float64: one rounding, at the end) and ``tolerance``, within which two
        proved optima must agree.
    """
    trace = abs(float(np.trace(W)))
    indices = answer.get("indices")
    if indices is None:
        return {**answer, "objective": None, "tolerance": 1e-9 * trace}
    chosen = sorted({int(i) for i in indices})
    if len(chosen) != k or len(indices) != k or (chosen and not 0 <= chosen[0] <= chosen[-1] < len(W)):
        return {**answer, "status": "failed", "objective": None, "message": f"{len(chosen)} vertices where k = {k}"}
    inside = W[np.ix_(chosen, chosen)].astype(np.float64)
    f, size = math.fsum(inside.ravel().tolist()), float(np.abs(inside).sum())
    checked = {**answer, "indices": chosen, "objective": f, "tolerance": 1e-6 * abs(f) + 1e-9 * max(abs(f), trace)}
    claimed, bound = answer.get("claimed"), answer.get("bound")
    if claimed is not None and abs(claimed - f) > 1e-6 * abs(f) + 1e-9 * max(size, trace):
        checked["note"] = f"the solver said {claimed!r}, its vertices weigh {f!r}"
    if answer["status"] == "proved" and bound is not None and f - bound > _slack(W, f, trace):
        # Proved for the objective that the solver had in mind, not for the one that its vertices have.
        checked |= {"status": "limit", "message": f"called proved, but f - bound = {f - bound:.3g}"}
    return checked


def kept_limit(limit: float | None, seconds: float) -> bool:
    """Return whether a call kept its time limit; a failed call (NaN seconds) counts as kept."""
    return limit is None or not seconds > 1.1 * limit + LIMIT_SLACK


def spread(things: Sequence[Any], count: int | None) -> list[Any]:
    """Return `count` of the things, evenly spaced; all of them for None."""
    if count is None or count >= len(things):
        return list(things)
    return [things[round(i * (len(things) - 1) / max(count - 1, 1))] for i in range(count)]


def _slack(W: Array, f: float, trace: float) -> float:
    """Return how far f may be above a bound that proves it; solvers stop at 1e-9 or one step, and round."""
    step = 1.0 if np.issubdtype(W.dtype, np.integer) else 0.0
    return max(1e-6 * abs(f), 1e-8 * trace, step)
