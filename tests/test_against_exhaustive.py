"""Every registered method against the enumerated optimum, on drawn batches of small and difficult instances.

3 000 instances (300 for `sdp`) where nothing is said, as in CI; ``make test-deep`` draws 100 000 (3 000), goes on after
a breach to count them all, and writes its log to docs/results. `exhaustive` itself is tested in test_solvers.
"""

import dataclasses
import math
import os
import time
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bench.pages_of_tests import test_deep as deep_page
from bench.provenance import require_clean
from bench.report import RESULTS, write_results
from grace_opt import Status, registry, solve
from grace_opt.bounds import LEVELS
from grace_opt.problem import Problem
from grace_opt.solution import OPTIMALITY_RTOL
from grace_opt.testing import KINDS, instance
from tests import oracle

WANTED = int(os.environ.get("GRACE_TEST_INSTANCES", "3000"))
#: A deep run has the same draws every time, counts breaches instead of stopping at the first, and leaves a log.
DEEP = WANTED > 3000
SDP_WANTED = min(3000, max(300, WANTED // 10))
SIZE, SDP_SIZE, MAX_N = 100 if DEEP else 60, 10, 14
#: What an objective, and a bound above the optimum, may be off by, relative to themselves: their last digits.
LAST_DIGITS = 4 * float(np.finfo(np.float64).eps)
ALLOW_DIRTY = bool(os.environ.get("GRACE_ALLOW_DIRTY"))
#: Asked before the first instance is drawn: numbers that cannot be committed are not worth an hour.
SOURCE = require_clean(ALLOW_DIRTY) | {"command": "make test-deep"} if DEEP else {}
MORE_KINDS = ("rank deficient", "huge", "tiny", "massive", "negative", "twins", "k-cluster", "cancelling", "near ties")
#: Weights that no one scale suits; in these, protected vertices are giants.
ADVERSARIAL = (
    "any scale",
    "positive at any scale",
    "12 decades",
    "big M",
    "one big M",
    "large integers",
    "hidden pair",
)
NAMES = sorted(set(registry.specs()) - {"sdp", "exhaustive"})
#: One of these more per batch, and one level of certificate, for they are dear.
VARIANTS = {
    "branch_and_bound, bound=qp": {"bound": "qp"},
    "branch_and_bound, bound=sdp": {"bound": "sdp"},
    "branch_and_bound, start=random": {"start": "random"},
    "branch_and_bound, bound=sdp, start=random": {"bound": "sdp", "start": "random"},
}
#: Methods that promise to be no worse than another.
NO_WORSE = (
    ("local_search", "mies"),
    ("tabu", "mies"),
    ("beam", "mies"),
    ("portfolio", "mies"),
    ("portfolio", "drop_greedy"),
)
SEEDS = st.integers(0, 2**32 - 1)


def weights(kind, n, seed):
    """A symmetric (n, n) matrix of one of `KINDS` or `MORE_KINDS`."""
    if kind in KINDS:
        return instance(kind, n, seed)
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(n, n))
    wishart, signs = G @ G.T, G + G.T
    if kind == "rank deficient":
        low = G[:, : max(1, n // 3)] * 10.0 ** rng.integers(-1, 2, max(1, n // 3))
        return low @ low.T
    if kind == "huge":
        return wishart * 10.0 ** rng.integers(50, 290)
    if kind == "tiny":
        return signs * 10.0 ** -rng.integers(50, 290)
    if kind == "massive":  # channels whose weights are many orders apart
        scale = 10.0 ** rng.integers(-5, 6, n)
        return wishart * np.outer(scale, scale)
    if kind == "negative":
        return -np.abs(signs)
    if kind == "twins":  # equal rows: every optimum has company
        which = rng.integers(0, max(1, n // 2), n)
        return wishart[np.ix_(which, which)]
    if kind == "k-cluster":
        A = np.triu(-(rng.random((n, n)) < rng.choice([0.25, 0.5, 0.75])).astype(float), 1)
        return A + A.T
    if kind == "cancelling":  # rank one with an entry for every other's opposite, and a little of everything
        v = np.concatenate([G[: n // 2, 0], -G[: n - n // 2, 0]])
        return np.outer(v, v) + 1e-7 * signs
    if kind == "near ties":
        return np.ones((n, n)) + 1e-9 * signs
    if kind in ("any scale", "positive at any scale", "12 decades"):  # every entry at a scale of its own
        W = np.abs(G) if kind.startswith("positive") else G
        W = np.triu(
            W * 10.0 ** (rng.uniform(-6, 6, (n, n)) if kind == "12 decades" else rng.uniform(-300, 300, (n, n)))
        )
        return W + np.triu(W, 1).T
    if kind == "big M":  # what people write to forbid vertices and pairs
        W = wishart + 1e9 * 10.0 ** rng.integers(0, 8) * np.triu(rng.random((n, n)) < 0.2)
        return np.triu(W) + np.triu(W, 1).T
    if kind == "one big M":
        return signs + np.diag(10.0 ** rng.integers(9, 280) * (np.arange(n) == rng.integers(n)))
    if kind == "large integers":
        W = np.triu(np.round(G * 10.0 ** rng.integers(8, 15)))
        return W + np.triu(W, 1).T
    if kind == "hidden pair":  # two giants that cancel, or nearly
        a, b = rng.integers(n), rng.integers(n)
        M = 10.0 ** rng.integers(6, 40)
        W = np.round(signs * 2**20) / 2**20
        if a != b:
            W[a, a] += M
            W[b, b] += M
            W[a, b] = W[b, a] = -M
        return W
    raise ValueError(kind)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Instances of one size; what it prints builds it again."""

    kinds: list
    n: int
    seed: int
    k: list
    protected: list
    variant: str
    certify: str

    def arrays(self):
        W = np.stack([weights(kind, self.n, self.seed + b) for b, kind in enumerate(self.kinds)])
        blocked = np.array([[bits >> i & 1 for i in range(self.n)] for bits in self.protected], bool)
        for b, kind in enumerate(self.kinds):
            if kind in ADVERSARIAL:  # nothing that cannot be chosen may matter
                W[b, blocked[b], blocked[b]] = 1e300
        return W, np.array(self.k), blocked


@st.composite
def drawn_batches(draw, size):
    """Hypothesis draws the size, what is tried and one seed; many small draws would mostly be repeats of each other."""
    n = draw(st.sampled_from([*range(1, MAX_N + 1), *range(MAX_N // 2, MAX_N + 1)]))
    variant, certify = draw(st.sampled_from(sorted(VARIANTS))), draw(st.sampled_from(LEVELS))
    rng = np.random.default_rng([n, *variant.encode(), *certify.encode(), draw(SEEDS)])
    kinds = rng.choice(KINDS + MORE_KINDS + ADVERSARIAL, size).tolist()
    # Half of the instances protect nothing, the others any vertices; few are forced, for there is little to get wrong.
    protected = [int(rng.integers(2**n)) * int(rng.integers(2)) for _ in range(size)]
    k = [int(rng.choice([0, m, *[*range(1, m)] * 4])) for m in (n - bits.bit_count() for bits in protected)]
    return Batch(kinds, n, int(rng.integers(2**32)), k, protected, variant, certify)


class Record:
    """What was drawn and what came of it: the log of a deep run."""

    def __init__(self):
        self.instances, self.sdp_instances, self.kinds, self.sizes = 0, 0, Counter(), Counter()
        self.methods, self.breaches, self.began = defaultdict(Counter), [], time.perf_counter()
        self.worst = defaultdict(lambda: {"bound_above_optimum": 0.0, "exact_off": 0.0})

    def count(self, batch):
        self.kinds.update(batch.kinds)
        self.sizes[batch.n] += len(batch.kinds)

    def worst_of(self, name, key, values):
        self.worst[name][key] = max(self.worst[name][key], float(np.max(values, initial=0.0)))


RECORD = Record()


class Case:
    """One drawn batch with its optima, against which answers are checked; collects what is wrong with them."""

    def __init__(self, batch):
        self.batch, self.found, self.sums = batch, [], {}
        self.W, self.k, self.blocked = batch.arrays()
        self.rows = self.W.tolist()
        self.problem = Problem.of(self.W, self.k, protected=self.blocked)
        best = solve(self.problem, method="exhaustive")
        self.optimum = self.exactly(best.mask)
        some = int(np.argmin(self.k))  # the oracle's own oracle, on one instance of the batch
        free = np.flatnonzero(~self.blocked[some]).tolist()
        if math.comb(len(free), self.k[some]) <= 200:
            known = oracle.optimum(self.rows[some], self.k[some], np.flatnonzero(self.blocked[some]).tolist())
            self.breach(
                (np.arange(len(self.k)) == some) & (np.abs(self.optimum - known) > LAST_DIGITS * abs(known)),
                "exhaustive",
                lambda b: f"finds {self.optimum[b]!r} where the optimum is {known!r}",
            )

    def exactly(self, masks):
        """f by exact summation."""
        return np.array([self.summed(b, m)[0] for b, m in enumerate(masks)])

    def rounding(self, masks):
        """What OPTIMAL leaves to rounding, beside 1e-9 of f: 64 n eps of the chosen weights."""
        return np.array([16 * LAST_DIGITS * len(m) * self.summed(b, m)[1] for b, m in enumerate(masks)])

    def summed(self, b, mask):
        """f by exact summation, and the sum of the absolute weights; once for a choice, as most methods find one."""
        choice = b, mask.tobytes()
        if choice not in self.sums:
            size = np.abs(self.W[b][np.ix_(mask, mask)]).sum()
            self.sums[choice] = oracle.objective(self.rows[b], np.flatnonzero(mask)), size
        return self.sums[choice]

    def solve(self, name, method, **options):
        """The answer; an error is a breach like any other in a deep run, of the instances that raise it alone, too."""
        try:
            return solve(self.problem, method=method, **options)
        except Exception as error:
            if not DEEP:
                raise
            text = f"{type(error).__name__}: {error}"
            raises = [_raises(self.problem.instance(b), method, options) for b in range(len(self.k))]
            self.breach(np.array(raises) | (not any(raises)), name, lambda b: text)
            return None

    def breach(self, wrong, name, what):
        for b in np.flatnonzero(wrong):
            self.found.append(
                f"{name}: {what(b)}; k = {self.k[b]}, "
                f"protected {np.flatnonzero(self.blocked[b]).tolist()}, optimum {self.optimum[b]!r}, "
                f"W = weights({self.batch.kinds[b]!r}, {self.batch.n}, {self.batch.seed + b})"
            )

    @np.errstate(over="ignore")  # beside the smallest numbers, anything is infinitely large
    def check(self, name, sol, exact=False):
        if sol is None:
            return
        mask, f, bound = sol.mask, sol.objective, sol.lower_bound
        self.breach(mask.sum(1) != self.k, name, lambda b: f"{mask[b].sum()} vertices")
        self.breach((mask & self.blocked).any(1), name, lambda b: "a protected vertex is chosen")
        again = self.exactly(mask)
        self.breach(
            ~(np.abs(f - again) <= LAST_DIGITS * np.abs(again) + 1e-14 * LAST_DIGITS * self.rounding(mask)),
            name,
            lambda b: f"f = {f[b]!r}, recomputed {again[b]!r}",
        )
        self.breach(
            again < self.optimum - LAST_DIGITS * np.abs(self.optimum),
            name,
            lambda b: f"f = {again[b]!r} is below the optimum",
        )
        self.check_bound(name, bound)
        self.breach(~(sol.gap >= 0), name, lambda b: f"gap = {sol.gap[b]!r}")
        optimal = np.array([status is Status.OPTIMAL for status in sol.status])
        off = again - self.optimum
        allowed = np.maximum(OPTIMALITY_RTOL * np.abs(again), self.rounding(mask))
        self.breach(optimal & ~(off <= allowed), name, lambda b: f"OPTIMAL with f = {f[b]!r}, off by {off[b]:.3g}")
        if exact:
            self.breach(~optimal, name, lambda b: f"{sol.status[b]}: f = {f[b]!r}, bound {bound[b]!r}")
        RECORD.worst_of(name, "exact_off", (off / np.maximum(allowed, np.finfo(float).tiny))[optimal])
        RECORD.methods[name]["instances"] += len(f)
        RECORD.methods[name]["proved"] += int(optimal.sum())
        RECORD.methods[name]["optimal"] += int((off <= allowed).sum())  # as for a proof: what is proved is optimal

    def check_bound(self, name, bound):
        above = (bound - self.optimum) / np.maximum(np.abs(self.optimum), np.finfo(float).tiny)
        self.breach(
            ~(above <= LAST_DIGITS),
            name,
            lambda b: f"the bound {bound[b]!r} is too high by {above[b]:.3g} of the optimum",
        )
        RECORD.worst_of(name, "bound_above_optimum", above)

    def no_worse(self, name, sol, than, start):
        if sol is None or start is None:
            return
        f, other = self.exactly(sol.mask), self.exactly(start.mask)
        worse = f - other > np.maximum(OPTIMALITY_RTOL * np.abs(other), self.rounding(start.mask))
        self.breach(worse, name, lambda b: f"f = {f[b]!r} is worse than {than}: {other[b]!r}")

    def done(self):
        RECORD.breaches.extend(self.found)
        for text in self.found:
            print(text, flush=True)
        assert DEEP or not self.found, "\n".join(self.found)
        assert DEEP or all(of["proved"] <= of["optimal"] for of in RECORD.methods.values())


def _raises(problem, method, options):
    try:
        solve(problem, method=method, **options)
    except Exception:
        return True
    return False


def run_settings(count):
    never = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
    common = {"max_examples": count, "deadline": None, "suppress_health_check": never, "database": None}
    if DEEP:
        common |= {"derandomize": True, "phases": (Phase.generate,)}
    return settings(**common)


@pytest.mark.slow
@run_settings(-(-WANTED // SIZE))
@given(drawn_batches(SIZE))
def test_every_method_against_the_optimum(batch):
    case = Case(batch)
    RECORD.count(batch)
    RECORD.instances += len(batch.kinds)
    found = {}
    for name in NAMES:
        found[name] = case.solve(name, name)
        case.check(name, found[name], registry.get(name).exact)
    name = f"think, certify={batch.certify}"
    case.check(name, case.solve(name, "think", certify=batch.certify))
    case.check(batch.variant, case.solve(batch.variant, "branch_and_bound", **VARIANTS[batch.variant]), exact=True)
    start = solve(case.problem, method="random", seed=1)
    for method in ("local_search", "tabu"):
        name = f"{method}, start=random mask"
        sol = case.solve(name, method, start=start.mask)
        case.check(name, sol)
        case.no_worse(name, sol, "its start", start)
    for name, other in NO_WORSE:
        case.no_worse(name, found[name], other, found[other])
    case.done()


@pytest.mark.slow
@run_settings(-(-SDP_WANTED // SDP_SIZE))
@given(drawn_batches(SDP_SIZE))
def test_sdp_against_the_optimum(batch):
    pytest.importorskip("cvxpy")
    case = Case(batch)
    RECORD.sdp_instances += len(batch.kinds)
    case.check("sdp", case.solve("sdp", "sdp"))
    case.done()


@pytest.mark.skipif(not DEEP, reason="make test-deep writes the log")
def test_the_deep_log():
    """Runs last: writes what the tests above drew and found, breaches included."""
    seconds = time.perf_counter() - RECORD.began
    log = {
        "provenance": SOURCE,
        "instances": RECORD.instances,
        "sdp_instances": RECORD.sdp_instances,
        "breaches": len(RECORD.breaches),
        "seconds": round(seconds, 1),
        "kinds": dict(sorted(RECORD.kinds.items())),
        "rtol": OPTIMALITY_RTOL,
        "sizes": {str(n): RECORD.sizes[n] for n in sorted(RECORD.sizes)},
        "methods": {name: dict(RECORD.methods[name]) | RECORD.worst[name] for name in sorted(RECORD.methods)},
    }
    write_results(RESULTS / "test_deep", log, deep_page, allow_dirty=ALLOW_DIRTY)
    assert RECORD.instances >= WANTED
    assert RECORD.sdp_instances >= SDP_WANTED
    assert not RECORD.breaches, f"{len(RECORD.breaches)} breaches, printed above"
