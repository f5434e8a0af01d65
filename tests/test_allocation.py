"""`allocate` beside the oracle: budgets kept, bounds below the optimum, gaps within their promise, on drawn instances.

300 instances where nothing is said; ``make test-deep`` draws 10 000.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import types
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import grace_opt
from grace_opt import Status, allocate
from grace_opt.allocation import exact
from grace_opt.allocation.problem import unscale
from grace_opt.allocation.sums import EPS, exact_sum, running_sums
from grace_opt.errors import InfeasibleBudgetError, OptionError, ProblemError, SolverError
from grace_opt.kernels import steps
from grace_opt.kernels._shared.threads import always_compiled
from grace_opt.kernels.solve.objective.reference import paired_sums
from tests import oracle

WANTED = int(os.environ.get("GRACE_TEST_INSTANCES", "3000")) // 10
SIZE = 20
SEEDS = st.integers(0, 2**32 - 1)
#: Slopes of these fit into float64, relative to each other; only then is the size of a gap promised.
KINDS = ("bits", "real", "small integers", "signs", "equal levels", "no order", "loss scales", "cost scales", "tenths",
         "quarters", "collinear")  # fmt: skip
EXTREME = ("both scales", "giants")


def drawn(kind, n, L, rng):
    """Losses and costs, (n, L) each."""
    f, c = rng.normal(size=(n, L)), rng.random((n, L))
    if kind == "bits":
        return rng.lognormal(0, 2, (n, 1)) * 4.0 ** -np.arange(L), np.broadcast_to(np.arange(L), (n, L)).astype(float)
    if kind == "real":
        return np.sort(np.abs(f))[:, ::-1].copy(), np.sort(c)
    if kind == "small integers":
        return rng.integers(-3, 4, (n, L)), rng.integers(0, 4, (n, L))
    if kind == "signs":
        return f, np.sort(c)
    if kind == "equal levels":
        return np.repeat(f[:, :1], L, 1), np.repeat(c[:, :1], L, 1)
    if kind == "no order":
        return f, c
    if kind == "loss scales":
        return f * 10.0 ** rng.uniform(-150, 150, (n, L)), np.sort(c)
    if kind == "cost scales":
        return f, c * 10.0 ** rng.uniform(-150, 150, (n, L))
    if kind == "tenths":
        return np.round(f, 1), rng.integers(0, 9, (n, L)) / 10
    if kind == "quarters":
        return f, rng.integers(0, 20, (n, L)) / 4
    if kind == "collinear":  # slopes that differ by rounding alone
        whole = np.cumsum(rng.integers(1, 9, (n, L)), -1)
        return 5 - 0.7 * whole / 3, 0.1 * whole
    if kind == "both scales":
        return f * 10.0 ** rng.uniform(-300, 300, (n, L)), c * 10.0 ** rng.uniform(-300, 300, (n, L))
    if kind == "giants":
        return rng.choice([1e300, 1.0, 1e-300, -1e300, 0.0], (n, L)), rng.choice([1e300, 1.0, 1e-300, 0.0], (n, L))
    raise ValueError(kind)


@dataclasses.dataclass
class Case:
    """A batch of instances of one shape; all that `allocate` is given."""

    kinds: list
    losses: np.ndarray
    costs: np.ndarray
    budget: np.ndarray | None
    parts: list
    least: np.ndarray
    most: np.ndarray

    def budgets(self, b):
        """As the oracle wants them, with the multipliers' names."""
        n, found = self.losses.shape[1], []
        for at, (labels, limits) in enumerate(self.parts):
            found += [((at, p), np.flatnonzero(labels == p), limits[b, p]) for p in range(limits.shape[-1])]
        return found + ([] if self.budget is None else [("budget", np.arange(n), self.budget[b])])

    def rows(self, b):
        """Admissible losses and costs, a list per group."""
        inside = [slice(low, high + 1) for low, high in zip(self.least[b], self.most[b], strict=True)]
        return tuple([row[s].tolist() for row, s in zip(x[b], inside, strict=True)] for x in (self.losses, self.costs))

    def solve(self, **options):
        more = {"parts": self.parts or None, "least": self.least, "most": self.most} | options
        return allocate(self.losses, self.costs, self.budget, **more)


def drawn_case(seed, size=SIZE, kinds=KINDS + EXTREME):
    """Hypothesis draws one seed; many small draws would mostly be repeats of each other."""
    rng = np.random.default_rng(seed)
    n, L = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    names = rng.choice(kinds, size).tolist()
    if "small integers" in names and rng.random() < 0.5:
        names = ["small integers"] * size  # stays an integer dtype
    made = [drawn(kind, n, L, rng) for kind in names]
    losses, costs = (np.stack([each[k] for each in made]) for k in (0, 1))
    low, high = rng.integers(0, L, (2, size, n)) if rng.random() < 0.3 else (np.zeros((size, n), int), L - 1)
    least, most = np.minimum(low, high), np.maximum(low, high)
    nested = rng.integers(0, 4)  # budget; parts; parts and budget; parts within parts and budget
    fine = rng.integers(0, 3, n)
    labels = [] if nested == 0 else [fine] if nested < 3 else [fine // 2, fine]
    inside = (np.arange(L) >= least[..., None]) & (np.arange(L) <= most[..., None])
    cheap, dear = np.where(inside, costs, np.inf).min(-1), np.where(inside, costs, -np.inf).max(-1)

    def limit(groups):
        """Between the smallest that can be kept and more than is ever used; now and then one of the two."""
        ends = [np.array([math.fsum(row[groups]) for row in end]) for end in (cheap, dear)]
        share = rng.choice([0.0, 1.0, *rng.random(8)], size)
        between = np.maximum(ends[0], np.where(share == 1, ends[1], ends[0] + share * (ends[1] - ends[0])))
        return np.where(rng.random(size) < 0.05, np.inf, between)

    parts = [(own, np.stack([limit(own == p) for p in range(own.max() + 1)], -1)) for own in labels]
    budget = None if nested == 1 else limit(np.ones(n, bool))
    return Case(names, losses, costs, budget, parts, least, most)


def check(case, b, answer, promise=True):
    """One answer of a batch beside the oracle."""
    losses, costs = case.rows(b)
    budgets = case.budgets(b)
    optimum = oracle.allocation(losses, costs, [(set(groups.tolist()), limit) for _, groups, limit in budgets])
    levels, n = answer.levels[b], len(losses)
    chosen = [case.losses[b, i, levels[i]] for i in range(n)]
    spent = [case.costs[b, i, levels[i]] for i in range(n)]
    assert (levels >= case.least[b]).all(), "a level below least"
    assert (levels <= case.most[b]).all(), "a level above most"
    for _, groups, limit in budgets:
        assert math.fsum(spent[i] for i in groups) <= limit, "a budget is exceeded"
    f, bound = Fraction(answer.objective[b]), answer.lower_bound[b]
    assert float(f) == math.fsum(chosen), "the objective is not the sum of the losses"
    assert answer.cost[b] == pytest.approx(math.fsum(spent), rel=EPS), "the cost is not the sum of the costs"
    assert bound <= max(optimum, float(optimum)), "the bound is above the optimum"
    size = sum(map(abs, chosen))
    slack = 1 - 1e-6 if case.losses.dtype.kind == "i" else max(1e-9 * abs(float(f)), 64 * n * EPS * size)
    if answer.status[b] is Status.OPTIMAL:
        assert f - optimum <= slack, "OPTIMAL, and it is not"
    if promise:
        binding = [answer.multipliers[b] if name == "budget" else answer.part_multipliers[name[0]][b, name[1]]
                   for name, _, _ in budgets]  # fmt: skip
        steps = [max((oracle.largest_step(losses[i], costs[i]) for i in groups), default=0) for _, groups, _ in budgets]
        # Of nested parts that stop at equal slopes, the outer one alone has a price. The others hold back steps that
        # are worth just what a group pays already.
        paid = [
            sum(price for price, (_, groups, _) in zip(binding, budgets, strict=True) if i in groups) for i in range(n)
        ]
        room = [limit - math.fsum(spent[i] for i in groups) for _, groups, limit in budgets]
        held = [
            any(
                more > left and saved > 0 and saved == pytest.approx(paid[i] * more, rel=1e-9)
                for i in groups
                for more, saved in zip(np.subtract(costs[i], spent[i]), np.subtract(chosen[i], losses[i]), strict=True)
            )
            for (_, groups, _), left in zip(budgets, room, strict=True)
        ]
        most = sum(step for step, price, holds in zip(steps, binding, held, strict=True) if price > 0 or holds)
        rounding = 1e-9 * sum(max(map(abs, row)) for row in losses)
        assert f - Fraction(bound) <= most + Fraction(rounding), (
            "the gap is larger than a step per budget that holds one back"
        )
    return optimum


@pytest.mark.slow
@settings(max_examples=math.ceil(WANTED / SIZE))
@given(seed=SEEDS)
def test_the_lagrangian_beside_the_oracle(seed):
    case = drawn_case(seed)
    answer = case.solve().verify()
    for b, kind in enumerate(case.kinds):
        check(case, b, answer, promise=kind in KINDS)


def test_parts_that_stop_at_equal_slopes_have_one_price_and_hold_back_a_step_each():
    """Found among 100,000 draws: the gap is larger than the largest step in the one budget that has a price."""
    answer = allocate([[0.8, 0.3], [-0.5, -1.2]], [[0.0, 0.5], [0.0, 0.7]], 0.7847, parts=[([0, 1], [0.4268, 0.4253])])
    assert answer.levels.tolist() == [0, 0]
    assert (answer.multipliers, answer.part_multipliers[0].tolist()) == (pytest.approx(1), pytest.approx([0, 0]))
    assert 0.7 < answer.objective - answer.lower_bound <= 0.5 + 0.7


@pytest.mark.slow
@settings(max_examples=math.ceil(WANTED / SIZE))
@given(seed=SEEDS)
def test_the_exact_method_beside_the_oracle(seed):
    case = drawn_case(seed)
    answer = case.solve(method="exact").verify()
    for b, kind in enumerate(case.kinds):
        optimum = check(case, b, answer, promise=False)
        if kind in KINDS and "scales" not in kind:
            assert answer.status[b] is Status.OPTIMAL, kind
            assert answer.objective[b] == pytest.approx(float(optimum), rel=1e-9, abs=1e-12)


@settings(max_examples=20)
@given(seed=SEEDS)
def test_no_single_move_is_left_that_improves_and_fits(seed):
    case = drawn_case(seed, 10)
    answer = case.solve()
    for b in range(len(case.kinds)):
        for i, now in enumerate(answer.levels[b]):
            for level in range(case.least[b, i], case.most[b, i] + 1):
                moved = answer.levels[b].copy()
                moved[i] = level
                spent = case.costs[b, np.arange(len(moved)), moved]
                fits = all(math.fsum(spent[g]) <= limit * (1 - 1e-12) for _, g, limit in case.budgets(b) if i in g)
                assert not fits or case.losses[b, i, level] >= case.losses[b, i, now]


@pytest.mark.slow
@settings(max_examples=10)
@given(seed=SEEDS)
def test_a_batch_answers_as_its_instances_and_torch_as_numpy(seed):
    case = drawn_case(seed, 6)
    for method in ("lagrangian", "exact"):
        whole = case.solve(method=method)
        tensors = allocate(
            torch.from_numpy(case.losses),
            torch.from_numpy(case.costs),
            None if case.budget is None else torch.from_numpy(case.budget),
            parts=[tuple(map(torch.from_numpy, pair)) for pair in case.parts] or None,
            least=torch.from_numpy(case.least),
            most=torch.from_numpy(case.most),
            method=method,
        )
        for b in range(len(case.kinds)):
            alone = allocate(
                case.losses[b],
                case.costs[b],
                None if case.budget is None else case.budget[b],
                parts=[(labels, limits[b]) for labels, limits in case.parts] or None,
                least=case.least[b],
                most=case.most[b],
                method=method,
            )
            for name in ("levels", "cost", "objective", "lower_bound", "gap", "multipliers"):
                one, of_batch, of_torch = getattr(alone, name), getattr(whole, name)[b], getattr(tensors, name)[b]
                assert np.array_equal(one, of_batch), name
                assert isinstance(of_torch, torch.Tensor)
                assert np.array_equal(of_batch, of_torch.numpy()), name
            assert alone.status is whole.status[b]


@pytest.mark.slow
@settings(max_examples=60)
@given(seed=SEEDS)
def test_a_single_budget_takes_the_general_steps_compiled_or_not(seed):
    """A time limit leads through the steps for any budgets; all hulls, levels and prices are those, bit for bit."""
    rng = np.random.default_rng(seed)
    size, more = 4, int(rng.integers(1, 12))
    case = drawn_case(seed, size, ["bits", "small integers", "equal levels", "no order", "loss scales", "quarters"])
    costs, losses = np.tile(case.costs, (1, more, 1)), np.tile(case.losses, (1, more, 1))
    if rng.random() < 0.5:
        losses = losses * rng.random(losses.shape)  # else there are ties
    costs = np.round(costs * 4) / 4  # sums are never rounded
    limits = costs.min(-1).sum(-1) + rng.random(size) * np.ptp(costs, axis=-1).sum(-1)

    def answer(**options):
        found = allocate(losses, costs, limits, **options)
        return [getattr(found, name).tolist() for name in ("levels", "objective", "lower_bound", "multipliers", "cost")]

    general = answer(time_limit=1e6)
    assert answer() == general
    with always_compiled():
        assert answer() == general
        tensors = [torch.from_numpy(x).double() for x in (losses, costs)]
        everything = torch.from_numpy(rng.random(losses.shape) < 0.8)
        everything[..., int(rng.integers(losses.shape[-1]))] = True
        found = steps.lower_hulls(*tensors, everything)
    for one, other in zip(found, steps.reference.lower_hulls(*tensors, everything), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@settings(max_examples=5)
@given(seed=SEEDS)
def test_every_point_of_the_path_is_optimal_at_its_budget(seed):
    rng = np.random.default_rng(seed)
    kinds = [kind for kind in KINDS if "scales" not in kind]
    made = [drawn(kind, 4, 4, rng) for kind in kinds]
    losses, costs = (np.stack([np.asarray(each[k], float) for each in made]) for k in (0, 1))
    path = allocate(losses, costs, np.inf, path=True).path
    assert (np.diff(path.budgets) >= 0).all()
    assert (np.diff(path.objectives) <= 0).all()
    assert (np.diff(path.prices) <= 0).all()
    steps = path.budgets.shape[-1] - 1
    every = [path.levels(point) for point in range(steps + 1)]
    for b, kind in enumerate(kinds):
        for point in range(steps + 1):
            spent = [costs[b, i, level] for i, level in enumerate(every[point][b])]
            lost = [losses[b, i, level] for i, level in enumerate(every[point][b])]
            assert path.budgets[b, point] == math.fsum(spent), kind
            assert path.objectives[b, point] == math.fsum(lost), kind
            if point and path.prices[b, point - 1] > 0:
                changed = np.flatnonzero(every[point][b] != every[point - 1][b])
                assert changed.tolist() == [path.groups[b, point - 1]]
            limit = math.fsum(spent)
            optimum = oracle.allocation(losses[b].tolist(), costs[b].tolist(), [(set(range(4)), limit)])
            assert path.lower_bounds[b, point] <= optimum
            assert path.lower_bounds[b, point] == pytest.approx(float(optimum), rel=1e-9, abs=1e-12), kind
    mixed = path.levels(np.arange(len(kinds)) % (steps + 1))
    assert all(np.array_equal(mixed[b], every[b % (steps + 1)][b]) for b in range(len(kinds)))


def test_a_path_rounds_ties_as_budgets_do():
    """Its first budget was a digit above the budget that `allocate` had kept."""
    losses, costs = [[-0.71, -0.2, -0.63], [-0.82, -0.93, -0.16]], [[0.5, 0.7, 0.7], [0.6, 0.7, 0.2]]
    found = allocate(losses, costs, 0.7, path=True)
    assert found.cost == found.path.budgets[0] == 0.7
    assert found.path.budgets.tolist() == [allocate(losses, costs, b).cost for b in found.path.budgets]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("huge", [1e16, 1e17, 1e300])
def test_of_levels_that_cost_the_same_a_path_takes_the_best_beside_a_huge_loss(huge, compiled):
    """Their slopes round to the same."""
    losses, costs = [[huge, 2.0, 1.5], [huge, 3.0, 0.5]], [0, 2, 2]
    with always_compiled() if compiled else contextlib.nullcontext():
        found = allocate(losses, costs, 4, path=True)
    assert found.objective == found.path.objectives[-1] == 2.0
    assert found.path.levels(2).tolist() == found.levels.tolist() == [2, 2]


def test_a_path_with_more_points_than_prices_keeps_its_bounds(monkeypatch):
    rng = np.random.default_rng(0)
    losses, costs = drawn("real", 40, 5, rng)
    full = allocate(losses, costs, 30.0, path=True).path
    monkeypatch.setattr("grace_opt.allocation.frontier.MAX_PRICES", 7)
    few = allocate(losses, costs, 30.0, path=True).path
    assert (few.lower_bounds <= full.lower_bounds + 1e-12).all()
    assert (few.lower_bounds < full.lower_bounds - 1e-6).any()
    assert (full.objectives - full.lower_bounds <= 1e-12 * full.objectives[0]).all()
    assert few.lower_bounds[-1] == pytest.approx(full.objectives[-1])


def test_many_groups_beside_highs():
    """Hundreds of groups, against an integer program solved by other people's code."""
    scipy = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(1)
    n, L = 60, 5
    losses, costs = rng.random((n, L)), rng.random((n, L))
    costs[:, 0] = 0.0
    labels, limits = np.arange(n) // 20, np.array([5.0, 3.0, 100.0])
    rows = [np.repeat(labels == p, L) * costs.ravel() for p in range(3)] + [costs.ravel()]
    one = np.kron(np.eye(n), np.ones(L))
    known = scipy.milp(
        losses.ravel(),
        constraints=[
            scipy.LinearConstraint(one, 1, 1),
            scipy.LinearConstraint(np.array(rows), -np.inf, [*limits, 14.0]),
        ],
        integrality=np.ones(n * L),
        bounds=scipy.Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    found = allocate(losses, costs, 14.0, parts=[(labels, limits)], method="exact").verify()
    assert found.status is Status.OPTIMAL
    assert float(found.objective) == pytest.approx(known.fun, abs=1e-7)
    fast = allocate(losses, costs, 14.0, parts=[(labels, limits)])
    assert fast.lower_bound <= found.objective <= fast.objective


def test_the_multipliers_give_the_bound_and_are_zero_where_nothing_binds():
    rng = np.random.default_rng(2)
    losses, costs = rng.lognormal(0, 2, (200, 1)) * 4.0 ** -np.arange(9), np.arange(9)
    labels, limits, budget = np.arange(200) % 3, np.array([150.0, 1000.0, 250.0]), 700.0
    found = allocate(losses, costs, budget, parts=[(labels, limits)])
    own, parts = found.multipliers, found.part_multipliers[0]
    assert own > 0
    assert (parts > 0).tolist() == [True, False, True]
    assert found.part_costs[0].sum() == found.cost <= budget
    assert (found.part_costs[0] <= limits).all()
    lagrangian = (losses + (own + parts[labels])[:, None] * costs).min(-1).sum() - own * budget - parts @ limits
    assert found.lower_bound == pytest.approx(lagrangian, rel=1e-12)


def test_the_smallest_budget_in_the_error_can_be_kept():
    rng = np.random.default_rng(3)
    losses, costs = rng.random((4, 9, 3)), rng.random((4, 9, 3)) + 0.1
    with pytest.raises(
        InfeasibleBudgetError, match=r"budget=0\.1 of instance \(0,\).*cheapest admissible levels cost"
    ) as e:
        allocate(losses, costs, 0.1)
    assert allocate(losses, costs, e.value.smallest).verify().cost == pytest.approx(e.value.smallest)
    labels = np.arange(9) // 3
    with pytest.raises(InfeasibleBudgetError, match=r"limit 0 of parts\[0\]=0\.0") as e:
        allocate(losses[0], costs[0], parts=[(labels, 0.0)])
    assert e.value.smallest.shape == (3,)
    allocate(losses[0], costs[0], parts=[(labels, e.value.smallest)]).verify()
    with pytest.raises(InfeasibleBudgetError) as e:
        allocate(losses[0], np.arange(3), 3, least=[1] * 9)
    assert repr(e.value.smallest) == "9.0"
    assert isinstance(e.value, ProblemError)


def test_ten_tenths_keep_a_budget_of_one():
    found = allocate(np.tile([1.0, 0.0], (10, 1)), [0.0, 0.1], 1.0)
    assert found.levels.tolist() == [1] * 10
    assert found.status is Status.OPTIMAL


def test_the_last_digit_of_a_budget_is_neither_wasted_nor_overdrawn():
    found = allocate([[1.0, 0.0]] * 3, [0.0, 0.1], 0.3)  # 0.1 + 0.1 + 0.1 > 0.3
    assert found.verify().levels.tolist() == [1, 1, 0]
    costs = [[0.0, 0.1, 0.1]] * 9 + [[0.0, 0.1, 0.15]]  # the last group's middle level is off the hull
    losses = [[1.0, 0.0, 0.0]] * 9 + [[1.0, 0.8, 0.0]]
    for method in ("lagrangian", "exact"):
        found = allocate(losses, costs, 1.0, method=method).verify()
        assert found.levels.tolist() == [1] * 10
        assert found.cost == 1.0


@settings(max_examples=300)
@given(st.floats(1e-3, 1e3), st.integers(1, 2**20), st.integers(0, 60))
def test_limits_in_units_are_those_of_rounded_sums(limit, odd, bits):
    unit = Fraction(odd | 1, 2**bits) / 2**10
    count = exact._largest_multiple(limit, unit)
    assert float(count * unit) <= limit < float((count + 1) * unit)


def test_limits_halfway_between_two_numbers_round_to_even():
    for limit in (1.0, math.nextafter(1.0, 2.0)):
        unit = (Fraction(limit) + Fraction(math.nextafter(limit, 2.0))) / 2
        assert exact._largest_multiple(limit, unit) == (1 if limit == 1.0 else 0)


def test_the_path_keeps_to_admissible_levels():
    rng = np.random.default_rng(10)
    losses, costs = np.sort(rng.random((6, 5)))[:, ::-1], np.sort(rng.random((6, 5)))
    inner = allocate(losses[:, 1:4], costs[:, 1:4], 9.0, path=True).path
    path = allocate(losses, costs, 9.0, path=True, least=1, most=3).path
    for name in ("budgets", "objectives", "lower_bounds", "prices", "groups"):
        assert np.array_equal(getattr(path, name), getattr(inner, name)), name
    assert np.array_equal(path.levels(3), inner.levels(3) + 1)


def test_sums_of_quarters_are_exact_and_fractions_of_a_unit_buy_nothing():
    losses = [[8.0, 3.0, 0.0]] * 3
    for costs, budget in (([0, 0.25, 0.5], 0.9), ([0, 1, 2], 3.6), ([0, 2.0**-600, 2.0**-599], 3.6 * 2.0**-600)):
        found = allocate(losses, costs, budget)
        assert found.objective == pytest.approx(found.lower_bound, rel=1e-14) == 9.0
        assert found.status is Status.OPTIMAL
    assert allocate(losses, [0, 0.3, 0.6], 1.08).lower_bound < 9.0 - 1e-3  # here the relaxation uses what is left


def test_a_time_limit_of_zero_still_answers():
    rng = np.random.default_rng(4)
    losses, costs = rng.random((60, 6)), np.sort(rng.random((60, 6)))
    for method in ("lagrangian", "exact"):
        found = allocate(losses, costs, 20.0, method=method, time_limit=0).verify()
        assert found.status in (Status.LIMIT, Status.FEASIBLE if method == "lagrangian" else None)
        assert found.lower_bound <= allocate(losses, costs, 20.0, method="exact").objective <= found.objective


def test_too_many_states_are_a_limit(monkeypatch):
    rng = np.random.default_rng(5)
    losses, costs = rng.random((60, 6)), np.sort(rng.random((60, 6)))
    monkeypatch.setattr(exact, "MAX_STATES", 4)
    assert allocate(losses, costs, 20.0, method="exact").status is Status.LIMIT


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=SEEDS, size=st.integers(1, 9))
def test_the_exact_method_in_pieces(monkeypatch, seed, size):
    case = drawn_case(seed)
    whole = case.solve(method="exact")
    with monkeypatch.context() as patched:
        patched.setattr(exact, "STATES_AT_ONCE", size)
        pieces = case.solve(method="exact")
    assert np.array_equal(whole.levels, pieces.levels)
    assert np.array_equal(whole.lower_bound, pieces.lower_bound)
    assert np.array_equal(whole.status, pieces.status)


def test_the_exact_method_looks_at_the_clock_within_a_step(monkeypatch):
    looks = itertools.count()
    monkeypatch.setattr(exact, "time", types.SimpleNamespace(monotonic=lambda: float(next(looks))))
    monkeypatch.setattr(exact, "STATES_AT_ONCE", 8)
    a, b = (exact._Front(np.arange(20), -np.arange(20), np.zeros(20), (group, np.arange(20))) for group in (0, 1))
    search = exact._Search(None, [], 1.0, 3.5)
    with pytest.raises(exact._StoppedError):
        search.merge(a, b, 100)
    assert next(looks) == 5


def test_half_precision_and_integers_are_exact():
    rng = np.random.default_rng(6)
    losses = torch.from_numpy(rng.random((5, 3))).to(torch.bfloat16)
    one = allocate(losses, [0, 1, 2], 4)
    assert isinstance(one.levels, torch.Tensor)
    two = allocate(losses.to(torch.float64), [0, 1, 2], 4)
    assert torch.equal(one.levels, two.levels)
    assert one.objective == two.objective
    assert one.objective.dtype == torch.float64
    step = allocate(np.array([[4, 0], [3, 0]]), [[0, 3], [0, 4]], 4)
    assert step.objective == step.lower_bound == 3
    assert step.status is Status.OPTIMAL  # the relaxation's 2.25 is within a step of 3


def test_a_scale_of_all_changes_nothing():
    rng = np.random.default_rng(7)
    losses, costs = rng.random((2, 50, 5))
    one = allocate(losses, costs, 12.0)
    for down, up in itertools.product((-960, -40, 0, 40, 990), repeat=2):
        other = allocate(losses * 2.0**down, costs * 2.0**up, 12.0 * 2.0**up)
        assert np.array_equal(one.levels, other.levels)
        assert other.lower_bound == one.lower_bound * 2.0**down


def test_losses_below_the_normal_numbers_are_told_apart():
    losses = np.random.default_rng(11).integers(0, 2**9, (30, 5))
    one, tiny = allocate(losses, np.arange(5), 50), allocate(losses * 2.0**-1070, np.arange(5), 50)
    assert np.array_equal(one.levels, tiny.levels)
    assert tiny.objective == one.objective * 2.0**-1070


def test_a_bound_that_loses_digits_is_rounded_down():
    fine = torch.tensor([1.0 + 2.0**-20, -1.0 - 2.0**-20, 1.0], dtype=torch.float64)
    found = unscale(fine, torch.full((3,), -1070))
    assert (found * 2.0**1000 * 2.0**70 <= fine).all()
    assert found[2] == 2.0**-1070


@pytest.mark.slow
@settings(max_examples=200)
@given(SEEDS)
def test_sums_are_rounded_once(seed):
    rng = np.random.default_rng(seed)
    wide = rng.normal(size=(20, 5)) * 10.0 ** rng.uniform(-60, 60, (20, 5))
    halves = 2.0 ** rng.integers(-54, 3, (20, 5)) * rng.integers(-1, 2, (20, 5))  # ties, and a little beside them
    cancelling = np.concatenate([wide, -wide[:, ::-1], rng.random((20, 1))], -1)
    for rows in (wide, halves, cancelling, rng.integers(0, 99, (20, 7)) / 10):
        terms = torch.from_numpy(rows)
        assert exact_sum(terms).tolist() == [math.fsum(row) for row in rows]
        for part, of_torch in zip(paired_sums(rows, np.zeros), paired_sums(terms, terms.new_zeros), strict=True):
            assert part.tolist() == of_torch.tolist()  # as on other devices
        expected = [[math.fsum(row[:count]) for count in range(1, len(row) + 1)] for row in rows]
        assert running_sums(terms).tolist() == expected


BAD = {
    "nan": (([[np.nan, 1.0]], [0, 1], 1), {}, ProblemError, r"losses\[0, 0\] is nan"),
    "inf": (([[np.inf, 1.0]], [0, 1], 1), {}, ProblemError, "forbid a level"),
    "nan cost": (([[0.0, 1.0]], [0, np.nan], 1), {}, ProblemError, r"costs\[1\] is nan"),
    "bools": (([[True, False]], [0, 1], 1), {}, ProblemError, "bool"),
    "bool costs": (([[1.0, 0.0]], [False, True], 1), {}, ProblemError, "bool"),
    "bool budget": (([[1.0, 0.0]], [0, 1], True), {}, ProblemError, "bool"),
    "text": (([[1.0, 0.0]], [0, 1], "1"), {}, ProblemError, "budget is a str"),
    "nan budget": (([[1.0, 0.0]], [0, 1], np.nan), {}, ProblemError, "nan.*inf means no limit"),
    "negative cost": (([[1.0, 0.0]], [-1, 1], 1), {}, ProblemError, "cannot be negative.*level|level 0"),
    "one row": (([1.0, 0.0], [0, 1], 1), {}, ProblemError, "one row per group"),
    "no groups": ((np.ones((0, 3)), [0, 1, 2], 1), {}, ProblemError, "empty"),
    "no levels": ((np.ones((3, 0)), [], 1), {}, ProblemError, "empty"),
    "costs of another shape": ((np.ones((2, 3)), [0, 1], 1), {}, ProblemError, r"costs has shape \(2,\).*\(3,\)"),
    "budgets of another shape": ((np.ones((2, 3)), [0, 1, 2], [1, 2]), {}, ProblemError, r"\(2,\): give one number"),
    "integers beyond 2**53": ((np.full((1, 2), 2**60), [0, 1], 1), {}, ProblemError, r"2\*\*53"),
    "budget beyond 2**53": (([[1.0, 0.0]], [0, 1], 2**60 + 1), {}, ProblemError, r"2\*\*53"),
    "too large a sum": ((np.full((4, 2), 1e308), [0, 1], 1), {}, ProblemError, "losses sum.*power of two"),
    "too large costs": ((np.ones((40, 2)), [0, 1e307], 1), {}, ProblemError, "budgets too"),
    "both kinds": ((np.ones((1, 2)), torch.ones(2), 1), {}, ProblemError, "mixed"),
    "no budget": (([[1.0, 0.0]], [0, 1]), {}, OptionError, "needs a budget"),
    "method": (([[1.0, 0.0]], [0, 1], 1), {"method": "dp"}, OptionError, "'lagrangian' or 'exact'"),
    "time limit": (([[1.0, 0.0]], [0, 1], 1), {"time_limit": -1}, OptionError, "time_limit=-1"),
    "path": (([[1.0, 0.0]], [0, 1], 1), {"path": 1}, OptionError, "True or False"),
    "path of parts": (([[1.0, 0.0]], [0, 1], 1), {"path": True, "parts": [([0], 1)]}, OptionError, "single budget"),
    "least too high": (([[1.0, 0.0]], [0, 1], 1), {"least": 2}, ProblemError, "least holds 2: give a level from 0"),
    "negative most": (([[1.0, 0.0]], [0, 1], 1), {"most": -1}, ProblemError, "most holds -1"),
    "real least": (([[1.0, 0.0]], [0, 1], 1), {"least": 0.5}, ProblemError, "least has dtype float64"),
    "bool least": (([[1.0, 0.0]], [0, 1], 1), {"least": True}, ProblemError, "least has dtype bool"),
    "no level left": (([[1.0, 0.0]], [0, 1], 1), {"least": 1, "most": 0}, ProblemError, "group 0 may have no level"),
    "least of another shape": ((np.ones((2, 3)), [0, 1, 2], 1), {"least": [0] * 3}, ProblemError, "least has shape"),
    "parts that are no pairs": (([[1.0, 0.0]], [0, 1]), {"parts": ([0], [1])}, OptionError, "list of pairs"),
    "labels of another shape": (([[1.0, 0.0]], [0, 1]), {"parts": [([0, 1], 1)]}, ProblemError, "labels of parts.0"),
    "negative labels": (([[1.0, 0.0]], [0, 1]), {"parts": [([-1], 1)]}, ProblemError, "integers from 0 on"),
    "labels that are names": ((np.ones((2, 2)), [0, 1]), {"parts": [([0, 10**12], 1)]}, ProblemError, "np.unique"),
    "too few limits": ((np.ones((2, 2)), [0, 1]), {"parts": [([0, 3], [1, 1])]}, ProblemError, "part 3 and 2 limits"),
    "crossing": (
        (np.ones((4, 2)), [0, 1], 4),
        {"parts": [([0, 0, 1, 1], 2), ([0, 1, 0, 1], 2)]},
        ProblemError,
        r"part 0 of parts\[0\] lies in several parts of parts\[1\].*nested",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_is_wrong(name):
    given_, options, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        allocate(*given_, **options)


def test_a_point_outside_the_path_is_refused():
    path = allocate([[9.0, 3.0]], [0, 1], 1, path=True).path
    for point in (-1, 2, 0.5, True, [0, 5], np.array([0.5])):
        with pytest.raises(ProblemError, match="point"):
            path.levels(point)
    with pytest.raises(ProblemError, match=r"point has shape \(2,\): give an integer from 0 to 1, or only one"):
        path.levels([0, 1])
    batch = allocate([[[9.0, 3.0]]] * 2, [0, 1], 1, path=True).path
    assert batch.levels([0, 1]).tolist() == [[0], [1]]
    with pytest.raises(ProblemError, match=r"point has shape \(3,\).*one per instance, shape \(2,\)"):
        batch.levels([0, 1, 0])


@pytest.mark.parametrize("losses", [[[1e36, 3.0], [4e17, 2.0]], [[1e40, 0.3], [1e20, 0.2], [7.0, 0.1]]])
def test_a_path_sums_losses_beside_giants_that_have_gone(losses):
    path = allocate(losses, [0, 1], len(losses), path=True).path
    expected = [sum(losses[i][level] for i, level in enumerate(path.levels(at).tolist())) for at in range(len(losses))]
    assert path.objectives[:-1].tolist() == pytest.approx(expected, rel=1e-15)
    assert path.objectives[-1] == pytest.approx(math.fsum(row[1] for row in losses), rel=1e-15)
    assert (path.lower_bounds <= path.objectives).all()
    assert path.lower_bounds[-1] == pytest.approx(path.objectives[-1], rel=1e-9)


WRONG = {
    "a budget is exceeded": {"levels": lambda case, a: case.most},
    "a level below least": {"levels": lambda case, a: a.levels * 0 - 1},
    "the objective is not": {"objective": lambda case, a: np.nextafter(a.objective, -np.inf)},
    "the bound is above": {"lower_bound": lambda case, a: a.objective * 2 + 1},
    "OPTIMAL, and it is not": {
        "levels": lambda case, a: case.least,
        "objective": lambda case, a: np.array([math.fsum(case.losses[b, :, 0]) for b in range(len(a.levels))]),
        "cost": lambda case, a: np.array([math.fsum(case.costs[b, :, 0]) for b in range(len(a.levels))]),
        "lower_bound": lambda case, a: a.lower_bound - 1e9,
        "status": lambda case, a: np.full(len(a.levels), Status.OPTIMAL),
    },
    "the gap is larger": {"lower_bound": lambda case, a: a.lower_bound - 1e9},
}


@pytest.mark.slow
@pytest.mark.parametrize("message", WRONG)
def test_the_checks_catch_wrong_answers(message):
    rng = np.random.default_rng(8)
    losses, costs = (np.stack(each) for each in zip(*[drawn("real", 5, 4, rng) for _ in range(3)], strict=True))
    ends = np.zeros((3, 5), int), np.full((3, 5), 3)
    case = Case(["real"] * 3, losses, costs, costs.max(-1).sum(-1) * 0.6, [], *ends)
    answer = case.solve()
    wrong = dataclasses.replace(answer, **{name: make(case, answer) for name, make in WRONG[message].items()})
    for b in range(3):
        check(case, b, answer)
        with pytest.raises(AssertionError, match=message):
            check(case, b, wrong)


def test_an_allocation_verifies_itself():
    rng = np.random.default_rng(9)
    answer = allocate(rng.random((2, 6, 3)), np.sort(rng.random((6, 3))), 2.0, most=[2, 2, 2, 2, 2, 1])
    assert answer.verify() is answer
    for change, message in (
        ({"levels": answer.levels + 2}, "admissible"),
        ({"levels": answer.levels * 0 + [2, 2, 2, 2, 2, 1]}, "budget"),
        ({"objective": answer.objective + 1e-9}, "differs"),
        ({"lower_bound": answer.objective * 1.1}, "above"),
        ({"problem": None}, "no problem"),
    ):
        with pytest.raises(SolverError, match=message):
            dataclasses.replace(answer, **change).verify()


def test_it_shows_itself():
    losses = [[9.0, 3.0, 1.0], [4.0, 2.0, 1.0]]
    assert "gap" in repr(allocate(losses, [0, 2, 4], 4))
    assert repr(allocate([losses] * 2, [0, 2, 4], 4)) == "<Allocation of 2 instances by lagrangian: 2 OPTIMAL>"
    assert grace_opt.allocate is allocate


def test_compiled_steps_take_numbers_of_any_type() -> None:
    """They are told addresses, so what lies there has to be of their types: limits in float32, strided losses."""
    from grace_opt.kernels.steps import cpu

    rng = np.random.default_rng(0)
    losses = torch.from_numpy(np.sort(rng.random((2, 7, 5)))).flip(-1)
    costs, may = torch.arange(5.0, dtype=torch.float64).expand(2, 7, 5), torch.ones(2, 7, 5, dtype=torch.bool)
    hulls = steps.reference.lower_hulls(losses, costs, may)
    limits = torch.tensor([9.0, 14.0], dtype=torch.float64)
    expected = *hulls, *steps.reference.within_budget(losses, costs, may, limits, *hulls)
    strided = losses.mT.contiguous().mT
    found = (
        *cpu.lower_hulls(strided, costs.float(), may),
        *cpu.within_budget(strided, costs.float(), may, limits.float(), *hulls),
    )
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("costs", [[2.0**53, 1.0, 1e-30], [2.0**53 + 2, 1.0, 1e-30], [2.0**53, 1.0, 0.0]])
def test_every_point_of_a_path_can_be_afforded_at_its_own_budget(costs):
    """Pairs of numbers do not hold what decides on which side of a tie a cost lies."""
    losses, costs = [[1.0, 0.0]] * 3, [[0.0, cost] for cost in costs]
    path = allocate(losses, costs, 1e300, path=True).path
    for point, budget in enumerate(path.budgets):
        levels = path.levels(point)
        assert math.fsum(cost[level] for cost, level in zip(costs, levels, strict=True)) <= budget
        assert allocate(losses, costs, budget).objective <= path.objectives[point]
