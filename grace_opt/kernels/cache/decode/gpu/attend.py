"""What runs on the GPU for :mod:`grace_opt.kernels.cache.decode.gpu`, which says what is computed, and why in this way.

Source: as there.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .. import forms, packed

NO_MASK, CAUSAL, BOOL = (tl.constexpr(kind) for kind in (forms.NO_MASK, forms.CAUSAL, forms.BOOL))
#: Columns of the table of packed keys or values.
SCALE, ZERO, PLANE = (tl.constexpr(column) for column in (packed.SCALE, packed.ZERO, packed.PLANE))
STEP, FIRST, ENTRIES = (tl.constexpr(column) for column in (packed.STEP, packed.FIRST, packed.ENTRIES))
LOG2E = tl.constexpr(math.log2(math.e))
LEAST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def load_keys(keys, token_step, channel_step, tokens, exists, width, WIDTH: tl.constexpr):
    """Return (channels, tokens) of dense keys."""
    channels = tl.arange(0, WIDTH)
    return tl.load(
        keys + tokens.to(tl.int64)[None, :] * token_step + channels[:, None] * channel_step,
        mask=exists[None, :] & (channels < width)[:, None],
        other=0.0,
    )


@triton.jit
def load_values(values, token_step, channel_step, tokens, exists, width, WIDTH: tl.constexpr):
    """Return (tokens, channels) of dense values."""
    channels = tl.arange(0, WIDTH)
    return tl.load(
        values + tokens.to(tl.int64)[:, None] * token_step + channels[None, :] * channel_step,
        mask=exists[:, None] & (channels < width)[None, :],
        other=0.0,
    )


@triton.jit
def unpacked(
    levels, scale, zero, row, plane, place, exists,
    SIZE: tl.constexpr, BITS: tl.constexpr, HIGH_FIRST: tl.constexpr, ZERO_IN_LEVELS: tl.constexpr,
    PARAMETERS: tl.constexpr,
):  # fmt: skip
    """The numbers at `place` of each `row`, in float32, as `Packed` defines them; addresses as integers."""
    ELEMENT: tl.constexpr = tl.int32 if BITS == 3 else tl.uint8  # as `packed.element_of` has it
    ROWS: tl.constexpr = 10 if BITS == 3 else 8 // BITS
    number = row // plane
    address = levels.to(tl.pointer_type(ELEMENT)) + (row - number * plane) * SIZE
    word = tl.load(address + place, mask=exists, other=0).to(tl.int32)
    shift = ((ROWS - 1 - number) * BITS if HIGH_FIRST else number * BITS).to(tl.int32)
    level = ((word >> shift) & ((1 << BITS) - 1)).to(tl.float32)
    factor = tl.load(scale.to(tl.pointer_type(PARAMETERS)) + row, mask=exists, other=0.0).to(tl.float32)
    shifted = tl.load(zero.to(tl.pointer_type(PARAMETERS)) + row, mask=exists, other=0.0).to(tl.float32)
    return factor * (level - shifted) if ZERO_IN_LEVELS else factor * level - shifted


@triton.jit
def load_packed_keys(
    table, owners, head, token_group, places, exists, width,
    SIZE: tl.constexpr, BITS: tl.constexpr, HIGH_FIRST: tl.constexpr, ZERO_IN_LEVELS: tl.constexpr,
    PARAMETERS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return (channels, tokens) of the tokens at `places` of one token group."""
    channels = tl.arange(0, WIDTH)
    entry = table + tl.load(owners + token_group).to(tl.int64) * ENTRIES
    row = tl.load(entry + STEP) * head + tl.load(entry + FIRST) + token_group.to(tl.int64) * width + channels
    return unpacked(
        tl.load(entry),
        tl.load(entry + SCALE),
        tl.load(entry + ZERO),
        row[:, None],
        tl.load(entry + PLANE),
        places[None, :],
        (channels < width)[:, None] & exists[None, :],
        SIZE, BITS, HIGH_FIRST, ZERO_IN_LEVELS, PARAMETERS,
    )  # fmt: skip


@triton.jit
def load_old_values(
    values, owners, token_step, channel_step, head, tokens, exists, width,
    PACKED: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr, HIGH_FIRST: tl.constexpr,
    ZERO_IN_LEVELS: tl.constexpr, PARAMETERS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return (tokens, channels) of dense values, or of packed ones, whose table `values` is then."""
    if PACKED:
        channels = tl.arange(0, WIDTH)
        entry = values + tl.load(owners + tokens, mask=exists, other=0).to(tl.int64) * ENTRIES
        first = tl.load(entry + STEP) * head + tl.load(entry + FIRST) + tokens.to(tl.int64) * (width // SIZE)
        numbers = unpacked(
            tl.load(entry)[:, None],
            tl.load(entry + SCALE)[:, None],
            tl.load(entry + ZERO)[:, None],
            first[:, None] + (channels // SIZE)[None, :],
            tl.load(entry + PLANE)[:, None],
            (channels % SIZE)[None, :],
            exists[:, None] & (channels < width)[None, :],
            SIZE, BITS, HIGH_FIRST, ZERO_IN_LEVELS, PARAMETERS,
        )  # fmt: skip
    else:
        numbers = load_values(values, token_step, channel_step, tokens, exists, width, WIDTH)
    return numbers


@triton.jit
def seen_logits(
    x, columns, exists, mask, mask_column, row_exists, last_column, outer,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Logits in powers of two from scaled products `x`, (rows, tokens): capped, and hidden where a mask says so."""
    if SOFTCAP:
        x = outer * (1.0 - 2.0 / (tl.exp2(x) + 1.0))
    if MASK == CAUSAL:
        x = tl.where(columns[None, :] <= last_column[:, None], x, LEAST)
    elif MASK != NO_MASK:
        seen = tl.load(
            mask[:, None] + columns.to(tl.int64)[None, :] * mask_column,
            mask=row_exists[:, None] & exists[None, :],
            other=0,
        )
        if MASK == BOOL:
            x = tl.where(seen != 0, x, LEAST)
        else:
            x = x + seen.to(tl.float32) * LOG2E
            x = tl.where(x < LEAST, LEAST, x)  # not a maximum: NaN stays NaN
    # Minus infinity only here: tokens that do not exist get no share even in a row that sees nothing.
    return tl.where(exists[None, :], x, float("-inf"))


@triton.jit
def attend_block(
    largest, sums, products, queries, k, v, columns, exists, mask, mask_column, row_exists, last_column, inner, outer,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add one more block: keys `k`, (channels, tokens), and values `v`, (tokens, channels), of `columns` among all."""
    if WIDEN:
        x = tl.dot(queries.to(tl.float32), k.to(tl.float32), input_precision="ieee")
    else:
        x = tl.dot(queries, k, input_precision="ieee")
    x = seen_logits(x * inner, columns, exists, mask, mask_column, row_exists, last_column, outer, MASK, SOFTCAP)

    new_largest = tl.maximum(largest, tl.max(x, axis=1))
    shrink = tl.exp2(largest - new_largest)
    share = tl.exp2(x - new_largest[:, None])
    products = products * shrink[:, None]
    if WIDEN:
        products += tl.dot(share.to(v.dtype).to(tl.float32), v.to(tl.float32), input_precision="ieee")
    else:
        products += tl.dot(share.to(v.dtype), v, input_precision="ieee")
    return new_largest, sums * shrink + tl.sum(share, axis=1), products


# Numbers that change from token to token: compiling again for each that 16 divides would cost more than it brings.
_CHANGING = ["mask_batch", "mask_head", "mask_row", "sinks", "pruned", "tail", "blocks_per_split"]


@triton.jit(do_not_specialize=_CHANGING)
def attend_split(
    query, query_batch, query_head, query_row, query_channel, pruned_keys, key_owners, pruned_batch, pruned_head,
    pruned_token, pruned_channel, kept_indices, kept_batch, kept_head, kept_channel, sink_keys, sink_batch, sink_head,
    sink_token, sink_channel, tail_keys, tail_batch, tail_head, tail_token, tail_channel, old_values, value_owners,
    old_batch, old_head, old_token, old_channel, tail_values, new_batch, new_head, new_token, new_channel, mask,
    mask_batch, mask_head, mask_row, mask_column, largest_out, sums_out, products_out, heads, width, kept_count,
    value_width, sinks, pruned, tail, blocks_per_split, inner, outer, GROUP: tl.constexpr, LENGTH: tl.constexpr,
    MASK: tl.constexpr, SOFTCAP: tl.constexpr, WIDEN: tl.constexpr, ROW_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, VALUE_WIDTH: tl.constexpr, PACKED_KEYS: tl.constexpr,
    KEY_SIZE: tl.constexpr, BLOCKS_PER_GROUP: tl.constexpr, KEY_BITS: tl.constexpr, KEY_HIGH_FIRST: tl.constexpr,
    KEY_ZERO_IN_LEVELS: tl.constexpr, KEY_PARAMETERS: tl.constexpr, PACKED_VALUES: tl.constexpr,
    VALUE_SIZE: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_HIGH_FIRST: tl.constexpr,
    VALUE_ZERO_IN_LEVELS: tl.constexpr, VALUE_PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Attend to one split of blocks of one pair; row r is query head r // LENGTH of the group, token r % LENGTH.

    With `PACKED_KEYS`, `pruned_keys` is their table, and one group is one or more blocks; with `PACKED_VALUES`,
    `old_values` is theirs.
    """
    pair, split = tl.program_id(0), tl.program_id(1)
    b, h = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    rows = tl.arange(0, ROW_BLOCK)
    row_exists = rows < GROUP * LENGTH
    head, position = h * GROUP + rows // LENGTH, rows % LENGTH
    from_row = query + b * query_batch + head * query_head + position * query_row
    from_mask = mask + b * mask_batch + head * mask_head + position.to(tl.int64) * mask_row
    last_column = sinks + pruned + tail - LENGTH + position

    channels = tl.arange(0, WIDTH)
    full = tl.load(
        from_row[:, None] + channels[None, :] * query_channel,
        mask=row_exists[:, None] & (channels < width)[None, :],
        other=0.0,
    )
    number = tl.arange(0, KEPT)
    chosen = tl.load(
        kept_indices + b * kept_batch + h * kept_head + number * kept_channel, mask=number < kept_count, other=0
    )
    narrow = tl.load(
        from_row[:, None] + chosen[None, :] * query_channel,
        mask=row_exists[:, None] & (number < kept_count)[None, :],
        other=0.0,
    )

    largest = tl.full([ROW_BLOCK], LEAST, tl.float32)
    sums = tl.zeros([ROW_BLOCK], tl.float32)
    products = tl.zeros([ROW_BLOCK, VALUE_WIDTH], tl.float32)
    first = split * blocks_per_split
    stop = first + blocks_per_split
    after_sinks = tl.cdiv(sinks, BLOCK)
    pruned_blocks = pruned // KEY_SIZE * BLOCKS_PER_GROUP if PACKED_KEYS else tl.cdiv(pruned, BLOCK)
    after_pruned = after_sinks + pruned_blocks
    after_tail = after_pruned + tl.cdiv(tail, BLOCK)

    keys = sink_keys + b * sink_batch + h * sink_head
    values = old_values + b * old_batch + h * old_head
    for i in range(first, tl.minimum(stop, after_sinks)):
        columns = i * BLOCK + tl.arange(0, BLOCK)
        exists = columns < sinks
        k = load_keys(keys, sink_token, sink_channel, columns, exists, width, WIDTH)
        v = load_old_values(
            values, value_owners, old_token, old_channel, h, columns, exists, value_width, PACKED_VALUES,
            VALUE_SIZE, VALUE_BITS, VALUE_HIGH_FIRST, VALUE_ZERO_IN_LEVELS, VALUE_PARAMETERS, VALUE_WIDTH,
        ).to(full.dtype)  # fmt: skip
        largest, sums, products = attend_block(
            largest, sums, products, full, k, v, columns, exists, from_mask, mask_column, row_exists, last_column,
            inner, outer, MASK, SOFTCAP, WIDEN,
        )  # fmt: skip
    for i in range(tl.maximum(first, after_sinks), tl.minimum(stop, after_pruned)):
        block = i - after_sinks
        if PACKED_KEYS:
            group = block // BLOCKS_PER_GROUP
            places = block % BLOCKS_PER_GROUP * BLOCK + tl.arange(0, BLOCK)
            tokens, exists = group * KEY_SIZE + places, places < KEY_SIZE
            k = load_packed_keys(
                pruned_keys + b * pruned_batch, key_owners, h, group, places, exists, kept_count,
                KEY_SIZE, KEY_BITS, KEY_HIGH_FIRST, KEY_ZERO_IN_LEVELS, KEY_PARAMETERS, KEPT,
            ).to(narrow.dtype)  # fmt: skip
        else:
            tokens = block * BLOCK + tl.arange(0, BLOCK)
            exists = tokens < pruned
            keys = pruned_keys + b * pruned_batch + h * pruned_head
            k = load_keys(keys, pruned_token, pruned_channel, tokens, exists, kept_count, KEPT)
        columns = sinks + tokens
        v = load_old_values(
            values, value_owners, old_token, old_channel, h, columns, exists, value_width, PACKED_VALUES,
            VALUE_SIZE, VALUE_BITS, VALUE_HIGH_FIRST, VALUE_ZERO_IN_LEVELS, VALUE_PARAMETERS, VALUE_WIDTH,
        ).to(full.dtype)  # fmt: skip
        largest, sums, products = attend_block(
            largest, sums, products, narrow, k, v, columns, exists, from_mask, mask_column, row_exists, last_column,
            inner, outer, MASK, SOFTCAP, WIDEN,
        )  # fmt: skip
    keys = tail_keys + b * tail_batch + h * tail_head
    newest = tail_values + b * new_batch + h * new_head
    for i in range(tl.maximum(first, after_pruned), tl.minimum(stop, after_tail)):
        tokens = (i - after_pruned) * BLOCK + tl.arange(0, BLOCK)
        exists = tokens < tail
        k = load_keys(keys, tail_token, tail_channel, tokens, exists, width, WIDTH)
        v = load_values(newest, new_token, new_channel, tokens, exists, value_width, VALUE_WIDTH)
        columns = sinks + pruned + tokens
        largest, sums, products = attend_block(
            largest, sums, products, full, k, v, columns, exists, from_mask, mask_column, row_exists, last_column,
            inner, outer, MASK, SOFTCAP, WIDEN,
        )  # fmt: skip

    place = (pair.to(tl.int64) * tl.num_programs(1) + split) * GROUP * LENGTH + rows
    tl.store(largest_out + place, largest, mask=row_exists)
    tl.store(sums_out + place, sums, mask=row_exists)
    v_channels = tl.arange(0, VALUE_WIDTH)
    tl.store(
        products_out + place[:, None] * value_width + v_channels[None, :],
        products,
        mask=row_exists[:, None] & (v_channels < value_width)[None, :],
    )


@triton.jit(do_not_specialize=["splits"])
def join_splits(
    largest_in, sums_in, products_in, output, splits, heads, value_width, GROUP: tl.constexpr, LENGTH: tl.constexpr,
    SPLITS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Join the splits of one query row, weighted by their maxima and divided by the sum of the weights."""
    program = tl.program_id(0).to(tl.int64)
    pair, row = program // (GROUP * LENGTH), program % (GROUP * LENGTH)
    number = tl.arange(0, SPLITS)
    exists = number < splits
    place = (pair * splits + number) * (GROUP * LENGTH) + row
    largest = tl.load(largest_in + place, mask=exists, other=LEAST)
    weight = tl.exp2(largest - tl.max(largest, axis=0))
    sums = tl.load(sums_in + place, mask=exists, other=0.0)
    channels = tl.arange(0, VALUE_WIDTH)
    products = tl.load(
        products_in + place[:, None] * value_width + channels[None, :],
        mask=exists[:, None] & (channels < value_width)[None, :],
        other=0.0,
    )
    result = tl.sum(products * weight[:, None], axis=0) / tl.sum(sums * weight, axis=0)
    b, head = pair // heads, (pair % heads) * GROUP + row // LENGTH
    target = ((b * LENGTH + row % LENGTH) * heads * GROUP + head) * value_width
    tl.store(output + target + channels, result.to(output.dtype.element_ty), mask=channels < value_width)
