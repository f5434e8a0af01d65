"""For people who write solvers or stores: conformance suites, and hypothesis strategies that draw difficult instances.

``check_solver("name")`` runs the suite on a registered method and raises AssertionError at the first violation of the
contract: exactly k vertices, none protected; correct objective; bound at most f and the optimum; batch = loop;
per-instance k; reproducible; input unchanged; dtypes and edge cases. ``check_store(store)`` does as much for a way to
hold a cache. Our own tests run them over the whole registry, and over the store of the guide.
Needs ``pip install ".[dev]"`` for hypothesis.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from . import api, registry
from ._util.array_like import as_tensor
from ._util.json_values import to_numpy
from ._util.optional import missing
from .errors import SolverError
from .solution import OPTIMALITY_RTOL, ROUNDING, Solution, Status

if TYPE_CHECKING:
    from .hf.stores.maker import StoreMaker

try:
    from hypothesis import strategies as st
except ModuleNotFoundError as error:
    raise missing("hypothesis", "dev", "grace_opt.testing") from error

KINDS = ("wishart", "attention", "indefinite", "integer", "ties", "rank one", "zero rows", "diagonal", "scaled")


def instance(kind: str, n: int, seed: int) -> npt.NDArray[np.float64]:
    """A symmetric (n, n) matrix of one of `KINDS`.

    Examples
    --------
    >>> instance("ties", 4, seed=0).shape
    (4, 4)
    """
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(n, n))
    if kind == "wishart":
        return np.asarray(G @ G.T)
    if kind == "attention":
        Q, K = rng.normal(size=(8, n)) * rng.lognormal(size=n), rng.normal(size=(16, n)) * rng.lognormal(size=n)
        return np.asarray((Q.T @ Q) * (K.T @ K))
    if kind == "indefinite":
        return np.asarray(G + G.T)
    if kind == "integer":
        A = np.triu(rng.integers(-4, 5, (n, n)).astype(float))
        return np.asarray(A + np.triu(A, 1).T)
    if kind == "ties":
        A = np.triu(rng.integers(0, 2, (n, n)).astype(float))
        return np.asarray(A + np.triu(A, 1).T)
    if kind == "rank one":
        v = rng.choice([-1.0, 1.0, 0.9, -0.9], n)
        return np.outer(v, v)
    if kind == "zero rows":
        W = G @ G.T
        W[: n // 2] = 0.0
        W[:, : n // 2] = 0.0
        return W
    if kind == "diagonal":
        return np.diag(rng.normal(size=n))
    if kind == "scaled":
        return np.asarray(G @ G.T) * 10.0 ** rng.integers(-30, 30)
    raise ValueError(f"kind={kind!r}: one of {KINDS}")


@st.composite
def instances(draw: st.DrawFn, max_n: int = 9) -> tuple[np.ndarray[Any, Any], int, list[int]]:
    """Hypothesis strategy: W (n, n), a feasible k, and protected vertices.

    Examples
    --------
    >>> from hypothesis import given
    >>> @given(instances())
    ... def test_mies(drawn):
    ...     W, k, protected = drawn
    ...     check_solution(W, k, api.solve(W, k, protected=protected), protected)
    """
    n = draw(st.integers(1, max_n))
    W = instance(draw(st.sampled_from(KINDS)), n, draw(st.integers(0, 2**32 - 1)))
    protected = sorted(draw(st.sets(st.integers(0, n - 1), max_size=n // 2)))
    k = draw(st.integers(0, n - len(protected)))
    return W, k, protected


@st.composite
def batches(
    draw: st.DrawFn, max_n: int = 9, max_b: int = 4
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Hypothesis strategy: W (B, n, n), one k per instance, and a protected mask (B, n)."""
    n, size = draw(st.integers(1, max_n)), draw(st.integers(1, max_b))
    kinds = [draw(st.sampled_from(KINDS)) for _ in range(size)]
    W = np.stack([instance(kind, n, draw(st.integers(0, 2**32 - 1))) for kind in kinds])
    protected = np.array([[draw(st.booleans()) and i % 2 == 0 for i in range(n)] for _ in range(size)])
    k = np.array([draw(st.integers(0, int(n - row.sum()))) for row in protected])
    return W, k, protected


def check_solution(W: Any, k: Any, solution: Solution, protected: Any = None, required: Any = None) -> None:
    """Check an answer against its instance: size, required and protected vertices, objective, bound, status, indices.

    Parameters
    ----------
    W, k, protected, required
        As given to `grace_opt.solve`; vertices as numbers or bool masks.
    solution : Solution
        The answer, to the least f or to the most.

    Raises
    ------
    AssertionError
        The message names the method and what was wrong.

    Examples
    --------
    >>> W = instance("wishart", 6, seed=0)
    >>> check_solution(W, 3, api.solve(W, 3))
    """
    mask = to_numpy(solution.mask)
    W = to_numpy(as_tensor(W, "W").to(torch.float64))
    n, shape = W.shape[-1], W.shape[:-2]
    ks = np.broadcast_to(np.asarray(k), shape)
    blocked, needed = _vertices(protected, (*shape, n)), _vertices(required, (*shape, n))
    sign = -1.0 if solution.maximize else 1.0
    indices = to_numpy(solution.indices)
    for at in np.ndindex(*shape):
        chosen = np.flatnonzero(mask[at])
        assert mask[at].dtype == bool, f"{solution.method}: the mask is not bool"
        assert len(chosen) == ks[at], f"{solution.method}: {len(chosen)} vertices chosen, k = {ks[at]}"
        assert not (mask[at] & blocked[at]).any(), f"{solution.method}: a protected vertex was chosen"
        assert mask[at][needed[at]].all(), f"{solution.method}: a required vertex was not chosen"
        row = indices[at]
        assert row[row >= 0].tolist() == chosen.tolist(), (
            f"{solution.method}: indices {row} do not match the mask {chosen}"
        )
        exact = W[at][np.ix_(chosen, chosen)]
        size = np.abs(exact).sum()
        objective, bound = (float(to_numpy(v)[at]) for v in (solution.objective, solution.bound))
        value = math.fsum(exact.ravel().tolist())
        assert abs(objective - value) <= 1e-9 * size, f"{solution.method}: objective {objective}, recomputed {value}"
        assert sign * bound <= sign * objective, f"{solution.method}: f = {objective} is beyond the bound {bound}"
        status = solution.status[at] if shape else solution.status
        if status is Status.OPTIMAL:
            slack = max(OPTIMALITY_RTOL * abs(objective), ROUNDING * n * np.finfo(float).eps * size)
            assert sign * (objective - bound) <= slack, f"{solution.method}: OPTIMAL without proof"


def _vertices(given: Any, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """Vertices as a bool mask of this shape."""
    if given is None:
        return np.zeros(shape, bool)
    given = to_numpy(given)
    return np.broadcast_to(given if given.dtype == bool else np.isin(np.arange(shape[-1]), given), shape)


def check_solver(name: str, *, sizes: tuple[int, ...] = (1, 2, 3, 6, 9), seed: int = 0, **options: Any) -> None:
    """Run the conformance suite on the registered method `name`.

    Parameters
    ----------
    name : str
        A registered method.
    sizes : tuple of int
        Numbers of vertices to try; optima are found by enumeration, so keep them small.
    seed : int
        Seed of the instances and of the method.
    **options
        Options passed to the method.

    Raises
    ------
    AssertionError
        The message names the method, the instance and what was wrong.

    Examples
    --------
    >>> check_solver("mies", sizes=(3,))
    """
    spec = registry.get(name)
    for n, (which, kind) in itertools.product(sizes, enumerate(KINDS)):
        W = instance(kind, n, seed + 100 * which + n)
        for k in sorted({0, 1, n // 2, n}):
            _check_single(spec, W, k, seed, options)
        _check_protected(spec, W, seed, options)
    for n in sizes:
        _check_batch(spec, np.stack([instance(kind, n, seed + n) for kind in KINDS]), seed, options)


def check_store(store: StoreMaker, tolerance: float = 0.5, **settings: Any) -> None:
    """Run the conformance suite on a store of a cache's older tokens.

    Parameters
    ----------
    store : StoreMaker
        A subclass of `grace_opt.hf.stores.maker.TensorStore`, or another maker.
    tolerance : float
        Largest relative error of its keys, and of its values.
    **settings
        Settings of the cache, beside ``store=``.

    Raises
    ------
    AssertionError
        The message names the store, the family of models and what was wrong.
    """
    from .hf.tools.store_check import check  # transformers, which solvers do without

    check(store, tolerance, **settings)


def _solve(W: Any, k: Any, name: str, **options: Any) -> Solution:
    """`grace_opt.solve`, with a refused answer reported as a violation like any other."""
    try:
        return api.solve(W, k, name, **options)
    except SolverError as error:
        raise AssertionError(str(error)) from error


def _check_single(
    spec: registry.SolverSpec, W: np.ndarray[Any, Any], k: int, seed: int, options: dict[str, Any]
) -> None:
    before = W.copy()
    first = _solve(W, k, spec.name, seed=seed, **options)
    assert (before == W).all(), f"{spec.name} wrote into its input"
    check_solution(W, k, first)
    optimum, size = _optimum(W, k)
    tolerance = max(OPTIMALITY_RTOL * abs(optimum), ROUNDING * len(W) * np.finfo(float).eps * size)
    assert float(first.lower_bound) <= optimum + tolerance, (
        f"{spec.name}: bound {first.lower_bound} above optimum {optimum}"
    )
    if spec.exact:
        assert first.status is Status.OPTIMAL, (
            f"{spec.name} is exact, but answered {first.status} at n = {len(W)}, k = {k}"
        )
    if first.status is Status.OPTIMAL:
        assert float(first.objective) <= optimum + tolerance, (
            f"{spec.name}: claims {first.objective}, optimum {optimum}"
        )
    again = _solve(W, k, spec.name, seed=seed, **options)
    assert (first.mask == again.mask).all(), f"{spec.name}: equal seeds gave different answers"
    tensor = _solve(torch.from_numpy(W), k, spec.name, seed=seed, **options)
    assert isinstance(tensor.mask, torch.Tensor), f"{spec.name}: torch in, {type(tensor.mask)} out"
    assert (tensor.mask.numpy() == first.mask).all(), f"{spec.name}: torch and numpy inputs gave different answers"


def _check_protected(spec: registry.SolverSpec, W: np.ndarray[Any, Any], seed: int, options: dict[str, Any]) -> None:
    n = len(W)
    protected = list(range(0, n, 2)) if n > 1 else []
    k = (n - len(protected) + 1) // 2
    check_solution(W, k, _solve(W, k, spec.name, protected=protected, seed=seed, **options), protected or None)
    low = _solve(W.astype(np.float32), k, spec.name, protected=protected, seed=seed, **options)
    check_solution(W.astype(np.float32), k, low, protected or None)


def _check_batch(spec: registry.SolverSpec, W: np.ndarray[Any, Any], seed: int, options: dict[str, Any]) -> None:
    n = W.shape[-1]
    ks = np.arange(len(W)) % (n + 1)
    together = _solve(W, ks, spec.name, seed=seed, **options)
    check_solution(W, ks, together)
    for b, k in enumerate(ks):
        alone = _solve(W[b], int(k), spec.name, seed=seed, **options)
        assert (together.mask[b] == alone.mask).all(), (
            f"{spec.name}: instance {b} of a batch differs from the same alone"
        )


def _optimum(W: np.ndarray[Any, Any], k: int) -> tuple[float, float]:
    """The least objective, and the sum of the absolute weights of the choice that has it."""
    choices = (W[np.ix_(S, S)].ravel().tolist() for S in map(list, itertools.combinations(range(len(W)), k)))
    best = min(choices, key=math.fsum)
    return math.fsum(best), math.fsum(map(abs, best))
