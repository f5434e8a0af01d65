"""`as_tensor`: convert any array-like input to a plain torch tensor of numbers or bools.

W, k, protected=, start=, queries and keys all pass through it. It refuses input that numpy or torch would silently turn
into other numbers: masked arrays (the mask is lost), True among numbers, large integers among fractions. The caller
checks what the numbers mean.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ProblemError
from .exact_integers import MAX_EXACT_INTEGER, too_large_error
from .memory import refuse_beyond_memory
from .sparse_rows import by_rows, filled

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def as_tensor(value: Any, name: str, wanted: str = "") -> Tensor:
    """Return a strided tensor of float16, bfloat16, float32, float64, int64 or bool, sharing memory if possible.

    Parameters
    ----------
    value : array_like
        A numpy array, torch tensor, scipy.sparse matrix, nested sequence, or anything else that numpy converts.
    name : str
        Name of the argument, for error messages.
    wanted : str
        What the message tells the user to give instead. Empty means real numbers, as for W; required for arguments that
        take anything else.

    Raises
    ------
    ProblemError
        If the value holds no numbers, numbers of other types, or numbers that would silently change.

    Examples
    --------
    >>> as_tensor([[1, 2]], "k")
    tensor([[1, 2]])
    """
    if isinstance(value, Tensor):
        tensor = _from_torch(value, name, wanted)
    else:
        tensor = _from_numpy(to_array(value, name, wanted), name, wanted)
    if tensor.dtype in _SIGNED or tensor.dtype in _UNSIGNED:
        whole = tensor.to(torch.int64)
        if tensor.dtype == torch.uint64 and whole.numel() and (least := int(whole.min())) < 0:
            raise too_large_error(name, least + 2**64, wanted)  # beyond int64 it wraps around
        return whole
    if tensor.dtype in FLOATS or tensor.dtype == torch.bool:
        return tensor
    raise wrong_dtype_error(name, tensor.dtype, wanted)


def wrong_dtype_error(name: str, dtype: Any, wanted: str = "") -> ProblemError:
    """Return the error for entries that are not real numbers of a known precision, or not as `wanted`."""
    kind = str(dtype).removeprefix("torch.")
    if wanted:
        return ProblemError(f"{name} has dtype {kind}: give {wanted}.")
    if kind.startswith("complex"):
        convert = f", for instance {name}.real where the imaginary parts are zero"
    elif kind.startswith(("bool", "object")):  # also lists, made of anything
        convert = f", for instance np.asarray({name}, dtype=float)"
    else:
        convert = f", for instance {name}.to(torch.float64)" if isinstance(dtype, torch.dtype) else ""
    return ProblemError(
        f"{name} has dtype {kind}: give real numbers (float16, bfloat16, float32, float64 or integers){convert}."
    )


def _from_torch(tensor: Tensor, name: str, wanted: str) -> Tensor:
    kind = type(tensor)
    # Wrapper tensors (masked, distributed, jagged) do not hold the numbers that they represent.
    is_wrapper = hasattr(kind, "__tensor_flatten__") or issubclass(kind, torch.masked.MaskedTensor)
    if is_wrapper or tensor.is_nested:
        what = "nested tensor" if tensor.is_nested else kind.__name__
        raise ProblemError(f"{name} is a {what}: give a plain tensor with every entry filled in.")
    if tensor.device.type == "meta":
        raise ProblemError(f"{name} is on the meta device and holds no numbers: give a tensor with data.")
    if tensor.is_quantized:
        instead = f"give {wanted}" if wanted else f"write {name}.dequantize()"
        raise ProblemError(f"{name} is quantised ({tensor.dtype}): {instead}.")
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = _from_sparse(tensor, name)
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:  # not for a tensor that a compiler is tracing
        tensor = tensor.as_subclass(Tensor)
    return tensor.resolve_neg()


def _from_sparse(tensor: Tensor, name: str) -> Tensor:
    """A sparse tensor with all its entries; numbers that are given twice are added without overflow."""
    refuse_beyond_memory(name, tensor.shape, tensor.element_size())
    if tensor.dtype == torch.bool or tensor.dtype.is_complex or tensor.is_mkldnn:
        return tensor.to_dense()
    made = torch.from_numpy(filled(tensor, name)).to(tensor.device)
    half = made.dtype == torch.float32 and tensor.dtype != torch.float32  # which `filled` widens
    return made.to(tensor.dtype) if half else made


def to_array(value: Any, name: str, wanted: str = "") -> np.ndarray[Any, Any]:
    """Convert a value to a numpy array of any dtype; raise ProblemError if that would lose something."""
    if hasattr(value, "toarray"):  # scipy.sparse, without importing it; dok_matrix is also a dict
        value = by_rows(value, name)
        refuse_beyond_memory(name, value.shape, value.dtype.itemsize)
        value = value.toarray()
    if value is None or isinstance(value, str | bytes | os.PathLike | dict):
        hint = ""
        if name == "W" and isinstance(value, str | os.PathLike):
            hint = f"; to read a file: from grace_opt import instances, then instances.read({os.fspath(value)!r}).W"
        raise ProblemError(f"{name} is a {type(value).__name__}: give {wanted or 'an array of numbers'}{hint}.")
    entries = list(_entries(value)) if isinstance(value, list | tuple) else [value]
    if any(isinstance(entry, np.ma.MaskedArray) for entry in entries):
        vertices = ", and name vertices that must not be chosen in protected=" if name == "W" else ""
        instead = f"give {wanted}" if wanted else f"write {name}.filled(value) with the number meant{vertices}"
        raise ProblemError(f"{name} is a masked array, and its mask would be lost: {instead}.")
    if len({_is_bool(entry) for entry in entries}) > 1:
        raise ProblemError(f"{name} mixes bools and numbers: give {wanted or 'only numbers'}.")
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: tensors in a list that numpy cannot read
        what = "a ragged sequence" if "inhomogeneous" in str(error) else "nothing that numpy makes an array of"
        raise ProblemError(f"{name} is {what}: give {wanted or 'a rectangular array'} ({error}).") from None
    if array.dtype == object:  # integers beyond 64 bits, perhaps
        beyond = (int(p) for p in entries if isinstance(p, int) and abs(int(p)) > MAX_EXACT_INTEGER)
        if (most := next(beyond, None)) is not None:
            raise too_large_error(name, most, wanted)
    if array.ndim == 0 and array.dtype == object and array is not value:  # an iterator or a set
        raise ProblemError(f"{name} is a {type(value).__name__}: give {wanted or 'an array of numbers'}.")
    if array.dtype.kind == "f" and len(entries) > 1:  # numpy rounds large integers in a list with fractions
        large = (p for p in entries if isinstance(p, numbers.Integral) and abs(int(p)) > MAX_EXACT_INTEGER)
        if (worst := next(large, None)) is not None:
            raise too_large_error(name, int(worst), wanted)
    return array


def _entries(value: Any) -> Iterator[Any]:
    """Yield the entries of nested lists and tuples."""
    for entry in value:
        if isinstance(entry, list | tuple):
            yield from _entries(entry)
        else:
            yield entry


def _is_bool(entry: Any) -> bool:
    """Return whether it is a bool, or an array of bools."""
    if isinstance(entry, bool | float | int):
        return isinstance(entry, bool)
    return getattr(entry, "dtype", None) in (np.bool_, torch.bool)


def _from_numpy(array: np.ndarray[Any, Any], name: str, wanted: str) -> Tensor:
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind not in "iufb":
        raise wrong_dtype_error(name, array.dtype, wanted)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        with np.errstate(over="ignore"):  # infinite entries are named by whoever wants finite ones
            array = array.astype(np.float64)  # longdouble
    # Torch shares memory, has no negative strides, which one entry may have and yet be contiguous, and warns about
    # read-only arrays; nothing writes to the input.
    shared = array.flags.writeable and array.flags.c_contiguous and min(array.strides, default=0) >= 0
    return torch.from_numpy(array if shared else array.copy())
