"""Read and write W as CSV, with or without names: what spreadsheets, pandas and R write, and what numpy writes.

When: `grace_opt.instances` reads or writes .csv and .tsv. Read are a header row of names; names in the first column as
well, with a corner or without; ``;`` or tabs between the cells, with ``;`` also decimal commas; a byte-order mark. A
file is refused where its shape, or the names of its rows, do not fit, or a cell is no number; the message says in which
line and column. The cells are split by the csv module (RFC 4180).
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
from .._util.frames import check_names
from ..errors import ProblemError
from .formats import format_numbers, is_number_text, parse_numbers

Array = npt.NDArray[Any]


def read_table(path: Path, suffix: str = ".csv") -> tuple[Array, tuple[str, ...] | None]:
    """Return W (n, n), int64 if all cells are whole, and the names of its vertices if the file has them.

    `suffix` is .csv or .tsv: what most likely stands between the cells.

    Raises
    ------
    ProblemError
        If the numbers are no square, names are repeated, or rows are named otherwise than columns.
    """
    numbered = [
        (at, line)
        for at, line in enumerate(read_lines(path, ProblemError), 1)
        if line.strip() and not line.startswith("#")
    ]
    lines = [line for _, line in numbered]
    mark = _mark(lines, "\t;," if suffix == ".tsv" else ";\t,")
    reader = csv.reader(lines, delimiter=mark, strict=True)
    rows, places = [], []
    for row in reader:
        rows.append([cell.strip() for cell in row])
        places.append(numbered[reader.line_num - 1][0])
        if reader.line_num != len(rows):
            raise ProblemError(
                f"{path} cannot be read as {suffix}: the cell {max(row, key=len)[:40]!r} goes over several lines, to "
                f"line {places[-1]}. Is a quotation mark missing? Write names without line breaks."
            )
    words = [cell for cell in rows[0] if not is_number_text(_point(cell, mark))] if rows else []
    head = None
    if any(words) or (len(words) == 1 and not rows[0][0]):  # else a row of numbers, some of them missing
        head, rows, places = rows[0], rows[1:], places[1:]
    n, what = len(rows), f"{path} cannot be read as {suffix}: "
    if not rows:
        raise ProblemError(f"{what}there is no row of numbers.")
    taken = next(filter(None, words), "")
    after = "" if head is None else f" after the first one, which was taken for names because of {taken[:40]!r}"
    for row in rows:
        if len(row) != n and not (head is not None and len(row) == n + 1):
            meant = "Are rows missing (truncated)?"
            if head is None and {*map(len, rows)} == {n - 1}:
                meant = "If the first one has names that are numbers, begin all with a name, and it with an empty cell."
            raise ProblemError(f"{what}{n} rows{after}, and one of {len(row)} cells: W is square. {meant}")
    names = None if head is None else _names(what, head, rows)
    cells = [cell for row in rows for cell in row[len(row) - n :]]
    if mark == ";" and any("," in cell for cell in cells):
        if dotted := next((cell for cell in cells if "." in cell), None):
            raise ProblemError(f"{what}decimal commas and {dotted[:40]!r}, with a point: write one of the two.")
        cells = [_point(cell, mark) for cell in cells]

    def place(at: int) -> str:
        i, j = divmod(at, n)
        own = "" if names is None else f" (row {names[i]!r}, column {names[j]!r})"
        return f"line {places[i]}, column {len(rows[i]) - n + j + 1}{own}: "

    return parse_numbers(path, cells, place).reshape(n, n), names


def table_text(W: Array, names: Sequence[Any] | None = None, mark: str = ",") -> str:
    """Write W (n, n) as CSV, one row a line; with names in the first row and column, as pandas does."""
    numbers = [format_numbers(row) for row in W]
    if names is None:
        return "".join(f"{mark.join(row)}\n" for row in numbers)
    for at, name in enumerate(map(str, names)):
        if not name or name != " ".join(name.splitlines()).strip():
            raise ProblemError(
                f"vertex {at} is called {name!r}, which could not be read again: give names that are not empty, have "
                "no line breaks, and neither begin nor end with blanks."
            )
    rows = [["", *names], *([name, *row] for name, row in zip(names, numbers, strict=True))]
    return "".join(_line(row, mark) for row in rows)


def _line(cells: Sequence[Any], mark: str) -> str:
    """Return a row as text, quoted where it would be read as a comment."""
    text = io.StringIO()
    comment = str(cells[0]).startswith("#")
    csv.writer(
        text, delimiter=mark, lineterminator="\n", quoting=csv.QUOTE_ALL if comment else csv.QUOTE_MINIMAL
    ).writerow(cells)
    return text.getvalue()


def _mark(lines: list[str], order: str) -> str:
    """Return what stands between the cells: of several marks, as in names, the one by which the last line fits."""
    first = re.sub(r'"[^"]*"', "", lines[0]) if lines else ""
    marks = [mark for mark in order if mark in first]
    for mark in marks if len(marks) > 1 else ():
        cells = next(csv.reader(lines[-1:], delimiter=mark))
        if len(cells) in (len(lines) - 1, len(lines)) and is_number_text(_point(cells[-1].strip(), mark)):
            return mark
    return marks[0] if marks else ","


def _names(what: str, head: list[str], rows: list[list[str]]) -> tuple[str, ...]:
    """Return the names of the columns; raise where those of the rows differ."""
    n = len(rows)
    named = {len(row) for row in rows} == {n + 1}
    if not named and {len(row) for row in rows} != {n}:
        raise ProblemError(f"{what}some rows have a name in front, others have none.")
    names = head[1:] if named and len(head) == n + 1 else head  # R leaves out the corner
    # Names that are numbers might as well be weights, which begin with a cell that is misspelt.
    numbers = all(is_number_text(name) for name in names) and head[0]
    if len(names) < len(head) and (numbers or re.match(r"[-+.]?\d", head[0])):
        wrong = next((cell for cell in head if not is_number_text(cell)), head[0])
        raise ProblemError(
            f"{what}{wrong[:40]!r} in the first row is no number. If it is a row of names, leave its corner, "
            f"{head[0][:40]!r}, blank."
        )
    if len(names) != n:
        raise ProblemError(f"{what}{len(names)} names in the first row, and {n} rows after it: W is square.")
    for at, row in enumerate(rows if named else ()):
        if row[0] != names[at]:
            raise ProblemError(
                f"{what}row {at + 1} is called {row[0]!r} and column {at + 1} {names[at]!r}: rows and columns must "
                "have the same names in the same order."
            )
    if "" in names:
        raise ProblemError(f"{what}a name is empty.")
    check_names(names, what, "column", 1)
    return tuple(names)


def _point(cell: str, mark: str) -> str:
    """Return the cell with a point for a decimal comma, which only ``;`` leaves room for."""
    return cell.replace(",", ".") if mark == ";" else cell
