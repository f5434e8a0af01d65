"""Threads: what is loaded, compiled or tried at its first use, used first by many at once; errors in threads."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import threadpoolctl
import torch

import grace_opt
from grace_opt import registry, solve
from grace_opt.kernels._shared import dispatch
from grace_opt.kernels._shared import threads as kernel_threads
from grace_opt.kernels.solve.exchange import KERNEL
from grace_opt.parallel import map_in_threads
from grace_opt.run import Run
from grace_opt.solution import SolverResult
from tests import starter

ROOT = Path(__file__).resolve().parent.parent

FIRST_USE = """
import sys, threading
import numpy as np, grace_opt
sys.setswitchinterval(1e-6)
calls = {calls}
W = np.random.default_rng(0).normal(size=(20, 20)); W += W.T
gate, answers, errors = threading.Barrier(16), [None] * 16, []
def work(i):
    name, options = calls[i % len(calls)]
    try:
        gate.wait()
        answers[i] = (name, str(options), float(grace_opt.solve(W, 8, name, **options).objective))
    except BaseException as error:
        errors.append(f"{{name}}: {{error!r}}")
threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
for (name, options, value) in set(answers):
    again = float(grace_opt.solve(W, 8, name, **dict(eval(options))).objective)
    assert value == again, (name, value, again)
assert len(set(answers)) == len(calls)
print("fine")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls",
    [
        [("mies", {}), ("think", {})],
        [("local_search", {}), ("exhaustive", {}), ("tabu", {}), ("mies", {"certify": "tight"})],
        [("branch_and_bound", {"time_limit": 30}), ("portfolio", {"time_limit": 60}), ("beam", {})],
        [("sdp", {}), ("sdp", {"relaxation": "shor"})],
    ],
    ids=["plain", "compiled", "limited", "cvxpy"],
)
def test_first_use_by_many_threads_at_once(calls):
    if calls[0][0] == "sdp":
        pytest.importorskip("cvxpy")
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = starter.python(FIRST_USE.format(calls=calls), env)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.fixture
def forget(monkeypatch):
    monkeypatch.setattr(registry.methods, "_REGISTRY", dict(registry.specs()))
    monkeypatch.setattr(registry.methods, "_broken_entry_points", {})


@pytest.fixture
def plug_in(forget, monkeypatch, tmp_path):
    """Installs modules whose methods are found by entry points, as at the start of a process."""
    monkeypatch.syspath_prepend(tmp_path)
    points = []
    monkeypatch.setattr(registry.methods, "entry_points", lambda group: points)
    monkeypatch.setattr(registry.methods, "_loaded", False)

    def install(name, code):
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        points.append(EntryPoint("other", name, registry.ENTRY_POINT_GROUP))
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield install
    for point in points:
        sys.modules.pop(point.module, None)


WORKS = """
import grace_opt
from grace_opt import registry, SolverResult
@registry.register_solver({name!r}, batched=True)
def solver(problem, options, run):
    '''The first k.'''
    return SolverResult(problem.candidates & (problem.candidates.cumsum(-1) <= problem.k.unsqueeze(-1)))
"""


def test_a_plug_in_that_fails_is_named_and_harms_no_other(plug_in):
    plug_in("plugged_broken", WORKS.format(name="half_there") + "import a_library_that_is_not_there\n")
    plug_in("plugged_fine", WORKS.format(name="plugged_fine_method"))
    with pytest.warns(RuntimeWarning, match=r"other = plugged_broken .*ModuleNotFoundError.*a_library_that"):
        known = registry.specs()
    assert {"mies", "plugged_fine_method"} <= set(known)
    assert "half_there" not in known
    with pytest.raises(
        grace_opt.errors.UnknownSolverError, match=r"Not loaded: other = plugged_broken \(ModuleNotFound"
    ):
        solve(np.eye(3), 1, "half_there")


@pytest.mark.parametrize("status", ["", "2", "'no licence'"])
def test_a_plug_in_that_exits_ends_nobodys_program(plug_in, status):
    plug_in("plugged_exit", WORKS.format(name="half_there") + f"import sys\nsys.exit({status})\n")
    with pytest.warns(RuntimeWarning, match=r"other = plugged_exit .*SystemExit"):
        known = registry.specs()
    assert "mies" in known
    assert "half_there" not in known


def test_a_plug_in_may_ask_for_methods_while_it_is_loaded(plug_in):
    plug_in(
        "plugged_curious", "from grace_opt import registry\nSEEN = registry.specs()\n" + WORKS.format(name="curious")
    )
    assert "curious" in registry.specs()
    assert "mies" in sys.modules["plugged_curious"].SEEN


def test_ctrl_c_while_loading_leaves_the_rest_to_the_next_call(plug_in):
    plug_in("plugged_slow", "import builtins\nif not hasattr(builtins, 'asked'):\n    raise KeyboardInterrupt\n")
    plug_in("plugged_later", WORKS.format(name="later"))
    with pytest.raises(KeyboardInterrupt):
        registry.specs()
    import builtins

    builtins.asked = True
    try:
        assert "later" in registry.specs()
    finally:
        del builtins.asked


@pytest.mark.slow
def test_loading_and_importing_a_plug_in_at_once_does_not_hang(plug_in):
    """One thread imports a module that asks for methods, the other loads methods and comes upon that module."""
    code = "import time\nfrom grace_opt import registry\ntime.sleep(0.3)\nregistry.specs()\n" + WORKS.format(
        name="both"
    )
    plug_in("plugged_both", code)
    with ThreadPoolExecutor(2) as pool:
        importing = pool.submit(__import__, "plugged_both")
        time.sleep(0.1)
        assert "both" in pool.submit(registry.specs).result(timeout=30)
        importing.result(timeout=30)


@pytest.mark.slow
def test_preparing_is_waited_for_and_tried_again_where_it_failed(forget):
    began, calls = threading.Event(), []

    @registry.register_solver("slow_start", batched=True, compiled=True)
    def slow_start(problem, options, run):
        """Fails first, and takes its time then."""
        calls.append("begun")
        if len(calls) == 1:
            raise KeyboardInterrupt
        began.set()
        time.sleep(0.3)
        calls.append("done")
        return SolverResult(problem.candidates)

    spec = registry.get("slow_start")
    with pytest.raises(KeyboardInterrupt):
        spec.prepare()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(spec.prepare)
        assert began.wait(10)
        spec.prepare()
        assert calls == ["begun", "begun", "done"]
        first.result()


def test_an_error_in_any_thread_ends_the_others(monkeypatch):
    """Not only one in the thread that happens to be asked first."""
    monkeypatch.setattr("grace_opt.parallel.thread_count", lambda most: 3)
    run, ended, begun = Run(), [], threading.Barrier(3)

    def work(item):
        if item < 3:
            begun.wait(60)
        if item == 2:
            raise ZeroDivisionError("planted")
        for _ in range(6000):
            if run.expired():
                break
            time.sleep(0.01)
        ended.append(run.expired())

    with pytest.raises(ZeroDivisionError, match="planted"):
        map_in_threads(work, range(9), run)
    assert ended
    assert all(ended)


@pytest.mark.slow
def test_compiled_shares_have_ended_when_an_error_comes_out(monkeypatch):
    """They write to the caller's arrays."""
    monkeypatch.setattr(kernel_threads, "thread_count", lambda most: 2)
    ended, begun = [], threading.Event()

    def kernel(numbers):
        if numbers[0] == 0:
            assert begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        time.sleep(0.3)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        kernel_threads.split_batch(kernel, (np.arange(2),))
    assert ended == [True]


def test_the_number_of_blas_threads_is_as_before_when_calls_overlap():
    """The second one's "before" is the first one's limit."""

    def counts():
        return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]

    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first(_):
        first_in.set()
        assert second_in.wait(10)

    def second(_):
        second_in.set()
        assert first_out.wait(10)

    with threadpoolctl.threadpool_limits(2, user_api="blas"), ThreadPoolExecutor(2) as pool:
        before = counts()  # some libraries can have one thread only
        assert 2 in before
        one = pool.submit(map_in_threads, first, [0])
        assert first_in.wait(10)
        two = pool.submit(map_in_threads, second, [0])
        one.result(10)
        first_out.set()
        two.result(10)
        assert counts() == before


def test_a_kernel_is_tried_once_whichever_thread_comes_first(monkeypatch):
    tried = []
    for name, value in (("DEVICE_TYPE", "cpu"), ("_machines", {}), ("_verdicts", {}), ("_said", set())):
        monkeypatch.setattr(dispatch, name, value)
    monkeypatch.setattr(dispatch, "unsupported_machine", lambda device: None)
    monkeypatch.setattr(
        dispatch, "_tried", lambda kernel, device: (tried.append(kernel.name), time.sleep(0.1), True)[-1]
    )
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: dispatch.use_triton(KERNEL, torch.device("cpu")), range(8)))
    assert answers == [True] * 8
    assert tried == ["exchanges"]


def test_what_a_c_function_is_told_lives_as_long_as_its_call() -> None:
    arrays, seen = [np.zeros(3), np.zeros((2, 2), np.float32)], []

    def read(at: int) -> None:
        others = [np.full(5, -1, np.int64) for _ in range(1000)]  # would lie where the table was, were it gone
        seen.append((ctypes.c_int64 * len(others[0])).from_address(at)[:])

    kernel_threads.call_with(read, arrays, (7, 8, 9))
    assert seen == [[*(array.ctypes.data for array in arrays), 7, 8, 9]]


CODES_IN_THREADS = """
import sys, threading
from grace_opt.kernels.cache.coding import reference, trial as coding
from grace_opt.kernels.steps import trial as steps
expected = {}  # once: what is tried are the loops, and the reference takes many times as long
def define(*case, define=reference.scaled_and_coded):
    kind = case[-1].trellis is None
    if kind not in expected:
        expected[kind] = define(*case)
    return expected[kind]
reference.scaled_and_coded = define
agree = []
sys.setswitchinterval(1e-6)
def work():
    for _ in range(40):
        agree.append(coding.cpu() and steps.cpu())
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(agree), all(agree))
"""


@pytest.mark.slow
def test_codes_and_steps_in_threads_are_those_of_one() -> None:
    """In a process of its own, which memory that is no longer ours would end."""
    done = starter.python(CODES_IN_THREADS, dict(os.environ, PYTHONPATH=str(ROOT)), ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "320 True"), done.stderr
