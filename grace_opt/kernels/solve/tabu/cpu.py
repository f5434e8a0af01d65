r"""Tabu search over exchanges of one chosen vertex for another, with memetic restarts; compiled.

The change of f by exchanging i ∈ S for j ∉ S is ``leave[i] + enter[j] - 2 W_ij``. The best exchange is found exactly,
but without looking at every pair: ``leave[i] + min(enter) - 2 max_j W_ij`` already rules many i out. A restart combines
two elite sets (common vertices are kept, the rest is drawn from their union) or perturbs the best set. Sources:
Palubeckis (2007, iterated tabu); Zhou, Hao & Duval (2017, OBMA) for the memetic layer.
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i8, types, u8, uint64, void

from ..._shared.jit import SMALL, inlined, jit
from ..._shared.limits import FEW_EXCHANGED
from ..._shared.whole import copy, equal

#: Rows of the integer state: iteration, restarts done, iterations since the run improved, elites held.
CLOCK, RESTARTS, STALE, ELITES = 0, 1, 2, 3
#: Error allowed in f's running sum, relative to the choice's weights; and size of a leaving weight that spoils it.
SLACK, DWARFS = 64 * 2.0**-52, 2.0**36


@inlined
def draw(rng, bound):
    """Draw a whole number below `bound` by xorshift64*; the state is rng[0]."""
    x = rng[0]
    x ^= x >> uint64(12)
    x ^= x << uint64(25)
    x ^= x >> uint64(27)
    rng[0] = x
    return int(((x * uint64(0x2545F4914F6CDD1D)) >> uint64(33)) % uint64(bound))


@jit(ahead=[types.Tuple((f8, f8))(f8[:, ::1], b1[::1], f8[::1])], small=SMALL)
def fill_sums(W, x, g):
    """Set g = W x; return f(x) and the sum of |W_ij| over x, by compensated sums."""
    n = W.shape[0]
    low, sizes = np.empty(n), np.empty(n)
    for j in range(n):
        g[j], low[j], sizes[j] = 0.0, 0.0, 0.0
    for i in range(n):
        if x[i]:
            for j in range(n):
                before, more = g[j], W[i, j]
                after = before + more
                part = after - before
                low[j] += (before - (after - part)) + (more - part)
                g[j] = after
                sizes[j] += abs(more)
    total, lost, size = 0.0, 0.0, 0.0
    for j in range(n):
        if x[j]:
            after = total + g[j]
            part = after - total
            lost += (total - (after - part)) + (g[j] - part) + low[j]
            total = after
            size += sizes[j]
        g[j] += low[j]
    return total + lost, size


@jit(ahead=[void(f8[:, ::1], f8[::1])], small=SMALL)
def row_maxima(W, top):
    """Set the largest off-diagonal entry of each row."""
    n = W.shape[0]
    for i in range(n):
        top[i] = -np.inf
        for j in range(n):
            if j != i and W[i, j] > top[i]:
                top[i] = W[i, j]


@jit(ahead=[f8(f8[:, ::1], f8[::1])], small=SMALL)
def scales(W, heavy):
    """Set the largest |W_ij| of each row; return the smallest nonzero one of all (infinite if all are 0).

    Compares the bits, which are ordered like the numbers: integers compare in vectors, and 0 - 1 is the largest.
    """
    bits, sign = W.view(np.uint64), uint64(2**63 - 1)
    largest, grain = heavy.view(np.uint64), uint64(2**64 - 1)
    for i in range(W.shape[0]):
        row, most, least = bits[i], uint64(0), uint64(2**64 - 1)
        for j in range(len(row)):
            size = row[j] & sign
            most, least = max(most, size), min(least, size - uint64(1))
        largest[i], grain = most, min(grain, least)
    one = np.empty(1, np.uint64)
    one[0] = grain + uint64(1)
    smallest = one.view(np.float64)[0]
    return smallest if smallest > 0.0 else np.inf


@inlined
def forgotten(row, g, grain):
    """Return whether a leaving weight is so large that a remaining sum is mere rounding error."""
    result = False
    for v in range(len(g)):
        result |= abs(row[v]) > DWARFS * max(abs(g[v]), grain)
    return result


@inlined(fastmath={"nnan", "nsz", "reassoc"})
def least_entry(price, row):
    """Return the least ``price[j] - 2 row[j]``; the flags let the compiler take the minimum in parts."""
    low = np.inf
    for j in range(price.shape[0]):
        value = price[j] - 2.0 * row[j]
        if value < low:
            low = value
    return low


@inlined
def best_exchange(W, weight, top, x, g, prices, until, now, wish, rng):
    """Return the best exchange of vertices not tabu, or one that changes f by less than `wish`; ties at random.

    `weight` (n,) holds the diagonal, `top` (n,) the row maxima; `prices` (4, n) is scratch: the costs of leaving, of
    entering, of entering where not tabu, and each row's best. Returns (change, i, j), i = -1: none.
    """
    n = W.shape[0]
    leave, enter, allowed, row_best = prices[0], prices[1], prices[2], prices[3]
    low, low_allowed, first = np.inf, np.inf, -1
    for v in range(n):
        if x[v]:
            leave[v] = weight[v] - 2.0 * g[v]
            enter[v] = np.inf
            allowed[v] = np.inf
            if until[v] <= now and (first < 0 or leave[v] < leave[first]):
                first = v
        else:
            enter[v] = weight[v] + 2.0 * g[v]
            low = min(low, enter[v])
            allowed[v] = np.inf if until[v] > now else enter[v]
            low_allowed = min(low_allowed, allowed[v])
    best = np.inf
    if first >= 0:  # an early good exchange rules out more
        best = leave[first] + least_entry(allowed, W[first])
    for i in range(n):
        row_best[i] = np.inf
        if not x[i]:
            continue
        floor = leave[i] - 2.0 * top[i]
        if until[i] <= now and floor + low_allowed <= best:
            row_best[i] = leave[i] + least_entry(allowed, W[i])
        if floor + low < wish and floor + low <= best:
            anyway = leave[i] + least_entry(enter, W[i])
            if anyway < wish:
                row_best[i] = min(row_best[i], anyway)
        best = min(best, row_best[i])
    bi, bj, ties = -1, -1, 0
    if best == np.inf:
        return best, bi, bj
    for i in range(n):
        if row_best[i] != best:
            continue
        tabu_too = best < wish
        for j in range(n):
            price = enter[j] if tabu_too else allowed[j]
            if price < np.inf and leave[i] + (price - 2.0 * W[i, j]) == best:
                ties += 1
                if ties == 1 or draw(rng, ties) == 0:
                    bi, bj = i, j
    return best, bi, bj


@jit(
    ahead=[
        void(
            f8[:, ::1], f8[::1], f8[::1], f8, i8, b1[::1], f8[::1], i8[::1], b1[::1], f8[::1], b1[:, ::1], f8[::1],
            i8[::1], u8[::1], i8, i8, i8,
        )
    ],
    small=SMALL,
)  # fmt: skip
def run(
    W, top, heavy, grain, k, x, g, until, best_x, values, elites, elite_values, state, rng, budget, patience, tenure
):
    """Search for `budget` iterations from the state in the arrays, which are updated in place.

    f of x and g are updated with every exchange. They are recomputed after a weight has left that is far larger than
    they are, and before a new best set is accepted: `fill_sums` decides which set is better.

    Parameters
    ----------
    W (n, n), top (n,) row maxima; heavy (n,), grain: `scales`; k
    x (n,) bool, g (n,) = W x; until (n,) iteration up to which a vertex is tabu
    best_x (n,) bool; values (4,): f of x, of best_x, the best of this run; the sum of |W_ij| over x, when last summed
    elites (E, n) bool, elite_values (E,)
    state (4,) int64; rng (1,) uint64
    budget, patience, tenure : iterations now, iterations without improvement before a restart, base tenure
    """
    n = W.shape[0]
    prices, weight = np.empty((4, n)), np.empty(n)
    for i in range(n):
        weight[i] = W[i, i]
    run_x = np.empty(n, np.bool_)
    copy(run_x, x)
    for _ in range(budget):
        state[CLOCK] += 1
        now = state[CLOCK]
        slack = SLACK * values[3]
        wish = min(values[1] - values[0], 0.0) - slack
        change, i, j = best_exchange(W, weight, top, x, g, prices, until, now, wish, rng)
        if not change < 0.0:
            note_best(W, x, g, best_x, values)
        if i >= 0:
            x[i], x[j] = False, True
            values[0] += change
            for v in range(n):
                g[v] += W[j, v] - W[i, v]
            if heavy[i] > DWARFS * grain and forgotten(W[i], g, grain):
                values[0], values[3] = fill_sums(W, x, g)
            until[i] = now + tenure + draw(rng, tenure + 1)
            until[j] = now + tenure // 2 + 1 + draw(rng, tenure // 2 + 1)
        if values[0] < values[2] - slack:
            values[2] = values[0]
            copy(run_x, x)
            state[STALE] = 0
        else:
            state[STALE] += 1
        if state[STALE] >= patience:
            note_best(W, x, g, best_x, values)
            keep_elite(run_x, values[2], elites, elite_values, state)
            restart(k, x, best_x, elites, state, rng)
            values[0], values[3] = fill_sums(W, x, g)
            values[2] = values[0]
            copy(run_x, x)
            for v in range(n):
                until[v] = 0
            state[STALE] = 0
            state[RESTARTS] += 1
    note_best(W, x, g, best_x, values)


@inlined
def note_best(W, x, g, best_x, values):
    """Keep x as the best set if its recomputed f is best; called when f stops falling, not at every step."""
    if values[0] < values[1] - SLACK * values[3]:
        values[0], values[3] = fill_sums(W, x, g)
        if values[0] < values[1]:
            values[1] = values[0]
            copy(best_x, x)


@inlined
def keep_elite(x, value, elites, elite_values, state):
    """Add x to the elites unless it is already there or worse than all of them."""
    held, worst = state[ELITES], 0
    for e in range(held):
        if equal(elites[e], x):
            return
        if elite_values[e] > elite_values[worst]:
            worst = e
    if held < elites.shape[0]:
        worst = held
        state[ELITES] += 1
    elif value >= elite_values[worst]:
        return
    copy(elites[worst], x)
    elite_values[worst] = value


@inlined
def restart(k, x, best_x, elites, state, rng):
    """Put a new set in x: alternately two combined elites, or the perturbed best set."""
    n, held = len(x), state[ELITES]
    pool = np.empty(n, np.int64)
    if held >= 2 and state[RESTARTS] % 2 == 1:
        a = draw(rng, held)
        b = (a + 1 + draw(rng, held - 1)) % held
        size, m = 0, 0
        for v in range(n):
            x[v] = elites[a, v] and elites[b, v]
            if x[v]:
                size += 1
            elif elites[a, v] or elites[b, v]:
                pool[m] = v
                m += 1
        while size < k:
            p = draw(rng, m)
            x[pool[p]] = True
            m -= 1
            pool[p] = pool[m]
            size += 1
        shakes = max(1, min(k, n - k) // 16)
    else:
        copy(x, best_x)
        least = min(k, n - k)
        # Of few that can be exchanged, any number: one or two would be undone at once.
        shakes = 1 + draw(rng, least) if least < FEW_EXCHANGED else least * (2 + draw(rng, 3)) // 16
    for _ in range(shakes):
        i = draw(rng, n)
        while not x[i]:
            i = draw(rng, n)
        j = draw(rng, n)
        while x[j]:
            j = draw(rng, n)
        x[i], x[j] = False, True
