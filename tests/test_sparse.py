"""Sparse W: the choices and bounds of the dense methods from the edges alone, and bad input that names itself."""

import itertools
import math
import sys
import time

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import grace_opt
from grace_opt import Status, bounds, instances, solve
from grace_opt.bounds.sparse import degree_bound, load_bound, plane_bound
from grace_opt.cli.app import app
from grace_opt.errors import ProblemError
from grace_opt.instances import generators
from grace_opt.kernels.solve.annealing.moves import DenseMoves, SparseMoves
from grace_opt.kernels.solve.annealing.trial import cpu as annealing_trial
from grace_opt.kernels.solve.sparse.cpu import heap as heaps
from grace_opt.kernels.solve.sparse.exchange import Exchanges
from grace_opt.kernels.solve.sparse.greedy import added
from grace_opt.kernels.solve.sparse.tabu import TabuSearch
from grace_opt.kernels.solve.sparse.trial import cpu as sparse_trial
from grace_opt.problem import Problem, SparseWeights
from grace_opt.run import Run
from tests import oracle
from tests.clock import Taken

SPARSE = ["mies", "drop_greedy", "think", "random", "local_search", "tabu", "annealing", "portfolio"]


def problem_of(W, k, protected=()):
    """A sparse problem however small, which `Problem.of` would make dense."""
    weights, integer = SparseWeights.of(sp.csr_array(W))
    made = Problem.of(weights, k, protected=list(protected) or None)
    return Problem(made.weights, made.k, made.candidates, made.k_max, made.backend, integer)


@st.composite
def graphs(draw, max_n=9, weights=(-3.0, -2.0, -1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 4.0)):
    """Symmetric W with many zeros, k, and protected vertices."""
    n = draw(st.integers(1, max_n))
    upper = [draw(st.sampled_from(weights)) for _ in range(n * (n + 1) // 2)]
    W = np.zeros((n, n))
    W[np.triu_indices(n)] = upper
    W = np.triu(W) + np.triu(W, 1).T
    protected = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n - 1)) if n > 1 else []
    return W, draw(st.integers(0, n - len(protected))), protected


def random_graph(n, degree=12, seed=0, whole=False):
    """A random graph with edges of negative weight, as in densest subgraphs."""
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, n, (2, n * degree // 2))
    ends = ends[:, ends[0] != ends[1]]
    weights = -rng.integers(1, 9, ends.shape[1]).astype(float) if whole else -rng.random(ends.shape[1])
    half = sp.coo_array((weights, (ends[0], ends[1])), shape=(n, n)).tocsr()
    return (half + half.T).tocsr()


def test_trials():
    assert sparse_trial()
    assert annealing_trial()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mies", "drop_greedy", "think", "random"])
@given(drawn=graphs())
def test_choices_are_the_dense_ones(method, drawn):
    """Ties included; with path=True, too."""
    W, k, protected = drawn
    dense = solve(W, k, method, protected=protected or None)
    sparse = solve(problem_of(W, k, protected), method=method)
    assert sparse.indices.tolist() == dense.indices.tolist()
    assert float(sparse.objective) == oracle.objective(W, sparse.indices)
    if method in ("mies", "drop_greedy"):
        dense = solve(W, k, method, protected=protected or None, path=True)
        sparse = solve(problem_of(W, k, protected), method=method, path=True)
        for name in ("order", "path"):
            assert sparse.stats[name].tolist() == dense.stats[name].tolist()


@pytest.mark.parametrize("method", ["mies", "drop_greedy"])
def test_choices_are_the_dense_ones_of_numbers_that_round(method):
    W = random_graph(1500, seed=1)
    W.setdiag(np.random.default_rng(0).normal(size=1500))
    for k in (1, 150, 1400):
        sparse, dense = solve(W, k, method), solve(W.toarray(), k, method)
        assert sparse.problem.weights.form == "sparse"
        assert sparse.indices.tolist() == dense.indices.tolist()


def test_small_sums_survive_large_ones():
    """Vertex 0 dwarfs what decides among the others, and is dropped first, beside 1e-300 to 1e300."""
    for size in (1e20, 1e300):
        W = np.zeros((5, 5))
        W[0, 1:] = W[1:, 0] = size
        W[0, 0] = size
        W[1:, 1:] = np.diag([3e-3, 1e-3, 2e-3, 5e-300])
        assert solve(problem_of(W, 2), method="drop_greedy").indices.tolist() == [2, 4]
        for method in ("local_search", "tabu", "annealing"):
            sol = solve(problem_of(W, 2), method=method, start=[0, 1])
            assert 0 not in sol.indices.tolist()
            assert float(sol.objective) == oracle.objective(W, sol.indices)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["local_search", "annealing"])
@settings(max_examples=60)
@given(drawn=graphs(), seed=st.integers(0, 3))
def test_no_exchange_improves_the_answer(method, drawn, seed):
    W, k, protected = drawn
    sol = solve(problem_of(W, k, protected), method=method, start="random", seed=seed)
    first = solve(problem_of(W, k, protected), method="random", seed=seed)
    assert float(sol.objective) == oracle.objective(W, sol.indices)
    assert oracle.best_swap(W, sol.indices.tolist(), protected) == 0
    assert float(sol.objective) <= float(first.objective)
    assert not set(sol.indices.tolist()) & set(protected)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tabu", "annealing", "portfolio"])
@settings(max_examples=40)
@given(drawn=graphs())
def test_searches_find_the_optimum_of_small_graphs(method, drawn):
    W, k, protected = drawn
    sol = solve(problem_of(W, k, protected), method=method)
    assert float(sol.objective) == oracle.optimum(W, k, protected)


@pytest.mark.slow
@settings(max_examples=150)
@given(drawn=graphs(max_n=8, weights=(-1e9, -3.0, -0.1, 0.0, 0.0, 0.0, 1e-7, 0.3, 5.0)))
def test_bounds_are_below_the_optimum(drawn):
    W, k, protected = drawn
    best, flat = oracle.optimum(W, k, protected), problem_of(W, k, protected).flatten()
    for bound in (degree_bound, load_bound, plane_bound):
        assert float(bound(flat)) <= best
    assert float(bounds.certificate(flat)) <= best + 1e-9 * abs(best)


def test_bounds_are_tight_where_they_should_be():
    """Loads: a clique apart from the rest is densest. The plane: a graph without a dense part. Degrees: k = 1."""
    clique = np.zeros((40, 40))
    clique[:10, :10] = -1.0
    clique[10:, 10:] = -0.1
    np.fill_diagonal(clique, 0.0)
    flat = problem_of(clique, 10).flatten()
    assert math.isclose(float(load_bound(flat)), -90.0, rel_tol=1e-9)
    assert float(degree_bound(problem_of(np.diag([3.0, 1.0, 2.0]), 1).flatten())) == pytest.approx(1.0, rel=1e-12)
    flat = Problem.of(random_graph(1000, seed=2), 500).flatten()
    assert float(plane_bound(flat)) > max(float(load_bound(flat)), float(degree_bound(flat)))


def least_change(W, x, free):
    """The least change of f by an exchange of two free vertices; infinite if there is none."""
    cost = W.diagonal() + 2 * (W @ x - W.diagonal() * x)
    change = cost[None, :] - cost[:, None] - 2 * W
    return change[np.ix_(x & free, ~x & free)].min(initial=np.inf)


@pytest.mark.slow
@settings(max_examples=60)
@given(drawn=graphs(max_n=12), seed=st.integers(1, 2**63))
def test_every_exchange_is_the_best_one(drawn, seed):
    """Of all pairs of vertices, after any exchanges before: of `local_search`, and of `tabu` whatever is blocked."""
    W, k, _ = drawn
    if not 0 < k < len(W):
        return
    graph, start = problem_of(W, k).weights.graph(), np.arange(len(W)) < k
    local, made = Exchanges(graph, start.copy()), 1
    while made:
        before, least = local.x.copy(), least_change(W, local.x, np.ones(len(W), bool))
        made = local.improve(1)
        assert before @ W @ before + min(least, 0) == local.x @ W @ local.x
    search = TabuSearch(graph, start, 10**6, 2, np.array([seed], np.uint64))
    _, _, _, _, _, x, _, until, *_ = search._before
    for now in range(1, 40):
        f, best, free = search.values[0], search.value, until <= now
        step = least_change(W, x, free)
        anywhere = least_change(W, x, np.ones(len(W), bool))
        step = anywhere if anywhere < min(step, best - f) else step
        search.advance(1)
        assert search.values[0] == x @ W @ x == (f + step if np.isfinite(step) else f)


def test_a_heap_gives_everything_back_in_order():
    rng = np.random.default_rng(0)
    heap = heaps.new_heap(np.full(200, -1, np.int32), np.empty(0, np.int32))
    keys = {v: float(rng.integers(0, 20)) for v in range(200)}
    for v, key in keys.items():
        heaps.push(heap, v, key)
    for v in rng.integers(0, 200, 300).tolist():
        keys[v] = float(rng.integers(0, 20))
        heaps.change(heap, v, keys[v])
    for v in range(0, 200, 7):
        heaps.take_out(heap, v)
        del keys[v]
    order = []
    while heap.held[0]:
        order.append(int(heap.vertices[0]))
        heaps.take_out(heap, order[-1])
    assert order == sorted(keys, key=lambda v: (keys[v], v))


@pytest.mark.slow
@settings(max_examples=80)
@given(drawn=graphs(), data=st.data())
def test_required_vertices(drawn, data):
    W, k, protected = drawn
    free = [v for v in range(len(W)) if v not in protected]
    required = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=k)) if free else []
    for maximize in (False, True):
        sol = solve(problem_of(W, k, protected), method="tabu", required=required, maximize=maximize, certify=True)
        assert set(required) <= set(sol.indices.tolist())
        best = oracle.optimum(W, k, protected, required, maximize)
        assert float(sol.objective) == best
        assert float(sol.lower_bound) <= best <= float(sol.upper_bound)


def test_required_vertices_of_numbers_that_round():
    """The same reduced problem as of a tensor, to the last bit."""
    W = random_graph(1200, seed=3)
    required = [0, 5, 77]
    sparse, dense = (grace_opt.problem.Reduction.of(Problem.of(one, 50), required=required) for one in (W, W.toarray()))
    assert torch.equal(sparse.problem.diagonal, dense.problem.diagonal)
    assert sparse.rest.tolist() == dense.rest.tolist()
    assert torch.equal(sparse.problem.weights._to_dense(), dense.problem.W)


@pytest.mark.parametrize("method", SPARSE)
@pytest.mark.parametrize("k", [0, 1, 995])
def test_every_size_and_isolated_vertices(method, k):
    """Only 30 of 1000 vertices have edges; five are protected."""
    W = sp.lil_array((1000, 1000))
    W[:30, :30] = -1.0
    W[5, 5] = 0.0
    options = {"sweeps": 2} if method == "annealing" else {"iterations": 50} if method in ("tabu", "portfolio") else {}
    sol = solve(W, k, method, protected=range(995, 1000), **options)
    assert sol.problem.weights.form == "sparse"
    assert len(sol.indices) == k
    assert float(sol.objective) == oracle.objective(W.toarray()[:30, :30], [v for v in sol.indices.tolist() if v < 30])


def test_explicit_zeros_duplicates_and_whole_numbers():
    n = 1000
    at = np.array([[0, 1, 1, 0, 2, 3, 4, 4], [1, 0, 0, 1, 2, 4, 3, 3]])
    for dtype, values in (
        (np.int8, [100, 100, 100, 100, 7, 0, 5, -5]),
        (np.float32, [0.5, 0.5, 0.5, 0.5, 7, 0, 5, -5]),
    ):
        W = sp.coo_array((np.array(values, dtype), tuple(at)), shape=(n, n))
        problem = Problem.of(W, 3)
        assert problem.integer == (dtype == np.int8)
        assert problem.weights.edges.nnz == 2  # no overflow, no zeros
        assert float(solve(problem, method="mies", maximize=True).objective) == (407 if dtype == np.int8 else 9)
        again = sp.csr_array(W)
        before = again.data.copy()
        Problem.of(again, 3)
        assert (again.data == before).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda W: W.__setitem__((3, 4), np.nan), r"W\[3, 4\] is nan"),
        (lambda W: W.__setitem__((3, 4), 1.0), r"not symmetric: \|W\[3, 4\] - W\[4, 3\]\| = 1"),
        (lambda W: W.__setitem__((3, 3), 1e304), "sums of weights overflow"),
    ],
)
def test_bad_entries_are_named(change, said):
    W = sp.lil_array((1000, 1000))
    change(W)
    with pytest.raises(ProblemError, match=said):
        Problem.of(W, 3)


def test_integers_are_symmetric_exactly():
    W = sp.lil_array((1000, 1000), dtype=np.int64)
    W[0, 0], W[3, 4], W[4, 3] = 2**52, 10, 3
    with pytest.raises(ProblemError, match=r"W\[3, 4\] - W\[4, 3\]\| = 7, allowed 0, as these are integers"):
        Problem.of(W, 3)
    W = W.astype(np.float64)  # a giant elsewhere excuses nothing
    with pytest.raises(ProblemError, match=r"W\[3, 4\] - W\[4, 3\]\| = 7, allowed .*by the two vertices"):
        Problem.of(W, 3)
    W[4, 3] = 10 * (1 + 4 * np.finfo(float).eps)
    edges = Problem.of(W, 3).weights.edges
    assert edges[3, 4] == edges[4, 3] == 10 * (1 + 2 * np.finfo(float).eps)


def test_other_bad_input():
    with pytest.raises(ProblemError, match=r"\(1000, 1001\)"):
        Problem.of(sp.coo_array((1000, 1001)), 1)
    big = sp.coo_array((np.full(4, 2**52), ([0, 0, 1, 1], [1, 1, 0, 0])), shape=(1000, 1000))
    with pytest.raises(ProblemError, match=r"9007199254740992|2\*\*53|exact"):
        Problem.of(sp.coo_array((big.data * 2, big.coords), shape=big.shape), 1)
    with pytest.raises(ProblemError, match="k"):
        solve(random_graph(1000), 1001)


@pytest.mark.slow
def test_nothing_becomes_a_tensor_silently(monkeypatch):
    """With 1 GiB free, 20,000 vertices are no problem for methods that take edges, and named by all others."""
    monkeypatch.setattr("grace_opt.problem.weights.free_memory", lambda: 2.0**30)
    original = SparseWeights._to_dense

    def refuse(self):
        assert self.n < 20_000, "W was made dense"
        return original(self)

    monkeypatch.setattr(SparseWeights, "_to_dense", refuse)
    problem = Problem.of(random_graph(20_000, degree=4), 100)
    for method in SPARSE:
        options = {"sweeps": 1} if method == "annealing" else {"iterations": 10} if method == "tabu" else {}
        assert solve(problem, method=method, time_limit=0.3 if method == "portfolio" else None, **options).verify()
    with pytest.raises(ProblemError, match=r"method 'beam' reads all 20,000² entries of W, which take 2\.98 GiB"):
        solve(problem, method="beam")


@pytest.mark.slow
def test_equal_seeds_equal_answers_and_slices_do_not_matter(monkeypatch):
    problem = Problem.of(random_graph(1000, seed=4), 100)
    for method, module, name in (
        ("tabu", "tabu", "SPARSE_ITERATIONS_PER_LOOK"),
        ("local_search", "local_search", "SPARSE_STEPS_PER_LOOK"),
    ):
        first = solve(problem, method=method, seed=1)
        monkeypatch.setattr(f"grace_opt.solvers.{module}.{name}", 7)
        assert (solve(problem, method=method, seed=1).mask == first.mask).all()
    assert (solve(problem, method="annealing", seed=1).mask == solve(problem, method="annealing", seed=1).mask).all()


def test_annealing_finds_what_greedy_methods_do_not():
    """Densest subgraphs, as measured in docs/results/sparse.md: far better than greedy."""
    problem = Problem.of(random_graph(5000, seed=0), 500)
    greedy, annealed = (float(solve(problem, method=name).objective) for name in ("drop_greedy", "annealing"))
    assert annealed < 1.04 * greedy < 0


def test_annealing_of_few_vertices_finds_the_optimum():
    """Edges between exchanged vertices were left out of what temperatures are measured on; some were never left."""
    first = -np.array([[2.0, 2, 2, 1, 3], [2, 3, 2, 3, 1], [2, 2, 3, 3, 3], [1, 3, 3, 1, 1], [3, 1, 3, 1, 3]])
    found = [(first, 3)]
    for seed in (*range(60), 766, 813, 877):
        rng = np.random.default_rng(seed)
        n = int(rng.integers(4, 10))
        k = int(rng.integers(1, n))
        W = rng.integers(-3, 4, (n, n)) * (rng.random((n, n)) < rng.choice([0.3, 0.7, 1]))
        W = np.triu(-abs(W) if seed % 3 == 0 else W).astype(float)
        found.append((W + np.triu(W, 1).T, k))
    for W, k in found:
        best = oracle.optimum(W, k, [])
        for seed in range(3):
            assert float(solve(W, k, "annealing", seed=seed).objective) == best
            assert float(solve(problem_of(W, k), method="annealing", seed=seed).objective) == best


@pytest.mark.parametrize(("n", "k", "seeds"), [(12, 5, (0, 15)), (20, 3, (11, 12, 13, 14, 18)), (20, 17, (0, 1))])
def test_tabu_of_few_vertices_does_not_go_in_circles(n, k, seeds):
    """Of twenty seeds, the first two cases have those where it did."""
    for seed in seeds:
        W = np.random.default_rng(seed).normal(size=(n, n))
        W += W.T
        found = solve(problem_of(W, k), method="tabu", iterations=20_000).objective
        np.testing.assert_allclose(found, solve(W, k, "exhaustive").objective, rtol=1e-9)


def test_temperatures_are_measured_on_whole_exchanges():
    made = random_graph(40)
    W, x = made.toarray(), np.arange(40) < 15
    f = oracle.objective(W, np.flatnonzero(x))
    possible = {oracle.objective(W, {*np.flatnonzero(x)} - {i} | {j}) - f for i in range(15) for j in range(15, 40)}
    graph = SparseWeights.of(made)[0].graph()
    for moves in (DenseMoves(W, x, np.ones(1, np.uint64)), SparseMoves(graph, x, np.ones(1, np.uint64))):
        changes = moves.changes(4096)
        assert len({*changes.round(9)}) > 100
        assert np.abs(np.subtract.outer(changes, sorted(possible))).min(1).max() < 1e-9


def test_dense_annealing_is_as_good_as_tabu():
    made = generators.dispersion(200, seed=1, k=20)
    tabu, annealed = (solve(made.W, made.k, name) for name in ("tabu", "annealing"))
    assert float(annealed.objective) <= 0.98 * float(tabu.objective) < 0


def test_temperatures_and_rounds_can_be_given():
    W = random_graph(1000, seed=5)
    cold = solve(W, 100, "annealing", hot=1e-9, cold=1e-9, sweeps=20, start="drop_greedy")
    assert float(cold.objective) <= float(solve(W, 100, "drop_greedy").objective)
    more = solve(W, 100, "annealing", sweeps=40, restarts=2)
    assert more.stats["iterations"] == 40_000 * (1 + 4 + 16)
    with pytest.raises(grace_opt.errors.OptionError, match="cold=2 is above hot=1"):
        solve(W, 100, "annealing", hot=1.0, cold=2.0)
    with pytest.raises(grace_opt.errors.OptionError, match="start from itself"):
        solve(W, 100, "annealing", start="annealing")


@pytest.fixture(scope="module")
def large_problem():
    return Problem.of(random_graph(200_000, seed=6), 20_000)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["local_search", "tabu", "annealing", "portfolio"])
def test_limits_are_kept(method, large_problem):
    solve(random_graph(1000, seed=6), 100, method, time_limit=0.02)  # loads what is compiled
    with Taken() as taken:
        sol = solve(large_problem, method=method, time_limit=0.5)
    assert taken.seconds < 0.5 * 1.1 + 0.2
    assert sol.verify()
    assert sol.status in (Status.LIMIT, Status.FEASIBLE)


@pytest.mark.slow
@pytest.mark.parametrize("certify", [False, True])
def test_the_portfolio_takes_the_time_that_it_is_given(certify, monkeypatch, clock):
    """Where bounds and the last exchanges might take long, and then do not."""
    monkeypatch.setattr("grace_opt.bounds.seconds_to_certify", lambda *problem_and_level: 100.0)
    monkeypatch.setattr("grace_opt.solvers.annealing.SECONDS_TO_POLISH", 1.0)
    problem = Problem.of(random_graph(3000, seed=6), 300)
    clock.per_look = 0.01
    solve(random_graph(1000, seed=6), 100, "portfolio", time_limit=0.02, certify=certify)  # loads what is compiled
    began = clock.now
    sol = solve(problem, method="portfolio", time_limit=0.4, certify=certify)
    assert 0.35 < clock.now - began < 0.4 * 1.1 + 0.2
    assert sol.status is Status.LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("method", ["local_search", "tabu", "annealing", "portfolio"])
def test_targets_patience_and_callbacks(method, clock):
    clock.per_look = 0.01
    problem = Problem.of(random_graph(1000, seed=7), 100)
    best = float(solve(problem, method="local_search").objective)
    sol = solve(problem, method=method, target=best, time_limit=20.0)
    assert sol.status is Status.FEASIBLE
    assert float(sol.objective) <= best
    began = clock.now
    solve(problem, method=method, patience=0.1)
    assert clock.now - began < 10
    if method != "local_search":
        assert solve(problem, method=method, callback=lambda progress: True, time_limit=20.0).status is Status.LIMIT


def test_sums_are_exact_where_they_cancel():
    W = np.diag([1e16, 1.0, -1e16, 2.0, 0.0])
    W[1, 3] = W[3, 1] = 2.0**-60
    weights, _ = SparseWeights.of(sp.csr_array(W))
    for size in range(1, 6):
        for S in itertools.combinations(range(5), size):
            mask = torch.zeros(5, dtype=torch.bool)
            mask[list(S)] = True
            assert float(weights.objective(mask)) == oracle.objective(W, S)


@given(st.data())
def test_f_next_to_the_middle_of_two_numbers_is_rounded_as_the_exact_sum(data):
    """Digits that pairs of numbers do not hold decide on which side it lies."""
    big = data.draw(st.sampled_from([2.0**53, 2.0**53 + 2, -(2.0**53), 2.0**53 + 6]))
    half = data.draw(st.sampled_from([1.0, -1.0, 0.5, -0.5, 3.0]))
    tail = data.draw(st.sampled_from([1e-30, -1e-30, 1e-300, -(2.0**-60), 5e-324]))
    nodes = data.draw(st.permutations([big, half, 0.0, 0.0]))
    W = np.diag(nodes)
    W[0, 3] = W[3, 0] = tail
    weights, _ = SparseWeights.of(sp.csr_array(W))
    assert float(weights.objective(torch.ones(4, dtype=torch.bool))) == math.fsum([*nodes, tail, tail])


@pytest.mark.slow
def test_a_graph_of_networkx_keeps_its_names():
    nx = pytest.importorskip("networkx")
    graph = nx.barabasi_albert_graph(2000, 3, seed=0)
    graph = nx.relabel_nodes(graph, {i: f"person {i}" for i in graph})
    sol = solve(graph, 20, "annealing", maximize=True, required=["person 1999"], protected=["person 0"], certify=True)
    assert sol.problem.weights.form == "sparse"
    assert "person 1999" in sol.labels
    assert "person 0" not in sol.labels
    assert float(sol.objective) == graph.subgraph(sol.labels).number_of_edges() <= float(sol.upper_bound)


def test_a_run_of_the_bound_that_has_no_time_says_nothing():
    flat = Problem.of(random_graph(1000), 100).flatten()
    assert float(bounds.certificate(flat, run=Run(deadline=time.monotonic() - 1))) == -math.inf


@pytest.mark.parametrize("name", ["w.npz", "w.mtx", "w.mtx.gz"])
@pytest.mark.parametrize("whole", [False, True])
def test_files_stay_sparse(name, whole, tmp_path, monkeypatch):
    W = random_graph(1000, seed=8, whole=whole)
    W = W.astype(np.int64) if whole else W
    instances.write(tmp_path / name, W)
    made = instances.read(tmp_path / name)
    assert sp.issparse(made.W)
    assert made.W.dtype == W.dtype
    assert (made.W != W).nnz == 0
    monkeypatch.setattr(SparseWeights, "_to_dense", lambda self: pytest.fail("W was made dense"))
    answer = CliRunner().invoke(app, ["solve", str(tmp_path / name), "-k", "10", "--method", "mies", "--no-certify"])
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
@pytest.mark.parametrize(("offsets", "columns"), [([0], 9), ([-2, 0, 2], 9), ([-2, 2], 4), ([-20, 20, 0], 9), ([], 0)])
def test_scipy_s_files_of_diagonals(offsets, columns, dtype, tmp_path):
    data = np.random.default_rng(3).integers(-3, 4, size=(len(offsets), columns)).astype(dtype)
    W = sp.dia_array((data, offsets), shape=(9, 9))
    sp.save_npz(tmp_path / "w.npz", W)
    made = instances.read(tmp_path / "w.npz").W
    assert made.dtype == dtype
    assert np.array_equal(made.toarray() if sp.issparse(made) else made, W.toarray())


def test_scipy_s_files_with_k_and_bad_ones(tmp_path):
    W = random_graph(1000, seed=9)
    for layout in ("csr", "csc", "coo", "bsr"):
        sp.save_npz(tmp_path / "w.npz", W.asformat(layout))
        assert (instances.read(tmp_path / "w.npz").W != W).nnz == 0
    instances.write(tmp_path / "k.npz", W, 7)
    assert instances.read(tmp_path / "k.npz").k == 7
    assert (sp.load_npz(tmp_path / "k.npz") != W).nnz == 0
    parts = {"format": b"csr", "shape": (1000, 1000), "data": W.data, "indices": W.indices + 500, "indptr": W.indptr}
    np.savez(tmp_path / "bad.npz", **parts)
    with pytest.raises(ProblemError, match=r"cannot be read as \.npz"):
        instances.read(tmp_path / "bad.npz")
    np.savez(tmp_path / "lil.npz", format=b"lil", shape=(5, 5), data=np.ones(5))
    with pytest.raises(ProblemError, match="as lil: save it as csr, csc, bsr, coo or dia"):
        instances.read(tmp_path / "lil.npz")
    sp.save_npz(tmp_path / "huge.npz", sp.coo_array(([1.0], ([0], [0])), shape=(10**12, 10**12)))
    with pytest.raises(ProblemError, match=r"huge\.npz holds W of a shape that does not fit into memory: .*TiB"):
        instances.read(tmp_path / "huge.npz")
    for wrong in ({"offsets": np.zeros(3, int)}, {"offsets": np.zeros(2)}, {"data": np.ones(5)}, {"shape": (5,)}):
        np.savez(tmp_path / "bad.npz", **{"format": b"dia", "shape": (5, 5), "data": np.ones((2, 5)), **wrong})
        with pytest.raises(ProblemError):
            instances.read(tmp_path / "bad.npz")
    with pytest.raises(ProblemError, match=r"\.mtx cannot store k"):
        instances.write(tmp_path / "w.mtx", W, 7)


def test_index_arrays_that_point_elsewhere_are_refused():
    """scipy does not look, and compiled loops would read and write beyond the arrays."""

    def damaged(layout, change):
        W = random_graph(1000).asformat(layout).copy()
        change(W)
        return W

    def set_at(array, value):
        array[5] = value

    for W in (
        damaged("csr", lambda W: set_at(W.indices, 1007)),
        damaged("csc", lambda W: set_at(W.indices, -3)),
        damaged("csr", lambda W: set_at(W.indptr, W.nnz + 7)),
        damaged("csr", lambda W: setattr(W, "data", W.data[:-3])),
        damaged("bsr", lambda W: set_at(W.indices, 1000)),
        damaged("coo", lambda W: set_at(W.coords[0], 1000)),
    ):
        with pytest.raises(ProblemError, match=f"damaged {W.format} matrix"):
            Problem.of(W, 3)


def test_layouts_indices_and_orders_do_not_matter():
    W = random_graph(1000, seed=10)
    best = solve(W, 30).indices.tolist()
    long = sp.csr_array((W.data, W.indices.astype(np.int64), W.indptr.astype(np.int64)), shape=W.shape)
    backwards = sp.csr_array((W.data.copy(), W.indices.copy(), W.indptr), shape=W.shape)
    for row in range(1000):
        here = slice(*backwards.indptr[row : row + 2])
        backwards.indices[here], backwards.data[here] = W.indices[here][::-1], W.data[here][::-1]
    assert long.indices.dtype == np.int64
    assert not backwards.has_sorted_indices
    for same in (long, backwards, sp.csr_matrix(W), *(W.asformat(layout) for layout in ("csc", "coo", "lil", "bsr"))):
        assert solve(same, 30).indices.tolist() == best
    assert not backwards.has_sorted_indices  # the user's stays as it is


def test_sums_of_duplicates_and_of_large_integers():
    """Nothing overflows in int8 or int64; what float64 does not hold exactly is refused."""

    def of(data, dtype):
        data = [weight for weight in data for _ in range(2)]
        ends = [[0, 1] * (len(data) // 2), [1, 0] * (len(data) // 2)]
        return sp.coo_array((np.array(data, dtype), tuple(ends)), shape=(1000, 1000))

    assert float(solve(of([100, 100, 100], np.int8), 2, maximize=True).objective) == 600
    assert float(solve(of([-(2**53)], np.int64), 2).objective) == -(2.0**54)
    for data, dtype, said in (
        ([2**52] * 3, np.int64, 3 * 2**52),
        ([-(2**63)], np.int64, -(2**63)),
        ([2**63 + 1], np.uint64, 2**63 + 1),
        ([2**53 + 1], np.int64, 2**53 + 1),
    ):
        with pytest.raises(ProblemError, match=rf"W holds the integer {said}, beyond 2\*\*53"):
            Problem.of(of(data, dtype), 2)
    with pytest.raises(ProblemError, match=r"W\[0, 1\] is inf"):
        Problem.of(of([1e308, 1e308], float), 2)


def _many_times(n, data, dtype, layout="coo", filled=0):
    """An edge 0–1 with weights that are to be added, as given; `filled` other entries make W too full for edges."""
    count, (i, j) = len(data), np.triu_indices(filled, 1)
    row, column = np.r_[[0] * count, [1] * count, i + 2, j + 2], np.r_[[1] * count, [0] * count, j + 2, i + 2]
    weights = np.array([*data, *data, *[0] * (2 * len(i))], dtype)
    if layout == "coo":
        return sp.coo_array((weights, (row, column)), shape=(n, n))
    order, ends = np.lexsort((column, row)), np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))])
    return getattr(sp, f"{layout}_array")((weights[order], column[order], ends), shape=(n, n))


def W_as_tensor(W):
    return torch.sparse_coo_tensor(np.array(W.coords), torch.from_numpy(W.data), W.shape, check_invariants=True)


def W_in_pages(W):
    """A batch of two, of which the first is empty."""
    at = np.array([np.ones_like(W.coords[0]), *W.coords])
    return torch.sparse_coo_tensor(at, torch.from_numpy(W.data), (2, *W.shape), check_invariants=True)


def W_in_rows(W):
    """A batch of one whose last dimension is dense."""
    rows = np.zeros((len(W.data), W.shape[1]), W.dtype)
    rows[np.arange(len(rows)), W.coords[1]] = W.data
    at = np.array([np.zeros_like(W.coords[0]), W.coords[0]])
    return torch.sparse_coo_tensor(at, torch.from_numpy(rows), (1, *W.shape), check_invariants=True)


@pytest.mark.parametrize(
    ("data", "dtype", "total"),
    [
        ([100] * 4, np.int8, 400),
        ([200, 200], np.uint8, 400),
        ([2**30] * 4, np.int32, 2**32),
        ([2**24, 1], np.float32, 2**24 + 1),
        ([1e38] * 4, np.float32, 4 * float(np.float32(1e38))),
        ([2**63 - 1, -(2**63) + 2], np.int64, 1),
        ([2**64 - 1] * 2, np.uint64, None),
        ([2**63 - 1] * 4, np.int64, None),
        ([2**53, 1], np.int64, None),
    ],
)
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "torch", "pages", "hybrid", "file"])
def test_entries_given_twice_are_added_alike_everywhere(data, dtype, total, layout, tmp_path):
    """Small or large, dense or sparse, from memory, torch (also a batch) or a file: the sum counts, and never wraps."""
    tensors = {"torch": W_as_tensor, "pages": W_in_pages, "hybrid": W_in_rows}
    if layout in tensors and dtype == np.uint64:
        pytest.skip("torch has hardly any operations for it")
    sizes = [(5, 0), (1000, 0)] + [(1000, 400)] * (dtype == np.int8)  # an array, edges, and again an array
    for n, filled in sizes[:1] if layout in ("pages", "hybrid") else sizes:
        W = _many_times(n, data, dtype, "coo" if layout in (*tensors, "file") else layout, filled)
        if layout in tensors:
            W = tensors[layout](W)
        if layout == "file":
            sp.save_npz(tmp_path / "w.npz", W)
        if total is None:
            with pytest.raises(ProblemError, match=rf"the integer {sum(data)}, beyond 2\*\*53"):
                solve(instances.read(tmp_path / "w.npz").W if layout == "file" else W, 2)
            continue
        W = instances.read(tmp_path / "w.npz").W if layout == "file" else W
        assert solve(W, 2, "drop_greedy", maximize=True).objective.reshape(-1)[-1] == 2 * total
        if layout == "csr":
            instances.write(tmp_path / "w.npz", W)
            assert instances.read(tmp_path / "w.npz").W[0, 1] == total
            assert grace_opt.symmetrize(W)[0, 1] == total


@pytest.mark.parametrize(
    ("made", "options", "said"),
    [
        (lambda W: W.astype(bool), {}, "dtype bool"),
        (lambda W: W.astype(complex), {}, "dtype complex128"),
        (lambda W: W[:, :-1], {}, r"shape \(1000, 999\)"),
        (lambda W: [W, W], {}, "list of sparse matrices"),
        (lambda W: sp.coo_array((0, 0)), {}, "W is empty"),
        (lambda W: W, {"protected": np.zeros(1001, bool)}, r"protected is a bool mask of shape \(1001,\)"),
        (lambda W: W, {"protected": range(998)}, "only 2 of 1000 vertices are unprotected"),
        (lambda W: W, {"required": [1000]}, "required holds vertex 1000"),
        (lambda W: W, {"required": [1, 2, 3, 4]}, "required names 4 vertices"),
        (lambda W: W, {"labels": ["a"]}, "labels has 1 names"),
    ],
)
def test_bad_arguments_beside_sparse_w(made, options, said):
    W, call = made(random_graph(1000)), Problem.of if "labels" in options else solve
    with pytest.raises(ProblemError, match=said):
        call(W, 3, **options)


@pytest.mark.filterwarnings("ignore:Sparse")  # torch on its own layouts
def test_sparse_tensors_of_torch_stay_sparse(monkeypatch):
    W = random_graph(1000, seed=11)
    monkeypatch.setattr(torch.Tensor, "to_dense", lambda self: pytest.fail("W was made dense"))
    best = solve(W, 30).indices.tolist()
    coo = torch.sparse_coo_tensor(np.array(W.tocoo().coords), torch.from_numpy(W.data), W.shape, check_invariants=True)
    csr = coo.coalesce().to_sparse_csr()
    for made in (coo, csr):
        sol = solve(made, 30)
        assert sol.problem.weights.form == "sparse"
        assert isinstance(sol.mask, torch.Tensor)
        assert sol.indices.tolist() == best
    small = torch.sparse_coo_tensor([[0, 1, 0, 1], [1, 0, 1, 0]], torch.full((4,), 100, dtype=torch.int8), (1000, 1000))
    assert float(solve(small, 2, maximize=True).objective) == 400


def test_what_is_too_full_to_stay_sparse_says_how_much_it_takes(monkeypatch):
    monkeypatch.setattr("grace_opt._util.memory.free_memory", lambda: 4e6)
    W = sp.csr_array(np.triu(np.ones((1000, 1000))))
    for made in (W, torch.from_numpy(W.toarray()).to_sparse()):
        with pytest.raises(ProblemError, match=r"W, shape \(1000, 1000\).*takes 0\.00745 GiB, and 0\.00373"):
            Problem.of(made, 3)


@pytest.mark.parametrize("name", ["entry", "row", "eigenvalue", "continuous", "plain", "qcr", "dnn", "fast", "tight"])
def test_bounds_of_matrices_take_sparse_w_where_it_fits(name, monkeypatch):
    W = np.zeros((6, 6))
    W[:3, 3:] = W[3:, :3] = -1.0
    function = getattr(bounds, name + "_bound")
    assert float(function(problem_of(W, 4).flatten())) == float(function(Problem.of(W, 4).flatten())) <= -8
    monkeypatch.setattr("grace_opt.problem.weights.free_memory", lambda: 100.0)
    with pytest.raises(ProblemError, match=r"reads all 6² entries of W, which take 2\.68e-07 GiB"):
        function(problem_of(W, 4).flatten())


def test_fixed_vertices_and_bounds_of_edges_name_their_forms():
    W = np.diag([1.0, 2.0, 9.0])
    assert bounds.fixed_vertices(problem_of(W, 2)).inside.tolist() == [True, True, False]
    for bound in (degree_bound, load_bound, plane_bound):
        with pytest.raises(ProblemError, match=f"{bound.__name__} reads W in its sparse form, not in its dense one"):
            bound(Problem.of(W, 2).flatten())
    with pytest.raises(ProblemError, match=r"factored_bound reads W in its factored form, not in its sparse one"):
        bounds.factored_bound(problem_of(W, 2).flatten())
    factors = grace_opt.FactoredWeights.product(np.ones((1, 3)), np.ones((1, 3)))
    with pytest.raises(ProblemError, match=r"row_bound reads W as a matrix, and W in its factored form"):
        bounds.row_bound(Problem.of(factors, 2).flatten())


def test_symmetrize_keeps_w_sparse():
    half = sp.coo_array((np.array([100, 100, 7], np.int8), ([0, 0, 2], [1, 1, 2])), shape=(1000, 1000))
    whole = grace_opt.symmetrize(half)
    assert sp.issparse(whole)
    assert [whole[0, 1], whole[1, 0], whole[2, 2], whole.nnz] == [100, 100, 7, 3]
    assert float(solve(whole, 2, "drop_greedy", maximize=True).objective) == 200


@pytest.mark.slow
def test_compare_and_the_command_line_take_sparse_files(tmp_path):
    W = random_graph(1000, seed=12)
    table = grace_opt.compare(W, 10, ["mies", "annealing"], options={"annealing": {"sweeps": 20}})
    assert table.best.problem.weights.form == "sparse"
    assert all(sol.verify() and float(table.best_bound) < float(sol.objective) for sol in table.solutions)
    path = tmp_path / "w.npz"
    instances.write(path, W, 10)
    answer = CliRunner().invoke(app, ["compare", str(path), "--method", "mies", "--method", "think"])
    assert answer.exit_code == 0, answer.output
    sp.save_npz(path, sp.triu(W).tocsr())
    answer = CliRunner().invoke(app, ["solve", str(path), "-k", "10", "--method", "mies"])
    assert answer.exit_code == 2
    assert "not symmetric" in answer.output
    assert "--symmetrize" in answer.output
    answer = CliRunner().invoke(
        app, ["solve", str(path), "-k", "10", "--method", "mies", "--symmetrize", "--no-certify"]
    )
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize("path", [False, True])
def test_greedy_methods_keep_time_limits(path, monkeypatch):
    """Cut before the first step they take the least scores; slices change nothing."""
    W = random_graph(1000, seed=13)
    W.setdiag(np.random.default_rng(1).integers(0, 5, 1000).astype(float))
    problem, first = Problem.of(W, 100), {}
    for method in ("mies", "drop_greedy"):
        first[method] = solve(problem, method=method, path=path)
        assert first[method].status is Status.FEASIBLE
        sol = solve(problem, method=method, path=path, time_limit=1e-9)
        assert sol.status is Status.LIMIT
        keys = W.diagonal() if method == "mies" else 2 * W.sum(axis=0) - W.diagonal()
        assert sorted(sol.indices.tolist()) == sorted(np.lexsort((np.arange(1000), keys))[:100].tolist())
        if path:
            assert sorted(sol.stats["order"].tolist()) == list(range(1000))
            assert sol.stats["path"][100] == pytest.approx(float(sol.objective), rel=1e-12)
    monkeypatch.setattr("grace_opt.kernels.solve.sparse.greedy.SLICE", 40)
    for method, before in first.items():
        assert (solve(problem, method=method, path=path).mask == before.mask).all()
    weights = problem.weights
    _, rise, cut = added(weights.graph(), problem.candidates[None], 100, lambda: False)
    assert rise == pytest.approx(float(first["mies"].objective), rel=1e-12)
    assert not cut


def test_searches_without_time_to_begin_return_their_start(monkeypatch):
    problem = Problem.of(random_graph(1000, seed=14), 100)
    start = solve(problem, method="drop_greedy").mask
    for method in ("local_search", "tabu", "annealing"):
        monkeypatch.setattr(f"grace_opt.solvers.{method}.SECONDS_TO_BEGIN", 1.0)  # per entry
        sol = solve(problem, method=method, start=start, time_limit=60.0)
        assert sol.status is Status.LIMIT
        assert (sol.mask == start).all()


@pytest.mark.slow
@pytest.mark.parametrize(("method", "search"), [("local_search", "Exchanges.improve"), ("tabu", "TabuSearch.advance")])
def test_limits_are_kept_where_an_exchange_is_slow(method, search, monkeypatch, clock):
    """As among many equal weights of both signs; slices grow as far as the clock lets them."""
    name, function = search.split(".")
    kind, slices = getattr(sys.modules[f"grace_opt.solvers.{method}"], name), []
    plain = getattr(kind, function)

    def slow(self, count):
        slices.append(count)
        clock.sleep(0.002 * count)
        return plain(self, count)

    monkeypatch.setattr(kind, function, slow)
    problem, start = Problem.of(random_graph(1000, seed=14), 300), np.arange(300)
    solve(problem, method=method, start=start, time_limit=0.01)  # loads what is compiled
    slices.clear()
    began = clock.now
    assert solve(problem, method=method, start=start, time_limit=0.3).status is Status.LIMIT
    assert 0.3 <= clock.now - began < 0.4
    assert slices[0] == 1
    assert 2 <= max(slices) <= 25


def test_a_batch_of_graphs_is_dense_if_it_fits(monkeypatch):
    nx = pytest.importorskip("networkx")
    graphs = [nx.path_graph(4), nx.cycle_graph(4)]
    assert solve(graphs, 4).objective.tolist() == [3, 4]
    monkeypatch.setattr("grace_opt._util.memory.free_memory", lambda: 200.0)
    with pytest.raises(ProblemError, match=r"W, shape \(2, 4, 4\), is a batch.*Solve one by one"):
        solve(graphs, 4)


@pytest.mark.parametrize("size", [5e-324, 1e-308, 1.0, 1e300])
def test_bounds_of_tiny_and_huge_weights(size):
    """All weights equal, at both ends of float64, without a warning."""
    W = np.full((8, 8), -size)
    flat = problem_of(W, 3).flatten()
    with np.errstate(all="raise", under="ignore"):
        for bound in (degree_bound, load_bound, plane_bound):
            assert -math.inf < float(bound(flat)) <= -9 * size
    assert solve(problem_of(W, 3), method="annealing").indices.size == 3
