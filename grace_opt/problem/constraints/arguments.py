"""`constraints_of`: ``groups=``, ``counts=``, ``exclude=``, ``together=``, ``costs=`` and ``budget=`` as linear rows.

Every kind of wrong input has its own message; `groups` has those of groups, `costs` makes integers of floats.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..._util.frames import is_frame
from ..._util.parameters import number, plain, shown
from ...errors import OptionError, ProblemError
from .costs import cost_row
from .groups import few, group_rows, partitions, per_vertex
from .rows import Constraints, Row

#: The arguments of `solve` that become constraints.
NAMES = ("groups", "counts", "exclude", "together", "costs", "budget", "data")


def constraints_of(
    n: int,
    labels: Sequence[Any] | None = None,
    *,
    groups: Any = None,
    counts: Any = None,
    exclude: Any = None,
    together: Any = None,
    costs: Any = None,
    budget: Any = None,
    data: Any = None,
) -> Constraints | None:
    """Check the arguments, and return their rows; None if nothing is asked for.

    Parameters
    ----------
    n : int
        Number of vertices.
    labels : sequence or None
        Names of the vertices, if they have any; pairs then name them.
    groups, counts, exclude, together, costs, budget, data
        As in `grace_opt.solve`.

    Raises
    ------
    ProblemError, OptionError
        The message says what is wrong, where, and what to write instead.

    Examples
    --------
    >>> found = constraints_of(4, groups=["a", "a", "b", "b"], counts={"a": 1}, exclude=[(0, 3)])
    >>> [row.words for row in found.rows]
    ["exactly 1 of group 'a'", 'exclude (0, 3)']
    """
    for one, other in (("groups", "counts"), ("costs", "budget")):
        given = {"groups": groups, "counts": counts, "costs": costs, "budget": budget}
        if (given[one] is None) != (given[other] is None):
            there, missing = (one, other) if given[other] is None else (other, one)
            raise OptionError(f"{there}= is given without {missing}=: give both, or neither.")
    if data is not None and not is_frame(data):
        raise OptionError(f"data={shown(data)}: give a DataFrame with a row for each vertex.")
    if data is not None and groups is None and costs is None:
        raise OptionError("data= has the columns that groups= and costs= name: give one of these, or leave it out.")
    rows: list[Row] = []
    if groups is not None:
        for name, of_vertices in partitions(groups, counts, data, n, labels):
            rows += group_rows(name, of_vertices, counts if name is None else counts[name])
    place = None if labels is None else {label: i for i, label in enumerate(labels)}
    for pair in _sets("exclude", exclude, n, place, 2):
        rows.append(Row(f"exclude {_named(pair, labels)}", pair, (1, 1), None, 1))
    for one_set in _sets("together", together, n, place, None):
        words, first = f"together {_named(one_set, labels)}", one_set[0]
        rows += [Row(words, (first, other), (1, -1), 0, 0) for other in one_set[1:]]
    if costs is not None:
        rows.append(_budget_row(per_vertex("costs", costs, data, n, labels), budget, labels))
    return Constraints(tuple(rows), n) if rows else None


def _sets(name: str, given: Any, n: int, place: dict[Any, int] | None, size: int | None) -> Iterable[tuple[int, ...]]:
    """The vertices of every pair, or set, each once."""
    if given is None:
        return []
    what = "pairs of vertices, [(0, 1), (2, 3)]" if size else "sets of vertices, [(0, 1, 2), (4, 5)]"
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ProblemError(f"{name}={shown(given)}: give a list of {what}.")
    found: dict[tuple[int, ...], None] = {}
    for at, one in enumerate(given):
        if isinstance(one, str) or not isinstance(one, Iterable):
            raise ProblemError(f"{name}[{at}]={shown(one)}: give a list of {what}.")
        vertices = [_vertex(f"{name}[{at}]", vertex, n, place) for vertex in one]
        if len(vertices) < 2 or (size is not None and len(vertices) != size):
            raise ProblemError(f"{name}[{at}]={shown(one)} has {len(vertices)} vertices: give a list of {what}.")
        if len(set(vertices)) < len(vertices):
            twice = next(vertex for vertex in one if list(one).count(vertex) > 1)
            raise ProblemError(f"{name}[{at}]={shown(one)} names vertex {twice!r} twice: give different vertices.")
        found[tuple(sorted(vertices))] = None
    return found


def _vertex(where: str, given: Any, n: int, place: dict[Any, int] | None) -> int:
    if place is not None:
        try:
            found = place.get(given)
        except TypeError:
            found = None
        if found is None or isinstance(given, bool):
            raise ProblemError(f"{where} names {shown(given)}, which is no label of W; there are {few(place)}.")
        return found
    try:
        bare = plain(given)
        vertex = -1 if isinstance(bare, bool) else operator.index(bare)
    except TypeError:
        vertex = -1
    if not 0 <= vertex < n:
        raise ProblemError(f"{where} names {shown(given)}: vertices are 0 to {n - 1}.")
    return vertex


def _budget_row(costs: list[Any], budget: Any, labels: Sequence[Any] | None) -> Row:
    limit = number("budget", budget, at_least=0, infinite=True, error=ProblemError)
    prices = []
    for vertex, cost in enumerate(costs):
        name = f"costs[{vertex if labels is None else labels[vertex]!r}]"
        prices.append(number(name, cost, at_least=0, error=ProblemError))
    return cost_row(f"budget {limit:g}" if math.isfinite(limit) else "budget", prices, limit)


def _named(vertices: tuple[int, ...], labels: Sequence[Any] | None) -> str:
    return repr(vertices if labels is None else tuple(labels[vertex] for vertex in vertices))
