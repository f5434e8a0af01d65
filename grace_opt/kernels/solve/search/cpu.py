r"""Depth-first branch and bound over vertices in or out, with the continuous relaxation at every node; compiled.

True objective: :math:`x^\top W x + l^\top x` (zero diagonal in W). Relaxed over the free vertices: :math:`x^\top A x +
(l - \mathrm{diag} A + E)^\top x + h` with A convex on :math:`1^\perp`. If A differs from W off the diagonal, products
of two free vertices were replaced by valid inequalities: F and H hold what each pair adds to the linear term and to the
constant while both its vertices are free. Once one is fixed, the product is linear, and W is used. At every node: solve
the relaxation from the parent's x, bound, fix by reduced costs; repeat while vertices get fixed.
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i1, i8, types

from ..._shared.jit import SMALL, inlined, jit
from ..._shared.whole import copy
from ..relaxation.cpu import minimise, repair

FREE, IN, OUT = 0, 1, 2
#: Relative accuracy of the relaxations, and largest number of steps per free vertex.
RTOL, STEPS_PER_VERTEX = 1e-6, 60


@inlined
def fix(v, inside, W, F, H, status, C, E, const):
    """Fix vertex v in one node. const: true constant, constant of the pair terms, how many are still to choose."""
    m = W.shape[0]
    status[v] = IN if inside else OUT
    if inside:
        const[0] += C[v]
        const[2] -= 1.0
        for j in range(m):
            C[j] += 2.0 * W[v, j]
    freed = 0.0
    for j in range(m):
        if status[j] == FREE:
            E[j] -= F[v, j]
            freed += H[v, j]
    const[1] += 2.0 * freed


@inlined
def leaf(W, status, C, const, chosen):
    """Complete a leaf optimally and fill `chosen`; return its value, or inf if the node is not a leaf.

    A leaf: none, one, all or all but one of the free vertices are still to be chosen.
    """
    m = W.shape[0]
    free, rest = 0, round(const[2])
    for p in range(m):
        chosen[p] = status[p] == IN
        if status[p] == FREE:
            free += 1
    if rest < 0 or rest > free:
        return np.inf, True
    if rest == 0:
        return const[0], True
    if rest == 1:
        best, v = np.inf, -1
        for p in range(m):
            if status[p] == FREE and C[p] < best:
                best, v = C[p], p
        chosen[v] = True
        return const[0] + best, True
    if rest >= free - 1:
        value, worst, v = const[0], -np.inf, -1
        for p in range(m):
            if status[p] == FREE:
                chosen[p] = True
                cost = C[p]
                for q in range(m):
                    if status[q] == FREE:
                        cost += W[p, q]
                value += cost
                # Leaving p out saves its linear cost and both halves of each of its pairs.
                saved = 2.0 * cost - C[p]
                if saved > worst:
                    worst, v = saved, p
        if rest == free - 1:
            chosen[v] = False
            value -= worst
        return value, True
    return np.inf, False


@jit(
    ahead=[
        types.Tuple((i8, f8, i8, f8))(
            f8[:, ::1], f8[:, ::1], f8[:, ::1], f8[:, ::1], i1[:, ::1], f8[:, ::1], f8[:, ::1], f8[:, ::1], f8[:, ::1],
            f8[::1], i8, f8, b1[::1], f8, f8[::1], i8,
        )
    ],
    small=SMALL,
)  # fmt: skip
def search(W, A, F, H, status, X, C, E, consts, bounds, top, best, best_x, slack, weight, budget):
    """Process the stack for at most `budget` nodes, or until a better set is found.

    Parameters
    ----------
    W, A, F, H (m, m)
    status (cap, m) int8, X, C, E (cap, m), consts (cap, 3), bounds (cap,) : the stack, `top` nodes deep
    best, best_x : incumbent value and set (m,) bool, updated
    slack : a node is cut if its bound is at least ``best - slack``
    weight (m,) : branching weight of each vertex

    Returns
    -------
    top, best, nodes
    least : the least value of a leaf that is below ``best - slack``, infinite if none is
    """
    m = W.shape[0]
    nodes, least = 0, np.inf
    index = np.empty(m, np.int64)
    small, c, x = np.empty(m * m), np.empty(m), np.empty(m)
    g, ordered = np.empty(m), np.empty(m)
    chosen = np.empty(m, np.bool_)
    known = best  # a better set ends the slice: the caller's slack belongs to the old one
    while top > 0 and nodes < budget and best == known and top < status.shape[0] - 2:
        top -= 1
        nodes += 1
        if bounds[top] >= best - slack:
            continue
        s, C_, E_, const = status[top], C[top], E[top], consts[top]
        while True:
            value, is_leaf = leaf(W, s, C_, const, chosen)
            if is_leaf:
                if value < known - slack:
                    least = min(least, value)
                if value < best:
                    best = value
                    copy(best_x, chosen)
                break
            free = 0
            for p in range(m):
                if s[p] == FREE:
                    index[free] = p
                    free += 1
            rest = round(const[2])
            B = small[: free * free].reshape(free, free)
            for r in range(free):
                p = index[r]
                c[r] = C_[p] - A[p, p] + E_[p]
                x[r] = X[top, p]
                for q in range(free):
                    B[r, q] = A[p, index[q]]
            repair(x[:free], float(rest))
            base = const[0] + const[1]
            target = best - slack - base
            dual, last, _ = minimise(
                B, c[:free], rest, x[:free], g[:free], ordered[:free], target, RTOL, STEPS_PER_VERTEX * free
            )
            bounds[top] = max(bounds[top], dual + base)
            for r in range(free):
                X[top, index[r]] = x[r]
            if dual >= target:
                break
            margin = target - last
            below, above = ordered[rest - 1], ordered[rest]
            fixed = 0
            for r in range(free):
                out = g[r] >= above and g[r] - below >= margin
                if out or (g[r] <= below and above - g[r] >= margin):
                    fix(index[r], not out, W, F, H, s, C_, E_, const)
                    fixed += 1
            if fixed > 0:
                continue
            branch, most = 0, -1.0
            for r in range(free):
                score = x[r] * (1.0 - x[r]) * weight[index[r]]
                if score > most:
                    most, branch = score, r
            v = index[branch]
            inside = X[top, v] >= 0.5
            copy(status[top + 1], s)
            copy(X[top + 1], X[top])
            copy(C[top + 1], C_)
            copy(E[top + 1], E_)
            copy(consts[top + 1], const)
            bounds[top + 1] = bounds[top]
            fix(v, not inside, W, F, H, s, C_, E_, const)
            fix(v, inside, W, F, H, status[top + 1], C[top + 1], E[top + 1], consts[top + 1])
            top += 2
            break
    return top, best, nodes, least
