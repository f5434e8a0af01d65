"""Before the coded tokens, on the GPU: weights of their planes, and all that dense tokens add.

Source: as for :mod:`grace_opt.kernels.cache.coded.gpu`, which says what is computed, and why in this way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...decode import forms as kinds
from ...decode.gpu.attend import LEAST, load_keys, load_values, seen_logits
from . import batch
from .numbers import CHUNKS, FIELDS, KEYS
from .weights import weigh_unit

NO_MASK = tl.constexpr(kinds.NO_MASK)
PAIR_FIELDS, FIRST_UNIT, UNIT_COUNT, KEY_BASIS, SINKS, NEWEST_SINKS, SINK_KEYS, SINK_VALUES = (
    tl.constexpr(field)
    for field in (
        *(batch.PAIR_FIELDS, batch.FIRST_UNIT, batch.UNIT_COUNT, batch.KEY_BASIS),
        *(batch.SINKS, batch.NEWEST_SINKS, batch.SINK_KEYS, batch.SINK_VALUES),
    )
)


@triton.jit
def add_block(largest, sums, products, x, values, PRECISION: tl.constexpr):
    """Add one more block with logits `x`, and `values` (tokens, channels)."""
    new_largest = tl.maximum(largest, tl.max(x, axis=1))
    shrink = tl.exp2(largest - new_largest)
    share = tl.exp2(x - new_largest[:, None])
    products = products * shrink[:, None] + tl.dot(share, values, input_precision=PRECISION)
    return new_largest, sums * shrink + tl.sum(share, axis=1), products


@triton.jit
def attend_dense(
    largest, sums, products, q, keys, key_token, key_channel, values, value_token, value_channel, count, place,
    first_newest, to_newest, start, stop, mask, mask_column, row_exists, last_column, width, value_width, inner, outer,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Attend to blocks `start` to `stop` of `count` dense tokens; token t is number ``place + t`` of the newest.

    Those from `first_newest` on are among the newest.
    """
    for block in range(start, tl.minimum(stop, tl.cdiv(count, BLOCK))):
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        exists = tokens < count
        k = load_keys(keys, key_token, key_channel, tokens, exists, width, WIDTH).to(tl.float32)
        x = tl.dot(q, k, input_precision=PRECISION) * inner
        x = seen_logits(x, tokens, exists, mask, mask_column, row_exists, last_column, outer, MASK, SOFTCAP)
        known = exists & (tokens >= first_newest) & (place + tokens >= 0)
        tl.store(to_newest[:, None] + place + tokens[None, :], x, mask=row_exists[:, None] & known[None, :])
        v = load_values(values, value_token, value_channel, tokens, exists, value_width, VALUE_WIDTH).to(tl.float32)
        largest, sums, products = add_block(largest, sums, products, x, v, PRECISION)
    return largest, sums, products


# Numbers that change from token to token: compiling again for each that 16 divides would cost more than it brings.
_CHANGING = [
    *("mask_batch", "mask_head", "mask_row", "tail", "newest"),
    *("coded_splits", "dense_splits", "dense_per_split", "most_units"),
]


@triton.jit(do_not_specialize=_CHANGING)
def prepare(
    query, query_batch, query_head, query_row, query_channel, pairs, units, slots, chunks, signs, weights, constants,
    factors, tail_keys, key_batch, key_head, key_token, key_channel, tail_values, value_batch, value_head, value_token,
    value_channel, mask, mask_batch, mask_head, mask_row, mask_column, newest_out, largest_out, sums_out, products_out,
    heads, width, value_width, tail, newest, weight_rows, most_units, parts, coded_splits, dense_splits,
    dense_per_split, inner, outer,
    GROUP: tl.constexpr, LENGTH: tl.constexpr, MASK: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    TURNING: tl.constexpr, ROW_BLOCK: tl.constexpr, DENSE_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, SINK_TYPE: tl.constexpr, R: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the weights of one unit of a pair, or attend to one split of its dense tokens.

    Row r is query head r // LENGTH of the group, token r % LENGTH.
    """
    number, job, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair, b, h = number.to(tl.int64), (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    own = pairs + pair * PAIR_FIELDS
    if job < most_units:
        if (job < tl.load(own + UNIT_COUNT)) & (part < parts):
            unit = tl.load(own + FIRST_UNIT) + job
            rows = part * R + tl.arange(0, 16)
            row_exists = (rows < GROUP * LENGTH) & (tl.arange(0, 16) < R)
            from_rows = query + b * query_batch + (h * GROUP + rows // LENGTH) * query_head + rows % LENGTH * query_row
            entry = unit * parts + part
            weigh_unit(
                from_rows, query_channel, row_exists, tl.load(own + KEY_BASIS), units + unit * FIELDS + KEYS,
                slots + unit * 2 * SLOTS, chunks + unit * 2 * CHUNKS, signs, weights + entry * weight_rows * 2 * R,
                constants + entry * R, factors + entry * R, width, inner, R, SLOTS, CHUNK, TURNING,
            )  # fmt: skip
    elif part * ROW_BLOCK < GROUP * LENGTH:
        split = job - most_units
        rows = part * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
        row_exists = rows < GROUP * LENGTH
        to_newest = newest_out + (pair * GROUP * LENGTH + rows) * newest
        largest = tl.full([ROW_BLOCK], LEAST, tl.float32)
        sums = tl.zeros([ROW_BLOCK], tl.float32)
        products = tl.zeros([ROW_BLOCK, VALUE_WIDTH], tl.float32)
        head, position, channels = h * GROUP + rows // LENGTH, rows % LENGTH, tl.arange(0, WIDTH)
        from_row = query + b * query_batch + head * query_head + position * query_row
        q = tl.load(
            from_row[:, None] + channels[None, :] * query_channel,
            mask=row_exists[:, None] & (channels < width)[None, :],
            other=0.0,
        ).to(tl.float32)
        from_mask = mask + b * mask_batch + head * mask_head + position.to(tl.int64) * mask_row
        sinks = tl.load(own + SINKS)
        start = split.to(tl.int64) * dense_per_split
        stop, of_sinks = start + dense_per_split, tl.cdiv(sinks, DENSE_BLOCK)
        to_sinks = newest - tail - sinks  # below 0, where tokens are too old
        largest, sums, products = attend_dense(
            largest, sums, products, q,
            tl.load(own + SINK_KEYS).to(tl.pointer_type(SINK_TYPE)), tl.load(own + SINK_KEYS + 1), 1,
            tl.load(own + SINK_VALUES).to(tl.pointer_type(SINK_TYPE)), tl.load(own + SINK_VALUES + 1), 1,
            sinks, to_sinks, sinks - tl.load(own + NEWEST_SINKS), to_newest, start, stop,
            from_mask, mask_column, row_exists, position, width, value_width, inner, outer,
            NO_MASK, SOFTCAP, PRECISION, DENSE_BLOCK, WIDTH, VALUE_WIDTH,
        )  # fmt: skip
        largest, sums, products = attend_dense(
            largest, sums, products, q, tail_keys + b * key_batch + h * key_head, key_token, key_channel,
            tail_values + b * value_batch + h * value_head, value_token, value_channel, tail, newest - tail, 0,
            to_newest, tl.maximum(start - of_sinks, 0), stop - of_sinks, from_mask, mask_column, row_exists,
            tail - LENGTH + position, width, value_width, inner, outer, MASK, SOFTCAP, PRECISION, DENSE_BLOCK, WIDTH,
            VALUE_WIDTH,
        )  # fmt: skip
        place = (pair * (coded_splits + dense_splits) + coded_splits + split) * GROUP * LENGTH + rows
        tl.store(largest_out + place, largest, mask=row_exists)
        tl.store(sums_out + place, sums, mask=row_exists)
        v_channels = tl.arange(0, VALUE_WIDTH)
        tl.store(
            products_out + place[:, None] * value_width + v_channels[None, :],
            products,
            mask=row_exists[:, None] & (v_channels < value_width)[None, :],
        )
