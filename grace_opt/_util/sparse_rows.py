"""`by_rows`, `filled`: sparse W by rows or as an array, entries given twice added exactly, index arrays checked.

When: W comes as a scipy.sparse matrix or a sparse tensor, from memory or a file, to stay sparse or to become an array.
scipy and torch add such entries in W's own dtype, where small integers overflow.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ProblemError
from .exact_integers import MAX_EXACT_INTEGER, too_large_error

#: Integers are added in two parts, of this many low bits and of the rest.
LOW_BITS = 32


def by_rows(W: Any, name: str = "W") -> Any:
    """Return a scipy.sparse matrix as csr_array, sorted and without duplicates.

    Its dtype is that of W if no entry is given twice, else int64 or at least float64. W itself is not changed, and its
    arrays are taken over where they are so already. Matrices that are not square or not real are returned as they are.

    Raises
    ------
    ProblemError
        If an index points outside of W, or a sum of integers is beyond 2**53 (only then: the parts may be).

    Examples
    --------
    >>> import scipy.sparse
    >>> twice = scipy.sparse.coo_array((np.array([100, 100], np.int8), ([0, 0], [0, 0])), shape=(1, 1))
    >>> by_rows(twice).toarray().tolist()
    [[200]]
    """
    from scipy.sparse import csr_array

    dtype = np.dtype(W.dtype)
    if len(W.shape) != 2 or W.shape[0] != W.shape[1] or dtype.kind not in "iuf":
        return W
    _check_indices(W, name)
    if W.format in ("csr", "csc", "bsr"):
        used = int(W.indptr[-1])  # the arrays may be longer, and tocoo would read all of them
        W = type(W)((W.data[:used], W.indices[:used], W.indptr), shape=W.shape)
        if W.format == "csr" and W.has_canonical_format:
            return csr_array(W)
    entries = W.tocoo()
    ends = entries.coords if hasattr(entries, "coords") else (entries.row, entries.col)
    return _added_up(entries.data, ends, W.shape, name)


def from_torch(W: Tensor) -> Any:
    """Return a sparse tensor (n, n) of any layout as a scipy.sparse.coo_array; duplicates are not added yet."""
    from scipy.sparse import coo_array

    indices, data = _entries(W)
    return coo_array((data, (indices[0], indices[1])), shape=tuple(W.shape))


def filled(W: Tensor, name: str = "W") -> npt.NDArray[Any]:
    """Return a sparse tensor of real numbers, of any shape and layout, as an array; dtypes are those of `by_rows`.

    Numbers of 16 bits become float32.

    Raises
    ------
    ProblemError
        As `by_rows`.

    Examples
    --------
    >>> pages = torch.sparse_coo_tensor([[1, 1], [0, 0], [0, 0]], torch.tensor([100, 100]).to(torch.int8), (2, 1, 1))
    >>> filled(pages).tolist()
    [[[0]], [[200]]]
    """
    indices, data = _entries(W)
    lead, width = W.shape[: len(indices)], math.prod(W.shape[len(indices) :])
    if not all(_within(index, count) for index, count in zip(indices, lead, strict=True)):
        raise ProblemError(f"{name} is a damaged sparse tensor: its indices point outside its shape {tuple(W.shape)}.")
    places = np.zeros(len(data), np.int64)
    for index, count in zip(indices, lead, strict=True):
        places = places * count + index
    places = (places[:, None] * width + np.arange(width)).ravel()
    made = _added_up(data.reshape(-1), (np.zeros_like(places), places), (1, max(W.numel(), 1)), name)
    return np.asarray(made.toarray()).ravel()[: W.numel()].reshape(W.shape)


def _entries(W: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """The indices of a sparse tensor's entries, a row for each sparse dimension, and the entries, as given."""
    flat = W.detach().cpu().to_sparse_coo()  # type: ignore[no-untyped-call]
    values = flat._values()  # coalesced, small integers would overflow
    values = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return flat._indices().numpy(), values.numpy()


def rounding_of(W: Any) -> float:
    """Return eps of a sparse W's entries as they were given, by which it may be asymmetric; 0 for integers."""
    if isinstance(W, Tensor):
        return float(torch.finfo(W.dtype).eps) if W.dtype.is_floating_point else 0.0
    dtype = np.dtype(W.dtype)
    if dtype.kind != "f":
        return 0.0
    return float(np.finfo(dtype if dtype.itemsize < 8 else np.float64).eps)


def _added_up(data: npt.NDArray[Any], ends: Any, shape: tuple[int, int], name: str) -> Any:
    """The entries with those of the same place added: as csr_array, in their dtype if there are none."""
    dtype = data.dtype
    if dtype.kind == "f":
        wide = np.result_type(dtype, np.float64)
        with np.errstate(over="ignore"):  # infinite sums are named by whoever wants finite ones
            made = _added(data.astype(wide), ends, shape)
    else:
        made = _added_integers(data, ends, shape, name)
    once = made.nnz == len(data) and dtype.itemsize > 2 * (dtype.kind == "f")  # scipy has no float16
    return made.astype(dtype) if once else made


def _added(data: npt.NDArray[Any], ends: Any, shape: tuple[int, int]) -> Any:
    from scipy.sparse import coo_array

    made = coo_array((data, ends), shape=shape).tocsr()
    made.sum_duplicates()
    return made


def _added_integers(data: npt.NDArray[Any], ends: Any, shape: tuple[int, int], name: str) -> Any:
    """The sums, in int64 or as they came, whatever the parts are."""
    most = max(abs(int(data.max())), abs(int(data.min()))) if len(data) else 0
    if most * len(data) < 2**63:
        made = _added(data.astype(np.int64), ends, shape)
        refuse_too_large(made.data, name)
        return made
    data = data if data.dtype == np.uint64 else data.astype(np.int64)
    low = _added((data & np.asarray(2**LOW_BITS - 1, data.dtype)).astype(np.int64), ends, shape)
    made = _added((data >> np.asarray(LOW_BITS, data.dtype)).astype(np.int64), ends, shape)
    high = made.data + (low.data >> LOW_BITS)
    rest = low.data & (2**LOW_BITS - 1)
    for place in (high.argmax(), high.argmin()):
        if abs(worst := int(high[place]) * 2**LOW_BITS + int(rest[place])) > MAX_EXACT_INTEGER:
            raise too_large_error(name, worst)
    made.data = high * 2**LOW_BITS + rest
    refuse_too_large(made.data, name)
    return made


def refuse_too_large(data: npt.NDArray[Any], name: str) -> None:
    """Raise ProblemError if there is an integer beyond 2**53."""
    for worst in (data.max(), data.min()) if len(data) else ():
        if abs(int(worst)) > MAX_EXACT_INTEGER:
            raise too_large_error(name, int(worst))


def _check_indices(W: Any, name: str) -> None:
    """Refuse index arrays that point elsewhere than into W: scipy trusts them, and so do compiled loops."""
    if W.format == "coo":
        row, column = W.coords if hasattr(W, "coords") else (W.row, W.col)
        sound = len(row) == len(column) == len(W.data) and all(
            _within(indices, W.shape[0]) for indices in (row, column)
        )
    elif W.format in ("csr", "csc", "bsr"):
        high, wide = W.data.shape[1:] or (1, 1)
        starts, steps = W.indptr, np.diff(W.indptr)
        sound = (
            len(starts) == W.shape[0] // high + 1
            and starts[0] == 0
            and not (steps < 0).any()
            and starts[-1] <= min(len(W.indices), len(W.data))
            and _within(W.indices[: starts[-1]], W.shape[1] // wide)
        )
    else:  # dia, lil and dok check what they are given
        return
    if not sound:
        raise ProblemError(
            f"{name} is a damaged {W.format} matrix: its index arrays point outside its {W.shape[0]:,} rows or its "
            "entries. Indices count from 0 to n - 1, and indptr never falls."
        )


def _within(indices: npt.NDArray[Any], n: int) -> bool:
    return not len(indices) or (int(indices.min()) >= 0 and int(indices.max()) < n)
