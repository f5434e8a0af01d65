"""Generated sparse graphs of several kinds for `bench.sparse`: W = -A / 2, so that -f is the weight of a part.

When: a benchmark needs graphs whose densest parts differ in how hard they are to find. Edges weigh from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.spatial import cKDTree

#: A scipy.sparse.csr_array; scipy ships no types.
Graph: TypeAlias = Any
#: Mean degree.
DEGREE = 12


def of_pairs(n: int, ends: npt.NDArray[Any], rng: np.random.Generator) -> Graph:
    """W of a graph with these edges, in either order and perhaps twice, and weights from 0 to 1."""
    low, high = np.sort(ends, axis=1).T
    keys = np.unique((low * n + high)[low != high])
    half = sp.coo_array((-rng.random(len(keys)) / 2, (keys // n, keys % n)), shape=(n, n)).tocsr()
    return (half + half.T).tocsr()


def uniform(n: int, rng: np.random.Generator, edges: int | None = None) -> Graph:
    """Every pair of vertices with the same probability."""
    return of_pairs(n, rng.integers(0, n, (edges or n * DEGREE // 2, 2)), rng)


def power_law(n: int, rng: np.random.Generator) -> Graph:
    """Ends drawn in proportion to rank^-0.6: degrees follow a power law."""
    weights = np.arange(1.0, n + 1) ** -0.6
    return of_pairs(n, rng.choice(n, (n * DEGREE // 2, 2), p=weights / weights.sum()), rng)


def planted(n: int, rng: np.random.Generator) -> Graph:
    """A uniform graph, and within a tenth of its vertices so many edges more that their degree is half as large again.

    The part is denser, but not so much that greedy methods must find it.
    """
    part = rng.permutation(n)[: n // 10]
    more = part[rng.integers(0, len(part), (len(part) * DEGREE // 4, 2))]
    return of_pairs(n, np.concatenate([rng.integers(0, n, (n * DEGREE // 2, 2)), more]), rng)


def geometric(n: int, rng: np.random.Generator) -> Graph:
    """Points in a square, joined where they are near."""
    radius = (DEGREE / np.pi / n) ** 0.5
    return of_pairs(n, cKDTree(rng.random((n, 2))).query_pairs(radius, output_type="ndarray"), rng)


KINDS: dict[str, Callable[[int, np.random.Generator], Graph]] = {
    "uniform": uniform,
    "power law": power_law,
    "planted": planted,
    "geometric": geometric,
}


def weight_of(W: Graph, chosen: npt.NDArray[Any]) -> float:
    """The weight of the edges within a part: minus f."""
    return float(-W[chosen][:, chosen].sum())
