"""Compiled loops in as many threads as torch has, and from what size on they are worth importing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .switches import OPENMP, is_off

#: Below this many steps torch is done before numba would be imported (about half a second, once).
COMPILE_FROM = 200_000
#: With fewer numbers to work on, another thread takes longer to wake up than it saves.
ALONE_BELOW = 100_000
_steps = 0


def worth_compiling(steps: int) -> bool:
    """Whether a compiled loop is worth its import: for many steps now, or in all calls so far."""
    global _steps
    _steps += steps
    return _steps >= COMPILE_FROM


def enough_steps(steps: int) -> bool:
    """Whether this call alone makes up for the import."""
    return steps >= COMPILE_FROM


def worth_one_pass(W: Tensor) -> bool:
    """Whether W is read by a compiled loop: smaller ones are done before numba would be imported."""
    return W.device.type == "cpu" and W.dtype in (torch.float32, torch.float64) and enough_steps(W.numel())


def split_batch(kernel: Callable[..., None], arrays: tuple[npt.NDArray[Any], ...], alone: bool = False) -> None:
    """Call `kernel` on equal shares of the batch, as many as torch has threads; it releases the interpreter.

    With `alone`, in this thread, as is faster where there is little to do.
    """
    threads = max(min(torch.get_num_threads(), len(arrays[0])), 1)
    if alone or threads == 1:
        kernel(*arrays)
        return
    mine, *others = zip(*(np.array_split(a, threads) for a in arrays), strict=True)
    waiting = [_pool(threads).submit(kernel, *share) for share in others]
    try:
        kernel(*mine)
    finally:
        wait(waiting)  # they write to the arrays as long as they run
    for done in waiting:
        done.result()


def torch_team() -> Callable[[int, npt.NDArray[np.int64]], None] | None:
    """Torch's own threads, for compiled functions; None where they cannot be had.

    After a tensor operation torch's threads stay awake for some milliseconds, in the way of any others. Torch's OpenMP
    runs a function in as many of them as torch has, without waking anybody: ``team(address, data)`` calls
    ``void address(void *data)`` in each and returns when all have. On Linux, with GNU's OpenMP, which torch brings.
    """
    if is_off(OPENMP):
        return None
    run, _ = _gnu_openmp()
    return None if run is None else lambda address, data: run(address, data.ctypes.data, torch.get_num_threads(), 0)


def no_team_reason() -> str | None:
    """Why `torch_team` is None, or None if it is not."""
    return f"{OPENMP}=0" if is_off(OPENMP) else _gnu_openmp()[1]


@cache
def _gnu_openmp() -> tuple[Any, str | None]:
    """What starts a parallel region of torch's OpenMP; or None, and why."""
    try:
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
        if len(loaded) != 1:
            which = "several copies of GNU's OpenMP are" if loaded else "GNU's OpenMP is not"
            return None, f"{which} loaded, so torch's own cannot be told"
        run = ctypes.CDLL(loaded.pop(), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
    except (OSError, AttributeError) as error:
        return None, f"torch's OpenMP cannot be reached, which takes Linux ({type(error).__name__})"
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return run, None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept, because starting threads takes as long as a batch's selection does."""
    return ThreadPoolExecutor(threads, thread_name_prefix="grace_opt")


if hasattr(os, "register_at_fork"):  # a child process has the pool, but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
