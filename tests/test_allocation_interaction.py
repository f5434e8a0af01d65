"""`allocate` with `interaction`, beside the oracle: sets that are dropped lose their weight in W together.

180 small instances and one of 128 groups where nothing is said; ``make test-deep`` draws 6 000 and 33.
"""

import dataclasses
import itertools
import math
import os
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt import Factored, OptionError, ProblemError, SolverError, Status, allocate
from grace_opt.allocation import quadratic, quadratic_exact
from grace_opt.allocation.inputs import checked_problem
from grace_opt.allocation.quadratic_bound import quadratic_bound
from tests import oracle

WANTED = max(1, int(os.environ.get("GRACE_TEST_INSTANCES", "3000")) // 100)
SIZE = 6
SEEDS = st.integers(0, 2**32 - 1)
KINDS = ("semidefinite", "rank one", "signs", "positive", "ties", "diagonal", "zero", "scales", "tiny", "giant")


def drawn(kind, n, L, rng):
    """W, and losses and costs (n, L)."""
    X = rng.normal(size=(n, n))
    W = {
        "semidefinite": X @ X.T,
        "rank one": np.outer(X[0], X[0]),
        "signs": X + X.T,
        "positive": np.abs(X + X.T),
        "ties": np.round(X + X.T),
        "diagonal": np.diag(np.abs(X[0])),
        "zero": np.zeros((n, n)),
        "scales": (X @ X.T) * np.outer(s := 10.0 ** rng.uniform(-4, 4, n), s),
        "tiny": (X @ X.T) * 2.0**-900,
        "giant": (X @ X.T) * 2.0**900,
    }[kind]
    unit = 2.0 ** {"tiny": -900, "giant": 900}.get(kind, 0)
    losses = np.sort(np.abs(rng.normal(size=(n, L))))[:, ::-1] * unit
    losses = np.round(losses) if kind == "ties" else losses
    if kind == "scales":
        losses = losses * np.abs(np.diag(W))[:, None]
    losses[:, 0] = np.diag(W)
    costs = np.sort(rng.integers(0, 5, (n, L)) if kind == "ties" or rng.random() < 0.5 else rng.random((n, L))) * 1.0
    costs[:, 0] *= rng.random() < 0.3
    return W, losses, costs


@dataclasses.dataclass
class Case:
    W: np.ndarray
    losses: np.ndarray
    costs: np.ndarray
    budget: np.ndarray
    least: np.ndarray
    most: np.ndarray

    def solve(self, **options):
        given_ = {"interaction": self.W, "least": self.least, "most": self.most} | options
        return allocate(self.losses, self.costs, self.budget, **given_)

    def optimum(self, b):
        n = self.losses.shape[1]
        inside = [range(self.least[b, i], self.most[b, i] + 1) for i in range(n)]
        losses, costs = (
            [{level: float(x[b, i, level]) for level in inside[i]} for i in range(n)] for x in (self.losses, self.costs)
        )
        return oracle.allocation_with_interaction(self.W[b], losses, costs, self.budget[b])


def drawn_case(seed, largest=6):
    rng = np.random.default_rng(seed)
    n, L = int(rng.integers(1, largest)), int(rng.integers(1, 5))
    made = [drawn(kind, n, L, rng) for kind in rng.choice(KINDS, SIZE)]
    W, losses, costs = (np.stack([one[k] for one in made]) for k in range(3))
    low, high = rng.integers(0, L, (2, SIZE, n)) if rng.random() < 0.3 else (np.zeros((SIZE, n), int), L - 1)
    least, most = np.minimum(low, high), np.maximum(low, high)
    inside = (np.arange(L) >= least[..., None]) & (np.arange(L) <= most[..., None])
    ends = np.array([math.fsum(row) for row in np.where(inside, costs, np.inf).min(-1)])
    top = np.where(inside, costs, -np.inf).max(-1).sum(-1)
    share = rng.choice([0.0, 1.0, *rng.random(4)], SIZE)  # nothing to spare, more than is used, or between
    return Case(W, losses, costs, np.maximum(ends, ends + share * (top - ends)), least, most)


def check(case, b, answer):
    optimum, levels = case.optimum(b), answer.levels[b]
    n = len(levels)
    zero = np.flatnonzero(levels == 0)
    exact = math.fsum(
        [case.losses[b, i, level] for i, level in enumerate(levels) if level]
        + [case.W[b, i, j] for i in zero for j in zero]
    )
    assert math.fsum(case.costs[b, np.arange(n), levels]) <= case.budget[b], "the budget is exceeded"
    assert float(answer.objective[b]) == exact, "the objective is not W over the dropped plus the losses of the others"
    assert answer.lower_bound[b] <= float(optimum) + 4e-16 * abs(float(optimum)), "the bound is above the optimum"
    size = np.abs(case.W[b][np.ix_(zero, zero)]).sum() + np.abs(case.losses[b, np.arange(n), levels]).sum()
    slack = max(1e-9 * abs(exact), 1e-11 * size)
    if answer.status[b] is Status.OPTIMAL:
        assert Fraction(exact) - optimum <= slack, "OPTIMAL, and it is not"
    return float(optimum), slack


@pytest.mark.slow
@settings(max_examples=WANTED)
@given(seed=SEEDS)
def test_both_methods_beside_the_oracle(seed):
    case = drawn_case(seed)
    fast, exact = case.solve().verify(), case.solve(method="exact").verify()
    for b in range(SIZE):
        check(case, b, fast)
        optimum, slack = check(case, b, exact)
        assert exact.status[b] is Status.OPTIMAL
        assert exact.objective[b] == pytest.approx(optimum, rel=1e-9, abs=slack)


def test_an_optimum_of_zero_beside_large_losses_is_proved():
    """The bound's rounding counts what was chosen, not what could have been."""
    exact = drawn_case(8722).solve(method="exact")
    assert exact.objective[2] == 0
    assert exact.status[2] is Status.OPTIMAL


OVERFLOWS = {  # W, losses from level 1 on, costs, budget, least, and the best levels
    "prices": (
        [[-2, 0.25], [0.25, -3]],
        [[1e99, 5e-101], [1e100, 2e99]],
        [[1e-100, 0, 1e100], [0, 1e100, 1e-100]],
        *(1e-100, [0, 1], [1, 2]),
    ),
    "tiny losses": (
        [[-3.6, -1.2, 2], [-1.2, -2.3, 0.3], [2, 0.3, -2.6]],
        [[5.9e-311], [3.7e-311], [2.4e-311]],
        [[1, 0], [1, 1], [0, 1]],
        *(2, [0, 0, 1], [1, 0, 1]),
    ),
    "giant losses": (
        [[1e-8, 0], [0, -1e-8]],
        [[9e304, 5.2999999999999995e305, 4e304, 2.4999999999999997e305], [6e304, 4e304, 8e304, 3.1e305]],
        [0, 1, 2, 3, 4],
        *(2, [1, 0], [1, 0]),
    ),
}


@pytest.mark.parametrize("method", ["lagrangian", "exact"])
@pytest.mark.parametrize("name", OVERFLOWS)
def test_least_holds_where_priced_costs_overflow(name, method):
    """What must be kept is known from `least`, not from a price that is no number."""
    W, losses, costs, budget, least, levels = OVERFLOWS[name]
    losses = np.hstack([np.full((len(W), 1), np.nan), losses])
    answer = allocate(losses, costs, budget, least=least, interaction=W, method=method)
    assert answer.levels.tolist() == levels
    assert answer.lower_bound <= answer.objective


@pytest.mark.slow
@settings(max_examples=WANTED)
@given(seed=SEEDS)
def test_never_worse_than_without_and_the_same_where_w_is_diagonal(seed):
    case = drawn_case(seed, 12)
    joint, apart = case.solve(), case.solve(interaction=None)
    zero = apart.levels == 0
    pairs = (case.W * zero[:, None] * zero[..., None]).sum((1, 2))
    chosen = np.take_along_axis(case.losses, apart.levels[..., None], -1)[..., 0]
    others = (chosen * ~zero).sum(-1)
    tolerance = 1e-12 * (np.abs(case.W).sum((1, 2)) + np.abs(chosen).sum(-1))
    assert (joint.objective <= pairs + others + tolerance).all()
    case.W *= np.eye(case.W.shape[-1])
    alone = case.solve()
    assert (alone.objective <= apart.objective).all()
    assert (alone.lower_bound >= apart.lower_bound).all()


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=SEEDS)
def test_a_batch_answers_as_its_instances_and_torch_as_numpy(seed):
    case = drawn_case(seed)
    for method in ("lagrangian", "exact"):
        whole = case.solve(method=method)
        fields = {f.name: torch.from_numpy(np.asarray(getattr(case, f.name))) for f in dataclasses.fields(Case)}
        tensors = Case(**fields).solve(method=method)
        for b in range(SIZE):
            one = Case(*(getattr(case, f.name)[b] for f in dataclasses.fields(Case))).solve(method=method)
            for name in ("levels", "cost", "objective", "lower_bound", "gap", "multipliers"):
                assert np.array_equal(getattr(one, name), getattr(whole, name)[b]), name
                assert np.array_equal(getattr(tensors, name)[b].numpy(), getattr(whole, name)[b]), name


@pytest.mark.slow
def test_the_gap_is_small_where_w_is_that_of_keys():
    """64 channels that share directions, some far larger than others."""
    rng = np.random.default_rng(0)
    n, bits = 64, np.array([0, 1, 2, 3, 4, 6, 8])
    mixed = np.eye(n) + 0.15 * rng.normal(size=(8, n, n))
    moments = mixed @ (rng.lognormal(0, 1.5, (8, n, 1)) * mixed.mT)
    W = moments * moments[:, ::-1, ::-1]
    W = 0.5 * (W + W.swapaxes(1, 2))
    losses = W.diagonal(axis1=1, axis2=2)[..., None] * 4.0**-bits
    for budget in (n, 2 * n):
        joint, apart = allocate(losses, bits, budget, interaction=W).verify(), allocate(losses, bits, budget)
        zero = apart.levels == 0
        others = (np.take_along_axis(losses, apart.levels[..., None], -1)[..., 0] * ~zero).sum(-1)
        assert (joint.objective < (W * zero[:, None] * zero[..., None]).sum((1, 2)) + others).any()
        assert (joint.gap < 0.15).all()
        assert np.median(joint.gap) < 0.08


def optimum_of_blocks(W, losses, costs, budget, size):
    """The least objective if groups interact within blocks of `size` only: all levels of a block, then whole costs."""
    best = np.full(budget + 1, np.inf)
    best[0] = 0.0
    for first in range(0, len(W), size):
        own = slice(first, first + size)
        levels = np.array(list(itertools.product(range(losses.shape[1]), repeat=size)))
        at = np.arange(size)
        zero = (levels == 0).astype(float)
        lost = np.einsum("si,ij,sj->s", zero, W[own, own], zero) + (losses[own][at, levels] * (levels > 0)).sum(-1)
        spent = costs[own][at, levels].sum(-1)
        after = np.full_like(best, np.inf)
        for loss, cost in zip(lost[spent <= budget], spent[spent <= budget], strict=True):
            after[cost:] = np.minimum(after[cost:], best[: budget + 1 - cost] + loss)
        best = after
    return best.min()


@pytest.mark.slow
@settings(max_examples=max(1, WANTED // 30))
@given(seed=SEEDS)
def test_128_groups_beside_the_optimum_of_blocks(seed):
    """As many channels as a head has: too many to enumerate, but blocks that do not interact have a known optimum."""
    rng = np.random.default_rng(seed)
    n, L, size = 128, 3, int(rng.choice([1, 2, 4]))
    W = np.kron(np.eye(n // size), np.ones((size, size))) * (X := rng.normal(size=(n, n)))
    W = X @ X.T * (W != 0) / n if rng.random() < 0.5 else W + W.T
    losses = np.sort(np.abs(rng.normal(size=(n, L))))[:, ::-1].copy()
    losses[:, 0] = np.diag(W)
    costs = np.sort(rng.integers(0, 4, (n, L)))
    costs[:, 0] = 0
    budget = int(rng.integers(1, costs[:, -1].sum()))
    optimum = optimum_of_blocks(W, losses, costs, budget, size)
    mixed = rng.permutation(n)
    W, losses, costs = W[np.ix_(mixed, mixed)], losses[mixed], costs[mixed]
    found = allocate(losses, costs, budget, interaction=W).verify()
    slack = 1e-9 * np.abs(W).sum()
    assert costs[np.arange(n), found.levels].sum() <= budget
    assert found.lower_bound <= optimum + slack, "the bound is above the optimum"
    assert found.objective >= optimum - slack, "the objective is below the optimum"
    assert found.status is not Status.OPTIMAL or found.objective <= optimum + slack
    assert found.objective - found.lower_bound <= 0.02 * (np.abs(losses).sum() + np.abs(W).sum())


def test_what_is_fixed_may_be_many_for_the_exact_method():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(20, 20))
    W, losses = X @ X.T, np.sort(rng.random((20, 3)))[:, ::-1].copy() * 9
    losses[:, 0] = np.nan
    least = np.array([1] * 12 + [0] * 8)
    exact = allocate(losses, [0, 1, 2], 25, interaction=W, least=least, method="exact").verify()
    assert exact.status is Status.OPTIMAL
    assert exact.objective <= allocate(losses, [0, 1, 2], 25, interaction=W, least=least).objective
    with pytest.raises(OptionError, match=r"20 groups may be dropped or kept, and at most 16.*lagrangian"):
        allocate(losses, [0, 1, 2], 25, interaction=W, method="exact")


def test_w_in_factors_is_to_be_formed():
    W = Factored.product(np.ones((1, 2)), np.ones((1, 2)))
    with pytest.raises(ProblemError, match=r"interaction=W.dense\('allocate'\)"):
        allocate([[1.0, 0.5]] * 2, [0, 1], 1, interaction=W)
    assert allocate([[1.0, 0.5]] * 2, [0, 1], 1, interaction=W.dense("allocate").numpy()).levels.sum() == 1


def test_time_limits_still_answer():
    case = drawn_case(3)
    for method in ("lagrangian", "exact"):
        found = case.solve(method=method, time_limit=0).verify()
        assert {Status.LIMIT, Status.OPTIMAL} >= set(found.status)


BAD = {
    "parts": ({"parts": [([0, 1], [1, 1])]}, OptionError, "parts= and interaction= cannot be combined"),
    "path": ({"path": True}, OptionError, "path= and interaction= cannot be combined"),
    "shape": ({"interaction": np.eye(3)}, ProblemError, r"interaction has shape \(3, 3\), and losses \(2, 2\)"),
    "not symmetric": ({"interaction": [[9.0, 1.0], [0.0, 4.0]]}, ProblemError, "not symmetric"),
    "nan": ({"interaction": [[9.0, np.nan], [np.nan, 4.0]]}, ProblemError, "finite"),
    "another diagonal": ({"interaction": [[8.0, 1.0], [1.0, 4.0]]}, ProblemError, r"losses\[0, 0\] is 9.0.*8.0.*nan"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name):
    options, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        allocate([[9.0, 1.0], [4.0, 1.0]], [0, 1], 1, **({"interaction": [[9.0, 1.0], [1.0, 4.0]]} | options))
    with pytest.raises(OptionError, match="single budget"):
        allocate([[9.0, 1.0]], [0, 1], interaction=[[9.0]])


WRONG = {
    "W over the dropped": {"objective": lambda a: a.objective * 1.01},
    "the bound is above": {"lower_bound": lambda a: a.objective + 1.0},
    "OPTIMAL, and it is not": {
        "status": lambda a: np.full(SIZE, Status.OPTIMAL),
        "lower_bound": lambda a: a.lower_bound * 0 - 1e9,
    },
}


def worst(case):
    """The cheapest levels, with their objective."""
    return case.solve(most=case.costs.argmin(-1), least=case.costs.argmin(-1))


@pytest.mark.slow
@pytest.mark.parametrize("message", WRONG)
def test_the_checks_catch_wrong_answers(message):
    rng = np.random.default_rng(5)
    W, losses, costs = (np.stack(x) for x in zip(*[drawn("semidefinite", 5, 4, rng) for _ in range(SIZE)], strict=True))
    ends = np.zeros((SIZE, 5), int), np.full((SIZE, 5), 3)
    case = Case(W, losses, costs, costs.max(-1).sum(-1) * 0.6, *ends)
    answer = worst(case) if "OPTIMAL" in message else case.solve()
    wrong = dataclasses.replace(answer, **{name: make(answer) for name, make in WRONG[message].items()})
    for b in range(SIZE):
        with pytest.raises(AssertionError, match=message):
            check(case, b, wrong)
    if "OPTIMAL" not in message:
        with pytest.raises(SolverError):
            wrong.verify()


@pytest.mark.slow
def test_a_bound_that_forgets_a_price_is_caught(monkeypatch):
    """The oracle sees a bound that is too high."""
    case, caught = drawn_case(11), 0
    monkeypatch.setattr(
        "grace_opt.allocation.call.quadratic_bound", lambda p, value, price: value - 1e-12 * value.abs()
    )
    for seed in range(20):
        case = drawn_case(seed)
        answer = case.solve()
        for b in range(SIZE):
            caught += answer.lower_bound[b] > case.optimum(b) + 1e-6 * abs(case.optimum(b))
    assert caught


@pytest.mark.slow
def test_bounds_hold_at_any_price_and_without_rounds(monkeypatch):
    for seed in range(6):
        case = drawn_case(seed)
        problem = checked_problem(case.losses, case.costs, case.budget, None, case.least, case.most, case.W)
        found, _ = quadratic.solve(problem.scaled, math.inf)
        value = problem.scaled.objective(found.levels)
        optimum = [Fraction(case.optimum(b)) / Fraction(2) ** int(problem.shifts[0][b]) for b in range(SIZE)]
        for factor in (0.0, 0.1, 1.0, 30.0):
            for weights in ((), (0.1, 0.001)):
                monkeypatch.setattr("grace_opt.allocation.quadratic_bound.WEIGHTS", weights)
                bounds = quadratic_bound(problem.scaled, value, found.prices[0][:, 0] * factor)
                assert all(
                    Fraction(bound) <= best
                    for bound, best in zip(bounds.tolist(), optimum, strict=True)
                    if bound > -math.inf
                )


def test_chunks_of_sets_change_nothing(monkeypatch):
    case = drawn_case(7)
    whole = case.solve(method="exact")
    monkeypatch.setattr(quadratic_exact, "CHUNK", 3)
    assert np.array_equal(case.solve(method="exact").objective, whole.objective)
