"""The one place that tells numpy from torch: everything inside the library is a torch tensor, results go back as they
came.

`to_tensor` takes what users have (numpy arrays, nested lists, torch tensors, scipy.sparse matrices), refuses what
cannot be meant (complex, object, bool weights), and says which kind it was, so that `Backend.export` can return the
same kind on the same device. Source: ours.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import ProblemError

#: The largest integer below which every integer is a float64.
EXACT_INTEGER = 2**53
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Backend:
    """Where the user's arrays live: numpy, or torch on a device."""

    is_torch: bool
    device: torch.device

    def export(self, tensor: Tensor) -> Any:
        """A result in the user's kind: a torch tensor on their device, or a numpy array (scalars for 0-d)."""
        tensor = tensor.to(self.device)
        return tensor if self.is_torch else tensor.cpu().numpy()[()]


def backend_of(*arrays: Any) -> Backend:
    """The common backend of several inputs (None and plain Python values are neutral).

    Raises
    ------
    ProblemError
        If numpy arrays and torch tensors, or tensors of several devices, are mixed.
    """
    tensors = [a for a in arrays if isinstance(a, Tensor)]
    if tensors and any(isinstance(a, np.ndarray) for a in arrays):
        raise ProblemError(
            "numpy arrays and torch tensors are mixed in one call: convert all of them to one kind, "
            "for instance with torch.as_tensor(array) or tensor.numpy()."
        )
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ProblemError(f"the tensors live on several devices ({names}): move them to one with .to(device).")
    return Backend(bool(tensors), devices.pop() if devices else torch.device("cpu"))


def to_tensor(value: Any, name: str) -> Tensor:
    """A real-valued array as a torch tensor, without a copy where possible; integers become float64, exactly.

    Parameters
    ----------
    value : array_like
        numpy array, torch tensor, scipy.sparse matrix, or nested sequence of numbers.
    name : str
        What to call it in an error message.

    Raises
    ------
    ProblemError
        For bool, complex and object entries, and for integers beyond 2**53.
    """
    if value is None or isinstance(value, str | bytes | os.PathLike | dict):
        hint = f"; to read a file, write grace_opt.instances.read({value!r}).W" if isinstance(value, str) else ""
        raise ProblemError(f"{name} is a {type(value).__name__}: give an array of numbers{hint}.")
    if isinstance(value, Tensor):
        tensor = value.detach()
        if tensor.device.type == "meta":
            raise ProblemError(f"{name} is on the meta device and holds no numbers: give a tensor with data.")
        if tensor.layout != torch.strided:
            tensor = tensor.to_dense()
    else:
        if hasattr(value, "toarray"):  # scipy.sparse, without importing it
            value = value.toarray()
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise ProblemError(f"{name} is a ragged sequence: give a rectangular array ({error}).") from None
        if array.dtype == np.float16 or array.dtype.kind in "iub" or array.dtype in (np.float32, np.float64):
            pass
        elif array.dtype.kind == "f":
            array = array.astype(np.float64)  # longdouble
        else:
            raise _wrong_dtype(name, str(array.dtype))
        if array.dtype.kind == "u" and array.size and int(array.max()) > EXACT_INTEGER:
            raise _integer_overflow(name, int(array.max()))
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        if array.dtype.kind == "u":
            array = array.astype(np.int64)
        # torch shares memory and warns about read-only arrays; nothing here writes into its input, but a copy is cheap.
        tensor = torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
    if tensor.dtype in _FLOATS:
        return tensor
    if tensor.dtype == torch.bool or tensor.is_complex():
        raise _wrong_dtype(name, str(tensor.dtype).removeprefix("torch."))
    if not tensor.dtype.is_floating_point:
        if tensor.numel():
            # Not through abs(): the least int64 has no positive counterpart.
            worst = max(int(tensor.max()), int(tensor.min()), key=abs)
            if abs(worst) > EXACT_INTEGER:
                raise _integer_overflow(name, worst)
        return tensor.to(torch.float64)
    raise _wrong_dtype(name, str(tensor.dtype).removeprefix("torch."))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype computations run in: half precision is accumulated in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def first_argmin(tensor: Tensor) -> Tensor:
    """Index of the first minimum along the last dimension, int64.

    On the CPU by numpy, which documents that the first minimum wins and is some eight times faster there.
    """
    if tensor.device.type == "cpu":
        return torch.from_numpy(np.argmin(tensor.numpy(), axis=-1))
    return tensor.argmin(-1)


def count(mask: Tensor) -> Tensor:
    """How many are True along the last dimension, int64.

    On the CPU by numpy: torch wakes its threads for it, and they spin for a while where compiled loops want to run.
    """
    if mask.ndim > 1 and not any(mask.stride()[:-1]):  # one row, expanded
        return count(mask[(0,) * (mask.ndim - 1)]).expand(mask.shape[:-1])
    if mask.device.type == "cpu":
        return torch.as_tensor(mask.numpy().sum(-1))
    return mask.sum(-1)


def power_of_two(W: Any) -> float:
    """A power of two near max |W|, or 1: dividing by it is exact, and margins neither underflow nor overflow."""
    largest = float(abs(W).max()) if len(W) else 0.0
    return 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 1.0


def least_eigenvalue(W: np.ndarray[Any, Any]) -> float:
    """The least eigenvalue of a symmetric W; where its entries are too far apart for LAPACK, Gershgorin's bound on it.

    Examples
    --------
    >>> round(least_eigenvalue(np.array([[2.0, 1.0], [1.0, 2.0]])), 9)
    1.0
    """
    try:
        return float(np.linalg.eigvalsh(W)[0])
    except np.linalg.LinAlgError:
        diagonal = W.diagonal()
        return float((diagonal + np.abs(diagonal) - np.abs(W).sum(1)).min())


def _wrong_dtype(name: str, dtype: str) -> ProblemError:
    return ProblemError(
        f"{name} has dtype {dtype}: give real numbers (float16, bfloat16, float32, float64 or integers), "
        f"for instance {name}.astype(float)."
    )


def _integer_overflow(name: str, worst: int) -> ProblemError:
    return ProblemError(
        f"{name} holds the integer {worst}, beyond 2**53 = {EXACT_INTEGER}, where float64 stops being exact: "
        "divide by a common factor, or convert to float64 yourself if rounding is fine."
    )
