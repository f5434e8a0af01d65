r"""Generate seeded instances: as in attention, as in the literature, and built to be hard in a known way.

==================  ==============================================================================================
kind                description
==================  ==============================================================================================
``attention``       :math:`(Q^\top Q) \circ (K^\top K)` with correlated channels of very unequal size; PSD
``planted``         a set with f = 0, hidden in a PSD integer matrix: optimal by construction
``cancellation``    near rank one; the optimum cancels in pairs, which greedy and single exchanges never find; PSD
``ties``            interchangeable vertices with small integer weights: many optima, many equal steps
``k_cluster``       W = -A of a random graph: the heaviest subgraph on k vertices; any sign
``dispersion``      W = -d, maximum diversity: real, whole-number or Euclidean distances; any sign
==================  ==============================================================================================

Each returns a `grace_opt.instances.Instance`; equal arguments give equal bits. Sources: GRACE (arXiv 2604.16983) for
``attention``; Lambert's k-cluster library for ``k_cluster``; MDPLIB (Martí et al., Optsicom) for ``dispersion``; the
others are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._util.exact_integers import MAX_EXACT_INTEGER
from .._util.parameters import choice, integer, number
from ..errors import OptionError, ProblemError
from .files import Instance

#: Largest number of rows or columns: beyond it, no machine can hold an n by n array of 64-bit numbers.
SIZE_PARAMETERS, MAX_SIZE = ("n", "queries", "keys", "rank", "massive", "classes", "levels"), 2**30 - 1
DISTANCES = ("uniform", "integer", "euclidean")


def attention(
    n: int = 64,
    seed: int = 0,
    *,
    k: int | None = None,
    queries: int = 32,
    keys: int = 1000,
    rank: int = 8,
    mix: float = 0.6,
    sigma: float = 1.0,
    massive: int = 3,
    massive_factor: float = 10.0,
) -> Instance:
    r"""Generate a W like that of one attention head.

    .. math:: W \propto (Q^\top Q) \circ (K^\top K), \qquad \operatorname{tr} W = n

    Every row of Q and K mixes a few common factors of decaying strength with independent noise, the channels have
    lognormal scales, and a few key channels are massive, as in trained models. W is PSD by Schur's product theorem.

    Parameters
    ----------
    n : int
        Number of channels.
    seed : int
        All randomness comes from it.
    k : int, optional
        Stored in the instance.
    queries, keys : int
        Number of rows of Q and of K.
    rank : int
        Number of common factors; each is 0.7 times as strong as the one before.
    mix : float in [0, 1]
        Share of a channel's variance that comes from the factors.
    sigma : float
        Standard deviation of the logarithm of the scales; 0 makes all channels alike.
    massive : int
        Number of key channels that are larger than others.
    massive_factor : float
        By how many times they are larger.

    Returns
    -------
    Instance
        W (n, n) float64, mean diagonal 1. Complexity O(n² (queries + keys)).

    Examples
    --------
    >>> W = attention(6, seed=1).W
    >>> W.shape, round(float(W.trace()), 9), bool(np.linalg.eigvalsh(W)[0] > -1e-12)
    ((6, 6), 6.0, True)
    """
    n, rng = _begun("attention", n, seed)
    queries, keys, rank = (_count(name, v, 1) for name, v in (("queries", queries), ("keys", keys), ("rank", rank)))
    mix, sigma = number("mix", mix, at_least=0, at_most=1), number("sigma", sigma, at_least=0)
    massive_factor = number("massive_factor", massive_factor, above=0)
    strength = 0.7 ** np.arange(rank)
    strength /= np.sqrt((strength**2).sum())

    def channels(rows: int) -> Any:
        loading = rng.standard_normal((rank, n))
        common = (rng.standard_normal((rows, rank)) * strength) @ loading
        own = rng.standard_normal((rows, n))
        return (np.sqrt(mix) * common + np.sqrt(1 - mix) * own) * rng.lognormal(0.0, sigma, n)

    Q, K = channels(queries), channels(keys)
    K[:, rng.choice(n, min(_count("massive", massive, 0), n), replace=False)] *= massive_factor
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # `_finite` says more
        W = (Q.T @ Q) * (K.T @ K)
        W = (W + W.T) / 2
        W = W / W.trace() * n
    return Instance(_finite(W, sigma=sigma, massive_factor=massive_factor), _k(k, n), "attention")


def planted(n: int, k: int, seed: int = 0, *, rank: int | None = None, spread: int = 9) -> Instance:
    r"""Hide a set with f = 0 in a PSD integer matrix.

    .. math::
        W_{ij} = v_i^\top v_j, \qquad \sum_{i \in P} v_i = 0, \qquad f(S) = \Bigl\|\sum_{i \in S} v_i\Bigr\|^2 \ge 0

    The integer vectors :math:`v_i` look alike inside and outside of P. P is optimal in exact arithmetic; other sets may
    be optimal too. Finding one means finding k vectors that sum to zero, which is NP-hard in general.

    Parameters
    ----------
    n, k : int
        Number of vertices, and size of the planted set, 1 <= k <= n.
    seed : int
        All randomness comes from it.
    rank : int, optional
        Length of the vectors; default max(2, n // 4). Near n, the null space of W reveals the planted set.
    spread : int
        Entries are drawn from -spread to spread before they are centred.

    Returns
    -------
    Instance
        W (n, n) int64, `planted` is P, sorted. Complexity O(n² rank).

    Examples
    --------
    >>> made = planted(8, 3, seed=0)
    >>> int(made.W[np.ix_(made.planted, made.planted)].sum())
    0
    """
    n, rng = _begun("planted", n, seed)
    if (size := _k(k, n)) is None or size < 1:
        raise ProblemError(f"k = {k}: plant at least one vertex, 1 <= k <= n = {n}.")
    length = max(2, n // 4) if rank is None else _count("rank", rank, 1)
    # Centring at most doubles an entry, plus a step. Entries of W are sums of `length` products and must stay exact.
    spread = _count("spread", spread, 1)
    if length * (2 * spread + 2) ** 2 > MAX_EXACT_INTEGER:
        raise OptionError(f"spread={spread!r}: weights would leave the whole numbers that float64 holds; give less.")
    V = rng.integers(-spread, spread + 1, (n, length))
    P = np.sort(rng.choice(n, size, replace=False))
    # Subtract the mean of the planted vectors in whole steps; as many vectors as the remainder get one step more.
    share, remainder = np.divmod(V[P].sum(0), size)
    V[P] -= share
    for column, count in enumerate(remainder):
        V[rng.choice(P, count, replace=False), column] -= 1
    return Instance(V @ V.T, size, "planted", tuple(int(i) for i in P))


def cancellation(n: int, seed: int = 0, *, k: int | None = None, noise: float = 1e-3) -> Instance:
    r"""Generate a near-rank-one W where vertices cheap on their own are expensive together, and expensive ones cancel.

    .. math:: W = v v^\top + \varepsilon\, G G^\top / n, \qquad f(S) \approx \Bigl(\sum_{i \in S} v_i\Bigr)^2

    There are k/2 pairs of large entries :math:`\pm L`, :math:`L \ge 4k`, that cancel exactly; the other entries are
    about 1. Greedy takes k of the small ones, f ≈ k². No single exchange improves on that, because one large vertex
    alone costs more than all of them. The pairs together have f ≈ 0 (plus one small vertex if k is odd).

    Parameters
    ----------
    n : int
        Number of vertices, at least 4.
    seed : int
        All randomness comes from it.
    k : int, optional
        2 <= k <= n / 2; by default the largest even number.
    noise : float
        :math:`\varepsilon`, which breaks ties and keeps the optimum from being exactly 0. W is PSD for any value.

    Returns
    -------
    Instance
        W (n, n) float64.

    Examples
    --------
    >>> import grace_opt
    >>> made = cancellation(12, seed=0)
    >>> greedy, best = (float(grace_opt.solve(made.W, made.k, m).objective) for m in ("mies", "exhaustive"))
    >>> greedy > 100 * best
    True
    """
    n, rng = _begun("cancellation", n, seed)
    size = 2 * (n // 4) if k is None else _k(k, n)
    if size is None or not 2 <= size <= n // 2:
        raise ProblemError(f"n = {n}, k = {size}: `cancellation` needs 2 <= k <= n / 2.")
    noise = number("noise", noise, at_least=0)
    large = rng.uniform(4 * size, 6 * size, size // 2)
    v = rng.permutation(np.concatenate([large, -large, rng.uniform(0.8, 1.2, n - 2 * len(large))]))
    G = rng.standard_normal((n, n))
    with np.errstate(over="ignore"):  # `_finite` says more
        W = np.outer(v, v) + noise * (G @ G.T) / n
        W = (W + W.T) / 2
    return Instance(_finite(W, noise=noise), size, "cancellation")


def ties(n: int, seed: int = 0, *, k: int | None = None, classes: int | None = None, levels: int = 3) -> Instance:
    """Generate vertices of a few classes, alike within each: many optima, and ties at every step.

    ``W_ij = B[class of i, class of j]`` with B symmetric and whole numbers below `levels`. These instances show whether
    a method depends on tie-breaking, vertex order or rounding.

    Parameters
    ----------
    n : int
        Number of vertices.
    seed : int
        All randomness comes from it.
    k : int, optional
        By default n // 2.
    classes : int, optional
        Default max(1, n // 4).
    levels : int
        Weights are 0 to levels - 1.

    Returns
    -------
    Instance
        W (n, n) int64.

    Examples
    --------
    >>> sorted(set(ties(20, seed=0).W.ravel().tolist()))
    [0, 1, 2]
    """
    n, rng = _begun("ties", n, seed)
    groups = max(1, n // 4) if classes is None else _count("classes", classes, 1)
    B = np.triu(rng.integers(0, _count("levels", levels, 1), (groups, groups)))
    B += np.triu(B, 1).T
    member = rng.integers(0, groups, n)
    return Instance(B[np.ix_(member, member)], _k(n // 2 if k is None else k, n), "ties")


def k_cluster(n: int, seed: int = 0, *, k: int | None = None, density: float = 0.5) -> Instance:
    """Generate W = -A of a random graph: f = -2·(edges within S).

    Parameters
    ----------
    n : int
        Number of vertices.
    seed : int
        All randomness comes from it.
    k : int, optional
        Default n // 2; the literature has n/4, n/2 and 3n/4.
    density : float in [0, 1]
        Probability of each edge.

    Returns
    -------
    Instance
        W (n, n) int64.

    Examples
    --------
    >>> k_cluster(4, density=1.0).W.sum()
    np.int64(-12)
    """
    n, rng = _begun("k_cluster", n, seed)
    density = number("density", density, at_least=0, at_most=1)
    A = np.triu(rng.random((n, n)) < density, 1).astype(np.int64)
    return Instance(-(A + A.T), _k(n // 2 if k is None else k, n), "k-cluster")


def dispersion(n: int, seed: int = 0, *, k: int | None = None, distances: str = "uniform") -> Instance:
    """Generate W = -d, maximum diversity: f = -2·(sum of the distances within S).

    Parameters
    ----------
    n : int
        Number of vertices.
    seed : int
        All randomness comes from it.
    k : int, optional
        Default max(1, n // 10), as in most of MDPLIB.
    distances : str
        "uniform": real, 0 to 10, independent (as the sets MDG-a); "integer": 0 to 9 (as SOM-b); "euclidean": between
        points of 2 to 21 coordinates in [0, 10] (as GKD-c).

    Returns
    -------
    Instance
        W (n, n) float64, int64 for whole numbers.

    Examples
    --------
    >>> dispersion(30, distances="integer").W.dtype, dispersion(30).k
    (dtype('int64'), 3)
    """
    n, rng = _begun("dispersion", n, seed)
    choice("distances", distances, DISTANCES)
    if distances == "euclidean":
        points = rng.uniform(0, 10, (n, rng.integers(2, 22)))
        d = np.sqrt(((points[:, None] - points[None]) ** 2).sum(-1))
    else:
        d = np.triu(rng.uniform(0, 10, (n, n)).round(2) if distances == "uniform" else rng.integers(0, 10, (n, n)), 1)
        d = d + d.T
    return Instance(0 - d, _k(max(1, n // 10) if k is None else k, n), "MDPLIB")


GENERATORS: dict[str, Callable[..., Instance]] = {
    f.__name__: f for f in (attention, planted, cancellation, ties, k_cluster, dispersion)
}


def _begun(kind: str, n: Any, seed: Any) -> tuple[int, np.random.Generator]:
    """Return n, checked, and a random generator that is different for every kind, size and seed."""
    n, seed = _count("n", n, 1), _count("seed", seed, 0)
    return n, np.random.default_rng([seed, n, *kind.encode()])


def _count(name: str, value: Any, least: int) -> int:
    count = integer(name, value, at_least=least)
    return integer(name, count, at_most=MAX_SIZE, hint="no array holds more") if name in SIZE_PARAMETERS else count


def _k(k: Any, n: int) -> int | None:
    if k is not None and not 0 <= _count("k", k, 0) <= n:
        raise ProblemError(f"k = {k}: must lie between 0 and n = {n}.")
    return None if k is None else int(k)


def _finite(W: Any, **parameters: float) -> Any:
    if not np.isfinite(W).all():
        given = " and ".join(f"{name}={value:g}" for name, value in parameters.items())
        raise OptionError(f"{given}: weights would leave the range of float64; give less extreme values.")
    return W
