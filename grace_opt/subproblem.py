r"""`Subproblem`: what is left of one instance once some vertices are in and others are out.

.. math:: f(S) = c_0 + \sum_{i \in T} l_i + \sum_{i \ne j \in T} W_{ij},\quad T \subseteq \text{free vertices},\ |T| = k

Exact methods and certificates work on it, in numpy and float64; the node weights live in l, so W has a zero diagonal.
Source: ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import power_of_two
from .problem import Problem

Array = npt.NDArray[np.float64]
IN, OUT = 1, 2


@dataclass(frozen=True)
class Subproblem:
    """Free vertices with their weights, and how many of them are still to choose.

    Attributes
    ----------
    W : ndarray (m, m)
        Interactions of the free vertices, zero diagonal.
    linear : ndarray (m,)
        Node weights, interactions with the chosen vertices included.
    constant : float
        Weight of the chosen vertices.
    k : int
        How many are still to choose.
    vertices : ndarray (m,)
        The free vertices' numbers in the instance.
    chosen : ndarray
        Numbers of the vertices that are in.
    """

    W: Array
    linear: Array
    constant: float
    k: int
    vertices: npt.NDArray[np.int64]
    chosen: npt.NDArray[np.int64]

    @classmethod
    def of(cls, problem: Problem) -> tuple[Subproblem, float]:
        """The unprotected vertices of one instance (no batch dimension), and the power of two that W was divided by."""
        alive = problem.candidates.cpu().numpy()
        full = problem.W.detach().to("cpu").double().numpy()[np.ix_(alive, alive)]
        scale = power_of_two(full)
        full = full / scale
        linear = full.diagonal().copy()
        np.fill_diagonal(full, 0.0)
        sub = cls(full, linear, 0.0, int(problem.k), np.flatnonzero(alive), np.empty(0, np.int64))
        return sub, scale

    @property
    def m(self) -> int:
        """Number of free vertices."""
        return len(self.linear)

    @property
    def forced(self) -> bool:
        """Whether nothing is left to decide."""
        return self.k in (0, self.m)

    def fixed(self, verdict: npt.NDArray[Any]) -> Subproblem:
        """The subproblem with every vertex of verdict `IN` chosen and every one of verdict `OUT` dropped."""
        inside, free = verdict == IN, verdict == 0
        return replace(
            self,
            W=np.ascontiguousarray(self.W[np.ix_(free, free)]),
            linear=self.linear[free] + 2.0 * self.W[np.ix_(free, inside)].sum(1),
            constant=self.constant + float(self.linear[inside].sum() + self.W[np.ix_(inside, inside)].sum()),
            k=self.k - int(inside.sum()),
            vertices=self.vertices[free],
            chosen=np.concatenate([self.chosen, self.vertices[inside]]),
        )

    def lift(self, picked: npt.NDArray[np.bool_], n: int) -> npt.NDArray[np.bool_]:
        """The instance's mask (n,) of a choice among the free vertices."""
        mask = np.zeros(n, dtype=bool)
        mask[self.chosen] = True
        mask[self.vertices[picked]] = True
        return mask


def objective_step(problem: Problem) -> float:
    """A number that divides every difference of objectives of one instance; 0 if none is known.

    Positive only for whole-number weights whose sums are exact in float64.
    """
    W = problem.W.detach().to("cpu").double().numpy()
    n = W.shape[-1]
    if not (np.abs(W).max(initial=0.0) * n * n < 2**52 and (np.round(W) == W).all()):
        return 0.0
    whole = W.astype(np.int64)
    twice = 2 * whole[np.triu_indices(n, 1)]
    return float(math.gcd(*np.unique(np.abs(twice)).tolist(), *np.unique(np.abs(whole.diagonal())).tolist()))
