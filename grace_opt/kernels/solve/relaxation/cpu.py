r"""The convex quadratic relaxation :math:`\min x^\top A x + c^\top x,\ 1^\top x = k,\ 0 \le x \le 1`, compiled.

Pairwise (SMO) steps: weight moves from one vertex to another, so only A's curvature on :math:`1^\perp` matters. At any
x, with the gradient g, no feasible point is below ``sum of the k smallest g - xᵀAx``: stopping early gives a weaker
bound, but always a valid one. Sources: Platt (1998); Frank & Wolfe (1956) for the dual value.
"""

from __future__ import annotations

import numpy as np
from numba import f8, i1, i8, types, void

from ..._shared.jit import SMALL, inlined, jit
from ..._shared.whole import copy, largest, sort, total


@jit(ahead=[void(f8[::1], f8)], small=SMALL)
def repair(x, k):
    """Move x into the box and onto the plane ``sum x = k``, in place."""
    m = x.shape[0]
    weight = 0.0
    for p in range(m):
        x[p] = min(1.0, max(0.0, x[p]))
        weight += x[p]
    if weight > k:
        for p in range(m):
            x[p] *= k / weight
    elif weight < k:
        share = (k - weight) / (m - weight)
        for p in range(m):
            x[p] += share * (1.0 - x[p])


@jit(ahead=[types.Tuple((f8, f8, f8))(f8[:, ::1], f8[::1], i8, f8[::1], f8[::1], f8[::1], f8, f8, i8)], small=SMALL)
def minimise(A, c, k, x, g, ordered, target, rtol, steps):
    """Improve x in place until the dual value reaches `target`, cannot reach it, or the relaxation is solved.

    Parameters
    ----------
    A (m, m), c (m,); 0 < k < m
    x (m,) feasible start; g (m,), ordered (m,) : filled with the gradient at x and its sorted values
    target : stop as soon as the dual value is at least this, or cannot get there; infinite: solve to `rtol`
    rtol : relative accuracy at which the relaxation counts as solved
    steps : largest number of pairwise steps

    Returns
    -------
    best : the best dual value seen
    last : the dual value at the final x, which belongs to g and ordered
    value : the relaxation's value at the final x
    """
    m = A.shape[0]
    copy(g, c)
    for p in range(m):
        if x[p] > 0.0:
            twice = 2.0 * x[p]
            for q in range(m):
                g[q] += twice * A[p, q]
    best, last, value = -np.inf, -np.inf, np.inf
    every = max(4, m // 4)
    for step in range(steps + 1):
        low, i = np.inf, -1
        for p in range(m):
            if x[p] < 1.0 and g[p] < low:
                low, i = g[p], p
        gain, j, move = 0.0, -1, 0.0
        if i >= 0:
            slack, bend_i = 1.0 - x[i], A[i, i]
            for p in range(m):
                rise = g[p] - low
                if rise > 0.0 and x[p] > 0.0:
                    bend = bend_i + A[p, p] - 2.0 * A[i, p]
                    length = min(slack, x[p])
                    if rise < 2.0 * bend * length:
                        length = rise / (2.0 * bend)
                    better = (rise - bend * length) * length
                    if better > gain:
                        gain, j, move = better, p, length
        if j < 0 or step % every == 0 or step == steps:
            quadratic, linear = 0.0, 0.0
            for p in range(m):
                quadratic += x[p] * (g[p] - c[p])
                linear += x[p] * c[p]
            quadratic *= 0.5
            value = quadratic + linear
            copy(ordered, g)
            sort(ordered)
            last = -quadratic
            for p in range(k):
                last += ordered[p]
            best = max(best, last)
            if j < 0 or step == steps or best >= target or value - last <= rtol * max(abs(value), 1e-300):
                break
            if value < target < np.inf and value - last < 0.25 * (target - value):
                break  # the target is out of reach
        x[i] += move
        x[j] -= move
        if x[i] > 1.0 - 1e-14:
            x[i] = 1.0
        if x[j] < 1e-14:
            x[j] = 0.0
        for p in range(m):
            g[p] += 2.0 * move * (A[i, p] - A[j, p])
    return best, last, value


@inlined
def restricted(A, c, k, v, inside, B, b, y, x):
    """Build the relaxation with x_v fixed: fill B, b and the start y (m - 1); return its k and constant."""
    m = A.shape[0]
    r = 0
    for p in range(m):
        if p == v:
            continue
        s = 0
        for q in range(m):
            if q != v:
                B[r, s] = A[p, q]
                s += 1
        b[r] = c[p] + (2.0 * A[p, v] if inside else 0.0)
        y[r] = x[p]
        r += 1
    rest = k - 1 if inside else k
    repair(y, float(rest))
    return rest, (A[v, v] + c[v] if inside else 0.0)


@jit(ahead=[i8(f8[:, ::1], f8[::1], i8, f8[::1], f8, f8, i8, i1[::1], i8, i8)], small=SMALL)
def probe(A, c, k, x, target, rtol, steps, verdict, first, last):
    """Fix each vertex from `first` to `last` against its value in x, and test whether the dual value reaches `target`.

    verdict (m,) int8 : set to 1 = must be in, 2 = must be out, 0 = open. Returns how many are decided.
    """
    m = A.shape[0]
    r = m - 1
    B, b, y, g, ordered = np.empty((r, r)), np.empty(r), np.empty(r), np.empty(r), np.empty(r)
    decided = 0
    for v in range(first, last):
        verdict[v] = 0
        inside = x[v] < 0.5
        rest, base = restricted(A, c, k, v, inside, B, b, y, x)
        if rest < 0 or rest > r:
            reached = True
        elif rest == 0:
            reached = base >= target
        elif rest == r:
            value = base + total(b) + total(B.reshape(r * r))
            reached = value >= target
        else:
            reached = minimise(B, b, rest, y, g, ordered, target - base, rtol, steps)[0] + base >= target
        if reached:
            verdict[v] = 2 if inside else 1
            decided += 1
    return decided


@jit(ahead=[f8(f8[:, ::1], f8[::1])], small=SMALL)
def add_sizes(A, sums):
    """Add the sums of |A|'s columns to `sums`, in place; returns the largest entry of |A|."""
    m = A.shape[0]
    most = np.empty(m)  # of each column: one number for all would keep the loop from being vectorised
    for q in range(m):
        most[q] = 0.0
    for p in range(m):
        for q in range(m):
            size = abs(A[p, q])
            sums[q] += size
            most[q] = max(most[q], size)
    return largest(most) if m else 0.0


@jit(ahead=[types.Tuple((f8, f8))(f8[:, ::1], f8[::1], f8[::1], f8[:, ::1])], small=SMALL, error_model="numpy")
def scaled_form(W, a, scale, C):
    """Fill C with ``W + Diag a``, rows and columns divided by `scale`.

    Returns its Frobenius norm and the largest sum of a row's absolute values.
    """
    m = W.shape[0]
    squares, sums = np.empty(m), np.empty(m)
    for q in range(m):
        squares[q], sums[q] = 0.0, 0.0
    for p in range(m):
        for q in range(m):
            C[p, q] = W[p, q] / scale[q] / scale[p]
        C[p, p] += a[p] / (scale[p] * scale[p])
        for q in range(m):
            squares[q] += C[p, q] * C[p, q]
            sums[q] += abs(C[p, q])
    return np.sqrt(total(squares)), largest(sums)


@jit(ahead=[void(f8[:, ::1], f8[::1], f8)], small=SMALL)
def add_square(C, u, weight):
    """Add ``weight u uᵀ`` to C, in place."""
    m = C.shape[0]
    for p in range(m):
        share = weight * u[p]
        for q in range(m):
            C[p, q] += share * u[q]
