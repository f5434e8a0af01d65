r"""`Subproblem`: the rest of an instance after some vertices were decided, in or out.

.. math:: f(S) = c_0 + \sum_{i \in T} l_i + \sum_{i \ne j \in T} W_{ij},\quad T \subseteq \text{free vertices},\ |T| = k

Exact methods and certificates work on it, in numpy and float64; the node weights are in l, so W has a zero diagonal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.arrays import power_of_two_scale
from ..problem import Problem
from ..problem.steps import largest_power_of_two

Array = npt.NDArray[np.float64]
IN, OUT = 1, 2
#: A candidate's weights dwarf a choice if they are this many times its sum. Quotients below TINY lose digits.
DWARFS, TINY = 2.0**20, 1e-290
#: Number of heaviest candidates for which the weight of the others is also bounded without them.
ONE_BY_ONE = 8
_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Subproblem:
    """Free vertices with their weights, and the number of them still to choose.

    Attributes
    ----------
    W : ndarray (m, m)
        Interactions of the free vertices, zero diagonal.
    linear : ndarray (m,)
        Node weights, interactions with the chosen vertices included.
    constant : float
        Weight of the chosen vertices.
    k : int
        Number of vertices still to choose.
    vertices : ndarray (m,)
        The free vertices' indices in the instance.
    chosen : ndarray
        Indices of the vertices that are in.
    linear_size : ndarray (m,), constant_size : float
        Sums of the absolute values of the terms of `linear` and `constant`; their rounding is relative to these.
    """

    W: Array
    linear: Array
    constant: float
    k: int
    vertices: npt.NDArray[np.int64]
    chosen: npt.NDArray[np.int64]
    linear_size: Array
    constant_size: float = 0.0

    @classmethod
    def of(cls, problem: Problem, known: npt.NDArray[np.bool_] | None = None) -> tuple[Subproblem | None, float]:
        """The subproblem of one instance (no batch dimension), and the power of two that W was divided by.

        Parameters
        ----------
        problem : Problem
        known : ndarray (n,), bool, optional
            A known choice. Candidates with weights that dwarf those of the choice are left out if no choice with them
            is as good; otherwise the small weights would be lost in rounding.

        Returns
        -------
        sub : Subproblem or None
            None if weights are so far apart that the smallest vanish beside the largest.
        scale : float
        """
        W = problem.W.detach().to("cpu").double().numpy()
        vertices = np.flatnonzero(problem.candidates.cpu().numpy())
        if known is not None:
            vertices = vertices[~_too_heavy(W, vertices, int(problem.k), known)]
        full = W[np.ix_(vertices, vertices)]
        scale = power_of_two_scale(full)
        sizes = np.abs(full)
        if (sizes[sizes > 0] / scale < TINY).any():
            return None, 1.0
        full = full / scale
        linear = full.diagonal().copy()
        np.fill_diagonal(full, 0.0)
        return cls(full, linear, 0.0, int(problem.k), vertices, np.empty(0, np.int64), np.abs(linear)), scale

    @property
    def m(self) -> int:
        """Number of free vertices."""
        return len(self.linear)

    @property
    def decided(self) -> bool:
        """Whether nothing is left to decide."""
        return self.k in (0, self.m)

    def fixed(self, verdict: npt.NDArray[Any]) -> Subproblem:
        """The subproblem with every vertex of verdict `IN` chosen and every one of verdict `OUT` dropped."""
        inside, free = verdict == IN, verdict == 0
        tied, among = self.W[np.ix_(free, inside)], self.W[np.ix_(inside, inside)]
        return replace(
            self,
            W=np.ascontiguousarray(self.W[np.ix_(free, free)]),
            linear=self.linear[free] + 2.0 * tied.sum(1),
            constant=self.constant + float(self.linear[inside].sum() + among.sum()),
            linear_size=self.linear_size[free] + 2.0 * np.abs(tied).sum(1),
            constant_size=self.constant_size + float(self.linear_size[inside].sum() + np.abs(among).sum()),
            k=self.k - int(inside.sum()),
            vertices=self.vertices[free],
            chosen=np.concatenate([self.chosen, self.vertices[inside]]),
        )

    def whole_mask(self, picked: npt.NDArray[np.bool_], n: int) -> npt.NDArray[np.bool_]:
        """The instance's mask (n,) of a choice among the free vertices."""
        mask = np.zeros(n, dtype=bool)
        mask[self.chosen] = True
        mask[self.vertices[picked]] = True
        return mask


def _too_heavy(
    W: Array, vertices: npt.NDArray[np.int64], k: int, known: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Which `vertices`, of those with weights that dwarf the `known` choice, are in no choice as good as it.

    A choice with v weighs :math:`W_{vv} + 2 \\sum_j W_{vj}` over its other vertices j, plus their weight among
    themselves; both are bounded by sorting. Weights are not scaled, since no scale suits all of them.
    """
    own = W[np.ix_(known, known)]
    size = float(np.abs(own).sum())
    heaviest = np.zeros(len(W))
    heaviest[vertices] = np.abs(W[np.ix_(vertices, vertices)]).max(1, initial=0.0)
    suspects = np.argsort(-heaviest, kind="stable")[: np.count_nonzero(heaviest > DWARFS * size)]
    suspects = suspects[~known[suspects]]
    if not (k and len(suspects)):
        return np.zeros(len(vertices), bool)
    cutoff = math.fsum(own.ravel().tolist()) + 8.0 * len(W) * _EPS * size
    alive = np.isin(np.arange(len(W)), vertices)
    found = True
    while found:  # leaving out one vertex may allow leaving out others
        found, among = False, np.flatnonzero(alive)
        shared = _lightest(W, among, k - 1)
        left = suspects[alive[suspects]]
        for place, v in enumerate(left):
            rest = among[alive[among] & (among != v)]
            # Least weight of the others, shared by all suspects; for the heaviest ones also without themselves.
            others = [shared] + ([_lightest(W, rest, k - 1)] if place < ONE_BY_ONE else [])
            tied = 2.0 * np.sort(W[v, rest])[: k - 1]
            if any(_at_least(np.concatenate([[W[v, v]], tied, other])) > cutoff for other in others):
                alive[v], found = False, True
    return ~alive[vertices]


def _lightest(W: Array, rest: npt.NDArray[np.int64], count: int) -> Array:
    """Terms with a sum of at most the weight of any `count` vertices of `rest` among themselves."""
    among = W[np.ix_(rest, rest)]
    diagonal = among.diagonal().copy()
    np.fill_diagonal(among, np.inf)
    rows = np.column_stack([diagonal, np.sort(among, axis=1)[:, : max(count - 1, 0)]])
    return np.asarray(rows[np.argsort(rows.sum(1), kind="stable")[:count]].ravel())


def _at_least(terms: Array) -> float:
    """The sum of the terms, less its rounding error."""
    return float(terms.sum() - 8.0 * len(terms) * _EPS * np.abs(terms).sum())


def sums_are_exact(problem: Problem) -> bool:
    """Whether weights of one instance are so few steps (`Problem.step`) that a search sums them without rounding."""
    most, unit = float(np.abs(_of_candidates(problem)).max(initial=0.0)), largest_power_of_two(float(problem.step)) / 2
    return unit > 0 and most / unit * (problem.k_max + 2) ** 2 < 2**52


def _of_candidates(problem: Problem) -> Array:
    alive = problem.candidates.cpu().numpy()
    return np.asarray(problem.W.detach().to("cpu").double().numpy()[np.ix_(alive, alive)])
