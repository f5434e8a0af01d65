"""drop_greedy, beam and the cost path of greedy: against the plainest versions, and against what they promise."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import grace_opt
from grace_opt import Status, solve
from grace_opt.cli.app import app
from grace_opt.kernels._shared import threads
from grace_opt.kernels.solve import completion
from grace_opt.kernels.solve.completion.cpu import complete
from grace_opt.kernels.solve.greedy import cpu as compiled_greedy
from grace_opt.kernels.solve.greedy import reference, removal_scores
from grace_opt.run import Run
from grace_opt.solvers import beam as beam_module
from grace_opt.testing import batches, check_solution, check_solver, instance, instances
from tests import oracle

GREEDY = {"mies": oracle.mies, "drop_greedy": oracle.drop_greedy}


@given(instances())
def test_drop_greedy_is_the_oracle(drawn):
    W, k, protected = drawn
    sol = solve(W, k, "drop_greedy", protected=protected)
    assert sol.indices.tolist() == oracle.drop_greedy(W.tolist(), k, protected)


@pytest.mark.slow
@given(instances(max_n=12))
def test_every_drop_is_the_best_one(drawn):
    W, _, protected = drawn
    order = [i for i in solve(W, 0, "drop_greedy", protected=protected, path=True).stats["order"].tolist() if i >= 0]
    tolerance = 1e-12 * len(W) * max(np.abs(W).sum(), 1e-300)
    for size in range(len(order), 0, -1):
        S = set(order[:size])
        best = min(oracle.objective(W, S - {i}) for i in S)
        assert oracle.objective(W, S - {order[size - 1]}) <= best + tolerance


def test_drop_greedy_drops_the_lowest_of_equals():
    assert solve(np.ones((6, 6)), 2, "drop_greedy", protected=[5]).indices.tolist() == [3, 4]
    assert solve(np.ones((5, 300, 300)), 3, "drop_greedy").indices.tolist() == [[297, 298, 299]] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_drop_greedy_compiled_is_the_reference(dtype):
    g = torch.Generator().manual_seed(0)
    G = torch.randn(6, 70, 70, generator=g, dtype=dtype)
    W, candidates = G @ G.mT, torch.rand(6, 70, generator=g) < 0.9
    W = (W + W.mT) / 2
    scores = removal_scores(W, candidates)
    k = torch.tensor([0, 1, 20, 30, 40, 50])
    order = np.full((6, 50), -1, dtype=np.int64)
    mask = np.zeros((6, 70), dtype=np.bool_)
    compiled_greedy.greedy(W.numpy(), scores.numpy(), candidates.numpy(), k.numpy(), order, mask, np.zeros(6))
    assert scores.dtype == torch.float64
    expected = reference.greedy_order(W, scores, k, 50)
    assert (order.tolist(), mask.tolist()) == (expected.order.tolist(), expected.mask.tolist())


def test_drop_greedy_keeps_small_weights_apart_beside_huge_ones():
    """Sums in float32 would be lost beside 1e10; the last drops are decided by differences of 1e-3."""
    W = torch.diag(torch.tensor([1e10, 3e-3, 1e-3, 2e-3]))
    W[0, 1:] = W[1:, 0] = 1.0
    assert solve(W, 1, "drop_greedy").indices.tolist() == [2]


def test_each_wins_where_its_page_says():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(60, 4))
    far = -np.linalg.norm(points[:, None] - points[None], axis=-1)  # maximum diversity
    attention = np.stack([instance("attention", 40, seed) for seed in range(20)])
    assert float(solve(far, 20, "drop_greedy").objective) < float(solve(far, 20, "mies").objective)
    assert solve(attention, 20, "drop_greedy").objective.mean() > solve(attention, 20, "mies").objective.mean()


@pytest.mark.slow
@pytest.mark.parametrize("method", GREEDY)
@given(drawn=instances())
def test_path_is_the_answer_for_every_k(method, drawn):
    W, k, protected = drawn
    sol = solve(W, k, method, protected=protected, path=True)
    assert sol.indices.tolist() == solve(W, k, method, protected=protected).indices.tolist()
    order, path = sol.stats["order"], sol.stats["path"]
    free = len(W) - len(protected)
    assert (path.shape, path.dtype, order.shape, order.dtype) == ((len(W) + 1,), np.float64, (len(W),), np.int64)
    for size in range(free + 1):
        alone = solve(W, size, method, protected=protected)
        assert sorted(order[:size].tolist()) == GREEDY[method](W.tolist(), size, protected)
        assert abs(path[size] - float(alone.objective)) <= 1e-12 * np.abs(W[np.ix_(alone.mask, alone.mask)]).sum()
    assert np.isinf(path[free + 1 :]).all()
    assert (order[free:] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("method", GREEDY)
@settings(max_examples=50)
@given(drawn=batches(), compiled=st.booleans())
def test_path_of_a_batch_is_the_path_of_each(method, drawn, compiled):
    W, k, protected = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "COMPILE_FROM", 0 if compiled else 10**12)
        together = solve(W, k, method, protected=protected, path=True)
    check_solution(W, k, together, protected)
    for b in range(len(W)):
        alone = solve(W[b], int(k[b]), method, protected=protected[b], path=True)
        assert (together.mask[b] == alone.mask).all()
        for name in ("order", "path"):
            assert together.stats[name][b].tolist() == alone.stats[name].tolist()


def test_path_has_the_batch_shape_and_the_kind_of_W():
    W = torch.eye(5).expand(2, 3, 5, 5)
    stats = solve(W, 2, path=True, protected=[4]).stats
    assert isinstance(stats["path"], torch.Tensor)
    assert stats["path"].shape == (2, 3, 6)
    assert stats["path"][1, 2].tolist() == [0, 1, 2, 3, 4, float("inf")]
    assert stats["order"][0, 1].tolist() == [0, 1, 2, 3, -1]
    assert set(solve(W, 2).stats) == {"time"}


def test_path_is_summed_in_float64_whatever_W_is():
    W = torch.full((300, 300), 0.1)
    exact = float(W[0, 0]) * np.arange(301.0) ** 2
    for method in GREEDY:
        assert np.allclose(solve(W, 1, method, path=True).stats["path"], exact, rtol=1e-12, atol=0)


def test_path_goes_to_json_with_null_where_infeasible(tmp_path):
    np.save(tmp_path / "W.npy", np.eye(3))
    arguments = ["solve", str(tmp_path / "W.npy"), "-k", "1", "--protected", "0", "--option", "path=true", "--json"]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    (solution,) = answers if isinstance(answers := json.loads(answer.stdout), list) else [answers]
    assert solution["stats"]["path"] == [0.0, 1.0, 2.0, None]


@pytest.mark.slow
@settings(max_examples=150)
@given(instances(max_n=8), st.integers(1, 4), st.integers(0, 3))
def test_beam_is_the_oracle(drawn, width, lookahead):
    W, k, protected = drawn
    sol = solve(W, k, "beam", protected=protected, width=width, lookahead=lookahead)
    expected = oracle.objective(W, oracle.beam(W.tolist(), k, width, lookahead, protected))
    assert abs(float(sol.objective) - expected) <= 1e-12 * np.abs(W).sum()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "lookahead"), [(1, 1), (1, 2), (2, 0), (2, 1), (4, 1), (2, 2), (5, 0)])
def test_beam_is_the_oracle_where_it_goes_astray(width, lookahead):
    """Beyond enumeration's sizes a beam may end worse than MIES, or than a completion that it once saw."""
    W = np.stack([instance(kind, 18, seed) for kind in ("attention", "wishart", "indefinite") for seed in range(16)])
    sol = solve(W, 9, "beam", width=width, lookahead=lookahead)
    expected = [oracle.objective(w, oracle.beam(w.tolist(), 9, width, lookahead)) for w in W]
    assert np.allclose(sol.objective, expected, rtol=0, atol=1e-12 * np.abs(W).sum((1, 2)))


@pytest.mark.slow
@given(instances(max_n=12))
def test_beam_of_width_1_is_mies(drawn):
    W, k, protected = drawn
    values = itertools.count()  # the first set to be valued, the beam's own, always beats MIES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam_module, "evaluate", lambda W, mask: torch.full((len(W),), next(values)).double())
        narrow = solve(W, k, "beam", protected=protected, width=1, lookahead=0)
    assert narrow.indices.tolist() == oracle.mies(W.tolist(), k, protected)


@pytest.mark.slow
@given(batches(max_n=12), st.integers(1, 5), st.integers(0, 3), st.sampled_from([np.float32, np.float64]))
def test_beam_is_never_worse_than_mies(drawn, width, lookahead, dtype):
    W, k, protected = drawn
    W = (W / np.maximum(np.abs(W).max((1, 2), keepdims=True), 1e-300)).astype(dtype)
    sol = solve(W, k, "beam", protected=protected, width=width, lookahead=lookahead)
    check_solution(W, k, sol, protected)
    assert (sol.objective <= solve(W, k, protected=protected).objective + 1e-12 * len(W[0]) ** 2).all()


@pytest.mark.slow
@given(instances(max_n=8))
def test_a_beam_that_keeps_every_set_is_exact(drawn):
    W, k, protected = drawn
    sol = solve(W, k, "beam", protected=protected, width=70, lookahead=0)  # C(8, 4) = 70
    assert abs(float(sol.objective) - oracle.optimum(W, k, protected)) <= 1e-12 * np.abs(W).sum()


def test_a_wider_beam_finds_more_on_attention():
    W = np.stack([instance("attention", 40, seed) for seed in range(30)])
    narrow, wide, ahead = (
        solve(W, 20, "beam", width=width, lookahead=ahead).objective for width, ahead in ((1, 0), (16, 0), (16, 4))
    )
    assert (narrow - wide).sum() > 0
    assert (narrow - ahead).sum() > 0
    assert (ahead <= narrow).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"width": 1, "lookahead": 0}, {"width": 3, "lookahead": 0}, {"width": 2, "lookahead": 2}]
)
def test_beam_conforms_with_other_options(options):
    check_solver("beam", sizes=(1, 3, 6), **options)


def test_beam_in_small_parts_is_the_same(monkeypatch):
    W = np.stack([instance(kind, 12, 3) for kind in ("wishart", "attention", "indefinite", "ties", "integer")])
    k = [1, 3, 12, 5, 0]
    whole = solve(W, k, "beam", width=4, lookahead=2)
    monkeypatch.setattr(beam_module, "MAX_BYTES", 1)
    assert (solve(W, k, "beam", width=4, lookahead=2).mask == whole.mask).all()


def test_beam_out_of_time_answers_with_mies():
    W = np.stack([instance("attention", 30, seed) for seed in range(3)])
    sol = solve(W, [0, 10, 20], "beam", time_limit=1e-9)
    assert (sol.mask == solve(W, [0, 10, 20]).mask).all()
    assert [s is Status.LIMIT for s in sol.status] == [False, True, True]


def test_beam_cut_short_keeps_what_was_done(monkeypatch):
    W = np.stack([instance("attention", 30, seed) for seed in range(2)])
    clock = iter([True] * 4 + [False])
    monkeypatch.setattr(Run, "has_time", lambda self, seconds: next(clock))
    sol = solve(W, [4, 20], "beam")
    assert [s is Status.LIMIT for s in sol.status] == [False, True]
    assert sol.stats["iterations"] == 4
    monkeypatch.undo()
    assert (sol.mask[0] == solve(W[0], 4, "beam").mask).all()


@settings(max_examples=60)
@given(batches(max_n=12), st.sampled_from([torch.float32, torch.float64]))
def test_compiled_completions_are_the_reference(drawn, dtype):
    W, k, protected = drawn
    W = torch.from_numpy(W / np.maximum(np.abs(W).max((1, 2), keepdims=True), 1e-300)).to(dtype)
    owner = torch.arange(len(W)).repeat_interleave(2)
    scores = W.diagonal(dim1=-2, dim2=-1).masked_fill(torch.from_numpy(protected), torch.inf)[owner].contiguous()
    need, width = torch.from_numpy(k)[owner], int(k.max())
    order, cost = completion.reference.completions(W, owner, scores, need, width)
    compiled = np.full((len(owner), width), -1, dtype=np.int64), np.zeros(len(owner))
    complete(W.numpy(), owner.numpy(), scores.numpy().copy(), need.numpy(), *compiled)
    assert order.tolist() == compiled[0].tolist()
    assert cost.tolist() == compiled[1].tolist()
    assert order[::2].tolist() == reference.greedy_order(W, scores[::2], need[::2], width).order.tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "beam", "width": 0},
        {"method": "beam", "width": 2.0},
        {"method": "beam", "lookahead": -1},
        {"method": "beam", "lookahead": True},
        {"method": "mies", "path": 1},
        {"method": "drop_greedy", "path": "yes"},
    ],
)
def test_wrong_options_are_refused(wrong):
    name = next(key for key in wrong if key != "method")
    with pytest.raises(grace_opt.errors.OptionError, match=f"{name}=.*: give"):
        solve(np.eye(3), 1, **wrong)
