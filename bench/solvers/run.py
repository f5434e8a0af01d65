"""Measure the cells that are not on record yet: one process per method, one cell at a time, methods taking turns.

Ctrl-C ends the run with every finished cell kept; the next run goes on from there.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench.provenance import provenance, write_json
from bench.solvers import suites
from bench.solvers.cells import Array, Cell, check, read, write
from bench.solvers.worker import PEER_LIMIT, THREADS

ROOT = Path(__file__).resolve().parent.parent.parent
#: Seconds for starting and compiling, and for a call without a limit; a worker that takes longer is ended.
START_LIMIT, CALL_LIMIT = 900.0, 1800.0


class WorkerError(Exception):
    """A worker that died."""


class LateError(WorkerError):
    """One that had to be ended."""


class Worker:
    """A process that solves with one method, warm once `__init__` returns."""

    def __init__(self, method: str, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
        with log.open("a", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.solvers.worker", method],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for us: we decide what is kept
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self._reply(START_LIMIT)
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """One request's answer; WorkerError if none comes within `limit` seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(f"the process ended with code {self._process.wait()}") from error
        return self._reply(limit)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _reply(self, limit: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            raise LateError(f"no answer within {limit:g} s: ended") from None
        if not line:
            raise WorkerError(f"the process ended with code {self._process.wait()}")
        return dict(json.loads(line))

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


class Workers:
    """The workers of one suite by method, each started when it is first needed. A context manager: it ends them all."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._workers: dict[str, Worker] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for method in list(self._workers):
            self.end(method)

    def ask(self, method: str, request: dict[str, Any], limit: float) -> dict[str, Any]:
        """The answer of the method's worker. One that dies is on record as a failure, and is started anew."""
        try:
            if method not in self._workers:
                self._workers[method] = Worker(method, self._logs / f"{method.replace(':', '_')}.log")
            return self._workers[method].ask(request, limit)
        except WorkerError as error:
            self.end(method)
            return {"status": "failed", "message": f"{error} (see logs/)", "ended": isinstance(error, LateError)}

    def end(self, method: str) -> None:
        """End one worker, if it is there."""
        if (worker := self._workers.pop(method, None)) is not None:
            worker.close()


class Matrices:
    """The matrix that is being worked on, for us to check answers with and on disk for the workers."""

    def __init__(self, data: Path, folder: Path) -> None:
        self._data, self._path, self._name = data, folder / "W.npy", ""
        self._W: Array = np.zeros((0, 0))

    def get(self, instance: str, ks: Sequence[int]) -> tuple[Array, list[int], Path]:
        """W, its k, and the file it lies in: a batch holds each matrix once for every k."""
        name = f"{instance} {ks}"
        if name != self._name:
            W = suites.load(self._data, instance)
            if W.ndim == 3:
                W = np.concatenate([W] * len(ks))
            np.save(self._path, W, allow_pickle=False)
            self._W, self._name = W, name
        sizes = [k for k in ks for _ in range(len(self._W) // len(ks))] if self._W.ndim == 3 else list(ks)
        return self._W, sizes, self._path


def measure(
    cell: Cell, matrices: Matrices, workers: Workers, commit: str, known: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """One cell's record: asked of the worker, and checked here."""
    W, sizes, path = matrices.get(cell.instance, cell.ks)
    batch = W.ndim == 3
    request = {"path": str(path), "ks": sizes, "batch": batch}
    request |= {"seed": cell.seed, "limit": cell.limit, "repeats": cell.repeats}
    if cell.method == "tabu" and cell.instance in known:
        # A heuristic that reaches the published value has nothing more to look for: time to target.
        request["target"] = known[cell.instance]["f"] + known[cell.instance]["tolerance"]
    # The limit's being kept is a result; only what goes far beyond it is ended.
    patience = CALL_LIMIT if cell.limit is None else 3 * max(cell.limit, PEER_LIMIT) + 120.0
    answer = workers.ask(cell.method, request, patience)
    answer |= {"n": int(W.shape[-1]), "commit": commit}
    if answer["status"] == "batch":
        pairs = zip(W, sizes, answer["answers"], strict=True)
        answer["answers"] = [{"k": k, **check(w, k, one)} for w, k, one in pairs]
    elif not batch and answer["status"] != "bounds":
        answer = check(W, sizes[0], answer)
    return answer


def run(
    data: Path,
    out: Path,
    names: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    limit: float | None = None,
    retry_failed: bool = False,
    say: Callable[[str], None] | None = None,
) -> int:
    """Measure what is missing, and return how many cells that was.

    Parameters
    ----------
    data : Path
        Folder with ``interaction/``, ``k-cluster/``, ``mdplib/``.
    out : Path
        Folder for the records.
    names, methods : sequences of str, optional
        Suites (default: all but `suites.OPTIONAL`) and methods (default: those that each suite plans for).
    limit : float, optional
        No cell gets more seconds than this.
    retry_failed : bool
        Measure again what failed.
    say : callable, optional
        Where remarks go.
    """
    console = Console(stderr=True)
    say = say or console.print
    source = provenance()
    done, started = 0, datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    planned = [suite for name in _named(names) if (suite := _found(name, data, names is not None, say)) is not None]
    known = suites.optima(data)
    write_json(out / "known.json", known)
    unavailable: dict[str, str | None] = {}
    todo: dict[str, list[Cell]] = {}
    for suite in planned:
        everything = suite.cells(cap=limit)
        counts = {method: sum(c.method == method for c in everything) for method in suite.plans}
        write_json(out / "plan" / f"{suite.name}.json", {"limit": limit, "cells": counts})
        wanted = (
            everything if methods is None else suite.cells([m for m in methods if _belongs(m, suite, planned)], limit)
        )
        for method in {cell.method for cell in wanted} - unavailable.keys():
            unavailable[method] = suites.missing(method)
        for cell in wanted:
            if unavailable[cell.method] is None and not _on_record(out, cell, retry_failed):
                todo.setdefault(suite.name, []).append(cell)
    for method, why in sorted(unavailable.items()):
        if why is not None:
            say(f"{method} is left out: {why}")
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("solvers", total=sum(map(len, todo.values())))
        for name, cells in todo.items():
            # A folder and workers for each suite: no suite's memory is counted for another's.
            with tempfile.TemporaryDirectory() as folder, Workers(out / "logs") as workers:
                matrices = Matrices(data, Path(folder))
                for at, cell in enumerate(cells):
                    progress.update(bar, description=f"{name} {cell.method} {cell.instance.rpartition('/')[2]}")
                    write(out, cell, measure(cell, matrices, workers, source["commit"], known))
                    if not done:
                        write_json(out / "provenance" / f"{started}-{os.getpid()}.json", source)
                    done += 1
                    progress.advance(bar)
                    if all(cell.method != later.method for later in cells[at + 1 :]):
                        workers.end(cell.method)
    return done


def _named(names: Sequence[str] | None) -> list[str]:
    if names is None:
        return [name for name in suites.SUITES if name not in suites.OPTIONAL]
    for name in names:
        if name not in suites.SUITES:
            raise SystemExit(f"no suite is called {name!r}. Known: {', '.join(suites.SUITES)}.")
    return [name for name in suites.SUITES if name in names]


def _belongs(method: str, suite: suites.Suite, selected: Sequence[suites.Suite]) -> bool:
    """A method named on the command line runs where it is planned for, and in every suite if it is in none."""
    return method in suite.plans or all(method not in other.plans for other in selected)


def _found(name: str, data: Path, asked: bool, say: Callable[[str], None]) -> suites.Suite | None:
    try:
        return suites.SUITES[name](data)
    except FileNotFoundError as error:
        if asked:
            raise SystemExit(f"suite {name}: {error}") from error
        say(f"suite {name} is left out: {error}")
        return None


def _on_record(out: Path, cell: Cell, retry_failed: bool) -> bool:
    record = read(out, cell)
    return record is not None and not (retry_failed and record["status"] == "failed")
