"""Other processes without their imports: forks of one process that has imported torch, numba and transformers once.

When: a test needs another process to be killed or interrupted, to hand a file to, or to share work with. The fixture
`forks` is a context for `multiprocessing`, `concurrent.futures`, pebble or dask, and `forked_pools` makes those of
`grace_opt.sweep` use it. Functions and arguments go to a fork by pickle, so name functions of a module.

Not when the test is about the beginning or the end of a process: what an import does or loads, variables that libraries
read when they are imported, folders of compiled loops, encodings, closed streams, what is written at the exit. Those
tests take a process of `tests.starter`, which has imported torch alone, or, where the very start of Python matters,
``sys.executable``, which takes one to four seconds more.

Source: Python's own fork server. It has one thread, so its forks cannot inherit a lock that another thread holds.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

from grace_opt.sweep.warm import THREADS

ROOT = Path(__file__).resolve().parent.parent


@cache
def context() -> BaseContext:
    """The fork server, which starts here and ends with this process; on Windows, processes that start as usual."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.preloaded"])
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with mock.patch.dict(os.environ, {"PYTHONPATH": path, **dict.fromkeys(THREADS, "1")}):
        forkserver.ensure_running()
    return found


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` in a fork: what it returns or raises."""
    with ProcessPoolExecutor(1, mp_context=context()) as pool:
        return pool.submit(function, *arguments).result(timeout=300)


def program(main: Callable[..., Any], arguments: tuple[Any, ...], out: Path, err: Path) -> None:
    """What a fork does for ``python -m``: `main`, with files for its streams, and what it returns as exit code."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY), number)
    try:
        sys.exit(main(*arguments))
    finally:
        sys.stdout.flush()


def completed(main: Callable[..., Any], *arguments: Any) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` returns of a program, from a fork."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = context().Process(target=program, args=(main, arguments, out, err))  # type: ignore[attr-defined]
        process.start()
        process.join(300)
        assert process.exitcode is not None, "not done after five minutes"
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), err.read_text())
