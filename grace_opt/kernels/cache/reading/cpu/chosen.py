"""Attention to the tokens that were chosen, which are copied, a block at a time and in their own order.

They go to where the decoding kernel's loops (`grace_opt.kernels.cache.decode.cpu`) read them.
"""

from __future__ import annotations

from ...._shared.jit import inlined
from ...._shared.lanes import load, load_byte, load_short, load_some, prefetch, store, store_some
from ...._shared.memory import start_of
from ...decode.cpu import BLOCK, LEAST, NOTHING, address, turn_into_shares
from ...decode.cpu.logits import logits_by_token
from ...decode.cpu.rows import BYTES, WHOLE
from ...decode.cpu.values import add_values
from ...decode.forms import BOOL, LANES, ROWS
from ..forms import COUNTS, FIRST, KEPT_COUNT, KIND, MASK, OLD, OLD_KEYS, OLD_VALUES, SINKS, SIZE, VALUE_WIDTH

#: How many tokens ahead of the copied one are prefetched.
AHEAD = 4


@inlined
def copy_tokens(source, step, tokens, count, width, copies):
    """Copy tokens to `copies`, one after the other."""
    to, row = start_of(copies), copies.shape[1] * BYTES
    full, rest = width - width % LANES, width % LANES
    for i in range(count):
        ahead = source + tokens[min(i + AHEAD, count - 1)] * step
        for c in range(0, width * BYTES, 64):
            prefetch(ahead + c)
        one, place = source + tokens[i] * step, to + i * row
        for c in range(0, full * BYTES, WHOLE):
            store(place + c, load(one + c))
        if rest:
            store_some(place + full * BYTES, load_some(one + full * BYTES, rest), rest)


@inlined
def attend_block(queries, rows, places, sizes, b, h, masks, count, workspaces, state):
    """Copy the tokens of a block and attend to them."""
    key_workspace, value_workspace, tokens, logits = workspaces
    largest, sums, products = state
    width, value_width = sizes[KEPT_COUNT], sizes[VALUE_WIDTH]
    keys, values = address(places[OLD_KEYS], b, h), address(places[OLD_VALUES], b, h)
    copy_tokens(keys, places[OLD_KEYS, 3], tokens, count, width, key_workspace)
    value_step = places[OLD_VALUES, 3]
    copy_tokens(values + sizes[SINKS] * value_step, value_step, tokens, count, value_width, value_workspace)
    query_step, out_step, logit_step = queries.shape[1] * BYTES, products.shape[1] * BYTES, logits.shape[1] * BYTES
    key_step, to = key_workspace.shape[1] * BYTES, start_of(logits)
    for first in range(0, rows, ROWS):
        four = start_of(queries) + first * query_step
        logits_by_token(four, query_step, start_of(key_workspace), key_step, width, count, to, logit_step)
        for row in range(first, min(first + ROWS, rows)):
            line = logits[row - first]
            if sizes[KIND] == BOOL:
                for i in range(count):
                    if load_byte(masks[row] + (sizes[SINKS] + tokens[i]) * places[MASK, 4]) == 0:
                        line[i] = LEAST
            largest[row], shrink, more = turn_into_shares(line, count, largest[row])
            sums[row] = sums[row] * shrink + more
            if shrink != 1:
                for c in range(products.shape[1]):
                    products[row, c] *= shrink
        place, step = start_of(products) + first * out_step, value_workspace.shape[1] * BYTES
        add_values(to, logit_step, start_of(value_workspace), step, value_width, count, place, out_step)


@inlined
def read_pages(queries, rows, places, sizes, b, h, masks, taken, page_count, expected, workspaces, state):
    """Attend to the tokens of pages, and take these out of what is expected; return how many real ones they have."""
    tokens, size, first = workspaces[2], sizes[SIZE], sizes[FIRST]
    counts, real, count = places[COUNTS, 0] + b * places[COUNTS, 1], 0, 0
    for i in range(page_count):
        page = taken[i]
        real += load_short(counts + page * places[COUNTS, 3])
        for t in range(max(first + (page - 1) * size, 0), min(first + page * size, sizes[OLD])):
            tokens[count] = t
            count += 1
            if count == BLOCK:
                attend_block(queries, rows, places, sizes, b, h, masks, count, workspaces, state)
                count = 0
    if count:
        attend_block(queries, rows, places, sizes, b, h, masks, count, workspaces, state)
    for row in range(rows):
        for i in range(page_count):
            expected[row, taken[i]] = NOTHING
    return real
