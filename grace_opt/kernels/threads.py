"""Compiled loops in as many threads as torch has, and from what size on they are worth importing.

Source: ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

#: Below this many steps torch is done before numba would be imported (about half a second, once).
COMPILE_FROM = 200_000


def in_threads(kernel: Callable[..., None], arrays: tuple[npt.NDArray[Any], ...]) -> None:
    """Call `kernel` on equal shares of the batch, as many as torch has threads; it releases the interpreter."""
    threads = max(min(torch.get_num_threads(), len(arrays[0])), 1)
    mine, *others = zip(*(np.array_split(a, threads) for a in arrays), strict=True)
    waiting = [_pool(threads).submit(kernel, *share) for share in others]
    kernel(*mine)
    for done in waiting:
        done.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Kept, because starting threads takes as long as a batch's selection does."""
    return ThreadPoolExecutor(threads, thread_name_prefix="grace_opt")


if hasattr(os, "register_at_fork"):  # a child process has the pool, but not its threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
