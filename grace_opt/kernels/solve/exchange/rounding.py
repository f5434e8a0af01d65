r"""Decide, despite rounding, when an exchange of two vertices improves f; used by all three searches.

A change of f, :math:`(W_{ii} - 2 s_i) + (W_{jj} + 2 s_j) - 2 W_{ij}`, contains sums :math:`s_v` with rounding errors.
With each sum goes its size, :math:`|W_{vv}| + 2 \sum |W_{uv}|` over every u added to it or subtracted from it since it
was last recomputed. After m additions :math:`s_v` is off by at most :math:`m u \sum |W_{uv}|` (:math:`u = 2^{-53}`),
and so the change by less than ``tolerance(n) * (size_i + size_j)``: no other weight matters, however large. An exchange
is made only if it improves f even with this error added. The exact f therefore falls with every exchange: no set
repeats, the search ends, and it ends no worse than it began.

If the best exchange is in doubt although sums are fresh, another may still be certain. The search looks once more with
``tolerance(n) * size`` added for both vertices, and stops only if that finds none. Source: the error of a sum in any
order is Higham's (Accuracy and Stability of Numerical Algorithms, 2002, section 4.2).
"""

from __future__ import annotations

#: Exchanges between two recomputations of the sums, two additions each; and a generous allowance for a change.
REFRESH, OF_A_CHANGE = 256, 16
#: ``(n + ADDITIONS) * EPS``, twice the bound, is the tolerance: the other half covers the rounding of the sizes.
ADDITIONS, EPS = 2 * REFRESH + OF_A_CHANGE, 2.0**-52


def tolerance(n: int) -> float:
    """Return the rounding error of an exchange's change of f, relative to the sizes of its two vertices.

    Examples
    --------
    >>> tolerance(128) < 2e-13
    True
    """
    return (n + ADDITIONS) * EPS
