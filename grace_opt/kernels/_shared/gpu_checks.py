"""Argument checks of the Triton kernels on W, which read memory by address: wrong shapes would read beyond it."""

from __future__ import annotations

from torch import Tensor

from ..._util.array_like import FLOATS
from ...errors import ProblemError
from .limits import LARGEST_ON_CHIP


def check_matrices(W: Tensor) -> tuple[int, int]:
    """Return batch size and n; raise if W does not fit in one program per instance."""
    if W.ndim != 3 or W.shape[-1] != W.shape[-2]:
        raise ProblemError(f"W has shape {tuple(W.shape)}: expected (B, n, n).")
    if W.dtype not in FLOATS:
        raise ProblemError(f"W has dtype {W.dtype}: give float16, bfloat16, float32 or float64.")
    if W.shape[-1] > LARGEST_ON_CHIP:
        raise ProblemError(f"n = {W.shape[-1]}: this kernel takes n <= {LARGEST_ON_CHIP}; use the torch reference.")
    return W.shape[0], W.shape[-1]


def check_like(W: Tensor, **tensors: tuple[Tensor, tuple[int, ...]]) -> None:
    """Check shape and device of tensors that belong to W, each with the shape that it should have."""
    for name, (tensor, shape) in tensors.items():
        if tuple(tensor.shape) != shape:
            raise ProblemError(f"{name} has shape {tuple(tensor.shape)}: expected {shape}, to fit W {tuple(W.shape)}.")
        if tensor.device != W.device:
            raise ProblemError(f"{name} is on {tensor.device} and W on {W.device}: move them to one device.")
