"""Check the compiled enumeration against plain enumeration."""

from __future__ import annotations

import math

import numpy as np

from ..._shared.cases import least_of_all, small_instance

K = 4


def cpu() -> bool:
    """Compare the number of subsets and the least f."""
    from .cpu import advance

    W, c = small_instance(), np.append(np.arange(K), 9)
    best, value = c[:K].copy(), np.array([np.inf, 0.0])
    seen, finished = advance(W, c, best, value, 10_000)
    return bool(finished and seen == math.comb(9, K) and value[0] == W[np.ix_(best, best)].sum() == least_of_all(W, K))
