"""A split of the coded tokens of one head on the GPU: logits, shares, and sums of values, by tensor cores.

Source: as for :mod:`grace_opt.kernels.cache.coded.gpu`, which says what is computed, and why in this way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...decode import forms as kinds
from ...decode.gpu.attend import LEAST, seen_logits
from .. import forms
from . import batch
from .keys import coded_logits
from .numbers import CHUNKS, FIELDS, KEYS, VALUES
from .values import SHARE, by_values, joined_limbs, store_values

NO_MASK = tl.constexpr(kinds.NO_MASK)
COUNT, NEWEST = tl.constexpr(forms.COUNT), tl.constexpr(forms.NEWEST)
FIRST_UNIT, PAIR_FIELDS, POSITIONS = (
    tl.constexpr(batch.FIRST_UNIT),
    tl.constexpr(batch.PAIR_FIELDS),
    tl.constexpr(batch.POSITIONS),
)


@triton.jit(do_not_specialize=["newest", "every", "splits_per_head", "added_count"])
def attend_codes(
    pairs, units, slots, chunks, weights, constants, factors, splits, levels, low_levels, signs, added, newest_out,
    largest_out, sums_out, products_out, heads, value_width, newest, every, splits_per_head, weight_rows, inner,
    outer, added_count,
    ADDED: tl.constexpr, SOFTCAP: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, R: tl.constexpr,
    T: tl.constexpr, SLOTS: tl.constexpr, VALUE_WIDTH: tl.constexpr, ASSEMBLY: tl.constexpr, TRELLIS: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one pair with up to R of its query rows: logits, and what the split adds to the sums."""
    N: tl.constexpr = 2 * R
    W: tl.constexpr = T // 32
    number, split, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = number.to(tl.int64)
    rows = part * R + tl.arange(0, R)
    row_exists = rows < ROWS
    place = (pair * every + split) * ROWS + rows
    products = products_out + place * value_width
    of_sequence = splits + ((number // heads) * splits_per_head + split) * 3
    own_unit, first = tl.load(of_sequence), tl.load(of_sequence + 1)
    if own_unit < 0:  # another sequence has more
        tl.store(largest_out + place, tl.full([R], LEAST, tl.float32), mask=row_exists)
        tl.store(sums_out + place, tl.zeros([R], tl.float32), mask=row_exists)
        channels = tl.arange(0, VALUE_WIDTH)
        tl.store(
            products[:, None] + channels[None, :],
            tl.zeros([R, VALUE_WIDTH], tl.float32),
            mask=row_exists[:, None] & (channels < value_width)[None, :],
        )
    else:
        unit = tl.load(pairs + pair * PAIR_FIELDS + FIRST_UNIT) + own_unit
        fields = units + unit * FIELDS
        count, newest_place = tl.load(fields + COUNT), tl.load(fields + NEWEST)
        stride, entry = tl.cdiv(count, 8).to(tl.int32), unit * tl.num_programs(2) + part
        x = coded_logits(
            tl.zeros([T, N], tl.float32), fields + KEYS, slots + unit * 2 * SLOTS, chunks + unit * 2 * CHUNKS,
            weights + entry * weight_rows * N, levels, low_levels, first, stride, N, W, T, EXACT, ASSEMBLY,
            TRELLIS,
        )  # fmt: skip
        factor, constant = (
            tl.load(factors + entry * R + tl.arange(0, R)),
            tl.load(constants + entry * R + tl.arange(0, R)),
        )
        x = joined_limbs(x, T, R) * factor[None, :] + constant[None, :]
        token = tl.arange(0, T)
        token = first + 32 * (token % W) + token // W
        exists = token < count
        if ADDED:
            column = tl.load(of_sequence + 2) + token - first
            at, size = (
                tl.load(pairs + pair * PAIR_FIELDS + POSITIONS),
                tl.load(pairs + pair * PAIR_FIELDS + POSITIONS + 1),
            )
            known = exists & (at != 0)
            short = tl.load(at.to(tl.pointer_type(tl.int16)) + column, mask=known & (size == 2), other=0).to(tl.int32)
            long = tl.load(at.to(tl.pointer_type(tl.int32)) + column, mask=known & (size == 4), other=0)
            of_row = added + (pair * ROWS + rows).to(tl.int64) * added_count
            more = tl.load(
                of_row[None, :] + (short + long)[:, None], mask=known[:, None] & row_exists[None, :], other=0.0
            )
            x += more * inner
        x = seen_logits(tl.trans(x), token, exists, weights, 0, row_exists, newest_place, outer, NO_MASK, SOFTCAP)
        known = exists & (newest_place >= 0) & (newest_place + token < newest)
        to_newest = newest_out + (pair * ROWS + rows) * newest + newest_place
        tl.store(to_newest[:, None] + token[None, :], x, mask=row_exists[:, None] & known[None, :])
        largest = tl.maximum(tl.max(x, axis=1), LEAST)
        share = tl.exp2(x - largest[:, None])
        total = tl.sum(share, axis=1)
        tl.store(largest_out + place, largest, mask=row_exists)
        tl.store(sums_out + place, total, mask=row_exists)
        share = tl.trans(share) * SHARE
        high = share.to(tl.float16)
        low = (share - high.to(tl.float32)).to(tl.float16)
        shares = by_values(tl.reshape(tl.join(high, low), [T, N]), N, W, T)
        store_values(
            total, shares, fields + VALUES, slots + (unit * 2 + 1) * SLOTS, chunks + (unit * 2 + 1) * CHUNKS, levels,
            low_levels, signs, first, stride, products, row_exists, R, W, T, EXACT, ASSEMBLY, TRELLIS,
        )  # fmt: skip
