r"""Depth-first branch and bound as in `grace_opt.kernels.solve.search`, for choices that keep linear rows; compiled.

Bounds are those of a relaxation that ignores the rows, or pays for them (`grace_opt.bounds.lagrangian`): its f is at
most the true one for every choice that keeps them. At every node, the rows of whoever is chosen and free are looked at
first: with exactly so many still to choose, a row's sum lies between those of its smallest and its largest entries. A
node where they cannot reach the row's bounds is closed; a vertex is fixed if its other value would do that. A leaf has
one choice; it counts if it keeps all rows, and the caller sums its f.
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i1, i8, types

from ...._shared.jit import SMALL, inlined, jit
from ...._shared.whole import copy
from ...relaxation.cpu import minimise, repair
from ...search.cpu import FREE, IN, OUT, RTOL, STEPS_PER_VERTEX, fix
from .rows import add, keeps


@inlined
def by_rows(status, rest, entries, order, lower, upper, verdict):
    """Fill `verdict` with vertices that the rows decide; return how many, or -1 if the rows cannot hold any more.

    order (r, m) : the vertices by each row's entries, ascending
    """
    m, decided = len(status), 0
    for v in range(m):
        verdict[v] = FREE
    for r in range(len(lower)):
        done = 0
        for v in range(m):
            if status[v] == IN:
                done += entries[v, r]
        # Of the free vertices, the `rest` smallest entries, then the `rest` largest.
        for side in range(2):
            total, taken, last, following, sign = done, 0, 0, 0, 1 - 2 * side
            for place in range(m):
                v = order[r, place if side == 0 else m - 1 - place]
                if status[v] != FREE:
                    continue
                if taken == rest:
                    following = entries[v, r]
                    taken += 1
                    break
                last = entries[v, r]
                total += last
                taken += 1
            if taken < rest:
                return -1
            room = upper[r] - total if side == 0 else total - lower[r]
            if room < 0:
                return -1
            for v in range(m):
                if status[v] != FREE or verdict[v] != FREE:
                    continue
                own = sign * entries[v, r]
                if rest > 0 and own - sign * last > room:
                    verdict[v] = OUT
                    decided += 1
                elif taken > rest and sign * following - own > room:
                    verdict[v] = IN
                    decided += 1
    return decided


@inlined
def is_kept(status, all_free, entries, lower, upper, limbs, limit, chosen):
    """Fill `chosen`, the free vertices with it or not, and return whether that keeps all rows."""
    sums, spent = np.zeros(len(lower), np.int64), np.zeros(len(limit), np.int64)
    for v in range(len(status)):
        chosen[v] = status[v] == IN or (all_free and status[v] == FREE)
        if chosen[v]:
            add(sums, entries[v], 1)
            add(spent, limbs[v], 1)
    return keeps(sums, lower, upper, spent, limit)


@inlined
def credit_of(chosen, entries, multipliers, bounds):
    """Return what the relaxation pays for the rows' slack: the multipliers times the distance to their bounds."""
    credit = 0.0
    for r in range(len(multipliers)):
        if multipliers[r] != 0.0:
            total = 0
            for v in range(len(chosen)):
                if chosen[v]:
                    total += entries[v, r]
            credit += multipliers[r] * float(bounds[r] - total)
    return credit


@jit(
    ahead=[
        types.Tuple((i8, i8, b1))(
            f8[:, ::1], f8[:, ::1], f8[:, ::1], f8[:, ::1], i1[:, ::1], f8[:, ::1], f8[:, ::1], f8[:, ::1], f8[:, ::1],
            f8[::1], i8, f8, b1[::1], f8, f8[::1], i8, i8[:, ::1], i8[:, ::1], i8[::1], i8[::1], i8[:, ::1], i8[::1],
            f8[::1], i8[::1],
        )
    ],
    small=SMALL,
)  # fmt: skip
def search(
    W, A, F, H, status, X, C, E, consts, bounds, top, best, chosen, slack, weight, budget,
    entries, order, lower, upper, limbs, limit, multipliers, paid,
):  # fmt: skip
    """Process the stack for at most `budget` nodes, or until a set is found that may be better, rounding considered.

    Parameters
    ----------
    W, A, F, H, status, X, C, E, consts, bounds, top, best, chosen, slack, weight, budget
        As in `grace_opt.kernels.solve.search.cpu.search`; their f is that which pays for the rows.
    entries (m, r) int64, lower (r,), upper (r,), limbs (m, p), limit (p,) : the rows, as in `rows`
    order (r, m) int64 : the vertices by each row's entries, ascending
    multipliers (q,), paid (q,) int64 : what f pays for the first q rows, and the bounds it pays to

    Returns
    -------
    top, nodes
    found : whether `chosen` is such a set: the caller sums its f
    """
    m = W.shape[0]
    nodes, found = 0, False
    index = np.empty(m, np.int64)
    small, c, x = np.empty(m * m), np.empty(m), np.empty(m)
    g, ordered = np.empty(m), np.empty(m)
    verdict = np.empty(m, np.int8)
    while top > 0 and nodes < budget and not found and top < status.shape[0] - 2:
        top -= 1
        nodes += 1
        if bounds[top] >= best - slack:
            continue
        s, C_, E_, const = status[top], C[top], E[top], consts[top]
        while True:
            free = 0
            for p in range(m):
                if s[p] == FREE:
                    index[free] = p
                    free += 1
            rest = round(const[2])
            if rest < 0 or rest > free:
                break
            if rest == 0 or rest == free:
                if not is_kept(s, rest > 0, entries, lower, upper, limbs, limit, chosen):
                    break
                value = const[0]
                if rest > 0:
                    for r in range(free):
                        value += C_[index[r]]
                        for q in range(free):
                            value += W[index[r], index[q]]
                value += credit_of(chosen, entries, multipliers, paid)
                found = value < best or value < best - slack
                break
            fixed = by_rows(s, rest, entries, order, lower, upper, verdict)
            if fixed < 0:
                break
            if fixed > 0:
                for r in range(free):
                    if verdict[index[r]] != FREE:
                        fix(index[r], verdict[index[r]] == IN, W, F, H, s, C_, E_, const)
                continue
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
    return top, nodes, found
