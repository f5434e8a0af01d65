"""Run compiled loops in torch's threads or in ours, and decide from which size importing them pays off."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..._util.cores import scarce, thread_count
from .switches import OPENMP, is_off

#: Below this number of steps, torch is done before numba would be imported (about half a second, once).
COMPILE_FROM = 200_000
#: With fewer numbers, waking another thread takes longer than it saves.
ALONE_BELOW = 100_000
#: What a `c_function` is to Python.
CALLED = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_steps = 0
_always = False


def worth_compiling(steps: int) -> bool:
    """Return whether a compiled loop is worth its import: many steps now, or in all calls so far."""
    global _steps
    _steps += steps
    return _always or _steps >= COMPILE_FROM


def enough_steps(steps: int) -> bool:
    """Return whether this call alone is worth the import."""
    return _always or steps >= COMPILE_FROM


@contextmanager
def always_compiled() -> Iterator[None]:
    """Inside this block, compiled loops run whatever the size: a small case then compiles all that large ones need.

    One block at a time; other threads may run compiled loops for small cases meanwhile, with the same results.
    """
    global _always
    _always = True
    try:
        yield
    finally:
        _always = False


def always() -> bool:
    """Return whether an `always_compiled` block is open."""
    return _always


def worth_one_pass(W: Tensor) -> bool:
    """Return whether a compiled loop reads W: torch finishes smaller ones before numba would be imported."""
    return W.device.type == "cpu" and W.dtype in (torch.float32, torch.float64) and enough_steps(W.numel())


def array_of(tensor: Tensor, dtype: torch.dtype) -> npt.NDArray[Any]:
    """Return a tensor's numbers as a contiguous array of the type that a `c_function` takes them for."""
    return np.asarray(tensor.to(dtype).contiguous().numpy())


def call_with(function: Callable[[int], None], arrays: Sequence[npt.NDArray[Any]], sizes: Sequence[int]) -> None:
    """Call a `c_function` with a table of the addresses of contiguous arrays, and of sizes."""
    table = np.array([*(array.ctypes.data for array in arrays), *sizes], np.int64)
    function(table.ctypes.data)  # in an expression, the table would be gone before the call


def split_batch(kernel: Callable[..., None], arrays: tuple[npt.NDArray[Any], ...], alone: bool = False) -> None:
    """Call `kernel`, which releases the interpreter, on equal shares of the batch, one per thread.

    A share that no other thread has begun once this one is done is taken back: its thread may have no core. With
    `alone`, run in this thread, which is faster for little work.
    """
    threads = 1 if alone else thread_count(len(arrays[0]))
    if threads == 1:
        kernel(*arrays)
        return
    mine, *others = zip(*(np.array_split(a, threads) for a in arrays), strict=True)
    waiting = [_pool(threads).submit(kernel, *share) for share in others]
    try:
        kernel(*mine)
        for share, other in zip(reversed(others), reversed(waiting), strict=True):
            if other.cancel():
                kernel(*share)
    finally:
        begun = [other for other in waiting if not other.cancel()]
        wait(begun)  # they write to the arrays while they run
    for done in begun:
        done.result()


def torch_team() -> Callable[[int, int], None] | None:
    """Return a way to run compiled functions in torch's own threads; None if there is none.

    After a tensor operation torch's threads spin for some milliseconds and slow down any others. Torch's OpenMP can run
    a function in those threads, which are already awake: ``team(address, argument)`` calls ``void address(void
    *argument)`` in each and returns when all are done. Works on Linux with GNU's OpenMP, which ships with torch.
    """
    if is_off(OPENMP):
        return None
    run, _ = _gnu_openmp()
    return None if run is None else lambda address, argument: run(address, argument, torch.get_num_threads(), 0)


def no_team_reason() -> str | None:
    """Return why `torch_team` returns None, or None if it does not."""
    return f"{OPENMP}=0" if is_off(OPENMP) else _gnu_openmp()[1]


def call_in_threads(function: Any, address: int, most: int, alone: bool = False) -> None:
    """Call a `c_function` with an address: in torch's threads or, if cores are scarce, in ours, which share the work.

    Parameters
    ----------
    function : CFunction
        Takes what no other thread has taken yet, until nothing is left; so the result does not depend on the threads.
    address : int
        Of a table of int64, mostly addresses. It and what they point to are kept alive by the caller.
    most : int
        The most threads that can find something to do.
    alone : bool
        Call it in this thread, which is faster for little work.
    """
    if not alone and not scarce() and (team := torch_team()) is not None:
        team(function.address, address)
        return
    split_batch(lambda _: function(address), (np.arange(most),), alone)


@cache
def _gnu_openmp() -> tuple[Any, str | None]:
    """Return the function that starts a parallel region of torch's OpenMP; or None, and why."""
    try:
        loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
        if len(loaded) != 1:
            which = "several copies of GNU's OpenMP are" if loaded else "GNU's OpenMP is not"
            return None, f"{which} loaded, so torch's own cannot be identified"
        run = ctypes.CDLL(loaded.pop(), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
    except (OSError, AttributeError) as error:
        return None, f"torch's OpenMP cannot be reached, which takes Linux ({type(error).__name__})"
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return run, None


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool, kept because starting threads takes as long as selecting for a batch."""
    return ThreadPoolExecutor(threads, thread_name_prefix="grace_opt")


if hasattr(os, "register_at_fork"):  # a forked process inherits the pool without its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
