r"""`Reduction`: ``maximize=`` and ``required=`` as an ordinary problem for any solver, and its answers turned back.

Maximising f is minimising the same with -W; negation is exact. If the vertices R are chosen already, k - |R| of the
others remain to be chosen, with

.. math:: W'_{ii} = W_{ii} + 2 \sum_{r \in R} W_{ir} + t, \qquad f(S \cup R) = 1_S^\top W' 1_S + f(R) - (k - |R|)\, t

The shift :math:`t \approx f(R) / (k - |R|)` makes the constant nearly vanish: solvers then see f itself, so that their
tolerances, which are relative to f, mean the same as without required vertices. For W of integers, t is a multiple of
their `Problem.step`. No number of it is absolute: that of 2**j W is 2**j t.

Every sum is exact and rounded once, downwards: a lower bound for W', plus the constant, holds for W. (Of W in factors,
sums are rounded as all of its sums are, and the constant is lowered by that.) The user's objective is summed from W as
given.

When: `grace_opt.solve` and `compare`. Solvers see no difference: required vertices are no candidates. Source: ours; the
reduction itself is folklore of binary quadratic programs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, singledispatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._util.arrays import backend_of, count_true
from .._util.parameters import flag
from .._util.vertices import vertex_mask
from ..errors import OptionError, ProblemError
from ..kernels.solve.columns.source import EXACT
from .constraints import Constraints
from .dense import DenseWeights
from .factored import FactoredWeights
from .problem import Problem
from .sparse import SparseWeights
from .weights import Weights

#: The last digit of the second part of a shift, relative to that of the first.
LAST_DIGIT = 2.0**-16


@dataclass(frozen=True)
class Reduction:
    """A problem as given, and the one that solvers get.

    Attributes
    ----------
    given : Problem
        As the user gave it.
    problem : Problem
        For solvers: to be minimised, without the required vertices. `given` itself if nothing is asked for.
    maximize : bool
    rest : Tensor (B,), float64, or None
        What f has beyond the solvers' own objective, rounded downwards; None without required vertices.
    unreduced : Problem or None
        A flattened batch, to be minimised, with the required vertices among the others; None without any.

    Examples
    --------
    >>> reduced = Reduction.of(Problem.of([[1.0, 2.0, 4.0], [2.0, 1.0, 0.0], [4.0, 0.0, 1.0]], 2), required=[0])
    >>> reduced.problem.W.diagonal().tolist(), int(reduced.problem.k), reduced.rest.tolist()
    ([0.0, 6.0, 10.0], 1, [0.0])
    """

    given: Problem
    problem: Problem
    maximize: bool = False
    rest: Tensor | None = None
    unreduced: Problem | None = None

    @classmethod
    def of(cls, given: Problem, *, required: Any = None, maximize: Any = False, check: bool = True) -> Reduction:
        """Check the two arguments, and reduce.

        Raises
        ------
        ProblemError
            If required vertices are protected, or more than k, or sums with them overflow.
        OptionError
            If `maximize` is no bool, or vertices are required without the checks.
        """
        upwards = flag("maximize", maximize)
        problem = dataclasses.replace(given, weights=given.weights.negated()) if upwards else given
        if required is None:
            return cls(given, problem, upwards)
        if not check:
            raise OptionError("required= reads W's data: leave check=False out.")
        if given.labels is None:
            backend_of(given.candidates if given.backend.is_torch else np.empty(0), required)
        n, batch = given.n, given.batch_shape
        mask = vertex_mask(required, "required", given.labels, batch, n, given.candidates.device).expand(*batch, n)
        _check_required(given, mask)
        if not bool(mask.any()):
            return cls(given, problem, upwards)
        flat, k = problem.flatten(), problem.k - count_true(mask)
        weights, rest, integer = _left_of(flat.weights, flat, mask.reshape(-1, n))
        problem = dataclasses.replace(
            problem,
            weights=weights.reshape(*batch, n, n),
            k=k,
            candidates=given.candidates & ~mask,
            k_max=int(k.max()),
            integer=integer,
            required=mask,
            constraints=_without(given, mask),
        )
        return cls(given, problem, upwards, torch.tensor(rest, dtype=torch.float64, device=k.device), flat)

    @cached_property
    def flat(self) -> Problem:
        """What solvers get, a flattened batch: once, as its weights remember what was summed."""
        return self.problem.flatten()

    @property
    def whole(self) -> Problem:
        """The flattened batch of which `full` choices are choices: what is known of their sums is known here."""
        return self.flat if self.unreduced is None else self.unreduced

    def check_options(self, options: Any) -> None:
        """Raise OptionError for ``path=True`` with required vertices: f for every k has none of its own for them."""
        if self.rest is not None and getattr(options, "path", False) is True:
            raise OptionError(
                "path=True gives f for every k from 0 on, and required= leaves no set below their number: leave one "
                "of the two out."
            )

    def targets(self, given: Sequence[float]) -> tuple[float, ...]:
        """The user's targets, one per instance of the flattened batch, as the solvers' objective."""
        if not given:
            return ()
        mine = [0.0 - value if self.maximize else value for value in given]
        return tuple(mine if self.rest is None else (a - b for a, b in zip(mine, self.rest.tolist(), strict=True)))

    def callback(self, call: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
        """The user's callback of a `Progress`, which gets objectives, bounds and masks of the problem as given."""
        if call is None or self.problem is self.given:
            return call
        required = self.flat.required

        def wrapped(progress: Any) -> Any:
            b = progress.instance
            rest = 0.0 if self.rest is None else float(self.rest[b])
            f, bound = progress.objective + rest, progress.lower_bound + rest
            f, lower, upper = (0.0 - f, 0.0 - f, 0.0 - bound) if self.maximize else (f, bound, f)
            mask = progress.mask if required is None else progress.mask | required[b].cpu().numpy()
            return call(dataclasses.replace(progress, objective=f, lower_bound=lower, upper_bound=upper, mask=mask))

        return wrapped

    def full(self, mask: Tensor) -> Tensor:
        """A solver's masks of the flattened batch, with the required vertices."""
        required = self.problem.required
        return mask if required is None else mask | required.reshape(mask.shape)

    def value(self, found: Tensor, mask: Tensor) -> Tensor:
        """The least-sought objective of masks with the required vertices: -f if f is maximised; else f."""
        return found if self.rest is None else self.whole.weights.objective(mask)

    def bound(self, found: Tensor) -> Tensor:
        """A lower bound for the solvers' problem as one for the objective of `value`."""
        if self.rest is None:
            return found
        total = found + self.rest
        part = total - found
        error = (found - (total - part)) + (self.rest - part)
        lower = torch.where(error < 0, total.nextafter(torch.full_like(total, -math.inf)), total)
        return torch.where(found.isfinite() & total.isfinite(), lower, -math.inf)

    def signed(self, value: Tensor) -> Tensor:
        """Objectives and bounds in the user's sign."""
        return 0.0 - value if self.maximize else value

    def stats(self, found: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Statistics, those that are objectives in the user's sign and with the required vertices."""
        if self.problem is self.given:
            return found
        return found | {name: self._statistic(found[name]) for name in names if name in found}

    def _statistic(self, value: Any) -> Any:
        if isinstance(value, Tensor):  # f for every k: never with required vertices
            return self.signed(value)
        rest = [0.0] * len(value) if self.rest is None else self.rest.tolist()
        moved = [None if f is None else f + more for f, more in zip(value, rest, strict=True)]
        return [0.0 - f if self.maximize and f is not None else f for f in moved]


def _check_required(given: Problem, mask: Tensor) -> None:
    def where(at: Sequence[int]) -> str:
        return f" in instance {list(at)}" if at else ""

    if bool((both := mask & ~given.candidates).any()):
        *at, vertex = both.nonzero()[0].tolist()
        name = vertex if given.labels is None else given.labels[vertex]
        raise ProblemError(
            f"vertex {name!r} is both in required= and in protected={where(at)}: required vertices are always chosen, "
            "protected ones never."
        )
    if bool((many := count_true(mask) > given.k).any()):
        at = many.nonzero()[0].tolist()
        count, k = int(count_true(mask)[tuple(at)]), int(given.k[tuple(at)])
        raise ProblemError(f"required names {count} vertices{where(at)}, but k = {k}: raise k, or require fewer.")


def _without(given: Problem, required: Tensor) -> Constraints | None:
    """The constraints on the other vertices."""
    rows = given.constraints
    return None if rows is None else rows.without(required.reshape(-1).nonzero().flatten().tolist())


_Left = tuple[Weights, list[float], bool]


@singledispatch
def _left_of(W: Weights, problem: Problem, required: Tensor) -> _Left:
    """W of a flattened batch without required vertices, masks (B, n); the constants; and whether f is still whole."""
    tensor, rest = W.tensor.to(torch.float64, copy=True), []
    for b, (k, row, step) in enumerate(zip(problem.k.tolist(), required, _steps(problem), strict=True)):
        rest.append(_take_out(tensor[b], row, problem.candidates[b] & ~row, k, step))
    return _in_range(DenseWeights(tensor), W), rest, problem.integer


def _steps(problem: Problem) -> list[float]:
    """The step of each instance, 0 where it matters not."""
    return problem.step.tolist() if problem.integer else [0.0] * len(problem.k)


def _take_out(W: Tensor, required: Tensor, others: Tensor, k: int, step: float) -> float:
    """Change one instance's W as in the module's formula, in place; the constant that is left, rounded downwards."""
    inside = required.nonzero().flatten()
    if not len(inside):
        return 0.0
    constant = W[inside][:, inside].flatten().tolist()
    free, left = others.nonzero().flatten(), k - len(inside)
    ties = W[free][:, inside].tolist()
    own = W.diagonal()[free].tolist()
    W[inside] = 0.0  # of no use to solvers, and its size might mislead them
    W[:, inside] = 0.0
    if left == 0:
        return sum_down(constant)
    shifts = _shifts(constant, left, step)
    sums = [sum_down([w, *shifts, *(2 * tie for tie in row)]) for w, row in zip(own, ties, strict=True)]
    W.diagonal()[free] = torch.tensor(sums, dtype=torch.float64, device=W.device)
    return sum_down([*constant, *(-part for part in shifts for _ in range(left))])


@_left_of.register
def _left_of_edges(W: SparseWeights, problem: Problem, required: Tensor) -> _Left:
    """As `_take_out`, for sparse W, which is not changed."""
    required, others = required[0], problem.candidates[0] & ~required[0]
    own, left = W.nodes.tolist(), int(problem.k) - int(required.sum())
    constant = W.between(required, required).data.tolist() + W.nodes[required].tolist()
    without = W.without(required)
    if left == 0:
        return without, [sum_down(constant)], problem.integer
    shifts, ties = _shifts(constant, left, _steps(problem)[0]), W.between(others, required)
    free, ends, data = others.nonzero().flatten().tolist(), ties.indptr.tolist(), (2 * ties.data).tolist()
    alone: dict[float, float] = {}  # of vertices without a required neighbour: many have the same weight
    sums = []
    for at, vertex in enumerate(free):
        w, row = own[vertex], data[ends[at] : ends[at + 1]]
        if row:
            sums.append(sum_down([w, *shifts, *row]))
        else:
            sums.append(alone[w] if w in alone else alone.setdefault(w, sum_down([w, *shifts])))
    nodes = without.nodes.clone()
    nodes[others] = torch.tensor(sums, dtype=torch.float64, device=nodes.device)
    constant += [-part for part in shifts for _ in range(left)]
    return _in_range(without.with_diagonal(nodes), W), [sum_down(constant)], problem.integer


@_left_of.register
def _left_of_columns(W: FactoredWeights, problem: Problem, required: Tensor) -> _Left:
    """As `_take_out`, for W that is never formed.

    Its sums are rounded, those of multiples of a step excepted: the constants are lowered by as much as f may be off.
    """
    exact = problem.integer and bool((W.magnitude_rows().sum(-1) <= EXACT / 4).all())
    constant, left = W.objective(required), problem.k - count_true(required)
    shift = torch.where(left > 0, constant / left.clamp(min=1), 0.0)
    if exact:
        shift = torch.where(problem.step > 0, (shift / problem.step).floor() * problem.step, 0.0)
    nodes = W.diagonal() + 2 * W.times(required) + shift.unsqueeze(-1)
    rest = constant - left * shift
    if not exact:
        rest = rest - W.rounding(problem.k, problem.candidates)
    return W.without(required).with_diagonal(nodes.masked_fill(required, 0.0)), rest.tolist(), exact


def _shifts(constant: Sequence[float], left: int, step: float) -> list[float]:
    """The shift t as a sum of one or two floats.

    The second has a few digits only: all that a float64 holds would reach below its least numbers, for tiny W.
    """
    shift = math.fsum(constant) / left
    if step:
        return [math.floor(shift / step) * step + 0.0]
    unit, rest = math.ulp(shift) * LAST_DIGIT, math.fsum([*constant, *[-shift] * left]) / left
    return [shift, round(rest / unit) * unit if unit else 0.0]


def sum_down(terms: Sequence[float]) -> float:
    """The exact sum of floats, rounded once, downwards.

    Examples
    --------
    >>> sum_down([1.0, 1e-30]), sum_down([1.0, -1e-30]) < 1.0, sum_down([1e17, 1.0, -1e17])
    (1.0, True, 1.0)
    """
    nearest = math.fsum(terms)
    return math.nextafter(nearest, -math.inf) if math.fsum([*terms, -nearest]) < 0 else nearest


def _in_range(W: Weights, given: Weights) -> Weights:
    """The reduced W; raises ProblemError if sums of it may overflow float64, as `Problem.of` does for W as given."""
    if float(W.largest().max()) > torch.finfo(torch.float64).max / 8 / W.n**2:
        size = float(given.largest().max())
        raise ProblemError(
            f"max|W| = {size:.3g}: sums with the required vertices overflow float64. Divide W by {size:.3g}; f scales "
            "with it."
        )
    return W
