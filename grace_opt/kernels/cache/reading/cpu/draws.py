"""The draw of some of 256 tokens, what others' logits can be at most, and attention to those that were drawn.

Logits of drawn tokens, and angles, are made from the centred keys in float64. A running sum of the shares as they are,
for the bound, goes beside that of the shares divided by the probabilities, for the estimate.
"""

from __future__ import annotations

import numpy as np

from ...._shared.bits import WORDS
from ...._shared.jit import inlined
from ...._shared.lanes import load_byte, load_short
from ...._shared.limits import BITS as TOKENS
from ...._shared.memory import start_of
from ...decode.cpu import BLOCK, NOTHING, ZERO, address, turn_into_shares
from ...decode.cpu.rows import BYTES
from ...decode.cpu.values import add_values
from ...decode.forms import BOOL, ROWS
from ..forms import (
    CODE_BITS,
    CODES,
    COUNTS,
    GROUP,
    KEPT_COUNT,
    KIND,
    MASK,
    OLD,
    OLD_KEYS,
    OLD_VALUES,
    SIDES,
    SINKS,
    TABLES,
    VALUE_WIDTH,
)
from .chosen import copy_tokens
from .codes import NONE, angle, count_differing, draw_tokens, sampling_probability
from .states import joined

#: No token is drawn whose probability is smaller.
SMALLEST = 1e-30
#: Tokens of a word.
PER_WORD = TOKENS // WORDS


@inlined
def show_tokens(places, sizes, b, mask, first, shown):
    """Write which of 256 tokens from the `first` on exist, are no padding, and are not hidden from a query head."""
    counts = places[COUNTS, 0] + b * places[COUNTS, 1]
    for word in range(WORDS):
        bits = NONE
        for place in range(PER_WORD):
            t = first + word * PER_WORD + place
            seen = t < sizes[OLD] and load_short(counts + t * places[COUNTS, 3]) != 0
            if seen and sizes[KIND] == BOOL:
                seen = load_byte(mask + (sizes[SINKS] + t) * places[MASK, 4]) != 0
            if seen:
                bits |= np.int32(1) << np.int32(place)
        shown[word] = bits


@inlined
def bound_others(norms, count, length, cosines, counts, drawn, shown, line, largest):
    """Return what logits of tokens that were not drawn can be at most, added up as `turn_into_shares` does."""
    highest = cosines.shape[0] - 1
    for t in range(count):
        line[t] = np.float32(length * norms[t] * cosines[highest - counts[t]])
    for word in range(WORDS):
        left_out = drawn[word] | ~shown[word]
        if left_out != 0:
            for place in range(min(PER_WORD, count - word * PER_WORD)):
                if (left_out >> place) & 1:
                    line[word * PER_WORD + place] = NOTHING
    now, shrink, more = turn_into_shares(line, count, largest)
    if now == NOTHING:  # all are left out, or are no numbers, which the shares then say
        more, shrink = ZERO, np.float32(1)
        for t in range(count):
            if line[t] != line[t] and not ((drawn[t // PER_WORD] | ~shown[t // PER_WORD]) >> (t % PER_WORD)) & 1:
                more, now = np.float32(np.nan), ZERO
    return now, shrink, more


@inlined(fastmath={"reassoc", "contract"})
def centred_product(query, key, mean):
    """Product of a query with what a key is beside the mean."""
    product = 0.0
    for c in range(mean.shape[0]):
        product += query[c] * (np.float64(key[c]) - mean[c])
    return product


@inlined
def attend_drawn(mine, count, head, places, sizes, scale, hashed, norms, means, workspaces, state):
    """Copy some tokens, no more than a block, and attend to each with the query heads that have drawn it.

    `mine` are the tokens and which heads, in bits, have drawn them.
    """
    (b, h), (queries, lengths, shifts) = head, hashed
    key_workspace, value_workspace, logits, weights = workspaces
    tokens, heads = mine
    largest, sums, products, plain = state
    keys, values = address(places[OLD_KEYS], b, h), address(places[OLD_VALUES], b, h)
    copy_tokens(keys, places[OLD_KEYS, 3], tokens, count, sizes[KEPT_COUNT], key_workspace)
    value_step = places[OLD_VALUES, 3]
    copy_tokens(values + sizes[SINKS] * value_step, value_step, tokens, count, sizes[VALUE_WIDTH], value_workspace)
    logit_step, out_step = logits.shape[1] * BYTES, products.shape[1] * BYTES
    for first in range(0, sizes[GROUP], ROWS):
        for other in range(ROWS):
            row, line, any_drawn = first + other, logits[other], False
            for i in range(count):
                line[i], weights[i] = NOTHING, ZERO
                if row < sizes[GROUP] and (heads[i] >> row) & 1:
                    product, length = (
                        centred_product(queries[row], key_workspace[i], means),
                        lengths[row] * norms[tokens[i]],
                    )
                    # A vector without a direction has the same code always: equal to any other's with the probability
                    # of a right angle, and to that of another such vector surely.
                    equal = 1.0 if lengths[row] == 0 and norms[tokens[i]] == 0 else 0.5
                    if length > 0:
                        equal = 1.0 - angle(product / length)
                    chance = sampling_probability(equal, sizes[CODE_BITS], sizes[TABLES])
                    line[i] = np.float32(scale * (product + shifts[row]))
                    weights[i] = np.float32(1.0 / max(chance, SMALLEST))
                    any_drawn = True
            if not any_drawn:
                for i in range(count):
                    line[i] = ZERO
                continue
            largest[row], shrink, more = turn_into_shares(line, count, largest[row])
            plain[row], more = plain[row] * shrink + more, ZERO
            for i in range(count):
                line[i] *= weights[i]
                more += line[i]
            sums[row] = sums[row] * shrink + more
            if shrink != 1:
                for c in range(products.shape[1]):
                    products[row, c] *= shrink
        out, step = start_of(products) + first * out_step, value_workspace.shape[1] * BYTES
        value_width = sizes[VALUE_WIDTH]
        add_values(start_of(logits), logit_step, start_of(value_workspace), step, value_width, count, out, out_step)


@inlined
def draw(
    head, start, stop, places, sizes, scale, masks, words, cosines, norms, means, hashed, rests, workspaces, state
):
    """Draw tokens of the blocks from `start` to `stop`, attend to them, and write to `rests` what logits of the others
    can be at most, together; return how many tokens any query head has drawn."""
    (b, h), lengths, rows = head, hashed[1], sizes[GROUP]
    reading, comparing = workspaces
    drawn, shown, counters, counts, line, tops, sums, tokens, heads = comparing
    drawn_count = waiting = 0
    for row in range(rows):
        tops[row], sums[row] = NOTHING, ZERO
    for block in range(start, stop):
        codes_address, first = address(places[CODES], b, h) + block * places[CODES, 3], block * TOKENS
        count = min(TOKENS, sizes[OLD] - first)
        for row in range(rows):
            if row == 0 or sizes[KIND] == BOOL:
                show_tokens(places, sizes, b, masks[row], first, shown)
            mine = start_of(words[row])
            draw_tokens(codes_address, mine, sizes[CODE_BITS], sizes[TABLES], drawn[row])
            for word in range(WORDS):
                drawn[row, word] &= shown[word]
            count_differing(codes_address, mine, sizes[SIDES], counters, counts)
            length = scale * lengths[row]
            others = norms[first:], count, length, cosines, counts, drawn[row], shown, line
            tops[row], shrink, more = bound_others(*others, tops[row])
            sums[row] = sums[row] * shrink + more
        for word in range(WORDS):
            any_head = NONE
            for row in range(rows):
                any_head |= drawn[row, word]
            if any_head == 0:
                continue
            for place in range(PER_WORD):
                if (any_head >> place) & 1 == 0:
                    continue
                tokens[waiting], heads[waiting] = first + word * PER_WORD + place, 0
                for row in range(rows):
                    heads[waiting] |= np.int64((drawn[row, word] >> place) & 1) << row
                waiting += 1
        start, last = 0, block == stop - 1
        while waiting - start >= BLOCK or (last and start < waiting):
            count = min(BLOCK, waiting - start)
            mine = tokens[start:], heads[start:]
            attend_drawn(mine, count, head, places, sizes, scale, hashed, norms, means, reading, state)
            start, drawn_count = start + count, drawn_count + count
        for i in range(waiting - start):
            tokens[i], heads[i] = tokens[start + i], heads[start + i]
        waiting -= start
    for row in range(rows):
        rests[row] = joined(tops[row], sums[row]) if sums[row] == sums[row] else np.nan
    return drawn_count
