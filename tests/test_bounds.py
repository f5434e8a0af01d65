"""Bounds never exceed the optimum, on anything; and they are tight where theory says so."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt import Problem, ProblemError, bounds, solve
from grace_opt.instances import generators
from grace_opt.testing import KINDS, batches, instance, instances
from tests import oracle

ALL = {
    "eigenvalue": bounds.eigenvalue_bound,
    "continuous scaled": lambda p: bounds.continuous_bound(p, shift="scaled"),
    "continuous uniform": lambda p: bounds.continuous_bound(p, shift="uniform"),
    "certificate": lambda p: bounds.certificate(p, "fast"),
    "one step": lambda p: bounds.continuous_bound(p, steps=1),
}


@settings(max_examples=150)
@given(instances())
def test_bounds_are_valid(drawn):
    W, k, protected = drawn
    best = oracle.optimum(W, k, protected)
    problem = Problem.of(W, k, protected=protected).flatten()
    for name, bound in ALL.items():
        # 1e-12 Σ|W| is the rounding of the oracle's own W; the bounds take off their margins themselves.
        assert float(bound(problem)) <= best + 1e-12 * np.abs(W).sum(), name


@settings(max_examples=40)
@given(batches())
def test_batched_bounds_equal_looped(drawn):
    W, k, protected = drawn
    whole = Problem.of(W, k, protected=protected).flatten()
    for name, bound in ALL.items():
        together = bound(whole)
        for b in range(len(W)):
            alone = bound(Problem.of(W[b], int(k[b]), protected=protected[b]).flatten())[0]
            assert together[b] == pytest.approx(float(alone), abs=1e-9 * max(np.abs(W[b]).sum(), 1e-300)), name


def test_diagonal_and_constant_instances_are_closed():
    diagonal = Problem.of(np.diag(np.arange(1.0, 9.0)), 3).flatten()
    assert float(bounds.continuous_bound(diagonal)) == pytest.approx(6.0, rel=1e-3)
    constant = Problem.of(np.ones((8, 8)), 3).flatten()
    assert float(bounds.eigenvalue_bound(constant)) == pytest.approx(9.0, rel=1e-9)


def test_the_relaxation_matches_a_convex_solver():
    cvxpy = pytest.importorskip("cvxpy")
    for seed in range(5):
        W = instance("attention", 12, seed)
        W /= np.trace(W)
        x = cvxpy.Variable(12)
        model = cvxpy.Problem(
            cvxpy.Minimize(cvxpy.quad_form(x, cvxpy.psd_wrap(W))), [x >= 0, x <= 1, cvxpy.sum(x) == 5]
        )
        expected = model.solve(solver="CLARABEL")
        ours = bounds.continuous_bound(Problem.of(W, 5).flatten(), shift="none", steps=5000, rtol=1e-7)
        assert float(ours) == pytest.approx(expected, rel=1e-5)


def test_no_shift_refuses_indefinite_weights():
    W = np.stack([np.eye(3), np.diag([4.0, -4.0, 2.0])])
    with pytest.raises(ProblemError, match=r"least eigenvalue of instance 1 is -4\. Write shift=.scaled."):
        bounds.continuous_bound(Problem.of(W, 1).flatten(), shift="none")


@given(st.sampled_from(["wishart", "attention", "rank one", "zero rows"]), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_no_shift_is_valid_for_semidefinite_weights(kind, n, seed):
    W = instance(kind, n, seed)
    for k in range(n + 1):
        bound = float(bounds.continuous_bound(Problem.of(W, k).flatten(), shift="none"))
        assert bound <= oracle.optimum(W, k) + 1e-12 * np.abs(W).sum()


@given(st.integers(0, 1000), st.sampled_from([2.0**-66, 2.0**40]))
def test_bounds_scale_with_the_weights(seed, scale):
    W = instance("wishart", 8, seed)
    a, b = solve(W, 4, certify=True), solve(W * scale, 4, certify=True)
    assert float(b.lower_bound) == pytest.approx(float(a.lower_bound) * scale, rel=1e-12)


def test_a_shift_that_is_too_large_would_be_caught(monkeypatch):
    """Planted: with W - Diag d no longer positive semidefinite, the "bound" exceeds the optimum somewhere."""
    right = bounds._diagonal_shift

    def wrong(W, alive, shift):
        d, possible = right(W, alive, shift)
        return d + 0.9 * W.diagonal(dim1=-2, dim2=-1), possible

    monkeypatch.setattr(bounds, "_diagonal_shift", wrong)
    caught = 0
    for seed in range(20):
        W = instance("wishart", 9, seed)
        caught += float(bounds.continuous_bound(Problem.of(W, 4).flatten())) > oracle.optimum(W, 4)
    assert caught > 0


def test_bounds_work_in_float32_input():
    W = torch.from_numpy(instance("attention", 16, 0)).float()
    sol = solve(W, 8, "exhaustive", certify=True)
    assert float(bounds.certificate(Problem.of(W, 8).flatten(), "fast")) <= float(sol.objective)


@pytest.mark.parametrize("scale", [1e-25, 1e-160, 1e150])
def test_margins_scale_with_the_weights(scale):
    """An absolute 1 among the eigenvalues of tiny weights (as once for protected vertices) would be all rounding."""
    W = instance("wishart", 9, 3)
    for bound in ALL.values():
        plain = float(bound(Problem.of(W, 3, protected=[0, 4]).flatten()))
        small = float(bound(Problem.of(W * scale, 3, protected=[0, 4]).flatten()))
        assert small / scale == pytest.approx(plain, rel=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_tight_is_never_below_fast(kind):
    """But for the gap that is left alone."""
    W = np.stack([instance(kind, 24, seed) for seed in range(4)])
    problem = Problem.of(W, 12).flatten()
    tight, fast = (bounds.certificate(problem, level) for level in ("tight", "fast"))
    scale = torch.from_numpy(np.abs(W).sum((-1, -2)))
    assert (tight >= fast - 0.08 * solve(torch.from_numpy(W), 12, "tabu").objective.abs() - 1e-12 * scale).all()


def test_tight_near_rank_one():
    """There the eigenvalues say more than what is made for attention's W, whose bound is below zero."""
    W = np.stack([generators.cancellation(24, seed=seed, k=12).W for seed in range(4)])
    problem = Problem.of(W, 12).flatten()
    tight, fast = (bounds.certificate(problem, level) for level in ("tight", "fast"))
    assert (tight >= fast).all()
    assert (fast > bounds.tight_bound(problem)).any()
