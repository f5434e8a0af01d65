"""`best_of_sizes`: one instance for every size of a range, ``k=(low, high)``, and the best of the answers.

Sizes are solved one after the other, each with its share of the time that is left. f of the best answer so far cuts the
others off: a method that reports bounds is stopped as soon as its bound is no better. No choice of any size is better
than the worst of the bounds, so that is the bound of the answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..errors import InfeasibleConstraintsError
from ..run import Progress
from ..solution import Solution, Status, proved, relative_gap

#: Least share of a time limit: the first choice of a size is made anyway.
LEAST_SECONDS = 1e-3


@dataclass
class _Callback:
    """The user's callback, which also stops a size that can have no better choice than the best one known.

    The user sees the best choice of all sizes so far. A bound for all is not known before the last one is solved: until
    then, it is infinite.
    """

    call: Callable[[Progress], Any] | None
    maximize: bool
    best: Solution | None = None
    least: float = math.inf  # of the bounds of the sizes before
    is_last: bool = False
    stopped: bool = False

    @property
    def value(self) -> float:
        """f of the best choice, to be minimised."""
        return math.inf if self.best is None else self.signed(self.best.objective)

    def signed(self, value: Any) -> float:
        """An objective or a bound as one to be minimised."""
        return -float(value) if self.maximize else float(value)

    def __call__(self, progress: Progress) -> bool:
        """Return whether to stop this size."""
        bound = self.signed(progress.upper_bound if self.maximize else progress.lower_bound)
        if self.call is not None:
            self.stopped = self.stopped or bool(self.call(self._of_all(progress, bound)))
        return self.stopped or bound >= self.value

    def _of_all(self, progress: Progress, bound: float) -> Progress:
        least = min(bound, self.least, self.value) if self.is_last else -math.inf
        if self.best is not None and self.value <= self.signed(progress.objective):
            mask = np.asarray(self.best.mask.cpu() if isinstance(self.best.mask, torch.Tensor) else self.best.mask)
            progress = replace(progress, objective=float(self.best.objective), mask=mask.reshape(progress.mask.shape))
        f = progress.objective
        ends = (f, 0.0 - least) if self.maximize else (least, f)
        return replace(progress, lower_bound=ends[0], upper_bound=ends[1])


def best_of_sizes(
    sizes: Sequence[int],
    solve_one: Callable[..., Solution],
    *,
    maximize: bool,
    time_limit: float | None,
    target: float | None,
    callback: Callable[[Progress], Any] | None,
) -> Solution:
    """Solve an instance for every size, and return the best answer with a bound for all sizes.

    Parameters
    ----------
    sizes : sequence of int
    solve_one : callable
        ``(k, time_limit=, callback=) -> Solution`` of one instance.
    maximize : bool
    time_limit : float or None
        Seconds, for all sizes together.
    target : float or None
        Sizes that are left are not solved once f is this good.
    callback : callable or None
        As in `grace_opt.solve`; if it returns True, no further size is solved.

    Raises
    ------
    InfeasibleConstraintsError
        If no choice of any size keeps the constraints: that of the last size.
    """
    began, sign = time.monotonic(), -1.0 if maximize else 1.0
    call, found, left, error = _Callback(callback, maximize), list[Solution](), list(sizes), None
    while left and not call.stopped:
        share = None
        if time_limit is not None:
            seconds = time_limit - (time.monotonic() - began)
            if found and seconds <= 0:
                break
            share = max(seconds / len(left), LEAST_SECONDS)
        k = left.pop(0)
        call.is_last = not left
        try:
            found.append(solve_one(k, time_limit=share, callback=call))
        except InfeasibleConstraintsError as this:
            error = this
            continue
        call.least = min(call.least, call.signed(found[-1].bound))
        if call.signed(found[-1].objective) < call.value:
            call.best = found[-1]
        reached = target is not None and call.value <= sign * target
        if reached or found[-1].status is Status.INTERRUPTED:
            break
    if not found:
        raise error or InfeasibleConstraintsError("there is no size to choose.")
    bounds = [sign * float(one.bound) for one in found] + [-math.inf] * len(left)
    best = min(found, key=lambda one: sign * float(one.objective))
    open_ = [one.status for one, bound in zip(found, bounds, strict=False) if bound < call.value]
    if left and target is None:
        open_.append(Status.LIMIT)
    return _bounded(best, min(bounds), open_, time.monotonic() - began)


def _bounded(best: Solution, least: float, open_: list[Status], seconds: float) -> Solution:
    """The best answer, with a bound for all sizes, and what that proves; `open_` are sizes that it leaves open."""
    problem, sign = best.problem, -1.0 if best.maximize else 1.0
    assert problem is not None
    flat, export = problem.flatten(), problem.backend.export
    mask = torch.as_tensor(best.mask, device=flat.k.device).reshape(1, -1)
    value = torch.tensor([sign * float(best.objective)], dtype=torch.float64, device=flat.k.device)
    bound = torch.full_like(value, least).minimum(value)
    optimal = proved(flat, mask, value, bound)
    if problem.integer:
        bound = torch.where(optimal, value, bound)
    worst = [status for status in (Status.INTERRUPTED, Status.LIMIT) if status in open_]
    status = Status.OPTIMAL if bool(optimal) else (*worst, Status.FEASIBLE)[0]
    certified = export((sign * bound + 0.0).reshape(()))
    return replace(
        best,
        lower_bound=best.objective if best.maximize else certified,
        upper_bound=certified if best.maximize else best.objective,
        gap=export(relative_gap(flat, mask, value, bound).reshape(())),
        status=status,
        stats={**best.stats, "time": seconds},
    )
