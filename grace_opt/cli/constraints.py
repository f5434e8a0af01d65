"""Constraints on the command line: groups and costs from the columns of a CSV file, counts and pairs from text.

When: ``grace-opt solve`` and ``compare``. What the values mean, and what is wrong with them, `grace_opt.solve` says.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import OptionError
from .values import parse_vertices

Data = Annotated[
    Path | None,
    typer.Option(
        help="CSV file with a header and a row for each vertex, in order, or with the file's names in its first column."
    ),
]
Groups = Annotated[list[str] | None, typer.Option(help="Column of --data with the group of each vertex; repeatable.")]
Counts = Annotated[
    list[str] | None,
    typer.Option(
        help="How many of each group: 2, 1:3, 1: or :3; or of some of them, a=2,b=1:3. One for each --groups, in order."
    ),
]
Exclude = Annotated[list[str] | None, typer.Option(help="Two vertices, such as 0,3, never both chosen; repeatable.")]
Together = Annotated[list[str] | None, typer.Option(help="Vertices that are all chosen, or none; repeatable.")]
Costs = Annotated[str | None, typer.Option(help="Column of --data with the cost of each vertex.")]
Budget = Annotated[float | None, typer.Option(help="The costs of the chosen vertices sum to at most this.")]


@dataclass(frozen=True)
class ConstraintOptions:
    """The options as they were given."""

    data: Path | None = None
    groups: Sequence[str] | None = None
    counts: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    together: Sequence[str] | None = None
    costs: str | None = None
    budget: float | None = None

    def arguments(self, labels: tuple[str, ...] | None) -> dict[str, Any]:
        """Return the arguments of `grace_opt.solve`.

        Raises
        ------
        OptionError
            If the file cannot be read, lacks a column, or a value has another form.
        """
        if (self.groups or self.costs) and self.data is None:
            raise OptionError("--groups and --costs name columns of a CSV file: give it with --data FILE.")
        columns = {} if self.data is None else _columns(self.data, labels)
        groups = {name: self._column(columns, name) for name in self.groups or ()}
        counts = [_counts(text) for text in self.counts or ()]
        if len(groups) != len(counts):
            raise OptionError(f"there are {len(groups)} --groups and {len(counts)} --counts: give one for each.")
        found: dict[str, Any] = {"budget": self.budget}
        if groups:
            found |= {"groups": groups, "counts": dict(zip(groups, counts, strict=True))}
        for name in ("exclude", "together"):
            sets = [parse_vertices(name, text, labels) for text in getattr(self, name) or ()]
            found |= {name: sets or None}
        if self.costs is not None:
            found["costs"] = [_number(self.costs, cell) for cell in self._column(columns, self.costs)]
        return found

    def _column(self, columns: dict[str, list[str]], name: str) -> list[str]:
        if name not in columns:
            raise OptionError(f"{self.data} has no column {name!r}; there are {', '.join(map(repr, columns))}.")
        return columns[name]


def _columns(path: Path, labels: tuple[str, ...] | None) -> dict[str, list[str]]:
    """The columns of a CSV file, in the order of the labels if the first one has these."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = [row for row in csv.reader(file, strict=True) if row]
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise OptionError(f"--data {path} cannot be read as CSV with a header ({error}).") from None
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise OptionError(f"--data {path}: row {number} has {len(row)} entries, the header {len(header)}.")
    if labels is not None:
        place = {row[0].strip(): row for row in rows}
        if set(labels) <= set(place):
            rows = [place[label] for label in labels]
    return {name.strip(): [row[at].strip() for row in rows] for at, name in enumerate(header)}


def _counts(text: str) -> Any:
    """One count for all groups, or a count for each that is named.

    Examples
    --------
    >>> _counts("2"), _counts("a=1:3,b=:2")
    (2, {'a': (1, 3), 'b': (None, 2)})
    """
    if "=" not in text:
        return _range(text)
    (row,) = csv.reader([text], skipinitialspace=True)
    named = [entry.rpartition("=") for entry in row]
    return {name.strip(): _range(count) for name, _, count in named}


def _range(text: str) -> Any:
    parts = re.fullmatch(r"\s*([0-9]{0,18})\s*(:?)\s*([0-9]{0,18})\s*", text)
    if parts is None or not (parts[1] or parts[3]) or (parts[3] and not parts[2]):
        raise OptionError(f"--counts {text!r}: write 2 for exactly so many, or a range such as 1:3, 1: or :3.")
    low, high = (int(part) if part else None for part in (parts[1], parts[3]))
    return (low, high) if parts[2] else low


def _number(column: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise OptionError(f"--costs {column}: {cell!r} is no number.") from None
