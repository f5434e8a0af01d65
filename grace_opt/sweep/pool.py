"""`Pool`: worker processes that can be replaced when one dies, and that end when their parent does, even by SIGKILL.

When: `run_sweep` with workers. Each worker listens on a pipe whose other end this process alone holds: however it
closes, by `Pool.close` or by the system, the worker ends at once. `ProcessPoolExecutor` alone would leave its workers
behind, waiting forever. Built on `concurrent.futures`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType
from typing import Any

#: Processes start afresh: forks of a process with threads (torch, numba) can hang.
CONTEXT = multiprocessing.get_context("spawn")


class Pool:
    """`size` processes, started when they are needed, each with its share of the cores for torch.

    Examples
    --------
    >>> with Pool(1) as pool:
    ...     pool.submit(abs, -3).result()
    3
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """As `concurrent.futures.Executor.submit`."""
        return self._executor.submit(function, *arguments)

    def restart(self) -> None:
        """New processes for those that are there, which end at once."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._hold.close()
        self._watched.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        self._watched, self._hold = CONTEXT.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(
            self.size, mp_context=CONTEXT, initializer=_begin, initargs=(self._watched, self.size)
        )

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._executor.shutdown()
        self.close()


def _begin(watched: Any, size: int) -> None:
    """Set a new worker up: it leaves Ctrl-C to its parent, ends with it, and takes its share of the cores."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // size))


def _end_with(watched: Any) -> None:
    """Wait for the other end to close, then end this process without asking."""
    try:
        watched.recv_bytes()
    except (EOFError, OSError):
        pass
    finally:
        os._exit(1)
