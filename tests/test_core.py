"""Problem, solve, compare, Solution: inputs of every kind give the same answer, and results mean what they say."""

import dataclasses

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st

import grace_opt
from grace_opt import Problem, Status, solve
from grace_opt.testing import batches, instance, instances
from tests import oracle


@pytest.mark.slow
@given(instances())
def test_numpy_torch_sparse_and_lists_agree(drawn):
    W, k, protected = drawn
    answers = [
        solve(form, k, "local_search", protected=protected).indices
        for form in (W, W.tolist(), torch.from_numpy(W), sp.csr_array(W), torch.from_numpy(W).to_sparse())
    ]
    for answer in answers[1:]:
        assert np.asarray(answer).tolist() == answers[0].tolist()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8]
)
def test_torch_dtypes(dtype):
    W = torch.tensor([[4, 1, 2], [1, 3, 0], [2, 0, 5]]).to(dtype)
    sol = solve(W, 2)
    assert isinstance(sol.mask, torch.Tensor)
    assert sol.mask.dtype == torch.bool
    assert sol.objective.dtype == torch.float64
    assert sol.indices.dtype == torch.int64
    assert sol.indices.tolist() == [1, 2]
    assert float(sol.objective) == 8.0


@pytest.mark.parametrize("dtype", [np.float16, ">f8", np.longdouble, np.int8, np.uint64])
def test_numpy_dtypes_and_read_only(dtype):
    W = np.array([[4, 1, 2], [1, 3, 0], [2, 0, 5]]).astype(dtype)
    W.flags.writeable = False
    assert solve(W, 2).indices.tolist() == [1, 2]


def test_float16_sums_do_not_overflow():
    W = torch.full((64, 64), 60000.0, dtype=torch.float16)
    assert float(solve(W, 64).objective) == 60000.0 * 64 * 64


@pytest.mark.parametrize("scale", [1e38, 1e-44])
def test_weights_at_the_ends_of_float32(scale):
    W = np.array([[3, 2.0, 1], [2, 3, -1], [1, -1, 3]]) * scale
    sol = solve(W.astype(np.float32), 2, "local_search", certify=True)
    assert sol.indices.tolist() == [1, 2]
    assert np.isfinite(sol.objective)


def test_networkx_gives_the_subgraphs_weight_and_labels():
    g = nx.Graph()
    g.add_node("a", weight=5.0)
    g.add_weighted_edges_from([("a", "b", 1.0), ("b", "c", 2.0), ("a", "c", -3.0), ("c", "c", 0.5)])
    sol = solve(g, 2, "exhaustive", protected=["a"])
    assert sol.labels == ["b", "c"]
    chosen = g.subgraph(sol.labels)
    assert float(sol.objective) == chosen.size(weight="weight") == 2.5


def test_multigraph_edges_add_up():
    g = nx.MultiGraph([(0, 1), (0, 1)])
    assert float(solve(g, 2).objective) == 2.0


@pytest.mark.slow
@given(batches())
def test_leading_dimensions_and_status_shapes(drawn):
    W, k, protected = drawn
    B, n = protected.shape
    sol = solve(W.reshape(B, 1, n, n), k.reshape(B, 1), protected=protected.reshape(B, 1, n), certify=True)
    assert sol.mask.shape == (B, 1, n)
    assert sol.objective.shape == sol.gap.shape == sol.lower_bound.shape == sol.status.shape == (B, 1)
    assert sol.indices.shape == (B, 1, k.max())
    for b in range(B):
        alone = solve(W[b], int(k[b]), protected=protected[b])
        assert (sol.mask[b, 0] == alone.mask).all()
    sol.verify()


def test_k_zero_and_k_n_are_optimal():
    empty, full = solve(np.eye(3), 0), solve(np.eye(3), 3)
    assert (empty.status, full.status) == (Status.OPTIMAL, Status.OPTIMAL)
    assert (float(empty.objective), float(empty.gap), empty.indices.tolist()) == (0.0, 0.0, [])
    assert float(full.objective) == 3.0
    assert solve(np.eye(3), 2, protected=[1]).status is Status.OPTIMAL  # a forced choice


def test_uncertified_is_minus_infinity_and_certified_is_not():
    W = instance("wishart", 10, 3)
    plain, certified = solve(W, 4), solve(W, 4, certify=True)
    assert plain.lower_bound == -np.inf
    assert plain.gap == np.inf
    assert plain.status is Status.FEASIBLE
    assert 0 < certified.lower_bound <= certified.objective


def test_integer_weights_are_proved_within_one_step():
    W = np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0]])
    assert solve(W, 2, certify=True).status is Status.OPTIMAL  # f = 2; any bound above 1 proves it


def test_slightly_asymmetric_input_is_made_symmetric():
    W = instance("wishart", 6, 0)
    W[0, 1] *= 1 + 2e-16
    p = Problem.of(W, 2)
    assert (p.W.mT == p.W).all()
    assert grace_opt.symmetrize(np.array([[0, 1.0], [0, 0]])).tolist() == [[0, 0.5], [0.5, 0]]


def test_solve_takes_a_problem_and_nothing_twice():
    p = Problem.of(np.diag([3.0, 1.0, 2.0]), 2, protected=[1])
    assert solve(p).indices.tolist() == [0, 2]
    with pytest.raises(grace_opt.errors.OptionError, match="holds k"):
        solve(p, 2)


def test_check_false_gives_the_same_answer():
    W = torch.from_numpy(np.stack([instance("attention", 20, s) for s in range(5)])).float()
    a, b = solve(W, 8), solve(W, 8, check=False)
    assert (a.mask == b.mask).all()
    torch.testing.assert_close(a.objective, b.objective, rtol=1e-5, atol=0)


def test_verify_catches_a_doctored_solution():
    W = instance("wishart", 8, 0)
    sol = solve(W, 3, certify=True).verify()
    wrong = sol.mask.copy()
    wrong[:] = False
    changes = [{"objective": sol.objective * 0.999}, {"lower_bound": sol.objective * 1.1}, {"mask": wrong}]
    changes += [{"objective": np.float64("nan")}, {"lower_bound": np.float64("nan")}]
    for change in changes:
        with pytest.raises(grace_opt.errors.SolverError):
            dataclasses.replace(sol, **change).verify()
    with pytest.raises(grace_opt.errors.SolverError, match="no problem"):
        dataclasses.replace(sol, problem=None).verify()


@pytest.mark.slow
def test_compare_runs_all_that_can():
    W = instance("wishart", 40, 1)
    names = [s.method for s in grace_opt.compare(W, 20)]
    assert "mies" in names
    assert "exhaustive" not in names  # C(40, 20) is refused, and only skipped because it was not asked for
    with pytest.raises(grace_opt.errors.SolverError):
        grace_opt.compare(W, 20, ["exhaustive"])
    a, b = grace_opt.compare(W, 20, ["local_search", "mies"], options={"local_search": {"start": "think"}})
    assert a.options["start"] == "think"
    assert b.method == "mies"


@pytest.mark.slow
@given(instances(), st.floats(-5, 5))
def test_adding_a_constant_shifts_every_objective(drawn, c):
    W, k, _ = drawn
    W = W / max(np.abs(W).max(), 1e-300)
    a, b = solve(W, k, "exhaustive"), solve(W + c, k, "exhaustive")
    assert float(b.objective) == pytest.approx(float(a.objective) + c * k * k, abs=1e-9)


@given(instances())
def test_objective_is_the_oracles(drawn):
    W, k, protected = drawn
    sol = solve(W, k, protected=protected)
    assert float(sol.objective) == pytest.approx(
        oracle.objective(W, sol.indices), abs=1e-12 * max(np.abs(W).sum(), 1e-300)
    )


@given(instances(), st.sampled_from(["mies", "exhaustive"]), st.booleans())
def test_names_of_scipy_mean_what_they_mean_there(drawn, method, maximize):
    W, k, protected = drawn
    sol = solve(W, k, method, protected=protected, maximize=maximize)
    assert sol.x.dtype == np.float64
    assert sol.x.nonzero()[0].tolist() == sol.indices.tolist()
    assert sol.fun is sol.objective
    assert float(sol.fun) == pytest.approx(oracle.objective(W, sol.x.nonzero()[0]), abs=1e-12 * np.abs(W).sum())
    assert sol.success is True
    assert sol.message == sol.status.value


def test_success_of_a_batch_is_that_of_each_instance():
    sol = solve([np.eye(3), np.eye(3)[::-1].copy()], [1, 2], "exhaustive")
    stopped = dataclasses.replace(sol, status=np.array([grace_opt.Status.OPTIMAL, grace_opt.Status.LIMIT]))
    assert sol.success.tolist() == [True, True]
    assert stopped.success.tolist() == [True, False]
    assert stopped.message.tolist() == [grace_opt.Status.OPTIMAL.value, grace_opt.Status.LIMIT.value]
    assert sol.x.shape == (2, 3)
    one = solve(torch.eye(3), 1)
    assert one.x.dtype == torch.float64
    assert torch.equal(one.x.bool(), one.mask)
