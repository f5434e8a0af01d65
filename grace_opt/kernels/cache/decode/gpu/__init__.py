r"""Attention of a few new queries over a pruned key cache on the GPU, in two kernels without logits in memory.

`grace_opt.kernels.cache.decode.reference` defines the result: one softmax over the columns in stored order (dense
sinks, pruned keys, dense tail), times the values. Decoding reads every stored key and value once and computes little
with them, so a kernel that reads only the kept channels, once, is as fast as the memory allows.

1. The tokens are cut into blocks that never span two regions, and the blocks are divided into equal splits. One program
   per (sequence and KV head, split) holds the queries of the whole group, gathers their kept channels once, and
   processes its split with a running maximum :math:`m`, sum :math:`l = \sum_j e^{x_j - m}` and product
   :math:`a = \sum_j e^{x_j - m} v_j` in float32.
2. The splits are combined: :math:`M = \max_r m_r`, output :math:`\sum_r e^{m_r - M} a_r / \sum_r e^{m_r - M} l_r`.

Internally, logits are in powers of two (times :math:`\log_2 e`). A column that a mask hides has the smallest float32
instead of minus infinity, so a row that sees nothing gets the mean of all values, as in the reference, and not NaN.

When: on a GPU, while decoding, if no gradients, dropout or attention weights are needed; `unsupported_reason` says why
not. Measure there whether it is faster. Nothing waits for the device, and the division of work depends only on shapes.
A row of a pruned key that is not a multiple of 16 bytes is read in small parts: numbers of kept channels that are
multiples of 8 are read fastest.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023), for splitting along the tokens; Milakov and
Gimelshein (arXiv 1805.02867) for the running softmax. Regions and kept channels as in ThinK (arXiv 2407.21018).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .....errors import CacheError
from ..checks import check_lengths, kind_of_mask
from ..forms import BOOL
from ..packed import Packed, PackedKeys, PackedValues, element_of
from .attend import LOG2E, attend_split, join_splits

#: Widest head, of keys and of values, that one program holds.
MAX_WIDTH = 256
#: Most query rows (query heads per KV head times new tokens) that one program holds.
MAX_ROWS = 64
#: Most bytes of queries, padded, that one program holds twice: whole, and the kept channels.
QUERY_BYTES = 16 * 1024
#: Approximate largest size of a block of keys and values, in bytes: two fit in the shared memory of small GPUs.
BLOCK_BYTES = 32 * 1024
#: Approximate number of programs to start: several for each multiprocessor of a large GPU.
PROGRAMS = 512
#: Fewest blocks in a split if there are several, and most splits per head.
BLOCKS_PER_SPLIT = 4
MAX_SPLITS = 64

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_PARAMETERS = dict(zip(_DTYPES, (tl.float16, tl.bfloat16, tl.float32), strict=True))


def unsupported_reason(
    query: Tensor,
    pruned_keys: Tensor | PackedKeys,
    sink_keys: Tensor,
    tail_keys: Tensor,
    old_values: Tensor | PackedValues,
    tail_values: Tensor,
) -> str | None:
    """Return why :func:`decode_attention` does not support these tensors, or None if it does.

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
    if (held := padded(rows) * padded(width) * query.element_size()) > QUERY_BYTES:
        return (
            f"{rows} query rows of width {width} take {held} bytes of {query.dtype}; at most {QUERY_BYTES} is possible"
        )
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, *stored)):
        return "gradients are requested, and the kernels have none"
    if not query.is_cuda and not _INTERPRETED:
        return f"tensors are on {query.device}; a GPU is needed, or TRITON_INTERPRET=1 before triton is imported"
    return None


def decode_attention(
    query: Tensor,
    pruned_keys: Tensor | PackedKeys,
    kept_indices: Tensor,
    sink_keys: Tensor,
    tail_keys: Tensor,
    old_values: Tensor | PackedValues,
    tail_values: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    *,
    block: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute attention over sinks, pruned keys and a dense tail.

    Parameters
    ----------
    query : Tensor
        ``(B, H_q, L, d)`` in float16, bfloat16 or float32, ``L`` new tokens at the end of the sequence.
    pruned_keys : Tensor or PackedKeys
        ``(B, H, S_p, d')``, of the query's type as all keys and values. Any strides: views and packed keys are read in
        place; packed keys are converted to the query's type on chip.
    kept_indices : Tensor
        ``(B, H, d')`` int64: the channels of the pruned keys.
    sink_keys, tail_keys : Tensor
        ``(B, H, s, d)`` and ``(B, H, S_t, d)``. Any of s, S_p and S_t may be zero, but not all.
    old_values : Tensor or PackedValues
        ``(B, H, s + S_p, d_v)``.
    tail_values : Tensor
        ``(B, H, S_t, d_v)``.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, L, s + S_p + S_t)``, columns in stored order: bool (True attends) or additive. None means
        causal if `causal` is true, else nothing is hidden.
    scaling : float or None
        Of the logits; None means ``d ** -0.5``.
    softcap : float or None
        Logits become ``softcap * tanh(logits / softcap)`` before the mask.
    causal : bool
        What ``attention_mask=None`` means.
    block, splits : int or None
        Tokens per block (a power of two, at least 16) and splits per head, for measurements; None chooses from the
        shapes.

    Returns
    -------
    Tensor
        ``(B, L, H_q, d_v)``, of the query's type.

    Raises
    ------
    CacheError
        If there is an `unsupported_reason`, no token is stored, or the mask has another shape.
    """
    reason = unsupported_reason(query, pruned_keys, sink_keys, tail_keys, old_values, tail_values)
    if reason is not None:
        raise CacheError(f"the decoding kernel cannot be used: {reason}; use pruned_attention")
    batch, query_heads, length, width = query.shape
    heads, pruned, kept_count = pruned_keys.shape[1:]
    sinks, tail, value_width = sink_keys.shape[2], tail_keys.shape[2], tail_values.shape[3]
    group, total = query_heads // heads, sinks + pruned + tail
    check_lengths(sinks, pruned, tail, old_values, tail_values)
    output = query.new_empty(batch, length, query_heads, value_width)
    if output.numel() == 0:
        return output
    kind, mask, mask_strides = read_mask(attention_mask, query, total, causal)

    kept_block, block_width, value_block = (padded(n) for n in (kept_count, width, value_width))
    if block is None:
        block = _block_size(max(block_width, kept_block) + value_block, query.element_size())
        if isinstance(pruned_keys, PackedKeys):
            block = min(block, padded(pruned_keys.group_size))
    pruned_blocks, blocks_per_group = triton.cdiv(pruned, block), 1
    if isinstance(pruned_keys, PackedKeys):
        blocks_per_group = triton.cdiv(pruned_keys.group_size, block)
        pruned_blocks = pruned // pruned_keys.group_size * blocks_per_group
    blocks = triton.cdiv(sinks, block) + pruned_blocks + triton.cdiv(tail, block)
    if splits is None:
        splits = min(MAX_SPLITS, triton.cdiv(PROGRAMS, batch * heads), triton.cdiv(blocks, BLOCKS_PER_SPLIT))
    blocks_per_split = triton.cdiv(blocks, splits)
    splits = triton.cdiv(blocks, blocks_per_split)

    scaling = width**-0.5 if scaling is None else scaling
    if softcap is None:
        inner, outer = scaling * LOG2E.value, 1.0
    else:  # tanh(x) = 1 - 2 / (e^2x + 1)
        inner, outer = 2 * scaling / softcap * LOG2E.value, softcap * LOG2E.value

    rows = group * length
    largest, sums = query.new_empty(2, batch * heads, splits, rows, dtype=torch.float32)
    products = query.new_empty(batch * heads, splits, rows, value_width, dtype=torch.float32)
    row_block = padded(rows)
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        attend_split[(batch * heads, splits)](
            query, *query.stride(), *_read(pruned_keys), kept_indices, *kept_indices.stride(),
            sink_keys, *sink_keys.stride(), tail_keys, *tail_keys.stride(),
            *_read(old_values), tail_values, *tail_values.stride(), mask, *mask_strides,
            largest, sums, products, heads, width, kept_count, value_width, sinks, pruned, tail, blocks_per_split,
            float(inner), float(outer),
            GROUP=group, LENGTH=length, MASK=kind, SOFTCAP=softcap is not None,
            WIDEN=_INTERPRETED and query.dtype == torch.bfloat16,
            ROW_BLOCK=row_block, BLOCK=block, WIDTH=block_width, KEPT=kept_block, VALUE_WIDTH=value_block,
            BLOCKS_PER_GROUP=blocks_per_group, **_form("KEY", pruned_keys), **_form("VALUE", old_values),
            num_warps=4 if row_block <= 32 else 8, num_stages=_stages(query.dtype, pruned_keys, old_values),
        )  # fmt: skip
        join_splits[(batch * heads * rows,)](
            largest, sums, products, output, splits, heads, value_width,
            GROUP=group, LENGTH=length, SPLITS=triton.next_power_of_2(splits), VALUE_WIDTH=value_block, num_warps=4,
        )  # fmt: skip
    return output


def _read(stored: Tensor | Packed) -> tuple[Any, ...]:
    """Return what is read of pruned keys or old values: numbers or table, owners (or any tensor), strides."""
    if isinstance(stored, Packed):
        return stored.table, stored.owners, stored.table.stride(0), 0, 0, 0
    return stored, stored, *stored.stride()


def _form(name: str, stored: Tensor | Packed) -> dict[str, Any]:
    """The kernel's constants for keys or values."""
    if isinstance(stored, Packed):
        form = stored.group_size, stored.bits, stored.high_first, stored.zero_in_levels, _PARAMETERS[stored.parameters]
    else:
        form = 1, 8, False, False, tl.float32
    names = "SIZE", "BITS", "HIGH_FIRST", "ZERO_IN_LEVELS", "PARAMETERS"
    constants = {f"{name}_{field}": value for field, value in zip(names, form, strict=True)}
    return {f"PACKED_{name}S": isinstance(stored, Packed), **constants}


def read_mask(
    attention_mask: Tensor | None, query: Tensor, total: int, causal: bool
) -> tuple[int, Tensor, tuple[int, ...]]:
    """Kind of mask, the tensor to read (any, if none is) and its strides, zero where it is broadcast."""
    kind = kind_of_mask(attention_mask, query, total, causal)
    if attention_mask is None:
        return kind, query, (0, 0, 0, 0)
    sizes = zip(attention_mask.shape, attention_mask.stride(), strict=True)
    read = attention_mask.view(torch.uint8) if kind == BOOL else attention_mask
    return kind, read, tuple(0 if n == 1 else step for n, step in sizes)


def padded(width: int) -> int:
    """The next power of two from 16 on: what a matrix product of Triton takes."""
    return max(16, 1 << (width - 1).bit_length())


def _block_size(channels: int, itemsize: int) -> int:
    """Tokens per block, so that a block of keys and values, padded, fits `BLOCK_BYTES`."""
    block = 128
    while block > 16 and block * channels * itemsize > BLOCK_BYTES:
        block //= 2
    return block


def _stages(dtype: torch.dtype, *stored: Tensor | Packed) -> int:
    """Blocks that are on chip at once: one in float32 where levels are in int32, as two do not fit on small GPUs."""
    packed = (numbers for numbers in stored if isinstance(numbers, Packed))
    return 1 if dtype == torch.float32 and any(element_of(numbers.bits)[0] == torch.int32 for numbers in packed) else 2


#: Whether triton was imported with TRITON_INTERPRET=1: numpy does the work, on the CPU, and multiplies no bfloat16.
_INTERPRETED = not isinstance(attend_split, triton.JITFunction)
