"""How much memory is free, and a refusal to turn something sparse into a matrix that does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import psutil

from ..errors import ProblemError


def free_memory() -> float:
    """Return the bytes that may be allocated without swapping."""
    return float(psutil.virtual_memory().available)


def refuse_beyond_memory(name: str, shape: Sequence[int], itemsize: int) -> None:
    """Raise ProblemError if sparse W or a batch of graphs, written out with its zeros, takes more than is free."""
    need, free = float(math.prod(shape)) * itemsize, free_memory()
    if need > free:
        raise ProblemError(
            f"{name}, shape {tuple(shape)}, is a batch or has too many entries to be kept sparse: with its zeros it "
            f"takes {need / 2**30:.3g} GiB, and {free / 2**30:.3g} GiB are free. Solve one by one, or drop light edges."
        )
