r"""Attention of a few query rows over coded tokens on the CPU: keys and values are read in place.

`grace_opt.kernels.cache.coded.host` calls it. A query is multiplied by the basis once, so that its products with
coordinates are logits:

.. math:: q \cdot k = q' \cdot x = \sum_j q'_j m_j + \sum_j q'_j s_j\, l(c_j)

with means m and scales s per channel and class and the numbers l(c) that codes stand for. Sums of values are made in
coordinates too, and multiplied by the basis of the values at the end. A *unit* is a class of tokens of one head; the
columns of a head's units are cut into splits, and a task is one split, or the dense tokens of one head. Each task has
its own maximum, sum and products, which `join` combines: the result does not depend on the number of threads.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023), for splitting along the tokens.
"""

from __future__ import annotations

import numba  # noqa: F401 - before its modules, as in `grace_opt.kernels._shared.jit`
import numpy as np

from ...._shared.jit import c_function, inlined
from ...._shared.lanes import OCTETS, add_one, exp2, load, spread, store
from ...._shared.memory import array_at, empty, start_of, zeros
from ...decode.cpu import LEAST, NOTHING, ZERO, add_mask, cap, hide_bool, read_queries, turn_into_shares
from ...decode.cpu.logits import logits_by_token
from ...decode.cpu.rows import BYTES, WHOLE
from ...decode.cpu.values import add_values as add_dense_values
from ...decode.forms import ADDITIVE, BOOL, CAUSAL
from ..forms import COUNT, END, FIELDS, KEYS, LANES, NEWEST, ROWS, VALUES, WIDTHS
from .channels import ALL, copy_rest, part_of, sort_channels
from .octet_lists import make_octets
from .products import BLOCK, BLOCK_STEP, VECTORS, no_sums_of_four, no_sums_of_three
from .rows import add_products, add_rows, clear, scale_queries, share_out

if OCTETS:
    from .octet_loops import add_logits as add_logits
    from .octet_loops import add_values as add_values
    from .octet_loops import read_from
else:
    from .longer import read_from as read_from
    from .products import add_logits as add_logits
    from .products import add_values as add_values

#: Most bits of a number: planes of a channel.
MOST_PLANES = 8
#: What stands for a task that is not taken yet, and for none, where none is taken while another is processed.
UNKNOWN, NONE = -1, -2
#: Numbers in a row of the codebooks, in bytes.
BOOK = 256 * BYTES
#: Entries of `sizes`: number of tasks taken; KV heads, query heads of each, new tokens, widths of keys and values, kind
#: of mask, logits that there is space for, newest tokens, the tail's tokens; address and four strides, in bytes, of the
#: mask over the tail, and in numbers of queries, and of the tail's keys and values.
HEADS, GROUP, LENGTH, WIDTH, VALUE_WIDTH, KIND, SPACE, NEWS, IN_TAIL, MASK = range(1, 11)
QUERY, TAIL_KEYS, TAIL_VALUES = 15, 20, 25
#: Address of what the newest tokens had received before, or 0, and of how many of them; 1 if codes are those of a
#: trellis, else 0; address and strides, in bytes, of pairs and of rows of what is added to logits by position, or 0.
BEFORE, IN_BEFORE, TRELLIS, ADDED, SEQUENCES = 30, 31, 32, 33, 36
#: After these, of each sequence: number of sinks; address and steps (head, token) of their keys, and of their values;
#: address and step of the basis of keys, and of values, or 0; how many of the sinks are among the newest tokens;
#: address, step and bytes of the columns' positions, or 0. At the end, of each pair of a sequence and a KV head, how
#: many of its tasks are done.
SINKS, SINK_KEYS, SINK_VALUES, KEY_BASIS, VALUE_BASIS, IN_SINKS, POSITIONS, OF_SEQUENCE = 0, 1, 4, 7, 9, 11, 12, 15


@inlined
def arrays_at(table):
    """The arrays of `attend`, of whose addresses and lengths the host made a table: see `coded_attention`."""
    pairs, batch, rows, wide, news, count, units, value_wide = (
        table[0],
        table[1],
        table[2],
        table[3],
        table[4],
        table[5],
        table[6],
        table[7],
    )
    return (
        array_at(table[8], (SEQUENCES + batch * OF_SEQUENCE + pairs,), np.int64),
        array_at(table[9], (count, 5), np.int64),
        array_at(table[10], (units, FIELDS), np.int64),
        array_at(table[11], (3,), np.float32),
        array_at(table[12], (2, pairs, rows, wide), np.float32),
        array_at(table[13], (pairs, rows, news), np.float32),
        array_at(table[14], (2, count, rows), np.float32),
        array_at(table[15], (count, rows, value_wide), np.float32),
    )


@inlined
def clear_all(address, count):
    """Make `count` numbers from an address on zeros, a multiple of what `WHOLE` bytes hold."""
    for place in range(address, address + count * BYTES, WHOLE):
        store(place, spread(ZERO))


@inlined
def head_of(sizes, tensor, b, h):
    """The address of a head of a tensor, and the bytes from token to token; `tensor` is one of `TAIL_KEYS` ...."""
    address = sizes[tensor] + (b * sizes[tensor + 1] + h * sizes[tensor + 2]) * BYTES
    return address, sizes[tensor + 3] * BYTES


@c_function("void(intp)")
def prepare_at(data):
    """Scale the queries of each group, and multiply them by the basis of the keys; no sums of values are known yet, and
    no logits of the newest tokens."""
    table = array_at(data, (19,), np.int64)
    sizes, _, _, scales, queries, newest, ends, products = arrays_at(table)
    heads, group, length, width = sizes[HEADS], sizes[GROUP], sizes[LENGTH], sizes[WIDTH]
    step, of_batch, of_head = queries.shape[3] * BYTES, sizes[QUERY + 1] * BYTES, sizes[QUERY + 2] * BYTES
    steps = of_head, sizes[QUERY + 3] * BYTES, sizes[QUERY + 4] * BYTES
    clear_all(start_of(queries), queries.size)
    clear_all(start_of(ends), ends.size)
    clear_all(start_of(products), products.size)
    for pair in range(queries.shape[1]):
        full, turned, b, h = queries[0, pair], queries[1, pair], pair // heads, pair % heads
        own = sizes[SEQUENCES + b * OF_SEQUENCE :]
        basis = own[KEY_BASIS] + h * own[KEY_BASIS + 1]
        source = sizes[QUERY] + b * of_batch + h * group * of_head
        read_queries(source, *steps, group * length, length, width, scales[0], full)
        for row in range(0, full.shape[0], ROWS):
            if basis:
                four, out = start_of(full[row]), start_of(turned[row])
                logits_by_token(four, step, basis, width * BYTES, width, width, out, step)
            else:
                for other in range(row, row + ROWS):
                    for i in range(width):
                        turned[other, i] = full[other, i]
        for row in range(newest.shape[1]):
            for t in range(newest.shape[2]):
                newest[pair, row, t] = NOTHING


@inlined
def open_unit(units, unit, tensor, width, split, place, workspace, longer):
    """Sort the channels of what a split ``(column of the unit's first token, first column, last)`` reads of a unit.

    `tensor` is `KEYS` or `VALUES`, `place` the first token's among the split's; `longer` as for `attend_coded`. Returns
    the first token and the one after the last, the place of what follows, the byte of each plane from which on it is
    read, the bytes of a plane, and how many tokens are read in place.
    """
    levels, order, addresses, scales, means, starts = workspace[:6]
    count = units[unit, COUNT]
    a, b = part_of(split[0], count, split[1], split[2])
    stride, offset, size = (count + 7) // 8, a // 8, (b - a + 7) // 8
    end = place + (b - a + BLOCK - 1) // BLOCK * BLOCK
    more = offset * 0
    if longer is not None and longer.shape[0] > 0:
        more += 1
    if OCTETS or more == 1:  # bits are prefetched, or are read once, when they are copied
        size *= 0
    if a == b:
        return a, b, end, offset, stride, b - a
    arguments = units[unit, tensor:], stride, width, offset, size, more
    behind = sort_channels(*arguments, levels, order, addresses, scales, means, starts)
    beyond = behind, units[unit, tensor + END]
    offset, stride, whole = read_from(addresses, starts, offset, stride, b - a, beyond, longer)
    return a, b, end, offset, stride, whole


@inlined
def next_planes(units, first, last, tensor, column, start, stop):
    """Return which planes of a head's units, from one on, are read next: address, bytes read, bytes of a plane.

    No bytes are read if nothing is.
    """
    for unit in range(first, last):
        count = units[unit, COUNT]
        a, b = part_of(column, count, start, stop)
        if a < b:
            return units[unit, tensor] + a // 8, (b - a + 7) // 8, (count + 7) // 8
        column += count
    return first * 0, first * 0, first * 0


@inlined
def add_by_position(line, numbers, count, positions, size, factor):
    """Add to logits what is known of the positions of `count` columns: numbers at an address, times a factor.

    `positions` is the address of the first column's, of `size` bytes each.
    """
    known = array_at(numbers, (1,), np.float32)
    if size == 2:
        short = array_at(positions, (1,), np.int16)
        for t in range(count):
            line[t] += known[short[t]] * factor
    else:
        long = array_at(positions, (1,), np.int32)
        for t in range(count):
            line[t] += known[long[t]] * factor


@inlined
def attend_coded(
    units, limits, widths, turned, books, softcap, outer, logits, newest, state, workspace, none, sizes, tasks, turn,
    longer, added,
):  # fmt: skip
    """Attend with a few rows to a split of one head's columns.

    Parameters
    ----------
    units : (all units, FIELDS) int64
    limits : four int
        The first unit of the head, the one after its last, the split's first column and the one after its last.
    widths : (int, int)
        Channels of keys and of values.
    turned : (rows, …) float32
        Queries in the coordinates of the keys.
    newest : (rows, …) float32
        Written: logits of tokens among the newest.
    state : (rows,), (rows,), (rows, …)
        Written: maxima, sums and products of the rows.
    workspace
        What `make_workspace` returns.
    none
        `no_sums_of_four`, or of three.
    sizes, tasks : int64
        As in `attend`.
    turn : (1,) int64
        If `UNKNOWN`, the next task is taken before the last values are read, so that its keys are prefetched meanwhile.
    longer : (bytes,) uint8, or None
        Workspace for planes of a trellis as they are read, if they are written; no bytes without a trellis, None where
        there never is one.
    added : five int64 and a float32
        What is added to logits by position: address of the first row's numbers, or 0, and step; number of rows; address
        and size of the positions of the head's columns; a factor.
    """
    rows = len(none) // VECTORS
    largest, sums, products = state
    _, order, addresses, scales, means, starts, bits, bits_at, scaled, totals, made, octets = workspace
    query_step, logit_step = scaled.shape[1] * BYTES, logits.shape[1] * BYTES
    (width, value_width), (first, last, start, stop) = widths, limits
    constants = zeros((rows,), np.float32)
    nowhere = books * 0  # no literal: inlined functions would be compiled for it, too
    column = place = nowhere
    book_step, keys, values = nowhere + BOOK, nowhere + KEYS, nowhere + VALUES
    for unit in range(first, last):
        split = column, start, stop
        a, b, end, offset, stride, whole = open_unit(units, unit, keys, width, split, place, workspace, longer)
        column += units[unit, COUNT]
        if a == b:
            continue
        upcoming = next_planes(units, unit + 1, last, keys, column, start, stop)
        if upcoming[1] == 0:
            upcoming = next_planes(units, first, last, values, nowhere, start, stop)
        scale_queries(turned, width, order, scales, means, constants, scaled)
        to = start_of(logits) + place * BYTES
        of_rows = start_of(scaled), query_step, constants, books, book_step
        source, step, tokens = start_of(addresses), stride, whole
        for rest in range(2):  # one call is one copy of the loops
            if rest and whole < b - a:
                copy_rest(addresses, starts, (a + whole) // 8, stride, (b - a - whole + 7) // 8, WIDTHS, bits, bits_at)
                source, offset, step, tokens, to = start_of(bits_at), 0, BLOCK_STEP, BLOCK, to + whole * BYTES
            elif rest:
                break
            add_logits(source, starts, offset, step, tokens, *of_rows, to, logit_step, none, (octets, upcoming), longer)
        for row in range(rows):
            line = logits[row]
            if added[0] and row < added[2]:
                at = added[3] + (column - units[unit, COUNT] + a) * added[4]
                add_by_position(line[place:], added[0] + row * added[1], b - a, at, added[4], added[5])
            if softcap:
                cap(line[place:end], outer)
            for t in range(place + b - a, end):
                line[t] = NOTHING
            if units[unit, NEWEST] >= 0:
                to_newest = newest[row, units[unit, NEWEST] + a :]
                for t in range(b - a):
                    to_newest[t] = line[place + t]
        place = end
    for row in range(rows):
        largest[row], sums[row] = share_out(logits[row], place)
    column = place = nowhere
    clear(made, value_width)
    for unit in range(first, last):
        split = column, start, stop
        a, b, end, offset, stride, whole = open_unit(units, unit, values, value_width, split, place, workspace, longer)
        column += units[unit, COUNT]
        if a == b:
            continue
        upcoming = next_planes(units, unit + 1, last, values, column, start, stop)
        if upcoming[1] == 0:
            if turn[0] == UNKNOWN:
                turn[0] = add_one(sizes)
            if 0 <= turn[0] < tasks.shape[0] and tasks[turn[0], 1] >= 0:
                one = tasks[turn[0]]
                upcoming = next_planes(units, one[1], one[2], keys, nowhere, one[3], one[4])
        clear(totals, value_width)
        shares = start_of(logits) + place * BYTES
        of_rows = logit_step, books, book_step, start_of(totals)
        source, step, tokens = start_of(addresses), stride, whole
        for rest in range(2):
            if rest and whole < b - a:
                copy_rest(addresses, starts, (a + whole) // 8, stride, (b - a - whole + 7) // 8, WIDTHS, bits, bits_at)
                source, offset, step, tokens, shares = start_of(bits_at), 0, BLOCK_STEP, BLOCK, shares + whole * BYTES
            elif rest:
                break
            add_values(source, starts, offset, step, tokens, shares, *of_rows, none, (octets, upcoming), longer)
        add_products(logits[:rows], place, end, totals, value_width, order, scales, means, made)
        place = end
    add_rows(made, value_width, products)


@inlined
def attend_dense(dense, counts, widths, first, queries, hidden, softcap, outer, logits, newest, state):
    """Attend with four rows, of which `first` is the number, to one head's dense tokens: sinks, then the tail.

    `dense` has address and step of keys and values of the sinks, then of the tail; `counts` the numbers of both, and of
    the last ones that are among the newest; `hidden` the kind of mask, the rows' addresses in it, its step, the rows'
    last columns; `newest` ends with the last token.
    """
    largest, sums, products = state
    (sinks, tail, known), (width, value_width) = counts, widths
    kind, masks, mask_step, last_columns = hidden
    to, four = start_of(logits), start_of(queries)
    query_step, logit_step = queries.shape[1] * BYTES, logits.shape[1] * BYTES
    keys, key_step, count, place = dense[0][0], dense[0][1], sinks, to
    for in_tail in range(2):  # one call is one copy of the loops
        if in_tail:
            keys, key_step, count, place = dense[2][0], dense[2][1], tail, to + sinks * BYTES
        logits_by_token(four, query_step, keys, key_step, width, count, place, logit_step)
    for row in range(min(ROWS, last_columns.shape[0] - first)):
        line = logits[row]
        if softcap:
            cap(line[: (sinks + tail + LANES - 1) // LANES * LANES], outer)
        if kind == CAUSAL:
            for unseen in range(sinks + last_columns[first + row] + 1, sinks + tail):
                line[unseen] = LEAST
        elif kind == BOOL:
            hide_bool(line[sinks:], tail, masks[first + row], mask_step)
        elif kind == ADDITIVE:
            add_mask(line[sinks:], tail, masks[first + row], mask_step)
        for t in range(known):
            newest[row, newest.shape[1] - known + t] = line[sinks + tail - known + t]
        largest[row], _, sums[row] = turn_into_shares(line, sinks + tail, NOTHING)
    out, out_step = start_of(products), products.shape[1] * BYTES
    values, value_step, count, place = dense[1][0], dense[1][1], sinks, to
    for in_tail in range(2):
        if in_tail:
            values, value_step, count, place = dense[3][0], dense[3][1], tail, to + sinks * BYTES
        add_dense_values(place, logit_step, values, value_step, value_width, count, out, out_step)


@inlined
def make_workspace(width):
    """Return what `attend_coded` needs besides, read only after it is written: for each channel, index of its width,
    channel and address by widths, scale, mean; starts of widths; a copy of the last tokens' bits, and its addresses;
    scaled queries; sums of each row, and products; what is read together."""
    return (
        empty((width,), np.int64),
        empty((width,), np.int64),
        empty((width,), np.int64),
        empty((width,), np.float32),
        empty((width,), np.float32),
        empty((ALL + 1,), np.int64),
        empty((width * MOST_PLANES * BLOCK_STEP,), np.uint8),
        empty((width,), np.int64),
        empty((ROWS, width), np.float32),
        empty((width, ROWS), np.float32),
        empty((width, ROWS), np.float32),
        make_octets(width),
    )


@inlined
def make_workspaces(sizes):
    """Return what `attend_task` needs besides."""
    rows = sizes[GROUP] * sizes[LENGTH]
    return (
        empty((ROWS, sizes[SPACE]), np.float32),
        make_workspace(max(sizes[WIDTH], sizes[VALUE_WIDTH])),
        empty((rows,), np.int64),
        empty((rows,), np.int64),
    )


@inlined
def attend_task(task, arrays, books, workspaces, none, turn, longer):
    """Process one task; as many query rows at a time as `none` has sums of; `longer` as for `attend_coded`."""
    sizes, tasks, units, scales, queries, newest, ends, products = arrays
    logits, workspace, masks, last_columns = workspaces
    heads, group, length, tail, kind = sizes[HEADS], sizes[GROUP], sizes[LENGTH], sizes[IN_TAIL], sizes[KIND]
    widths, rows = (sizes[WIDTH], sizes[VALUE_WIDTH]), group * length
    softcap, outer = scales[1] != 0, scales[2]
    pair, is_dense = tasks[task, 0], tasks[task, 1] < 0
    b, h = pair // heads, pair % heads
    for row in range(rows):
        head, new = h * group + row // length, row % length
        masks[row] = sizes[MASK] + b * sizes[MASK + 1] + head * sizes[MASK + 2] + new * sizes[MASK + 3]
        last_columns[row] = tail - length + new
    at_once = ROWS if is_dense else len(none) // VECTORS
    for row in range(0, rows, at_once):
        upto = row + at_once
        own = ends[0, task, row:upto], ends[1, task, row:upto], products[task, row:upto]
        written = newest[pair, row:upto, : sizes[NEWS]]
        if is_dense:
            hidden = kind, masks, sizes[MASK + 4], last_columns
            of = sizes[SEQUENCES + b * OF_SEQUENCE :]
            dense = (
                (of[SINK_KEYS] + h * of[SINK_KEYS + 1], of[SINK_KEYS + 2]),
                (of[SINK_VALUES] + h * of[SINK_VALUES + 1], of[SINK_VALUES + 2]),
                head_of(sizes, TAIL_KEYS, b, h),
                head_of(sizes, TAIL_VALUES, b, h),
            )
            known = tail + min(of[IN_SINKS], of[SINKS])
            counts, four = (of[SINKS], tail, known), queries[0, pair, row:upto]
            attend_dense(dense, counts, widths, row, four, hidden, softcap, outer, logits, written, own)
        else:
            limits = tasks[task, 1], tasks[task, 2], tasks[task, 3], tasks[task, 4]
            few = queries[1, pair, row:upto]
            of = sizes[SEQUENCES + b * OF_SEQUENCE + POSITIONS :]
            to_rows = sizes[ADDED] + pair * sizes[ADDED + 1] + row * sizes[ADDED + 2]
            added = to_rows * min(sizes[ADDED], 1), sizes[ADDED + 2], rows - row, of[0] + h * of[1], of[2], scales[0]
            rest = softcap, outer, logits, written, own, workspace, none, sizes, tasks, turn, longer, added
            attend_coded(units, limits, widths, few, books, *rest)


@inlined
def tasks_of_pair(tasks, task):
    """Return the first task of this one's pair, and the one after the last: they stand side by side."""
    first = last = task
    while first > 0 and tasks[first - 1, 0] == tasks[task, 0]:
        first -= 1
    while last < tasks.shape[0] and tasks[last, 0] == tasks[task, 0]:
        last += 1
    return first, last


@inlined
def join(table, arrays, pair, first, last):
    """Combine the tasks of a pair, from the first to the one before the last; add up what the newest tokens receive.

    The output is (B, L, H_q, d_v); received (pairs, 3, newest tokens): sums over queries of p and p², each the mean of
    the group's heads, and the number of queries that saw the token, added to what there was before.
    """
    sizes, tasks, _, _, _, newest, ends, products = arrays
    heads, group, length, width = sizes[HEADS], sizes[GROUP], sizes[LENGTH], sizes[VALUE_WIDTH]
    output = array_at(table[17], (table[1], length, heads * group, width), np.float32)
    news, known = sizes[NEWS], sizes[IN_BEFORE]
    received = array_at(table[18], (table[0], 3, news), np.float32)
    before, sums = array_at(sizes[BEFORE], (table[0], 3, known), np.float32), zeros((3, table[4]), np.float32)
    rows, shape, step = group * length, (products.shape[1], products.shape[2]), products.shape[2] * BYTES
    tops, divisors = zeros((rows,), np.float32), zeros((rows,), np.float32)
    coded, dense = zeros(shape, np.float32), zeros(shape, np.float32)
    for row in range(rows):
        top, divisor = ends[0, first, row], ZERO
        for task in range(first + 1, last):
            top = max(top, ends[0, task, row])
        for c in range(width):
            coded[row, c] = dense[row, c] = ZERO
        for task in range(first, last):
            weight = np.float32(2.0) ** (ends[0, task, row] - top)
            divisor += weight * ends[1, task, row]
            of_kind = dense if tasks[task, 1] < 0 else coded
            for c in range(width):
                of_kind[row, c] += weight * products[task, row, c]
        tops[row], divisors[row] = top, divisor
    b, h = pair // heads, pair % heads
    own = sizes[SEQUENCES + b * OF_SEQUENCE :]
    basis = own[VALUE_BASIS] + h * own[VALUE_BASIS + 1]
    for row in range(0, rows, ROWS):
        if basis:
            source, out = start_of(coded[row]), start_of(dense[row])
            add_dense_values(source, step, basis, width * BYTES, width, width, out, step)
        else:
            for other in range(row, row + ROWS):
                for c in range(width):
                    dense[other, c] += coded[other, c]
    share = spread(np.float32(1.0) / np.float32(group))
    for t in range(sums.shape[1]):
        sums[0, t], sums[1, t], sums[2, t] = ZERO, ZERO, min(news - t, length)
    for row in range(rows):
        new, head = row % length, h * group + row // length
        for c in range(width):
            output[b, new, head, c] = dense[row, c] / divisors[row]
        source, to, to_squares = start_of(newest[pair, row]), start_of(sums[0]), start_of(sums[1])
        top, factor = spread(tops[row]), spread(np.float32(1.0) / divisors[row])
        for place in range(0, sums.shape[1] * BYTES, WHOLE):
            p = exp2(load(source + place) - top) * factor
            store(to + place, load(to + place) + share * p)
            store(to_squares + place, load(to_squares + place) + share * p * p)
    for kind in range(3):
        for t in range(news):
            received[pair, kind, t] = sums[kind, t]
        for t in range(known):
            received[pair, kind, t] += before[pair, kind, t]


@inlined
def attend(table, none):
    """Process the tasks not taken yet; write to their rows of maxima, sums and products. Who is done with the last one
    of a pair joins them.

    Threads that call this with the same table share the tasks; a slow thread takes fewer. Its arrays are

    - sizes: see `HEADS`; tasks and units: see `grace_opt.kernels.cache.coded.table.CodesTable`;
    - scales ``(3,)``: of the queries, whether there is a softcap, and what `grace_opt.kernels.cache.decode.cpu.cap`
    needs;
    - queries ``(2, pairs, rows padded, width padded)``: what `prepare` writes; newest ``(pairs, rows padded, newest
      tokens padded)``: logits of the newest tokens;
    - ends ``(2, tasks, rows padded)``: maxima and sums; products ``(tasks, rows padded, width of values padded)``.
    """
    arrays = arrays_at(table)
    sizes, tasks = arrays[0], arrays[1]
    workspaces = make_workspaces(sizes)
    turn = empty((1,), np.int64)
    # Of a split's planes, of as many channels as keys or values have.
    planes = 1 if OCTETS else max(sizes[WIDTH], sizes[VALUE_WIDTH]) * MOST_PLANES
    longer = empty((sizes[TRELLIS] * planes * (sizes[SPACE] // 8),), np.uint8)
    task = add_one(sizes)
    while task < tasks.shape[0]:
        turn[0] = UNKNOWN
        attend_task(task, arrays, table[16], workspaces, none, turn, longer)
        pair = tasks[task, 0]
        first, last = tasks_of_pair(tasks, task)
        if add_one(sizes[SEQUENCES + table[1] * OF_SEQUENCE + pair :]) == last - first - 1:
            join(table, arrays, pair, first, last)
        task = turn[0] if turn[0] != UNKNOWN else add_one(sizes)


@c_function("void(intp)")
def attend_at(data):
    """Call `attend` with four rows at a time, for threads."""
    attend(array_at(data, (19,), np.int64), no_sums_of_four())


@c_function("void(intp)")
def attend_three_at(data):
    """Call `attend` with three rows at a time, of which groups of three query heads make as many as of four."""
    attend(array_at(data, (19,), np.int64), no_sums_of_three())


@c_function("void(intp)")
def join_at(data):
    """Call `join` for each pair, whose tasks are done."""
    table = array_at(data, (19,), np.int64)
    arrays = arrays_at(table)
    tasks = arrays[1]
    for task in range(tasks.shape[0]):
        first, last = tasks_of_pair(tasks, task)
        if first == task:
            join(table, arrays, tasks[task, 0], first, last)
