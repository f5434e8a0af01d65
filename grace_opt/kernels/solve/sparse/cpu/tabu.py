r"""Tabu search with memetic restarts over the edges of a sparse graph.

As `grace_opt.kernels.solve.tabu.cpu`, with vertices that are not tabu in two heaps (`exchange`): an iteration costs
about the degrees of the two vertices that it exchanges. Ties are broken by ranks that are drawn at every restart.
Vertices that are tabu wait in a third heap until their time is up; an exchange with them is made if it gives a new best
f.
"""

from __future__ import annotations

import numpy as np
from numba import b1, f8, i8, u8, void

from ...._shared.jit import inlined, jit
from ...tabu.cpu import CLOCK, RESTARTS, SLACK, STALE, draw, keep_elite, restart
from .best_set import BEST, BEST_SET, NOW, RUN, note_all, note_moved, settle, store_best
from .crossing import CROSSING, begin, entered, gone, key_of, note_key
from .exchange import best_exchange, partner
from .heap import HEAP, arrange, change, push, put, take_out
from .sums import DWARFS, GRAPH, cost_of, moved, objective, weight_of


@jit(ahead=[f8(GRAPH, b1[::1], f8[::1], HEAP, HEAP, HEAP, CROSSING, f8[::1], u8[::1])])
def start(g, x, cost, leave, enter, blocked, crossing, values, rng):
    """Sum every cost and f of x, draw ranks, and fill the heaps; return the size of f's sum.

    g : Graph; x : (n,) bool; cost : (n,) float64; leave, enter, blocked : Heap; crossing : Crossing
    values : (4,) float64, as in `best_set`; rng : (1,) uint64
    """
    n = len(x)
    leave.held[0] = enter.held[0] = blocked.held[0] = 0
    for v in range(n):  # shuffled inside out
        other = draw(rng, v + 1)
        leave.rank[v] = leave.rank[other]
        leave.rank[other] = v
        leave.place[v] = blocked.place[v] = -1
    for v in range(n):
        cost[v] = cost_of(g, x, v)
        if x[v]:
            put(leave, v, -cost[v])
        else:
            put(enter, v, cost[v])
    arrange(leave)
    arrange(enter)
    if len(crossing.bound) > 0:
        begin(g, crossing, x, leave, enter)
    values[NOW], _, size = objective(g, x)
    return size


@jit(
    ahead=[
        void(
            GRAPH, f8[::1], f8, f8, i8, b1[::1], f8[::1], i8[::1], HEAP, HEAP, HEAP, CROSSING, BEST_SET, b1[::1],
            BEST_SET, f8[::1], f8[::1], b1[:, ::1], f8[::1], i8[::1], u8[::1], i8, i8, i8, i8,
        )
    ]
)  # fmt: skip
def run(
    g, top, most, grain, k, x, cost, until, leave, enter, blocked, crossing, best, sure, own, values, sizes,
    elites, elite_values, state, rng, budget, patience, tenure, refresh,
):  # fmt: skip
    """Search for `budget` iterations from the state in the arrays, which are updated in place.

    top, most : `largest`; grain : the least weight that is not 0; cost, until (n,)
    leave, enter, blocked : Heap; crossing : Crossing; best, own : BestSet, of all runs and of this one; sure (n,) bool
    values : as in `best_set`; sizes (1,) the sum of |W_ij| over x, when last summed
    elites, elite_values, state, rng, budget, patience, tenure : as in `grace_opt.kernels.solve.tabu.cpu`
    refresh : iterations after which all sums are made anew
    """
    stack = np.empty((2, 128), np.int64)
    for _ in range(budget):
        state[CLOCK] += 1
        now = state[CLOCK]
        while blocked.held[0] > 0 and blocked.keys[0] <= now:
            v = blocked.vertices[0]
            take_out(blocked, v)
            if x[v]:
                push(leave, v, -cost[v])
            else:
                push(enter, v, cost[v])
            if len(crossing.bound) > 0:
                entered(g, crossing, x, leave, enter, v)
        slack = SLACK * sizes[0]
        step, i, j = best_exchange(g, crossing, x, leave, enter, np.inf, stack)
        wish = min(values[BEST] - values[NOW], 0.0) - slack
        step, i, j = _in_spite_of_tabu(g, top, most, x, cost, leave, enter, blocked, step, i, j, wish, stack[0])
        if not step < 0.0:
            _note_best(x, best, values, slack)
        if i >= 0:
            _exchange(g, grain, x, cost, leave, enter, blocked, crossing, i, j)
            for v in (i, j):
                note_moved(best, v)
                note_moved(own, v)
            until[i] = now + tenure + draw(rng, tenure + 1)
            until[j] = now + tenure // 2 + 1 + draw(rng, tenure // 2 + 1)
            push(blocked, i, until[i])
            push(blocked, j, until[j])
            values[NOW] += step
            if abs(step) > DWARFS * max(abs(values[NOW]), grain):
                values[NOW], _, sizes[0] = objective(g, x)
        if values[NOW] < values[RUN] - slack:
            values[RUN] = values[NOW]
            store_best(own, x)
            state[STALE] = 0
        else:
            state[STALE] += 1
        if state[STALE] >= patience:
            _note_best(x, best, values, slack)
            settle(g, best, sure, values)
            keep_elite(own.x, values[RUN], elites, elite_values, state)
            restart(k, x, best.x, elites, state, rng)
            sizes[0] = start(g, x, cost, leave, enter, blocked, crossing, values, rng)
            note_all(best)
            note_all(own)
            store_best(own, x)
            values[RUN] = values[NOW]
            state[STALE] = 0
            state[RESTARTS] += 1
        elif now % refresh == 0:
            _note_best(x, best, values, slack)
            settle(g, best, sure, values)
            values[NOW], _, sizes[0] = objective(g, x)
            for v in range(len(x)):
                cost[v] = cost_of(g, x, v)
                if leave.place[v] >= 0:
                    if x[v]:
                        change(leave, v, -cost[v])
                    else:
                        change(enter, v, cost[v])
            if len(crossing.bound) > 0:
                begin(g, crossing, x, leave, enter)
    _note_best(x, best, values, SLACK * sizes[0])


@inlined
def _note_best(x, best, values, slack):
    """Keep x as the best set if it is; called when f stops falling, not at every step."""
    if values[NOW] < values[BEST] - slack:
        values[BEST] = values[NOW]
        store_best(best, x)


@inlined
def _exchange(g, grain, x, cost, leave, enter, blocked, crossing, i, j):
    """Move i out and j in, from whichever heaps they are in, and change the costs of their neighbours."""
    upwards = len(crossing.bound) > 0
    for v in (i, j):
        if blocked.place[v] >= 0:
            take_out(blocked, v)
        elif x[v]:
            take_out(leave, v)
        else:
            take_out(enter, v)
        if upwards:
            gone(crossing, v)
    x[i], x[j] = False, True
    for v in (i, j):
        sign = 1.0 if x[v] else -1.0
        for p in range(g.indptr[v], g.indptr[v + 1]):
            u = g.indices[p]
            cost[u] = moved(g, x, u, cost[u], sign * g.data[p], grain)
            if leave.place[u] >= 0:
                before = key_of(x, leave.place, leave.keys, enter.keys, u) if upwards else 0.0
                if x[u]:
                    change(leave, u, -cost[u])
                else:
                    change(enter, u, cost[u])
                if upwards:
                    note_key(g, crossing, x, leave, enter, u, before)


@inlined
def _in_spite_of_tabu(g, top, most, x, cost, leave, enter, blocked, step, i, j, wish, stack):
    """Return the exchange given, or a better one with vertices that are tabu, if it is below `wish`."""
    limit, out_vertex, in_vertex = min(step, wish), -1, -1
    out, into = np.inf, np.inf
    for position in range(blocked.held[0]):
        v = blocked.vertices[position]
        if x[v]:
            key, others = -cost[v], enter
            out = min(out, key)
        else:
            key, others = cost[v], leave
            into = min(into, key)
        if others.held[0] == 0 or not key + others.keys[0] - 2.0 * top[v] < limit:
            continue
        total, u = partner(g, v, key, others, limit, stack)
        if top[v] > 0.0:
            total, other = _neighbour(g, v, key, x, others, total)
            u = other if other >= 0 else u
        if u >= 0:
            limit = total
            out_vertex, in_vertex = (v, u) if x[v] else (u, v)
    if out + into - 2.0 * most < limit:
        for a in range(blocked.held[0]):
            for b in range(blocked.held[0]):
                v, u = blocked.vertices[a], blocked.vertices[b]
                if x[v] and not x[u]:
                    total = (cost[u] - cost[v]) - 2.0 * weight_of(g, v, u)
                    if total < limit:
                        limit, out_vertex, in_vertex = total, v, u
    return (limit, out_vertex, in_vertex) if out_vertex >= 0 else (step, i, j)


@inlined
def _neighbour(g, v, key, x, heap, best):
    """As `partner`, among neighbours by an edge of positive weight on the other side."""
    vertex = -1
    for p in range(g.indptr[v], g.indptr[v + 1]):
        u = g.indices[p]
        if g.data[p] > 0.0 and x[u] != x[v] and heap.place[u] >= 0:
            total = (key + heap.keys[heap.place[u]]) - 2.0 * g.data[p]
            if total < best:
                best, vertex = total, u
    return best, vertex
