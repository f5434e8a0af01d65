"""Runs of coded tokens of one head on the GPU: first logits, then sums of values, both some channels at a time.

Source: as for :mod:`grace_opt.kernels.coded.gpu`, which says what is computed, and why in this way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...decode import forms as kinds
from ...decode.gpu.attend import LEAST, seen_logits
from .. import forms
from . import batch
from .numbers import read_channels, read_numbers

NO_MASK = tl.constexpr(kinds.NO_MASK)
COUNT, NEWEST, KEYS, VALUES, FIELDS = (
    tl.constexpr(field) for field in (forms.COUNT, forms.NEWEST, forms.KEYS, forms.VALUES, forms.FIELDS)
)
FIRST_UNIT, UNIT_COUNT, PAIR_FIELDS = (
    tl.constexpr(field) for field in (batch.FIRST_UNIT, batch.UNIT_COUNT, batch.PAIR_FIELDS)
)


@triton.jit
def units_of_run(own, units, start, stop, BLOCK: tl.constexpr, UNITS: tl.constexpr):
    """Of the blocks of one head's units, those from `start` to `stop`: the first unit, the one after the last, and the
    number of blocks before the first unit."""
    number, first_unit = tl.arange(0, UNITS), tl.load(own + FIRST_UNIT)
    exists = number < tl.load(own + UNIT_COUNT)
    counts = tl.load(units + (first_unit + number) * FIELDS + COUNT, mask=exists, other=0)
    blocks = tl.cdiv(counts, BLOCK)
    ends = tl.cumsum(blocks, 0)
    # Every unit has tokens, so that both are in ascending order.
    first = tl.sum(((ends <= start) & exists).to(tl.int32), axis=0)
    last = tl.sum(((ends - blocks < stop) & exists).to(tl.int32), axis=0)
    before = tl.sum(tl.where(ends <= start, blocks, 0), axis=0)
    return first_unit + first, first_unit + last, before


@triton.jit
def coded_logits(
    own, units, listed, books, turned, row_exists, to_logits, to_newest, newest, width, start, stop, outer,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    LISTED: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Store the logits of some rows with blocks `start` to `stop`; `turned` has the rows' scaled queries."""
    first, last, before = units_of_run(own, units, start, stop, BLOCK, UNITS)
    for unit in range(first, last):
        fields = units + unit * FIELDS
        count, place = tl.load(fields + COUNT), tl.load(fields + NEWEST)
        stride, blocks = tl.cdiv(count, 8).to(tl.int32), tl.cdiv(count, BLOCK)
        for block in range(tl.maximum(start - before, 0), tl.minimum(stop - before, blocks)):
            x = tl.zeros([ROW_BLOCK, BLOCK], tl.float32)
            constants = tl.zeros([ROW_BLOCK, CHUNK], tl.float32)
            for chunk in range(0, width, CHUNK):
                channels = chunk + tl.arange(0, CHUNK)
                bits, planes, scale, mean = read_channels(fields + KEYS, listed + unit * 2 * LISTED, channels, width)
                q = tl.load(
                    turned[:, None] + channels[None, :],
                    mask=row_exists[:, None] & (channels < width)[None, :],
                    other=0.0,
                )
                constants += q * mean[None, :]
                k = read_numbers(fields + KEYS, bits, planes, stride, block * BLOCK, books, CHUNK, BLOCK)
                x += tl.dot(q * scale[None, :], k, input_precision=PRECISION)
            tokens = block * BLOCK + tl.arange(0, BLOCK)
            exists = tokens < count
            x += tl.sum(constants, axis=1)[:, None]
            x = seen_logits(x, tokens, exists, turned, 0, row_exists, place, outer, NO_MASK, SOFTCAP)
            columns = before * BLOCK + tokens
            tl.store(to_logits[:, None] + columns[None, :], x, mask=row_exists[:, None])
            known = exists & (place >= 0) & (place + tokens < newest)
            tl.store(to_newest[:, None] + place + tokens[None, :], x, mask=row_exists[:, None] & known[None, :])
        before += blocks


@triton.jit
def add_block(largest, sums, products, x, numbers, scale, mean, PRECISION: tl.constexpr):
    """One more block with logits `x`: values are `numbers`, (tokens, channels), times their scale, plus their mean."""
    new_largest = tl.maximum(largest, tl.max(x, axis=1))
    shrink = tl.exp2(largest - new_largest)
    share = tl.exp2(x - new_largest[:, None])
    added = tl.sum(share, axis=1)
    found = tl.dot(share, numbers, input_precision=PRECISION)
    products = products * shrink[:, None] + found * scale[None, :] + added[:, None] * mean[None, :]
    return new_largest, sums * shrink + added, products


@triton.jit(do_not_specialize=["columns", "every", "coded_per_run"])
def add_coded_values(
    pairs, units, listed, books, logits, largest_out, sums_out, products_out, value_width, columns, every,
    coded_per_run, ROWS: tl.constexpr, PRECISION: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, LISTED: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """One pair, one run, some rows and some channels: maxima, sums and products, in the values' coordinates."""
    pair, run, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.cdiv(value_width, CHUNK)
    rows = tl.program_id(2) // chunks * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    channels = tl.program_id(2) % chunks * CHUNK + tl.arange(0, CHUNK)
    row_exists = rows < ROWS
    from_logits = logits + (pair * ROWS + rows) * columns
    largest = tl.full([ROW_BLOCK], LEAST, tl.float32)
    sums = tl.zeros([ROW_BLOCK], tl.float32)
    products = tl.zeros([ROW_BLOCK, CHUNK], tl.float32)
    start = run.to(tl.int64) * coded_per_run
    stop = start + coded_per_run
    first, last, before = units_of_run(pairs + pair * PAIR_FIELDS, units, start, stop, BLOCK, UNITS)
    for unit in range(first, last):
        fields = units + unit * FIELDS
        count = tl.load(fields + COUNT)
        stride, blocks = tl.cdiv(count, 8).to(tl.int32), tl.cdiv(count, BLOCK)
        bits, planes, scale, mean = read_channels(
            fields + VALUES, listed + (unit * 2 + 1) * LISTED, channels, value_width
        )
        for block in range(tl.maximum(start - before, 0), tl.minimum(stop - before, blocks)):
            places = (before + block) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(from_logits[:, None] + places[None, :], mask=row_exists[:, None], other=0.0)
            v = read_numbers(fields + VALUES, bits, planes, stride, block * BLOCK, books, CHUNK, BLOCK)
            largest, sums, products = add_block(largest, sums, products, x, tl.trans(v), scale, mean, PRECISION)
        before += blocks
    place = (pair * every + run) * ROWS + rows
    once = row_exists & (tl.program_id(2) % chunks == 0)  # programs of other channels have the same
    tl.store(largest_out + place, largest, mask=once)
    tl.store(sums_out + place, sums, mask=once)
    tl.store(
        products_out + place[:, None] * value_width + channels[None, :],
        products,
        mask=row_exists[:, None] & (channels < value_width)[None, :],
    )
