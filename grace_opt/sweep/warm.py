"""`WarmProcesses`: one single-threaded process per method, warmed up before timing and kept between cells.

When: cells are timed and must not share a process, because methods load different libraries, compile on first use, hang
or die. Calls run one at a time: methods can take turns and never compete for the cores. A call that runs far past its
time limit is ended with its process. A process that dies loses only its own cell; the next call of that method starts a
new process.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from .._util.files import make_folder
from ..errors import GraceError, OptionError
from .cells import SweepError, check_rows
from .measure import Function, measure
from .pool import Pool

Config = dict[str, Any]
#: Libraries read these before they start threads, when they are imported.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")
#: Seconds for starting, importing and warming up.
START_LIMIT = 900.0


class ProcessLostError(GraceError, RuntimeError):
    """A process died, or was ended because a call exceeded its time limit.

    Attributes
    ----------
    late : bool
        Whether it was ended for exceeding the limit.
    """

    def __init__(self, message: str, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class WarmProcesses:
    """Processes by name; a context manager that ends them.

    Parameters
    ----------
    name : callable
        ``name(config)``: cells of the same name share a process.
    warm_up : callable, optional
        ``warm_up(name)`` is called in each new process before its first cell and is not timed. It is sent by name, so
        define it at the top level of a module.
    time_limit : callable, optional
        ``time_limit(config)`` seconds after which a cell's process is ended, or None. Give more than the method's own
        time limit, so that an overrun can still be recorded.
    lost : callable, optional
        ``lost(config, error)`` gives the rows of a cell after its process was lost, with a `ProcessLostError`; the cell
        then has a record and is not tried again. Without it, the cell counts as failed.
    logs : Path, optional
        A folder for the output of the processes, one file per name.
    start_limit : float
        Seconds for starting and warming up.

    Examples
    --------
    >>> with WarmProcesses(lambda config: "any") as processes:
    ...     processes.call("any", abs, -3)
    3
    """

    def __init__(
        self,
        name: Callable[[Config], str],
        *,
        warm_up: Callable[[str], object] | None = None,
        time_limit: Callable[[Config], float | None] | None = None,
        lost: Callable[[Config, ProcessLostError], list[dict[str, Any]]] | None = None,
        logs: Path | None = None,
        start_limit: float = START_LIMIT,
    ) -> None:
        for parameter, value in (("name", name), ("warm_up", warm_up), ("time_limit", time_limit), ("lost", lost)):
            if value is not None and not callable(value):
                raise OptionError(f"{parameter}={value!r}: give a function.")
        self._name, self._warm_up, self._time_limit, self._lost = name, warm_up, time_limit, lost
        self._logs, self._start_limit = logs, start_limit
        self._pools: dict[str, Pool] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the running processes."""
        return tuple(self._pools)

    def measure(self, function: Function, config: Config) -> dict[str, Any]:
        """``function(config)`` in the process of its name; returns what `grace_opt.sweep.measure.measure` returns."""
        limit = None if self._time_limit is None else self._time_limit(config)
        began = time.perf_counter()
        try:
            outcome: dict[str, Any] = self.call(self._name(config), measure, function, config, None, time_limit=limit)
        except ProcessLostError as error:
            if self._lost is None:
                return {"error": str(error)}
            rows = check_rows(self._lost(config, error), config)
            return {"rows": rows, "seconds": time.perf_counter() - began, "facts": {}}
        return outcome

    def call(self, name: str, function: Callable[..., Any], *arguments: Any, time_limit: float | None = None) -> Any:
        """``function(*arguments)`` in the process `name`, started and warmed up if necessary.

        Raises
        ------
        ProcessLostError
            If the process dies or the call exceeds `time_limit`. Exceptions of the function are raised unchanged.
        """
        if name not in self._pools:
            self._start(name)
        return self._ask(name, time_limit, function, *arguments)

    def end(self, name: str) -> None:
        """End a process if it is running."""
        if (pool := self._pools.pop(name, None)) is not None:
            pool.close()

    def close(self) -> None:
        """End all processes."""
        for name in self.names:
            self.end(name)

    def __enter__(self) -> WarmProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, name: str) -> None:
        log = None
        if self._logs is not None:
            make_folder(self._logs, SweepError)
            log = Path(os.path.abspath(self._logs)) / f"{re.sub(r'[^A-Za-z0-9_=-]+', '_', name)}.log"
        self._pools[name] = Pool(1, threads=1, log=log)
        with _one_thread():  # a process reads its environment when it starts
            self._ask(name, self._start_limit, self._warm_up or str, name)

    def _ask(self, name: str, limit: float | None, function: Callable[..., Any], *arguments: Any) -> Any:
        pool = self._pools[name]
        try:
            future = pool.submit(function, *arguments, time_limit=limit)
            # The pool's clock starts with the call; this also limits the wait for a process that never gets there.
            return future.result(None if limit is None else limit + self._start_limit)
        except TimeoutError:
            self.end(name)
            raise ProcessLostError(f"no answer within {limit:g} s: its process was ended.", True) from None
        except pool.died as error:
            self.end(name)
            code = getattr(error, "exitcode", None)
            how = f"ended with code {code}" if code is not None else f"could not be kept ({error})"
            raise ProcessLostError(f"its process {how}.", False) from None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Set an environment that limits new processes to one thread."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
