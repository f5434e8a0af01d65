"""`Pool`: worker processes that end with their parent, even if it is killed, or after a time limit.

When: `run_sweep` with workers, and `WarmProcesses`. The processes are pebble's: the process of a task that exceeds its
time limit is ended, and a process that dies fails only its own task. Each worker also listens on a pipe; only this
process holds the other end. When that closes, by `Pool.close` or by the system, the worker ends at once. Without it,
workers of a killed parent would wait forever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Future
from pathlib import Path
from types import TracebackType
from typing import Any

from .._util.optional import require

#: Processes are spawned, not forked: forks of a process with threads (torch, numba) can hang.
CONTEXT = multiprocessing.get_context("spawn")


class Pool:
    """`size` processes, started when needed.

    Parameters
    ----------
    size : int
    threads : int, optional
        Number of torch threads in each process; by default its share of the cores.
    log : Path, optional
        A file for all output of the processes, from C code too.

    Attributes
    ----------
    died : tuple of exception types
        What a future raises if its process died.

    Examples
    --------
    >>> with Pool(1) as pool:
    ...     pool.submit(abs, -3).result()
    3
    """

    def __init__(self, size: int, threads: int | None = None, log: Path | None = None) -> None:
        pebble = require("pebble", "bench", "measuring in processes")
        self._process_pool = pebble.ProcessPool
        self.died: tuple[type[BaseException], ...] = (pebble.ProcessExpired, BrokenExecutor, CancelledError)
        self.size, self._threads, self._log = size, threads, log
        self._start()

    def submit(self, function: Callable[..., Any], *arguments: Any, time_limit: float | None = None) -> Future[Any]:
        """As `concurrent.futures.Executor.submit`; past `time_limit` seconds the process ends, with a TimeoutError."""
        try:
            future: Future[Any] = self._pool.schedule(function, args=arguments, timeout=time_limit)
        except RuntimeError as error:
            raise BrokenExecutor(str(error)) from error
        return future

    def restart(self) -> None:
        """End all processes at once and start new ones."""
        self.close()
        self._start()

    def close(self) -> None:
        """End the processes at once."""
        self._pool.stop()  # first, so that ended processes are not replaced
        self._hold.close()
        self._watched.close()
        self._pool.join()

    def _start(self) -> None:
        self._watched, self._hold = CONTEXT.Pipe(duplex=False)
        begin = (self._watched, self.size, self._threads, self._log)
        self._pool = self._process_pool(self.size, initializer=_begin, initargs=begin, context=CONTEXT)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _begin(watched: Any, size: int, threads: int | None, log: Path | None) -> None:
    """Set up a new worker: it ignores Ctrl-C, ends with its parent, and uses its share of the cores."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    if log is not None:
        file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
    import torch

    torch.set_num_threads(threads or max(1, torch.get_num_threads() // size))


def _end_with(watched: Any) -> None:
    """Wait for the other end to close, then end this process immediately."""
    try:
        watched.recv_bytes()
    except (EOFError, OSError):
        pass
    finally:
        os._exit(1)
