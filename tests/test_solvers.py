"""Every solver against the oracle, against itself batched, and the conformance suite over the whole registry."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grace_opt
from grace_opt import Status, registry, solve
from grace_opt.solution import SolverResult
from grace_opt.testing import batches, check_solution, check_solver, instance, instances
from tests import oracle

NAMES = sorted(registry.specs())


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_conformance(name):
    check_solver(name)


@given(instances())
def test_think_is_the_oracle(drawn):
    W, k, protected = drawn
    assert solve(W, k, "think", protected=protected).indices.tolist() == oracle.think(W, k, protected)


@given(instances())
def test_mies_is_algorithm_1(drawn):
    W, k, protected = drawn
    assert solve(W, k, "mies", protected=protected).indices.tolist() == oracle.mies(W.tolist(), k, protected)


@pytest.mark.parametrize("method", ["think", "mies"])
def test_ties_go_to_the_lowest_index(method):
    assert solve(np.ones((300, 300)), 7, method).indices.tolist() == list(range(7))
    assert solve(np.ones((5, 300, 300)), 7, method, protected=[0, 2]).indices.tolist() == [[1, 3, 4, 5, 6, 7, 8]] * 5


@pytest.mark.slow
@settings(max_examples=200)
@given(instances())
def test_exhaustive_finds_the_optimum(drawn):
    W, k, protected = drawn
    sol = solve(W, k, "exhaustive", protected=protected).verify()
    best = oracle.optimum(W, k, protected)
    assert sol.status is Status.OPTIMAL
    assert float(sol.objective) == pytest.approx(best, abs=1e-9 * max(np.abs(W).sum(), 1e-300))


def test_exhaustive_visits_every_subset_once():
    for n in range(1, 8):
        for k in range(n + 1):
            expected = 1 if k in (0, n) else len(list(oracle.itertools.combinations(range(n), k)))
            assert solve(np.eye(n), k, "exhaustive").stats["subsets"] == expected


def test_exhaustive_refuses_what_it_cannot_finish():
    with pytest.raises(grace_opt.errors.SolverError, match=r"C\(64, 32\) = 1.83262e\+18 .* max_subsets"):
        solve(np.eye(64), 32, "exhaustive")
    with pytest.raises(grace_opt.errors.SolverError, match=r"= about 10\^330 subsets"):
        solve(np.eye(1100), 550, "exhaustive")


def test_exhaustive_names_the_exact_alternative():
    with pytest.raises(grace_opt.errors.SolverError, match="method='branch_and_bound' proves optimality"):
        solve(np.eye(64), 32, "exhaustive")


def test_exhaustive_stops_at_the_time_limit_with_an_answer():
    W = oracle.np.random.default_rng(0).normal(size=(30, 30))
    sol = solve(W + W.T, 15, "exhaustive", time_limit=0.05)
    assert sol.status is Status.LIMIT
    assert sol.lower_bound == -np.inf
    check_solution(W + W.T, 15, sol)


@pytest.mark.slow
@given(instances(), st.sampled_from(["mies", "think", "random"]))
def test_local_search_ends_at_a_local_optimum_no_worse_than_its_start(drawn, start):
    W, k, protected = drawn
    sol = solve(W, k, "local_search", protected=protected, start=start)
    begin = solve(W, k, start, protected=protected)
    assert oracle.objective(W, sol.indices) <= oracle.objective(W, begin.indices)
    free = np.delete(np.delete(W, protected, 0), protected, 1)  # test_giants has one size per exchange
    assert oracle.best_swap(W, sol.indices.tolist(), protected) >= -1e-12 * np.abs(free).sum()


def test_local_search_starts_from_a_mask_or_indices():
    W = instance("wishart", 12, 0)
    by_index = solve(W, 4, "local_search", start=[8, 9, 10, 11])
    mask = np.zeros(12, bool)
    mask[8:] = True
    by_mask = solve(W, 4, "local_search", start=mask)
    assert (by_index.mask == by_mask.mask).all()
    stopped = solve(W, 4, "local_search", start=mask, max_steps=0)
    assert stopped.mask.tolist() == mask.tolist()
    assert stopped.status is Status.LIMIT


def test_local_search_stops_at_the_time_limit_with_its_start():
    W = instance("wishart", 40, 0)
    sol = solve(W, 20, "local_search", start="think", time_limit=1e-9)
    assert sol.status is Status.LIMIT
    assert (sol.mask == solve(W, 20, "think").mask).all()


@settings(max_examples=60)
@given(batches())
@pytest.mark.slow
def test_batched_equals_looped_with_k_and_protection_per_instance(drawn):
    W, k, protected = drawn
    for name in NAMES:
        together = solve(W, k, name, protected=protected)
        check_solution(W, k, together, protected)
        for b in range(len(W)):
            alone = solve(W[b], int(k[b]), name, protected=protected[b])
            assert (together.mask[b] == alone.mask).all(), name


@pytest.mark.slow
def test_random_is_uniform_over_pairs():
    counts = np.zeros((5, 5))
    for seed in range(2000):
        i, j = solve(np.eye(5), 2, "random", seed=seed).indices
        counts[i, j] += 1
    assert np.abs(counts[np.triu_indices(5, 1)] - 200).max() < 75  # five standard deviations


@pytest.mark.slow
@settings(max_examples=40)
@given(instances(max_n=7), st.permutations(range(7)))
def test_permuting_vertices_permutes_the_answer(drawn, order):
    W, k, _ = drawn
    p = [i for i in order if i < len(W)]
    for name in ("exhaustive", "mies", "think"):
        a, b = solve(W, k, name), solve(W[np.ix_(p, p)], k, name)
        off = W[np.triu_indices(len(W), 1)]
        if name == "exhaustive":
            assert float(a.objective) == pytest.approx(float(b.objective), abs=1e-9 * max(np.abs(W).sum(), 1e-300))
        elif len(set(np.diag(W))) == len(W) and len(set(off)) == len(off):
            assert sorted(np.array(p)[b.indices].tolist()) == a.indices.tolist()


def first_ones(problem):
    return problem.candidates & (problem.candidates.cumsum(-1) <= problem.k.unsqueeze(-1))


def last_ones(problem):
    return problem.candidates & (problem.candidates.flip(-1).cumsum(-1).flip(-1) <= problem.k.unsqueeze(-1))


BREACHES = {
    "too many": lambda p: p.candidates,
    "takes protected": lambda p: torch.arange(p.n).expand_as(p.candidates) < p.k.unsqueeze(-1),
    "depends on the batch": lambda p: first_ones(p) if p.W.shape[0] == 1 else last_ones(p),
}


@pytest.mark.slow
@pytest.mark.parametrize("breach", BREACHES)
def test_a_planted_wrong_solver_is_caught(breach):
    registry.register_solver("planted", batched=True)(lambda p, o, r: SolverResult(BREACHES[breach](p)))
    try:
        with pytest.raises((AssertionError, grace_opt.GraceError)):
            check_solver("planted")
    finally:
        registry.unregister("planted")


@pytest.mark.slow
def test_a_false_bound_is_caught():
    @registry.register_solver("planted", batched=True, exact=True)
    def greedy_that_claims_optimality(problem, options, run):
        """MIES with a lie."""
        greedy = registry.get("mies")
        result = greedy.solver(problem, greedy.make_options({}), run)
        return SolverResult(result.mask, lower_bound=grace_opt.objective.evaluate(problem.W, result.mask))

    try:
        with pytest.raises(AssertionError, match="optimum"):
            check_solver("planted")
    finally:
        registry.unregister("planted")


def test_greedy_can_be_arbitrarily_bad():
    v = np.array([0.9, 1.0, -1.0])
    assert float(solve(np.outer(v, v), 2, "mies").objective) == pytest.approx(0.01)
    assert float(solve(np.outer(v, v), 2, "exhaustive").objective) == pytest.approx(0.0, abs=1e-15)
