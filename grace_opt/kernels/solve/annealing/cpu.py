r"""Simulated annealing over exchanges of one chosen vertex for another; compiled, for a tensor and for a sparse graph.

A proposal draws both vertices at random, and is made if f rises by less than T times an exponential random number
(Metropolis' rule). Costs (`grace_opt.kernels.solve.sparse.cpu.sums`) are kept up to date: a proposal that is refused is
a look at two numbers, and at an edge if that could decide; one that is made costs the vertices' degrees, or n. Source:
Kirkpatrick, Gelatt & Vecchi, Science 220 (1983).
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i4, i8, u8, uint64

from ..._shared.jit import inlined, jit
from ..sparse.cpu.best_set import BEST, BEST_SET, NOW, note_moved, store_best
from ..sparse.cpu.sums import DWARFS, GRAPH, moved, objective, weight_of
from ..tabu.cpu import fill_sums

#: An exponential random number is almost never larger than this; and proposals between two temperatures.
RARE, AT_ONE_TEMPERATURE = 40.0, 256


@inlined
def random(rng):
    """Draw a number from (0, 1] by xorshift64*; the state is rng[0]."""
    x = rng[0]
    x ^= x >> uint64(12)
    x ^= x << uint64(25)
    x ^= x >> uint64(27)
    rng[0] = x
    return (np.float64((x * uint64(0x2545F4914F6CDD1D)) >> uint64(11)) + 1.0) * 2.0**-53


@inlined
def draw(rng, bound):
    """Draw a whole number below `bound`."""
    return min(int(random(rng) * bound), bound - 1)


@jit(ahead=[i8(GRAPH, f8[::1], f8, b1[::1], f8[::1], i4[::1], i8, BEST_SET, f8[::1], u8[::1], f8, f8, i8)])
def anneal_sparse(g, top, grain, x, cost, order, k, best, values, rng, hot, cold, steps):
    """Make `steps` proposals, at temperatures from `hot` to `cold`; return how many exchanges were made.

    top : `largest`; grain : the least weight that is not 0; x, cost (n,); order (n,) : vertices, the k chosen first
    best : BestSet; values : as in `best_set`; rng (1,) uint64
    """
    n, made, T = len(x), 0, hot
    cooling = (cold / hot) ** (AT_ONE_TEMPERATURE / steps)
    for step in range(steps):
        if step % AT_ONE_TEMPERATURE == 0 and step > 0:
            T *= cooling
        a, b = draw(rng, k), k + draw(rng, n - k)
        i, j = order[a], order[b]
        change = cost[j] - cost[i]
        if change - 2.0 * top[i] >= RARE * T:
            continue
        allowed = -T * np.log(random(rng))
        if change - 2.0 * top[i] >= allowed:
            continue
        change -= 2.0 * weight_of(g, i, j)
        if change >= allowed:
            continue
        made += 1
        order[a], order[b] = j, i
        x[i], x[j] = False, True
        for v in (i, j):
            note_moved(best, v)
            sign = 1.0 if x[v] else -1.0
            for p in range(g.indptr[v], g.indptr[v + 1]):
                u = g.indices[p]
                cost[u] = moved(g, x, u, cost[u], sign * g.data[p], grain)
        values[NOW] += change
        if abs(change) > DWARFS * max(abs(values[NOW]), grain):
            values[NOW] = objective(g, x)[0]
        if values[NOW] < values[BEST]:
            values[BEST] = values[NOW]
            store_best(best, x)
    return made


@jit(ahead=[i8(f8[:, ::1], f8, b1[::1], f8[::1], i4[::1], i8, BEST_SET, f8[::1], u8[::1], f8, f8, i8)])
def anneal_dense(W, grain, x, sums, order, k, best, values, rng, hot, cold, steps):
    """As `anneal_sparse`; `sums` (n,) holds W x."""
    n, made, T = len(x), 0, hot
    cooling = (cold / hot) ** (AT_ONE_TEMPERATURE / steps)
    for step in range(steps):
        if step % AT_ONE_TEMPERATURE == 0 and step > 0:
            T *= cooling
        a, b = draw(rng, k), k + draw(rng, n - k)
        i, j = order[a], order[b]
        change = (W[i, i] - 2.0 * sums[i]) + (W[j, j] + 2.0 * sums[j]) - 2.0 * W[i, j]
        if change >= RARE * T or change >= -T * np.log(random(rng)):
            continue
        made += 1
        order[a], order[b] = j, i
        x[i], x[j] = False, True
        note_moved(best, i)
        note_moved(best, j)
        lost = False
        for u in range(n):
            sums[u] += W[j, u] - W[i, u]
            lost |= max(abs(W[i, u]), abs(W[j, u])) > DWARFS * max(abs(sums[u]), grain)
        values[NOW] += change
        if lost:
            values[NOW] = fill_sums(W, x, sums)[0]
        if values[NOW] < values[BEST]:
            values[BEST] = values[NOW]
            store_best(best, x)
    return made
