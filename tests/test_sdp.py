"""The semidefinite bound never exceeds the optimum, whatever the solver returned, and is as tight as the relaxation."""

import importlib.util
import itertools
import time

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grace_opt
from grace_opt import Status, solve
from grace_opt._util.arrays import power_of_two_scale
from grace_opt.bounds import sdp_dual, sdp_primal
from grace_opt.bounds.sdp_dual import SdpMultipliers, dual_bound
from grace_opt.bounds.sdp_primal import solve_sdp
from grace_opt.errors import OptionError, SolverError, UnknownSolverError
from grace_opt.testing import KINDS, check_solution, instance, instances
from tests import oracle


def slack(W):
    """1e-12 Σ|W| is the rounding of the oracle's own sums; the bound takes off its own margin."""
    return 1e-12 * np.abs(W).sum()


def garbage(rng, m, kind, size):
    """SdpMultipliers of any sign and no relation to the instance."""

    def part():
        return rng.normal(size=(m, m)) * size

    return {
        "equalities": lambda: SdpMultipliers(rng.normal(size=m) * size, float(rng.normal() * size)),
        "both": lambda: SdpMultipliers(np.zeros(m), 0.0, both=part()),
        "one": lambda: SdpMultipliers(np.zeros(m), 0.0, one=part()),
        "neither": lambda: SdpMultipliers(np.zeros(m), 0.0, neither=part()),
        "all": lambda: SdpMultipliers(rng.normal(size=m) * size, float(rng.normal() * size), part(), part(), part()),
    }[kind]()


GARBAGE = ("equalities", "both", "one", "neither", "all")


@settings(max_examples=300)
@given(
    instances(max_n=7),
    st.sampled_from(sdp_primal.RELAXATIONS),
    st.sampled_from([{}, {"solver": "scs"}, {"solver": "scs", "max_iters": 5}, {"solver": "scs", "polish": False}]),
)
@pytest.mark.slow
def test_the_bound_never_exceeds_the_optimum(drawn, relaxation, options):
    W, k, protected = drawn
    sol = solve(W, k, "sdp", protected=protected, relaxation=relaxation, **options).verify()
    check_solution(W, k, sol, protected or None)
    best = oracle.optimum(W, k, protected)
    assert float(sol.lower_bound) <= best + slack(W)
    if sol.status is Status.OPTIMAL:
        assert float(sol.objective) <= best + 1e-9 * max(abs(best), np.abs(W).sum())


@pytest.mark.slow
@settings(max_examples=300)
@given(instances(max_n=7), st.sampled_from(GARBAGE), st.sampled_from([1e-3, 1.0, 1e4]), st.integers(0, 2**32 - 1))
def test_any_multipliers_give_a_bound(drawn, kind, size, seed):
    W, k, _ = drawn
    if 1 <= k < len(W):
        given_ = garbage(np.random.default_rng(seed), len(W), kind, size * np.abs(W).max())
        assert dual_bound(W, k, given_) <= oracle.optimum(W, k) + slack(W)


@pytest.mark.parametrize("kind", GARBAGE)
def test_without_the_eigenvalue_the_bound_is_the_separable_minimum(monkeypatch, kind):
    """With M's part computed exactly per set, what is left is the identity of the docstring, term by term."""
    rng, m, k = np.random.default_rng(3), 6, 3
    W = instance("wishart", m, 1)
    given_ = garbage(rng, m, kind, 1.0)
    seen = {}
    monkeypatch.setattr(sdp_dual.np.linalg, "eigvalsh", lambda M: seen.update(M=M) or np.zeros(1))
    separable = dual_bound(W, k, given_)
    M, zero = seen["M"] * power_of_two_scale(W), np.zeros((m, m))
    B, C, H = (
        zero if part is None else part * ~np.eye(m, dtype=bool) for part in (given_.both, given_.one, given_.neither)
    )
    rest = []
    for S in itertools.combinations(range(m), k):
        x = np.zeros(m)
        x[list(S)] = 1.0
        terms = x @ B @ x + x @ C @ (1 - x) + (1 - x) @ H @ (1 - x) - H.sum() - given_.total * k * k
        assert x @ W @ x == pytest.approx(x @ M @ x + terms, abs=1e-10)
        rest.append(terms)
    assert separable <= min(rest) + 1e-9


def planted_rows(A, off, count):
    """All off-diagonal entries of a row, as if each vertex had all others for chosen neighbours."""
    return np.where(off, A, 0.0).sum(1)


def planted_reversed(A, off, count):
    """The largest instead of the smallest."""
    return lifted_row_minima(-A, off, count) * -1.0


lifted_row_minima = sdp_dual._row_minima


@pytest.mark.parametrize("planted", [planted_rows, planted_reversed])
def test_a_wrong_minimum_would_be_caught(monkeypatch, planted):
    monkeypatch.setattr(sdp_dual, "_row_minima", planted)
    # Good multipliers: with random ones the eigenvalue's part is so low that no mistake elsewhere shows.
    found = [(W := instance("wishart", 7, s), solve_sdp(W, 3, "rlt").multipliers) for s in range(5)]
    assert any(dual_bound(W, 3, given_) > oracle.optimum(W, 3) for W, given_ in found)


def test_a_wrong_eigenvalue_would_be_caught(monkeypatch):
    monkeypatch.setattr(sdp_dual.np.linalg, "eigvalsh", lambda M: np.linalg.eigh(M)[0][1:])
    found = [(W := instance("wishart", 7, s), solve_sdp(W, 3).multipliers) for s in range(5)]
    assert any(dual_bound(W, 3, given_) > oracle.optimum(W, 3) for W, given_ in found)


@pytest.mark.slow
def test_the_solver_s_objective_is_no_bound_and_ours_is():
    above = 0
    for seed, iterations in itertools.product(range(10), (20, 60, 120)):
        W = instance("attention", 7, seed)
        best = oracle.optimum(W, 3)
        sol = solve(W, 3, "sdp", solver="scs", max_iters=iterations)
        above += sol.stats["relaxation"][0] > best * (1 + 1e-4)
        assert float(sol.lower_bound) <= best
    assert above > 0, "this test needs an instance on which SCS, stopped early, prints more than the optimum"


def lifted_value(W, k, relaxation):
    """The relaxation as textbooks write it, in Y with its border and on the face of an orthonormal basis."""
    m = len(W)
    a = np.concatenate([[-k], np.ones(m)])
    V = np.linalg.svd(a[None])[2][1:].T
    R = cp.Variable((m, m), PSD=True)
    Y = V @ R @ V.T
    x, X = Y[0, 1:], Y[1:, 1:]
    rows = [Y[0, 0] == 1, cp.diag(X) == x]
    if relaxation != "shor":
        rows.append(X >= 0)
    if relaxation == "rlt":
        rows += [X[i, j] <= x[i] for i in range(m) for j in range(m) if i != j]
        rows += [X[i, j] >= x[i] + x[j] - 1 for i in range(m) for j in range(i)]
    return cp.Problem(cp.Minimize(cp.sum(cp.multiply(W, X))), rows).solve(solver="CLARABEL")


@pytest.mark.parametrize("relaxation", sdp_primal.RELAXATIONS)
@pytest.mark.parametrize("kind", ["wishart", "attention", "indefinite", "zero rows"])
def test_the_certified_value_is_the_relaxation_s(kind, relaxation):
    W, k = instance(kind, 9, 4), 4
    W = W / np.abs(W).max()
    expected = lifted_value(W, k, relaxation)
    found = solve_sdp(W, k, relaxation)
    assert found.converged
    assert found.value == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert dual_bound(W, k, found.multipliers) == pytest.approx(found.value, rel=1e-6, abs=1e-7)
    first_order = solve_sdp(W, k, relaxation, solver="scs", max_iters=50_000)
    assert dual_bound(W, k, first_order.multipliers) == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_more_constraints_give_better_bounds(kind):
    W, k = instance(kind, 8, 2), 3
    size = np.abs(W).sum()
    shor, dnn, rlt = (float(solve(W, k, "sdp", relaxation=r).lower_bound) for r in sdp_primal.RELAXATIONS)
    assert shor <= dnn + 1e-6 * size
    assert dnn <= rlt + 1e-6 * size
    assert rlt <= oracle.optimum(W, k) + slack(W)


def test_rlt_proves_what_shor_does_not():
    W = instance("wishart", 10, 0)
    shor = solve(W, 5, "sdp", relaxation="shor")
    rlt = solve(W, 5, "sdp", solver="clarabel")
    assert float(rlt.gap) < 1e-7 < 1e-2 < float(shor.gap)
    assert float(rlt.objective) == pytest.approx(oracle.optimum(W, 5), rel=1e-12)


@pytest.mark.parametrize("exponent", [-400, -101, 1, 300])
def test_scaling_by_powers_of_two_changes_nothing_else(exponent):
    W = instance("attention", 8, 0)
    plain, scaled = (solve(A, 3, "sdp") for A in (W, W * 2.0**exponent))
    assert (plain.mask == scaled.mask).all()
    assert float(scaled.lower_bound) == pytest.approx(float(plain.lower_bound) * 2.0**exponent, rel=1e-14)


def test_adding_a_constant_shifts_the_bound():
    W, k = instance("indefinite", 8, 0), 3
    plain, shifted = (float(solve(A, k, "sdp", relaxation="shor").lower_bound) for A in (W, W + 5.0))
    assert shifted == pytest.approx(plain + 5 * k * k, abs=1e-5)


@pytest.mark.parametrize("k", [0, 1, 6, 7])
def test_forced_and_nearly_forced_choices_need_no_solver(monkeypatch, k):
    monkeypatch.setattr(sdp_primal, "solve_sdp", None)
    for kind in KINDS:
        W = instance(kind, 9, 1)
        sol = solve(W, k, "sdp", protected=[0, 8])
        assert sol.status is Status.OPTIMAL, kind
        assert float(sol.objective) == pytest.approx(oracle.optimum(W, k, [0, 8]), abs=slack(W)), kind
    assert solve(np.zeros((6, 6)), 3, "sdp").status is Status.OPTIMAL


def test_multipliers_that_are_not_finite_give_no_bound():
    W = instance("wishart", 5, 0)
    for value in (np.nan, np.inf, 1e308):
        assert dual_bound(W, 2, SdpMultipliers(np.full(5, value), 0.0)) == -np.inf
        assert dual_bound(W, 2, SdpMultipliers(np.zeros(5), 0.0, both=np.full((5, 5), value))) == -np.inf


@pytest.mark.slow
def test_equal_seeds_round_equally_and_no_rounding_is_an_option():
    W = instance("indefinite", 14, 0)
    one, two = (solve(W, 6, "sdp", seed=3, polish=False) for _ in range(2))
    assert (one.mask == two.mask).all()
    top = solve(W, 6, "sdp", roundings=0, polish=False)
    check_solution(W, 6, top)
    assert float(solve(W, 6, "sdp").objective) <= min(float(one.objective), float(top.objective)) + slack(W)


def test_an_expired_limit_leaves_an_answer():
    W = instance("attention", 40, 0)
    sol = solve(W, 20, "sdp", time_limit=1e-9)
    check_solution(W, 20, sol)
    assert sol.status is Status.LIMIT
    assert sol.lower_bound == -np.inf


def test_time_is_left_for_what_is_around_scs(monkeypatch):
    """It does not count the time that it takes to set itself up, nor what the bound takes then."""
    scs, given = pytest.importorskip("scs"), []
    of_model = cp.Problem.get_problem_data

    def slow(*arguments, **settings):
        time.sleep(0.2)
        return of_model(*arguments, **settings)

    class Spy(scs.SCS):
        def __init__(self, *arguments, **settings):
            given.append(settings["time_limit_secs"])
            super().__init__(*arguments, **settings)

    monkeypatch.setattr(cp.Problem, "get_problem_data", slow)
    monkeypatch.setattr(scs, "SCS", Spy)
    solve_sdp(instance("attention", 12, 0), 5, solver="scs", time_limit=100)
    (limit,) = given
    assert 50 < limit <= 100 - 0.2 - sdp_primal.AROUND_SCS * 0.2


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["clarabel", "scs"])
def test_stopped_early_the_bound_still_holds(solver):
    W = instance("attention", 12, 0)
    best = oracle.optimum(W, 5)
    for iterations in (1, 2, 5):
        sol = solve(W, 5, "sdp", solver=solver, max_iters=iterations)
        assert sol.status is Status.LIMIT
        assert -np.inf < float(sol.lower_bound) <= best
    # Within its first steps, SCS may take an instance for unbounded; that is no failure either.
    for kind, steps in itertools.product(KINDS, (1, 2, 3)):
        A = instance(kind, 8, 0)
        assert float(solve(A, 3, "sdp", solver=solver, max_iters=steps).lower_bound) <= oracle.optimum(A, 3) + slack(A)
    assert float(solve(W, 5, "sdp", solver=solver, time_limit=0.02).lower_bound) <= best


def test_the_status_of_a_failed_solver_is_passed_on(monkeypatch):
    W = instance("wishart", 8, 0)

    def failing(*args, solver, **settings):
        raise SolverError(f"{solver} ended without a solution: NumericalError.")

    monkeypatch.setattr(sdp_primal, "solve_sdp", failing)
    with pytest.raises(
        SolverError, match=r"clarabel .*NumericalError.* scs .*NumericalError.*local_search.*n = 8, k = 3"
    ):
        solve(W, 3, "sdp")


def test_auto_falls_back(monkeypatch):
    right = sdp_primal.solve_sdp

    def fragile(*args, solver, **settings):
        if solver == "clarabel":
            raise SolverError("clarabel ended without a solution: NumericalError.")
        return right(*args, solver=solver, **settings)

    monkeypatch.setattr(sdp_primal, "solve_sdp", fragile)
    assert solve(instance("wishart", 8, 0), 3, "sdp").stats["solver"] == ["scs"]


def test_a_missing_solver_is_named(monkeypatch):
    right = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "scs" else right(name, *rest))
    with pytest.raises(UnknownSolverError, match="pip install scs"):
        solve(instance("wishart", 8, 0), 3, "sdp", solver="scs")


def test_what_does_not_fit_into_memory_is_refused_at_once():
    W = np.eye(120)
    with pytest.raises(
        SolverError, match=r"'rlt' on n = 110 .* 2\.2 GiB with clarabel.* max_memory = 1 GiB: solver='scs'"
    ):
        solve(W, 50, "sdp", solver="clarabel", max_memory=1, protected=list(range(10)))
    with pytest.raises(SolverError, match="local_search"):
        solve(W, 50, "sdp", max_memory=1e-3)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("relaxation", "sos"),
        ("solver", "mosek"),
        ("eps", 0),
        ("eps", float("nan")),
        ("max_iters", 0),
        ("max_iters", True),
        ("roundings", -1),
        ("polish", 1),
        ("max_memory", -2),
    ],
)
def test_bad_options_are_named(option, value):
    with pytest.raises(OptionError, match=option):
        solve(np.eye(4), 2, "sdp", **{option: value})


def test_a_batch_reports_each_instance():
    W = np.stack([instance("wishart", 6, s) for s in range(3)])
    sol = solve(W, [1, 3, 3], "sdp")
    assert sol.stats["solver_status"] == ["not needed", "Solved", "Solved"]
    assert len(sol.stats["relaxation"]) == 3
    assert grace_opt.solve(W[1], 3, "sdp").stats["relaxation"] == [sol.stats["relaxation"][1]]
