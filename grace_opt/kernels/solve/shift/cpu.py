r"""Find the diagonal that makes the relaxation convex and tightest, by coordinate ascent; compiled.

For W with zero diagonal, :math:`x^\top (W + \mathrm{Diag}\,a) x - a^\top x` agrees with :math:`x^\top W x` on 0/1
points. The ascent minimises :math:`w^\top a - \mu \log\det(W + \mathrm{Diag}\,a + \beta\,uu^\top)` one entry at a time,
exactly, keeping the inverse; u makes directions that leave the plane ``sum x = k`` free. Sources: Billionnet & Elloumi
(2007) for the reformulation; Dong (2016) for coordinate ascent on it.
"""

from __future__ import annotations

from numba import f8, i8

from ..._shared.jit import jit


@jit(ahead=[f8(f8[:, ::1], f8[::1], f8[::1], f8, i8, i8)], fastmath={"nsz", "reassoc", "contract"})
def ascend(B, a, w, mu, first, last):
    """Sweep over a from `first` to `last`, in place, and update B, the inverse of the shifted matrix.

    B : (n, n) float64; a, w : (n,) float64; mu : float64; first, last : int64

    Returns the largest relative change of an entry; -1 if it had to stop.
    """
    n = B.shape[0]
    largest = 0.0
    for i in range(first, last):
        held = B[i, i]
        if not held > 0.0 or w[i] <= 0.0:
            return -1.0  # the inverse has become inaccurate: do not change a
        change = mu / w[i] - 1.0 / held
        scale = change / (1.0 + change * held)
        a[i] += change
        largest = max(largest, abs(change) * held)
        for p in range(n):
            z = scale * B[i, p]
            if p != i:
                for q in range(n):
                    B[p, q] -= z * B[i, q]
        z = 1.0 - scale * held
        for q in range(n):
            B[i, q] *= z
    return largest
