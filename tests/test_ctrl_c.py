"""Ctrl-C at any moment: once there is a choice it comes back, with its bound and Status.INTERRUPTED, and nothing false.

Real signals, in processes of their own; `_Stop.has_choice` tells what a method had when the signal came.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

import grace_opt
from grace_opt import Status, api, compare, instances, registry, solve
from grace_opt._util.ctrl_c import kept_ctrl_c
from grace_opt.cli.app import app
from grace_opt.problem import Problem
from grace_opt.run import Run, _Stop
from grace_opt.solution import SolverResult
from tests import children

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")


def interrupted(method, n, batch, longest, options):
    """Interrupt calls at random moments, and return what each had found."""
    stops = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Stop, "__init__", lambda self, old=_Stop.__init__: (stops.append(self), old(self))[1])
        rng = np.random.default_rng(1)
        W = rng.normal(size=(batch, n, n))
        W = W + W.swapaxes(1, 2)
        small = np.cos(np.arange(576.0).reshape(24, 24))
        solve(small + small.T, 12, method)  # compiled
        api._prepare(registry.get(method), "tight", Problem.of(W, n // 2))
        solve(W, n // 2, "local_search", start="think", max_steps=1)  # and the checks of large W
        moments, found = random.Random(0), []
        for _ in range(4):
            stops.clear()
            delay = longest * moments.random() ** 2
            # A thread here would send it when it gets the interpreter: at few moments, and always at the same ones.
            began = time.monotonic()  # before it sleeps
            sender = subprocess.Popen(["sh", "-c", f"sleep {delay}; kill -INT {os.getpid()}"])
            try:
                solution = solve(W, n // 2, method, **options)
            except KeyboardInterrupt:
                assert not stops or not any(stop.has_choice for stop in stops), (delay, "had a choice")
                found.append("nothing yet")
            else:
                took = time.monotonic() - began
                assert took >= delay, (delay, took, "over before the signal")
                assert took < delay + 10, "did not stop"
                solution.verify()
                assert (solution.lower_bound <= solution.objective).all()
                assert set(solution.status.flat) <= {Status.INTERRUPTED, Status.OPTIMAL}
                found.append(sorted({s.name for s in solution.status.flat}))
            assert sender.wait() == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return found


@pytest.fixture(scope="module")
def process(forks):
    """`process(*case)`: interrupts a process of its own; the next case finds it with everything loaded."""
    with ProcessPoolExecutor(1, mp_context=forks) as pool:
        yield lambda *case: pool.submit(interrupted, *case).result(timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "n", "batch", "longest", "options"),
    [
        ("tabu", 120, 1, 0.25, {"time_limit": 60}),
        ("tabu", 120, 3, 0.25, {"time_limit": 60}),
        ("annealing", 120, 2, 0.25, {"time_limit": 60}),
        ("branch_and_bound", 120, 1, 0.5, {}),
        ("branch_and_bound", 120, 3, 0.5, {}),
        ("portfolio", 90, 2, 0.8, {"time_limit": 60}),
        ("exhaustive", 40, 2, 0.25, {"max_subsets": 10**15}),
        ("local_search", 2000, 1, 0.1, {"start": "random"}),
        ("beam", 400, 1, 0.25, {"width": 64}),
        ("sdp", 60, 2, 1.0, {"eps": 1e-14, "max_iters": 10**6, "max_memory": 64.0}),
    ],
)
def test_at_random_moments(method, n, batch, longest, options, process):
    if method == "sdp":
        pytest.importorskip("cvxpy")
    found = process(method, n, batch, longest, options)
    assert "INTERRUPTED" in str(found), found


@pytest.fixture
def method():
    """Registers functions for the duration of a test."""
    names = []

    def add(function, name="interrupted", **how):
        registry.register_solver(name, **how)(function)
        names.append(name)
        return name

    yield add
    for name in names:
        registry.unregister(name)


W9 = np.cos(np.arange(81.0).reshape(9, 9)) + np.cos(np.arange(81.0).reshape(9, 9)).T


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def waits(presses, choice=True):
    """A method that has a choice, is interrupted this many times, and looks at the clock afterwards."""

    def solver(problem, options, run):
        """Wait."""
        if choice:
            run.ctrl_c_stops()
        for _ in range(presses):
            press()
        ended = run.expired()
        first = problem.candidates & (problem.candidates.cumsum(-1) <= problem.k.unsqueeze(-1))
        return SolverResult(first, limit=ended | (problem.k < 0))

    return solver


def test_once_there_is_a_choice_it_is_returned(method):
    for size in ((), (3,)):
        sol = solve(np.broadcast_to(W9, (*size, 9, 9)), 4, method(waits(1), f"waits{len(size)}", batched=True))
        assert set(np.ravel(np.asarray(sol.status, dtype=object))) == {Status.INTERRUPTED}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(("presses", "choice"), [(2, True), (1, False)])
def test_a_second_one_or_one_without_a_choice_raises(method, presses, choice):
    name = method(waits(presses, choice), batched=True)
    with pytest.raises(KeyboardInterrupt):
        solve(W9, 4, name)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_compare_stops_as_a_whole_and_keeps_the_interrupted_choice(method):
    both = compare(W9, 4, ["mies", method(waits(1), batched=True), "think"])
    assert both.interrupted
    assert both.methods == ("mies", "interrupted")
    assert both["interrupted"].status is Status.INTERRUPTED
    assert dict(both.left_out) == {"think": "interrupted"}
    assert "INTERRUPTED" in str(both)
    alone = compare(W9, 4, [method(waits(1), "alone", batched=True), "mies"])
    assert alone.interrupted
    assert alone.methods == ("alone",)


@pytest.mark.parametrize("presses", [1, 2])
def test_compare_keeps_its_answers_when_the_certificate_is_interrupted(monkeypatch, presses):
    def pressed(problem, level, *, incumbent, run):
        for _ in range(presses):
            press()
        assert run.expired()
        return certificate(problem, level, incumbent=incumbent, run=run)

    certificate = grace_opt.bounds.certificate
    monkeypatch.setattr(grace_opt.bounds, "certificate", pressed)
    both = compare(W9, 4, ["mies", "think"], certify=True)
    assert both.interrupted
    assert both.methods == ("mies", "think")
    both.verify()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("name", ["tabu", "branch_and_bound", "portfolio"])
@pytest.mark.parametrize("size", [1, 3])
def test_inside_a_callback(name, size):
    """The callback runs to its end, the search does not; in a thread of a batch, too."""
    rng = np.random.default_rng(0)
    W = rng.normal(size=(size, 80, 80))
    heard = []

    def callback(progress):
        if not heard:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        heard.append(progress.objective)

    sol = solve(W + W.swapaxes(1, 2), 40, name, callback=callback, time_limit=60).verify()
    assert heard
    assert Status.INTERRUPTED in set(sol.status.flat)


def test_a_call_inside_a_callback_stops_its_caller_as_well(method):
    inner, statuses = method(waits(1), "inner", batched=True), []

    def callback(progress):
        statuses.append(solve(W9, 4, inner).status)

    rng = np.random.default_rng(0)
    W = rng.normal(size=(80, 80))
    outer = solve(W + W.T, 40, "tabu", callback=callback, time_limit=60)
    assert statuses == [Status.INTERRUPTED]
    assert outer.status is Status.INTERRUPTED


def test_a_program_with_a_handler_of_its_own_keeps_it(method):
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        assert solve(W9, 4, method(waits(1), batched=True)).status is Status.FEASIBLE
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_in_another_thread_nothing_is_installed():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(solve(W9, 4, "tabu").status))
    thread.start()
    thread.join()
    assert seen == [Status.FEASIBLE]
    with Run().stopping_on_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler


def test_a_batch_without_time_gets_a_choice_for_every_instance(monkeypatch):
    """`exhaustive` gave every instance a slice of its own, whatever the time."""
    rng = np.random.default_rng(0)
    W = rng.normal(size=(50, 40, 40))
    W = W + W.swapaxes(1, 2)
    monkeypatch.setattr(Run, "expired", lambda run: True)
    sol = solve(W, 20, "exhaustive", max_subsets=10**15, time_limit=1).verify()
    assert set(sol.status.flat) == {Status.LIMIT}
    assert sol.stats["subsets"] < 2**21
    assert (sol.mask[1:] == solve(W[1:], 20, "mies").mask).all()


def test_local_search_answers_the_same_in_stretches(monkeypatch):
    from grace_opt.solvers import local_search

    rng = np.random.default_rng(3)
    W = rng.normal(size=(2, 300, 300)).astype(np.float32)
    W = W + W.swapaxes(1, 2)
    once = solve(W, 100, "local_search", start="random")
    monkeypatch.setattr(local_search, "PAIRS_PER_LOOK", 1)
    again = solve(W, 100, "local_search", start="random")
    assert (once.mask == again.mask).all()


def command_line(arguments, has_choice):
    """The program, which says when there is a choice."""
    stops = Run.ctrl_c_stops
    Run.ctrl_c_stops = lambda run: (stops(run), run.limited and has_choice.set())
    sys.argv[1:] = arguments
    app()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["solve", "compare"])
def test_the_command_line_prints_the_choice(command, tmp_path, forks):
    rng = np.random.default_rng(0)
    W = rng.normal(size=(120, 120))
    instances.write(tmp_path / "w.npy", W + W.T)
    arguments = [command, str(tmp_path / "w.npy"), "-k", "60", "--method", "tabu", "--time-limit", "120", "--json"]
    has_choice, out, err = forks.Event(), tmp_path / "out", tmp_path / "err"
    process = forks.Process(target=children.program, args=(command_line, (arguments, has_choice), out, err))
    process.start()
    assert has_choice.wait(60)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130, err.read_text()
    (answer,) = json.loads(out.read_text())
    assert answer["status"] == "INTERRUPTED"
    assert "Traceback" not in err.read_text()


def test_statuses_are_sentences():
    assert "Ctrl-C" in grace_opt.Status.INTERRUPTED.value


def set_up(W):
    """Interrupt SCS while it sets itself up, when it listens to Ctrl-C, and forgets it."""
    import scs

    began = []

    class SetUp(scs.SCS):
        def __init__(self, *arguments, **settings):
            began.append(time.monotonic())
            # It comes in the middle, in a process that has no thread but those of this test.
            sender = subprocess.Popen(["sh", "-c", f"sleep 0.02; kill -INT {os.getpid()}"])
            super().__init__(*arguments, **settings)
            sender.wait()

        def solve(self, *arguments, **settings):
            raise AssertionError("nothing would stop it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scs, "SCS", SetUp)
        solution = solve(W + W.T, len(W) // 2, "sdp", solver="scs", max_memory=64.0)
    assert began, "SCS was called in another way"
    return solution.status, int(solution.mask.sum())


def test_while_a_library_that_listens_itself_is_set_up():
    pytest.importorskip("cvxpy")
    pytest.importorskip("scs")
    W = np.cos(np.arange(80.0**2).reshape(80, 80))
    assert children.run(set_up, W) == (Status.INTERRUPTED, 40)


def listened(seconds):
    """Whether Ctrl-C is heard although a library has told the system to ignore it, some seconds before."""
    ignore, put = 1, ctypes.pythonapi.PyOS_setsig
    put.argtypes, put.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    try:
        with kept_ctrl_c():
            python = put(signal.SIGINT, ignore)
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(50):  # another thread may take a while to get it
                time.sleep(0.01)
            put(signal.SIGINT, python)  # as the library is done
    except KeyboardInterrupt:
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler and not signal.pthread_sigmask(0, ())
    return False


def test_a_library_that_forgets_it():
    """Where no other thread gets it, it waits from the first moment on."""
    assert children.run(listened, 0.0)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
def test_a_library_that_forgets_it_where_other_threads_get_it():
    """Python's handler is there again after a moment."""
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        assert listened(0.5)
    finally:
        over.set()
        other.join()
