"""W in factors: the same answers as the formed W, valid bounds, and errors by name; formed, and never formed."""

from __future__ import annotations

import itertools
import math
import types
from fractions import Fraction

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import grace_opt
from grace_opt import FactoredWeights, Problem
from grace_opt.bounds import factored as bounds
from grace_opt.bounds.factored import continuous_bound, factored_bound
from grace_opt.errors import OptionError, ProblemError
from grace_opt.kernels.solve.columns import source
from grace_opt.kernels.solve.columns.reference.exchange import ExchangeState
from grace_opt.problem.reduction import Reduction
from tests import oracle
from tests.clock import Taken

SMALL = 512


@pytest.fixture(params=["formed", "never formed"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """W is formed where it is small, or columns of it alone, as where it is large; the same for all draws."""
    if request.param == "never formed":
        monkeypatch.setattr(source, "BLOCK_BYTES", SMALL)


draws = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


def formed(terms, diagonal=None):
    """W by its definition, entry by entry."""
    first = next(np.asarray(pair[0]) for term in terms for pair in term if pair is not None)
    n = first.shape[-1]
    W = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            for term in terms:
                sides = [
                    1.0 if pair is None else float(np.asarray(pair[0])[:, a] @ np.asarray(pair[1])[:, b])
                    for a, b in ((i, j), (j, i))
                    for pair in term
                ]
                W[i, j] += (sides[0] * sides[1] + sides[2] * sides[3]) / 2
    if diagonal is not None:
        W[range(n), range(n)] = diagonal
    return W


def exactly(terms, diagonal=None):
    """W of these floats in rational numbers."""
    whole = [
        [None if p is None else [[[Fraction(float(x)) for x in r] for r in f] for f in p] for p in t] for t in terms
    ]

    def sides(term, i, j):
        return math.prod(sum(a[i] * c[j] for a, c in zip(*pair, strict=True)) for pair in term if pair is not None)

    n = len(next(pair[0][0] for term in whole for pair in term if pair is not None))
    W = [[sum(sides(t, i, j) + sides(t, j, i) for t in whole) / 2 for j in range(n)] for i in range(n)]
    for i, own in enumerate([] if diagonal is None else diagonal):
        W[i][i] = Fraction(float(own))
    return W


@st.composite
def factored(draw, whole=True):
    """Terms and a diagonal, or none: whole numbers or others; one of several kinds."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, d, e = draw(st.integers(2, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 12))
    make = (lambda *s: rng.integers(-3, 4, s)) if whole else (lambda *s: rng.normal(size=s))
    A, C, B, D = make(d, n), make(d, n), make(e, n), make(e, n)
    kinds = [[((A, A), (B, B))], [((A, C), (B, B))], [((A, A), (B, D))], [((A, C), (B, D)), ((B, B), None)]]
    terms = kinds[draw(st.integers(0, 3))]
    return terms, make(n) if draw(st.booleans()) else None, draw(st.integers(0, n))


@pytest.mark.slow
@given(factored(whole=False), st.integers(0, 2**32 - 1))
def test_its_parts_are_those_of_the_formed_w(drawn, seed):
    terms, diagonal, k = drawn
    W, expected = FactoredWeights(terms, diagonal=diagonal), formed(terms, diagonal)
    rng = np.random.default_rng(seed)
    x, mask = rng.normal(size=W.n), np.isin(np.arange(W.n), rng.permutation(W.n)[:k])
    close = {"rtol": 1e-10, "atol": 1e-10}
    np.testing.assert_allclose(W.dense("a test"), expected, **close)
    np.testing.assert_allclose(W.diagonal(), expected.diagonal(), **close)
    np.testing.assert_allclose(W.columns(torch.tensor([W.n - 1, 0])), expected[:, [-1, 0]], **close)
    np.testing.assert_allclose(W.times(torch.from_numpy(x)), expected @ x, **close)
    inside = np.ix_(mask, mask)
    assert float(W.objective(torch.from_numpy(mask))) == pytest.approx(expected[inside].sum(), rel=1e-10, abs=1e-10)
    assert float(W.magnitude(torch.from_numpy(mask))) >= np.abs(expected[inside]).sum() * (1 - 1e-12)
    np.testing.assert_allclose(W.negated().dense("a test"), -expected, **close)
    left = np.where(mask[:, None] | mask, 0.0, expected)
    np.testing.assert_allclose(W.without(torch.from_numpy(mask)).dense("a test"), left, **close)
    off = np.abs(expected - np.diag(expected.diagonal()))
    assert (off <= np.outer(W.lengths(), W.lengths()) * (1 + 1e-12) + 1e-300).all()


@pytest.mark.slow
@draws
@given(giant=st.sampled_from([1.0, 1e3, 1e6, 1e9]), signed=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_what_node_weights_replace_takes_no_digits_along(block, giant, signed, seed):
    """Vectors of length `giant`, nearly orthogonal: beside their squares, W is small."""
    rng, n, k = np.random.default_rng(seed), 7, 3
    A, own = giant * np.eye(n) + rng.normal(size=(n, n)) / giant, rng.random(n)
    A = A if signed else np.abs(A)
    terms = [((A, A), None)]
    W, exact, sizes = (
        FactoredWeights(terms, diagonal=own),
        exactly(terms, own),
        exactly([((abs(A), abs(A)), None)], own),
    )
    share = W.additions * Fraction(source.EPS)
    for i, (row, size) in enumerate(zip(W.times(torch.ones(n)).tolist(), W.magnitude_rows().tolist(), strict=True)):
        assert sum(sizes[i]) <= Fraction(size) <= 3 * sum(sizes[i])
        assert abs(Fraction(row) - sum(exact[i])) <= share * Fraction(size)
    best = math.inf
    for S in itertools.combinations(range(n), k):
        mask = torch.from_numpy(np.isin(range(n), S))
        f, size = (sum(of[i][j] for i in S for j in S) for of in (exact, sizes))
        assert size <= Fraction(float(W.magnitude(mask))) <= 3 * size
        assert abs(Fraction(float(W.objective(mask))) - f) <= share * Fraction(float(W.magnitude(mask)))
        best = min(best, f)
    dense = [list(map(float, row)) for row in exact]
    assert grace_opt.solve(W, k, "drop_greedy").indices.tolist() == oracle.drop_greedy(dense, k)
    for method in ("random", "mies", "exhaustive"):
        found = grace_opt.solve(W, k, method, certify=True, seed=seed)
        optimal = abs(found.objective - best) <= 1e-9 * abs(best)
        assert found.lower_bound <= best + share * 3 * sum(map(sum, sizes))
        assert optimal or (method != "exhaustive" and found.status.name != "OPTIMAL")
    compared = grace_opt.compare(W, k, ["random", "exhaustive"])
    assert float(compared.best_bound) == pytest.approx(float(best), rel=1e-6, abs=1e-6)


def test_what_is_replaced_is_left_out_block_by_block(monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 128)  # one column, or two of four
    x = 1e9 * np.eye(4) + np.arange(16).reshape(4, 4)
    own, everyone = np.array([0.4, 0.3, 0.1, 0.2]), torch.ones(4, dtype=torch.bool)
    W = FactoredWeights([((x, x), None)], diagonal=own)
    expected = formed([((x, x), None)], own)
    assert float(W.objective(everyone)) == pytest.approx(expected.sum(), rel=1e-12)
    assert float(W.magnitude(everyone)) == pytest.approx(expected.sum(), rel=1e-12)
    np.testing.assert_allclose(W.times(everyone), expected.sum(0), rtol=1e-12)


@pytest.mark.slow
@draws
@given(factored(), st.integers(0, 8))
def test_whole_numbers_give_the_answers_of_the_formed_w(block, drawn, protected):
    terms, diagonal, k = drawn
    W, dense = FactoredWeights(terms, diagonal=diagonal), formed(terms, diagonal)
    out = [protected] if protected < W.n and k < W.n else []
    for method, expected in (("mies", oracle.mies), ("drop_greedy", oracle.drop_greedy), ("think", oracle.think)):
        found = grace_opt.solve(W, k, method, protected=out)
        assert found.indices.tolist() == expected(dense.tolist(), k, out)
        assert found.objective == oracle.objective(dense, found.indices)
        assert found.problem.integer
    found = grace_opt.solve(W, k, "mies", maximize=True)
    assert found.indices.tolist() == oracle.mies((-dense).tolist(), k)


@pytest.mark.slow
@settings(max_examples=15)
@given(factored(whole=False), st.booleans())
def test_bounds_are_bounds(drawn, protect):
    terms, diagonal, k = drawn
    out = [0] if protect and k < np.asarray(terms[0][0][0]).shape[-1] else []
    W, best = FactoredWeights(terms, diagonal=diagonal), oracle.optimum(formed(terms, diagonal), k, out)
    problem = Problem.of(W, k, protected=out).flatten()
    room = 1e-13 * float(W.magnitude(torch.ones(W.n, dtype=torch.bool)))
    for bound in (continuous_bound, factored_bound, grace_opt.bounds.certificate):
        assert float(bound(problem)) <= best + room
    other = Problem.of(W.negated(), k, protected=out).flatten()
    assert float(factored_bound(other)) <= -oracle.optimum(formed(terms, diagonal), k, out, maximize=True) + room


@pytest.mark.parametrize("size", [1e-150, 1e-100, 1.0, 1e100, 1e150])
def test_bounds_of_factors_of_very_different_size(size):
    x, y = size * np.array([[1.0, 2.0, 0.0]]), np.array([[1.0, 0.0, 3.0]]) / size
    found = grace_opt.solve(FactoredWeights([((x, y), None)]), 2, "exhaustive", certify=True)
    assert found.objective == pytest.approx(3.0)
    assert found.lower_bound == pytest.approx(3.0)
    assert float(continuous_bound(found.problem.flatten())) <= 3.0


@pytest.mark.parametrize("kind", range(4))
def test_parts_of_a_term_are_semidefinite_and_lie_below_it(kind):
    rng = np.random.default_rng(kind)
    A, C, B, D = (rng.normal(size=(3, 14)) * scale for scale in (1.0, 30.0, 0.1, 2.0))
    pairs = [((A, A), (B, B)), ((A, C), (B, B)), ((A, A), (B, D)), ((A, C), (B, D))][kind]
    (term,) = FactoredWeights([pairs]).terms
    rest = formed([pairs])
    for part in bounds._grams(term):
        assert part.is_gram
        rest -= part.sign * (part.A.mT @ part.C * (part.B.mT @ part.D)).numpy()
    values = np.linalg.eigvalsh(rest)
    assert values[0] > -1e-12 * np.abs(formed([pairs])).max()
    assert (kind == 3) == (values[-1] > 1e-9)  # nothing is given away but where no pair is shared


@pytest.mark.parametrize("seed", range(6))
def test_a_local_optimum_is_one_of_all_exchanges_not_only_of_promising_ones(monkeypatch, seed):
    monkeypatch.setattr(source, "BLOCK_BYTES", SMALL)
    rng = np.random.default_rng(seed)
    Q, K = rng.normal(size=(3, 40)), rng.normal(size=(2, 40))
    found = grace_opt.solve(FactoredWeights.product(Q, K), 20, "local_search", start="random")
    assert oracle.best_swap(formed([((Q, Q), (K, K))]), found.indices.tolist()) > -1e-9


def test_an_exchange_that_only_the_pair_s_own_weight_makes_good_is_found():
    W = FactoredWeights([((np.array([[10.0, 9.0]]), np.array([[10.0, 9.0]])), None)])
    taken = ExchangeState(W, torch.tensor([True, False]), torch.tensor([True, True]))
    assert float(taken.leave.min() + taken.enter.min()) > 0
    assert taken.improving(8, lambda: False).tolist() == [0, 1]
    assert taken.improving(8, lambda: True) is None
    taken.move(torch.tensor([False, True]))
    assert taken.improving(8, lambda: False).tolist() == []


def test_the_continuous_bound_is_tight_where_the_relaxation_is():
    Q = np.ones((1, 6))
    assert float(continuous_bound(Problem.of(FactoredWeights.product(Q, Q), 3).flatten())) == pytest.approx(
        9.0, rel=1e-4
    )
    K = np.diag([1.0, 2.0, 3.0, 4.0])  # W is diagonal: the relaxation's value, by Lagrange, is k² / Σ 1 / w
    value = float(continuous_bound(Problem.of(FactoredWeights.product(K, K), 1).flatten()))
    assert value == pytest.approx(1 / (1 + 1 / 16 + 1 / 81 + 1 / 256), rel=1e-2)


def test_a_certificate_proves_what_it_can(block):
    K = np.abs(np.random.default_rng(0).normal(size=(3, 12)))
    found = grace_opt.solve(FactoredWeights.product(np.eye(12), K), 4, "mies", certify=True)  # W is diagonal
    assert found.status is grace_opt.Status.OPTIMAL
    assert 0 < found.lower_bound <= found.objective
    found.verify()


@pytest.mark.slow
@draws
@given(factored(whole=False))
def test_searches_end_in_local_optima_no_worse_than_their_start(block, drawn):
    terms, diagonal, k = drawn
    W, dense = FactoredWeights(terms, diagonal=diagonal), formed(terms, diagonal)
    start = grace_opt.solve(W, k, "random")
    found = grace_opt.solve(W, k, "local_search", start=start.mask)
    assert found.objective <= start.objective
    room = 1e-11 * (1 + np.abs(dense).sum())
    assert oracle.best_swap(dense, found.indices.tolist()) >= -room
    better = grace_opt.solve(W, k, "tabu", start=found.mask, iterations=200)
    assert better.objective <= found.objective + room
    for each in (found, better):
        each.verify()


def test_a_window_of_all_vertices_finds_what_tabu_finds(monkeypatch):
    rng = np.random.default_rng(3)
    W = FactoredWeights.product(rng.normal(size=(4, 24)), rng.normal(size=(3, 24)))
    dense = grace_opt.solve(W.dense("a test").numpy(), 9, "exhaustive")
    monkeypatch.setattr(source, "BLOCK_BYTES", SMALL)
    monkeypatch.setattr("grace_opt.solvers.tabu.window_size", lambda: 24)
    assert grace_opt.solve(W, 9, "tabu", iterations=4000).objective == pytest.approx(dense.objective)
    both = grace_opt.solve(W, 9, "portfolio", iterations=1000)
    assert both.objective <= grace_opt.solve(W, 9, "mies").objective
    assert both.lower_bound <= both.objective


def test_a_batch_is_its_instances_and_torch_is_numpy(block):
    rng = np.random.default_rng(1)
    Q, K = rng.normal(size=(3, 5, 13)), rng.normal(size=(7, 13)).astype(np.float32)
    batch = FactoredWeights.product(Q, K)
    for method in ("mies", "drop_greedy", "local_search", "tabu", "random"):
        together = grace_opt.solve(batch, [3, 5, 7], method)
        tensors = grace_opt.solve(FactoredWeights.product(torch.from_numpy(Q), torch.from_numpy(K)), [3, 5, 7], method)
        assert isinstance(tensors.mask, torch.Tensor)
        assert isinstance(together.mask, np.ndarray)
        assert np.array_equal(tensors.mask, together.mask)
        for b, k in enumerate((3, 5, 7)):
            alone = grace_opt.solve(FactoredWeights.product(Q[b], K), k, method)
            assert np.array_equal(alone.mask, together.mask[b])
            assert alone.objective == together.objective[b]


def test_pieces_of_a_batch_get_their_own_start_and_all_statistics(monkeypatch):
    rng = np.random.default_rng(5)
    W = FactoredWeights.product(rng.integers(-3, 4, (4, 3, 10)), rng.integers(-3, 4, (4, 2, 10)))
    start = np.stack([np.isin(np.arange(10), rng.permutation(10)[:4]) for _ in range(4)])
    whole = [grace_opt.solve(W, 4, "local_search", start=start, max_steps=0), grace_opt.solve(W, 4, path=True)]
    monkeypatch.setattr(source, "BLOCK_BYTES", 8 * 10**2 * 3)  # three at a time, then one
    parts = [grace_opt.solve(W, 4, "local_search", start=start, max_steps=0), grace_opt.solve(W, 4, path=True)]
    assert np.array_equal(parts[0].mask, start)
    assert np.array_equal(whole[0].mask, start)
    monkeypatch.setattr(source, "BLOCK_BYTES", SMALL)
    parts.append(grace_opt.solve(W, 4, path=True))
    for each in parts[1:]:
        assert np.array_equal(each.stats["path"], whole[1].stats["path"])
        assert np.array_equal(each.stats["order"], whole[1].stats["order"])
    paths = [
        grace_opt.solve(each, 4, "drop_greedy", path=True).stats["path"] for each in (W, W.dense("a test").numpy())
    ]
    assert np.array_equal(*paths)


def test_all_instances_together_take_what_each_takes_alone():
    """The loop for GPUs, on the CPU."""
    from grace_opt.kernels.solve.columns.reference import greedy

    rng = np.random.default_rng(2)
    W = FactoredWeights.product(rng.integers(-3, 4, (3, 4, 11)), rng.integers(-3, 4, (3, 2, 11)))
    k = torch.tensor([2, 0, 9])
    for stop in (99, 4):
        calls = iter(range(1000))
        found, cut = greedy._together(W, W.diagonal().clone(), k, 9, lambda: float(next(calls) < stop))  # noqa: B023
        assert cut.tolist() == [False, False, stop == 4]
        alone, _ = greedy.greedy_order(W, W.diagonal(), k, 9, lambda: math.inf)
        first = 9 if stop == 99 else 4
        assert torch.equal(found.order[:, :first], alone.order[:, :first])
        assert found.mask.sum(-1).tolist() == [2, 0, 9]


@pytest.mark.parametrize("method", ["mies", "drop_greedy"])
@pytest.mark.parametrize("seconds", [1, 20, 60, 10**6])
def test_greedy_takes_blocks_if_time_is_short(method, seconds, monkeypatch):
    """By a clock on which every look takes a second, and one after the other more than there is."""
    from grace_opt.kernels.solve.columns.reference import greedy

    rng = np.random.default_rng(3)
    W = FactoredWeights.product(rng.normal(size=(3, 200)), rng.normal(size=(3, 200)))
    free, k = torch.arange(200)[None] >= 10, torch.tensor([60 if method == "mies" else 130])
    scores = W.diagonal() if method == "mies" else W.diagonal() - 2 * W.times(free[0].double())
    scores = scores[None].masked_fill(~free, torch.inf)
    products, plain, clock = [], FactoredWeights.times, itertools.count()
    monkeypatch.setattr(greedy, "time", types.SimpleNamespace(monotonic=lambda: float(next(clock))))
    monkeypatch.setattr("grace_opt.problem.factored.SECONDS_TO_MULTIPLY", 1 / W.work())
    monkeypatch.setattr(FactoredWeights, "times", lambda self, x: products.append(x.sum()) or plain(self, x))
    one = W.reshape(1, 200, 200)
    found, cut = greedy.greedy_order(one, scores, k, int(k), lambda: seconds - next(clock))
    order = found.order[0].tolist()
    assert len(set(order)) == int(k)
    assert min(order) >= 10
    assert bool(cut) == (seconds < 10**6)
    assert bool(products) == (1 < seconds < 10**6)
    if products:  # chosen one by one within a block, they are far better than all at once
        monkeypatch.undo()
        values = [float(one.objective(found.mask if method == "mies" else free & ~found.mask))]
        for limit in (0.0, math.inf):
            other, _ = greedy.greedy_order(one, scores, k, int(k), lambda: limit)  # noqa: B023
            values.append(float(one.objective(other.mask if method == "mies" else free & ~other.mask)))
        assert values[0] < values[2] + 0.2 * (values[1] - values[2])


def test_the_portfolio_goes_on_from_no_worse_than_think_if_greedy_was_cut_short(monkeypatch):
    from grace_opt.solution import SolverResult
    from grace_opt.solvers import portfolio

    monkeypatch.setattr(source, "BLOCK_BYTES", 1 << 14)
    rng, plain = np.random.default_rng(0), portfolio._call
    W = FactoredWeights.product(rng.normal(size=(8, 400)), rng.normal(size=(8, 400)))

    def cut_short(name, problem, run, **options):
        if name not in ("mies", "drop_greedy"):
            return plain(name, problem, run, **options)
        worst = problem.weights.diagonal().argsort(dim=-1, descending=True)[:, :100]
        mask = torch.zeros_like(problem.candidates).scatter_(-1, worst, True)
        return SolverResult(mask, limit=torch.ones(1, dtype=torch.bool))

    monkeypatch.setattr(portfolio, "_call", cut_short)
    found = grace_opt.solve(W, 100, "portfolio", iterations=0)
    assert float(found.objective) == pytest.approx(float(grace_opt.solve(W, 100, "think").objective))


@pytest.mark.parametrize("method", ["mies", "drop_greedy"])
def test_f_is_that_of_the_choice_when_time_is_up(method):
    rng = np.random.default_rng(0)
    Q, K = (rng.normal(size=(8, 4000)) for _ in range(2))
    for W in (FactoredWeights.product(Q, K), scipy.sparse.random_array((4000, 4000), density=0.01, rng=rng)):
        found = grace_opt.solve(
            W if isinstance(W, FactoredWeights) else W + W.T, 500, method, time_limit=1e-6, check=False
        )
        assert found.status is grace_opt.Status.LIMIT
        assert float(found.objective) == pytest.approx(float(found.verify().objective), rel=1e-12)


def test_w_of_tokens_is_its_definition():
    rng = np.random.default_rng(0)
    p, v = rng.dirichlet(np.ones(11), size=(2, 5)), rng.normal(size=(2, 11, 3))
    o = p @ v
    W = FactoredWeights.tokens(p, v, o)
    apart = v[:, None] - o[:, :, None]
    np.testing.assert_allclose(W.dense("a test"), np.einsum("bqi,bqj,bqid,bqjd->bij", p, p, apart, apart), atol=1e-14)
    assert W.is_semidefinite
    assert not W.negated().is_semidefinite
    assert not W.with_diagonal(torch.zeros(11)).is_semidefinite
    assert grace_opt.solve(W, 4, "random", certify=True).verify().gap.min() >= 0
    with pytest.raises(ProblemError, match=r"\(2, 5, 11\), \(2, 3, 11\) and \(2, 5, 3\): give \(..., q, n\)"):
        FactoredWeights.tokens(p, v.swapaxes(-1, -2), o)


@pytest.mark.slow
def test_limits_are_kept_where_w_is_never_formed(monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 1 << 14)
    rng = np.random.default_rng(0)
    W = FactoredWeights.product(rng.normal(size=(8, 400)), rng.normal(size=(8, 400)))
    for method in ("mies", "drop_greedy", "local_search", "tabu", "portfolio"):
        with Taken() as taken:
            found = grace_opt.solve(W, 100, method, time_limit=1e-6 if method in ("mies", "drop_greedy") else 0.1)
        assert found.mask.sum() == 100
        assert found.status is grace_opt.Status.LIMIT or method == "local_search"
        assert min(taken.seconds, found.stats["time"]) < 1
    told = []
    found = grace_opt.solve(W, 100, "tabu", target=1e9, callback=lambda progress: told.append(progress.mask.shape))
    assert found.status is grace_opt.Status.FEASIBLE
    found = grace_opt.solve(W, 100, "tabu", callback=lambda progress: told.append(progress.mask.shape) or True)
    assert found.status is grace_opt.Status.LIMIT
    assert set(told) == {(400,)}
    with pytest.raises(OptionError, match="max_steps=3 counts single exchanges"):
        grace_opt.solve(W, 100, "local_search", max_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tabu", "portfolio"])
def test_limits_are_kept_where_products_are_slow(method, monkeypatch, clock):
    """As of 60,000 vertices; bounds and searches alike take many products."""
    monkeypatch.setattr(source, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(FactoredWeights, "product_seconds", lambda self: 0.03)
    plain, rng = FactoredWeights._times, np.random.default_rng(0)
    W = FactoredWeights.product(rng.normal(size=(8, 400)), rng.normal(size=(8, 400)))
    problem, begun, clock.per_look = Problem.of(W, 100), [], 0.001
    grace_opt.solve(problem, method=method, time_limit=0.01, certify=True)  # loads what is compiled

    def slow(self, x):
        begun.append(clock.now)
        clock.sleep(0.03)
        return plain(self, x)

    monkeypatch.setattr(FactoredWeights, "_times", slow)
    began = clock.now
    found = grace_opt.solve(problem, method=method, time_limit=0.3, certify=True)
    assert clock.now - began > 0.2
    assert not any(at > began + 0.3 for at in begun)
    assert found.status is grace_opt.Status.LIMIT
    assert found.lower_bound >= 0  # which costs nothing
    begun.clear()
    for search in ("tabu", "local_search"):  # four products to begin with
        again = grace_opt.solve(problem, method=search, start=found.indices, time_limit=0.1)
        assert again.status is grace_opt.Status.LIMIT
        assert again.indices.tolist() == found.indices.tolist()
    assert not begun


def test_the_portfolio_knows_the_bounds_of_factors():
    """W is formed for its methods; the bounds of its factors count as they do with certify=."""
    rng = np.random.default_rng(0)
    W = FactoredWeights.product(rng.normal(size=(8, 60)), rng.normal(size=(8, 60)))
    mine, known = (
        grace_opt.solve(W, 12, name, required=[0, 1, 2], certify=name == "mies") for name in ("portfolio", "mies")
    )
    assert mine.lower_bound >= known.lower_bound > 0


ONES = np.ones((2, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FactoredWeights.product(np.array([[1.0, np.nan]]), np.ones((1, 2))), r"Q\[0, 1\] is nan"),
        (lambda: FactoredWeights.product(ONES, np.full((1, 4), np.inf)), r"K\[0, 0\] is inf"),
        (lambda: FactoredWeights.product(ONES, np.ones((4, 2))), "Q has 4 vertices .* K has 2"),
        (lambda: FactoredWeights([((ONES, np.ones((3, 4))), None)]), r"terms\[0\]\[0\]\[0\] has 2 rows and .* has 3"),
        (lambda: FactoredWeights.product(np.ones((2, 1, 4)), np.ones((3, 1, 4))), "K .* do not broadcast"),
        (lambda: FactoredWeights.product(np.ones((0, 4)), ONES), "Q is empty"),
        (lambda: FactoredWeights.product(np.ones(4), ONES), r"Q has shape \(4,\): give an array \(..., d, n\)"),
        (lambda: FactoredWeights.product(torch.ones(2, 4), ONES), "numpy arrays and torch tensors are mixed"),
        (lambda: FactoredWeights.product(ONES * 1e200, ONES), "Q and Q reach inf: .* overflow"),
        (lambda: FactoredWeights.product(ONES * 1e-200, ONES), "Q and Q .* underflow"),
        (lambda: FactoredWeights([((ONES, ONES), None)], diagonal=np.ones(3)), "diagonal has 3"),
        (lambda: FactoredWeights([((ONES, ONES), None)], diagonal=np.full(4, 1e300)), "overflow"),
        (lambda: FactoredWeights([(None, None)]), "no factor"),
        (lambda: FactoredWeights([]), "no factor"),
        (lambda: FactoredWeights([ONES]), "no list of terms"),
        (lambda: FactoredWeights([((ONES,), None)]), r"terms\[0\] is no term"),
        (lambda: FactoredWeights.product(ONES.astype(bool), ONES), "Q has dtype bool"),
        (lambda: FactoredWeights.product(ONES + 1j, ONES), "Q has dtype complex"),
        (lambda: FactoredWeights.product(np.array([[2**53 + 1, 1]]), np.ones((1, 2))), r"beyond 2\*\*53"),
        (lambda: grace_opt.solve(FactoredWeights.product(ONES, ONES), 2, protected=torch.tensor([1])), "mixed"),
        (lambda: grace_opt.solve(FactoredWeights.product(ONES, ONES), 5), "k = 5"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ProblemError, match=message):
        make()


@pytest.mark.slow
@draws
@given(factored(), st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_required_vertices_are_chosen_and_bounds_stay_bounds(block, made, random, whole, upwards):
    terms, diagonal, k = made
    scale = 1 if whole else 1 / 3
    terms = [tuple(None if p is None else tuple(f * scale for f in p) for p in term) for term in terms]
    W = exactly(terms, diagonal)
    n = len(W)
    required = random.sample(range(n), random.randint(0, k))
    mine = FactoredWeights(terms, diagonal=diagonal)
    sets = [S for S in itertools.combinations(range(n), k) if set(required) <= set(S)]
    best = (max if upwards else min)(sum(W[i][j] for i in S for j in S) for S in sets)
    for method in ("mies", "local_search", "exhaustive"):
        found = grace_opt.solve(mine, k, method, required=required, maximize=upwards, certify="fast")
        assert set(required) <= set(found.indices.tolist())
        assert found.mask.sum() == k
        bound = found.upper_bound if upwards else found.lower_bound
        if bound == found.objective:  # proved, up to the rounding of f itself
            assert found.objective == pytest.approx(float(best), rel=1e-12, abs=1e-12)
        else:
            assert (best <= Fraction(bound)) if upwards else (best >= Fraction(bound))
    assert found.objective == pytest.approx(float(best), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_what_required_vertices_leave_is_never_more_than_f(seed):
    """Of factors whose giant entries cancel: the reduced problem, in rational numbers, beside f in rational numbers."""
    rng, n, k, required = np.random.default_rng(seed), 6, 4, [0, 1]
    Q, K = rng.normal(size=(2, n)) * 1e4, rng.normal(size=(2, n))
    Q[:, 0], K[:, 0] = Q[:, 1] * -(1 + 1e-9), K[:, 1]
    terms = [((Q, Q), (K, K))]
    reduced = Reduction.of(Problem.of(FactoredWeights(terms), k), required=required)
    left = exactly(terms, reduced.problem.weights.diagonal().tolist())
    W, rest = exactly(terms), Fraction(reduced.rest.item())
    for S in itertools.combinations(range(2, n), k - 2):
        f = sum(W[i][j] for i in (*required, *S) for j in (*required, *S))
        below = f - rest - sum(left[i][j] for i in S for j in S)
        assert 0 <= below <= 1e-9 * float(FactoredWeights(terms).magnitude(torch.ones(n, dtype=torch.bool)))


def test_required_of_a_batch_and_beyond_whole_numbers(block):
    Q = np.stack([ONES, 2 * ONES]) * 2**9
    chosen = np.array([[0, 1, 0, 0], [1, 1, 1, 1]], dtype=bool)
    batch = grace_opt.solve(FactoredWeights.product(Q, Q), [2, 4], required=chosen, certify=True)
    assert batch.mask[0, 1]
    assert batch.mask.sum(-1).tolist() == [2, 4]
    assert (batch.lower_bound <= batch.objective).all()
    assert batch.objective.tolist() == [4 * 2.0**38, 16 * 2.0**42]


def test_nothing_is_formed_in_silence(monkeypatch):
    W = FactoredWeights.product(ONES, ONES)
    monkeypatch.setattr(source, "BLOCK_BYTES", 8)
    monkeypatch.setattr("grace_opt.problem.weights.free_memory", lambda: 100.0)
    with pytest.raises(ProblemError, match=r"method 'beam' reads all 4² entries"):
        grace_opt.solve(W, 2, "beam")
    assert grace_opt.solve(W, 2, "mies").objective == 16


def test_large_whole_numbers_are_not_called_exact():
    assert FactoredWeights.product(ONES.astype(int), ONES.astype(int)).integer
    assert not FactoredWeights.product(ONES.astype(int) * 2**13, ONES.astype(int) * 2**13).integer
    assert not FactoredWeights.product(ONES.astype(int), ONES).integer


def test_half_precision_is_summed_in_float64():
    Q = torch.full((4, 3), 60000.0, dtype=torch.float16)
    assert float(FactoredWeights.product(Q, Q).objective(torch.tensor([True, False, False]))) == (60000.0**2 * 4) ** 2


def test_repr_is_one_short_line():
    made = FactoredWeights.product(np.ones((3, 500)), np.ones((2, 500)))
    assert repr(made) == "FactoredWeights(shape=(500, 500), terms=1, device='cpu')"
