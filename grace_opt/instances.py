"""Instances on disk: read and write W and k in the formats that people have, by file extension or by looking inside.

==================  ==============================================================================================
format              what it holds
==================  ==============================================================================================
.npy                W (..., n, n)
.npz, .safetensors  W under ``W`` (or the only matrix in the file), optionally ``k``
.csv                W, one row a line, no header
.mtx                MatrixMarket: W, symmetric or general
k-cluster .dat      ``n k m``, then ``i j weight`` with 1-based vertices; the weight is ignored, W = -A: f = -2·(edges)
MDPLIB .txt         ``n m``, then ``i j d_ij`` with 0-based vertices; W = -d: f = -2·(dispersion)
==================  ==============================================================================================

Sources: Lambert's k-cluster library; MDPLIB (Martí et al., Optsicom); NIST MatrixMarket.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ProblemError

Array = npt.NDArray[Any]
SUFFIXES = (".npy", ".npz", ".safetensors", ".csv", ".mtx", ".dat", ".txt")


@dataclass(frozen=True)
class Instance:
    """W, and k where the file states it.

    Attributes
    ----------
    W : ndarray (..., n, n)
    k : int, ndarray or None
    source : str
        The format it was read from.
    """

    W: Array
    k: Any
    source: str


def read(path: str | os.PathLike[str]) -> Instance:
    """Read an instance file.

    Parameters
    ----------
    path : path
        One of the formats of this module.

    Raises
    ------
    ProblemError
        If the file is missing, of an unknown kind, truncated, or names vertices that do not exist.

    Examples
    --------
    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "w.csv")
    >>> write(path, [[1.0, 0.0], [0.0, 2.0]])
    >>> read(path).W.tolist()
    [[1.0, 0.0], [0.0, 2.0]]
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ProblemError(f"{path}: unknown kind {path.suffix!r}; readable are {', '.join(SUFFIXES)}.")
    if not path.is_file():
        raise ProblemError(f"no instance file at {path}.")
    try:
        return reader(path)
    except ProblemError:
        raise
    except Exception as error:  # each library has its own errors for broken files; all mean the same to the user
        # numpy's advice for what is no array file is to load it unsafely; that is not ours.
        why = "" if "pickle" in str(error) else f": {error}"
        raise ProblemError(f"{path} cannot be read as {path.suffix} (truncated, or another format?){why}") from error


def write(path: str | os.PathLike[str], W: Any, k: Any = None) -> None:
    """Write W (and k, where the format has room for it) to .npy, .npz, .safetensors, .csv or .mtx, aside and renamed.

    Raises
    ------
    ProblemError
        If the format is not one of these, or has no room for k or for a batch.
    """
    path, W = Path(path), np.asarray(W)
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz", ".safetensors", ".csv", ".mtx"):
        raise ProblemError(f"{path}: cannot write {suffix!r}; write .npy, .npz, .safetensors, .csv or .mtx.")
    if k is not None and suffix not in (".npz", ".safetensors"):
        raise ProblemError(f"{path}: {suffix} has no room for k; write .npz or .safetensors.")
    if W.ndim != 2 and suffix in (".csv", ".mtx"):
        raise ProblemError(f"{path}: {suffix} holds one matrix, not shape {W.shape}; write .npz or .safetensors.")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=suffix)
    os.close(handle)
    try:
        _write(Path(name), suffix, W, k)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write(path: Path, suffix: str, W: Array, k: Any) -> None:
    arrays = {"W": np.ascontiguousarray(W)} | ({} if k is None else {"k": np.asarray(k)})
    if suffix == ".npy":
        np.save(path, W, allow_pickle=False)
    elif suffix == ".npz":
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    elif suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file(arrays, path)
    elif suffix == ".csv":
        np.savetxt(path, W, delimiter=",", fmt="%.17g")
    else:
        from scipy.io import mmwrite

        mmwrite(path, W, precision=17)


def _npy(path: Path) -> Instance:
    return Instance(np.load(path, allow_pickle=False), None, "npy")


def _npz(path: Path) -> Instance:
    with np.load(path, allow_pickle=False) as file:
        return _from_mapping(path, {name: file[name] for name in file.files}, "npz")


def _safetensors(path: Path) -> Instance:
    from safetensors.numpy import load_file

    return _from_mapping(path, load_file(path), "safetensors")


def _from_mapping(path: Path, arrays: dict[str, Array], source: str) -> Instance:
    matrices = [name for name, a in arrays.items() if a.ndim >= 2 and a.shape[-1] == a.shape[-2]]
    name = "W" if "W" in arrays else matrices[0] if len(matrices) == 1 else None
    if name is None:
        raise ProblemError(f"{path} holds {sorted(arrays)}: name the matrix 'W', or store just one square matrix.")
    k = arrays.get("k")
    return Instance(arrays[name], k if k is None or k.ndim else int(k), source)


def _csv(path: Path) -> Instance:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy only warns of an empty file
        return Instance(np.loadtxt(path, delimiter=",", ndmin=2), None, "csv")


def _mtx(path: Path) -> Instance:
    from scipy.io import mmread

    matrix = mmread(path)
    dense = matrix.toarray() if hasattr(matrix, "toarray") else np.asarray(matrix)
    return Instance(dense, None, "mtx")


def _text(path: Path) -> Instance:
    """k-cluster and MDPLIB, told apart by the number of entries in the header."""
    rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
    if not rows or len(rows[0]) not in (2, 3):
        raise ProblemError(f"{path}: the first line must be 'n k m' (k-cluster) or 'n m' (MDPLIB).")
    header = [int(v) for v in rows[0]]
    is_cluster = len(header) == 3
    n, k = header[0], header[1]
    base, source = (1, "k-cluster") if is_cluster else (0, "MDPLIB")
    expected = header[2] if is_cluster else n * (n - 1) // 2
    whole = [row for row in rows[1:] if len(row) == 3]
    if len(whole) != expected or len(rows) - 1 != expected:
        raise ProblemError(
            f"{path}: the {source} header promises {expected} lines 'i j weight', found {len(whole)}: truncated?"
        )
    edges = np.array([[float(v) for v in row] for row in whole]).reshape(expected, 3)
    ends = edges[:, :2].astype(np.int64) - base
    if expected and (ends.min() < 0 or ends.max() >= n or (ends[:, 0] == ends[:, 1]).any()):
        raise ProblemError(f"{path}: {source} vertices must be two different ones of {base} to {n - 1 + base}.")
    # Integers where the format has them: objectives then differ by whole steps, which proofs can use.
    weight = np.ones(expected, np.int64) if is_cluster else edges[:, 2]
    W = np.zeros((n, n), weight.dtype)
    W[ends[:, 0], ends[:, 1]] = W[ends[:, 1], ends[:, 0]] = -weight
    return Instance(W, k, source)


_READERS: dict[str, Callable[[Path], Instance]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".csv": _csv,
    ".mtx": _mtx,
    ".dat": _text,
    ".txt": _text,
}
