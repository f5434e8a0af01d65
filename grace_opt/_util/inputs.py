"""Convert k to one number per instance, and check that there are as many vertices to choose.

`Problem.of` calls these functions. Every kind of wrong input has its own message.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ProblemError
from .array_like import as_tensor
from .arrays import count_true


def k_per_instance(k: Any, batch: tuple[int, ...], n: int, device: torch.device) -> tuple[Tensor, int]:
    """Return one k per instance, (...) int64, and the largest of them."""
    if isinstance(k, numbers.Integral) and not isinstance(k, bool | np.bool_):
        if not 0 <= int(k) <= n:
            raise ProblemError(f"k = {int(k)}: must lie between 0 and n = {n}.")
        return torch.full(batch, int(k), dtype=torch.int64, device=device), int(k)
    is_array = isinstance(k, list | tuple) or hasattr(k, "dtype")
    whole = isinstance(k, numbers.Real) and not isinstance(k, bool | np.bool_) and k == k // 1
    likely = int(k) if whole and 0 <= k <= n else n // 2
    wanted = f"an int, or an integer array with one k per instance, e.g. k={likely}"
    tensor = as_tensor(k, "k", wanted) if is_array else None
    if tensor is None or tensor.dtype != torch.int64:
        kind = type(k).__name__ if tensor is None else str(tensor.dtype).removeprefix("torch.")
        raise ProblemError(f"k = {k!r} ({kind}): give {wanted}.")
    try:
        tensor = tensor.to(device).expand(batch).clone(memory_format=torch.contiguous_format)
    except RuntimeError:
        raise ProblemError(
            f"k has shape {tuple(tensor.shape)}, which does not broadcast to the batch shape {batch} of W: "
            "give one int, or one per instance."
        ) from None
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high > n:
        raise ProblemError(f"k ranges from {low} to {high}: every k must lie between 0 and n = {n}.")
    return tensor, high


def check_enough_candidates(k: Tensor, candidates: Tensor, n: int) -> None:
    """Raise unless every instance has k unprotected vertices."""
    free = count_true(candidates)
    if bool((short := k > free).any()):
        instance = short.nonzero()[0].tolist()
        have, want = int(free[tuple(instance)]), int(k[tuple(instance)])
        where = f" in instance {instance}" if instance else ""
        raise ProblemError(
            f"k = {want}{where}, but only {have} of {n} vertices are unprotected: "
            f"lower k, or protect fewer than {n - want + 1}."
        )
