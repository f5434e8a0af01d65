"""s W has the answers of W, for any power of two bit for bit: no method, bound or option has a number of its own size.

Weights go from 1e-300 to 1e300. Beyond, where float64 has no digits for them, answers are those of the weights as
rounded, and weights whose sums overflow are refused.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt import bounds, methods, solve
from grace_opt._util.arrays import power_of_two_scale
from grace_opt.errors import ProblemError
from grace_opt.problem import FactoredWeights, Problem, SparseWeights
from grace_opt.solution import Status, tolerance
from grace_opt.testing import KINDS, instance
from tests import oracle

#: Options with which methods end soon.
QUICK = {"tabu": {"iterations": 60}, "annealing": {"sweeps": 5}, "sdp": {"max_iters": 25}, "local_search": {}}
#: Powers of two that keep all of W's digits: 2**996 is 7e299.
FAR = (-996, -333, -53, -24, -3, 1, 2, 29, 61, 996)
#: Powers for float32, in which W's sums have to stay.
FAR_IN_SINGLE = (-70, -24, -3, 1, 29, 40, 70)
SLOW = ("sdp", "portfolio", "branch_and_bound")
METHODS = [pytest.param(spec.name, marks=[pytest.mark.slow] * (spec.name in SLOW)) for spec in methods()]


def matrix(kind, n, seed):
    """W of a kind; "scaled" has weights that lie some orders apart, so that the least of s W has all of its digits."""
    if kind != "scaled":
        return instance(kind, n, seed)
    decades = 10 ** np.random.default_rng(seed).uniform(-3, 3, n)
    return instance("wishart", n, seed) * np.outer(decades, decades)


@st.composite
def asked(draw, max_n=9, forms=("dense", "single", "whole", "sparse", "factored")):
    """A function of an exponent j that makes 2**j W, k, the exponents, and further arguments of `solve`."""
    n, seed = draw(st.integers(2, max_n)), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    form = draw(st.sampled_from(forms))
    kind = "integer" if form == "whole" else draw(st.sampled_from(KINDS))
    W, powers = matrix(kind, n, seed % 1000), FAR
    if form == "dense":

        def make(j):
            return np.ldexp(W, j)
    elif form == "single":
        W, powers = W.astype(np.float32), FAR_IN_SINGLE

        def make(j):
            return np.ldexp(W, j)
    elif form == "whole":
        W, powers = W.astype(np.int64) * 3, (1, 2, 17, 45)

        def make(j):
            return W * 2**j
    elif form == "sparse":

        def make(j):
            return SparseWeights.of(scipy.sparse.csr_array(np.ldexp(W, j)))[0]
    else:
        A, C, B = (rng.normal(size=(2, n)) for _ in range(3))
        if draw(st.booleans()):
            C = A  # a Gram matrix

        def make(j):
            first = np.ldexp(A, j // 2)
            return FactoredWeights([((first, first if C is A else np.ldexp(C, j - j // 2)), (B, B))])

        powers = [j for j in FAR if abs(j) < 500 and (C is not A or j % 2 == 0)]  # of one pair; see its own test
    more = {"seed": draw(st.integers(0, 3)), "maximize": draw(st.booleans())}
    free = n
    if draw(st.booleans()):
        more["protected"], free = [int(rng.integers(n))], n - 1
    k = draw(st.integers(0, free))
    if k and draw(st.booleans()):
        more["required"] = [int(rng.choice([i for i in range(n) if i not in more.get("protected", ())]))]
    return make, k, draw(st.sampled_from(list(powers))), more


def answered(make, j, k, method, more):
    protected = more.get("protected")
    problem = Problem.of(make(j), k, protected=protected)
    kept = {name: value for name, value in more.items() if name != "protected"}
    return solve(problem, method=method, **QUICK.get(method, {}), **kept)


def assert_scaled(found, plain, j):
    """Every number of an answer to 2**j W is that of the answer to W, times 2**j; all others are equal."""
    assert found.indices.tolist() == plain.indices.tolist()
    assert found.status is plain.status
    for name in ("objective", "lower_bound", "upper_bound"):
        assert float(getattr(found, name)) == math.ldexp(float(getattr(plain, name)), j), name
    assert float(found.gap) == pytest.approx(float(plain.gap), rel=1e-14)  # of f = 0, its own division is rounded


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60)
@given(drawn=asked(), certify=st.sampled_from([False, "fast", "tight"]))
def test_powers_of_two_change_no_bit(method, drawn, certify):
    make, k, j, more = drawn
    if method == "sdp":
        pytest.importorskip("cvxpy")
    found, plain = (answered(make, power, k, method, more | {"certify": certify}) for power in (j, 0))
    assert_scaled(found, plain, j)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("j", [-996, -3, 981])
def test_powers_of_two_change_no_bit_of_larger_instances(method, j):
    """Of forty vertices: tiny temperatures, long local searches, shifts by required vertices, relaxations that work."""
    if method in ("exhaustive", "sdp"):
        pytest.skip("takes too long for so many")
    rng = np.random.default_rng(7)
    for W in (rng.normal(size=(40, 40)), instance("attention", 40, 1), rng.integers(0, 2, (40, 40)) * 1.0):
        W = np.triu(W) + np.triu(W, 1).T
        for more in ({}, {"required": [1, 5], "protected": [0], "certify": "fast"}, {"maximize": True}):
            plain, found = (
                solve(np.ldexp(W, power), 13, method, seed=1, **QUICK.get(method, {}), **more) for power in (0, j)
            )
            assert_scaled(found, plain, j)


BOUNDS = [name for name in bounds.__all__ if name.endswith("_bound") and name not in ("factored_bound", "form_bound")]


@pytest.mark.parametrize("name", BOUNDS)
@settings(max_examples=40)
@given(drawn=asked(forms=("dense", "single", "whole")))
def test_powers_of_two_change_no_bit_of_a_bound(name, drawn):
    make, k, j, more = drawn
    problems = (Problem.of(make(power), k, protected=more.get("protected")).flatten() for power in (0, j))
    plain, found = (float(getattr(bounds, name)(problem)) for problem in problems)
    assert found == math.ldexp(plain, j)


@pytest.mark.parametrize("j", FAR)
def test_an_optimum_between_two_numbers_has_a_bound_below(j):
    """The error of sums, 2**-96 of a number of 1e-300, was zero, and f was rounded up."""
    W = np.diag([-1.0, -(2.0**-53), 1.0])  # f is in the middle of -1 and the number below
    found, plain = (solve(np.ldexp(W, power), 2, "exhaustive") for power in (j, 0))
    assert_scaled(found, plain, j)
    assert float(plain.lower_bound) == -1.0 - 2.0**-52 < float(plain.objective)


@pytest.mark.parametrize("j", [-1022, -996, -1, 1, 52, 996])
def test_the_scale_is_found_without_a_logarithm(j):
    """Of numbers just below a power of two, a logarithm says that they have reached it, at some powers of two alone."""
    below = math.nextafter(2.0, 0.0)
    W = np.array([[below, 0.25, -0.5], [0.25, 1.0, 0.125], [-0.5, 0.125, 0.75]])
    for name in ("eigenvalue_bound", "continuous_bound", "tight_bound"):
        plain, found = (float(getattr(bounds, name)(Problem.of(np.ldexp(W, p), 2).flatten())) for p in (0, j))
        assert found == math.ldexp(plain, j)
    assert [power_of_two_scale(np.ldexp(W, p)) for p in (0, j)] == [1.0, 2.0**j]


@pytest.mark.parametrize("terms", ["gram", "pairs", "signs", "nodes"])
@pytest.mark.parametrize("j", [-440, -2, 6, 440])
def test_powers_of_four_change_no_bit_of_factors(terms, j):
    """Bounds of factors have roots in them. For odd powers of two, a term is split elsewhere, as none halves them."""
    rng = np.random.default_rng(3)
    A, C, B, D = (rng.normal(size=(3, 12)) for _ in range(4))

    def of(power):
        if terms == "gram":
            left = right = (np.ldexp(A, power // 2),) * 2
            return FactoredWeights([(left, (B, B)), (right, (D, D))])
        first = np.ldexp(A, power)
        nodes = np.ldexp(np.arange(12.0), power) if terms == "nodes" else None
        return FactoredWeights(
            [((first, C), (B, B)), ((first if terms == "signs" else -first, D), None)], diagonal=nodes
        )

    for more in ({}, {"maximize": True}, {"required": [2]}):
        found, plain = (solve(of(power), 5, "mies", certify=True, **more) for power in (j, 0))
        assert_scaled(found, plain, j)
        problems = (Problem.of(of(power), 5).flatten() for power in (j, 0))
        found, plain = (float(bounds.factored_bound(problem)) for problem in problems)
        assert found == math.ldexp(plain, j)
    if terms != "gram":
        found, plain = (solve(of(power), 5, "tabu", iterations=60) for power in (j + 1, 0))
        assert_scaled(found, plain, j + 1)


def test_a_batch_of_scales_has_the_answers_of_its_instances():
    W, powers = instance("indefinite", 9, 3), (0, -996, 990, -24)
    batch = np.stack([np.ldexp(W, j) for j in powers])
    for method in ("mies", "local_search", "tabu", "branch_and_bound", "exhaustive"):
        plain = solve(W, 4, method, **QUICK.get(method, {}))
        found = solve(batch, 4, method, certify=True, **QUICK.get(method, {}))
        for b, j in enumerate(powers):
            assert found.indices[b].tolist() == plain.indices.tolist()
            assert found.objective[b] == math.ldexp(float(plain.objective), j)


@pytest.mark.parametrize("j", [-996, 41, 990])
def test_targets_paths_and_progress_are_in_units_of_f(j):
    W = instance("indefinite", 12, 5)
    for method in ("mies", "drop_greedy"):
        plain, found = (solve(np.ldexp(W, power), 5, method, path=True).stats["path"] for power in (0, j))
        assert found.tolist() == np.ldexp(plain, j).tolist()
    best = float(solve(W, 5, "exhaustive").objective)
    seen = {}
    for power in (0, j):
        shown = seen[power] = []
        sol = solve(
            np.ldexp(W, power),
            5,
            "tabu",
            start="random",
            target=math.ldexp(best, power),
            iterations=10**6,
            callback=lambda progress, shown=shown: shown.append((progress.objective, progress.lower_bound)),
        )
        assert float(sol.objective) == math.ldexp(best, power)
    assert seen[j] == [(math.ldexp(f, j), math.ldexp(bound, j)) for f, bound in seen[0]]
    plain, found = (
        solve(np.ldexp(W, power), 5, "annealing", sweeps=3, hot=math.ldexp(2.0, power), cold=math.ldexp(0.5, power))
        for power in (0, j)
    )
    assert_scaled(found, plain, j)


def test_a_start_from_which_f_cannot_rise_says_how_hot_to_begin():
    W = np.diag([9.0, 8.0, 7.0, 1.0, 2.0, 3.0])
    for start in ([0, 1, 2], [3, 4, 5]):
        plain, tiny, huge = (
            solve(np.ldexp(W, j), 3, "annealing", start=start, sweeps=1, seed=2).stats["exchanges"]
            for j in (0, -990, 990)
        )
        assert plain == tiny == huge


@settings(max_examples=60)
@given(
    st.integers(3, 9), st.integers(0, 2**32 - 1), st.floats(-300, 295), st.booleans(),
    st.sampled_from([spec.name for spec in methods() if spec.name != "sdp"]),
)  # fmt: skip
def test_other_factors_change_rounding_alone(n, seed, decades, maximize, method):
    """s W is rounded in its last digits: real weights without ties keep their sets and statuses."""
    rng, s = np.random.default_rng(seed), 10.0**decades
    W, k = np.triu(rng.normal(size=(n, n))), int(rng.integers(1, n))
    W = W + np.triu(W, 1).T
    plain, found = (
        solve(factor * W, k, method, maximize=maximize, certify=True, **QUICK.get(method, {})) for factor in (1.0, s)
    )
    assert found.indices.tolist() == plain.indices.tolist()
    assert found.status is plain.status
    assert float(found.objective) / s == pytest.approx(float(plain.objective), rel=1e-12, abs=1e-13 * n**2)
    # Bounds come from iterations, which rounding ends earlier or later; both hold.
    best, sign = float(solve(W, k, "exhaustive", maximize=maximize).objective), -1.0 if maximize else 1.0
    for each, factor in ((plain, 1.0), (found, s)):
        assert sign * float(each.bound) / factor <= sign * best + 1e-9 * np.abs(W).sum()


@settings(max_examples=80)
@given(st.integers(2, 7), st.integers(0, 2**32 - 1), st.integers(-1074, -1000), st.sampled_from(KINDS))
def test_below_the_normal_numbers_answers_are_those_of_the_weights_as_rounded(n, seed, j, kind):
    W = np.ldexp(matrix(kind, n, seed), j)
    k = 1 + seed % n
    best = oracle.optimum(W, k)
    for method in ("mies", "exhaustive", "branch_and_bound"):
        sol = solve(W, k, method, certify=True)
        sol.verify()
        assert float(sol.lower_bound) <= best <= float(sol.objective)
    assert float(solve(W, k, "exhaustive").objective) == best


def test_beyond_the_largest_numbers_w_is_refused():
    W = instance("indefinite", 5, 0)
    for form in (np.asarray, scipy.sparse.csr_array, lambda W: SparseWeights.of(scipy.sparse.csr_array(W))[0]):
        with pytest.raises(ProblemError, match=r"sums of weights overflow float64\. Divide W by .*; f scales with it"):
            solve(Problem.of(form(np.ldexp(W, 1021)), 2))


@pytest.mark.parametrize("times", [2, 3, 6, 2**30])
def test_multiples_of_integers_are_proved_alike(times):
    """An integer f is proved by a bound less than a step away, and a step of 3 W is three of W."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        W = np.triu(rng.integers(-3, 4, (9, 9)), 1)
        W = W + W.T
        for method in ("mies", "sdp") if seed < 3 else ("mies",):
            if method == "sdp":
                pytest.importorskip("cvxpy")
            plain, found = (
                solve(factor * W, 4, method, certify=True, **QUICK.get(method, {})) for factor in (1, times)
            )
            assert found.status is plain.status
            assert int(found.objective) == times * int(plain.objective)
            assert (found.status is Status.OPTIMAL) <= (float(found.objective) == oracle.optimum(times * W, 4))
        if seed > 2:
            continue
        factors = np.random.default_rng(seed).integers(-3, 4, (2, 3, 9))
        for diagonal in (None, np.arange(9)):
            problems = (
                Problem.of(
                    FactoredWeights([((f * A, A), (B, B))], diagonal=None if diagonal is None else f * diagonal), 4
                )
                for f in (1, times)
                for A, B in [factors]
            )
            plain, found = (solve(problem, method="mies", certify=True, required=[1]) for problem in problems)
            assert found.problem.integer
            assert found.status is plain.status
            assert int(found.objective) == times * int(plain.objective)
            assert float(found.problem.step) == times * float(plain.problem.step)


@pytest.mark.parametrize("times", [1, 3, 12, 2**30, 2**50])
def test_a_bound_a_step_away_proves_integers_as_far_as_float64_has_all_halves_of_their_units(times):
    problem = Problem.of(times * np.array([[0, 1, 0], [1, 0, 3], [0, 3, 0]]), 2)
    step = 2 * times  # f has every edge twice
    largest = 2.0**52 * (step & -step)
    for f, proves in ((0.0, True), (largest - step, True), (step - largest, True), (largest, False)):
        found = tolerance(problem, torch.ones(3, dtype=torch.bool), torch.tensor(f, dtype=torch.float64))
        assert float(found) == pytest.approx(proves * step, rel=2e-6, abs=0.0)
        assert float(found) < step


@settings(max_examples=80)
@given(
    st.integers(2, 6), st.integers(0, 2**32 - 1), st.integers(-1000, 900), st.sampled_from(["dense", "sparse", "real"])
)
def test_a_step_divides_all_objectives(n, seed, j, form):
    rng = np.random.default_rng(seed)
    W = np.triu(rng.integers(-9, 10, (n, n)) * rng.integers(1, 4)).astype(float)
    if form == "real":
        W += np.triu(rng.normal(size=(n, n)).astype(np.float32))
    W = np.ldexp(W + np.triu(W, 1).T, j)
    step = float(Problem.of(SparseWeights.of(scipy.sparse.csr_array(W))[0] if form == "sparse" else W, 1).step)
    assert float(Problem.of(np.ldexp(W, 3), 1).step) == 8 * step
    if form != "real" and W.any():
        assert step >= math.ldexp(1.0, j)
    if step:
        for S in itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in range(1, n + 1)):
            assert sum(Fraction(float(W[i, j])) for i in S for j in S) % Fraction(step) == 0
