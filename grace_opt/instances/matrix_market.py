"""Read and write MatrixMarket files, checking every number and the count of lines.

When: `grace_opt.instances` reads or writes .mtx. SciPy's reader is not used: it reads many truncated files as another
matrix and crashes the process on some, and it reads a number only as far as it understands it, Fortran's 1.5D2 as 1.5
and 1e3 among integers as 1. Both layouts (coordinate, array), all symmetries of real matrices
(general, symmetric, skew-symmetric) and the fields real, double, integer and pattern are read; complex matrices are
refused. Source: NIST, The Matrix Market Exchange Formats (1996).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.files import read_lines
from ..errors import ProblemError
from ..problem.problem import stays_sparse
from .formats import first_duplicate, format_numbers, is_integer_text, parse_floats, parse_numbers

Array = npt.NDArray[Any]
FIELDS = ("real", "double", "integer", "unsigned-integer", "pattern")
SYMMETRIES = ("general", "symmetric", "skew-symmetric")


def read_matrix(path: Path) -> Any:
    """Return the matrix (n, n): int64 for the fields integer and pattern (all entries 1), else float64.

    A csr_array if it is in coordinates, with many rows and few entries; else an array.

    Raises
    ------
    ProblemError
        If the header is none of the above, lines are missing or too many, or an entry is repeated, out of range, or no
        number of the field; the message names the line.
    """
    lines = read_lines(path, ProblemError)
    banner = lines[0].lower().split()
    if len(banner) != 5 or banner[:2] != ["%%matrixmarket", "matrix"]:
        raise ProblemError(
            f"{path} cannot be read as .mtx: the first line must be '%%MatrixMarket matrix', then a layout, a field "
            f"and a symmetry; found {lines[0][:60]!r}."
        )
    layout, field, symmetry = banner[2:]
    if (layout, field) == ("array", "pattern") or layout not in ("coordinate", "array"):
        raise ProblemError(f"{path}: a {layout!r} of {field!r} is unknown: write coordinate, or array with real.")
    if field not in FIELDS or symmetry not in SYMMETRIES:
        raise ProblemError(
            f"{path}: {field!r} and {symmetry!r} are not read: the field must be one of {', '.join(FIELDS)}, the "
            f"symmetry one of {', '.join(SYMMETRIES)}."
        )
    start = 1
    while start < len(lines) and (not lines[start].strip() or lines[start].startswith("%")):
        start += 1
    numbered = [(at, line.split()) for at, line in enumerate(lines[start:], start + 1) if line.strip()]
    places, rows = [at for at, _ in numbered], [row for _, row in numbered]
    names = "rows columns entries" if layout == "coordinate" else "rows columns"
    if not rows or len(rows[0]) != len(names.split()) or not all(map(is_integer_text, rows[0])):
        raise ProblemError(f"{path}: the line of sizes, {names!r}, is missing after the header (truncated?).")
    n, columns, *count = map(int, rows[0])
    if n != columns or n < 1:
        raise ProblemError(f"{path} holds a matrix of {n} by {columns}: W is square and has at least one row.")
    return (_coordinate if layout == "coordinate" else _array)(path, rows[1:], places[1:], n, field, symmetry, *count)


def sparse_text(W: Any) -> str:
    """Write a real sparse matrix (n, n) as .mtx text in coordinates (the lower half if it is symmetric)."""
    from scipy.sparse import tril

    skew = W - W.T
    symmetric = skew.nnz == 0 or not skew.data.any()
    listed = (tril(W) if symmetric else W).tocoo()
    listed.sum_duplicates()
    row, column = listed.coords if hasattr(listed, "coords") else (listed.row, listed.col)
    field = "real" if W.dtype.kind == "f" else "integer"
    header = f"%%MatrixMarket matrix coordinate {field} {'symmetric' if symmetric else 'general'}\n"
    entries = zip((row + 1).tolist(), (column + 1).tolist(), format_numbers(listed.data), strict=True)
    lines = "".join(f"{i} {j} {text}\n" for i, j, text in entries)
    return f"{header}{W.shape[0]} {W.shape[0]} {listed.nnz}\n{lines}"


def matrix_text(W: Array) -> str:
    """Write a real matrix (n, n) as .mtx text with all its entries (all lower ones if it is symmetric)."""
    symmetric = np.array_equal(W, W.T)
    field = "real" if W.dtype.kind == "f" else "integer"
    listed = W.T[np.triu_indices(len(W))] if symmetric else W.T.reshape(-1)  # column by column
    header = f"%%MatrixMarket matrix array {field} {'symmetric' if symmetric else 'general'}\n{len(W)} {len(W)}\n"
    return header + "".join(f"{text}\n" for text in format_numbers(listed))


def _coordinate(
    path: Path, rows: list[list[str]], places: list[int], n: int, field: str, symmetry: str, count: int
) -> Any:
    _count(path, len(rows), count, "a coordinate matrix of that many entries")
    width = 2 if field == "pattern" else 3
    for place, row in zip(places, rows, strict=True):
        if len(row) != width or not (is_integer_text(row[0]) and is_integer_text(row[1])):
            what = "'row column'" if width == 2 else "'row column value'"
            raise ProblemError(
                f"{path}: line {place}: {' '.join(row)[:40]!r} is not an entry of a {field} matrix, {what}."
            )
    ends = np.array([row[:2] for row in rows], dtype=object).reshape(-1, 2)
    at = np.array([[int(i), int(j)] for i, j in ends], dtype=object).reshape(-1, 2) - 1
    for place, row, (i, j) in zip(places, rows, at, strict=True):
        if not (0 <= i < n and 0 <= j < n):
            raise ProblemError(
                f"{path}: line {place}: entry {' '.join(row)[:40]!r} lies outside: rows and columns are 1 to {n}."
            )
    at = at.astype(np.int64)
    if symmetry != "general":
        at = np.sort(at, axis=1)[:, ::-1]  # some writers list the upper half instead
    if (twice := first_duplicate(at, n)) is not None:
        i, j = at[twice[1]] + 1
        raise ProblemError(
            f"{path}: entry {i} {j} appears twice, in lines {places[twice[0]]} and {places[twice[1]]}: give each once, "
            "of a symmetric matrix one half, which stands for both."
        )
    if symmetry == "skew-symmetric" and (at[:, 0] == at[:, 1]).any():
        raise ProblemError(f"{path}: a skew-symmetric matrix has no entries on the diagonal.")
    values = np.ones(count, np.int64) if field == "pattern" else _values(path, [row[2] for row in rows], places, field)
    return _filled(n, at, values, symmetry)


def _array(path: Path, rows: list[list[str]], places: list[int], n: int, field: str, symmetry: str) -> Any:
    half = n * (n + 1) // 2
    expected = {"general": n * n, "symmetric": half, "skew-symmetric": half - n}[symmetry]
    _count(path, len(rows), expected, f"a {symmetry} array of {n} by {n} holds {expected}, one a line")
    if symmetry == "general":
        at = np.stack([np.tile(np.arange(n), n), np.repeat(np.arange(n), n)], axis=1)
    else:
        columns, lower = np.triu_indices(n, 1 if symmetry == "skew-symmetric" else 0)
        at = np.stack([lower, columns], axis=1)
    for place, row in zip(places, rows, strict=True):
        if len(row) != 1:
            raise ProblemError(
                f"{path}: line {place}: {' '.join(row)[:40]!r} is not a single number: an array has one on each line."
            )
    return _filled(n, at, _values(path, [row[0] for row in rows], places, field), symmetry)


def _filled(n: int, at: Array, values: Array, symmetry: str) -> Any:
    if stays_sparse(n, 2 * len(values)):
        from scipy.sparse import coo_array

        if symmetry != "general":
            off = at[:, 0] != at[:, 1]
            mirrored = -values[off] if symmetry == "skew-symmetric" else values[off]
            at, values = np.concatenate([at, at[off][:, ::-1]]), np.concatenate([values, mirrored])
        return coo_array((values, (at[:, 0], at[:, 1])), shape=(n, n)).tocsr()
    W = np.zeros((n, n), values.dtype)
    if symmetry != "general":
        W[at[:, 1], at[:, 0]] = -values if symmetry == "skew-symmetric" else values
    W[at[:, 0], at[:, 1]] = values
    return W


def _values(path: Path, texts: list[str], places: list[int], field: str) -> Array:
    if "integer" not in field:
        return parse_floats(path, texts, lambda at: f"line {places[at]}: ")
    for place, text in zip(places, texts, strict=True):
        if not is_integer_text(text) or (field.startswith("unsigned") and int(text) < 0):
            raise ProblemError(
                f"{path}: line {place}: {text[:40]!r} is not a 64-bit integer as the field {field} has them: write its "
                "digits, 1000 for 1e3, or real in the first line."
            )
    return parse_numbers(path, texts)


def _count(path: Path, found: int, expected: int, what: str) -> None:
    if found != expected:
        why = "truncated?" if found < expected else "more than the header says."
        raise ProblemError(f"{path}: the header promises {expected} entries ({what}), found {found}: {why}")
