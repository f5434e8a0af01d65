"""Tabu search, branch and bound, and portfolio: what they promise about starts, limits, callbacks, proofs and seeds."""

import importlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grace_opt
from grace_opt import GraceError, Problem, Status, registry, solve
from grace_opt.errors import OptionError, SolverError
from grace_opt.instances.generators import attention, dispersion, k_cluster
from grace_opt.kernels.solve.tabu import cpu as compiled
from grace_opt.run import Run
from grace_opt.solution import SolverResult
from grace_opt.solvers.branch_and_bound import search as branch_and_bound
from grace_opt.testing import batches, check_solution, instance, instances
from tests import oracle
from tests.clock import held

GRAPH = k_cluster(40, 3, k=12)  # 0/1 weights, no diagonal: what is hard to prove


@pytest.fixture(scope="module")
def proof():
    return solve(GRAPH.W, GRAPH.k, "branch_and_bound")


def hard(n, seed, k=None):
    """Real-valued and indefinite, so that no step and no convexity helps."""
    W = np.random.default_rng(seed).normal(size=(n, n))
    return W + W.T, n // 2 if k is None else k


# Tabu search


@st.composite
def states(draw):
    """A set, its sums, and which vertices are tabu, in the middle of a search."""
    n, seed = draw(st.integers(2, 9)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    W = np.triu(rng.integers(-3, 4, (n, n)).astype(float))  # whole numbers: ties, and sums without rounding
    W = W + np.triu(W, 1).T
    x = np.zeros(n, bool)
    x[rng.permutation(n)[: draw(st.integers(1, n - 1))]] = True
    until = rng.integers(0, 4, n) * draw(st.sampled_from([0, 1, 1]))
    return W, x, until, draw(st.integers(0, 3)), float(draw(st.integers(-12, 4))), seed


@pytest.mark.slow
@settings(max_examples=400)
@given(states())
def test_the_best_exchange_is_the_best_of_all_pairs(drawn):
    W, x, until, now, wish, seed = drawn
    f = oracle.objective(W, np.flatnonzero(x))
    changes = {}
    for i, j in itertools.product(np.flatnonzero(x), np.flatnonzero(~x)):
        change = oracle.objective(W, (set(np.flatnonzero(x)) - {i}) | {j}) - f
        if (until[i] <= now and until[j] <= now) or change < wish:
            changes[int(i), int(j)] = change
    n = len(W)
    compiled.row_maxima(W, top := np.empty(n))
    arguments = (W, W.diagonal().copy(), top, x, W @ x, np.empty((4, n)), until.astype(np.int64))
    rng = np.array([seed + 1], np.uint64)
    change, i, j = compiled.best_exchange(*arguments, now, wish, rng)
    if not changes:
        assert (change, i, j) == (np.inf, -1, -1)
        return
    assert change == min(changes.values())
    assert changes[i, j] == change
    # Every tie is drawn sooner or later.
    tied = {pair for pair, c in changes.items() if c == change}
    drawn_pairs = {compiled.best_exchange(*arguments, now, wish, rng)[1:] for _ in range(40 * len(tied))}
    assert drawn_pairs == tied


def test_the_best_exchange_of_real_weights():
    for seed in range(30):
        W = instance("attention", 20, seed)
        x = np.random.default_rng(seed).permutation(20) < 8
        best = oracle.best_swap(W, np.flatnonzero(x).tolist())
        until, rng = np.zeros(20, np.int64), np.array([1], np.uint64)
        compiled.row_maxima(W, top := np.empty(20))
        arguments = (W, W.diagonal().copy(), top, x, W @ x, np.empty((4, 20)), until)
        change, _, _ = compiled.best_exchange(*arguments, 0, -np.inf, rng)
        assert min(change, 0.0) == pytest.approx(best, abs=1e-10 * np.abs(W).sum())


@settings(max_examples=40)
@given(instances(max_n=9), st.integers(1, 200), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_state_of_a_search_stays_true(drawn, budget, patience, tenure, seed):
    W, k, _ = drawn
    n = len(W)
    if not 0 < k < n:
        return
    x = np.random.default_rng(seed).permutation(n) < k
    sums, until, values, best = np.empty(n), np.zeros(n, np.int64), np.empty(4), x.copy()
    top, heavy = np.empty((2, n))
    compiled.row_maxima(W, top)
    grain = compiled.scales(W, heavy)
    first, values[3] = compiled.fill_sums(W, x, sums)
    values[:3] = first
    elites, elite_values, state = np.zeros((4, n), bool), np.zeros(4), np.zeros(4, np.int64)
    rng = np.array([seed + 1], np.uint64)
    for part in range(3):
        compiled.run(
            *(W, top, heavy, grain, k, x, sums, until, best, values, elites, elite_values, state, rng),
            *(budget, patience, tenure),
        )
        tolerance = 1e-11 * np.abs(W).sum()
        assert x.sum() == best.sum() == k
        assert sums == pytest.approx(W @ x, abs=tolerance)
        assert values[0] == pytest.approx(oracle.objective(W, np.flatnonzero(x)), abs=tolerance)
        assert values[1] == pytest.approx(oracle.objective(W, np.flatnonzero(best)), abs=tolerance)
        assert values[1] <= min(first, values[0], values[2]) + tolerance
        for e in range(state[compiled.ELITES]):
            assert elites[e].sum() == k
            if part == 0:
                assert elite_values[e] == pytest.approx(oracle.objective(W, np.flatnonzero(elites[e])), abs=tolerance)
    assert state[compiled.CLOCK] == 3 * budget
    assert (state[compiled.RESTARTS] > 0) == (state[compiled.ELITES] > 0)


@pytest.mark.slow
@settings(max_examples=60)
@given(batches(max_n=9), st.sampled_from([0, 1, 3, 50]), st.integers(0, 2**32 - 1))
def test_tabu_is_never_worse_than_its_start_and_batched_as_looped(drawn, iterations, seed):
    W, k, protected = drawn
    start = solve(W, k, "random", protected=protected, seed=seed)
    both = {"protected": protected, "iterations": iterations, "seed": seed}
    sol = solve(W, k, "tabu", start=start.mask, **both)
    check_solution(W, k, sol, protected)
    assert (sol.objective <= start.objective + 1e-12 * np.abs(W).sum((1, 2))).all()
    by_index = solve(W, k, "tabu", start=start.indices, **both)
    assert (sol.mask == by_index.mask).all()
    for b in range(len(W)):
        alone = solve(W[b], int(k[b]), "tabu", start=start.mask[b], **both | {"protected": protected[b]})
        assert (alone.mask == sol.mask[b]).all()


@pytest.mark.parametrize("k", [0, 1, 8, 9])
def test_tabu_at_the_ends_of_k(k):
    W = instance("indefinite", 12, 5)
    sol = solve(W, k, "tabu", protected=[0, 3, 7])
    check_solution(W, k, sol, [0, 3, 7])
    assert float(sol.objective) == pytest.approx(oracle.optimum(W, k, [0, 3, 7]))


def test_tabu_repeats_itself_by_seed():
    W, k = hard(60, 0)
    found = [solve(W, k, "tabu", start="random", iterations=30, seed=seed).mask for seed in (1, 2, 3, 1, 2, 3)]
    for first, again in zip(found[:3], found[3:], strict=True):
        assert (first == again).all()
    # The seed of the search itself counts, too, not only that of its start.
    W, k = hard(150, 1)
    start = solve(W, k, "random").mask
    ended = {solve(W, k, "tabu", start=start, iterations=200, seed=seed).mask.tobytes() for seed in range(8)}
    assert len(ended) > 1


def test_tabu_finds_what_descent_misses():
    missed = 0
    for seed in range(20):
        W, k = hard(16, seed)
        best = float(solve(W, k, "exhaustive").objective)
        descent, found = (float(solve(W, k, m, start="think").objective) for m in ("local_search", "tabu"))
        assert found == pytest.approx(best)
        missed += descent > best + 1e-9
    assert missed > 2


def test_tabu_stops_at_its_target():
    W, k = hard(300, 0)
    whole = solve(W, k, "tabu", iterations=2000)
    assert whole.stats["iterations"] == 2000
    within = float(solve(W, k, "mies").objective) - 1e-3
    sol = solve(W, k, "tabu", iterations=2000, target=within)
    assert float(sol.objective) <= within
    assert 0 < sol.stats["iterations"] < 2000
    assert sol.status is Status.FEASIBLE
    reached = solve(W, k, "tabu", start=whole.mask, target=float(whole.objective), iterations=2000)
    assert reached.stats["iterations"] == 0  # the start is there already


@pytest.mark.slow
def test_tabu_stops_at_the_time_limit(clock):
    W, k = hard(200, 0)
    solve(W, k, "tabu", time_limit=1, iterations=1)  # compiled, which no limit counts
    clock.per_look, began = 0.05, clock.now
    sol = solve(np.stack([W, -W]), k, "tabu", time_limit=0.2)
    assert 0.2 <= clock.now - began < 1
    assert all(status is Status.LIMIT for status in sol.status)
    check_solution(np.stack([W, -W]), k, sol)
    assert (solve(W, k, "tabu", time_limit=1e-9).mask == solve(W, k, "mies").mask).all()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("tabu", {"start": "tabu"}),
        ("tabu", {"iterations": -1}),
        ("tabu", {"iterations": 2.5}),
        ("tabu", {"iterations": True}),
        ("tabu", {"restart_after": 0}),
        ("tabu", {"patience": 0}),
        ("tabu", {"tenure": 0}),
        ("tabu", {"target": "low"}),
        ("tabu", {"target": True}),
        ("branch_and_bound", {"bound": "lp"}),
        ("branch_and_bound", {"start": "branch_and_bound"}),
        ("branch_and_bound", {"start": "portfolio"}),
        ("branch_and_bound", {"node_limit": 0}),
        ("branch_and_bound", {"node_limit": 1.0}),
        ("portfolio", {"iterations": -1}),
        ("portfolio", {"certify": "loose"}),
    ],
)
def test_options_are_checked(method, options):
    (name,) = options
    with pytest.raises(OptionError, match=f"{name}="):
        solve(np.eye(4), 2, method, **options)


@pytest.mark.parametrize("method", ["tabu", "branch_and_bound", "local_search"])
def test_starts_are_checked(method):
    for start, what in (([0, 9], "vertex 9"), ([0, 1, 2], "k = "), ([True] * 6, "k = "), ([0, 5], "protected")):
        with pytest.raises(GraceError, match=what):
            solve(np.eye(6), 2, method, start=start, protected=[5])
    assert solve(np.eye(6), 2, method, start=[2, 4]).mask.sum() == 2


# Branch and bound


def test_a_random_graph_is_proved_by_every_bound(proof):
    assert proof.status is Status.OPTIMAL
    assert float(proof.lower_bound) == float(proof.objective)
    for bound in ("qp", "sdp"):
        other = solve(GRAPH.W, GRAPH.k, "branch_and_bound", bound=bound)
        assert other.status is Status.OPTIMAL, bound
        assert float(other.objective) == float(proof.objective)
        assert (other.stats["strong_bounds"] > 0) == (bound == "sdp")
    assert float(solve(GRAPH.W, GRAPH.k, "tabu", iterations=20_000).objective) == float(proof.objective)


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["auto", "qp", "sdp"])
def test_a_node_limit_leaves_a_valid_bound_and_the_incumbent(bound, proof):
    start = solve(GRAPH.W, GRAPH.k, "tabu")
    bounds = []
    for limit in (1, 20, 300):
        sol = solve(GRAPH.W, GRAPH.k, "branch_and_bound", bound=bound, node_limit=limit)
        check_solution(GRAPH.W, GRAPH.k, sol)
        assert sol.stats["nodes"] <= limit
        assert float(sol.lower_bound) <= float(proof.objective) <= float(sol.objective) <= float(start.objective)
        bounds.append(float(sol.lower_bound))
        if limit == 1:
            assert sol.status is Status.LIMIT
            assert sol.gap > 0
    assert bounds == sorted(bounds)
    assert np.isfinite(bounds).all()


def test_a_tiny_time_limit_leaves_the_incumbent(proof):
    W = np.stack([GRAPH.W] * 3)
    sol = solve(W, GRAPH.k, "branch_and_bound", time_limit=1e-9, start="mies")
    check_solution(W, GRAPH.k, sol)
    assert all(status is Status.LIMIT for status in sol.status)
    assert (sol.mask == solve(W, GRAPH.k, "mies").mask).all()
    assert (sol.lower_bound <= float(proof.objective)).all()


@pytest.mark.parametrize("bound", ["auto", "sdp"])
def test_progress_is_monotone_and_its_bounds_hold(bound, proof):
    heard = []
    sol = solve(GRAPH.W, GRAPH.k, "branch_and_bound", bound=bound, start="think", callback=heard.append)
    assert len(heard) > 2
    objectives = [p.objective for p in heard]
    assert objectives == sorted(objectives, reverse=True)
    assert objectives[-1] == float(sol.objective) == float(proof.objective)
    assert [p.time for p in heard] == sorted(p.time for p in heard)
    for p in heard:
        assert p.instance == 0
        assert p.lower_bound <= float(proof.objective)
        assert p.mask.sum() == GRAPH.k
        assert oracle.objective(GRAPH.W, np.flatnonzero(p.mask)) == pytest.approx(p.objective)
    assert any(np.isfinite(p.lower_bound) for p in heard)


@pytest.mark.parametrize("method", ["tabu", "branch_and_bound", "portfolio"])
def test_a_callback_stops_the_method_by_true(method, clock):
    W = np.stack([hard(80, seed)[0] for seed in range(3)])
    heard = []

    def stop(progress):
        heard.append(progress)
        return True

    clock.per_look = 0.1
    solve(W[0][:9, :9], 4, method, time_limit=1)  # compiled, which no limit counts
    began = clock.now
    sol = solve(W, 40, method, callback=stop, time_limit=60)
    assert clock.now - began < 30
    check_solution(W, 40, sol)
    assert len(heard) == 1
    assert all(status is Status.LIMIT for status in sol.status)
    # Anything else than True goes on.
    assert solve(W[0][:9, :9], 4, method, callback=lambda p: 1, time_limit=1).mask.sum() == 4


@pytest.mark.parametrize("method", ["tabu", "branch_and_bound", "portfolio"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("size", [1, 4])
def test_an_interrupt_inside_a_callback_comes_through(method, error, size, monkeypatch, clock):
    monkeypatch.setattr("grace_opt.parallel.thread_count", lambda most: 3)
    W = np.stack([hard(80, seed)[0] for seed in range(size)])

    def interrupt(progress):
        if progress.instance == 0:  # the others must hear of it
            raise error

    clock.per_look = 0.1
    solve(W[0][:9, :9], 4, method, time_limit=1)  # compiled, which no limit counts
    began = clock.now
    with pytest.raises(error):
        solve(W, 40, method, callback=interrupt, time_limit=60)
    assert clock.now - began < 30
    assert float(solve(np.diag([3.0, 1.0, 2.0]), 2, method).objective) == 3.0


@pytest.mark.slow
@settings(max_examples=25)
@given(batches(max_n=9), st.sampled_from(["auto", "qp", "sdp"]), st.integers(0, 3))
def test_proofs_repeat_themselves_and_take_any_start(drawn, bound, seed):
    W, k, protected = drawn
    first, again = (
        solve(W, k, "branch_and_bound", protected=protected, bound=bound, start="random", seed=seed) for _ in range(2)
    )
    assert (first.mask == again.mask).all()
    assert (first.lower_bound == again.lower_bound).all()
    assert first.stats["nodes"] == again.stats["nodes"]
    for start in (first.mask.tolist(), first.indices.tolist()):
        warm = solve(W, k, "branch_and_bound", protected=protected, bound=bound, start=start)
        assert (warm.objective <= first.objective).all()
        assert (warm.lower_bound >= warm.objective - 1e-9 * np.abs(W).sum((1, 2))).all()
        assert warm.stats["nodes"] <= first.stats["nodes"]


def test_a_warm_start_is_kept_where_it_is_optimal(proof):
    warm = solve(GRAPH.W, GRAPH.k, "branch_and_bound", start=torch.from_numpy(proof.mask))
    assert (warm.mask == proof.mask).all()
    assert warm.status is Status.OPTIMAL


def test_too_many_vertices_are_refused_with_what_to_use():
    problem = Problem.of(torch.zeros(2001, 2001), 3)
    with pytest.raises(SolverError, match=r"n = 2001 is beyond 2000.*GiB.*'portfolio' or 'tabu'"):
        solve(problem, method="branch_and_bound")
    sol = solve(problem, method="portfolio", iterations=3)
    assert float(sol.objective) == float(sol.lower_bound) == 0.0


def test_whole_numbers_are_proved_by_steps():
    """As floats, too: a bound above the next value below is a proof, and the reported one is the objective itself."""
    W = GRAPH.W[:24, :24].astype(float)
    sol = solve(W, 8, "branch_and_bound")
    assert sol.status is Status.OPTIMAL
    assert float(sol.lower_bound) == float(sol.objective)
    assert float(sol.gap) == 0.0
    for factor in (3.0, 0.5):  # steps of six, and none that is known
        other = solve(W * factor, 8, "branch_and_bound")
        assert other.status is Status.OPTIMAL
        assert float(other.objective) == factor * float(sol.objective)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["branch_and_bound", "tabu", "portfolio"])
@settings(max_examples=15)
@given(drawn=instances(max_n=10), power=st.sampled_from([-300, -60, -1, 5, 64, 300]))
def test_powers_of_two_scale_the_objective_and_leave_the_answer(method, drawn, power):
    W, k, protected = drawn
    W = W / max(np.abs(W).max(), 1e-200)
    plain, scaled = (solve(V, k, method, protected=protected) for V in (W, W * 2.0**power))
    assert (plain.mask == scaled.mask).all()
    assert float(scaled.objective) == float(plain.objective) * 2.0**power
    if method == "branch_and_bound":
        assert scaled.status is Status.OPTIMAL
        assert float(scaled.lower_bound) <= float(scaled.objective)


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["auto", "qp", "sdp"])
@settings(max_examples=15)
@given(n=st.integers(2, 12), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_permutations_and_constants_move_the_answer_along(bound, n, seed, data):
    """W of normal entries has no ties; W + c·11ᵀ adds c·k² to every choice."""
    rng = np.random.default_rng(seed)
    W, k, order = rng.normal(size=(n, n)), data.draw(st.integers(0, n)), rng.permutation(n)
    W = W + W.T
    plain = solve(W, k, "branch_and_bound", bound=bound)
    moved = solve(W[np.ix_(order, order)], k, "branch_and_bound", bound=bound)
    assert sorted(order[moved.indices].tolist()) == plain.indices.tolist()
    assert float(moved.objective) == pytest.approx(float(plain.objective), rel=1e-12)
    c = data.draw(st.sampled_from([-10.0, -0.5, 3.0, 100.0]))
    raised = solve(W + c, k, "branch_and_bound", bound=bound)
    assert (raised.mask == plain.mask).all()
    assert float(raised.objective) == pytest.approx(float(plain.objective) + c * k * k, abs=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["auto", "qp", "sdp"])
def test_branching_on_strong_bounds_loses_nothing(bound, monkeypatch):
    """With hardly any nodes for the depth-first search, the tree of strong bounds has to do the work, at any limit."""
    for name, count in (("SHIFT_NODES", 1), ("PAIR_NODES", 2), ("STRONG_NODES", 1)):
        monkeypatch.setattr(branch_and_bound, name, count)
    strong = 0
    for seed in range(4):
        W, k = hard(11, seed)
        best, start = float(solve(W, k, "exhaustive").objective), np.argsort(-W.sum(0))[:k].tolist()
        heard = []
        sol = solve(W, k, "branch_and_bound", bound=bound, start=start, callback=heard.append)
        assert sol.status is Status.OPTIMAL
        assert float(sol.objective) == pytest.approx(best, rel=1e-9)
        assert float(sol.lower_bound) <= best
        objectives = [p.objective for p in heard]
        assert objectives == sorted(objectives, reverse=True)
        assert all(p.lower_bound <= best for p in heard)
        strong += sol.stats["strong_bounds"]
        for limit in (1, 3):
            sol = solve(W, k, "branch_and_bound", bound=bound, start=start, node_limit=limit)
            assert float(sol.lower_bound) <= best
            assert sol.stats["nodes"] <= limit
    assert (strong > 8) == (bound != "qp")


@pytest.mark.slow
def test_a_bad_start_costs_nothing_but_time():
    """The tolerance belongs to the best choice so far, not to the one that the search began with."""
    v = np.array([1.0] * 4 + [30.0] * 8)
    for seed in range(8):
        W = instance("wishart", 12, seed) * np.outer(v, v)
        bad = np.argsort(W.diagonal())[-4:]
        for bound in ("auto", "qp", "sdp"):
            sol = solve(W, 4, "branch_and_bound", start=bad.tolist(), bound=bound)
            assert sol.status is Status.OPTIMAL
            assert float(sol.objective) == pytest.approx(oracle.optimum(W, 4), rel=1e-9)


# Portfolio


@pytest.mark.slow
@settings(max_examples=40)
@given(batches(max_n=9), st.sampled_from(["fast", "tight"]), st.sampled_from([None, 5.0]))
def test_portfolio_is_never_worse_than_the_greedies_and_brings_a_bound(drawn, certify, limit):
    W, k, protected = drawn
    with held(per_look=0.01) as clock:
        solve(np.eye(3), 1, "portfolio", certify=certify, time_limit=1)  # compiled, which no limit counts
        began = clock.now
        sol = solve(W, k, "portfolio", protected=protected, certify=certify, time_limit=limit)
        assert clock.now - began < 4.0  # far below the limit: proved
    check_solution(W, k, sol, protected)
    assert np.isfinite(sol.lower_bound).all()
    size = np.abs(W).sum((1, 2))
    assert (sol.lower_bound <= solve(W, k, "exhaustive", protected=protected).objective + 1e-12 * size).all()
    for greedy in ("mies", "drop_greedy"):
        assert (sol.objective <= solve(W, k, greedy, protected=protected).objective + 1e-12 * size).all()
    if limit:
        assert all(status is Status.OPTIMAL for status in sol.status)


@pytest.mark.slow
def test_portfolio_uses_its_time_only_where_nothing_is_proved(clock):
    easy = attention(24, 0)
    W, k = hard(120, 1)
    clock.per_look = 0.01
    solve(easy.W, 12, "portfolio", time_limit=1.0)  # compiled, which no limit counts
    began = clock.now
    sol = solve(W, k, "portfolio", time_limit=1.0)
    assert 1.0 <= clock.now - began < 1.1
    assert sol.status is Status.LIMIT
    assert np.isfinite(sol.lower_bound)
    assert float(sol.objective) <= float(solve(W, k, "tabu").objective)
    began = clock.now
    assert solve(easy.W, 12, "portfolio", time_limit=20.0).status is Status.OPTIMAL
    assert clock.now - began < 1
    W, k = hard(60, 1)
    proved = solve(W, k, "portfolio", time_limit=60.0)
    assert proved.status is Status.OPTIMAL
    assert proved.stats["nodes"] > 0


# The run itself


def test_a_run_knows_its_time(clock):
    run = Run()
    assert not run.expired()
    assert not run.limited
    assert run.until(0.5).deadline == math.inf
    now = clock.now
    run = Run(deadline=now + 100)
    assert run.limited
    assert not Run(deadline=now + 100, cap=True).limited
    assert run.until(0.25).deadline == now + 25
    assert Run(deadline=now - 1).expired()
    part = run.until(0.5)
    part.stop()
    assert run.expired()


def test_a_capped_run_does_what_it_would_do_without_a_limit(clock):
    """The deadline of a cap is for safety: tabu keeps to its iterations, portfolio skips the proof."""
    W, k = hard(40, 2)
    problem = Problem.of(W, k).flatten()
    for name in ("tabu", "portfolio"):
        spec = registry.get(name)
        free, capped = (
            spec.solve(problem, spec.make_options({}), run) for run in (Run(), Run(deadline=clock.now + 60, cap=True))
        )
        assert (free.mask == capped.mask).all()
        assert free.stats["iterations"] == capped.stats["iterations"]
        assert "nodes" not in capped.stats


def test_reports_are_copies_and_end_with_true():
    heard, mask = [], np.array([True, False])
    run = Run(callback=lambda p: heard.append(p) or len(heard) == 2)
    for _ in range(4):
        run.report(3, 1.0, 0.5, mask)
    assert len(heard) == 2
    assert run.expired()
    mask[:] = False
    assert heard[0].mask.tolist() == [True, False]
    assert (heard[0].instance, heard[0].objective, heard[0].lower_bound) == (3, 1.0, 0.5)
    assert 0 <= heard[0].time <= heard[1].time
    numbers = []
    Run(callback=lambda p: numbers.append(p.instance)).instances([7, 9]).report(1, 0.0, 0.0, mask)
    assert numbers == [9]
    Run().instances([1]).report(0, 0.0, 0.0, mask)


@pytest.mark.slow
def test_progress_of_a_batch_keeps_its_numbers(clock):
    clock.per_look = 0.005
    W = np.stack([hard(30, seed)[0] for seed in range(3)])
    for method in ("tabu", "branch_and_bound", "portfolio"):
        heard = []
        sol = solve(W, 15, method, callback=heard.append, time_limit=0.5)
        assert {p.instance for p in heard} == {0, 1, 2}
        for p in heard:
            assert oracle.objective(W[p.instance], np.flatnonzero(p.mask)) == pytest.approx(p.objective)
            assert p.objective >= sol.objective[p.instance] - 1e-9


@pytest.mark.slow
def test_a_method_that_overstates_its_bound_is_caught():
    """What the exhaustive tests rely on: check_solution and the optimum see through a wrong proof."""

    @registry.register_solver("planted", exact=True, batched=True)
    def planted(problem, options, run):
        """Claims that its start is optimal."""
        mask = registry.get("think").solver(problem, registry.NoOptions(), run).mask
        return SolverResult(mask, grace_opt.objective.evaluate(problem.W, mask))

    try:
        with pytest.raises(AssertionError):
            grace_opt.testing.check_solver("planted")
    finally:
        registry.unregister("planted")


@pytest.mark.slow
def test_portfolio_gives_up_a_hopeless_proof_and_searches_on(monkeypatch, clock):
    """Branch and bound gets its probe, and no more; tabu search the rest. Nothing before takes time."""
    portfolio = importlib.import_module("grace_opt.solvers.portfolio")
    calls = []
    original = portfolio._call

    def watched(name, problem, run, **options):
        calls.append(name)
        clock.per_look = 0.05 if "branch_and_bound" in calls else 0.0
        return original(name, problem, run, **options)

    monkeypatch.setattr(portfolio, "_call", watched)
    made = dispersion(300, seed=0, k=30)
    solve(made.W, made.k, "portfolio", time_limit=1.0)
    assert calls.count("branch_and_bound") == 1
    assert calls[-1] == "tabu"


@pytest.mark.parametrize(("n", "k"), [(6, 3), (12, 5), (14, 4), (16, 6), (20, 3), (20, 17)])
def test_tabu_does_not_go_in_circles_on_few_vertices(n, k):
    """Where few can be exchanged, a restart from nearly the same set leads back to it."""
    W = np.random.default_rng(7).normal(size=(60, n, n))
    W += W.transpose(0, 2, 1)
    best, found = solve(W, k, "exhaustive").objective, solve(W, k, "tabu", iterations=20_000).objective
    np.testing.assert_allclose(found, best, rtol=1e-9)


@pytest.mark.parametrize("method", ["tabu", "portfolio", "annealing", "branch_and_bound"])
def test_a_callback_that_stops_at_its_last_call_has_stopped_the_search(method):
    """The searches of so few vertices are one slice."""
    W = instance("attention", 12, 0) - instance("wishart", 12, 1)
    calls = []
    sol = solve(W, 5, method, callback=lambda progress: calls.append(progress) or True)
    assert len(calls) == 1
    assert sol.status in (Status.LIMIT, Status.OPTIMAL)
    assert method == "branch_and_bound" or sol.status is Status.LIMIT


def test_a_callback_stops_at_one_instance_of_a_batch():
    """The searches of so few vertices are one slice: the others are whole."""
    W = np.stack([hard(12, seed)[0] for seed in range(3)])
    sol = solve(W, 5, "tabu", callback=lambda progress: progress.instance == 1)
    assert [status.name for status in sol.status] == ["FEASIBLE", "LIMIT", "FEASIBLE"]
