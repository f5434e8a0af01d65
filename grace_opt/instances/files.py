"""Read and write instances, W and k, in common file formats, recognised by extension or content.

==================  ==============================================================================================
format              content
==================  ==============================================================================================
.npy                W (..., n, n)
.npz, .safetensors  W under ``W`` (or the only matrix in the file), optionally ``k``
.csv, .tsv          W, one row a line; perhaps names in the first row, and in the first column as well
.npz of scipy       a sparse W, as ``scipy.sparse.save_npz`` writes it (csr, csc or coo), optionally ``k``
.mtx                MatrixMarket: W, coordinate or array; symmetric, skew-symmetric or general
k-cluster .dat      ``n k m``, then ``i j weight`` with 1-based vertices; the weight is ignored, W = -A: f = -2·(edges)
MDPLIB .txt         ``n m``, then ``i j d_ij`` with 0-based vertices; W = -d: f = -2·(dispersion)
DIMACS .clq, .col   ``p edge n m``, then ``e i j`` with 1-based vertices; W = adjacency of the *complement*:
                    f = 2·(edges missing), so that S is a clique exactly where f = 0
==================  ==============================================================================================

All of them can be written too, and the text formats (from .csv on) are read and written gzipped as well:
``w.csv.gz``. W is int64 if the format makes all weights whole numbers: objectives then differ by whole steps, which
proofs can use. W of scipy, and of a .mtx in coordinates with many vertices and few entries, stays sparse, and is
written as such. A graph in a .mtx file is read as its adjacency matrix, unchanged. Numbers may have Fortran's exponent,
1.5D2. A text file that gives a weight twice is refused, as programs differ on what that means; a `symmetric` one lists
one half. A file that was cut short or damaged raises an error, as far as the format shows it; for this reason the last
line of a text file must end with a newline.

Sources: Lambert's k-cluster library; MDPLIB (Martí et al., Optsicom); NIST MatrixMarket; DIMACS's second challenge.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .._util import files
from .._util.array_like import as_tensor, to_array, wrong_dtype_error
from .._util.matrices import checked_labels, place_of, with_labels
from .._util.sparse_rows import by_rows
from ..errors import ProblemError
from . import formats, matrix_market
from .csv_tables import read_table, table_text

Array = npt.NDArray[Any]
#: Formats that may be gzipped, with .gz behind their suffix.
TEXT_SUFFIXES = (".csv", ".tsv", ".mtx", ".dat", ".txt", ".clq", ".col")
SUFFIXES = (".npy", ".npz", ".safetensors", *TEXT_SUFFIXES)
READABLE = f"{', '.join(SUFFIXES)}; text also with .gz behind it"
#: Formats that can store k.
SUFFIXES_WITH_K = (".npz", ".safetensors", ".dat", ".txt")
#: Per source format: the factor from f to the quantity it counts, and the name of that quantity.
OBJECTIVE_TERMS = {
    "k-cluster": (-0.5, "edges"),
    "MDPLIB": (-0.5, "dispersion"),
    "DIMACS": (0.5, "edges missing from a clique"),
}
#: Source formats that number vertices from 1; here they count from 0, as rows of W do.
COUNT_FROM_1 = ("k-cluster", "DIMACS", "mtx")


@dataclass(frozen=True)
class Instance:
    """W, and k if the file or the generator gives it.

    Attributes
    ----------
    W : ndarray (..., n, n), or scipy.sparse.csr_array (n, n)
    k : int, ndarray or None
    source : str
        The file format or the generator that W comes from.
    planted : tuple of int or None
        A set of k vertices that is optimal by construction, if a generator planted one.
    labels : tuple of str or None
        Names of the vertices, if the file has them: ``Problem.of(made.W, k, labels=made.labels)``.
    """

    W: Array
    k: Any
    source: str
    planted: tuple[int, ...] | None = None
    labels: tuple[str, ...] | None = None

    def describe(self, objective: float) -> str | None:
        """Express an objective in the source's own terms, "edges: 29" for f = -58; None if it has none.

        Parameters
        ----------
        objective : float
            f(S).

        Examples
        --------
        >>> Instance(np.zeros((2, 2)), 1, "k-cluster").describe(-58.0)
        'edges: 29'
        """
        if self.source not in OBJECTIVE_TERMS:
            return None
        factor, name = OBJECTIVE_TERMS[self.source]
        return f"{name}: {0.0 + factor * float(objective):.12g}"


def read(path: str | os.PathLike[str]) -> Instance:
    """Read an instance file.

    Parameters
    ----------
    path : path
        A file in one of the formats of this module.

    Raises
    ------
    ProblemError
        If the file is missing, of an unknown kind, truncated, or names vertices that do not exist.
    OptionError
        If `path` is not the name of a file.

    Examples
    --------
    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "w.csv")
    >>> write(path, [[1.0, 0.0], [0.0, 2.0]])
    >>> read(path).W.tolist()
    [[1.0, 0.0], [0.0, 2.0]]
    """
    path = Path(files.path_text(path))
    suffix = suffix_of(path)
    reader = _READERS.get(suffix)
    if reader is None:
        kind = f"unknown kind {suffix!r}" if suffix else "its name has no ending, which says the kind"
        kind = "it is a folder" if path.is_dir() else kind
        pipe = " Pipes are not read: save what they bring." if path.name == "-" or files.is_stream(path) else ""
        raise ProblemError(f"{path}: {kind}; readable are {READABLE}.{pipe}")
    try:
        if not path.is_file():
            if path.exists():  # a folder, a pipe that would block, a device without end
                raise ProblemError(f"{path} cannot be read as {suffix}: it is not a regular file.")
            raise ProblemError(f"no instance file at {path}.")
        made = reader(path)
        if made.W.ndim < 2 or made.W.shape[-1] != made.W.shape[-2] or made.W.dtype.kind not in "biuf":
            raise ProblemError(f"{path} holds {made.W.dtype} of shape {made.W.shape}: W must be square and real.")
        return made
    except ProblemError:
        raise
    except MemoryError as error:
        raise ProblemError(f"{path} holds W of a shape that does not fit into memory: {error}.") from error
    except Exception as error:  # every library raises other errors for broken files; all mean the same to the user
        if "Object arrays" in str(error):
            raise ProblemError(f"{path} holds Python objects, which are not loaded: save W as numbers.") from error
        # For a file that is not an array, numpy advises loading it unsafely; we do not repeat that.
        why = "" if "pickle" in str(error) else f": {error}"
        raise ProblemError(f"{path} cannot be read as {suffix} (truncated, or another format?){why}") from error


def suffix_of(path: str | os.PathLike[str]) -> str:
    """The suffix that names a file's format, in lower case: without .gz behind a text format.

    Examples
    --------
    >>> suffix_of("W.CSV.gz"), suffix_of("w.npy.gz")
    ('.csv', '.npy.gz')
    """
    first, *packed = [each.lower() for each in Path(path).suffixes[-2:]][::-1] or [""]
    if first == ".gz" and packed:
        return packed[0] if packed[0] in TEXT_SUFFIXES else packed[0] + first
    return first


def write(path: str | os.PathLike[str], W: Any, k: Any = None, *, labels: Any = None) -> None:
    """Write W, and k if the format can store it, in the format given by the suffix, atomically.

    Parameters
    ----------
    path : path
        Its suffix is one of `SUFFIXES`; .dat is k-cluster and .txt is MDPLIB. With .gz behind it, text is gzipped.
    W : array_like (..., n, n), or scipy.sparse matrix (n, n)
        Sparse W stays so in .npz, which scipy then reads as well, and in .mtx. .dat needs W = -A with a 0/1 matrix A,
        .txt a zero diagonal, .clq and .col the 0/1 matrix of a complement graph;
        a batch fits into .npy, .npz and .safetensors.
    k : int or array, optional
        Fits into .npz and .safetensors, and must be given for .dat and .txt, whose headers state it.
    labels : sequence of n names, optional
        Fit into .csv and .tsv; those of a DataFrame are written there by default.

    Raises
    ------
    ProblemError
        If the format is not one of these or cannot store this W, k or a batch; or if the file cannot be written.
    OptionError
        If `path` is not the name of a file.

    Examples
    --------
    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "triangle.clq")
    >>> write(path, [[0, 0, 1], [0, 0, 0], [1, 0, 0]])
    >>> print(open(path).read().splitlines()[1:])
    ['p edge 3 2', 'e 1 2', 'e 2 3']
    """
    path = Path(files.path_text(path))
    W, own = with_labels(W)
    if own is None and hasattr(W, "tocsr") and suffix_of(path) in (".npz", ".mtx"):
        content = _sparse_content(path, by_rows(W), k, labels)
        return files.write_file(path, _packed(path, content), ProblemError)
    W = _numbers(path, "W", as_tensor(W, "W").cpu()) if isinstance(W, torch.Tensor) else to_array(W, "W")
    if k is not None:
        k = to_array(k, "k", "an integer, or an array of integers with one k per instance")
        _whole(path, k, W)
    suffix = suffix_of(path)
    if suffix not in SUFFIXES:
        what = repr(suffix) if suffix else "a file without an ending, which says the kind"
        what = "to a folder" if path.is_dir() else what
        raise ProblemError(f"{path}: cannot write {what}; write {READABLE}.")
    marks = {".csv": ",", ".tsv": "\t"}
    if labels is not None and suffix not in marks:
        raise ProblemError(f"{path}: {suffix} cannot store labels; write .csv.")
    if k is not None and suffix not in SUFFIXES_WITH_K:
        raise ProblemError(f"{path}: {suffix} cannot store k; write .npz or .safetensors.")
    if W.ndim < 2 or W.shape[-1] != W.shape[-2]:
        raise ProblemError(f"W has shape {W.shape}: give a square matrix (n, n) or a batch (..., n, n).")
    if W.ndim != 2 and suffix not in (".npy", ".npz", ".safetensors"):
        raise ProblemError(f"{path}: {suffix} holds one matrix, not shape {W.shape}; write .npz or .safetensors.")
    if W.dtype.kind not in "biuf" or W.dtype.itemsize > 8:
        raise ProblemError(f"W has dtype {W.dtype}: give real numbers of at most 64 bits.")
    names = own if labels is None else checked_labels(labels, W.shape[-1])
    if W.dtype.kind == "f" and not (finite := np.isfinite(W)).all():
        at = [int(i) for i in np.argwhere(~finite)[0]]
        raise ProblemError(f"{path}: {place_of(at, names)} is {W[tuple(at)]}: every weight must be finite.")
    content = table_text(W, names, marks[suffix]) if suffix in marks else _content(path, suffix, W, k)
    files.write_file(path, _packed(path, content), ProblemError)


def _packed(path: Path, content: str | bytes) -> str | bytes:
    if path.suffix.lower() != ".gz":
        return content
    return gzip.compress(
        content.encode() if isinstance(content, str) else content, mtime=0
    )  # equal instances, equal files


def _sparse_content(path: Path, W: Any, k: Any, labels: Any) -> str | bytes:
    """Return the content of the file of a sparse W: .npz as scipy writes it, or .mtx in coordinates."""
    if labels is not None:
        raise ProblemError(f"{path}: {suffix_of(path)} cannot store labels; write .csv.")
    if W.shape[0] != W.shape[1] or W.dtype.kind not in "iuf":
        raise ProblemError(f"W is {W.dtype} of shape {W.shape}: give a square matrix of real numbers.")
    if W.dtype.kind == "f" and not (finite := np.isfinite(W.data)).all():
        i, j = (int(x[~finite][0]) for x in W.tocoo().coords)
        raise ProblemError(f"{path}: {place_of([i, j], None)} is {W[i, j]}: every weight must be finite.")
    if suffix_of(path) == ".mtx":
        if k is not None:
            raise ProblemError(f"{path}: .mtx cannot store k; write .npz or .safetensors.")
        return matrix_market.sparse_text(W)
    arrays = {"format": np.array(b"csr"), "shape": W.shape, "data": W.data, "indices": W.indices, "indptr": W.indptr}
    if k is not None:
        _whole(path, given := to_array(k, "k", "an integer"), W)
        arrays["k"] = given
    buffer = BytesIO()
    np.savez_compressed(buffer, _is_array=np.array(True), **arrays)
    return buffer.getvalue()


def _content(path: Path, suffix: str, W: Array, k: Array | None) -> str | bytes:
    """Return the content of the file."""
    if suffix in (".clq", ".col"):
        return formats.dimacs_text(W)
    if suffix in (".dat", ".txt"):
        return _with_k(path, suffix, W, k)
    if suffix == ".mtx":
        return matrix_market.matrix_text(W)
    arrays = {"W": np.ascontiguousarray(W)} | ({} if k is None else {"k": k})
    if suffix == ".safetensors":
        from safetensors.numpy import save

        content: bytes = save(arrays)
        return content
    buffer = BytesIO()
    if suffix == ".npy":
        np.save(buffer, arrays["W"], allow_pickle=False)
    else:
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def _with_k(path: Path, suffix: str, W: Array, k: Array | None) -> str:
    """Return the text in a format that states k in the first line."""
    stated = k if k is not None and k.ndim == 0 else None
    text = (formats.k_cluster_text if suffix == ".dat" else formats.mdplib_text)(
        W, 0 if stated is None else int(stated)
    )
    if stated is None or not 0 <= stated <= len(W):
        raise ProblemError(f"{path}: {suffix} states k in its first line: give k= an integer from 0 to {len(W)}.")
    return text


def _npy(path: Path) -> Instance:
    with path.open("rb") as file:
        W = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1):
            raise ProblemError(f"{path} holds more than its header says, {W.dtype} of shape {W.shape}: it was changed.")
    return Instance(W, None, "npy")


def _npz(path: Path) -> Instance:
    with np.load(path, allow_pickle=False) as file:
        # One changed length in the directory makes zipfile skip members, for example k, silently.
        end = path.read_bytes()[-22 - len(file.zip.comment) :]
        if (promised := int.from_bytes(end[10:12], "little")) != len(file.zip.infolist()):
            raise ProblemError(
                f"{path}: its end promises {promised} arrays, its directory lists {len(file.zip.infolist())}: it was "
                "damaged."
            )
        arrays = {name: file[name] for name in file.files}
    if "format" in arrays and "shape" in arrays:
        W = _of_scipy(path, arrays)
        return Instance(W, _whole(path, arrays.get("k"), W), "npz")
    return _from_mapping(path, arrays, "npz")


def _of_scipy(path: Path, arrays: Mapping[str, Any]) -> Any:
    """Return the matrix of a file of scipy, with every index checked: scipy itself reads beyond arrays if one lies."""
    from scipy.sparse import bsr_array, coo_array, csc_array, csr_array

    layout = arrays["format"].item()
    layout = layout.decode() if isinstance(layout, bytes) else str(layout)
    shape = tuple(int(size) for size in arrays["shape"])
    if layout == "coo":
        made = coo_array((arrays["data"], (arrays["row"], arrays["col"])), shape=shape)
    elif layout in ("csr", "csc"):
        kind = csr_array if layout == "csr" else csc_array
        made = kind((arrays["data"], arrays["indices"], arrays["indptr"]), shape=shape)
        made.check_format(full_check=True)
    elif layout == "bsr":
        made = bsr_array((arrays["data"], arrays["indices"], arrays["indptr"]), shape=shape)
    elif layout == "dia":
        made = _of_diagonals(path, arrays["data"], arrays["offsets"], shape)
    else:
        raise ProblemError(f"{path} holds a sparse matrix as {layout}: save it as csr, csc, bsr, coo or dia.")
    return by_rows(made)


def _of_diagonals(path: Path, data: Array, offsets: Array, shape: tuple[int, ...]) -> Any:
    """Return the matrix whose entry in row j - o and column j is ``data[d, j]``, o being the d-th offset."""
    from scipy.sparse import coo_array

    if data.ndim != 2 or offsets.shape != data.shape[:1] or offsets.dtype.kind not in "iu" or len(shape) != 2:
        raise ProblemError(
            f"{path} holds diagonals of shape {data.shape} and offsets of shape {offsets.shape} and dtype "
            f"{offsets.dtype}: it must be one integer for each row of data."
        )
    columns = np.broadcast_to(np.arange(data.shape[1]), data.shape)
    rows = columns - offsets.astype(np.int64)[:, None]
    inside = (rows >= 0) & (rows < shape[0]) & (columns < shape[1]) & (data != 0)
    return coo_array((data[inside], (rows[inside], columns[inside])), shape=shape)


def _safetensors(path: Path) -> Instance:
    from safetensors.torch import load_file  # numpy has no bfloat16

    # Copied: they would be the file itself, which somebody may write to later.
    arrays = {name: array.clone() for name, array in load_file(path).items()}
    return _from_mapping(path, arrays, "safetensors")


def _from_mapping(path: Path, arrays: Mapping[str, Any], source: str) -> Instance:
    matrices = [name for name, a in arrays.items() if a.ndim >= 2 and a.shape[-1] == a.shape[-2]]
    name = "W" if "W" in arrays else matrices[0] if len(matrices) == 1 else None
    if name is None:
        raise ProblemError(f"{path} holds {sorted(arrays)}: name the matrix 'W', or store just one square matrix.")
    k = _numbers(path, "k", arrays["k"]) if "k" in arrays else None
    W = _numbers(path, name, arrays[name])
    return Instance(W, _whole(path, k, W), source)


def _numbers(path: Path, name: str, value: Any) -> Array:
    """Return an array; tensors are converted, and bfloat16, which numpy lacks, becomes float32 without loss."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    except TypeError:
        raise ProblemError(f"{path}: {wrong_dtype_error(name, value.dtype)}") from None


def _whole(path: Path, k: Array | None, W: Any) -> Any:
    """Return a file's k: an int, or one per instance; raise if it is not whole, or W has no such number of vertices."""
    if k is None:
        return None
    if k.dtype.kind not in "iu":
        raise ProblemError(
            f"{path}: k has dtype {k.dtype} and is {np.array2string(k, threshold=4)}: it must be an integer, or "
            "integers, one per instance."
        )
    n = W.shape[-1] if W.ndim else 0
    if wrong := [int(each) for each in k.flat if not 0 <= each <= n]:
        raise ProblemError(f"{path}: k is {wrong[0]}: it must be from 0 to {n}, the number of vertices of W.")
    return k if k.ndim else int(k)


def _csv(path: Path) -> Instance:
    W, labels = read_table(path, suffix_of(path))
    return Instance(W, None, "csv", labels=labels)


def _mtx(path: Path) -> Instance:
    return Instance(matrix_market.read_matrix(path), None, "mtx")


def _text(path: Path) -> Instance:
    return Instance(*formats.read_pairs(path))


def _dimacs(path: Path) -> Instance:
    return Instance(*formats.read_dimacs(path))


_READERS: dict[str, Callable[[Path], Instance]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".csv": _csv,
    ".tsv": _csv,
    ".mtx": _mtx,
    ".dat": _text,
    ".txt": _text,
    ".clq": _dimacs,
    ".col": _dimacs,
}
