r"""The bound on the attention that was not read, for numbers that were rounded.

With the sum :math:`Z` over tokens read and no more than :math:`n_p e^{u_p}` for each page that was not,

.. math:: \text{unread share} \;\le\; \frac{\sum_p n_p e^{u_p}}{Z + \sum_p n_p e^{u_p}}.

A product of :math:`d` terms, computed in any order with precision :math:`\epsilon` (the distance from 1 to the next
number), is off by less than :math:`d\,\epsilon \sum_c |q_c k_c|`; logits of read tokens are taken lower by as much, and
bounds higher. Sums of :math:`n` exponentials are off by a factor of less than :math:`1 + n \epsilon`.

Source: Higham, "Accuracy and Stability of Numerical Algorithms" (2002), section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .forms import BESIDES, MARGIN

#: Where something is left, no bound is smaller: numbers below have few digits, or are zeros.
LEAST = 1e-300


def unread_bound(
    read: Tensor, rest: Tensor, read_terms: Tensor, rest_terms: Tensor, width: int, count: int, precision: float
) -> Tensor:
    """Return the largest possible share of the attention on tokens that were not read.

    Parameters
    ----------
    read, rest : Tensor
        Logarithms of the sums of exponentials of the logits that were read, and of the bounds of the others.
    read_terms, rest_terms : Tensor
        What the terms of each product add up to at most, in absolute value.
    width, count : int
        Number of terms of a product, and of tokens.
    precision : float
        That of the type in which products were computed.

    Returns
    -------
    Tensor
        In [0, 1]; 1 where numbers are not finite, 0 where nothing is left.
    """
    slack = (width + BESIDES) * precision * (read_terms + rest_terms) + count * precision * 4 + 2 * MARGIN
    share = (torch.sigmoid(rest - read + slack) * (1 + 1e-12)).clamp(min=LEAST)
    share = torch.where(read > -1e30, share, 1.0)  # a query that sees nothing
    return torch.where(rest == -torch.inf, 0.0, share.nan_to_num(nan=1.0)).clamp(max=1.0)
