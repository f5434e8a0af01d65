r"""`Constraints`: linear rows :math:`l \le a^\top x \le u` over choices :math:`x \in \{0, 1\}^n`, in exact integers.

Groups, pairs and budgets are all such rows. Costs are floats, that is multiples of a power of two: `arguments` counts
them in that unit, so that every sum is a sum of Python's integers and no comparison is ever rounded. Compiled loops get
the same rows as `IntegerRows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

#: Sums below this fit int64 with room to add two of them; bits of a limb of numbers that do not.
FITS, LIMB = 2**61, 32


@dataclass(frozen=True)
class Row:
    """One linear row over some vertices.

    Attributes
    ----------
    words : str
        The constraint as its user wrote it; rows of one constraint have the same words.
    vertices, coefficients : tuple of int
        Which vertices it counts, and how much each of them counts.
    lower, upper : int or None
        Bounds of the sum over the chosen vertices; None: none.

    Examples
    --------
    >>> Row("at most one of 0 and 1", (0, 1), (1, 1), None, 1).holds({0, 1})
    False
    """

    words: str
    vertices: tuple[int, ...]
    coefficients: tuple[int, ...]
    lower: int | None
    upper: int | None

    def holds(self, chosen: set[int]) -> bool:
        """Whether a choice keeps it; exact."""
        total = sum(count for vertex, count in zip(self.vertices, self.coefficients, strict=True) if vertex in chosen)
        return (self.lower is None or self.lower <= total) and (self.upper is None or total <= self.upper)

    def without(self, chosen: set[int]) -> Row:
        """The row over the other vertices, where these are chosen already."""
        pairs = list(zip(self.vertices, self.coefficients, strict=True))
        total = sum(count for vertex, count in pairs if vertex in chosen)
        left = [pair for pair in pairs if pair[0] not in chosen]
        return Row(
            self.words,
            tuple(vertex for vertex, _ in left),
            tuple(count for _, count in left),
            None if self.lower is None else self.lower - total,
            None if self.upper is None else self.upper - total,
        )


class IntegerRows(NamedTuple):
    """Rows for compiled loops: ``lower <= A x <= upper``, and a number of several limbs that is at most another.

    The limbs of costs whose sums int64 has no room for; there, A has a coarser row, which every choice that keeps the
    exact one keeps too.

    Attributes
    ----------
    A : ndarray (r, n), int64
    lower, upper : ndarray (r,), int64
    limbs : ndarray (p, n), int64
        The lowest limb first, `LIMB` bits each; p = 0 if A says it all.
    limit : ndarray (p,), int64
    """

    A: npt.NDArray[np.int64]
    lower: npt.NDArray[np.int64]
    upper: npt.NDArray[np.int64]
    limbs: npt.NDArray[np.int64]
    limit: npt.NDArray[np.int64]

    def restricted(self, chosen: npt.NDArray[np.int64], vertices: npt.NDArray[np.int64]) -> IntegerRows:
        """The rows over some vertices, where others are chosen, and the rest is not."""
        spent = self.A[:, chosen].sum(1)
        return IntegerRows(
            np.ascontiguousarray(self.A[:, vertices]),
            self.lower - spent,
            self.upper - spent,
            np.ascontiguousarray(self.limbs[:, vertices]),
            self.limit - self.limbs[:, chosen].sum(1),
        )


@dataclass(frozen=True)
class Constraints:
    """What a choice has to keep beside its size.

    Attributes
    ----------
    rows : tuple of Row
    n : int
        Number of vertices.

    Examples
    --------
    >>> Constraints((Row("at most one of 0 and 1", (0, 1), (1, 1), None, 1),), 3).broken({0, 1, 2})
    ['at most one of 0 and 1']
    """

    rows: tuple[Row, ...]
    n: int

    def broken(self, chosen: set[int]) -> list[str]:
        """The words of what a choice does not keep; exact."""
        return list(dict.fromkeys(row.words for row in self.rows if not row.holds(chosen)))

    def broken_by(self, mask: Tensor) -> list[str]:
        """The same for a mask (n,), or (1, n)."""
        return self.broken(set(mask.reshape(-1).nonzero().flatten().tolist()))

    def without(self, chosen: Sequence[int]) -> Constraints:
        """The constraints on the other vertices, where these are chosen already."""
        taken = set(chosen)
        return Constraints(tuple(row.without(taken) for row in self.rows), self.n)

    @cached_property
    def units(self) -> npt.NDArray[np.int64]:
        """The unit of each vertex, (n,), numbered from 0 on: vertices that are chosen together have the same."""
        unit = np.arange(self.n)
        for row in self.rows:
            if row.coefficients == (1, -1) and row.lower == row.upper == 0:
                one, other = unit[list(row.vertices)]
                unit[unit == other] = one
        return np.unique(unit, return_inverse=True)[1].reshape(-1)

    @cached_property
    def integers(self) -> IntegerRows:
        """The rows for compiled loops."""
        A = np.zeros((len(self.rows), self.n), np.int64)
        lower, upper = np.full(len(self.rows), -FITS), np.full(len(self.rows), FITS)
        limbs, limit = np.zeros((0, self.n), np.int64), np.zeros(0, np.int64)
        for r, row in enumerate(self.rows):
            most = sum(map(abs, row.coefficients))
            counts, high = row.coefficients, row.upper
            if most >= FITS:  # costs, which are at least 0: as limbs, and without their lowest digits
                limbs, limit = self._limbs(row)
                lowest = most.bit_length() - FITS.bit_length() + 1
                counts = tuple(count >> lowest for count in counts)
                high = None if high is None else high >> lowest
            A[r, list(row.vertices)] = counts
            if row.lower is not None:
                lower[r] = max(-FITS, min(row.lower, FITS))
            if high is not None:
                upper[r] = max(-FITS, min(high, FITS))
        return IntegerRows(A, lower, upper, limbs, limit)

    def _limbs(self, row: Row) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        most = sum(row.coefficients)
        high = most if row.upper is None else max(-1, min(row.upper, most))
        count = most.bit_length() // LIMB + 1
        limbs = np.zeros((count, self.n), np.int64)
        for place in range(count):
            digits = [value >> LIMB * place & (1 << LIMB) - 1 for value in row.coefficients]
            limbs[place, list(row.vertices)] = digits
        # Of -1, which no sum keeps, the highest limb is -1 and the others are those of a two's complement.
        limit = [high >> LIMB * place & (1 << LIMB) - 1 for place in range(count - 1)] + [high >> LIMB * (count - 1)]
        return limbs, np.array(limit, np.int64)
