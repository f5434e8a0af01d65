"""The first call on a machine: what is compiled, what runs as plain Python meanwhile, and what is said.

Cases in processes of their own have an empty folder for compiled loops, as a fresh machine has.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grace_opt._util.progress import progress_bar
from grace_opt._util.quiet import is_quiet
from grace_opt.kernels._shared import compiling, interpreted, jit, whole
from grace_opt.kernels._shared.limits import SMALL
from grace_opt.kernels._shared.threads import always_compiled
from grace_opt.kernels.solve.enumeration.cpu import advance
from grace_opt.kernels.solve.exchange.cpu import improve
from grace_opt.kernels.solve.relaxation import cpu as relaxation
from grace_opt.kernels.solve.search.cpu import search
from grace_opt.kernels.solve.tabu import cpu as tabu
from tests import starter
from tests.clock import Clock

ROOT = Path(__file__).resolve().parent.parent
SIDE = int(SMALL**0.5)


def python(code: str, folder: Path | None, **more: str) -> subprocess.CompletedProcess[str]:
    """Run code with an empty folder for compiled loops, or with that of all tests."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more
    if folder is not None:
        env |= {"NUMBA_CACHE_DIR": str(folder)}
    env.pop("GRACE_OPT_PLAIN", None)
    done = starter.python(code, env | more)
    assert done.returncode == 0, done.stderr
    return done


# Loops as plain Python


def instance(n: int, seed: int, kind: str) -> Any:
    rng = np.random.default_rng(seed)
    W = rng.normal(size=(n, n))
    W = W @ W.T * rng.normal(size=(n, n)) if kind == "wild" else np.round(3 * W) if kind == "ties" else W
    W = W + W.T
    return W * 10.0 ** rng.integers(-8, 8, size=n) if kind == "wild" else W


def tabu_run(loops: Callable[[Any], Any], W: Any, seed: int) -> list[Any]:
    n = len(W)
    k, rng = n // 2, np.array([seed + 1], np.uint64)
    x = np.arange(n) < k
    W = np.maximum(W, W.T)
    top, heavy = np.empty((2, n))
    loops(tabu.row_maxima)(W, top)
    grain = loops(tabu.scales)(W, heavy)
    sums, until, best, values = np.empty(n), np.zeros(n, np.int64), x.copy(), np.full(4, np.inf)
    value, values[3] = loops(tabu.fill_sums)(W, x, sums)
    values[:3] = value
    elites, worth, state = np.zeros((4, n), bool), np.zeros(4), np.zeros(4, np.int64)
    found = W, top, heavy, grain, k, x, sums, until, best, values, elites, worth, state, rng
    loops(tabu.run)(*found, 120, 15, 3)
    return list(found)


def exchanges(loops: Callable[[Any], Any], W: Any, seed: int) -> list[Any]:
    n = len(W)
    W, mask, done = np.maximum(W, W.T)[None], (np.arange(n) < n // 2)[None], np.zeros(1, np.int64)
    loops(improve)(10**6, 1e-12, W, mask, np.ones((1, n), bool), done)
    return [mask, done]


def subsets(loops: Callable[[Any], Any], W: Any, seed: int) -> list[Any]:
    n = min(len(W), 8)
    c, best, value = np.append(np.arange(n // 2), n), np.zeros(n // 2, np.int64), np.full(2, np.inf)
    seen = loops(advance)(np.ascontiguousarray(W[:n, :n]), c, best, value, 10**6)
    return [c, best, value, *seen]


def relaxations(loops: Callable[[Any], Any], W: Any, seed: int) -> list[Any]:
    n = len(W)
    A, c, scale = W @ W.T, W[0].copy(), np.exp(W[0] / (1 + abs(W[0])))
    x, g, ordered, sums, form = np.linspace(-0.5, 1.5, n), np.empty(n), np.empty(n), np.zeros(n), np.empty((n, n))
    verdict, k = np.zeros(n, np.int8), max(n // 2, 1)
    loops(relaxation.repair)(x, float(k))
    found = loops(relaxation.minimise)(A, c, k, x, g, ordered, np.inf, 1e-6, 40)
    target = found[0] + 0.1 * abs(found[0])
    decided = loops(relaxation.probe)(A, c, k, x, target, 1e-5, 40, verdict, 0, n)
    largest, norms = loops(relaxation.add_sizes)(A, sums), loops(relaxation.scaled_form)(A, c, scale, form)
    loops(relaxation.add_square)(A, c, 0.3)
    return [x, g, ordered, sums, form, verdict, A, *found, decided, largest, *norms]


def tree(loops: Callable[[Any], Any], W: Any, seed: int) -> list[Any]:
    m = len(W)
    W = np.maximum(W, W.T)
    np.fill_diagonal(W, 0.0)
    A = W + np.diag(abs(W).sum(1))
    F = np.zeros((m, m))
    status, X, C, E = np.zeros((m + 8, m), np.int8), *(np.zeros((m + 8, m)) for _ in range(3))
    X[0], consts, bounds, best = 0.5, np.zeros((m + 8, 3)), np.full(m + 8, -np.inf), np.zeros(m, bool)
    consts[0, 2] = m // 2
    stack = W, A, F, F, status, X, C, E, consts, bounds
    found = loops(search)(*stack, 1, np.inf, best, 0.0, abs(W).sum(1), 60)
    return [*stack, best, *found]


def compiled(loop: Any) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with always_compiled():
            return loop(*arguments)

    return run


def plain(loop: Any) -> Callable[..., Any]:
    return interpreted.interpreted_version(loop.py_func)


@pytest.mark.parametrize("loop", [tabu_run, exchanges, subsets, relaxations, tree])
@pytest.mark.parametrize("kind", ["usual", "ties", "wild"])
@pytest.mark.parametrize("n", [2, 5, SIDE])
def test_plain_python_gives_the_compiled_results_bit_for_bit(loop: Callable[..., list[Any]], kind: str, n: int) -> None:
    for seed in range(2):
        with np.errstate(all="ignore"):
            found = loop(plain, instance(n, seed, kind), seed)
        for a, b in zip(found, loop(compiled, instance(n, seed, kind), seed), strict=True):
            assert np.asarray(a).tobytes() == np.asarray(b, np.asarray(a).dtype).tobytes()


@given(st.lists(st.floats(allow_nan=False) | st.integers(-2, 2).map(float), max_size=400))
def test_whole_arrays_are_as_numpy_s(numbers: list[float]) -> None:
    given_, ordered = np.array(numbers), np.array(numbers)
    whole.sort(ordered)
    assert np.array_equal(ordered, np.sort(given_))
    assert np.array_equal(whole.sorted_places(given_), np.argsort(given_, kind="stable"))
    assert whole.largest(given_) == max(numbers, default=-np.inf)
    with np.errstate(all="ignore"):
        assert np.array_equal(whole.total(given_), sum(numbers), equal_nan=True)
    copied = np.empty_like(given_)
    whole.copy(copied, given_)
    assert whole.equal(copied, given_)
    if numbers:
        copied[-1] = np.nan
        assert not whole.equal(copied, given_)
        assert np.isnan(whole.largest(copied))


def test_long_arrays_are_sorted_too() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(5000.0)
    for numbers in (rng.normal(size=5000), steps, steps[::-1].copy(), np.zeros(5000), steps % 3, np.minimum(steps, 9)):
        ordered = numbers.copy()
        whole.sort(ordered)
        assert np.array_equal(ordered, np.sort(numbers))
        assert np.array_equal(whole.sorted_places(numbers), np.argsort(numbers, kind="stable"))


# When a loop is compiled


def counted(monkeypatch: pytest.MonkeyPatch, switch: Callable[..., None]) -> tuple[Any, list[bool]]:
    """A loop that nobody has compiled, and whether each call of it ran as plain Python."""
    calls: list[bool] = []
    switch("GRACE_OPT_PLAIN", None)
    original = interpreted.interpreted_version

    def interpreted_version(function: Any) -> Any:
        calls.append(True)
        return original(function)

    monkeypatch.setattr(jit, "interpreted_version", interpreted_version)

    @jit.jit(small=9)
    def largest_of(values: Any) -> Any:
        return whole.largest(values)

    largest_of._cache.is_on_disk = lambda: False
    return largest_of, calls


def test_little_work_waits_for_no_compiler(monkeypatch: pytest.MonkeyPatch, switch: Callable[..., None]) -> None:
    loop, calls = counted(monkeypatch, switch)
    found = loop(np.arange(9.0))
    assert (found, type(found), calls, loop.signatures) == (8.0, float, [True], [])
    assert loop(np.arange(10.0)) == 9.0  # more to do
    assert len(calls) == len(loop.signatures) == 1
    assert loop(np.arange(9.0)) == 8.0  # compiled code is at hand
    assert len(calls) == 1


@pytest.mark.parametrize("why", ["enough", "on disk", "asked", "switched off", "float32"])
def test_plain_python_ends(why: str, monkeypatch: pytest.MonkeyPatch, switch: Callable[..., None]) -> None:
    loop, calls = counted(monkeypatch, switch)
    numbers = np.arange(9.0, dtype=np.float32 if why == "float32" else np.float64)
    if why == "enough":
        monkeypatch.setattr(jit, "INTERPRETED_SECONDS", 0.0)
    elif why == "on disk":
        loop._cache.is_on_disk = lambda: True
    elif why == "switched off":
        switch("GRACE_OPT_PLAIN", "0")
    assert (compiled(loop) if why == "asked" else loop)(numbers) == 8.0
    assert (len(calls), len(loop.signatures)) == (0, 1)


SOLVE = """
import numpy as np, grace_opt, sys
from grace_opt.kernels._shared import jit
jit.INTERPRETED_SECONDS = 60.0  # also where everything takes long (`bench.first_call` measures)
rng = np.random.default_rng(0)
queries, keys = rng.normal(size=(32, 12)), rng.normal(size=(200, 12))
W = (queries.T @ queries) * (keys.T @ keys)
sol = grace_opt.solve(W, k=6, method="mies", certify=True)
print(sol.indices, float(sol.objective).hex(), float(sol.lower_bound).hex())
for sol in grace_opt.compare(W, k=6):
    status = sol.status.name.replace("LIMIT", "FEASIBLE")  # a busy machine stops searches that are done anyway
    print(sol.method, sol.indices, float(sol.objective).hex(), float(sol.lower_bound).hex(), status)
tabu = sys.modules["grace_opt.kernels.solve.tabu.cpu"]
print(len(tabu.run.signatures))
"""


@pytest.mark.slow
def test_the_first_answers_are_the_same_and_need_no_search_compiled(tmp_path: Path) -> None:
    first, all_compiled = python(SOLVE, tmp_path / "a"), python(SOLVE, None, GRACE_OPT_PLAIN="0")
    assert first.stdout.splitlines()[:-1] == all_compiled.stdout.splitlines()[:-1]
    assert (first.stdout.split()[-1], all_compiled.stdout.split()[-1]) == ("0", "1")
    assert len(list((tmp_path / "a").rglob("*.nbc"))) < 5


def test_what_only_loops_call_can_be_called_alone() -> None:
    @jit.inlined
    def twice(x: Any) -> Any:
        return 2 * x

    @jit.jit
    def four_times(x: Any) -> Any:
        return twice(twice(x))

    assert (four_times(3), twice(4.5)) == (12, 9.0)
    assert list(twice.overloads) != []


# What is said


@pytest.mark.slow
def test_one_line_where_compiling_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: Any, clock: Clock) -> None:
    monkeypatch.setattr(compiling.threading, "Timer", clock.timer)
    monkeypatch.setattr(compiling, "SECONDS_BEFORE_LINE", 0.05)
    monkeypatch.setattr(compiling, "LOOPS", compiling.Announced(compiling.LINE))
    with compiling.compiling():
        pass
    clock.sleep(0.1)
    assert capsys.readouterr().err == ""
    for expected in ("", f"{compiling.LINE}\n", ""):
        wanted = False if expected == "" else None
        with progress_bar(wanted, 1), compiling.compiling(), compiling.compiling():
            assert is_quiet() == (wanted is False)
            clock.sleep(0.3)
        assert capsys.readouterr().err == expected
    with compiling.compiling():  # not again
        clock.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_many_short_ones_are_long_together(monkeypatch: pytest.MonkeyPatch, capsys: Any, clock: Clock) -> None:
    monkeypatch.setattr(compiling.threading, "Timer", clock.timer)
    monkeypatch.setattr(compiling, "SECONDS_BEFORE_LINE", 0.2)
    monkeypatch.setattr(compiling, "LOOPS", compiling.Announced(compiling.LINE))
    for _ in range(5):
        with compiling.compiling():
            clock.sleep(0.1)
    assert capsys.readouterr().err == f"{compiling.LINE}\n"


QUICKLY = """
import numpy as np, torch, grace_opt
from grace_opt.kernels._shared import compiling
compiling.SECONDS_BEFORE_LINE = 0.1
W = np.random.default_rng(0).normal(size=(40, 40))
W = W + W.T
"""


@pytest.mark.slow
def test_a_process_says_it_once_unless_told_to_be_quiet(tmp_path: Path) -> None:
    """Each compiles for longer than it takes to say so, `tabu` several loops; once they are kept, there is no line."""
    quiet = "grace_opt.compare(W, 20, ['local_search'], progress=False)\n"
    aloud = "import sys\nprint('now', file=sys.stderr)\ngrace_opt.compare(W, 20, ['tabu'], progress=None)"
    assert python(QUICKLY + quiet + aloud, tmp_path).stderr == f"now\n{compiling.LINE}\n"
    again = (quiet + aloud).replace("progress=False", "progress=None")
    assert python(QUICKLY + again, tmp_path).stderr == "now\n"


# Interrupts, threads, the end


def test_what_interrupts_leaves_the_collector_on() -> None:
    def interrupted() -> None:
        with compiling.compiling():
            assert not gc.isenabled()
            raise KeyboardInterrupt

    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.isenabled()
    with compiling.compiling():
        assert not gc.isenabled()
    gc.disable()
    try:
        with compiling.compiling():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.slow
def test_ctrl_c_while_compiling(tmp_path: Path) -> None:
    code = QUICKLY + "print('now', flush=True)\ngrace_opt.solve(W, 20, 'local_search', time_limit=9)"
    env = os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=env, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "now\n"
        assert process.stderr.readline() == f"{compiling.LINE}\n"
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    unlimited = code.replace(", time_limit=9", "")  # before a limit starts to run, other loops would be compiled, too
    assert python(unlimited, tmp_path).stdout == "now\n"  # nothing half-written stays behind


@pytest.mark.slow
def test_a_process_ends_while_a_thread_compiles(tmp_path: Path) -> None:
    code = """
import threading
from grace_opt.kernels._shared import compiling
begun, inner = threading.Event(), compiling.gc.disable
def disable():
    inner()
    begun.set()
compiling.gc.disable = disable
threading.Thread(target=lambda: grace_opt.solve(W, 20, "branch_and_bound"), daemon=True).start()
assert begun.wait(60)
"""
    began = time.monotonic()
    python(QUICKLY + code, tmp_path)
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_threads_at_first_use(tmp_path: Path) -> None:
    """Some run as plain Python, some wait for what another compiles; all find the same."""
    code = """
from concurrent.futures import ThreadPoolExecutor
from grace_opt.kernels._shared import jit
jit.INTERPRETED_SECONDS = 0.01
small = W[:14, :14]
def solve(number):
    sols = [grace_opt.solve(small if number % 2 else W, 7, "tabu", iterations=300) for _ in range(20)]
    return number % 2, float(sols[0].objective).hex(), len({float(sol.objective).hex() for sol in sols})
with ThreadPoolExecutor(6) as pool:
    found = set(pool.map(solve, range(6)))
print(len(found), {found[2] for found in found})
"""
    assert python(QUICKLY + code, tmp_path).stdout == "2 {1}\n"
