"""Generated instances: reproducible, and what they claim to be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt import Problem, solve
from grace_opt.errors import OptionError, ProblemError
from grace_opt.instances import generators, read, write
from grace_opt.instances.generators import GENERATORS
from tests import oracle

PSD = ("attention", "planted", "cancellation")


def make(kind, n, seed, **options):
    return GENERATORS[kind](n, seed=seed, **({"k": n // 2} if kind == "planted" else {}), **options)


@pytest.mark.parametrize("kind", GENERATORS)
@given(n=st.integers(4, 30), seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_every_kind_is_a_problem_and_reproducible(kind, n, seed):
    made, again, other = make(kind, n, seed), make(kind, n, seed), make(kind, n, seed + 1)
    assert np.array_equal(made.W, again.W)
    assert (made.k, made.planted, made.source) == (again.k, again.planted, again.source)
    assert made.W.shape == (n, n)
    assert (made.W == made.W.T).all()
    if kind not in ("ties", "k_cluster"):  # which may agree by chance at this size
        assert not np.array_equal(made.W, other.W)
    problem = Problem.of(made.W, 2 if made.k is None else made.k)
    assert problem.integer == (kind in ("planted", "ties", "k_cluster"))
    if kind in PSD:
        assert np.linalg.eigvalsh(made.W)[0] >= -1e-9 * np.trace(made.W)


@given(st.integers(2, 14), st.data())
def test_the_planted_set_is_optimal(n, data):
    k = data.draw(st.integers(1, n))
    made = generators.planted(n, k, seed=data.draw(st.integers(0, 10**6)), rank=data.draw(st.integers(1, n)))
    assert len(set(made.planted)) == k
    assert oracle.objective(made.W.tolist(), made.planted) == 0
    if n <= 10:
        assert oracle.optimum(made.W.tolist(), k) == 0


def test_the_planted_set_does_not_show_in_the_diagonal():
    # Were the planted vectors longer or shorter, sorting the diagonal would find them.
    shares = []
    for seed in range(40):
        made = generators.planted(60, 30, seed=seed)
        order = np.argsort(np.diag(made.W))
        shares.append(len(set(order[:30].tolist()) & set(made.planted)) / 30)
    assert 0.4 < np.mean(shares) < 0.6


@given(st.integers(8, 16), st.integers(0, 10**6), st.data())
@settings(max_examples=40)
def test_greedy_and_exchange_fail_on_cancellation(n, seed, data):
    k = data.draw(st.sampled_from([None, *range(4, n // 2 + 1)]))
    made = generators.cancellation(n, seed, k=k)
    best = float(solve(made.W, made.k, "exhaustive").objective)
    factor = 100 if made.k % 2 == 0 else 0.4 * made.k**2  # one vertex of about 1 is left over
    for method in ("think", "mies", "local_search"):
        assert float(solve(made.W, made.k, method).objective) > factor * best, method


def test_ties_has_interchangeable_vertices():
    W = generators.ties(24, seed=3).W
    assert len(np.unique(W, axis=0)) <= 6
    shared = 0
    for seed in range(20):
        small = generators.ties(9, seed).W.tolist()
        values = [oracle.objective(small, S) for S in itertools.combinations(range(9), 4)]
        shared += values.count(min(values)) > 1
    assert shared > 10  # the optimum is seldom alone


def test_attention_is_what_it_says():
    W = generators.attention(64, seed=0).W
    assert np.trace(W) == pytest.approx(64)
    plain = generators.attention(64, seed=0, sigma=0.0, massive=0).W
    assert np.diag(plain).max() < 8 < np.diag(W).max()  # a few massive channels carry most of it
    correlation = plain / np.sqrt(np.outer(np.diag(plain), np.diag(plain)))
    loose = generators.attention(64, seed=0, sigma=0.0, massive=0, mix=0.0).W
    independent = loose / np.sqrt(np.outer(np.diag(loose), np.diag(loose)))
    off = ~np.eye(64, dtype=bool)
    assert np.abs(correlation[off]).mean() > 4 * np.abs(independent[off]).mean()
    assert np.linalg.matrix_rank(generators.attention(64, queries=2, keys=3).W) <= 6


def test_densities_and_distances():
    for density in (0.25, 0.75):
        made = generators.k_cluster(200, 1, density=density)
        assert -made.W.sum() / (200 * 199) == pytest.approx(density, abs=0.02)
        assert made.k == 100
    d = -generators.dispersion(20, 2, distances="euclidean").W
    assert (d[:, :, None] <= d[:, None, :] + d.T[None, :, :] + 1e-9).all()  # the triangle inequality
    assert set(np.unique(-generators.dispersion(50, distances="integer").W)) == set(range(10))


@pytest.mark.parametrize(("kind", "suffix"), [("k_cluster", ".dat"), ("dispersion", ".txt")])
def test_the_literatures_kinds_fit_its_files(tmp_path, kind, suffix):
    made = make(kind, 12, 5)
    write(tmp_path / f"w{suffix}", made.W, made.k)
    again = read(tmp_path / f"w{suffix}")
    assert np.array_equal(again.W, made.W)
    assert (again.k, again.source) == (made.k, made.source)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: generators.attention(0), OptionError, "n=0"),
        (lambda: generators.attention(8, seed=-1), OptionError, "seed=-1"),
        (lambda: generators.attention(8, mix=1.5), OptionError, "mix"),
        (lambda: generators.attention(8, massive=-1), OptionError, "massive=-1"),
        (lambda: generators.planted(4, 0), ProblemError, "at least one"),
        (lambda: generators.planted(4, 5), ProblemError, "between 0 and n = 4"),
        (lambda: generators.cancellation(6, k=4), ProblemError, "n / 2"),
        (lambda: generators.cancellation(8, noise=-1.0), OptionError, "noise"),
        (lambda: generators.ties(4, levels=0), OptionError, "levels=0"),
        (lambda: generators.k_cluster(4, density=2.0), OptionError, "density"),
        (lambda: generators.k_cluster(4, k=5), ProblemError, "k = 5"),
        (lambda: generators.dispersion(4, distances="manhattan"), OptionError, "'uniform', 'integer' or 'euclidean'"),
        (lambda: generators.ties(True), OptionError, "n=True"),
        (lambda: generators.attention(8, sigma=1e3), OptionError, "sigma=1000 and .* range of float64"),
        (lambda: generators.attention(8, massive_factor=1e200), OptionError, r"massive_factor=1e\+200: weights"),
        (lambda: generators.cancellation(8, noise=1e308), OptionError, r"noise=1e\+308: weights"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_weights_stay_exact_integers():
    """Entries of W wrapped around in int64, and the planted set was none."""
    made = generators.planted(8, 3, spread=10**7)
    assert int(made.W[np.ix_(made.planted, made.planted)].astype(object).sum()) == 0
    assert abs(made.W).max() <= 2**53
    with pytest.raises(OptionError, match="spread="):
        generators.planted(8, 3, spread=2**40)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("cancellation", "noise", True),
        ("cancellation", "noise", np.inf),
        ("k_cluster", "density", True),
        ("k_cluster", "density", "0.5"),
        ("attention", "sigma", np.inf),
        ("attention", "mix", True),
    ],
)
def test_options_that_are_no_numbers(name, option, value):
    with pytest.raises(OptionError, match=option):
        generators.GENERATORS[name](8, **{option: value})
