"""Convex relaxations, the compiled search on them and fixing: against enumeration, by plain loops over all choices."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from grace_opt import GraceError, Problem, bounds, solve
from grace_opt.bounds import fixing
from grace_opt.bounds.dnn import DnnMultipliers, dnn_relaxation
from grace_opt.bounds.qcr import linear_term, qcr_relaxation, solve_relaxation
from grace_opt.bounds.subproblem import Subproblem, sums_are_exact
from grace_opt.instances.generators import attention, k_cluster
from grace_opt.kernels.solve.relaxation import cpu as compiled
from grace_opt.kernels.solve.search import cpu as nodes
from grace_opt.kernels.solve.shift.cpu import ascend
from grace_opt.problem import SparseWeights
from grace_opt.solvers.branch_and_bound.depth_first import DepthFirst
from grace_opt.testing import KINDS, batches, instance, instances
from tests import oracle

EPS = np.finfo(float).eps


def part_of(W, k, protected=()):
    """The whole instance as a subproblem."""
    return Subproblem.of(Problem.of(W, k, protected=list(protected) or None))[0]


def choices(sub):
    return [np.array(S, int) for S in itertools.combinations(range(sub.m), sub.k)]


def value(sub, S):
    """True objective of a choice, summed exactly."""
    return math.fsum([sub.constant, *sub.linear[S].tolist(), *sub.W[np.ix_(S, S)].ravel().tolist()])


def optimum(sub):
    return min(value(sub, S) for S in choices(sub))


def relaxed_value(sub, r, x):
    """q(x), term by term."""
    c = sub.linear - np.diag(r.A) + r.F.sum(0)
    return math.fsum([*(np.outer(x, x) * r.A).ravel().tolist(), *(c * x).tolist(), sub.constant, *(-r.H).ravel()])


def margin(sub, r=None):
    size = np.abs(sub.W).sum() + np.abs(sub.linear).sum() + abs(sub.constant)
    return 1e-13 * (size if r is None else size + sum(np.abs(M).sum() for M in (r.A, r.F, r.H))) + 1e-300


def random_multipliers(sub, seed):
    rng, size = np.random.default_rng(seed), (np.abs(sub.W).max() + np.abs(sub.linear).max()) * 10.0 ** (seed % 5 - 2)
    Y, Z = (tuple(rng.normal(size=(sub.m, sub.m)) * scale for _ in range(3)) for scale in (1.0, size))
    return DnnMultipliers(Y, Z)


RELAXATIONS = {
    "plain": lambda sub, known, seed: solve_relaxation(sub),
    "qcr": lambda sub, known, seed: qcr_relaxation(sub, known),
    "dnn": lambda sub, known, seed: dnn_relaxation(sub, known, steps=40)[0],
    # Whatever the multipliers are, the bound has to hold.
    "garbage": lambda sub, known, seed: dnn_relaxation(sub, known, random_multipliers(sub, seed), steps=0)[0],
}


@st.composite
def subproblems(draw, max_n=8, least=2):
    """A part of a drawn instance, some vertices in and some out, with 0 < k < m; and a seed."""
    n, seed = draw(st.integers(least, max_n)), draw(st.integers(0, 2**32 - 1))
    sub = part_of(instance(draw(st.sampled_from(KINDS)), n, seed), draw(st.integers(1, n - 1)))
    verdict = np.array([draw(st.sampled_from([0, 0, 0, 1, 2])) for _ in range(n)], np.int8)
    return (small if 0 < (small := sub.fixed(verdict)).k < small.m else sub), seed


@pytest.mark.slow
@settings(max_examples=60)
@given(subproblems(), st.sampled_from(sorted(RELAXATIONS)), st.floats(0, 1))
def test_a_relaxation_is_convex_below_f_and_its_bound_below_the_optimum(drawn, name, share):
    sub, seed = drawn
    values = [value(sub, S) for S in choices(sub)]
    known = (1 - share) * min(values) + share * max(values)
    r = RELAXATIONS[name](sub, known, seed)
    plane = np.linalg.qr(np.column_stack([np.ones(sub.m), np.eye(sub.m)[:, 1:]]))[0][:, 1:]
    least = np.linalg.eigvalsh(plane.T @ r.A @ plane)
    assert least.size == 0 or least[0] >= -32 * sub.m * EPS * np.abs(r.A).max()
    for S, f in zip(choices(sub), values, strict=True):
        q = relaxed_value(sub, r, np.isin(np.arange(sub.m), S).astype(float))
        assert q <= f + margin(sub, r)
        if (r.A - np.diag(np.diag(r.A)) == sub.W).all():  # no products of pairs were taken off
            assert q >= f - margin(sub, r)
    assert r.bound <= min(values)
    # It is solved: x is feasible, and its value is little above the bound.
    assert r.x.sum() == pytest.approx(sub.k)
    assert (r.x >= 0).all()
    assert (r.x <= 1).all()
    q = relaxed_value(sub, r, r.x)
    assert q - r.bound <= 1e-5 * (abs(q) + abs(sub.constant) + np.abs(r.H).sum()) + 2 * r.rounding + margin(sub, r)


def test_a_small_relaxation_that_takes_many_steps_is_solved():
    pairs = [-0.05850433, -0.06723994, 0.045311, 0.04688155, -0.21167204, -0.76431099, 0.1023491, 0.21507097]
    W = np.zeros((5, 5))
    W[np.triu_indices(5, 1)] = [*pairs, -0.01031556, -0.38560438]
    W += W.T + np.diag([0.22821011, 0.71749312, 0.11641794, 1.05345726, 0.37236472])
    sub = part_of(W, 1)
    r = solve_relaxation(sub)
    q = relaxed_value(sub, r, r.x)
    assert 0 <= q - r.bound <= 2e-6 * q
    assert r.bound <= optimum(sub)


@pytest.mark.slow
@settings(max_examples=60)
@given(subproblems(), st.sampled_from(sorted(RELAXATIONS)), st.data())
def test_a_relaxation_holds_on_for_what_is_left_after_fixing(drawn, name, data):
    sub, seed = drawn
    r = RELAXATIONS[name](sub, max(value(sub, S) for S in choices(sub)), seed)
    verdict = np.array([data.draw(st.sampled_from([0, 0, 1, 2])) for _ in range(sub.m)], np.int8)
    small = sub.fixed(verdict)
    assume(0 < small.k < small.m)
    rest = r.restricted(small, verdict == 0)
    for S in choices(small):
        q = relaxed_value(small, rest, np.isin(np.arange(small.m), S).astype(float))
        assert q <= value(small, S) + margin(sub, r)
    assert rest.bound == r.bound <= optimum(sub)
    assert solve_relaxation(small, rest.A, rest.F, rest.H, rest.x).bound <= optimum(small) + margin(sub, r)


@settings(max_examples=30)
@given(subproblems(), st.data())
def test_fixing_vertices_keeps_the_objective(drawn, data):
    sub, _ = drawn
    verdict = np.array([data.draw(st.sampled_from([0, 1, 2])) for _ in range(sub.m)], np.int8)
    small = sub.fixed(verdict)
    inside = np.flatnonzero(verdict == 1)
    assume(0 <= small.k <= small.m)
    for S in choices(small):
        whole = np.concatenate([inside, np.flatnonzero(verdict == 0)[S]]).astype(int)
        assert value(small, S) == pytest.approx(value(sub, whole), abs=margin(sub))
        picked = np.isin(np.arange(small.m), S)
        assert set(np.flatnonzero(small.whole_mask(picked, 64))) == set(sub.vertices[whole]) | set(sub.chosen)


def test_multipliers_are_restricted_entry_by_entry_and_go_on_from_there():
    sub = part_of(k_cluster(12, 1).W, 5)
    first, state = dnn_relaxation(sub, 0.0, steps=100)
    free = np.ones(12, bool)
    free[[2, 7]] = False
    rest = state.restricted(free)
    for whole, part in zip((*state.Y, *state.Z), (*rest.Y, *rest.Z), strict=True):
        assert (part == whole[free][:, free]).all()
    verdict = np.zeros(12, np.int8)
    verdict[[2, 7]] = 1, 2
    small = sub.fixed(verdict)
    warm, _ = dnn_relaxation(small, optimum(small), rest, steps=4)
    cold, _ = dnn_relaxation(small, optimum(small), steps=4)
    assert first.bound <= optimum(sub)
    assert cold.bound < warm.bound <= optimum(small)


def without_steps(W):
    """Weights like those of a graph, with no number to round bounds up to: 1.1 and a third of 1e-9 have no divisor."""
    return W * 1.1 + np.eye(len(W)) * 1e-9 / 3


def test_products_of_pairs_close_most_of_the_gap_of_the_diagonal():
    """On random graphs the diagonal leaves a gap several times as wide."""
    for seed in range(3):
        graph = k_cluster(16, seed, k=6)
        problem = Problem.of(without_steps(graph.W), graph.k).flatten()
        best = float(solve(without_steps(graph.W), graph.k, "exhaustive").objective)
        plain, qcr, dnn = (float(b(problem)) for b in (bounds.plain_bound, bounds.qcr_bound, bounds.dnn_bound))
        assert plain <= qcr + 1e-9
        assert best - dnn < 0.5 * (best - qcr)
        assert dnn <= best


def test_the_multipliers_come_near_what_a_semidefinite_solver_proves():
    pytest.importorskip("cvxpy")
    graph = k_cluster(12, 0, k=5)
    W = without_steps(graph.W)
    theirs = solve(W, graph.k, "sdp", relaxation="rlt", solver="clarabel")
    ours = float(bounds.dnn_bound(Problem.of(W, graph.k).flatten()))
    assert ours == pytest.approx(float(theirs.lower_bound), rel=0.02)


@example(1, 804)
@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_the_compiled_sums_of_a_form_against_numpy(m, seed):
    rng = np.random.default_rng(seed)
    W, a, u = rng.normal(size=(m, m)), rng.normal(size=m), rng.random(m)
    scale, form, sums = np.exp(rng.normal(size=m)), np.empty((m, m)), u.copy()
    norm, rows = compiled.scaled_form(W, a, scale, form)
    expected, size = ((W + np.diag(a)) / np.outer(scale, scale) for W, a in ((W, a), (np.abs(W), np.abs(a))))
    assert form == pytest.approx(expected, rel=1e-13, abs=1e-13 * size.max())  # W and a may cancel
    assert (norm, rows) == (pytest.approx(np.linalg.norm(form)), pytest.approx(np.abs(form).sum(0).max()))
    compiled.add_square(form, u, 3.0)
    assert form - expected == pytest.approx(3 * np.outer(u, u), abs=1e-13 * (3 + size.max()))
    assert compiled.add_sizes(W, sums) == np.abs(W).max()
    assert sums == pytest.approx(u + np.abs(W).sum(0))


@st.composite
def programs(draw, max_m=7):
    """A convex quadratic program over the capped simplex."""
    m, seed = draw(st.integers(2, max_m)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(m, draw(st.integers(1, m))))
    return G @ G.T, rng.normal(size=m) * 10.0 ** draw(st.integers(-2, 2)), draw(st.integers(1, m - 1)), rng


def minimised(A, c, k, target=np.inf, rtol=1e-9, steps=100_000, x=None):
    m = len(c)
    x = np.full(m, k / m) if x is None else x
    g, ordered = np.empty(m), np.empty(m)
    best, last, at = compiled.minimise(A, c, k, x, g, ordered, target, rtol, steps)
    return best, last, at, x, g, ordered


@settings(max_examples=60)
@given(programs(), st.integers(0, 12))
def test_the_compiled_solver_against_scipy(drawn, few):
    A, c, k, rng = drawn
    m = len(c)
    found = minimize(
        lambda x: x @ A @ x + c @ x,
        np.full(m, k / m),
        jac=lambda x: 2 * A @ x + c,
        bounds=[(0, 1)] * m,
        constraints={"type": "eq", "fun": lambda x: x.sum() - k, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-13, "maxiter": 500},
    )
    size = np.abs(A).sum() + np.abs(c).sum()
    best, last, at, x, g, ordered = minimised(A, c, k)
    assert at == pytest.approx(found.fun, abs=1e-6 * size)
    assert found.fun - 1e-5 * size <= best <= min(at, found.fun) + 1e-7 * size
    assert at == pytest.approx(x @ A @ x + c @ x, abs=1e-10 * size)
    assert g == pytest.approx(2 * A @ x + c, abs=1e-10 * size)
    assert (ordered == np.sort(g)).all()
    assert last == pytest.approx(np.sort(g)[:k].sum() - x @ A @ x, abs=1e-10 * size)
    assert x.sum() == pytest.approx(k)
    assert ((x >= 0) & (x <= 1)).all()
    # Stopped anywhere, from anywhere, it is a bound.
    start = rng.uniform(-0.5, 1.5, m)
    compiled.repair(start, float(k))
    assert start.sum() == pytest.approx(k)
    assert ((start >= 0) & (start <= 1 + 1e-12)).all()
    early = minimised(A, c, k, steps=few, x=start)
    assert early[0] <= at + 1e-7 * size
    # A target that can be reached is reached, one that cannot stops it early; neither costs validity.
    for offset in (-0.1, 0.1):
        reached = minimised(A, c, k, target=at + offset * size)[0]
        assert (reached >= at + offset * size) == (offset < 0)
        assert reached <= at + 1e-7 * size


@pytest.mark.slow
@settings(max_examples=60)
@given(subproblems(least=3), st.sampled_from(sorted(RELAXATIONS)), st.floats(-0.1, 1))
def test_probing_never_excludes_a_choice_below_the_cutoff(drawn, name, share):
    sub, seed = drawn
    values = {tuple(S): value(sub, S) for S in choices(sub)}
    low, high = min(values.values()), max(values.values())
    cutoff = low + share * (high - low)
    relaxation = RELAXATIONS[name](sub, high, seed)
    for verdict in (fixing.probed(sub, relaxation, cutoff), fixing.by_reduced_costs(sub, relaxation, cutoff)):
        for S, f in values.items():
            if f < cutoff - margin(sub):
                assert set(np.flatnonzero(verdict == 1)) <= set(S)
                assert not set(np.flatnonzero(verdict == 2)) & set(S)
    left, bound = fixing.reduce_by_fixing(sub, high, high - cutoff)
    assert bound <= min(low, cutoff) + margin(sub)
    if low < cutoff - margin(sub):
        best = set(sub.vertices[list(min(values, key=values.get))]) | set(sub.chosen)
        assert set(left.chosen) <= best <= set(left.chosen) | set(left.vertices)
        if left.decided:
            assert fixing.value_if_decided(left) == pytest.approx(low, abs=margin(sub))
        else:
            assert fixing.value_if_decided(left) == -np.inf


def test_probing_where_one_vertex_or_all_but_one_are_chosen():
    """There the minimum with a vertex fixed is a sum, and the cutoff may lie between any two of them."""
    for seed in range(40):
        for k in (1, 4):
            sub = part_of(instance("indefinite", 5, seed), k)
            values = {tuple(S): value(sub, S) for S in choices(sub)}
            for cutoff in values.values():
                verdict = fixing.probed(sub, solve_relaxation(sub), cutoff + 1e-9)
                for S, f in values.items():
                    if f <= cutoff:
                        assert set(np.flatnonzero(verdict == 1)) <= set(S), (seed, k)
                        assert not set(np.flatnonzero(verdict == 2)) & set(S), (seed, k)


@pytest.mark.slow
def test_reduced_costs_decide_no_more_than_they_may():
    """On attention's W, where they decide much, at every cutoff that a choice's objective is."""
    decided = 0
    for seed in range(12):
        sub = part_of(attention(9, seed).W, 4)
        values = {tuple(S): value(sub, S) for S in choices(sub)}
        relaxation = solve_relaxation(sub)
        for cutoff in sorted(values.values())[1:]:
            verdict = fixing.by_reduced_costs(sub, relaxation, cutoff)
            decided += np.count_nonzero(verdict)
            below = [set(S) for S, f in values.items() if f < cutoff - margin(sub)]
            assert all(set(np.flatnonzero(verdict == 1)) <= S for S in below)
            assert not any(set(np.flatnonzero(verdict == 2)) & S for S in below)
    assert decided > 100


def test_probing_decides_what_is_plain():
    W = np.diag([1.0, 2.0, 3.0, 40.0, 50.0]) + 0.01
    verdict = fixing.probed(part_of(W, 3), solve_relaxation(part_of(W, 3)), 10.0 / 32)
    assert verdict.tolist() == [1, 1, 1, 2, 2]


@pytest.mark.slow
@settings(max_examples=80)
@given(
    subproblems(max_n=9, least=3),
    st.sampled_from(sorted(RELAXATIONS)),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_the_compiled_search_finds_the_optimum_and_its_bounds_hold_at_every_stop(drawn, name, count, share):
    sub, seed = drawn
    values = [value(sub, S) for S in choices(sub)]
    low, high = min(values), max(values)
    search = DepthFirst(sub, RELAXATIONS[name](sub, high, seed))
    slack, best = share * (high - low), high + 1.0
    for _ in range(100_000):
        _, used, picked = search.advance(best, slack, count)
        assert used <= count
        if picked is not None:
            assert picked.sum() == sub.k
            found = value(sub, np.flatnonzero(picked))
            assert found <= best + margin(sub)
            best = found
        assert min(search.least_bound(), best - slack) <= low + margin(sub)
        if not search.top:
            break
    assert not search.top
    assert low - margin(sub) <= best <= low + slack + 2 * search.relaxation.rounding + margin(sub)


@pytest.mark.slow
@pytest.mark.parametrize("interaction", [1e-3, 0.03, 0.3, 3.0])
def test_what_is_open_holds_every_better_choice_after_every_node(interaction):
    """Nearly linear instances, too: there reduced costs are exact, and a vertex fixed too early loses a choice."""
    for seed in range(60):
        rng, n, k = np.random.default_rng(seed), 10, 2 + seed % 7
        sub = part_of(np.diag(rng.normal(size=n)) + interaction * instance("indefinite", n, seed), k)
        x = np.array([np.isin(np.arange(n), S) for S in choices(sub)], float)
        values = np.einsum("si,ij,sj->s", x, sub.W, x) + x @ sub.linear
        low, high = values.min(), values.max()
        relaxation = solve_relaxation(sub) if seed % 3 else dnn_relaxation(sub, float(high), steps=20)[0]
        best, slack = low + rng.uniform(0, 1) * (high - low), 0.01 * (seed % 2) * (high - low)
        search = DepthFirst(sub, relaxation)
        while search.top:
            _, _, picked = search.advance(best, slack, 1)
            best = best if picked is None else value(sub, np.flatnonzero(picked))
            inside, outside = (search.status[: search.top] == what for what in (nodes.IN, nodes.OUT))
            held = (x @ outside.T + (1 - x) @ inside.T) == 0
            assert held.any(1)[values < best - slack - margin(sub, relaxation)].all(), seed
            for bound, part in zip(search.bounds, held.T, strict=False):  # the stack is longer than it is full
                assert bound <= values[part].min(initial=np.inf) + relaxation.rounding + margin(sub), seed
        assert best <= low + slack + margin(sub, relaxation)


@settings(max_examples=60)
@given(subproblems(max_n=7), st.integers(0, 2**32 - 1))
def test_fixing_one_vertex_after_the_other_keeps_both_objectives(drawn, seed):
    """`search.fix`, from the same pair terms: the true and the relaxed objective agree with starting afresh."""
    sub, _ = drawn
    m, rng = sub.m, np.random.default_rng(seed)
    A, F, H = rng.normal(size=(3, m, m))
    H += H.T
    for M in (F, H):
        np.fill_diagonal(M, 0.0)
    status, C, E = np.zeros(m, np.int8), sub.linear.copy(), F.sum(0)
    const = np.array([sub.constant, -H.sum(), sub.k])
    for v in rng.permutation(m)[: rng.integers(1, m + 1)]:
        nodes.fix(int(v), bool(rng.integers(2)), sub.W, F, H, status, C, E, const)
    small, free = sub.fixed(status), status == 0
    size = np.abs(sub.W).sum() + np.abs(sub.linear).sum() + abs(sub.constant) + 1
    assert C[free] == pytest.approx(small.linear, abs=1e-12 * size)
    assert const[0] == pytest.approx(small.constant, abs=1e-12 * size)
    assert const[2] == small.k
    assert E[free] == pytest.approx(F[free][:, free].sum(0), abs=1e-10)
    assert const[1] == pytest.approx(-H[free][:, free].sum(), abs=1e-10)
    # The linear term of the relaxation, as the search and as `solve_relaxation` put it together.
    assert (C - np.diag(A) + E)[free] == pytest.approx(linear_term(small, A[free][:, free], F[free][:, free]), rel=1e-9)


@settings(max_examples=80)
@given(subproblems(max_n=8), st.data())
def test_leaves_are_the_best_completions(drawn, data):
    sub, _ = drawn
    verdict = np.array([data.draw(st.sampled_from([0, 0, 1, 2])) for _ in range(sub.m)], np.int8)
    small = sub.fixed(verdict)
    C, chosen = np.zeros(sub.m), np.zeros(sub.m, bool)
    C[verdict == 0] = small.linear
    const = np.array([small.constant, 0.0, small.k])
    found, is_leaf = nodes.leaf(sub.W, verdict, C, const, chosen)
    assert is_leaf == (small.k <= 1 or small.k >= small.m - 1)
    if not 0 <= small.k <= small.m:
        assert found == np.inf
    elif is_leaf:
        assert found == pytest.approx(optimum(small), abs=margin(sub))
        assert value(sub, np.flatnonzero(chosen)) == pytest.approx(found, abs=margin(sub))


@settings(max_examples=30)
@given(st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_the_ascent_keeps_the_inverse_and_lowers_its_barrier(n, seed):
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(n, n))
    base, a = G @ G.T + np.eye(n), rng.uniform(0.5, 1.5, n)
    w, mu = rng.uniform(0.1, 1, n), 0.05
    B, start = np.linalg.inv(base + np.diag(a)), a.copy()

    def barrier(d):
        sign, size = np.linalg.slogdet(base + np.diag(d))
        return w @ d - mu * size if sign > 0 else np.inf

    ascend(B, a, w, mu, 0, len(a))
    assert pytest.approx(np.linalg.inv(base + np.diag(a)), rel=1e-6, abs=1e-8) == B
    assert barrier(a) <= barrier(start)
    settled = False
    while not settled:
        B = np.linalg.inv(base + np.diag(a))
        settled = 0 <= ascend(B, a, w, mu, 0, len(a)) < 1e-6
    # At the minimum, w_i = mu (base + Diag a)^-1_ii.
    assert mu * np.linalg.inv(base + np.diag(a)).diagonal() == pytest.approx(w, rel=1e-3)


@settings(max_examples=100)
@given(instances(max_n=8))
def test_fixed_vertices_are_in_every_or_in_no_optimal_set(drawn):
    W, k, protected = drawn
    free = [v for v in range(len(W)) if v not in protected]
    values = {S: oracle.objective(W, S) for S in itertools.combinations(free, k)}
    tie = 1e-11 * max(np.abs(W).sum(), 1e-300)
    optimal = [set(S) for S, f in values.items() if f <= min(values.values()) + tie]
    known = fixing.fixed_vertices(W, k, protected=protected)
    assert set(np.flatnonzero(known.inside)) <= set.intersection(*optimal)
    assert not set(np.flatnonzero(known.outside)) & set.union(*optimal)
    assert set(protected) <= set(np.flatnonzero(known.outside))
    assert (known.open == ~(known.inside | known.outside)).all()
    assert known.lower_bound <= min(values.values()) + 1e-12 * np.abs(W).sum()
    assert known.objective >= min(values.values()) - 1e-12 * np.abs(W).sum()


def test_ties_fix_nothing_and_clear_cases_fix_all():
    known = fixing.fixed_vertices(np.ones((6, 6)), 3)
    assert known.open.all()
    twins = np.kron(instance("wishart", 4, 0), np.ones((2, 2)))
    best = oracle.optimum(twins, 3)
    optimal = [set(S) for S in itertools.combinations(range(8), 3) if oracle.objective(twins, S) < best + 1e-9]
    assert len(optimal) > 1
    known = fixing.fixed_vertices(twins, 3)
    assert set(np.flatnonzero(known.inside)) <= set.intersection(*optimal)
    known = fixing.fixed_vertices(np.diag(np.arange(1.0, 9.0)), 3)
    assert known.inside.tolist() == [True] * 3 + [False] * 5
    assert not known.open.any()
    real = attention(24, 3)
    assert fixing.fixed_vertices(real.W, 12).open.sum() < 12
    with pytest.raises(GraceError, match="once per instance"):
        fixing.fixed_vertices(np.ones((2, 3, 3)), 1)


@settings(max_examples=60)
@given(st.integers(2, 6), st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 6, 10]))
def test_the_step_divides_every_difference(n, seed, factor):
    rng = np.random.default_rng(seed)
    W = np.triu(rng.integers(-3, 4, (n, n)) * factor)
    W = (W + np.triu(W, 1).T).astype(float)
    step = Problem.of(W, 1).step
    assert Problem.of(SparseWeights.of(scipy.sparse.csr_array(W))[0], 1).step == step
    values = [oracle.objective(W, S) for k in range(n + 1) for S in itertools.combinations(range(n), k)]
    if W.any():
        assert step >= factor
        assert step == math.gcd(*(int(v) for v in values))
    else:
        assert step == 0


def test_no_step_where_objectives_are_no_multiples():
    assert Problem.of([[0.5, 0.0], [0.0, 1.0]], 1).step == 0.5
    assert Problem.of([[0.1, 0.0], [0.0, 1.0]], 1).step == 0
    large = Problem.of([[1.0, 0.0], [0.0, 2.0**51]], 1)
    assert large.step == 1
    assert not sums_are_exact(large)
    assert Problem.of([[1.0, 0.0], [0.0, 2.0**53]], 1).step == 1
    assert Problem.of([[1.0, 0.0], [0.0, 2.0**54]], 1).step == 0  # twice an edge must not reach 2**63
    assert Problem.of([[2.0, 0.0], [0.0, 2.0**60]], 1, protected=[1]).step == 2
    assert Problem.of([[0, -3], [-3, 0]], 1).step == 6  # f holds every edge twice
    assert Problem.of(np.eye(3, dtype=np.float32) * 4, 1).step == 4


TIGHT = {"row": bounds.row_bound, "qcr": bounds.qcr_bound, "dnn": bounds.dnn_bound, "tight": bounds.tight_bound}
TIGHT["plain"] = bounds.plain_bound


@settings(max_examples=40)
@given(batches(max_n=8))
@pytest.mark.slow
def test_tight_bounds_are_valid_and_batched_as_looped(drawn):
    W, k, protected = drawn
    whole = Problem.of(W, k, protected=protected).flatten()
    best = solve(W, k, "exhaustive", protected=protected).objective
    size = np.maximum(np.abs(W).sum((1, 2)), 1e-300)
    for name, bound in TIGHT.items():
        together = bound(whole)
        assert together.shape == (len(W),)
        assert together.dtype == torch.float64
        assert (together.numpy() <= best + 1e-12 * size).all(), name
        for b in range(len(W)):
            alone = bound(Problem.of(W[b], int(k[b]), protected=protected[b]).flatten())[0]
            assert float(together[b]) == pytest.approx(float(alone), abs=1e-9 * size[b]), name


def test_tight_certificates_close_what_fast_ones_leave_open():
    W = np.stack([attention(24, seed).W for seed in range(6)])
    k = 12
    exact = solve(W, k, "branch_and_bound")
    gaps = {level: solve(W, k, "branch_and_bound", certify=level, node_limit=1).gap for level in ("fast", "tight")}
    fast, tight = (solve(W, k, "think", certify=level).lower_bound for level in ("fast", "tight"))
    assert (tight <= exact.objective).all()
    assert (exact.objective - tight).sum() < 0.5 * (exact.objective - fast).sum()
    assert (gaps["tight"] >= 0).all()
    closed = solve(np.diag(np.arange(1.0, 9.0)), 3, "mies", certify="tight")
    assert float(closed.gap) <= 1e-9


def test_the_ascent_earns_its_time():
    """On attention's W the best diagonal closes about half of the plain relaxation's gap."""
    W = np.stack([attention(24, seed).W for seed in range(6)])
    problem, best = Problem.of(W, 12).flatten(), solve(W, 12, "branch_and_bound").objective
    plain, qcr = ((best - bound(problem).numpy()) / best for bound in (bounds.plain_bound, bounds.qcr_bound))
    assert (qcr <= plain + 1e-12).all()
    assert qcr.sum() < 0.7 * plain.sum()


def test_bounds_refuse_what_would_take_for_ever():
    problem = Problem.of(torch.zeros(2001, 2001, dtype=torch.float64), 3)
    for bound in (bounds.qcr_bound, bounds.dnn_bound):
        with pytest.raises(GraceError, match=r"n = 2001 is beyond 2000.*certify='fast'"):
            bound(problem.flatten())
    for level in bounds.LEVELS:  # leave out what would
        assert solve(problem, method="think", certify=level).lower_bound == 0.0


def test_the_ladder_is_one_where_it_should_be():
    """Each bound has to be worth its price: ascent beats the start, products of pairs beat the diagonal."""
    heads = Problem.of(np.stack([attention(32, seed=seed).W for seed in range(4)]), 16).flatten()
    best = torch.as_tensor(solve(heads.W, 16, "branch_and_bound").objective)
    gap = {name: (best - getattr(bounds, f"{name}_bound")(heads)) / best for name in ("plain", "qcr", "tight")}
    assert (gap["qcr"] < 0.8 * gap["plain"]).all()
    assert (gap["tight"] < 0.2 * gap["qcr"]).all()
    graph = k_cluster(40, seed=0, k=10)
    flat = Problem.of(graph.W, graph.k).flatten()
    f = float(solve(graph.W, graph.k, "branch_and_bound").objective)
    assert f - float(bounds.dnn_bound(flat)) < 0.5 * (f - float(bounds.qcr_bound(flat)))


def test_the_slack_of_a_bad_start_is_not_kept_for_a_better_set():
    # A deep run's find: weights 18 orders apart, a start that holds the largest, and a tree that improves on it once.
    rng = np.random.default_rng(3111791001)
    G = rng.normal(size=(10, 10))
    scale = 10.0 ** rng.integers(-5, 6, 10)
    W = (G @ G.T) * np.outer(scale, scale)
    sol = solve(W, 7, "branch_and_bound", bound="sdp", start="random")
    assert float(sol.lower_bound) <= float(solve(W, 7, "exhaustive").objective)
