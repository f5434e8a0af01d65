"""What test_sweep.py measures in other processes: functions that can be sent by name, and programs to be killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grace_opt.errors import OptionError
from grace_opt.sweep import Cell, ProcessLostError, WarmProcesses, run_sweep

COUNT = 30


def cells(count: int = COUNT) -> list[Cell]:
    return [Cell("work", {"n": n, "seed": 7}) for n in range(count)]


def work(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows that depend on the config alone, after a moment."""
    time.sleep(0.004)
    rng = random.Random(f"{config['n']} {config['seed']}")
    return [{"method": m, "value": rng.random(), "odd": float("nan" if config["n"] % 5 == 0 else "inf")} for m in "ab"]


def quick(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"value": config["n"] ** 2, "pid": os.getpid()}]


def slow(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The same, long enough to be killed at it."""
    time.sleep(0.1)
    return quick(config)


def fails(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Wrong in several ways."""
    if config["n"] == 1:
        raise OptionError("the data set is missing: download it.")
    if config["n"] == 2:
        raise KeyError("reference")
    if config["n"] == 3:
        raise SystemExit("no data")
    if config["n"] == 4:
        return [{"value": [1, 2]}]
    if config["n"] == 5:
        return [{"n": 6}]
    return [{"value": config["n"]}]


def dies(config: dict[str, Any]) -> list[dict[str, Any]]:
    """One cell kills its process whenever it is tried."""
    if config["n"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return [{"value": config["n"]}]


def interrupted(config: dict[str, Any]) -> list[dict[str, Any]]:
    if config["n"] == 3:
        raise KeyboardInterrupt
    return [{"value": config["n"]}]


WARMED: list[str] = []


def warm_up(name: str, clock: Callable[[], float] = time.perf_counter) -> None:
    """Takes an hour by the clock of its process, and is to be seen by the cells that follow there."""
    time.perf_counter = lambda: clock() + 3600
    WARMED.append(name)


def timed(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Two methods in turn; `hangs` never answers, `dies` ends its process, each at the first of its cells."""
    import torch

    print(f"cell {config['n']} of {config['method']}", flush=True)
    if config["n"] == 0 and config["method"] == "hangs":
        time.sleep(600)
    if config["n"] == 0 and config["method"] == "dies":
        os._exit(3)
    threads = int(os.environ["OMP_NUM_THREADS"]) * torch.get_num_threads()
    return [{"pid": os.getpid(), "warmed": " ".join(WARMED), "threads": threads, "at": time.time()}]


def warm_cells(*methods: str, count: int = 3) -> list[Cell]:
    return [Cell("warm", {"n": n, "method": method}) for n in range(count) for method in methods]


def lost(config: dict[str, Any], error: ProcessLostError) -> list[dict[str, Any]]:
    return [{"failed": str(error), "late": error.late}]


def warm_processes(**options: Any) -> WarmProcesses:
    limit = lambda config: 1.0 if (config["method"], config["n"]) == ("hangs", 0) else None  # noqa: E731
    return WarmProcesses(lambda config: config["method"], **{"warm_up": warm_up, "time_limit": limit, **options})


def killed_again_and_again(directory: str, seed: int) -> int:
    """Start the sweep in a child, kill it at a random moment, and so on until one comes to its end; how many died."""
    rng, deaths, folder = random.Random(seed), 0, Path(directory) / "work" / "cells"
    finished = lambda: len(list(folder.glob("[!.]*.json")))  # noqa: E731
    while True:
        wanted = finished() + rng.randrange(6)  # counted in cells: on a busy machine no child would get anywhere
        child = os.fork()
        if child == 0:
            run_sweep(cells(), work, directory, progress=False)
            os._exit(0)
        ended, status = 0, 0
        while not ended and finished() < wanted:
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            time.sleep(rng.uniform(0.0, 0.008))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            return deaths if os.WEXITSTATUS(status) == 0 else -1
        deaths += 1


def stuck(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The same, but the last ones have no end: whoever kills may take its time."""
    time.sleep(600 if config["n"] >= 20 else 0)
    return slow(config)


def two_workers(directory: str) -> None:
    """A program to be killed, with its workers."""
    run_sweep(cells(), stuck, directory, workers=2, progress=False)


def warm_program(directory: str) -> None:
    """A program to be killed or interrupted, with its warm processes."""
    with warm_processes(logs=Path(directory) / "logs") as made:
        run_sweep(warm_cells("a", "hangs", count=2), timed, directory, processes=made, progress=False)
