"""`common_divisor`: the largest number that divides all weights, so that no objective lies between two multiples.

When: `Problem.step`, for certified bounds, which may be rounded up to the next multiple, and what counts as proved for
integers. It grows with W: that of W / 8 is an eighth of that of W. Source: folklore of integer programming, for whole
numbers times any power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
#: Binary digits of a float64; most digits of a multiple, as weights of edges count twice; numbers read at a time.
DIGITS, MOST, BLOCK = 53, 54, 1 << 16


def common_divisor(*parts: Any) -> float:
    """Return the largest number that all numbers of all arrays are whole multiples of.

    0 if there is none, or one so small that the largest number is ``2**54`` times it: as of most real numbers.

    Examples
    --------
    >>> common_divisor([4.0, 6.0], [-10.0]), common_divisor([0.75, 1.0]), common_divisor([1 / 3, 0.1, 1.0])
    (2.0, 0.25, 0.0)
    """
    blocks = [block for part in parts for block in _blocks(np.asarray(part, dtype=np.float64).ravel())]
    unit, largest = 10_000, -10_000  # exponents
    for block in blocks:
        if len(numbers := block[block != 0]):
            exponents = np.frexp(numbers)[1]
            unit = min(unit, int((exponents - DIGITS + _trailing_zeros(numbers)).min()))
            largest = max(largest, int(exponents.max()))
        if largest - unit > MOST:
            return 0.0
    found = 0
    for block in blocks:
        found = math.gcd(found, int(np.gcd.reduce(np.ldexp(block, -unit).astype(np.int64), initial=0)))
        if found == 1:
            break
    return math.ldexp(found, unit)


def largest_power_of_two(number: float) -> float:
    """Return the largest power of two that a number is a whole multiple of; 0 for 0.

    Examples
    --------
    >>> largest_power_of_two(12.0), largest_power_of_two(0.75)
    (4.0, 0.25)
    """
    if number == 0:
        return 0.0
    own = np.array([number])
    return math.ldexp(1.0, int(np.frexp(own)[1][0] - DIGITS + _trailing_zeros(own)[0]))


def _trailing_zeros(numbers: Array) -> npt.NDArray[np.int64]:
    """How many of the 53 binary digits are zeros at the end."""
    digits = np.ldexp(np.frexp(numbers)[0], DIGITS).astype(np.int64)
    return np.asarray(np.frexp((digits & -digits).astype(np.float64))[1] - 1, dtype=np.int64)


def _blocks(numbers: Array) -> Sequence[Array]:
    return [numbers[first : first + BLOCK] for first in range(0, len(numbers), BLOCK)]
