"""``groups=`` and ``counts=`` as linear rows; one entry for each vertex from a list, a Series or a column of a frame.

Every kind of wrong input has its own message. pandas is not imported: its objects are recognised by what they offer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..._util.names import did_you_mean
from ..._util.parameters import plain, shown
from ...errors import ProblemError
from .rows import Row

#: So many names are listed in a message.
LISTED = 6


def partitions(
    groups: Any, counts: Any, data: Any, n: int, labels: Sequence[Any] | None
) -> list[tuple[Any, list[Any]]]:
    """Every partition that has counts: its name, None if there is only one, and the label of each vertex."""
    several: dict[Any, Any] | None = None
    if isinstance(groups, Mapping):
        several = dict(groups)
    elif data is not None and isinstance(groups, list | tuple) and not isinstance(groups, str):
        several = {column: column for column in groups}
    if several is None:
        return [(None, per_vertex("groups", groups, data, n, labels))]
    if not isinstance(counts, Mapping):
        raise ProblemError(
            f"counts={shown(counts)}: groups= names several partitions, {few(several)}; give a dict of counts for "
            "each, such as {" + repr(next(iter(several), "colour")) + ": 2}."
        )
    if unknown := [name for name in counts if name not in several]:
        raise ProblemError(f"counts names {unknown[0]!r}, which groups= has not; there are {few(several)}.")
    return [(name, per_vertex(f"groups[{name!r}]", several[name], data, n, labels)) for name in counts]


def per_vertex(name: str, given: Any, data: Any, n: int, labels: Sequence[Any] | None) -> list[Any]:
    """One entry for each vertex: of a column of `data`, of a Series by its index, or as they are listed."""
    if isinstance(given, str) or (data is not None and _is_column(given, data)):
        if data is None:
            raise ProblemError(f"{name}={given!r}: give one entry for each vertex, or data=, the frame of that column.")
        if given not in data.columns:
            hint = did_you_mean(given, map(str, data.columns))
            raise ProblemError(f"{name}={given!r} is no column of data=; there are {few(data.columns)}.{hint}")
        given = data[given]
    if hasattr(given, "index") and hasattr(given, "to_numpy"):  # a Series
        index = given.index.tolist()
        if labels is not None and index != list(range(len(index))):
            if missing := [label for label in labels if label not in set(index)]:
                raise ProblemError(f"{name} has no entry for vertex {missing[0]!r}: its index has to have W's labels.")
            given = given.loc[list(labels)]
        elif labels is None and index != list(range(len(index))) and set(index) == set(range(len(index))):
            raise ProblemError(
                f"{name} has the numbers of the vertices as its index, in another order than W: sort_index() if they "
                "are meant, or reset_index(drop=True) if not."
            )
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


def group_rows(partition: Any, of_vertices: list[Any], counts: Any) -> list[Row]:
    name = "groups" if partition is None else f"groups[{partition!r}]"
    members: dict[Any, list[int]] = {}
    for vertex, label in enumerate(of_vertices):
        label = plain(label)
        if _is_missing(label):
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
            raise ProblemError(f"counts{of} names {label!r}, and no vertex has that label; there are {few(members)}.")
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


def _is_missing(label: Any) -> bool:
    """Whether it is None, NaN, or pandas' NA, which has no truth value."""
    try:
        return label is None or bool(label != label)
    except (TypeError, ValueError):
        return str(label) == "<NA>"


def _range(name: str, given: Any) -> tuple[int, int | None]:
    """At least so many, and at most so many, of a count or of a pair of these."""
    wanted = "an int for exactly so many, or a pair such as (1, 3), (1, None) or (None, 3)"
    given = given.tolist() if isinstance(given, np.ndarray) else given
    pair = tuple(given) if isinstance(given, list | tuple) else (given, given)
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


def few(names: Iterable[Any]) -> str:
    listed = [repr(plain(name)) for name in names]
    return ", ".join(listed[:LISTED]) + (", …" if len(listed) > LISTED else "")
