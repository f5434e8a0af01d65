"""Whether constraints can hold together: a choice that keeps them, or a smallest contradiction among them.

`scipy.optimize.milp` (HiGHS) seeks the choice. It works with tolerances, so that nothing it says is taken on trust: a
choice counts only if it keeps every row in exact integers, and "there is none" only where the tolerances err on the
side of finding one. Costs are the rows where a tolerance matters. There, the cheapest choice is sought instead of one
within the budget: if even that exceeds the budget by more than all tolerances, there is none; if it exceeds it by less,
that choice is excluded, and the next one sought.

When: `solve`, before a method runs; `local_search`, for a start. Complexity: that of an integer program, usually
milliseconds. Source: QuickXplain (Junker, AAAI 2004), a deletion filter that halves, for the irreducible set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import InfeasibleConstraintsError
from .program import Floats, Program, UndecidedError
from .rows import Constraints, Row

#: Seconds after which one integer program is given up, and this is taken for "perhaps".
SECONDS = 20.0
#: Coefficients above this are scaled, so that the tolerance of rows, 1e-6, is small beside their bound.
SMALL = 1000
#: Where a small objective is enough, the relative gap at which HiGHS ends.
GAP = 1e-3


@dataclass(frozen=True)
class _Member:
    """One constraint: its words, and its rows, or the vertices that it keeps at 0 or 1."""

    words: str
    rows: tuple[Row, ...] = ()
    out: tuple[int, ...] = ()
    inside: tuple[int, ...] = ()


def find_choice(
    constraints: Constraints,
    k: int,
    candidates: Tensor,
    objective: Floats | None = None,
    seconds: float = SECONDS,
) -> Tensor | None:
    """A choice of k candidates that keeps all constraints, of small ``objective @ x`` if that is given.

    Parameters
    ----------
    constraints : Constraints
    k : int
    candidates : Tensor (n,), bool
    objective : ndarray (n,), optional
        Finite. Its least value is sought, not promised.
    seconds : float
        Time of each integer program.

    Returns
    -------
    Tensor (n,), bool, or None
        On the CPU; None if there is none.

    Raises
    ------
    UndecidedError
        If the time was too short, or costs lie within rounding of the budget.

    Examples
    --------
    >>> pair = Constraints((Row("not both", (0, 1), (1, 1), None, 1),), 3)
    >>> find_choice(pair, 2, torch.tensor([True, True, True]), np.array([1.0, 2.0, 3.0])).tolist()
    [True, False, True]
    """
    n = constraints.n
    blocked = (~candidates).nonzero().flatten().tolist()
    members = [_of_size(n, k, k), _Member("protected", out=tuple(blocked)), _Member("rows", constraints.rows)]
    found = _choice(n, members, objective, seconds)
    return None if found is None else torch.from_numpy(found)


def refuse_infeasible(
    constraints: Constraints,
    k: tuple[int, int],
    candidates: Tensor,
    required: Tensor | None,
    labels: Sequence[Any] | None,
) -> None:
    """Raise InfeasibleConstraintsError if no choice keeps the constraints, and say which of them contradict each other.

    Parameters
    ----------
    constraints : Constraints
        On all n vertices.
    k : (int, int)
        Least and largest size of the choice, required vertices included.
    candidates : Tensor (n,), bool
        Vertices that are not protected.
    required : Tensor (n,), bool, or None
    labels : sequence or None
        Names of the vertices, for the message.
    """
    n, members = constraints.n, [_of_size(constraints.n, *k)]

    def named(vertex: int) -> Any:
        return vertex if labels is None else labels[vertex]

    inside = [] if required is None else required.nonzero().flatten().tolist()
    members += [_Member(f"required [{named(vertex)!r}]", inside=(vertex,)) for vertex in inside]
    by_words: dict[str, list[Row]] = {}
    for row in constraints.rows:
        by_words.setdefault(row.words, []).append(row)
    members += [_Member(words, tuple(rows)) for words, rows in by_words.items()]
    blocked = (~candidates).nonzero().flatten().tolist()
    members += [_Member(f"protected [{named(vertex)!r}]", out=(vertex,)) for vertex in blocked]
    if _possible(n, members):
        return
    conflict = _smallest(n, [], members, False)
    words = tuple(member.words for member in members if member in conflict)
    if len(words) == 1:
        raise InfeasibleConstraintsError(f"no choice keeps this constraint: {words[0]}.", words)
    raise InfeasibleConstraintsError(
        f"no choice keeps these {len(words)} constraints at once: {'; '.join(words)}. Drop or relax one of them: "
        "without any one, the others can be kept.",
        words,
    )


def _of_size(n: int, low: int, high: int) -> _Member:
    words = f"k = {low}" if low == high else f"k = {low} to {high}"
    return _Member(words, (Row(words, tuple(range(n)), (1,) * n, low, high),))


def _smallest(n: int, background: list[_Member], members: list[_Member], grown: bool) -> list[_Member]:
    """Some of the members that contradict the background and each other, none of which could be left out."""
    if grown and not _possible(n, background):
        return []
    if len(members) == 1:
        return members
    half = len(members) // 2
    first, second = members[:half], members[half:]
    of_second = _smallest(n, [*background, *first], second, True)
    return [*_smallest(n, [*background, *of_second], first, bool(of_second)), *of_second]


def _possible(n: int, members: list[_Member]) -> bool:
    """Whether a choice keeps the members, as far as is known."""
    try:
        return _choice(n, members, None) is not None
    except UndecidedError:
        return True


def _choice(
    n: int, members: Sequence[_Member], objective: Floats | None, seconds: float = SECONDS
) -> npt.NDArray[np.bool_] | None:
    """A 0/1 point that keeps the members exactly, None if there is none; raises UndecidedError."""
    rows = [row for member in members for row in member.rows]
    low, high = np.zeros(n), np.ones(n)
    low[[vertex for member in members for vertex in member.inside]] = 1.0
    high[[vertex for member in members for vertex in member.out]] = 0.0
    wide = {row: row.upper for row in rows if row.upper is not None and max(row.coefficients, default=0) > SMALL}
    for row, limit in wide.items():  # costs, which are at least 0
        high[[vertex for vertex, cost in zip(row.vertices, row.coefficients, strict=True) if cost > limit]] = 0.0
    if (low > high).any() or any(limit < 0 for limit in wide.values()):
        return None
    program = Program(n, rows, [row for row in rows if row not in wide], low, high, seconds)
    limited = [(row, limit) for row, limit in wide.items() if 0 < limit < sum(row.coefficients)]
    if not limited:
        found = program.solved(objective, GAP)
        if found is not None and not program.kept_by(found[0]):
            raise UndecidedError
        return None if found is None else found[0]
    ((row, limit),) = limited
    prices = np.zeros(n)
    prices[list(row.vertices)] = [cost / limit if cost <= limit else 0.0 for cost in row.coefficients]
    if objective is not None:
        try:
            found = program.solved(objective, GAP, within=prices)
            if found is not None and program.kept_by(found[0]):
                return found[0]
        except UndecidedError:  # perhaps the cheapest is found
            pass
    return program.cheapest(prices)
