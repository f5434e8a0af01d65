"""Convert inputs to torch and results back: the library computes on tensors and returns the user's kind of array.

`to_float_tensor` takes what users have (numpy arrays, nested lists, torch tensors, scipy.sparse matrices) as real
numbers, and `backend_of` says which kind it was, so that `Backend.export` can return the same kind on the same device.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ProblemError
from .array_like import FLOATS, as_tensor, wrong_dtype_error
from .exact_integers import MAX_EXACT_INTEGER, too_large_error

#: Entries below this share of the largest are left out before LAPACK computes eigenvalues: ε².
NEGLIGIBLE = torch.finfo(torch.float64).eps ** 2


@dataclass(frozen=True)
class Backend:
    """Kind of the user's arrays: numpy, or torch on a device."""

    is_torch: bool
    device: torch.device

    def export(self, tensor: Tensor) -> Any:
        """Return a result as the user's kind: a torch tensor on their device, or a numpy array (a scalar for 0-d)."""
        tensor = tensor.to(self.device)
        return tensor if self.is_torch else tensor.cpu().numpy()[()]


def backend_of(*arrays: Any) -> Backend:
    """Return the common backend of several inputs (None and plain Python values fit any).

    Raises
    ------
    ProblemError
        If numpy arrays and torch tensors, or tensors of several devices, are mixed.
    """
    tensors = [a for a in arrays if isinstance(a, Tensor)]
    if tensors and any(isinstance(a, np.ndarray) for a in arrays):
        raise ProblemError(
            "numpy arrays and torch tensors are mixed in one call: convert all of them to one kind, for example with "
            "torch.as_tensor(array) or tensor.numpy()."
        )
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ProblemError(f"the tensors live on several devices ({names}): move them to one with .to(device).")
    return Backend(bool(tensors), devices.pop() if devices else torch.device("cpu"))


def to_float_tensor(value: Any, name: str) -> Tensor:
    """Convert a real-valued array to a torch tensor, if possible without a copy; integers become float64, exactly.

    Parameters
    ----------
    value : array_like
        numpy array, torch tensor, scipy.sparse matrix, or nested sequence of numbers.
    name : str
        What to call it in an error message.

    Raises
    ------
    ProblemError
        For bool, complex and object entries, integers beyond 2**53, and all that `array_like.as_tensor` refuses.
    """
    return to_floats(as_tensor(value, name), name)


def to_floats(tensor: Tensor, name: str) -> Tensor:
    """Convert the result of `as_tensor` to floats; integers become float64, exactly."""
    if tensor.dtype in FLOATS:
        return tensor
    if tensor.dtype == torch.bool:
        raise wrong_dtype_error(name, tensor.dtype)
    if tensor.numel():
        # Not abs(): the least int64 has no positive counterpart.
        worst = max(int(tensor.max()), int(tensor.min()), key=abs)
        if abs(worst) > MAX_EXACT_INTEGER:
            raise too_large_error(name, worst)
    return tensor.to(torch.float64)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for computations: half precision is accumulated in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy what the CPU has made to a device. CUDA does so without waiting, and has read it before this returns.

    (Of memory that is not pinned, and this is none. Other devices may read it later, when it may be gone.)
    """
    return tensor.to(device, non_blocking=device.type == "cuda")


def first_argmin(tensor: Tensor) -> Tensor:
    """Return the index of the first minimum along the last dimension, int64.

    On the CPU by numpy, which documents that the first minimum wins and is about eight times faster there.
    """
    if tensor.device.type == "cpu":
        return torch.from_numpy(np.argmin(tensor.numpy(), axis=-1))
    return tensor.argmin(-1)


def count_true(mask: Tensor) -> Tensor:
    """Count True along the last dimension, int64.

    On the CPU by numpy: torch would wake its threads, which keep spinning on cores that compiled loops need.
    """
    if mask.ndim > 1 and not any(mask.stride()[:-1]):  # one row, expanded
        return count_true(mask[(0,) * (mask.ndim - 1)]).expand(mask.shape[:-1])
    if mask.device.type == "cpu":
        return torch.from_numpy(np.asarray(mask.numpy().sum(-1)))
    return mask.sum(-1)


def power_of_two_scale(W: Any) -> float:
    """Return the power of two below max |W|, or 1: dividing by it is exact, and margins neither underflow nor overflow.

    Taken from the bits, since a logarithm rounds: below a power of two, 2**1000 times W got another scale than W.

    Examples
    --------
    >>> below = np.array([np.nextafter(2.0, 0.0)])
    >>> power_of_two_scale(below), power_of_two_scale(below * 2.0**1000) == 2.0**1000
    (1.0, True)
    """
    largest = float(abs(W).max()) if len(W) else 0.0
    return math.ldexp(1.0, math.frexp(largest)[1] - 1) if largest > 0 else 1.0


def least_eigenvalue(W: np.ndarray[Any, Any]) -> float:
    """Return the least eigenvalue of a symmetric W, or Gershgorin's bound if LAPACK fails.

    Entries below ε² of the largest are left out, which moves no eigenvalue by more than n ε² of it: LAPACK squares
    entries, and with 1e-124 beside 1 it was wrong in the eleventh digit.

    Examples
    --------
    >>> round(least_eigenvalue(np.array([[2.0, 1.0], [1.0, 2.0]])), 9)
    1.0
    """
    size = np.abs(W)
    try:
        return float(np.linalg.eigvalsh(np.where(size < NEGLIGIBLE * size.max(initial=0.0), 0.0, W))[0])
    except np.linalg.LinAlgError:
        diagonal = W.diagonal()
        return float((diagonal + np.abs(diagonal) - np.abs(W).sum(1)).min())


def without_autocast(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a block in which operations on the tensor's device keep their types, inside ``torch.autocast`` too."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
