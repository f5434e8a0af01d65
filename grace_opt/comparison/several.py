"""`several_solutions`: the best choice, then the best of those that differ enough from all found before, and so on.

Each is solved with one constraint more: of every choice found before, so many vertices at least are missing. A method
that proves each of them proves the list: no choice is better than the last one and differs enough from all.

Source: with a difference of 1, the m best choices, as by Murty (Operations Research 16, 1968), with rows in place of
a partition.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ..errors import InfeasibleConstraintsError
from ..problem.constraints import Row
from ..run import Progress
from ..solution import Solution, Status
from .sizes import LEAST_SECONDS


def several_solutions(
    count: int,
    min_difference: int,
    solve_one: Callable[..., Solution],
    *,
    time_limit: float | None,
    callback: Callable[[Progress], bool] | None,
) -> Solution:
    """Solve an instance `count` times, and return the best solution with the `others`, the best first.

    Parameters
    ----------
    count : int
        At least 1.
    min_difference : int
        How many vertices of each choice are missing in every other one, at least 1.
    solve_one : callable
        ``(rows, time_limit=, callback=) -> Solution`` of one instance under these constraints beside its own.
    time_limit : float or None
        Seconds, for all together: no further choice is sought after them.
    callback : callable or None
        As in `grace_opt.solve`; if it returns True, no further choice is sought.

    Raises
    ------
    InfeasibleConstraintsError
        If there is no choice at all. If there are fewer than `count`, all of them are returned.
    """
    began, rows, found, stopped = time.monotonic(), list[Row](), list[Solution](), False

    def told(progress: Progress) -> bool:
        nonlocal stopped
        stopped = stopped or (callback is not None and bool(callback(progress)))
        return stopped

    while len(found) < count and not stopped:
        share = None
        if time_limit is not None:
            left = time_limit - (time.monotonic() - began)
            if found and left <= 0:
                break
            share = max(left / (count - len(found)), LEAST_SECONDS)
        try:
            found.append(solve_one(tuple(rows), time_limit=share, callback=None if callback is None else told))
        except InfeasibleConstraintsError:
            if not found:
                raise
            break
        if found[-1].status is Status.INTERRUPTED:
            break
        rows.append(unlike(found[-1], len(found), min_difference))
    sign = -1.0 if found[0].maximize else 1.0
    best, *others = sorted(found, key=lambda one: sign * one.objective.item())
    return replace(best, others=tuple(others))


def unlike(solution: Solution, number: int, difference: int) -> Row:
    """Return the constraint that so many of a solution's vertices are missing."""
    chosen = tuple(vertex for vertex in solution.indices.reshape(-1).tolist() if vertex >= 0)
    words = f"at least {difference} not of solution {number}"
    return Row(words, chosen, (1,) * len(chosen), None, len(chosen) - difference)
