"""Read and write W as CSV, with or without names: what spreadsheets, pandas and R write, and what numpy writes.

When: `grace_opt.instances` reads or writes .csv. Read are a header row of names; names in the first column as well,
with a corner or without; ``;`` between the cells, then also with decimal commas; a byte-order mark. A file is refused
where its shape, or the names of its rows, do not fit. The cells are split by the csv module (RFC 4180).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from .._util.files import read_lines
from .._util.matrices import first_repeated
from ..errors import ProblemError
from .formats import format_numbers, is_number_text, parse_numbers

Array = npt.NDArray[Any]


def read_table(path: Path) -> tuple[Array, tuple[str, ...] | None]:
    """Return W (n, n), int64 if all cells are whole, and the names of its vertices if the file has them.

    Raises
    ------
    ProblemError
        If the numbers are no square, names are repeated, or rows are named otherwise than columns.
    """
    lines = [line for line in read_lines(path, ProblemError) if line.strip() and not line.startswith("#")]
    mark = ";" if lines and ";" in re.sub(r'"[^"]*"', "", lines[0]) else ","
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=mark, strict=True)]
    head = None
    if rows and (words := [cell for cell in rows[0] if not is_number_text(_point(cell, mark))]):
        head, rows = rows[0], rows[1:]
    n, what = len(rows), f"{path} cannot be read as .csv: "
    if not rows:
        raise ProblemError(f"{what}there is no row of numbers.")
    after = "" if head is None else f" after the first one, which was taken for names because of {words[0][:40]!r}"
    for row in rows:
        if len(row) != n and not (head is not None and len(row) == n + 1):
            raise ProblemError(
                f"{what}{n} rows{after}, and one of {len(row)} cells: W is square. Are rows missing (truncated)?"
            )
    names = None if head is None else _names(what, head, rows)
    cells = [cell for row in rows for cell in row[len(row) - n :]]
    if mark == ";" and any("," in cell for cell in cells):
        if dotted := next((cell for cell in cells if "." in cell), None):
            raise ProblemError(f"{what}decimal commas and {dotted[:40]!r}, with a point: write one of the two.")
        cells = [_point(cell, mark) for cell in cells]
    return parse_numbers(path, cells).reshape(n, n), names


def table_text(W: Array, names: Sequence[Any] | None = None) -> str:
    """Write W (n, n) as CSV, one row a line; with names in the first row and column, as pandas does."""
    numbers = [format_numbers(row) for row in W]
    if names is None:
        return "".join(f"{','.join(row)}\n" for row in numbers)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["", *names])
    writer.writerows([name, *row] for name, row in zip(names, numbers, strict=True))
    return text.getvalue()


def _names(what: str, head: list[str], rows: list[list[str]]) -> tuple[str, ...]:
    """Return the names of the columns; raise where those of the rows differ."""
    n = len(rows)
    named = {len(row) for row in rows} == {n + 1}
    if not named and {len(row) for row in rows} != {n}:
        raise ProblemError(f"{what}some rows have a name in front, others have none.")
    names = head[1:] if named and len(head) == n + 1 else head  # R leaves out the corner
    if len(names) != n:
        raise ProblemError(f"{what}{len(names)} names in the first row, and {n} rows after it: W is square.")
    for at, row in enumerate(rows if named else ()):
        if row[0] != names[at]:
            raise ProblemError(
                f"{what}row {at + 1} is called {row[0]!r} and column {at + 1} {names[at]!r}: rows and columns must "
                "have the same names in the same order."
            )
    if "" in names or (again := first_repeated(names)) is not None:
        raise ProblemError(f"{what}{'a name is empty' if '' in names else f'two columns are called {again!r}'}.")
    return tuple(names)


def _point(cell: str, mark: str) -> str:
    """Return the cell with a point for a decimal comma, which only ``;`` leaves room for."""
    return cell.replace(",", ".") if mark == ";" else cell
