"""Time limits: every stage looks at the clock, and none begins what does not fit. The clock is a fake."""

from __future__ import annotations

import dataclasses
import functools
import time

import numpy as np
import pytest
import scipy.sparse

from grace_opt import Status, bounds, solve
from grace_opt.bounds import convexity, fixing, qcr
from grace_opt.bounds.qcr import qcr_relaxation, solve_relaxation
from grace_opt.bounds.subproblem import Subproblem
from grace_opt.problem import DenseWeights, Problem
from grace_opt.run import Run
from tests.clock import Taken

LIMITED = ["tabu", "annealing", "branch_and_bound", "portfolio", "beam", "local_search", "exhaustive"]


def hard(n: int, *size: int) -> np.ndarray:
    W = np.random.default_rng(0).normal(size=(*size, n, n))
    return W + W.swapaxes(-1, -2)


class Clock:
    """Stands until it jumps: after `looks` looks, by `seconds` seconds."""

    def __init__(self, looks: int, jump: float = 1e6) -> None:
        self.looks, self.jump, self.after = looks, jump, 0

    def __call__(self) -> float:
        self.looks -= 1
        if self.looks >= 0:
            return 0.0
        self.after += 1
        return self.jump


@pytest.mark.parametrize("method", LIMITED)
@pytest.mark.parametrize("size", [(), (3,)])
@pytest.mark.parametrize("looks", [2, 5, 13])
def test_whenever_the_clock_jumps_the_method_ends(method, size, looks, monkeypatch):
    """A stage that did not look would go on: these instances take minutes, and exhaustive ages."""
    W, options = hard(90, *size), {"max_subsets": 10**40} if method == "exhaustive" else {}
    solve(hard(24), 12, method, time_limit=0.01)  # compiled, which no limit counts
    clock = Clock(looks)
    monkeypatch.setattr(time, "monotonic", clock)
    sol = solve(W, 45, method, time_limit=10, **options).verify()
    assert clock.after or method == "local_search"  # done before the clock was looked at so often
    assert clock.after < 300 * len(np.ravel(sol.objective))
    assert (np.asarray(sol.lower_bound) <= np.asarray(sol.objective)).all()
    if clock.after:
        assert Status.OPTIMAL not in set(np.ravel(np.asarray(sol.status, dtype=object)))


@pytest.mark.parametrize("method", ["branch_and_bound", "portfolio"])
def test_nothing_of_cubic_cost_is_begun_without_time(method, monkeypatch):
    """One eigenvalue problem of 1500 vertices takes a second, whatever the limit is."""

    def begun(*arguments, **keywords):
        raise AssertionError("an eigenvalue problem")

    problem = Problem.of(hard(600), 300)
    solve(hard(24), 12, method, time_limit=1)
    for name in ("eigvalsh", "eigh", "inv"):
        monkeypatch.setattr(np.linalg, name, begun)
    monkeypatch.setattr(convexity, "_proved_by_cholesky", begun)
    monkeypatch.setattr(time, "monotonic", Clock(40))  # a thousandth of a second, whatever has been done
    sol = solve(problem, method=method, time_limit=1e-3)
    assert sol.status is Status.LIMIT


def test_a_round_of_the_ascent_leaves_time_for_its_relaxation(monkeypatch):
    """The clock runs with the rows that were swept: the sweep stops where its relaxation still fits."""
    sub, _ = Subproblem.of(Problem.of(hard(60), 30))
    monkeypatch.setattr(qcr, "ASCENT_SLICE", 60 * 60)
    now, swept = [0.0], []
    from grace_opt.kernels.solve.shift import cpu as shift

    ascend = shift.ascend

    def slow(*arguments):
        now[0] += 1.0
        swept.append(arguments[4])
        return ascend(*arguments)

    monkeypatch.setattr(shift, "ascend", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    qcr_relaxation(sub, 0.0, run=Run(deadline=10.0))
    assert swept == list(range(10))
    swept.clear()
    now[0] = 0.0
    monkeypatch.setattr(qcr, "SECONDS_PER_CUBE", 1.0 / 60**3)  # a relaxation takes a second
    qcr_relaxation(sub, 0.0, run=Run(deadline=10.0))
    assert len(swept) == 8
    swept.clear()
    qcr_relaxation(sub, 0.0, run=Run(deadline=11.0))  # a round takes three relaxations and more
    assert not swept


def test_a_relaxation_ends_when_its_time_is_up(monkeypatch):
    """Each slice of its steps takes a second; on W of low rank it can take very many."""
    sub, _ = Subproblem.of(Problem.of(hard(60), 30))
    from grace_opt.kernels.solve.relaxation import cpu as relaxation

    minimise, now, steps = relaxation.minimise, [0.0], []

    def slow(*arguments):
        now[0] += 1.0
        steps.append(arguments[-1])
        return minimise(*arguments)

    whole = solve_relaxation(sub).bound
    monkeypatch.setattr(qcr, "STEPS_SLICE", 60)
    monkeypatch.setattr(relaxation, "minimise", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stopped = solve_relaxation(sub, run=Run(deadline=10.0)).bound
    assert steps == [1] * 10
    assert stopped < whole
    steps.clear()
    assert solve_relaxation(sub).bound == pytest.approx(whole, rel=1e-5)
    assert len(steps) > 20


@pytest.mark.slow
@pytest.mark.parametrize("late", ["made_convex", "minimise"])
@pytest.mark.parametrize("level", bounds.LEVELS)
def test_a_certificate_begins_nothing_after_its_time(late, level, monkeypatch):
    """Time is up in the middle of the first shift, or of the first relaxation: neither is followed by another."""
    from grace_opt.kernels.solve.relaxation import cpu as relaxation

    W = hard(300) + 20 * np.eye(300)
    problem = Problem.of(W @ W if late == "minimise" else W, 150).flatten()
    whole = float(bounds.certificate(problem, "fast"))
    now, begun = [0.0], {"made_convex": 0, "minimise": 0}

    def counted(name, right):
        def work(*arguments, **keywords):
            begun[name] += 1
            now[0] += 100.0 * (name == late)
            return right(*arguments, **keywords)

        return work

    monkeypatch.setattr(convexity, "made_convex", counted("made_convex", convexity.made_convex))
    monkeypatch.setattr(relaxation, "minimise", counted("minimise", relaxation.minimise))
    monkeypatch.setattr(qcr, "STEPS_SLICE", 300)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    found = float(bounds.certificate(problem, level, run=Run(deadline=50.0)))
    assert begun == {"made_convex": 1, "minimise": 1}
    assert found < whole


def test_a_batch_of_whole_numbers_whose_time_is_up_has_no_bound():
    """There is no next whole number above minus infinity."""
    problem = Problem.of(np.round(hard(90, 2)).astype(int), 45).flatten()
    for bound in (bounds.fast_bound, bounds.tight_bound):
        assert (bound(problem, run=Run(deadline=time.monotonic() - 1)) == -np.inf).all()


def test_fixing_without_time_for_a_relaxation_says_nothing():
    sub, _ = Subproblem.of(Problem.of(hard(200), 100))
    left, bound = fixing.reduce_by_fixing(sub, 0.0, 0.0, Run(deadline=time.monotonic() + 1e-4))
    assert (left.m, bound) == (200, -np.inf)


def test_the_row_bound_is_left_out_where_it_takes_longer_than_there_is():
    small, large = (Problem.of(hard(n), n // 2).flatten() for n in (60, 1200))
    over = Run(deadline=time.monotonic() - 1)
    assert np.isfinite(float(bounds.row_bound_in_time(small, over)))
    entries = bounds.entry_bound(large)
    assert float(bounds.row_bound_in_time(large, over)) == float(entries) < float(bounds.row_bound(large))
    huge = dataclasses.replace(large, weights=DenseWeights(large.W.expand(20, -1, -1)), k=large.k.expand(20))
    assert (bounds.row_bound_in_time(huge, over) == -np.inf).all()
    assert np.isfinite(float(bounds.row_bound_in_time(large, Run())))


@pytest.mark.slow
def test_slices_of_exhaustive_do_not_grow_with_n(monkeypatch):
    """A million subsets of 2000 vertices were one slice, of seconds."""
    monkeypatch.setattr(Run, "expired", lambda run: True)
    sol = solve(hard(2000), 1000, "exhaustive", max_subsets=10**700, time_limit=1)
    assert sol.stats["subsets"] <= 2**26 // 2000


@functools.cache
def once(n: int) -> Problem:
    return Problem.of(hard(n), n // 2)


@functools.cache
def compile_loops_of(method: str) -> None:
    solve(hard(260), 130, method, certify=True, time_limit=0.1)


@pytest.mark.parametrize("method", ["mies", "tabu", "portfolio"])
@pytest.mark.parametrize(("n", "limit"), [(1000, 0.4), (2500, 0.4), (2500, 1.0)])
@pytest.mark.slow
def test_the_certificate_is_part_of_the_time_limit(method, n, limit):
    """What fits is computed, what does not is left out, and the time is kept to a tenth and 0.2 seconds.

    2500 vertices have time for the least of bounds, and for one of their rows, but not for a relaxation.
    """
    problem = once(n)
    compile_loops_of(method)  # which no limit counts
    with Taken() as taken:
        sol = solve(problem, method=method, certify=True, time_limit=limit)
    assert taken.seconds < 1.1 * limit + 0.2
    assert np.isfinite(sol.lower_bound)


@pytest.mark.slow
def test_a_search_leaves_time_for_the_certificate(clock):
    run = Run(deadline=clock.now + 10.0)
    assert run.leaving(2.0).deadline == run.deadline - 2.0
    assert run.leaving(60.0).deadline == run.deadline - 5.0
    assert Run().leaving(5.0).deadline == np.inf
    clock.per_look = 0.01
    sol = solve(hard(60), 30, "tabu", certify=True, time_limit=0.5)
    assert sol.gap < 0.5


def test_what_only_sparse_weights_need_is_compiled_before_the_time_starts_for_them_alone(monkeypatch):
    asked = []
    monkeypatch.setattr("grace_opt.bounds.certificates.sparse_bound", lambda *given: asked.append(given))
    bounds.prepare.cache_clear()
    solve(hard(20), 5, "tabu", time_limit=10, iterations=10)
    assert not asked
    sparse = scipy.sparse.random_array((1000, 1000), density=0.002, rng=0)
    monkeypatch.setattr("grace_opt.api._answer", lambda *given: 1 / 0)  # what follows is not asked here
    with pytest.raises(ZeroDivisionError):
        solve(sparse + sparse.T, 5, "mies", time_limit=10, certify=True)
    assert len(asked) == 1
    bounds.prepare.cache_clear()
