"""Start the programs of :mod:`grace_opt.kernels.cache.coded.gpu`, which says what they compute."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...decode.gpu import padded
from .attend import prepare
from .batch import TYPES, Batch
from .coded import attend_codes
from .joining import join_coded_splits, receive, turn_values
from .levels import Levels
from .weights import weight_rows

#: Most dense query rows of one program, and the largest number of dense queries, and of dense keys of a block, padded.
ROW_BLOCK, QUERY_NUMBERS, BLOCK_NUMBERS = 32, 4 * 1024, 4 * 1024
#: Columns of a basis that are taken at once.
CHUNK = 32
#: Coded tokens of a split, and the fewest and most query rows that it is read for at once.
SPLIT_TOKENS, FEWEST_ROWS, MOST_ROWS = 128, 4, 16
#: Newest tokens of one program.
NEWEST_BLOCK = 64
#: Approximate number of programs to start: several for each multiprocessor of a large GPU.
PROGRAMS = 512
#: Fewest blocks in a split of dense tokens if there are several, and most splits per head.
BLOCKS_PER_SPLIT, MAX_DENSE_SPLITS = 4, 8
#: Splits that are joined at once, and numbers of a basis that are multiplied with queries at once.
JOINED, TURNED = 64, 32 * 256


def launch(
    query: Tensor,
    batch: Batch,
    tail_keys: Tensor,
    tail_values: Tensor,
    levels: Levels,
    newest: int,
    mask: tuple[int, Tensor, tuple[int, ...]],
    factors: tuple[float, float],
    softcap: bool,
    split_tokens: int | None,
    splits: int | None,
    trellis: bool,
    added: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return output and attention received; all tensors are on the current device, and as they were checked to be.

    Parameters
    ----------
    query, tail_keys, tail_values, newest, split_tokens, splits, trellis, added
        As for `grace_opt.kernels.cache.coded.gpu.coded_attention`.
    batch : Batch
    levels : Levels
        Of the codebooks.
    mask : (int, Tensor, tuple of int)
        Its kind, the tensor to read and its strides.
    factors : (float, float)
        What `grace_opt.kernels.cache.decode.host.scales_of` returns.
    softcap : bool
        Whether logits are capped.
    """
    (sequences, query_heads, length, width), (heads, tail) = query.shape, tail_keys.shape[1:3]
    value_width, pairs, group = tail_values.shape[3], sequences * heads, query_heads // heads
    rows, sizes = group * length, {"GROUP": group, "LENGTH": length}
    block_width, value_block = padded(width), padded(value_width)
    widest = max(block_width, value_block)
    row_block = max(16, min(padded(rows), ROW_BLOCK, QUERY_NUMBERS // widest))
    dense_block = max(16, min(64, BLOCK_NUMBERS // widest))
    at_once = max(FEWEST_ROWS, min(triton.next_power_of_2(rows), MOST_ROWS))
    exact, split_tokens = query.dtype == torch.float32, SPLIT_TOKENS if split_tokens is None else split_tokens
    parts, split_table, slots = triton.cdiv(rows, at_once), batch.splits(split_tokens), batch.slots.shape[2]
    coded = split_table.shape[1]
    dense_blocks = triton.cdiv(batch.sinks, dense_block) + triton.cdiv(tail, dense_block)
    row_blocks = triton.cdiv(rows, row_block)
    dense, dense_per_split = _splits(dense_blocks, pairs * row_blocks, splits)
    every, stored = coded + dense, weight_rows(width)
    other = torch.version.hip is not None  # whose tensor cores mostly take no TF32
    # The interpreter knows none, and addresses of levels must have one upper half.
    near = all((table.data_ptr() + table.nbytes) >> 32 == table.data_ptr() >> 32 for table in (levels.high, levels.low))
    assembly = isinstance(attend_codes, triton.JITFunction) and not other and near

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=query.device)

    output, received = query.new_empty(sequences, length, query_heads, value_width), empty(sequences, heads, 3, newest)
    units = len(batch.units)
    weights, constants = empty(units, parts, stored, 2 * at_once, dtype=torch.float16), empty(2, units, parts, at_once)
    ends, joined, products = (
        empty(2, pairs, rows),
        empty(2, pairs, rows, value_width),
        empty(pairs, every, rows, value_width),
    )
    largest, sums = empty(2, pairs, every, rows)
    # Tokens that a sequence does not have receive nothing.
    new_logits = torch.full((pairs, rows, newest), -torch.inf, dtype=torch.float32, device=query.device)
    kind, shown, mask_strides = mask
    prepare[(pairs, batch.most + dense, max(parts, row_blocks))](
        query, *query.stride(), batch.pairs, batch.units, batch.slots, batch.chunks, levels.signs, weights, *constants,
        tail_keys, *tail_keys.stride(), tail_values, *tail_values.stride(), shown, *mask_strides, new_logits, largest,
        sums, products, heads, width, value_width, tail, newest, stored, batch.most, parts, coded, dense,
        dense_per_split, *factors, MASK=kind, SOFTCAP=softcap, PRECISION="ieee" if exact or other else "tf32",
        TURNING="ieee" if other else "tf32x3", ROW_BLOCK=row_block, DENSE_BLOCK=dense_block, WIDTH=block_width,
        VALUE_WIDTH=value_block, SINK_TYPE=TYPES[batch.sink_type], R=at_once, SLOTS=slots,
        CHUNK=max(16, min(32, TURNED // slots)), **sizes, num_warps=8, num_stages=1,
    )  # fmt: skip
    if coded:
        attend_codes[(pairs, coded, parts)](
            batch.pairs, batch.units, batch.slots, batch.chunks, weights, *constants, split_table, *levels,
            sums if added is None else added, new_logits, largest, sums, products, heads, value_width, newest, every,
            coded, stored, *factors, 0 if added is None else added.shape[3], ADDED=added is not None, SOFTCAP=softcap,
            EXACT=exact, ROWS=rows, R=at_once, T=split_tokens, SLOTS=slots, VALUE_WIDTH=value_block, ASSEMBLY=assembly,
            TRELLIS=trellis, num_warps=1 if at_once == FEWEST_ROWS else 4, num_stages=1,
        )  # fmt: skip
    join_coded_splits[(pairs, rows, triton.cdiv(value_width, CHUNK))](
        largest, sums, products, joined, ends, every, coded, value_width,
        SPLITS=triton.next_power_of_2(every), AT_ONCE=JOINED, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    turn_values[(pairs, triton.cdiv(rows, 16), triton.cdiv(value_width, CHUNK))](
        joined, batch.pairs, output, heads, value_width, **sizes, ROW_BLOCK=16, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    if newest:
        receive[(pairs, triton.cdiv(newest, NEWEST_BLOCK))](
            new_logits, ends, received, newest, **sizes, BLOCK=NEWEST_BLOCK, num_warps=2,
        )  # fmt: skip
    return output, received


def _splits(blocks: int, others: int, requested: int | None) -> tuple[int, int]:
    """Return the number of splits of dense tokens and blocks per split, if `others` programs have as many."""
    if not blocks:
        return 0, 0
    needed = min(MAX_DENSE_SPLITS, triton.cdiv(PROGRAMS, others), triton.cdiv(blocks, BLOCKS_PER_SPLIT))
    per_split = triton.cdiv(blocks, needed if requested is None else requested)
    return triton.cdiv(blocks, per_split), per_split
