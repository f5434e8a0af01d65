r"""When an exchange of two vertices is an improvement: what the compiled, the torch and the Triton search share.

A change of f, :math:`(W_{ii} - 2 s_i) + (W_{jj} + 2 s_j) - 2 W_{ij}`, is made of sums :math:`s_v` that are off by what
their additions rounded. Beside each goes its size, :math:`|W_{vv}| + 2 \sum |W_{uv}|` over every u that was added to it
or taken from it since it was summed afresh. After m additions :math:`s_v` is off by at most :math:`m u \sum |W_{uv}|`
(:math:`u = 2^{-53}`), and so the change by less than ``tolerance(n) * (size_i + size_j)``: no other weight, however
large, has a part in it. An exchange is made only if it improves f with that much added. So f, without any rounding,
falls with every exchange: no set comes twice, the search ends, and it ends no worse than it began.

Where the best exchange is in doubt and sums are fresh, others may still be certain. They are looked for once more with
``tolerance(n) * size`` counted against both ends; only if that finds none, the search stops. Source: the error of a
sum in any order is Higham's (Accuracy and Stability of Numerical Algorithms, 2002, section 4.2).
"""

from __future__ import annotations

#: Exchanges between two fresh computations of the sums, each two additions; and what a change itself takes, amply.
REFRESH, OF_A_CHANGE = 256, 16
#: ``(n + ADDITIONS) * EPS``, twice the bound, is the tolerance: the other half covers the rounding of the sizes.
ADDITIONS, EPS = 2 * REFRESH + OF_A_CHANGE, 2.0**-52


def tolerance(n: int) -> float:
    """Rounding of an exchange's change of f, relative to the sizes of its two vertices.

    Examples
    --------
    >>> tolerance(128) < 2e-13
    True
    """
    return (n + ADDITIONS) * EPS
