r"""Attention of a few new queries over a pruned key cache, in two kernels and without any logits in memory.

What is computed is :func:`grace_opt.hf.segments.segmented_attention`, which stays the definition: one softmax over the
columns in the order in which they are stored (dense sinks, pruned keys, dense tail), and its product with the values.
Decoding reads every stored key and value once and does little with them, so a kernel that reads only the kept channels,
in one go, is as fast as the memory allows.

1. The tokens are cut into blocks, none across a border between segments, and the blocks into equal runs. One program
   per (sequence and KV head, run) holds the queries of the whole group, gathers their kept channels once, and walks
   through its run with a running maximum :math:`m`, sum :math:`l = \sum_j e^{x_j - m}` and product
   :math:`a = \sum_j e^{x_j - m} v_j` in float32.
2. The runs are put together: :math:`M = \max_r m_r`, output :math:`\sum_r e^{m_r - M} a_r / \sum_r e^{m_r - M} l_r`.

Inside, logits are in powers of two (times :math:`\log_2 e`). A column that a mask hides has the smallest float32
instead of minus infinity, so a row that sees nothing gets the mean of all values, as in the reference, and not NaN.

When: on a GPU, while decoding without gradients, dropout or a need for the weights; ask :func:`objection`. Whether it
is faster has to be measured there. Nothing waits for the device, and how the work is divided depends on shapes alone.
Where a row of a pruned key is not a multiple of 16 bytes, it is read in small pieces: numbers of kept channels that
are multiples of 8 are read best.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023), for splitting along the tokens; Milakov and
Gimelshein (arXiv 1805.02867) for the running softmax. Segments and kept channels as in ThinK (arXiv 2407.21018).
"""

from __future__ import annotations

import contextlib
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import CacheError

#: Widest head, of keys and of values, that one program holds.
MAX_WIDTH = 256
#: Most query rows (query heads per KV head times new tokens) that one program holds.
MAX_ROWS = 64
#: Most bytes of queries, padded, that one program holds twice: whole, and the kept channels.
QUERY_BYTES = 16 * 1024
#: One block of keys and values takes at most about so many bytes: two of them fit the shared memory of small GPUs.
BLOCK_BYTES = 32 * 1024
#: About so many programs are wanted: several for each multiprocessor of a large GPU.
PROGRAMS = 512
#: No run is shorter than so many blocks, if there is another, and no head is cut into more runs than that.
BLOCKS_PER_RUN = 4
MAX_RUNS = 64

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NO_MASK, _CAUSAL, _BOOL, _ADDITIVE = range(4)
_LOG2E = tl.constexpr(math.log2(math.e))
_LEAST = tl.constexpr(torch.finfo(torch.float32).min)


def objection(
    query: Tensor,
    pruned_keys: Tensor,
    sink_keys: Tensor,
    tail_keys: Tensor,
    old_values: Tensor,
    tail_values: Tensor,
) -> str | None:
    """Why :func:`decode_attention` can not take these tensors, or None if it can.

    Parameters
    ----------
    query, pruned_keys, sink_keys, tail_keys, old_values, tail_values : Tensor
        As there.
    """
    stored = (pruned_keys, sink_keys, tail_keys, old_values, tail_values)
    rows = query.shape[1] // pruned_keys.shape[1] * query.shape[2]
    width, value_width = query.shape[3], old_values.shape[3]
    if query.dtype not in _DTYPES or any(t.dtype != query.dtype for t in stored):
        types = ", ".join(sorted({str(t.dtype) for t in (query, *stored)}))
        return f"queries, keys and values are {types}; they must all be float16, bfloat16 or float32"
    if max(width, value_width) > MAX_WIDTH:
        return f"heads are {width} wide, values {value_width}; at most {MAX_WIDTH} is possible"
    if rows > MAX_ROWS:
        return f"{rows} query rows share a KV head; at most {MAX_ROWS} is possible"
    if (held := _padded(rows) * _padded(width) * query.element_size()) > QUERY_BYTES:
        return (
            f"{rows} query rows of width {width} take {held} bytes of {query.dtype}; at most {QUERY_BYTES} is possible"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, *stored)):
        return "gradients are asked for, and the kernels have none"
    if not query.is_cuda and not _INTERPRETED:
        return f"tensors are on {query.device}; a GPU is needed, or TRITON_INTERPRET=1 before triton is imported"
    return None


def decode_attention(
    query: Tensor,
    pruned_keys: Tensor,
    kept_indices: Tensor,
    sink_keys: Tensor,
    tail_keys: Tensor,
    old_values: Tensor,
    tail_values: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    *,
    block: int | None = None,
    runs: int | None = None,
) -> Tensor:
    """Attention over sinks, pruned keys and a dense tail.

    Parameters
    ----------
    query : Tensor
        ``(B, H_q, L, d)`` in float16, bfloat16 or float32, ``L`` new tokens at the end of the sequence.
    pruned_keys : Tensor
        ``(B, H, S_p, d')``, of the query's type as all keys and values. Any strides: views are read where they are.
    kept_indices : Tensor
        ``(B, H, d')`` int64: the channels of the pruned keys.
    sink_keys, tail_keys : Tensor
        ``(B, H, s, d)`` and ``(B, H, S_t, d)``. Of s, S_p and S_t any may be zero, not all.
    old_values, tail_values : Tensor
        ``(B, H, s + S_p, d_v)`` and ``(B, H, S_t, d_v)``.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, L, s + S_p + S_t)``, columns in stored order: bool (True attends) or to be added. None
        means causal if `causal` says so, else nothing hidden.
    scaling : float or None
        Of the logits; None means ``d ** -0.5``.
    softcap : float or None
        Logits become ``softcap * tanh(logits / softcap)`` before the mask.
    causal : bool
        What no mask means.
    block, runs : int or None
        Tokens per block (a power of two, at least 16) and runs per head, for measurements; None chooses from the
        shapes.

    Returns
    -------
    Tensor
        ``(B, L, H_q, d_v)``, of the query's type.

    Raises
    ------
    CacheError
        If there is an :func:`objection`, no token is stored, or the mask has another shape.
    """
    reason = objection(query, pruned_keys, sink_keys, tail_keys, old_values, tail_values)
    if reason is not None:
        raise CacheError(f"the decoding kernel can not be used: {reason}; use segmented_attention")
    batch, query_heads, length, width = query.shape
    heads, pruned, kept = pruned_keys.shape[1:]
    sinks, tail, value_width = sink_keys.shape[2], tail_keys.shape[2], tail_values.shape[3]
    group, total = query_heads // heads, sinks + pruned + tail
    if total == 0 or old_values.shape[2] != sinks + pruned or tail_values.shape[2] != tail:
        raise CacheError(
            f"{sinks} sink, {pruned} pruned and {tail} tail keys do not go with {old_values.shape[2]} old and "
            f"{tail_values.shape[2]} tail values; there must be as many values as keys, and at least one"
        )
    output = query.new_empty(batch, length, query_heads, value_width)
    if output.numel() == 0:
        return output
    kind, mask, mask_strides = _read_mask(attention_mask, query, total, causal)

    kept_block, block_width, value_block = (_padded(n) for n in (kept, width, value_width))
    if block is None:
        block = _block_size(max(block_width, kept_block) + value_block, query.element_size())
    blocks = sum(triton.cdiv(n, block) for n in (sinks, pruned, tail))
    if runs is None:
        runs = min(MAX_RUNS, triton.cdiv(PROGRAMS, batch * heads), triton.cdiv(blocks, BLOCKS_PER_RUN))
    blocks_per_run = triton.cdiv(blocks, runs)
    runs = triton.cdiv(blocks, blocks_per_run)

    scaling = width**-0.5 if scaling is None else scaling
    if softcap is None:
        inner, outer = scaling * _LOG2E.value, 1.0
    else:  # tanh(x) = 1 - 2 / (e^2x + 1)
        inner, outer = 2 * scaling / softcap * _LOG2E.value, softcap * _LOG2E.value

    rows = group * length
    largest, sums = query.new_empty(2, batch * heads, runs, rows, dtype=torch.float32)
    products = query.new_empty(batch * heads, runs, rows, value_width, dtype=torch.float32)
    row_block = _padded(rows)
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        _attend_run[(batch * heads, runs)](
            query,
            *query.stride(),
            pruned_keys,
            *pruned_keys.stride(),
            kept_indices,
            *kept_indices.stride(),
            sink_keys,
            *sink_keys.stride(),
            tail_keys,
            *tail_keys.stride(),
            old_values,
            *old_values.stride(),
            tail_values,
            *tail_values.stride(),
            mask,
            *mask_strides,
            largest,
            sums,
            products,
            heads,
            width,
            kept,
            value_width,
            sinks,
            pruned,
            tail,
            blocks_per_run,
            float(inner),
            float(outer),
            GROUP=group,
            LENGTH=length,
            MASK=kind,
            SOFTCAP=softcap is not None,
            WIDEN=_INTERPRETED and query.dtype == torch.bfloat16,
            ROW_BLOCK=row_block,
            BLOCK=block,
            WIDTH=block_width,
            KEPT=kept_block,
            VALUE_WIDTH=value_block,
            num_warps=4 if row_block <= 32 else 8,
            num_stages=2,
        )
        _join_runs[(batch * heads * rows,)](
            largest,
            sums,
            products,
            output,
            runs,
            heads,
            value_width,
            GROUP=group,
            LENGTH=length,
            RUNS=triton.next_power_of_2(runs),
            VALUE_WIDTH=value_block,
            num_warps=4,
        )
    return output


def _read_mask(
    attention_mask: Tensor | None, query: Tensor, total: int, causal: bool
) -> tuple[int, Tensor, tuple[int, ...]]:
    """Kind of mask, the tensor to read (any, if none is) and its strides, zero where it is broadcast."""
    batch, query_heads, length, _ = query.shape
    if attention_mask is None:
        return (_CAUSAL if causal and length > 1 else _NO_MASK), query, (0, 0, 0, 0)
    full, found = (batch, query_heads, length, total), tuple(attention_mask.shape)
    if len(found) != 4 or found[3] != total or any(n not in (1, m) for n, m in zip(found, full, strict=True)):
        raise CacheError(
            f"the attention mask has shape {found} for {full}, in which only the columns are always needed"
        )
    strides = tuple(0 if n == 1 else step for n, step in zip(found, attention_mask.stride(), strict=True))
    if attention_mask.dtype == torch.bool:
        return _BOOL, attention_mask.view(torch.uint8), strides
    return _ADDITIVE, attention_mask, strides


def _padded(width: int) -> int:
    """The next power of two from 16 on: what a matrix product of Triton takes."""
    return max(16, 1 << (width - 1).bit_length())


def _block_size(channels: int, itemsize: int) -> int:
    """Tokens per block, so that a block of keys and values, padded, fits `BLOCK_BYTES`."""
    block = 128
    while block > 16 and block * channels * itemsize > BLOCK_BYTES:
        block //= 2
    return block


@triton.jit
def _attend_block(
    largest,
    sums,
    products,
    queries,
    keys,
    key_token,
    key_channel,
    width,
    values,
    value_token,
    value_channel,
    value_width,
    start,
    stop,
    column,
    mask,
    mask_column,
    row_exists,
    last_column,
    inner,
    outer,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """One more block of tokens, from `start` on and before `stop`, of a segment whose first token has `column`."""
    tokens = start + tl.arange(0, BLOCK)
    exists = tokens < stop
    place = tokens.to(tl.int64)
    channels = tl.arange(0, WIDTH)
    k = tl.load(
        keys + place[None, :] * key_token + channels[:, None] * key_channel,
        mask=exists[None, :] & (channels < width)[:, None],
        other=0.0,
    )
    if WIDEN:
        x = tl.dot(queries.to(tl.float32), k.to(tl.float32), input_precision="ieee")
    else:
        x = tl.dot(queries, k, input_precision="ieee")
    x = x * inner
    if SOFTCAP:
        x = outer * (1.0 - 2.0 / (tl.exp2(x) + 1.0))
    columns = column + tokens
    if MASK == 1:
        x = tl.where(columns[None, :] <= last_column[:, None], x, _LEAST)
    elif MASK >= 2:
        seen = tl.load(
            mask[:, None] + columns.to(tl.int64)[None, :] * mask_column,
            mask=row_exists[:, None] & exists[None, :],
            other=0,
        )
        if MASK == 2:
            x = tl.where(seen != 0, x, _LEAST)
        else:
            x = x + seen.to(tl.float32) * _LOG2E
            x = tl.where(x < _LEAST, _LEAST, x)  # not a maximum: NaN stays NaN
    # Minus infinity only here: tokens that do not exist get no share even in a row that sees nothing.
    x = tl.where(exists[None, :], x, float("-inf"))

    new_largest = tl.maximum(largest, tl.max(x, axis=1))
    shrink = tl.exp2(largest - new_largest)
    share = tl.exp2(x - new_largest[:, None])
    v_channels = tl.arange(0, VALUE_WIDTH)
    v = tl.load(
        values + place[:, None] * value_token + v_channels[None, :] * value_channel,
        mask=exists[:, None] & (v_channels < value_width)[None, :],
        other=0.0,
    )
    products = products * shrink[:, None]
    if WIDEN:
        products += tl.dot(share.to(v.dtype).to(tl.float32), v.to(tl.float32), input_precision="ieee")
    else:
        products += tl.dot(share.to(v.dtype), v, input_precision="ieee")
    return new_largest, sums * shrink + tl.sum(share, axis=1), products


# Numbers that change from token to token: compiling again for each that 16 divides would cost more than it brings.
_CHANGING = ["mask_batch", "mask_head", "mask_row", "sinks", "pruned", "tail", "blocks_per_run"]


@triton.jit(do_not_specialize=_CHANGING)
def _attend_run(
    query,
    query_batch,
    query_head,
    query_row,
    query_channel,
    pruned_keys,
    pruned_batch,
    pruned_head,
    pruned_token,
    pruned_channel,
    kept_indices,
    kept_batch,
    kept_head,
    kept_channel,
    sink_keys,
    sink_batch,
    sink_head,
    sink_token,
    sink_channel,
    tail_keys,
    tail_batch,
    tail_head,
    tail_token,
    tail_channel,
    old_values,
    old_batch,
    old_head,
    old_token,
    old_channel,
    tail_values,
    new_batch,
    new_head,
    new_token,
    new_channel,
    mask,
    mask_batch,
    mask_head,
    mask_row,
    mask_column,
    largest_out,
    sums_out,
    products_out,
    heads,
    width,
    kept,
    value_width,
    sinks,
    pruned,
    tail,
    blocks_per_run,
    inner,
    outer,
    GROUP: tl.constexpr,
    LENGTH: tl.constexpr,
    MASK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDEN: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """One KV head of one sequence, one run of blocks; row r is query head r // LENGTH of the group, token r %
    LENGTH."""
    pair, run = tl.program_id(0), tl.program_id(1)
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
    chosen = tl.load(kept_indices + b * kept_batch + h * kept_head + number * kept_channel, mask=number < kept, other=0)
    narrow = tl.load(
        from_row[:, None] + chosen[None, :] * query_channel,
        mask=row_exists[:, None] & (number < kept)[None, :],
        other=0.0,
    )

    largest = tl.full([ROW_BLOCK], _LEAST, tl.float32)
    sums = tl.zeros([ROW_BLOCK], tl.float32)
    products = tl.zeros([ROW_BLOCK, VALUE_WIDTH], tl.float32)
    first = run * blocks_per_run
    stop = first + blocks_per_run
    after_sinks = tl.cdiv(sinks, BLOCK)
    after_pruned = after_sinks + tl.cdiv(pruned, BLOCK)
    after_tail = after_pruned + tl.cdiv(tail, BLOCK)

    keys = sink_keys + b * sink_batch + h * sink_head
    values = old_values + b * old_batch + h * old_head
    for i in range(first, tl.minimum(stop, after_sinks)):
        largest, sums, products = _attend_block(
            largest,
            sums,
            products,
            full,
            keys,
            sink_token,
            sink_channel,
            width,
            values,
            old_token,
            old_channel,
            value_width,
            i * BLOCK,
            sinks,
            0,
            from_mask,
            mask_column,
            row_exists,
            last_column,
            inner,
            outer,
            MASK,
            SOFTCAP,
            WIDEN,
            BLOCK,
            WIDTH,
            VALUE_WIDTH,
        )
    keys = pruned_keys + b * pruned_batch + h * pruned_head
    values += sinks.to(tl.int64) * old_token
    for i in range(tl.maximum(first, after_sinks), tl.minimum(stop, after_pruned)):
        largest, sums, products = _attend_block(
            largest,
            sums,
            products,
            narrow,
            keys,
            pruned_token,
            pruned_channel,
            kept,
            values,
            old_token,
            old_channel,
            value_width,
            (i - after_sinks) * BLOCK,
            pruned,
            sinks,
            from_mask,
            mask_column,
            row_exists,
            last_column,
            inner,
            outer,
            MASK,
            SOFTCAP,
            WIDEN,
            BLOCK,
            KEPT,
            VALUE_WIDTH,
        )
    keys = tail_keys + b * tail_batch + h * tail_head
    values = tail_values + b * new_batch + h * new_head
    for i in range(tl.maximum(first, after_pruned), tl.minimum(stop, after_tail)):
        largest, sums, products = _attend_block(
            largest,
            sums,
            products,
            full,
            keys,
            tail_token,
            tail_channel,
            width,
            values,
            new_token,
            new_channel,
            value_width,
            (i - after_pruned) * BLOCK,
            tail,
            sinks + pruned,
            from_mask,
            mask_column,
            row_exists,
            last_column,
            inner,
            outer,
            MASK,
            SOFTCAP,
            WIDEN,
            BLOCK,
            WIDTH,
            VALUE_WIDTH,
        )

    place = (pair.to(tl.int64) * tl.num_programs(1) + run) * GROUP * LENGTH + rows
    tl.store(largest_out + place, largest, mask=row_exists)
    tl.store(sums_out + place, sums, mask=row_exists)
    v_channels = tl.arange(0, VALUE_WIDTH)
    tl.store(
        products_out + place[:, None] * value_width + v_channels[None, :],
        products,
        mask=row_exists[:, None] & (v_channels < value_width)[None, :],
    )


@triton.jit(do_not_specialize=["runs"])
def _join_runs(
    largest_in,
    sums_in,
    products_in,
    output,
    runs,
    heads,
    value_width,
    GROUP: tl.constexpr,
    LENGTH: tl.constexpr,
    RUNS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """One query row: its runs, weighted as their maxima say, and divided by the sum of the weights."""
    program = tl.program_id(0).to(tl.int64)
    pair, row = program // (GROUP * LENGTH), program % (GROUP * LENGTH)
    number = tl.arange(0, RUNS)
    exists = number < runs
    place = (pair * runs + number) * (GROUP * LENGTH) + row
    largest = tl.load(largest_in + place, mask=exists, other=_LEAST)
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


#: Whether triton was imported with TRITON_INTERPRET=1: numpy does the work, on the CPU, and multiplies no bfloat16.
_INTERPRETED = not isinstance(_attend_run, triton.JITFunction)
