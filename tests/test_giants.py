"""Searches beside weights that lie many orders apart: a giant that is protected, that nobody would choose, or that has
left the choice again hides no small weight (decision record 8). Every instance here was answered worse once."""

import itertools
import math

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt import solve
from grace_opt.allocation.sums import exact_sum
from grace_opt.kernels.solve.exchange.rounding import tolerance
from grace_opt.kernels.solve.objective import objective
from grace_opt.kernels.solve.tabu import cpu as tabu
from grace_opt.problem import Problem, SparseWeights
from grace_opt.run import Run
from grace_opt.solvers import local_search
from grace_opt.testing import check_solution
from tests import oracle

GIANTS = (1e8, 1e13, 1e17, 1e280)


def reference(W, k, protected, start):
    """The torch search, which on the CPU is the compiled one's reference."""
    problem = Problem.of(W, k, protected=protected or None).flatten()
    mask = torch.zeros(1, len(W), dtype=torch.bool)
    mask[0, list(start)] = True
    return np.flatnonzero(local_search._torch(problem, mask, None, Run()).mask[0]).tolist()


def compiled(W, k, protected, start):
    return solve(W, k, "local_search", protected=protected or None, start=list(start)).indices.tolist()


SEARCHES = [pytest.param(compiled, id="compiled"), pytest.param(reference, id="torch")]


@st.composite
def scattered(draw, max_n=9):
    """W (n, n) whose weights lie up to 600 orders apart, k, and protected vertices, giants among them."""
    n, seed = draw(st.integers(2, max_n)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    decades = draw(st.sampled_from([0, 6, 12, 290]))
    W = rng.normal(size=(n, n)) * 10.0 ** rng.uniform(-decades, decades, (n, n))
    if draw(st.booleans()):
        W = np.round(rng.normal(size=(n, n)) * 4)
    giant = draw(st.sampled_from(GIANTS)) * draw(st.sampled_from([1, -1]))
    v, w = rng.choice(n, 2, replace=False)
    match draw(st.sampled_from(["none", "diagonal", "row", "conflict", "cancel"])):
        case "diagonal":
            W[v, v] = giant
        case "row":
            W[v] = W[:, v] = giant
        case "conflict":
            W[min(v, w), max(v, w)] = giant
        case "cancel":
            W[v, v] = W[w, w] = giant
            W[min(v, w), max(v, w)] = -giant
    W = np.triu(W) + np.triu(W, 1).T
    protected = sorted({int(v)} if draw(st.booleans()) else set())
    k = draw(st.integers(1, n - len(protected)))
    return W, k, protected, rng.permutation([i for i in range(n) if i not in protected])[:k].tolist()


def swap(W, S, i, j):
    """The change of f by exchanging i for j, rounded once, and the sum of the weights that its formula has."""
    rest = [u for u in S if u != i]
    terms = [W[j, j], -W[i, i], *(2 * W[j, rest]), *(-2 * W[i, rest])]
    size = sum(abs(W[v, v]) + 2 * np.abs(W[v, list(S)]).sum() for v in (i, j))
    return math.fsum(terms), float(size)


@pytest.mark.parametrize("search", SEARCHES)
@settings(max_examples=300)
@given(drawn=scattered())
@pytest.mark.slow
def test_no_exchange_is_left_that_improves_by_more_than_its_own_rounding(search, drawn):
    W, k, protected, start = drawn
    S = search(W, k, protected, start)
    assert len(S) == k
    for i, j in itertools.product(S, set(range(len(W))) - set(S) - set(protected)):
        change, size = swap(W, S, i, j)
        assert change >= -2 * tolerance(len(W)) * size
    assert oracle.objective(W, S) <= oracle.objective(W, start)  # both rounded once: never worse, not by a digit


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("giant", GIANTS)
def test_a_giant_that_has_no_part_in_the_choice_hides_no_improvement(search, giant):
    W = np.diag([3.0, 1.0, giant, 2.0])
    W[0, 1] = W[1, 0] = -1e-3
    for protected in ([2], []):
        S = search(W, 2, protected, [0, 3])
        assert oracle.best_swap(W, S, protected) == 0.0
        assert oracle.objective(W, S) == oracle.optimum(W, 2, protected)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("giant", GIANTS)
def test_a_giant_that_left_takes_no_small_weight_along(search, giant):
    """Sums that are only updated hold the giant's rounding: 1 + 1e17 - 1e17 = 0."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        W = np.round(rng.normal(size=(8, 8)) * 9)
        W = np.triu(W) + np.triu(W, 1).T
        W[0, 1:] = W[1:, 0] = W[0, 0] = giant
        S = search(W, 3, [], [0, 1, 2])
        assert 0 not in S
        assert oracle.best_swap(W, S) == 0.0


@pytest.mark.parametrize("search", SEARCHES)
def test_a_doubtful_exchange_hides_no_certain_one(search):
    """Exchanging 0 for 1 seems to be the best, but is less than 1e17 rounds to; 3 for 4 gains 3, and certainly."""
    W = np.diag([1e17, 1e17 - 64, 1e17, 4.0, 1.0])
    W[0, 1] = W[1, 0] = 1e17
    W[[0, 1, 2, 2], [2, 2, 0, 1]] = -1e17
    assert search(W, 3, [], [0, 2, 3])[-1] == 4


@pytest.mark.slow
@pytest.mark.parametrize("giant", GIANTS)
def test_every_exchange_improves_f(giant):
    """Also after a giant has come and gone, in sums that were only updated since: 3 for 0, 4 for 1, 5 for 3."""
    rng = np.random.default_rng(5)
    for _ in range(20):
        W = np.triu(np.round(rng.normal(size=(16, 16)) * 9))
        W[[0, 1, 3, 4, 5], [0, 1, 3, 4, 5]] = giant * np.array([0.25, 0.125, -1, -0.5, -3])
        W[[0, 1, 3], 5] = 10 * giant
        W[3, 6:] = giant * rng.integers(1, 9, 10)
        W = W + np.triu(W, 1).T
        passed = [solve(W, 3, "local_search", start=[0, 1, 2], max_steps=most).indices.tolist() for most in range(8)]
        assert passed[1:4] == [[1, 2, 3], [2, 3, 4], [2, 4, 5]]
        for before, after in itertools.pairwise(passed):
            both = [*W[np.ix_(after, after)].ravel(), *-W[np.ix_(before, before)].ravel()]
            assert before == after or math.fsum(both) < 0  # with the giants that stay taken off


def test_a_batch_beside_giants_is_its_instances():
    rng = np.random.default_rng(3)
    W = rng.normal(size=(6, 40, 40))
    W = W + W.transpose(0, 2, 1)
    for b, giant in enumerate((0.0, *GIANTS, -1e17)):
        W[b, b, :] = W[b, :, b] = giant
    together = solve(W, 12, "local_search", start="random")
    for b in range(6):
        alone = solve(W[b], 12, "local_search", start=solve(W, 12, "random").mask[b])
        assert (alone.mask == together.mask[b]).all()


def test_sums_are_computed_afresh_now_and_then():
    """More exchanges than go between two fresh computations, some with giants."""
    rng = np.random.default_rng(1)
    W = np.triu(rng.integers(-1, 2, (600, 600)), 1).astype(float)
    W = W + W.T + np.diag(np.arange(600.0) * 9)
    W[599, 300:] = W[300:, 599] = 2.0**60
    sol = solve(W, 299, "local_search", start=list(range(301, 600)))
    assert sol.stats["iterations"] > 256
    S, out = np.flatnonzero(sol.mask), np.flatnonzero(~sol.mask)
    sums = W[:, S].sum(1)
    leave, enter = W.diagonal()[S] - 2 * sums[S], W.diagonal()[out] + 2 * sums[out]
    assert (leave[:, None] + enter[None] - 2 * W[np.ix_(S, out)]).min() >= 0


@pytest.mark.slow
@settings(max_examples=200)
@given(drawn=scattered(), seed=st.integers(0, 99))
def test_tabu_is_never_worse_than_its_start_not_by_a_digit(drawn, seed):
    W, k, protected, start = drawn
    S = solve(W, k, "tabu", protected=protected or None, start=start, iterations=200, seed=seed).indices.tolist()
    before, after = (W[np.ix_(s, s)].ravel() for s in (start, S))
    assert math.fsum([*after, *-before]) <= 0


@pytest.mark.parametrize("giant", GIANTS)
@pytest.mark.parametrize("where", ["diagonal", "row", "conflicts"])
def test_tabu_finds_the_optimum_beside_giants_that_come_and_go(giant, where):
    """Restarts shake them in, and the search throws them out again."""
    rng = np.random.default_rng(2)
    for seed in range(6):
        W = np.round(rng.normal(size=(12, 12)) * 9)
        W = np.triu(W) + np.triu(W, 1).T
        if where == "diagonal":
            W[[0, 5], [0, 5]] = giant, 3 * giant
        elif where == "row":
            W[0] = W[:, 0] = giant
        else:  # every vertex has another that it must not meet
            W[range(0, 12, 2), range(1, 12, 2)] = W[range(1, 12, 2), range(0, 12, 2)] = giant
        sol = solve(W, 5, "tabu", start=[0, 1, 2, 3, 4], restart_after=40, iterations=1500, seed=seed)
        assert oracle.objective(W, sol.indices) == oracle.optimum(W, 5)


def test_tabu_sums_afresh_to_the_last_digit():
    W = np.diag([1.0, 1e17, -1e17, 3.0])
    W[0, 1] = W[1, 0] = 1e17
    W[0, 2] = W[2, 0] = -1e17
    sums = np.empty(4)
    assert tabu.fill_sums(W, np.array([True, True, True, False]), sums) == (1.0, 6e17)
    assert sums.tolist() == [1.0, 2e17, -2e17, 0.0]
    assert tabu.scales(W, heavy := np.empty(4)) == 1.0
    assert heavy.tolist() == [1e17, 1e17, 1e17, 3.0]


def test_tabu_believes_a_best_set_only_when_it_is_summed_afresh():
    W, best, x = np.diag([1.0, 2.0, 1e17, 0.5]), np.array([True, False, False, False]), np.zeros(4, bool)
    for vertex, kept, f in ((1, 0, 2.0), (3, 3, 0.5)):
        x[:] = np.arange(4) == vertex
        sums, values, found = np.full(4, -16.0), np.array([-16.0, 1.0, 1.0, 1.0]), best.copy()  # as if 1e17 had left
        tabu.note_best(W, x, sums, found, values)
        assert np.flatnonzero(found).tolist() == [kept]
        assert values.tolist() == [f, min(f, 1.0), 1.0, f]
        assert sums.tolist() == (W @ x).tolist()


def dropped(W, k, protected=()):
    """drop_greedy with every change of f summed by itself, and rounded once."""
    S = [i for i in range(len(W)) if i not in protected]
    while len(S) > k:
        change = {i: math.fsum([-W[i, i], *(-2 * W[i, [u for u in S if u != i]])]) for i in S}
        S.remove(min(S, key=lambda i: (change[i], i)))
    return S


@pytest.mark.parametrize("giant", GIANTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.slow
def test_drop_greedy_forgets_a_giant_that_it_dropped(giant, dtype):
    """Scores that have lost 1e17 are its rounding: diag(1, 2, 1e17) with weights of 1e17 to the giant."""
    giant = min(giant, 1e30) if dtype is np.float32 else giant
    rng = np.random.default_rng(4)
    for at in range(8):
        W = np.round(rng.normal(size=(9, 9)) * 9)
        W = (np.triu(W) + np.triu(W, 1).T).astype(dtype)
        W[at, :] = W[:, at] = giant
        W[8, 8] = 10 * giant  # protected
        for k in (1, 3, 6, 8):
            assert solve(W, k, "drop_greedy", protected=[8]).indices.tolist() == dropped(W.astype(float), k, [8])
        whole = solve(np.stack([np.eye(9, dtype=dtype), W]), 3, "drop_greedy", protected=[8], path=True)
        order = whole.stats["order"][1, :8].tolist()
        assert [sorted(order[:k]) for k in range(9)] == [dropped(W.astype(float), k, [8]) for k in range(9)]


@pytest.mark.slow
@settings(max_examples=100)
@given(drawn=scattered())
def test_drop_greedy_beside_giants_is_a_choice_and_its_path_is_one(drawn):
    W, k, protected, _ = drawn
    sol = solve(W, k, "drop_greedy", protected=protected or None, path=True)
    alone = solve(W, k, "drop_greedy", protected=protected or None)
    check_solution(W, k, sol, protected or None)
    assert sol.indices.tolist() == alone.indices.tolist() == sorted(sol.stats["order"][:k].tolist())


@pytest.mark.slow
@settings(max_examples=100)
@given(drawn=scattered(), lookahead=st.sampled_from([0, 2]))
def test_beam_is_never_worse_than_mies_not_by_a_digit(drawn, lookahead):
    W, k, protected, _ = drawn
    greedy, searched = (
        solve(W, k, method, protected=protected or None, **options).indices
        for method, options in (("mies", {}), ("beam", {"width": 3, "lookahead": lookahead}))
    )
    both = (W[np.ix_(s, s)].ravel() for s in (searched, greedy))
    after, before = both
    assert math.fsum([*after, *-before]) <= 0


@pytest.mark.parametrize("seed", [662, 2236, 4371, 5399, 5838])
def test_beam_beside_giants_that_cancel_is_never_worse_than_mies(seed):
    """Running sums hold what giants rounded away, and called these sets better than MIES's."""
    rng = np.random.default_rng(seed)
    W = np.triu(np.round(rng.normal(size=(7, 7)) * 4))
    W = W + np.triu(W, 1).T
    v = rng.choice([-1.0, 1, 1, -1, 0], 7)
    W += np.outer(v, v) * 2.0**60
    greedy, searched = solve(W, 4, "mies"), solve(W, 4, "beam", width=3, lookahead=2)
    assert oracle.objective(W, searched.indices) <= oracle.objective(W, greedy.indices)


@pytest.mark.parametrize(
    "exact",
    [
        pytest.param(lambda terms: objective(torch.diag(terms), torch.ones(len(terms), dtype=torch.bool)), id="dense"),
        pytest.param(
            lambda terms: SparseWeights.of(scipy.sparse.diags_array(terms.numpy()).tocsr())[0].objective(
                torch.ones(len(terms), dtype=torch.bool)
            ),
            id="sparse",
        ),
        pytest.param(exact_sum, id="terms"),
    ],
)
def test_sums_of_three_scales_that_cancel_are_exact(exact):
    """Pairs of numbers hold two scales: 1 is lost beside 1e20, and both of these beside 1e40."""
    assert exact(torch.tensor([1e40, 1e20, 1.0, -1e40, -1e20], dtype=torch.float64)) == 1
