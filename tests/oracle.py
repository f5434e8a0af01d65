"""The plainest correct versions, in Python and numpy only: what every fast version is tested against. A page, no
torch."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np


def objective(W, S):
    """f(S), summed entry by entry with exact rounding."""
    return math.fsum(float(W[i][j]) for i in S for j in S)


def _floats(W):
    """The entries as Python's numbers, converted once: what reads them again and again is several times faster."""
    return [[float(weight) for weight in row] for row in W]


def optimum(W, k, protected=(), required=(), maximize=False, **constraints):
    """The least (or largest) objective over all k-subsets with all required vertices and no protected one.

    Under constraints, over those that `keeps` them; None if there are none.
    """
    W = _floats(W)
    free = [i for i in range(len(W)) if i not in set(protected)]
    best = max if maximize else min
    subsets = (S for S in itertools.combinations(free, k) if set(required) <= set(S) and keeps(S, **constraints))
    return best((objective(W, S) for S in subsets), default=None)


def keeps(S, groups=(), counts=None, exclude=(), together=(), costs=(), budget=None):
    """Whether a set keeps all constraints; `counts` maps labels of `groups` to pairs (at least, at most)."""
    S, counts = set(S), {} if counts is None else counts
    size = {label: sum(groups[i] == label for i in S) for label in counts}
    return (
        all((low or 0) <= size[label] <= (len(S) if high is None else high) for label, (low, high) in counts.items())
        and not any({*pair} <= S for pair in exclude)
        and all(len(S & {*one}) in (0, len(one)) for one in together)
        and (budget is None or math.fsum(costs[i] for i in S) <= budget)
    )


def think(W, k, protected=()):
    """The k smallest diagonal entries, ties to the lowest index."""
    free = [i for i in range(len(W)) if i not in set(protected)]
    return sorted(sorted(free, key=lambda i: (W[i][i], i))[:k])


def mies(W, k, protected=()):
    """Algorithm 1 of GRACE, line by line; ties to the lowest index."""
    n = len(W)
    score = {i: W[i][i] for i in range(n) if i not in set(protected)}
    S = []
    for _ in range(k):
        best = min(score, key=lambda i: (score[i], i))
        del score[best]
        S.append(best)
        for i in score:
            score[i] += 2 * W[i][best]
    return sorted(S)


def best_swap(W, S, protected=()):
    """The most negative change of f by exchanging one vertex (0 if no exchange improves)."""
    W, S, best = _floats(W), set(S), 0.0
    base = objective(W, S)
    for i in S:
        for j in set(range(len(W))) - S - set(protected):
            best = min(best, objective(W, S - {i} | {j}) - base)
    return best


def interaction(Q, K, valid=None):
    """W of every KV head by its definition, ||sum over pruned of q_i k_i^T||^2, entry by entry; Q (Hq, Lo, d), K (Hkv,
    L, d)."""
    Q, K = np.asarray(Q, np.float64), np.asarray(K, np.float64)
    Hq, Lo, d = Q.shape
    Hkv, L, _ = K.shape
    valid = np.ones(L, bool) if valid is None else np.asarray(valid, bool)
    W = np.zeros((Hkv, d, d))
    for h in range(Hkv):
        group = range(h * (Hq // Hkv), (h + 1) * (Hq // Hkv))
        rows = np.concatenate([Q[g][valid[L - Lo :]] for g in group])
        cols = K[h][valid]
        for i in range(d):
            for j in range(d):
                W[h, i, j] = (rows[:, i] @ rows[:, j]) * (cols[:, i] @ cols[:, j])
    return W


def output_interaction(Q, K, V, valid=None, near=32, scaling=None):
    """W of every KV head by the first-order change of the attention's output, query by query; Q (Hq, Lo, d), K (Hkv, L,
    d), V (Hkv, L, d_v)."""
    Q, K, V = (np.asarray(each, np.float64) for each in (Q, K, V))
    (Hq, Lo, d), (Hkv, L, _) = Q.shape, K.shape
    valid = np.ones(L, bool) if valid is None else np.asarray(valid, bool)
    near, scaling = near if valid.sum() > near else 0, d**-0.5 if scaling is None else scaling
    W = np.zeros((Hkv, d, d))
    for head in range(Hq):
        h = head // (Hq // Hkv)
        for t in range(Lo):
            last = L - Lo + t
            if not valid[last]:
                continue
            keys = [s for s in range(last + 1) if valid[s]]
            logits = scaling * K[h][keys] @ Q[head, t]
            p = np.exp(logits - logits.max())
            p /= p.sum()
            output = p @ V[h][keys]
            a = np.zeros((d, V.shape[-1]))
            for weight, s in zip(p, keys, strict=True):
                if last - s >= near:
                    a += weight * scaling * np.outer(Q[head, t] * K[h, s], V[h, s] - output)
            W[h] += a @ a.T
    return W


def salient(K, low, high):
    """Protected channels of one head, K (L, d)."""
    norms = np.sqrt((np.asarray(K, np.float64) ** 2).sum(0))
    d = len(norms)
    p = float(np.mean(norms > norms.mean() + norms.std()))
    count = math.floor(min(max(p, low), high) * d + 0.5)
    return sorted(sorted(range(d), key=lambda i: (-norms[i], i))[:count])


def drop_greedy(W, k, protected=()):
    """From all candidates, the one whose removal lowers f most leaves; ties to the lowest index. Sums row by row."""
    n = len(W)
    S = [i for i in range(n) if i not in set(protected)]
    change = {}
    for i in S:
        total = 0.0
        for j in S:  # not sum(), which compensates since Python 3.12
            total += W[j][i]
        change[i] = W[i][i] - 2 * total
    while len(change) > k:
        worst = min(change, key=lambda i: (change[i], i))
        del change[worst]
        for i in change:
            change[i] += 2 * W[i][worst]
    return sorted(change)


def beam(W, k, width, lookahead=0, protected=()):
    """The best of MIES and of a beam of `width` sets, each with its f and its increments; every completion is seen."""
    start = {i: W[i][i] for i in range(len(W)) if i not in set(protected)}
    level, seen = [(0.0, frozenset(), start)], [frozenset(mies(W, k, protected))]
    for _ in range(k):
        base = min(f for f, _, _ in level)
        children = {}  # a set that was reached before, by a better order, stays
        for _, f, S, i, rise in sorted(
            ((f - base + s[i], rank, i), f, S, i, s) for rank, (f, S, s) in enumerate(level) for i in s
        ):
            child = {j: rise[j] + 2 * W[j][i] for j in rise if j != i}
            children.setdefault(S | {i}, (f + rise[i], S | {i}, child))
        level = list(children.values())[: width * max(1, lookahead)]
        if lookahead:
            level = sorted(level, key=lambda one: complete(W, k, one)[0])[:width]
            seen += [complete(W, k, one)[1] for one in level]
    return sorted(min([*seen, level[0][1]], key=lambda S: objective(W, S)))


def complete(W, k, partial):
    """What MIES makes of a partial set, and what that costs."""
    f, S, s = partial[0], set(partial[1]), dict(partial[2])
    rise = 0.0
    while len(S) < k:
        best = min(s, key=lambda i: (s[i], i))
        rise += s.pop(best)
        S.add(best)
        for i in s:
            s[i] += 2 * W[i][best]
    return f + rise, frozenset(S)


def allocation(losses, costs, budgets):
    """The least sum of losses of one level per group, a Fraction; None if no choice keeps the budgets.

    `losses` and `costs` have a list per group; `budgets` is [(groups, limit)]. Every sum of costs so far is kept.
    """
    states = {(Fraction(0),) * len(budgets): Fraction(0)}
    for i, (row, prices) in enumerate(zip(losses, costs, strict=True)):
        reached = {}
        for spent, f in states.items():
            for loss, cost in zip(row, prices, strict=True):
                now = tuple(s + Fraction(cost) * (i in groups) for s, (groups, _) in zip(spent, budgets, strict=True))
                if all(float(s) <= limit for s, (_, limit) in zip(now, budgets, strict=True)):
                    reached[now] = min(reached.get(now, f + Fraction(loss)), f + Fraction(loss))
        states = reached
    return min(states.values(), default=None)


def largest_step(losses, costs):
    """The most that one step of the lower convex hull of (cost, loss) saves."""
    points = sorted({(Fraction(c), Fraction(f)) for c, f in zip(costs, losses, strict=True)})
    at, most = points[0], Fraction(0)
    while ahead := [p for p in points if p[0] > at[0] and p[1] < at[1]]:
        nearest = max(ahead, key=lambda p: ((at[1] - p[1]) / (p[0] - at[0]), -p[0]))
        most, at = max(most, at[1] - nearest[1]), nearest
    return most


def pruned_attention(query, pruned, kept, sinks, tail, values, mask=None, scaling=None, softcap=None):
    """Attention (B, L, H_q, d_v) over dense sinks, keys of few channels and a dense tail, a row at a time in float64.

    `mask` (B, H_q, L, S) is bool or to be added; a row that sees nothing gets the mean of all values.
    """
    batch, heads, length, width = query.shape
    output = np.zeros((batch, length, heads, values.shape[-1]))
    for b, head, row in np.ndindex(batch, heads, length):
        h, q = head // (heads // values.shape[1]), query[b, head, row].astype(float)
        x = np.concatenate([sinks[b, h] @ q, pruned[b, h] @ q[kept[b, h]], tail[b, h] @ q])
        x = x * (width**-0.5 if scaling is None else scaling)
        x = x if softcap is None else softcap * np.tanh(x / softcap)
        if mask is not None:
            seen = mask[b, head, row]
            x = np.where(seen, x, -1e38) if seen.dtype == bool else np.maximum(x + seen, -1e38)
        share = np.exp(x - x.max())
        output[b, row, head] = share / share.sum() @ values[b, h]
    return output


def bit_planes(codes, widths):
    """The planes of channels one after the other: bit p of all tokens' codes, eight tokens to a byte, first lowest."""
    planes = []
    for row, width in zip(codes, widths, strict=True):
        for place in range(width):
            plane = [0] * math.ceil(len(row) / 8)
            for token, code in enumerate(row):
                plane[token // 8] |= (int(code) >> place & 1) << token % 8
            planes.append(plane)
    return planes


def codes_of_planes(planes, widths, count):
    """The inverse of `bit_planes`: the codes of `count` tokens in every channel."""
    codes, first = [], 0
    for width in widths:
        own = planes[first : first + width]
        codes.append([sum((plane[t // 8] >> t % 8 & 1) << p for p, plane in enumerate(own)) for t in range(count)])
        first += width
    return codes


def fourth_powers(row, levels, scale):
    """The sum of the errors to the fourth, where every number of a row becomes the nearest of the scaled levels."""
    return float((np.abs(np.subtract.outer(row, np.multiply(levels, scale))).min(1) ** 4).sum())


def least_fourth_powers(row, levels):
    """The least of them, over a fine grid from a quarter of the standard deviation to where no number is cut."""
    most = max(np.std(row), np.abs(row).max() / max(levels))
    return min(fourth_powers(row, levels, scale) for scale in np.geomspace(np.std(row) / 4, most, 80))


def decoded(levels, widths, means, scales, unit, planes, counts):
    """The numbers that codes stand for, (H, tokens, d) in the order of classes; levels[b] are those of b bits.

    widths (C, H, d), means (H, d), scales one for each channel with bits in the order of widths, unit (H,).
    """
    classes, heads, width = np.shape(widths)
    found = [[] for _ in range(heads)]
    left = iter(scales)
    for c in range(classes):
        codes = codes_of_planes(planes[c], [b for head in widths[c] for b in head], counts[c])
        for h in range(heads):
            channels = []
            for i in range(width):
                bits, row = widths[c][h][i], codes[h * width + i]
                scale = float(next(left)) if bits else 0.0
                channels.append([(levels[bits][x] * scale + float(means[h][i])) * float(unit[h]) for x in row])
            found[h] += [list(token) for token in zip(*channels, strict=True)]
    return np.array(found, dtype=np.float64).reshape(heads, sum(counts), width)


def dropped_tokens_error(P, V, weights, S, renormalise):
    """How much the outputs of queries with probabilities P (R, T) change without the tokens S: weighted squares."""
    P, V = np.asarray(P, np.float64), np.asarray(V, np.float64)
    total = 0.0
    for p, weight in zip(P, weights, strict=True):
        output = sum(p[i] * V[i] for i in range(len(V)))
        change = sum((p[i] * (V[i] - output) for i in S), np.zeros(V.shape[1]))
        left = max(1 - sum(p[i] for i in S), 1e-6) if renormalise else 1
        total += weight * float((change**2).sum()) / left**2
    return total


def token_interaction(P, V, weights):
    """W of tokens as vertices, entry by entry."""
    P, V = np.asarray(P, np.float64), np.asarray(V, np.float64)
    W = np.zeros((len(V), len(V)))
    for p, weight in zip(P, weights, strict=True):
        centred = V - p @ V
        for i in range(len(V)):
            for j in range(len(V)):
                W[i, j] += weight * p[i] * p[j] * float(centred[i] @ centred[j])
    return W


def drop_tokens(P, V, weights, count, renormalise, kept=()):
    """Drop the token whose loss makes the error least, again and again; ties to the lowest index."""
    S = []
    for _ in range(count):
        free = [i for i in range(len(V)) if i not in {*S, *kept}]
        S.append(min(free, key=lambda i: (dropped_tokens_error(P, V, weights, [*S, i], renormalise), i)))
    return S


def few_tokens(query, keys, values, read, hidden=None, scaling=None):
    """Attention (B, H_q, d_v) of one query over the tokens that are read (B, H, S), and the share of all attention that
    the others have (B, H_q); a row at a time, in numpy's longest floats."""
    batch, heads, _, width = query.shape
    output, unread = np.zeros((batch, heads, values.shape[-1])), np.zeros((batch, heads))
    for b, head in np.ndindex(batch, heads):
        h, q = head // (heads // keys.shape[1]), query[b, head, 0].astype(np.longdouble)
        x = (keys[b, h].astype(np.longdouble) * q).sum(-1) * (width**-0.5 if scaling is None else scaling)
        x = x if hidden is None else np.where(hidden[b], -np.inf, x)
        share, mine = np.exp(x - x.max()), np.where(read[b, h], x, -np.inf)
        unread[b, head] = float(np.where(read[b, h], 0, share).sum() / share.sum())
        if mine.max() > -np.inf:
            mine = np.exp(mine - mine.max())  # of its own largest: beside an unread one it may be too small for a float
            output[b, head] = mine / mine.sum() @ values[b, h]
    return output, unread


def at_least_two(one, tables):
    """Probability of two or more successes."""
    return sum(math.comb(tables, j) * one**j * (1 - one) ** (tables - j) for j in range(2, tables + 1))


def sampled_tokens(query, keys, values, always, planes, bits, mean, added, softcap=None):
    """Attention (B, H_q, d_v) of one query over a sample, what each query head reads (B, H_q, S), and the share of all
    attention that the rest has; a token and a table at a time. `always` (S,) says what needs no luck, `added` (B, S)
    what a mask adds to logits, minus infinity for padding; `mean` (B, H, d) is taken from keys before they are hashed.
    """
    batch, heads, _, width = query.shape
    shape, tables = (batch, heads, keys.shape[2]), planes.shape[1] // bits
    output, read, unread = np.zeros((batch, heads, values.shape[-1])), np.zeros(shape, bool), np.zeros(shape[:2])
    sides = planes.astype(np.float64).T.reshape(tables, bits, width)
    for b, head in np.ndindex(batch, heads):
        h, q = head // (heads // keys.shape[1]), query[b, head, 0].astype(np.longdouble)
        x = (keys[b, h].astype(np.longdouble) * q).sum(-1) * width**-0.5
        x = (x if softcap is None else softcap * np.tanh(x / softcap)) + added[b]
        minus = np.zeros_like(x)
        for t in np.flatnonzero(added[b] > -np.inf):
            if always[t]:
                read[b, head, t] = True
                continue
            v, plain = keys[b, h, t].astype(np.float64) - mean[b, h], query[b, head, 0].astype(np.float64)
            same = [((table @ v >= 0) == (table @ plain >= 0)).all() for table in sides]
            if sum(same) < 2:
                continue
            read[b, head, t] = True
            lengths = float(np.linalg.norm(v)), float(np.linalg.norm(plain))
            side = (np.arccos(np.clip(v / lengths[0] @ (plain / lengths[1]), -1, 1)) / np.pi) if all(lengths) else 0.5
            one = (1 - side if any(lengths) else 1) ** bits
            minus[t] = math.log(at_least_two(one, tables))
        share = np.exp(x - x.max())
        unread[b, head] = float(np.where(read[b, head], 0, share).sum() / share.sum())
        weighed = np.where(read[b, head], x - minus, -np.inf)
        mine = np.exp(weighed - weighed.max())
        output[b, head] = mine / mine.sum() @ values[b, h]
    return output, read, unread


def received_attention(queries, weights, keys, scaling, softcap, whole):
    """Means of p and of p² that the keys of each KV head receive; one head of a group in turn, unless whole."""
    group, first, second, sampled = len(queries) // len(keys), np.zeros(keys.shape[:2]), np.zeros(keys.shape[:2]), 0
    for place, weight in enumerate(weights):
        sampled += not whole[place] and weight > 0
        asked = range(group) if whole[place] else [sampled % group]
        for h in range(len(keys)):
            for g in asked:
                logits = scaling * keys[h] @ queries[h * group + g, place]
                if softcap is not None:
                    logits = softcap * np.tanh(logits / softcap)
                p = np.exp(logits - logits.max())
                p /= p.sum()
                first[h] += weight / len(asked) * p
                second[h] += weight / len(asked) * p**2
    return first, second


def read_of_trellis(codes):
    """Codes of a trellis as they are read, one bit longer: Marcellin and Fischer (1990), Ungerboeck's eight states."""

    def last(t):
        return codes[t] & 1 if t >= 0 else 0

    own = range(len(codes))
    return [last(t - 1) + 2 * (last(t) ^ last(t - 2) ^ last(t - 3)) + codes[t] // 2 * 4 for t in own]


def least_of_trellis(row, levels, bits):
    """The least sum of squared errors of all codes of a trellis, by trying all of them."""
    every = itertools.product(range(2**bits), repeat=len(row))
    errors = ([(x - levels[code]) ** 2 for x, code in zip(row, read_of_trellis(c), strict=True)] for c in every)
    return min(math.fsum(each) for each in errors)


def least_of_long_trellis(row, levels, bits):
    """The same for long rows, in float64: the least by the last three bits, column by column."""
    least = {(0, 0, 0): 0.0}
    for x in np.asarray(row, dtype=np.float64):
        found = {}
        for (first, second, third), sum_so_far in least.items():
            for bit in (0, 1):
                subset = third + 2 * (bit ^ second ^ first)
                error = min((x - level) ** 2 for level in levels[subset : 2 << bits : 4])
                last = second, third, bit
                found[last] = min(found.get(last, math.inf), sum_so_far + error)
        least = found
    return min(least.values())


def rotary_mean(keys, frequencies, channels, positions):
    """The mean of keys ``(H, n, d)`` turned back in pairs of channels, and turned to each position: ``(H, n, d)``."""
    found = np.zeros_like(keys, dtype=np.float64)
    for frequency, first, second in zip(frequencies, *channels, strict=True):
        turns = np.exp(1j * frequency * np.asarray(positions, dtype=np.float64))
        pairs = keys[..., first] + 1j * keys[..., second]
        means = (pairs / turns).mean(1, keepdims=True) * turns
        found[..., first], found[..., second] = means.real, means.imag
    return found


def rotary_explained(keys, mean, queries):
    """How much less the variance of keys costs without a mean, channel by channel, ``(d,)``."""
    before, after = keys.var(1), (keys - mean).var(1)
    return ((before - after) * queries).sum(0)


def best_rotary_mean(keys, queries, positions, candidates):
    """Of all frequencies and layouts of pairs, the mean that explains most; zeros if none explains anything."""
    best, chosen, width = 0.0, np.zeros_like(keys, dtype=np.float64), keys.shape[-1]
    for frequencies in candidates:
        count = len(frequencies)
        for start in {0, width - 2 * count} if 2 * count <= width else ():
            for channels in (
                [range(start, start + count), range(start + count, start + 2 * count)],
                [range(start, start + 2 * count, 2), range(start + 1, start + 2 * count, 2)],
            ):
                mean = rotary_mean(keys, frequencies, channels, positions)
                explained = rotary_explained(keys, mean, queries).sum()
                if explained > best:
                    best, chosen = explained, mean
    return chosen


def correlation(a, b):
    """The absolute correlation of two columns, in fractions but for the root; 0 if one is constant."""
    a, b = ([Fraction(float(each)) for each in column] for column in (a, b))
    a, b = ([each - sum(column) / len(column) for each in column] for column in (a, b))
    product, squares = sum(x * y for x, y in zip(a, b, strict=True)), sum(x * x for x in a) * sum(y * y for y in b)
    return math.sqrt(product**2 / squares) if squares else 0.0


def correlation_ratio(column, y):
    """The root of the share of a column's variance that lies between classes, in fractions; 0 if it is constant."""
    column = [Fraction(float(each)) for each in column]
    mean = sum(column) / len(column)
    between = Fraction(0)
    for name in set(y):
        inside = [value for value, other in zip(column, y, strict=True) if other == name]
        between += len(inside) * (sum(inside) / len(inside) - mean) ** 2
    total = sum((value - mean) ** 2 for value in column)
    return math.sqrt(between / total) if total else 0.0


def relevance_redundancy(redundancy, relevance, S, alpha):
    """The criterion of mRMR for columns S, with the weight alpha of relevance; of numbers for pairs and columns."""
    pairs = math.fsum(redundancy[i][j] for i in S for j in S if i != j)
    return (1 - alpha) * pairs / len(S) ** 2 - alpha * math.fsum(relevance[i] for i in S) / len(S)
