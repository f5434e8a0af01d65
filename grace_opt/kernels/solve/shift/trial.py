"""Check that the compiled ascent keeps its inverse accurate."""

from __future__ import annotations

import numpy as np

from ..._shared.cases import small_instance


def cpu() -> bool:
    """Check that after a sweep it still is the inverse of the shifted matrix."""
    from .cpu import ascend

    W = small_instance()
    n = len(W)
    start = np.full(n, 1.0 - float(np.linalg.eigvalsh(W)[0]))
    inverse, added = np.linalg.inv(W + np.diag(start)), np.zeros(n)
    largest = ascend(inverse, added, np.ones(n), 0.5, 0, n)
    return bool(largest > 0 and np.allclose(inverse @ (W + np.diag(start + added)), np.eye(n), atol=1e-8))
