"""`constraints_of`: ``groups=``, ``counts=``, ``exclude=``, ``together=``, ``costs=`` and ``budget=`` as linear rows.

Every kind of wrong input has its own message. pandas is not imported: a frame is recognised by what it offers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..._util.frames import is_frame
from ..._util.names import did_you_mean
from ..._util.parameters import number, plain, shown
from ...errors import OptionError, ProblemError
from .costs import cost_row
from .rows import Constraints, Row

#: The arguments of `solve` that become constraints.
NAMES = ("groups", "counts", "exclude", "together", "costs", "budget", "data")
#: So many names are listed in a message.
LISTED = 6


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
        for name, of_vertices in _partitions(groups, counts, data, n, labels):
            rows += _group_rows(name, of_vertices, counts if name is None else counts[name])
    place = None if labels is None else {label: i for i, label in enumerate(labels)}
    for pair in _sets("exclude", exclude, n, place, 2):
        rows.append(Row(f"exclude {_named(pair, labels)}", pair, (1, 1), None, 1))
    for one_set in _sets("together", together, n, place, None):
        words, first = f"together {_named(one_set, labels)}", one_set[0]
        rows += [Row(words, (first, other), (1, -1), 0, 0) for other in one_set[1:]]
    if costs is not None:
        rows.append(_budget_row(_per_vertex("costs", costs, data, n, labels), budget, labels))
    return Constraints(tuple(rows), n) if rows else None


def _partitions(
    groups: Any, counts: Any, data: Any, n: int, labels: Sequence[Any] | None
) -> list[tuple[Any, list[Any]]]:
    """Every partition that has counts: its name, None if there is only one, and the label of each vertex."""
    several: dict[Any, Any] | None = None
    if isinstance(groups, Mapping):
        several = dict(groups)
    elif data is not None and isinstance(groups, list | tuple) and not isinstance(groups, str):
        several = {column: column for column in groups}
    if several is None:
        return [(None, _per_vertex("groups", groups, data, n, labels))]
    if not isinstance(counts, Mapping):
        raise ProblemError(
            f"counts={shown(counts)}: groups= names several partitions, {_few(several)}; give a dict of counts for "
            "each, such as {" + repr(next(iter(several), "colour")) + ": 2}."
        )
    if unknown := [name for name in counts if name not in several]:
        raise ProblemError(f"counts names {unknown[0]!r}, which groups= has not; there are {_few(several)}.")
    return [(name, _per_vertex(f"groups[{name!r}]", several[name], data, n, labels)) for name in counts]


def _per_vertex(name: str, given: Any, data: Any, n: int, labels: Sequence[Any] | None) -> list[Any]:
    """One entry for each vertex: of a column of `data`, of a Series by its index, or as they are listed."""
    if isinstance(given, str) or (data is not None and _is_column(given, data)):
        if data is None:
            raise ProblemError(f"{name}={given!r}: give one entry for each vertex, or data=, the frame of that column.")
        if given not in data.columns:
            hint = did_you_mean(given, map(str, data.columns))
            raise ProblemError(f"{name}={given!r} is no column of data=; there are {_few(data.columns)}.{hint}")
        given = data[given]
    if hasattr(given, "index") and hasattr(given, "to_numpy"):  # a Series
        index = given.index.tolist()
        if labels is not None and index != list(range(len(index))):
            if missing := [label for label in labels if label not in set(index)]:
                raise ProblemError(f"{name} has no entry for vertex {missing[0]!r}: its index has to have W's labels.")
            given = given.loc[list(labels)]
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, Mapping):
        raise ProblemError(f"{name}={shown(given)}: give a list with one entry for each of {n} vertices, in order.")
    if not isinstance(given, Iterable):
        raise ProblemError(f"{name}={shown(given)}: give a list with one entry for each of {n} vertices.")
    entries = list(given)
    if len(entries) != n:
        raise ProblemError(f"{name} has {len(entries)} entries, W has {n} vertices: give one for each vertex.")
    return entries


def _is_column(given: Any, data: Any) -> bool:
    """Whether it is the name of a column, and not a list of entries."""
    try:
        return not isinstance(given, list) and bool(given in data.columns)
    except (TypeError, ValueError):  # arrays
        return False


def _group_rows(partition: Any, of_vertices: list[Any], counts: Any) -> list[Row]:
    name = "groups" if partition is None else f"groups[{partition!r}]"
    members: dict[Any, list[int]] = {}
    for vertex, label in enumerate(of_vertices):
        label = plain(label)
        if label is None or label != label:
            raise ProblemError(
                f"{name}: vertex {vertex} has the label {label!r}: give every vertex one; a label that counts= does "
                "not name has no limit."
            )
        try:
            members.setdefault(label, []).append(vertex)
        except TypeError:
            raise ProblemError(
                f"{name}: vertex {vertex} has the label {shown(label)}, a {type(label).__name__}: give texts, numbers, "
                "or tuples of them."
            ) from None
    of = "" if partition is None else f"[{partition!r}]"
    asked = counts if isinstance(counts, Mapping) else dict.fromkeys(members, counts)
    rows = []
    for label, wanted in asked.items():
        if label not in members:
            raise ProblemError(f"counts{of} names {label!r}, and no vertex has that label; there are {_few(members)}.")
        where = f"counts{of}[{label!r}]" if isinstance(counts, Mapping) else f"counts{of}"
        low, high = _range(where, wanted)
        group = tuple(members[label])
        if low > len(group):
            vertices = "vertex" if len(group) == 1 else "vertices"
            raise ProblemError(f"{where}={shown(wanted)}: group {label!r} has {len(group)} {vertices}; ask for fewer.")
        words = f"{_many(low, high)} of group {label!r}" + ("" if partition is None else f" in {partition!r}")
        if low > 0 or high is not None:
            rows.append(Row(words, group, (1,) * len(group), low or None, high))
    return rows


def _range(name: str, given: Any) -> tuple[int, int | None]:
    """At least so many, and at most so many, of a count or of a pair of these."""
    wanted = "an int for exactly so many, or a pair such as (1, 3), (1, None) or (None, 3)"
    pair = tuple(given) if isinstance(given, list | tuple | np.ndarray) else (given, given)
    if len(pair) != 2 or (pair[0] is None and pair[1] is None):
        raise ProblemError(f"{name}={shown(given)}: give {wanted}.")
    ends: list[int | None] = []
    for end in pair:
        try:
            bare = plain(end)
            ends.append(None if bare is None else operator.index(bare))
        except TypeError:
            raise ProblemError(f"{name}={shown(given)}: give {wanted}.") from None
        if isinstance(bare, bool) or (ends[-1] is not None and ends[-1] < 0):
            raise ProblemError(f"{name}={shown(given)}: give {wanted}; counts are at least 0.")
    low, high = ends[0] or 0, ends[1]
    if high is not None and low > high:
        raise ProblemError(f"{name}={shown(given)}: at least {low} and at most {high} cannot be; exchange the two.")
    return low, high


def _many(low: int, high: int | None) -> str:
    """A range of counts in words."""
    if high is None:
        return f"at least {low}"
    return f"exactly {low}" if low == high else f"at most {high}" if low == 0 else f"{low} to {high}"


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
            raise ProblemError(f"{where} names {shown(given)}, which is no label of W; there are {_few(place)}.")
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


def _few(names: Iterable[Any]) -> str:
    listed = [repr(plain(name)) for name in names]
    return ", ".join(listed[:LISTED]) + (", …" if len(listed) > LISTED else "")
