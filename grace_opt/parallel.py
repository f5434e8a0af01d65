"""`map_in_threads`: one function on every instance of a batch, a thread for each core, with one BLAS thread each.

For compiled loops, which release the interpreter, and for small dense algebra: at these sizes a second BLAS thread
gains nothing, and waiting for it on a busy machine costs many times more. Built on threadpoolctl.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

from threadpoolctl import ThreadpoolController

from ._util.cores import thread_count
from .run import Run

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def map_in_threads(work: Callable[[Item], Answer], items: Sequence[Item], run: Run | None = None) -> list[Answer]:
    """Apply `work` to every item, and return the answers in the order of the items.

    The first error in any thread, or Ctrl-C in this one, stops `run` to end the other threads, and is raised.
    """
    with _blas().limit(limits=1, user_api="blas"):
        if len(items) == 1:
            return [work(items[0])]
        with ThreadPoolExecutor(thread_count(len(items))) as pool:
            waiting = [pool.submit(work, item) for item in items]
            try:
                wait(waiting, return_when=FIRST_EXCEPTION)
                for failed in (future for future in waiting if future.done() and future.exception()):
                    failed.result()  # raises
                return [future.result() for future in waiting]
            except BaseException:
                if run is not None:
                    run.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


@cache
def _blas() -> ThreadpoolController:
    """The loaded BLAS libraries; finding them takes a millisecond, so do it once."""
    return ThreadpoolController()
