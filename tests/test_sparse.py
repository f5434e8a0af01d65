"""Sparse W: the choices and bounds of the dense methods from the edges alone, and bad input that names itself."""

import itertools
import math
import time

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import grace_opt
from grace_opt import ProblemError, Status, bounds, instances, solve
from grace_opt.bounds.sparse import degree_bound, load_bound, plane_bound
from grace_opt.cli.app import app
from grace_opt.instances import generators
from grace_opt.kernels.annealing.trial import cpu as annealing_trial
from grace_opt.kernels.sparse.cpu import heap as heaps
from grace_opt.kernels.sparse.trial import cpu as sparse_trial
from grace_opt.problem import Problem, SparseWeights
from grace_opt.run import Run
from tests import oracle

SPARSE = ["mies", "drop_greedy", "think", "random", "local_search", "tabu", "annealing", "portfolio"]


def problem_of(W, k, protected=()):
    """A sparse problem however small, which `Problem.of` would make dense."""
    weights, integer = SparseWeights.of(sp.csr_array(W))
    made = Problem.of(weights, k, protected=list(protected) or None)
    return Problem(made.W, made.k, made.candidates, made.k_max, made.backend, integer)


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
        assert sparse.problem.weights is not None
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


@pytest.mark.parametrize("method", ["tabu", "annealing", "portfolio"])
@settings(max_examples=40)
@given(drawn=graphs())
def test_searches_find_the_optimum_of_small_graphs(method, drawn):
    W, k, protected = drawn
    sol = solve(problem_of(W, k, protected), method=method)
    assert float(sol.objective) == oracle.optimum(W, k, protected)


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
        order.append(int(heap.items[0]))
        heaps.take_out(heap, order[-1])
    assert order == sorted(keys, key=lambda v: (keys[v], v))


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
    assert torch.equal(sparse.problem.W._to_dense(), dense.problem.W)


@pytest.mark.parametrize("method", SPARSE)
@pytest.mark.parametrize("k", [0, 1, 995])
def test_every_size_and_isolated_vertices(method, k):
    """Only 30 of 1000 vertices have edges; five are protected."""
    W = sp.lil_array((1000, 1000))
    W[:30, :30] = -1.0
    W[5, 5] = 0.0
    options = {"sweeps": 2} if method == "annealing" else {"iterations": 50} if method in ("tabu", "portfolio") else {}
    sol = solve(W, k, method, protected=range(995, 1000), **options)
    assert sol.problem.weights is not None
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


def test_other_bad_input():
    with pytest.raises(ProblemError, match=r"\(1000, 1001\)"):
        Problem.of(sp.coo_array((1000, 1001)), 1)
    big = sp.coo_array((np.full(4, 2**52), ([0, 0, 1, 1], [1, 1, 0, 0])), shape=(1000, 1000))
    with pytest.raises(ProblemError, match=r"9007199254740992|2\*\*53|exact"):
        Problem.of(sp.coo_array((big.data * 2, big.coords), shape=big.shape), 1)
    with pytest.raises(ProblemError, match="k"):
        solve(random_graph(1000), 1001)


def test_nothing_becomes_a_tensor_silently(monkeypatch):
    """With 1 GiB free, 20,000 vertices are no problem for methods that take edges, and named by all others."""
    monkeypatch.setattr("grace_opt.kernels.weights.free_memory", lambda: 2.0**30)
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
    with pytest.raises(grace_opt.OptionError, match="cold=2 is above hot=1"):
        solve(W, 100, "annealing", hot=1.0, cold=2.0)
    with pytest.raises(grace_opt.OptionError, match="start from itself"):
        solve(W, 100, "annealing", start="annealing")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["local_search", "tabu", "annealing", "portfolio"])
def test_limits_are_kept(method):
    problem = Problem.of(random_graph(200_000, seed=6), 20_000)
    solve(problem, method=method, time_limit=0.2)  # loads what is compiled
    began = time.perf_counter()
    sol = solve(problem, method=method, time_limit=1.0)
    assert time.perf_counter() - began < 1.0 * 1.1 + 0.2 + 0.5  # 0.5: the machine may be busy
    assert sol.verify()
    assert sol.status in (Status.LIMIT, Status.FEASIBLE)


@pytest.mark.parametrize("method", ["local_search", "tabu", "annealing", "portfolio"])
def test_targets_patience_and_callbacks(method):
    problem = Problem.of(random_graph(1000, seed=7), 100)
    best = float(solve(problem, method="local_search").objective)
    sol = solve(problem, method=method, target=best, time_limit=20.0)
    assert sol.status is Status.FEASIBLE
    assert float(sol.objective) <= best
    began = time.perf_counter()
    solve(problem, method=method, patience=0.1)
    assert time.perf_counter() - began < 10
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


def test_a_graph_of_networkx_keeps_its_names():
    nx = pytest.importorskip("networkx")
    graph = nx.barabasi_albert_graph(2000, 3, seed=0)
    graph = nx.relabel_nodes(graph, {i: f"person {i}" for i in graph})
    sol = solve(graph, 20, "annealing", maximize=True, required=["person 1999"], protected=["person 0"], certify=True)
    assert sol.problem.weights is not None
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


def test_scipy_s_files_with_k_and_bad_ones(tmp_path):
    W = random_graph(1000, seed=9)
    for layout in ("csr", "csc", "coo"):
        sp.save_npz(tmp_path / "w.npz", W.asformat(layout))
        assert (instances.read(tmp_path / "w.npz").W != W).nnz == 0
    instances.write(tmp_path / "k.npz", W, 7)
    assert instances.read(tmp_path / "k.npz").k == 7
    assert (sp.load_npz(tmp_path / "k.npz") != W).nnz == 0
    parts = {"format": b"csr", "shape": (1000, 1000), "data": W.data, "indices": W.indices + 500, "indptr": W.indptr}
    np.savez(tmp_path / "bad.npz", **parts)
    with pytest.raises(ProblemError, match=r"cannot be read as \.npz"):
        instances.read(tmp_path / "bad.npz")
    sp.save_npz(tmp_path / "dia.npz", sp.dia_array(np.eye(5)))
    with pytest.raises(ProblemError, match="as dia: save it as csr, csc or coo"):
        instances.read(tmp_path / "dia.npz")
    with pytest.raises(ProblemError, match=r"\.mtx cannot store k"):
        instances.write(tmp_path / "w.mtx", W, 7)
