"""Text formats of the literature to matrices and back: k-cluster, MDPLIB, and DIMACS graphs in ASCII.

The formats list edges, and differ in sign and in the number of the first vertex. Reading turns each into a W to be
*minimised*, with vertices from 0 on. `grace_opt.instances` picks the reader by the file's name and content. Sources:
Lambert's k-cluster library; MDPLIB (Martí et al., Optsicom); Johnson & Trick (eds.), Cliques, Coloring, and
Satisfiability, DIMACS 26 (1996).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.exact_integers import too_large_error
from .._util.files import read_lines
from ..errors import ProblemError

Array = npt.NDArray[Any]
_REAL = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([ed][+-]?[0-9]+)?|inf|nan)", re.IGNORECASE)
#: Fortran's exponent, 1.5D2, as Python writes it.
_EXPONENT = str.maketrans("dD", "ee")


def read_pairs(path: Path) -> tuple[Array, int, str]:
    """Read a k-cluster or MDPLIB file; the number of entries in the header tells the two apart.

    Returns
    -------
    W : ndarray (n, n)
        int64 for k-cluster and for MDPLIB distances that are all whole numbers (objectives then differ by whole steps,
        which proofs can use), float64 otherwise.
    k : int
    source : str
        "k-cluster" or "MDPLIB".

    Raises
    ------
    ProblemError
        If lines are missing, a pair is repeated, or vertices do not exist or are numbered from the wrong start.
    """
    numbered = [(at, line.split()) for at, line in enumerate(read_lines(path, ProblemError), 1) if line.strip()]
    rows = [row for _, row in numbered]
    if len(rows[0]) not in (2, 3) or not all(map(is_integer_text, rows[0])):
        raise ProblemError(f"{path}: the first line must be 'n k m' (k-cluster) or 'n m' (MDPLIB).")
    header = [int(v) for v in rows[0]]
    is_cluster = len(header) == 3
    n, k = header[0], header[1]
    base, source = (1, "k-cluster") if is_cluster else (0, "MDPLIB")
    expected = header[2] if is_cluster else n * (n - 1) // 2
    if n < 1 or not 0 <= k <= n or expected < 0:
        raise ProblemError(f"{path}: the {source} header {' '.join(rows[0])!r} needs n >= 1 and 0 <= k <= n.")
    for at, row in numbered[1:]:
        if len(row) != 3:
            raise ProblemError(f"{path}: line {at} is {' '.join(row)[:40]!r}: the {source} lines are 'i j weight'.")
    lines, whole = [at for at, _ in numbered[1:]], rows[1:]
    if len(whole) != expected:
        few = "truncated?" if len(whole) < expected else "more than it says."
        raise ProblemError(
            f"{path}: the {source} header promises {expected} lines 'i j weight', found {len(whole)}: {few}"
        )
    given = parse_floats(path, [text for row in whole for text in row[:2]], lambda at: f"line {lines[at // 2]}: ")
    weight = parse_numbers(path, [row[2] for row in whole], lambda at: f"line {lines[at]}: ")
    ends = _ends(path, given.reshape(-1, 2), n, base, source)
    if (twice := first_duplicate(np.sort(ends, axis=1), n)) is not None:
        i, j = ends[twice[1]] + base
        raise ProblemError(
            f"{path}: the {source} pair {i} {j} appears twice, in lines {lines[twice[0]]} and {lines[twice[1]]}: give "
            "each pair once, in one direction."
        )
    weight = np.ones(expected) if is_cluster else weight
    if weight.dtype.kind == "u" or (weight.dtype.kind == "i" and (weight == np.iinfo(np.int64).min).any()):
        raise ProblemError(f"{path}: a distance is beyond 63 bits and cannot be negated: scale the distances.")
    return _matrix(n, ends, -weight), k, source


def read_dimacs(path: Path) -> tuple[Array, None, str]:
    """Read a DIMACS graph: W is the int64 adjacency matrix of its *complement*, so a k-clique has f = 0.

    Raises
    ------
    ProblemError
        If the problem line or edges are missing, or vertices do not exist. One loss goes unnoticed, because the header
        may count lines or edges: half the lines of a file that lists both directions, if whole edges are left.
    """
    n, promised, pairs, lines = 0, -1, [], []
    for number, line in enumerate(read_lines(path, ProblemError), 1):
        kind, *words = line.split() or ["c"]
        if kind == "c":
            continue
        if kind == "p" and promised < 0 and len(words) == 3 and all(map(is_integer_text, words[1:])):
            n, promised = int(words[1]), int(words[2])
        elif kind == "e" and promised >= 0 and len(words) == 2:
            pairs.append(words)
            lines.append(number)
        else:
            raise ProblemError(
                f"{path}, line {number}: {line[:40]!r} is none of 'c comment', 'p edge n m' (once, before the edges) "
                "and 'e i j'; vertex weights ('n i w') are not read."
            )
    if promised < 0 or n < 1:
        raise ProblemError(f"{path}: a DIMACS graph needs the line 'p edge n m', with n >= 1, before its edges.")
    given = parse_floats(path, [word for pair in pairs for word in pair], lambda at: f"line {lines[at // 2]}: ")
    ends = _ends(path, given.reshape(-1, 2), n, 1, "DIMACS")
    A = -_matrix(n, ends, -np.ones(len(ends)))
    edges = int(A.sum()) // 2
    # Some files of the collection list every edge in both directions; their headers count either edges or lines.
    if promised not in (len(pairs), edges):
        raise ProblemError(f"{path}: the DIMACS header promises {promised} edges, found {len(pairs)}: truncated?")
    if first_duplicate(ends, n) is not None or len(pairs) not in (edges, 2 * edges):
        raise ProblemError(
            f"{path}: {len(pairs)} lines name {edges} DIMACS edges: give each edge once, or each in both directions."
        )
    return 1 - A - np.eye(n, dtype=np.int64), None, "DIMACS"


def k_cluster_text(W: Array, k: int) -> str:
    """Write W = -A as a k-cluster file; the third column is the customary 0.5, which is ignored."""
    _need(W, "k-cluster", "W = -A with A the 0/1 adjacency matrix of a graph", np.isin(W, (0, -1)).all())
    i, j = np.nonzero(np.triu(W, 1))
    return _lines(f"{len(W)} {k} {len(i)}", (f"{a + 1} {b + 1} 0.5" for a, b in zip(i, j, strict=True)))


def mdplib_text(W: Array, k: int) -> str:
    """Write W = -d as an MDPLIB file, one pair per line."""
    _need(W, "MDPLIB", "W = -d with d symmetric distances", True)
    i, j = np.triu_indices(len(W), 1)
    listed = W[i, j]
    # Keep integers beyond 2**53 exact, and avoid -0.
    d = (0.0 - listed.astype(np.float64)).tolist() if listed.dtype.kind == "f" else [-int(w) for w in listed]
    return _lines(f"{len(W)} {k}", (f"{a} {b} {_short(w)}" for a, b, w in zip(i, j, d, strict=True)))


def dimacs_text(W: Array) -> str:
    """Write the DIMACS graph whose complement has the 0/1 adjacency matrix W."""
    _need(W, "DIMACS", "W the 0/1 adjacency matrix of the complement of the graph", np.isin(W, (0, 1)).all())
    i, j = np.nonzero(np.triu(1 - W, 1))
    comment = "c a clique on k vertices is a set with f = 0, where W is the adjacency matrix of the complement"
    return _lines(f"{comment}\np edge {len(W)} {len(i)}", (f"e {a + 1} {b + 1}" for a, b in zip(i, j, strict=True)))


def is_integer_text(text: str) -> bool:
    """Return whether a text is a plain integer; Python's int() also takes ``1_0`` and digits of other scripts."""
    return re.fullmatch(r"[+-]?[0-9]{1,4000}", text) is not None


def is_number_text(text: str) -> bool:
    """Return whether a text is a number, inf or nan; Python's float() also takes ``1_0`` and other scripts' digits.

    Fortran's ``1.5D2`` is one.
    """
    return _REAL.fullmatch(text) is not None


def parse_numbers(path: Path, texts: list[str], place: Callable[[int], str] = lambda at: "") -> Array:
    """Return int64 (or uint64) if all texts are integers, which float64 would round; else `parse_floats`."""
    if all(map(is_integer_text, texts)):
        whole = list(map(int, texts))
        for kind in (np.int64, np.uint64):
            if not whole or (min(whole) >= np.iinfo(kind).min and max(whole) <= np.iinfo(kind).max):
                return np.array(whole, dtype=kind)
        raise too_large_error(str(path), max(whole, key=abs))
    return parse_floats(path, texts, place)


def format_numbers(values: Array) -> list[str]:
    """Write every number as text that reads back as the same number and kind: ``1`` is an integer, ``1.0`` a float."""
    plain = values.astype(np.float64) if values.dtype.kind == "f" else values.astype(object)
    return [repr(value) if isinstance(value, float) else str(int(value)) for value in plain.tolist()]


def parse_floats(path: Path, texts: list[str], place: Callable[[int], str] = lambda at: "") -> Array:
    """Return the numbers as float64, Fortran's 1.5D2 as 150; `place` begins the message for one that is none.

    One that is too small or too large for float64, and would become 0 or infinite, is refused, and so are inf and nan.
    """
    what = f"{path} cannot be read as {path.suffix}: "
    for at, text in enumerate(texts):
        if not is_number_text(text):
            wrong = f"{text[:40]!r} is not a number: write it as 150, 1.5e2 or 1.5D2"
            wrong = wrong if text else "the cell is empty, and every weight needs a number"
            raise ProblemError(f"{what}{place(at)}{wrong}.")
    values = np.array([float(text.translate(_EXPONENT)) for text in texts], dtype=np.float64)
    for at in np.flatnonzero((values == 0) | np.isinf(values)).tolist():
        if re.match(r"[-+.0]*[1-9]", texts[at]):
            limit, way = ("below 4.9e-324", "up") if values[at] == 0 else ("beyond 1.8e308", "down")
            raise ProblemError(
                f"{what}{place(at)}{texts[at][:40]!r} would become {abs(values[at]):g}, as any number {limit} does: "
                f"scale the weights {way}."
            )
    for at in np.flatnonzero(~np.isfinite(values))[:1].tolist():
        raise ProblemError(f"{what}{place(at)}{texts[at][:40]!r} is no weight: every weight must be finite.")
    return values


def first_duplicate(pairs: Array, n: int) -> tuple[int, int] | None:
    """Return the indices of two equal pairs in (m, 2), numbers 0 to n - 1; None if all differ."""
    codes = pairs[:, 0] * n + pairs[:, 1]
    order = np.argsort(codes, kind="stable")
    again = np.flatnonzero(codes[order][1:] == codes[order][:-1])
    return (int(order[again[0]]), int(order[again[0] + 1])) if len(again) else None


def _need(W: Array, source: str, form: str, entries_fit: Any) -> None:
    reason = (
        "its diagonal is not zero"
        if np.diagonal(W).any()
        else "it is not symmetric"
        if (W != W.T).any()
        else None
        if entries_fit
        else "it has other entries"
    )
    if reason:
        raise ProblemError(
            f"cannot write W of shape {W.shape} as {source}: {reason}. The format holds {form}; write .npz for any W."
        )


def _ends(path: Path, given: Array, n: int, base: int, source: str) -> Array:
    """Check vertices and number them from 0; the message says if the file numbers them from the wrong start."""
    with np.errstate(invalid="ignore"):  # anything but a 64-bit integer changes in the conversion
        ends = given.astype(np.int64)
    wrong = (ends != given).any(1) | (ends < base).any(1) | (ends >= n + base).any(1) | (ends[:, 0] == ends[:, 1])
    if wrong.any():
        low, high = (int(ends.min()), int(ends.max()))
        other = 1 - base
        hint = (
            f" The file looks {other}-based (it has a vertex {low if base else high}); {source} counts from {base}: "
            f"{'add 1 to' if base else 'take 1 from'} every vertex number."
            if (low < base or high >= n + base) and other <= low and high < n + other
            else ""
        )
        pair = " ".join(f"{v:g}" for v in given[_first(wrong)])
        raise ProblemError(
            f"{path}: {source} vertices must be two different ones of {base} to {n - 1 + base}, found {pair!r}.{hint}"
        )
    return ends - base


def _matrix(n: int, ends: Array, weight: Array) -> Array:
    # Beyond 2**53 every float is whole, so wholeness means nothing.
    whole = weight.dtype.kind == "i" or bool((weight == np.round(weight)).all() and (np.abs(weight) < 2**53).all())
    W = np.zeros((n, n), np.int64 if whole else np.float64)
    W[ends[:, 0], ends[:, 1]] = W[ends[:, 1], ends[:, 0]] = weight
    return W


def _short(w: float) -> str:
    return str(int(w)) if w == int(w) and abs(w) < 2**53 else repr(w)


def _first(wrong: Array) -> int:
    return int(np.flatnonzero(wrong)[0])


def _lines(header: str, lines: Any) -> str:
    return "\n".join([header, *lines]) + "\n"
