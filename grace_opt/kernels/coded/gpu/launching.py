"""Start the programs of :mod:`grace_opt.kernels.coded.gpu`, which says what they compute: sizes, room, launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...decode.gpu import padded
from .attend import attend_coded_run
from .batch import TYPES, Batch
from .coded import add_coded_values
from .joining import join_coded_runs, receive, turn_queries, turn_values

#: Most query rows of one program, and the largest number of dense queries, and of dense keys of a block, padded.
ROW_BLOCK, QUERY_NUMBERS, BLOCK_NUMBERS = 32, 4 * 1024, 4 * 1024
#: Coded tokens of a block, and the channels of coded tokens, or columns of a basis, that are taken at once.
BLOCK, CHUNK = 64, 32
#: Newest tokens of one program.
NEWEST_BLOCK = 64
#: Approximate number of programs to start: several for each multiprocessor of a large GPU.
PROGRAMS = 512
#: Fewest blocks in a run if there are several runs, and most runs of coded and of dense tokens per head: 64 in all are
#: joined by one program.
BLOCKS_PER_RUN = 4
MAX_CODED_RUNS, MAX_DENSE_RUNS = 56, 8


def launch(
    query: Tensor,
    batch: Batch,
    tail_keys: Tensor,
    tail_values: Tensor,
    books: Tensor,
    newest: int,
    mask: tuple[int, Tensor, tuple[int, ...]],
    factors: tuple[float, float],
    softcap: bool,
    block: int | None,
    runs: int | None,
) -> tuple[Tensor, Tensor]:
    """Return output and attention received; all tensors are on the current device, and as they were checked to be.

    Parameters
    ----------
    query, tail_keys, tail_values, books, newest, block, runs
        As for `grace_opt.kernels.coded.gpu.coded_attention`.
    batch : Batch
    mask : (int, Tensor, tuple of int)
        Its kind, the tensor to read and its strides.
    factors : (float, float)
        What `grace_opt.kernels.decode.host.scales_of` returns.
    softcap : bool
        Whether logits are capped.
    """
    (sequences, query_heads, length, width), (heads, tail) = query.shape, tail_keys.shape[1:3]
    value_width, pairs, group = tail_values.shape[3], sequences * heads, query_heads // heads
    rows, sizes = group * length, {"GROUP": group, "LENGTH": length}
    block_width, value_block = padded(width), padded(value_width)
    widest = max(block_width, value_block)
    row_block = max(16, min(padded(rows), ROW_BLOCK, QUERY_NUMBERS // widest))
    dense_block = max(16, min(64, BLOCK_NUMBERS // widest)) if block is None else block
    block = BLOCK if block is None else block
    row_blocks, chunks, coded_blocks = (
        triton.cdiv(rows, row_block),
        triton.cdiv(value_width, CHUNK),
        batch.blocks(block),
    )
    coded_runs, coded_per_run = _runs(coded_blocks, pairs * row_blocks, MAX_CODED_RUNS, runs)
    dense_blocks = triton.cdiv(batch.sinks, dense_block) + triton.cdiv(tail, dense_block)
    dense_runs, dense_per_run = _runs(dense_blocks, pairs * row_blocks, MAX_DENSE_RUNS, runs)
    every, columns = coded_runs + dense_runs, coded_blocks * block
    # Tensor cores of AMD's GPUs mostly take no TF32.
    precise = query.dtype == torch.float32 or torch.version.hip is not None
    read = {
        "PRECISION": "ieee" if precise else "tf32", "ROW_BLOCK": row_block, "BLOCK": block, "CHUNK": CHUNK,
        "LISTED": batch.listed.shape[2], "UNITS": padded(batch.most), "num_warps": 4 if row_block == 16 else 8,
        "num_stages": 1,  # with more, the compiler keeps what later steps read in registers, and these do not suffice
    }  # fmt: skip

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=query.device)

    output, received = query.new_empty(sequences, length, query_heads, value_width), room(sequences, heads, 3, newest)
    turned, ends, joined = room(pairs, rows, width), room(2, pairs, rows), room(2, pairs, rows, value_width)
    logits, products = room(pairs, rows, columns), room(pairs, every, rows, value_width)
    largest, sums = room(2, pairs, every, rows)
    # Tokens that a sequence does not have receive nothing.
    new_logits = torch.full((pairs, rows, newest), -torch.inf, dtype=torch.float32, device=query.device)
    kind, shown, mask_strides = mask
    turn_queries[(pairs, triton.cdiv(rows, 16), triton.cdiv(width, CHUNK))](
        query, *query.stride(), batch.pairs, turned, heads, width, factors[0], **sizes, ROW_BLOCK=16, CHUNK=CHUNK,
        num_warps=4,
    )  # fmt: skip
    attend_coded_run[(pairs, every, row_blocks)](
        query, *query.stride(), turned, batch.pairs, batch.units, batch.listed, tail_keys, *tail_keys.stride(),
        tail_values, *tail_values.stride(), shown, *mask_strides, books, logits, new_logits, largest, sums, products,
        heads, width, value_width, tail, newest, columns, coded_runs, coded_per_run, dense_per_run, *factors,
        MASK=kind, SOFTCAP=softcap, SINK_TYPE=TYPES[batch.sink_type], DENSE_BLOCK=dense_block, WIDTH=block_width,
        VALUE_WIDTH=value_block, **sizes, **read,
    )  # fmt: skip
    if coded_runs:
        add_coded_values[(pairs, coded_runs, row_blocks * chunks)](
            batch.pairs, batch.units, batch.listed, books, logits, largest, sums, products, value_width, columns,
            every, coded_per_run, ROWS=rows, **read,
        )  # fmt: skip
    join_coded_runs[(pairs, rows)](
        largest, sums, products, joined, ends, every, coded_runs, value_width,
        RUNS=triton.next_power_of_2(every), VALUE_WIDTH=value_block, num_warps=4,
    )  # fmt: skip
    turn_values[(pairs, triton.cdiv(rows, 16), chunks)](
        joined, batch.pairs, output, heads, value_width, **sizes, ROW_BLOCK=16, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    if newest:
        receive[(pairs, triton.cdiv(newest, NEWEST_BLOCK))](
            new_logits, ends, received, newest, **sizes, BLOCK=NEWEST_BLOCK, num_warps=2,
        )  # fmt: skip
    return output, received


def _runs(blocks: int, others: int, most: int, asked: int | None) -> tuple[int, int]:
    """Number of runs and blocks per run, if `others` programs have as many."""
    if not blocks:
        return 0, 0
    wanted = min(most, triton.cdiv(PROGRAMS, others), triton.cdiv(blocks, BLOCKS_PER_RUN))
    per_run = triton.cdiv(blocks, wanted if asked is None else asked)
    return triton.cdiv(blocks, per_run), per_run
