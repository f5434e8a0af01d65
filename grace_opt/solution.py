"""`Status`, `SolverResult` and `Solution`: what a solver returns, and what a user gets.

A solver returns a `SolverResult` (a mask, and a lower bound if it has one). `solve` turns it into a `Solution`, with
the objective in float64, the certified bound, the gap and the status; a `Solution` can verify itself.
"""

from __future__ import annotations

import enum
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._util.arrays import count_true
from ._util.json_values import to_json_text, to_jsonable
from .errors import SolverError
from .problem import Problem
from .problem.steps import largest_power_of_two

#: f - bound at most this times |f| counts as proved.
OPTIMALITY_RTOL = 1e-9
#: If f nearly cancels, a bound's sums are off by about this times n·eps·Σ|W_ij| over the chosen entries.
ROUNDING = 64.0
#: If |f| is less than this times Σ|W_ij| over the chosen entries, gaps are relative to that product instead.
GAP_FLOOR = 1e-9
#: Up to so many units, float64 has every multiple and every half.
MAX_INTEGER_WITH_HALVES = 2.0**52
#: A bound within one step of a whole-number f proves it, less this share of the step.
STEP_MARGIN = 1e-6
_EPS = torch.finfo(torch.float64).eps
#: How far a bound may lie above f, relative to it: the last digits of both.
LAST_DIGITS = 8 * _EPS


class Status(enum.Enum):
    """Certainty of one instance's answer; the value explains it in words.

    OPTIMAL takes objective and bound for equal within 1e-9 of ``|objective|``, or within its rounding if that is more.
    Integers: within less than a step, such as 1 (`Problem.step`), and beyond 2⁵² units exactly.
    """

    OPTIMAL = "proved optimal: the objective equals its certified bound, up to rounding"
    FEASIBLE = "a valid choice; optimality is not proved"
    LIMIT = "stopped at a time or work limit with the best choice so far"
    INTERRUPTED = "stopped by Ctrl-C with the best choice so far"


@dataclass(frozen=True)
class SolverResult:
    """Result of a solver, before `solve` has checked it.

    Attributes
    ----------
    mask : Tensor (..., n), bool
        Exactly k True per instance, none of them protected; all constraints hold.
    lower_bound : Tensor (...), float64, optional
        A certified bound, if the solver found one.
    limit : Tensor (...), bool, optional
        Instances that a time or work limit cut short.
    stats : mapping
        Counters to show: iterations, nodes, …; a tensor has one entry (row, …) per instance.
    objective : Tensor (...), float64, optional
        f, if a batched method knows it, rounded as sums in W's own precision are. With ``check=False`` it is taken as
        it is; otherwise f is always summed from W in float64.
    certified : str, optional
        The level of `grace_opt.bounds.certificate` that `lower_bound` holds already: `solve` need not compute it again.
    objective_stats : tuple of str
        Names of the stats that are values of f: a tensor, or a list with one entry (or None) per instance. With
        ``maximize=True`` and ``required=``, solvers minimise -f of the vertices that are left; `solve` turns these
        back, as it does `mask`, `lower_bound` and `objective`.
    """

    mask: Tensor
    lower_bound: Tensor | None = None
    limit: Tensor | None = None
    stats: Mapping[str, Any] = field(default_factory=dict)
    objective: Tensor | None = None
    certified: str | None = None
    objective_stats: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Solution:
    """The answer to `solve`, with one entry per instance; arrays are numpy or torch, as W was.

    Attributes
    ----------
    mask : array (..., n), bool
        True = chosen; the other attributes follow from it.
    indices : array (..., k_max), int64
        Sorted chosen vertices, padded with -1 where an instance's k is smaller.
    objective : array (...), float64
        f(S).
    lower_bound, upper_bound : array (...), float64
        The optimum lies between them. One is the objective of this choice, the other is certified (`bound`): the lower
        one, no choice of k vertices has a smaller objective; with ``maximize=True`` the upper one, none has a larger
        one. -inf, or inf, if nothing was certified.
    gap : array (...), float64
        ``|objective - bound| / max(|objective|, 1e-9 Σ|W_ij|)``, with the sum over the chosen entries; never negative,
        infinite if nothing was certified.
    status : Status, or object array (...) of Status
    method, options, seed
        As given to `solve`.
    stats : mapping
        ``time`` in seconds, and the solver's counters.
    labels : list or None
        For a networkx graph or a DataFrame, the chosen nodes or labels; of a batch with labels, a list per instance.
    maximize : bool
        Whether the most was sought; objective and bounds are those of f, as given, in either case.
    required : array (..., n), bool, or None
        The vertices that had to be chosen.
    problem : Problem or None
        What was solved; `verify` needs it.
    others : tuple of Solution
        With ``solutions=``: different choices, the best first.

    Examples
    --------
    >>> import grace_opt
    >>> grace_opt.solve([[2.0, 0.0], [0.0, 1.0]], 1)
    <Solution by mies: f = 1, no bound, FEASIBLE, vertices [1]>
    >>> grace_opt.solve([[[2.0, 0.0], [0.0, 1.0]]] * 3, 1, "exhaustive")
    <Solution of 3 instances by exhaustive: 3 OPTIMAL>
    """

    mask: Any
    indices: Any
    objective: Any
    lower_bound: Any
    gap: Any
    status: Any
    method: str
    options: Mapping[str, Any]
    seed: int
    stats: Mapping[str, Any]
    upper_bound: Any
    labels: list[Any] | None = None
    maximize: bool = False
    required: Any = None
    problem: Problem | None = field(default=None, repr=False)
    others: tuple[Solution, ...] = ()

    def __repr__(self) -> str:
        if getattr(self.objective, "ndim", 0):
            best = ", ".join(f"{count} {name}" for name, count in Counter(s.name for s in self.status.flat).items())
            return f"<Solution of {self.status.size} instances by {self.method}: {best}>"
        f, gap = float(self.objective), float(self.gap)
        certified = f"gap {gap:.3g}" if math.isfinite(gap) else "no bound"
        sought = " (maximised)" if self.maximize else ""
        chosen = self.indices.tolist() if self.labels is None else self.labels
        listed = str(chosen[:20])[:-1] + (", …]" if len(chosen) > 20 else "]")
        more = f", {len(self.others)} others" if self.others else ""
        found = f"f = {f:.9g}{sought}, {certified}, {self.status.name}, vertices {listed}{more}"
        return f"<Solution by {self.method}: {found}>"

    @property
    def bound(self) -> Any:
        """The certified bound, shape (...): `upper_bound` with ``maximize=True``, else `lower_bound`.

        Examples
        --------
        >>> import grace_opt
        >>> sol = grace_opt.solve([[2.0, 0.0], [0.0, 1.0]], 1, "exhaustive", maximize=True)
        >>> float(sol.objective), float(sol.bound), float(sol.gap)
        (2.0, 2.0, 0.0)
        """
        return self.upper_bound if self.maximize else self.lower_bound

    @property
    def x(self) -> Any:
        """The 0/1 vector of the choice, (..., n) float64, by scipy's name: `fun` is ``x @ W @ x``.

        Examples
        --------
        >>> import grace_opt
        >>> sol = grace_opt.solve([[2.0, 0.0], [0.0, 1.0]], 1, "exhaustive")
        >>> sol.x.tolist(), float(sol.fun), sol.success
        ([0.0, 1.0], 1.0, True)
        >>> sol.message
        'proved optimal: the objective equals its certified bound, up to rounding'
        """
        return self.mask.double() if isinstance(self.mask, Tensor) else np.asarray(self.mask, dtype=np.float64)

    @property
    def fun(self) -> Any:
        """`objective`, by scipy's name."""
        return self.objective

    @property
    def success(self) -> Any:
        """True if the method came to its end, (...) bool, by scipy's name: neither a limit nor Ctrl-C stopped it."""
        return self._by_status(lambda status: status in (Status.OPTIMAL, Status.FEASIBLE), np.bool_)

    @property
    def message(self) -> Any:
        """`status` in words, (...) str, by scipy's name."""
        return self._by_status(lambda status: status.value, object)

    def _by_status(self, value: Callable[[Status], Any], kind: type) -> Any:
        if isinstance(self.status, Status):
            return value(self.status)
        return np.vectorize(value, otypes=[kind])(self.status)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as numbers, strings and lists; None for what is infinite or not known. `mask` is left out.

        Examples
        --------
        >>> import grace_opt
        >>> sol = grace_opt.solve([[2.0, 0.0], [0.0, 1.0]], 1)
        >>> sol.to_dict()["indices"], sol.to_dict()["lower_bound"], sol.to_dict()["status"]
        ([1], None, 'FEASIBLE')
        """
        statuses = np.asarray(self.status, dtype=object)
        others = {"others": [other.to_dict() for other in self.others]} if self.others else {}
        return {
            "method": self.method,
            "options": to_jsonable(dict(self.options)),
            "seed": self.seed,
            "maximize": self.maximize,
            "indices": to_jsonable(self.indices),
            "labels": to_jsonable(self.labels),
            "objective": to_jsonable(self.objective),
            "lower_bound": to_jsonable(self.lower_bound),
            "upper_bound": to_jsonable(self.upper_bound),
            "gap": to_jsonable(self.gap),
            "status": np.vectorize(lambda status: status.name, otypes=[object])(statuses).tolist(),
            "stats": to_jsonable(dict(self.stats)),
            **others,
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """`to_dict` as JSON text, also written to `path`, atomically, if given.

        Raises
        ------
        FileError
            If the file cannot be written there.

        Examples
        --------
        >>> import json, grace_opt
        >>> json.loads(grace_opt.solve([[2.0, 0.0], [0.0, 1.0]], 1).to_json())["objective"]
        1.0
        """
        return to_json_text(self.to_dict(), path)

    def verify(self) -> Solution:
        """Check size, required and protected vertices, constraints, objective and bound, with W in float64; return it.

        Raises
        ------
        SolverError
            If the size is not k, a protected vertex is chosen or a required one is not, a constraint does not hold, or
            f differs from the recomputed one by more than 1e-9 (float32 W: 1e-5) relative to ``Σ|W_ij|`` over the
            chosen entries, or lies outside its own bounds; or if one of these numbers is NaN.
        """
        if self.problem is None:
            raise SolverError("this Solution has no problem to verify against: call solve(...) to get one that has.")
        p, mask = self.problem, torch.as_tensor(self.mask, device=self.problem.k.device)
        check_mask(p, mask, self.method)
        if self.required is not None and bool((torch.as_tensor(self.required, device=mask.device) & ~mask).any()):
            raise SolverError(f"{self.method} did not choose all required vertices.")
        # Without the checks, f was summed in W's own precision.
        rtol = 1e-9 if p.weights.dtype == torch.float64 else 1e-5
        weights = p.weights.reshape(*p.weights.shape)  # which remembers no sum
        exact, size = weights.objective(mask), weights.magnitude(mask)
        stored = torch.as_tensor(self.objective, dtype=torch.float64, device=exact.device)
        bound = torch.as_tensor(self.bound, dtype=torch.float64, device=exact.device)
        if not bool(((stored - exact).abs() <= rtol * size).all()):  # so written, NaN fails
            raise SolverError(f"{self.method}: stored objective {stored.tolist()} differs from {exact.tolist()}.")
        which, where, sign = ("upper", "below", -1) if self.maximize else ("lower", "above", 1)
        if not bool((sign * bound <= sign * exact + 8 * _EPS * exact.abs()).all()):
            raise SolverError(
                f"{self.method}: {which} bound {bound.tolist()} lies {where} the objective {exact.tolist()}."
            )
        return self


def labels_of(indices: list[Any], labels: Sequence[Any]) -> list[Any]:
    """The labels of (lists of) indices, without the padding of -1.

    Examples
    --------
    >>> labels_of([[0, 2], [1, -1]], "abc")
    [['a', 'c'], ['b']]
    """
    return [labels_of(i, labels) if isinstance(i, list) else labels[i] for i in indices if i != -1]


def check_mask(problem: Problem, mask: Tensor, method: str) -> None:
    """Raise SolverError unless `mask` is a valid choice for every instance of `problem`."""
    if mask.dtype != torch.bool or mask.shape != problem.candidates.shape:
        raise SolverError(
            f"{method} returned a mask of dtype {mask.dtype} and shape {tuple(mask.shape)}; "
            f"expected bool {tuple(problem.candidates.shape)}."
        )
    size = count_true(mask)
    if bool((size != problem.k).any()):
        more, told = (0, "") if problem.required is None else (count_true(problem.required), " with the required ones")
        raise SolverError(
            f"{method} chose {(size + more).tolist()} vertices{told} where k = {(problem.k + more).tolist()}."
        )
    if bool((count_true(mask & ~problem.candidates)).any()):
        blocked = (mask & ~problem.candidates).reshape(-1, mask.shape[-1]).any(0)
        raise SolverError(f"{method} chose protected vertices: {blocked.nonzero().flatten().tolist()}.")
    if problem.constraints is not None and (broken := problem.constraints.broken_by(mask)):
        raise SolverError(f"{method} breaks constraints: {'; '.join(broken)}.")


def tolerance(problem: Problem, mask: Tensor, objective: Tensor) -> Tensor:
    """How far a bound may lie below f and still prove it optimal, per instance.

    ``max(1e-9 |f|, 64 n eps Σ|W_ij|)`` with the sum over the chosen entries: unchosen weights do not widen it. For
    whole-number dtypes a whole step (`Problem.step`), less a millionth, as long as f is exact; beyond that, zero.
    """
    if problem.integer:
        step = problem.step.reshape(objective.shape)
        unit = torch.tensor([*map(largest_power_of_two, step.flatten().tolist())], dtype=step.dtype, device=step.device)
        exact = objective.abs() < MAX_INTEGER_WITH_HALVES * unit.reshape(step.shape)
        return torch.where(exact, (1.0 - STEP_MARGIN) * step, 0.0)
    return torch.maximum(OPTIMALITY_RTOL * objective.abs(), rounding(problem, mask))


def rounding(problem: Problem, mask: Tensor) -> Tensor:
    """Rounding error of a bound near f: ``64 n eps Σ|W_ij|`` over the chosen entries; matters if f nearly cancels."""
    return ROUNDING * problem.n * _EPS * problem.weights.magnitude(mask)


def proved(problem: Problem, mask: Tensor, objective: Tensor, lower_bound: Tensor) -> Tensor:
    """Whether each objective is proved optimal by its bound, to `tolerance`."""
    return objective - lower_bound <= tolerance(problem, mask, objective)


def contradicted(lower_bound: Tensor, objective: Tensor) -> Tensor:
    """Whether a known choice has a smaller f than a bound allows, last digits aside: the bound is wrong."""
    return lower_bound > objective + LAST_DIGITS * objective.abs()


def relative_gap(problem: Problem, mask: Tensor, objective: Tensor, lower_bound: Tensor) -> Tensor:
    """``(f - bound) / max(|f|, 1e-9 Σ|W_ij|)`` with the sum over the chosen entries; 0 if the bound is not below f."""
    size = torch.maximum(objective.abs(), GAP_FLOOR * problem.weights.magnitude(mask))
    difference = objective - lower_bound
    return torch.where(difference <= 0, 0.0, difference / size)
