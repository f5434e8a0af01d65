"""Bounds never exceed the optimum, on anything; and they are tight where theory says so."""

import dataclasses
import functools
import operator
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import grace_opt
from grace_opt import Problem, bounds, solve
from grace_opt._util.arrays import least_eigenvalue
from grace_opt.bounds import batched, convexity
from grace_opt.bounds import tight as tight_bounds
from grace_opt.bounds.tight import bound_each
from grace_opt.errors import OptionError, ProblemError
from grace_opt.instances import generators
from grace_opt.run import Run
from grace_opt.testing import KINDS, batches, instance, instances
from tests import oracle

ALL = {
    "eigenvalue": bounds.eigenvalue_bound,
    "continuous scaled": lambda p: bounds.continuous_bound(p, shift="scaled"),
    "continuous uniform": lambda p: bounds.continuous_bound(p, shift="uniform"),
    "entry": bounds.entry_bound,
    "certificate": lambda p: bounds.certificate(p, "fast"),
    "tight certificate": lambda p: bounds.certificate(p, "tight"),
    "one step": lambda p: bounds.continuous_bound(p, steps=1),
}


@settings(max_examples=150)
@given(instances())
@pytest.mark.slow
def test_bounds_are_valid(drawn):
    W, k, protected = drawn
    best = oracle.optimum(W, k, protected)
    problem = Problem.of(W, k, protected=protected).flatten()
    for name, bound in ALL.items():
        # 1e-12 Σ|W| is the rounding of the oracle's own W; the bounds take off their margins themselves.
        assert float(bound(problem)) <= best + 1e-12 * np.abs(W).sum(), name


@settings(max_examples=40)
@given(batches())
@pytest.mark.slow
def test_batched_bounds_equal_looped(drawn):
    W, k, protected = drawn
    whole = Problem.of(W, k, protected=protected).flatten()
    for name, bound in ALL.items():
        together = bound(whole)
        for b in range(len(W)):
            alone = bound(Problem.of(W[b], int(k[b]), protected=protected[b]).flatten())[0]
            assert together[b] == pytest.approx(float(alone), abs=1e-9 * max(np.abs(W[b]).sum(), 1e-300)), name


EXACT = {  # with all vertices chosen, these are the sum of W but for rounding; entry_bound only if pairs weigh the same
    "eigenvalue": bounds.eigenvalue_bound,
    "continuous": bounds.continuous_bound,
    "row": batched.row_bound,
    "entry": bounds.entry_bound,
}


@pytest.mark.parametrize("name", EXACT)
def test_margins_cover_the_rounding_of_sums(name):
    """Compared without rounding: a tolerance would hide a margin that is missing."""
    rng = np.random.default_rng(4)
    W = rng.normal(size=(60, 9, 9))
    if name == "entry":
        W[:] = W[:, :1, :1]
    W = np.triu(W) + np.triu(W, 1).mT
    W[:, range(9), range(9)] = rng.normal(size=(60, 9))
    found = EXACT[name](Problem.of(W, 9).flatten()).tolist()
    for bound, each in zip(found, W, strict=True):
        optimum = sum(map(Fraction, each.ravel().tolist()), Fraction(0))
        assert Fraction(bound) <= optimum
        assert bound >= float(optimum) - 1e-11 * np.abs(each).sum()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["plain_bound", "qcr_bound", "dnn_bound", "fast_bound", "tight_bound"])
def test_tiny_entries_on_the_diagonal_warn_of_nothing(name):
    """In its scale, the others are beyond the range of squares."""
    W = np.array([[1e-250, 1.0, 0.0], [1.0, 1e-250, 0.0], [0.0, 0.0, 1.0]])
    assert 0.9 < float(getattr(bounds, name)(Problem.of(W, 2).flatten())) <= 1.0


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
@pytest.mark.slow
def test_no_shift_is_valid_for_semidefinite_weights(kind, n, seed):
    W = instance(kind, n, seed)
    found = bounds.continuous_bound(Problem.of(np.stack([W] * (n + 1)), list(range(n + 1))).flatten(), shift="none")
    for k, bound in enumerate(found.tolist()):
        assert bound <= oracle.optimum(W, k) + 1e-12 * np.abs(W).sum()


@given(st.integers(0, 1000), st.sampled_from([2.0**-66, 2.0**40]))
@pytest.mark.slow
def test_bounds_scale_with_the_weights(seed, scale):
    W = instance("wishart", 8, seed)
    a, b = solve(W, 4, certify=True), solve(W * scale, 4, certify=True)
    assert float(b.lower_bound) == pytest.approx(float(a.lower_bound) * scale, rel=1e-12)


def test_a_shift_that_is_too_large_would_be_caught(monkeypatch):
    """Planted: with W - Diag d no longer positive semidefinite, the "bound" exceeds the optimum somewhere."""
    right = batched._diagonal_shift

    def wrong(W, alive, shift):
        d, possible = right(W, alive, shift)
        return d + 0.9 * W.diagonal(dim1=-2, dim2=-1), possible

    monkeypatch.setattr(batched, "_diagonal_shift", wrong)
    caught = 0
    for seed in range(20):
        W = instance("wishart", 9, seed)
        caught += float(bounds.continuous_bound(Problem.of(W, 4).flatten())) > oracle.optimum(W, 4)
    assert caught > 0


def test_eigenvalues_are_right_beside_entries_that_lapack_cannot_square():
    """With 1e-124 beside 1.8 LAPACK's least eigenvalue was above the true one, by 7e-11 of it."""
    W = np.zeros((7, 7))
    entries = {(1, 6): -1.797, (1, 2): 1.244e-124, (2, 3): -5.266e-113, (0, 2): 2.211e-151, (0, 5): 3.028e-110}
    for (i, j), weight in entries.items():
        W[i, j] = W[j, i] = weight
    W[5, 5] = 4.998e-63
    assert least_eigenvalue(W) == pytest.approx(-1.797, rel=1e-15, abs=0)
    bound = bounds.eigenvalue_bound(Problem.of(W * 2.0**900, 2).flatten())
    assert float(bound) <= -2 * 1.797 * 2.0**900


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


def semidefinite_bound(problem):
    return bound_each(problem, None, lambda sub, value: convexity.semidefinite_bound(sub))


SINGLE = {
    "entry": bounds.entry_bound,
    "row": bounds.row_bound,
    "eigenvalue": bounds.eigenvalue_bound,
    "continuous": bounds.continuous_bound,
    "plain": bounds.plain_bound,
    "semidefinite": semidefinite_bound,
}


def stacked(kind, n, seed, count=8):
    return np.stack([instance(kind, n, seed + b) for b in range(count)])


#: Other simple diagonals than the first are better on some of these, by less than a percent of f.
NEARLY_CONSTANT = Problem.of(stacked("indefinite", 40, 0) + 60, 20).flatten()


@st.composite
def alike(draw):
    """Several W of any sign and scale, with ties or without, some nearly constant; k at the ends or between."""
    n, seed = draw(st.integers(1, 60)), draw(st.integers(0, 2**32 - 9))
    kind = draw(st.sampled_from((*KINDS, "near rank one", "far apart")))
    W = stacked({"near rank one": "rank one", "far apart": "indefinite"}.get(kind, kind), n, seed)
    if kind == "near rank one":
        W = W + 1e-3 * instance(draw(st.sampled_from(("wishart", "indefinite"))), n, seed)
    largest = max(np.abs(W).max(), 1e-100)
    W = W + draw(st.sampled_from((0, 3, 30))) * largest  # gaps are small beside f where a constant is added
    if kind not in ("integer", "ties") or draw(st.booleans()):  # some stay whole numbers
        W = W / largest * draw(st.sampled_from((1.0, -1.0))) * 10.0 ** draw(st.integers(-300, 300))
    if kind == "far apart":  # too far for one scale
        W[:, 0, 0] *= 1e-295
    protected = sorted(draw(st.sets(st.integers(0, n - 1), max_size=n // 3)))
    left = n - len(protected)
    k = draw(st.sampled_from(sorted({0, 1, 2, left // 3, left // 2, left - 1, left} & set(range(left + 1)))))
    return Problem.of(W, k, protected=protected).flatten()


@settings(max_examples=30)
@given(alike(), st.sampled_from(["think", "mies", "local_search"]), st.booleans())
@example(problem=NEARLY_CONSTANT, method="local_search", as_if_large=True)
@example(problem=NEARLY_CONSTANT, method="local_search", as_if_large=False)
@pytest.mark.slow
def test_a_certificate_is_never_below_any_cheap_bound(problem, method, as_if_large):
    """Whatever the gap to the known choice, unless that is proved optimal; and tight is not below fast."""
    best = solve(problem, method=method)
    mask, f = torch.as_tensor(best.mask), torch.as_tensor(best.objective)
    with pytest.MonkeyPatch.context() as patch:
        if as_if_large:  # nothing dear makes up for a cheap bound that was left out
            patch.setattr(tight_bounds, "FAST", dataclasses.replace(tight_bounds.FAST, shifted=0, probed=0, paired=0))
        fast, tight = (bounds.certificate(problem, level, incumbent=mask) for level in bounds.LEVELS)
    # A choice counts as proved within 1e-10, and a relaxation as solved within 1e-6.
    rounding = 1e-10 * f.abs() + 1e-13 * problem.W.abs().sum((-1, -2))
    for name, bound in SINGLE.items():
        single = bound(problem)
        assert (fast >= single - 1e-6 * single.abs() - rounding).all(), name
    assert (tight >= fast).all()
    assert (fast <= f).all()


@pytest.mark.parametrize(("n", "k", "seed"), [(49, 12, 2), (60, 15, 10), (50, 12, 6)])
def test_nor_where_node_weights_of_both_signs_help_to_make_it_convex(n, k, seed):
    A = np.random.default_rng(seed).normal(size=(n, n))
    problem = Problem.of(np.round(3 * (A + A.T)) * np.pi, k).flatten()  # times pi: no whole steps to round up to
    cheap = float(bounds.continuous_bound(problem))
    assert float(bounds.certificate(problem)) >= cheap - 1e-6 * abs(cheap)


def test_the_tight_certificate_says_more_than_the_fast_one():
    problem = Problem.of(generators.k_cluster(60, seed=1, density=0.5).W, 20).flatten()
    fast, tight = (float(bounds.certificate(problem, level)) for level in bounds.LEVELS)
    assert tight > fast + 0.01 * abs(fast)


def test_near_rank_one_the_certificate_is_as_good_as_the_eigenvalues():
    """There the relaxations are not solved well enough to say more than that W is semidefinite."""
    W = np.stack([generators.cancellation(24, seed=seed, k=12).W for seed in range(4)])
    problem = Problem.of(W, 12).flatten()
    for level in bounds.LEVELS:
        assert (bounds.certificate(problem, level) >= bounds.eigenvalue_bound(problem)).all()


def test_semidefinite_and_nonnegative_weights_have_bounds_that_are_not_negative():
    """Both at a size where Cholesky proves it, and one of them too singular for eigenvalues alone."""
    rng = np.random.default_rng(0)
    G = rng.normal(size=(300, 20))
    semidefinite = Problem.of(G @ G.T, 150).flatten()
    assert abs(float(bounds.certificate(semidefinite))) <= 1e-7 * float(semidefinite.diagonal.sum())
    W = np.abs(rng.normal(size=(300, 300)))
    assert float(bounds.certificate(Problem.of(W + W.T, 150).flatten())) > 0
    assert float(bounds.entry_bound(Problem.of((W + W.T).round(), 150).flatten())) >= 0


@pytest.fixture
def by_cholesky(monkeypatch):
    """Lanczos and Cholesky from 12 vertices on, where choices can be enumerated."""
    monkeypatch.setattr(convexity, "CHOLESKY_FROM", 12)
    monkeypatch.setattr(convexity, "LANCZOS_BASIS", 11)
    found = []
    right = convexity._proved_by_cholesky
    monkeypatch.setattr(convexity, "_proved_by_cholesky", lambda C: found.append(right(C)) or found[-1])
    return found


@functools.cache
def of_13(kind, seed):
    """An instance and its optimum, which take as long as all certificates of it."""
    W = instance(kind, 13, seed)
    return W, oracle.optimum(W, 6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", bounds.LEVELS)
def test_certificates_by_cholesky_are_valid(kind, level, by_cholesky):
    for seed in range(4):
        W, best = of_13(kind, seed)
        for scale in (1.0, 1e-150, 1e140):
            problem = Problem.of(W * scale, 6).flatten()
            slack = 1e-12 * np.abs(W).sum() * scale
            assert float(bounds.certificate(problem, level)) <= best * scale + slack
            assert float(bounds.plain_bound(problem)) <= best * scale + slack


@given(st.integers(12, 40), st.integers(0, 2**32 - 1), st.integers(0, 2))
def test_a_shift_proved_by_cholesky_makes_convex(m, seed, kind):
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(m, m)) * 10.0 ** rng.uniform(-3, 3, size=(1 if kind else m, m))
    C = (G + G.T) / 2 if kind == 1 else G[:, : m // 2] @ G[:, : m // 2].T
    least = np.linalg.eigvalsh(C)[0]
    size = np.linalg.norm(C)
    for t in (-least * (1 - 1e-3) - 1e-6 * size, -least + 1e-13 * size, -least + 1e-3 * size):
        proved = convexity._shift_if_convex(C, t)
        assert proved is None or proved >= -least - 1e-14 * size
    assert convexity._shift_if_convex(C, -least + 1e-3 * size) < -least + 2e-3 * size


@pytest.mark.slow
def test_a_shift_does_not_depend_on_where_the_matrix_lies():
    """BLAS aligns its vectors to memory: sums in other orders made certificates of equal W differ in the 8th digit."""
    W = generators.attention(400).W
    W /= np.sqrt(np.outer(W.diagonal(), W.diagonal()))
    shifts = set()
    for offset in range(8):
        C = np.empty(W.size + 8)[offset : offset + W.size].reshape(W.shape)
        C[:] = W
        shifts.add(convexity.convex_shift(C))
    assert len(shifts) == 1


def semidefinite_exactly(C, shift):
    """Whether C + shift I has no negative pivot, by fractions."""
    rows = [[Fraction(x) for x in row] for row in C.tolist()]
    for at in range(len(rows)):
        rows[at][at] += Fraction(shift)
    for at, row in enumerate(rows):
        if row[at] <= 0:
            return not any(row[at:])
        for below in rows[at + 1 :]:
            factor = below[at] / row[at]
            below[at:] = [a - factor * b for a, b in zip(below[at:], row[at:], strict=True)]
    return True


def test_a_cholesky_factorisation_that_ends_proves_no_more_than_its_margin(monkeypatch):
    """Singular matrices, which rounding makes indefinite half of the time: some factorisations end all the same."""

    def proved(margin):
        monkeypatch.setattr(convexity, "CHOLESKY_MARGIN", margin)
        for seed in range(150):
            G = np.random.default_rng(seed).normal(size=(7, 6))
            C = np.tril(G @ G.T)
            C += np.tril(C, -1).T
            found = convexity._shift_if_convex(C, 0.0)
            if found is not None:
                yield semidefinite_exactly(C, found)

    right = list(proved(8.0))
    assert len(right) > 10
    assert all(right)
    assert not all(proved(-7.0))  # planted: m and the margin cancel, so that nothing is added


@pytest.mark.slow
@pytest.mark.parametrize("level", bounds.LEVELS)
def test_certificates_of_a_batch_are_those_of_its_instances(level):
    W = np.stack([instance(kind, 20, 1) for kind in KINDS])
    whole = Problem.of(W, 8, protected=[3]).flatten()
    masks = torch.as_tensor(solve(W, 8, "think", protected=[3]).mask)
    together = bounds.certificate(whole, level, incumbent=masks)
    for b in range(len(W)):
        alone = bounds.certificate(whole.instances(torch.tensor([b])), level, incumbent=masks[b : b + 1])
        assert float(alone) == float(together[b])


@pytest.mark.parametrize(
    "wrong", [torch.zeros(1, 5, dtype=torch.bool), torch.ones(5, dtype=torch.bool), torch.ones(1, 5), [[True] * 5]]
)
def test_an_incumbent_that_is_no_choice_is_refused(wrong):
    problem = Problem.of(np.eye(5) - 0.1, 2).flatten()
    with pytest.raises(OptionError, match="incumbent"):
        bounds.certificate(problem, incumbent=wrong)
    with pytest.raises(OptionError, match="level='loose'"):
        bounds.certificate(problem, "loose")


def test_a_certificate_is_computed_once_after_the_method_with_its_answer(monkeypatch):
    asked, right = [], bounds.certificate

    def noted(problem, level, *, incumbent, run):
        asked.append((level, incumbent.clone()))
        return right(problem, level, incumbent=incumbent, run=run)

    monkeypatch.setattr(bounds, "certificate", noted)
    W = np.stack([generators.k_cluster(24, seed, k=8).W for seed in range(3)])
    sol = solve(W, 8, "tabu", certify="tight")
    assert [level for level, _ in asked] == ["tight"]
    assert (asked[0][1].numpy() == sol.mask).all()
    asked.clear()
    solve(W, 8, "portfolio", certify="fast")
    assert len(asked) == 1  # its own
    asked.clear()
    solve(W, 8, "exhaustive", certify="tight", max_subsets=10**7)
    assert not asked  # proved
    both = grace_opt.compare(W, 8, ["think", "mies", "tabu"], certify="fast")
    assert len(asked) == 1
    assert (both[0].lower_bound == np.minimum(both[2].lower_bound, both[0].objective)).all()
    assert (asked[0][1].numpy() == both.best.mask).all() or (both.best.objective == both[2].objective).all()


#: Bounds that read W as a matrix.
NAMED = [name for name in bounds.__all__ if name.endswith("_bound") and name not in ("form_bound", "factored_bound")]
OTHERS = ["certificate", "factored_bound", "form_bound", "row_bound_in_time", "seconds_to_certify"]


@pytest.mark.parametrize("name", [*NAMED, *OTHERS, "sparse.degree_bound", "sparse.load_bound", "sparse.plane_bound"])
def test_what_is_no_flattened_batch_is_refused_by_name(name):
    bound, problem = operator.attrgetter(name)(bounds), Problem.of(np.broadcast_to(np.eye(4), (2, 3, 4, 4)), 2)
    name = name.split(".")[-1]
    with pytest.raises(ProblemError, match=rf"{name} takes a flattened batch.*\(2, 3\): write {name}\(problem.flatten"):
        bound(problem=problem)
    with pytest.raises(ProblemError, match=rf"{name} takes a Problem, not a ndarray: write {name}\(Problem.of"):
        bound(np.eye(4))


@pytest.mark.parametrize(("method", "options"), [("annealing", {"sweeps": 20}), ("sdp", {})])
def test_numbers_may_vanish_whatever_the_caller_has_set_for_numpy(method, options):
    W = np.diag(10.0 ** np.linspace(-300, 300, 8)) + np.outer([1e-300] * 8, [1.0] * 8)
    with np.errstate(all="raise"):
        solution = solve(W, 3, method, certify="tight", **options)
    assert solution.indices.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", [name for name in NAMED if name not in ("row_bound", "entry_bound")])
@pytest.mark.parametrize("kind", ["semidefinite", "indefinite", "one tiny vertex"])
def test_bounds_of_weights_that_no_scale_suits(name, kind):
    A, v = np.random.default_rng(0).normal(size=(8, 8)), 10.0 ** np.linspace(-150, 150, 8)
    if kind == "one tiny vertex":
        v = np.array([1e-300, *[1.0] * 7])
    W = np.outer(v, v) * (A + A.T if kind == "indefinite" else A @ A.T)
    problem = Problem.of(W, 4).flatten()
    with np.errstate(all="raise"):
        bound = float(getattr(bounds, name)(problem))
    assert -np.inf < bound <= oracle.optimum(W, 4, [])
    if name in ("plain_bound", "qcr_bound", "dnn_bound", "fast_bound", "tight_bound"):
        assert bound >= max(float(cheap(problem)) for cheap in (bounds.row_bound, bounds.eigenvalue_bound))
        assert bound >= float(bounds.continuous_bound(problem))


WRONG = {
    "run=5": lambda p: bounds.certificate(p, run=5),
    "run=3": lambda p: bounds.fast_bound(p, None, 3),
    "run=None": lambda p: bounds.row_bound_in_time(p, None),
    "steps=1.5": lambda p: bounds.continuous_bound(p, steps=1.5),
    "steps=-1": lambda p: bounds.continuous_bound(p, steps=-1),
    "rtol='a'": lambda p: bounds.continuous_bound(p, rtol="a"),
    "rtol=nan": lambda p: bounds.continuous_bound(p, rtol=float("nan")),
    "shift=3": lambda p: bounds.continuous_bound(p, shift=3),
    "level='loose'": lambda p: bounds.seconds_to_certify(p, "loose"),
    "rounds=1.5": lambda p: bounds.sparse.load_bound(p, rounds=1.5),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_are_refused_by_name(wrong):
    with pytest.raises(OptionError, match=f"^{wrong}: give "):
        WRONG[wrong](Problem.of(np.eye(4), 2).flatten())


@pytest.mark.parametrize("name", ["form_bound", "degree_bound", "load_bound", "plane_bound"])
def test_bounds_of_one_form_name_the_form_they_read(name):
    problem, form = Problem.of(np.eye(4), 2).flatten(), "factored" if name == "form_bound" else "sparse"
    given = (Run(),) if name == "form_bound" else ()
    with pytest.raises(ProblemError, match=f"{name} reads W in its {form} form, not in its dense one"):
        (getattr(bounds, name, None) or getattr(bounds.sparse, name))(problem, *given)


def test_bounds_of_matrices_name_themselves_for_factors():
    problem = Problem.of(grace_opt.FactoredWeights.product(np.eye(4), np.eye(4)), 2).flatten()
    for name in NAMED:
        with pytest.raises(ProblemError, match=f"^{name} reads W as a matrix"):
            getattr(bounds, name)(problem)


@pytest.mark.parametrize("k", [0, 3])
def test_where_one_choice_is_left_it_is_known(k):
    known = bounds.fixed_vertices(np.eye(4) + 1.0, k, protected=[3])
    assert known.inside.tolist() == [k == 3] * 3 + [False]
    assert (known.outside == ~known.inside).all()
    assert known.lower_bound == pytest.approx(known.objective)
    with pytest.raises(OptionError, match=r"shape \(5,\): give bool masks of shape \(4,\)"):
        bounds.fixed_vertices(np.eye(4), 2, incumbent=np.zeros(5, bool))
