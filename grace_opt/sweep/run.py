"""`run_sweep`: make the cells that have no record yet, in this process, in workers, or on your executor.

When: measurements that take from minutes to days. Only the process that called `run_sweep` writes records, one at a
time, under a lock that the system releases if the process dies. Workers therefore need no common file system, nothing
is written twice, and killing this process or a worker loses at most the cells being computed. A cell is finished when
its file exists. Built on `concurrent.futures`.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._util.file_lock import file_lock
from .._util.files import make_folder, path_text
from .._util.parameters import integer, number
from .._util.progress import progress_bar
from ..errors import OptionError
from .cells import Cell, Record, SweepError, encode, read_cell, write_cell
from .measure import Function, measure
from .pool import Pool
from .warm import WarmProcesses

#: Number of cells submitted to a given executor at a time.
MAX_PENDING_CELLS = 1024
#: Number of times that our pool may break without a finished cell in between before the sweep gives up.
BREAKS = 3


@dataclass(frozen=True)
class Failure:
    """A cell that failed, and why; the next start of the sweep tries it again."""

    config: dict[str, Any]
    error: str


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep.

    Attributes
    ----------
    total : int
        Number of requested cells.
    before, made : int
        Number of cells that already had a record, and of cells made now.
    failures : tuple of Failure
    """

    total: int
    before: int
    made: int
    failures: tuple[Failure, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every cell has a record."""
        return self.before + self.made == self.total


def run_sweep(
    cells: Sequence[Cell],
    function: Function,
    directory: str | os.PathLike[str],
    *,
    workers: int = 1,
    executor: Any = None,
    processes: WarmProcesses | None = None,
    provenance: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    retries: int = 2,
    time_limit: float | None = None,
) -> SweepResult:
    """Make every cell that has no record yet.

    Parameters
    ----------
    cells : sequence of Cell
        Distinct cells of one experiment. They are made in this order.
    function : callable
        ``function(config)`` gives a list of rows: flat dicts of numbers and text. If it raises, only that cell fails.
        Workers receive it by name, so it must be defined at the top level of a module.
    directory : path
        The results folder; records go to ``directory/EXPERIMENT/cells``.
    workers : int
        Number of processes; 1 means this one.
    executor : concurrent.futures.Executor, optional
        Your executor, instead of `workers`; for Dask, ``client.get_executor()``. It is not closed.
    processes : WarmProcesses, optional
        Instead of `workers`, for cells that are timed: one cell at a time, each in the process of its name, which stays
        for the next cell. They are not closed.
    provenance : mapping, optional
        Stored with every record. With `executor`, CPU and versions come from the worker that made the cell.
    progress : bool or None
        True shows a bar, False nothing; None shows a bar on a terminal and otherwise occasional lines, both with the
        time left.
    retries : int
        How often a cell is tried again after its worker died.
    time_limit : float, optional
        Begin no cell after so many seconds, and finish those that are running; the rest wait for the next start.

    Returns
    -------
    SweepResult

    Raises
    ------
    SweepError
        If a record is invalid or cannot be written, another process works on this sweep, or workers die at once.
    OptionError
        If cells or options are not as above.

    Examples
    --------
    >>> import tempfile
    >>> def square(config):
    ...     return [{"square": config["n"] ** 2}]
    >>> folder, cells = tempfile.mkdtemp(), [Cell("squares", {"n": n}) for n in range(3)]
    >>> run_sweep(cells, square, folder, progress=False)
    SweepResult(total=3, before=0, made=3, failures=())
    >>> run_sweep(cells, square, folder, progress=False).before
    3
    """
    name, unique, workers, retries = _checked(cells, function, workers, executor, processes, retries)
    encode(dict(provenance or {}), "provenance")  # before anything is measured that could not be written
    seconds = number("time_limit", time_limit, at_least=0, optional=True)
    ends = math.inf if seconds is None else time.monotonic() + seconds
    folder = Path(path_text(directory)) / name
    make_folder(folder / "cells", SweepError)
    failures: list[Failure] = []
    made = 0

    def busy() -> None:
        raise SweepError(f"another process works on {folder}: wait for it, or give another folder.")

    with file_lock(folder / ".lock", busy, SweepError):
        for left in (folder / "cells").glob(".*.json"):  # what a killed sweep was writing
            with suppress(OSError):  # where that cannot be, no cell can be written either, which is told by name
                left.unlink()
        todo = deque(cell for cell in unique if not _finished(cell, directory))
        before = len(unique) - len(todo)

        def keep(cell: Cell, outcome: dict[str, Any]) -> None:
            nonlocal made
            if "error" in outcome:
                failures.append(Failure(cell.config, outcome["error"]))
            else:
                where = {**(provenance or {}), **outcome["facts"]}
                try:
                    write_cell(directory, Record(cell, outcome["rows"], outcome["seconds"], where))
                except SweepError as error:
                    raise SweepError(
                        f"{error} The {before + made} finished cells are safe; start the same sweep again, and it goes "
                        "on from there."
                    ) from None
                made += 1
            tell()

        def tell() -> None:
            show(f"{name}, {len(failures)} failed" if failures else name, before + made + len(failures))

        with progress_bar(progress, len(unique), "cells") as show:
            tell()
            if executor is not None:
                facts = tuple(provenance or ())
                _drive(
                    todo,
                    lambda cell: executor.submit(measure, function, cell.config, facts),
                    keep,
                    MAX_PENDING_CELLS,
                    retries,
                    ends,
                )
            elif processes is not None:
                while todo and time.monotonic() < ends:
                    keep(cell := todo.popleft(), processes.measure(function, cell.config))
            elif workers == 1 or not todo:
                while todo and time.monotonic() < ends:
                    keep(cell := todo.popleft(), measure(function, cell.config, None))
            else:
                with Pool(min(workers, len(todo))) as pool:
                    submit = lambda cell: pool.submit(measure, function, cell.config, None)  # noqa: E731
                    _drive(todo, submit, keep, workers, retries, ends, pool)
    return SweepResult(len(unique), before, made, tuple(failures))


def _drive(
    waiting: deque[Cell],
    submit: Callable[[Cell], Future[dict[str, Any]]],
    keep: Callable[[Cell, dict[str, Any]], None],
    ahead: int,
    retries: int,
    ends: float,
    pool: Pool | None = None,
) -> None:
    """Keep `ahead` cells submitted until none is left or time ends; submit a cell again if its worker died.

    Our pool breaks if a worker dies between two cells. It is then restarted, and all cells are submitted again. If that
    repeats with no cell finished in between, workers cannot start at all.
    """
    died = (BrokenExecutor, CancelledError) if pool is None else pool.died
    running: dict[Future[dict[str, Any]], Cell] = {}
    deaths: Counter[str] = Counter()
    breaks = 0

    def collect(future: Future[dict[str, Any]]) -> bool:
        """Keep a future's result, or submit its cell again; return whether the pool broke."""
        cell = running.pop(future)
        try:
            outcome = future.result()
        except died as error:
            broken = pool is not None and isinstance(error, BrokenExecutor)
            deaths[cell.key] += not broken
            if deaths[cell.key] <= retries:
                waiting.appendleft(cell)
            else:
                keep(
                    cell, {"error": f"its worker died {deaths[cell.key]} times, perhaps for want of memory ({error})."}
                )
            return broken
        except Exception as error:  # the executor's own: what the function raises comes back as an outcome
            text = " ".join(f"{type(error).__name__}: {error}".split())
            outcome = {"error": f"{text} (from the executor: can all of it import the code of {cell.experiment}?)"}
        keep(cell, outcome)
        return False

    try:
        while waiting or running:
            if time.monotonic() >= ends:
                waiting.clear()
            broken = False
            while waiting and len(running) < ahead and not broken:
                try:
                    running[submit(waiting[0])] = waiting[0]
                except (BrokenExecutor, RuntimeError) as error:  # RuntimeError: it was shut down
                    if pool is None:
                        raise SweepError(f"the executor takes no more cells ({error}). {RESUME_HINT}") from None
                    broken = True
                else:
                    waiting.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                broken |= collect(future)
            if broken and pool is not None:
                for future in wait(running, return_when=ALL_COMPLETED).done:  # all its futures fail
                    collect(future)
                breaks += 1
                if breaks > BREAKS:
                    raise SweepError(f"worker processes die before they take a cell, {breaks} times now. {RESUME_HINT}")
                pool.restart()
            else:
                breaks = 0
    finally:
        for future in running:
            future.cancel()


RESUME_HINT = "Finished cells are safe; start the same sweep again, and it goes on from there."


def _finished(cell: Cell, directory: str | os.PathLike[str]) -> bool:
    """Return whether the cell has a record. All are read first: a bad one raises now, not at the end."""
    path = cell.path(directory)
    return path.exists() and read_cell(path).cell == cell


def _checked(
    cells: Sequence[Cell],
    function: Function,
    workers: int,
    executor: Any,
    processes: WarmProcesses | None,
    retries: int,
) -> tuple[str, list[Cell], int, int]:
    if not cells:
        raise OptionError("no cells: there is nothing to run.")
    if len(names := sorted({cell.experiment for cell in cells})) > 1:
        raise OptionError(f"cells of {', '.join(names)}: run one experiment at a time.")
    seen: dict[str, Cell] = {}
    for cell in cells:
        if cell.key in seen:
            raise OptionError(f"{names[0]} has this cell twice: {cell.config}.")
        seen[cell.key] = cell
    workers, retries = integer("workers", workers, at_least=1), integer("retries", retries, at_least=0)
    if executor is not None and (workers != 1 or not hasattr(executor, "submit")):
        raise OptionError(f"executor={executor!r}: give one with `submit`, and leave workers at 1.")
    if processes is not None and (workers != 1 or executor is not None or not isinstance(processes, WarmProcesses)):
        raise OptionError(f"processes={processes!r}: give WarmProcesses, without workers and executor.")
    if (workers > 1 or processes is not None) and ("<" in getattr(function, "__qualname__", "")):
        raise OptionError(f"{function!r} cannot be sent to workers: define it at the top of a module.")
    return names[0], list(cells), workers, retries
