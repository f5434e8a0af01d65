"""Attention of a few new queries over a pruned key cache on the CPU: passes tensors, by address, to the compiled loops
of :mod:`grace_opt.kernels.cache.decode.cpu`.

`grace_opt.kernels.cache.decode.reference` defines the result; the parameters are those of
:mod:`grace_opt.kernels.cache.decode.gpu`. Decoding reads every stored key and value once and computes little with them.
All threads read, even if one sequence has fewer heads than there are threads, and each number is read once for the
whole group of query heads.

When: on a CPU, in float32, while decoding, if no gradients, dropout or attention weights are needed;
`unsupported_reason` says why not. Pruned keys are read fastest if each token's channels are adjacent. The very first
call compiles (some seconds); the first call of each later process loads the compiled code (some tenths of a second).
"""

from __future__ import annotations

import math
from array import array
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ....errors import CacheError
from ..._shared.switches import LLVM, is_off
from ..._shared.threads import call_in_threads
from .checks import check_lengths, kind_of_mask
from .forms import BOOL, BY_CHANNEL, BY_TOKEN, LANES, PACKED, ROWS
from .packed import ENTRIES, Packed, PackedKeys, PackedValues, element_of

#: Most query rows (query heads per KV head times new tokens); a matrix library is faster well below this.
MAX_ROWS = 512
#: Approximate number of tasks to share among threads, and the fewest columns of a task.
TASKS = 64
LEAST_COLUMNS = 128
#: If fewer numbers are read, waking other threads takes longer than it saves.
ALONE_BELOW = 2**17
_CPU = torch.device("cpu")
#: The form of what is not packed.
NO_FORM = [0] * 6


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
    tensors = (query, pruned_keys, sink_keys, tail_keys, old_values, tail_values)
    if is_off(LLVM):
        return f"{LLVM}=0 turns off what is written as LLVM instructions"
    devices, types = {t.device for t in tensors}, {t.dtype for t in tensors}
    if devices != {_CPU}:
        return f"tensors are on {', '.join(sorted(map(str, devices)))}; they must all be on the CPU"
    if types != {torch.float32}:
        return f"queries, keys and values are {', '.join(sorted(map(str, types)))}; they must all be float32"
    for stored in (pruned_keys, old_values):
        if isinstance(stored, Packed) and stored.parameters != torch.float32:
            return f"scales and zero points are {stored.parameters}; they must be float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are requested, and the kernel has none"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, and cannot look into the kernel"
    rows = query.shape[1] // pruned_keys.shape[1] * query.shape[2]
    if rows > MAX_ROWS:
        return f"{rows} query rows share a KV head; at most {MAX_ROWS} is possible"
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
    splits: int | None = None,
) -> Tensor:
    """Compute attention over sinks, pruned keys and a dense tail.

    Parameters
    ----------
    query : Tensor
        ``(B, H_q, L, d)`` in float32, as all keys and values, ``L`` new tokens at the end of the sequence.
    pruned_keys : Tensor or PackedKeys
        ``(B, H, S_p, d')``. A view is read in place if its channels, or each channel's tokens, are adjacent; otherwise
        it is copied, which takes longer than all else. Packed keys are read in place.
    kept_indices : Tensor
        ``(B, H, d')`` int64: the channels of the pruned keys.
    sink_keys, tail_keys : Tensor
        ``(B, H, s, d)`` and ``(B, H, S_t, d)``. Any of s, S_p and S_t may be zero, but not all. Views of keys and
        values are read in place if channels are adjacent.
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
    splits : int or None
        Number of splits that each head's columns are cut into, for measurements; None chooses from the shapes.

    Returns
    -------
    Tensor
        ``(B, L, H_q, d_v)``, the same for any number of threads.

    Raises
    ------
    CacheError
        If there is an `unsupported_reason`, no token is stored, or shapes do not match.
    """
    reason = unsupported_reason(query, pruned_keys, sink_keys, tail_keys, old_values, tail_values)
    if reason is not None:
        raise CacheError(f"the compiled decoding kernel cannot be used: {reason}; use pruned_attention")
    _check_shapes(query, pruned_keys, kept_indices, sink_keys, tail_keys, old_values, tail_values)
    batch, query_heads, length, width = query.shape
    heads, pruned, kept_count = pruned_keys.shape[1:]
    sinks, tail, value_width = sink_keys.shape[2], tail_keys.shape[2], tail_values.shape[3]
    total = sinks + pruned + tail
    output = query.new_empty(batch, length, query_heads, value_width)
    if output.numel() == 0:
        return output

    pairs, group, rows = batch * heads, query_heads // heads, query_heads // heads * length
    if splits is None:
        splits = min(-(-TASKS // pairs), -(-total // LEAST_COLUMNS))
    columns = -(-total // splits)
    splits = -(-total // columns)
    kind, mask, mask_place = _read_mask(attention_mask, query, total, causal)
    # All tensors are kept alive until the loops are done: they get only addresses.
    stored = [_rowwise(t) for t in (sink_keys, tail_keys, tail_values)]
    layout, narrow, narrow_place, key_form = _read_keys(pruned_keys)
    old, old_place, value_form = _read_values(old_values)
    kept_indices = kept_indices.to(torch.int64)
    steps = kept_indices.stride()
    inner, outer = scales_of(width**-0.5 if scaling is None else scaling, softcap)
    scales = array("f", [float(inner), float(outer), float(softcap is not None)])
    tasks, padded_rows, wide = pairs * splits, -(-rows // ROWS) * ROWS, -(-value_width // (2 * LANES)) * 2 * LANES
    of_ends = -(-tasks * rows // LANES) * LANES
    workspace = torch.empty(2 * of_ends + tasks * padded_rows * wide, dtype=torch.float32, device="cpu")

    places = [*_place(query), kept_indices.data_ptr(), 8 * steps[0], 8 * steps[1], 0, 8 * steps[2]]
    places += [*_place(stored[0]), *narrow_place, *_place(stored[1]), *old_place, *_place(stored[2]), *mask_place]
    sizes = [heads, group, length, width, kept_count, value_width, sinks, pruned, tail, splits, columns, layout, kind]
    sizes += key_form + value_form
    ends_address = workspace.data_ptr()
    entries = [0, 0, 0, scales.buffer_info()[0], ends_address, ends_address + 4 * of_ends, ends_address + 8 * of_ends]
    entries += [tasks, rows, padded_rows, wide, output.data_ptr()]
    data = array("q", [*entries, 0, *places, *sizes])
    address, taken = data.buffer_info()[0], len(entries)
    for number, place in enumerate((taken, taken + 1, taken + 1 + len(places))):
        data[number] = address + place * data.itemsize

    from .cpu import attend_at, attend_packed_at, join_at

    in_few_bits = isinstance(pruned_keys, Packed) or isinstance(old_values, Packed)
    attend = attend_packed_at if in_few_bits else attend_at
    call_in_threads(attend, address, tasks, alone=pairs * total * (width + value_width) < ALONE_BELOW)
    join_at(address)
    del mask, narrow, old, stored, scales, workspace
    return output


def _check_shapes(
    query: Tensor,
    pruned_keys: Tensor | PackedKeys,
    kept_indices: Tensor,
    sink_keys: Tensor,
    tail_keys: Tensor,
    old_values: Tensor | PackedValues,
    tail_values: Tensor,
) -> None:
    """Check shapes: the kernel reads by address, so a tensor that is too small must not get there."""
    batch, query_heads, _, width = query.shape
    heads, pruned, kept_count = pruned_keys.shape[1:]
    sinks, tail, value_width = sink_keys.shape[2], tail_keys.shape[2], tail_values.shape[3]
    check_lengths(sinks, pruned, tail, old_values, tail_values)
    expected = {
        "pruned_keys": (pruned_keys, (batch, heads, pruned, kept_count)),
        "kept_indices": (kept_indices, (batch, heads, kept_count)),
        "sink_keys": (sink_keys, (batch, heads, sinks, width)),
        "tail_keys": (tail_keys, (batch, heads, tail, width)),
        "old_values": (old_values, (batch, heads, sinks + pruned, value_width)),
        "tail_values": (tail_values, (batch, heads, tail, value_width)),
    }
    for name, stored in (("pruned_keys", pruned_keys), ("old_values", old_values)):
        if isinstance(stored, Packed):
            token_groups = stored.shape[2] // (stored.group_size if isinstance(stored, PackedKeys) else 1)
            expected[f"{name}.table"] = (stored.table, (batch, stored.table.shape[1], ENTRIES))
            expected[f"{name}.owners"] = (stored.owners, (token_groups,))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise CacheError(
                f"{name} has shape {tuple(tensor.shape)}; with the other tensors' shapes it must be {shape}"
            )
    if query_heads % heads:
        raise CacheError(f"{query_heads} query heads cannot share {heads} KV heads; their number must be a multiple")


def _read_values(values: Tensor | PackedValues) -> tuple[Tensor | PackedValues, list[int], list[int]]:
    """Return what is read of the old values and must stay alive, its place, and what packed values look like."""
    if isinstance(values, PackedValues):
        return values, _table_place(values), [1, *_form(values)]
    rows = _rowwise(values)
    return rows, _place(rows), [0, *NO_FORM]


def _form(packed: Packed) -> list[int]:
    """Return what `cpu.attend` says of packed keys or values."""
    element, rows = element_of(packed.bits)
    lowest, higher = ((rows - 1) * packed.bits, -packed.bits) if packed.high_first else (0, packed.bits)
    return [packed.group_size, packed.bits, element.itemsize, lowest, higher, int(packed.zero_in_levels)]


def _table_place(packed: Packed) -> list[int]:
    """Address and step of a sequence; address of the owners."""
    return [packed.table.data_ptr(), 8 * packed.table.stride(0), 0, packed.owners.data_ptr(), 0]


def _read_keys(keys: Tensor | PackedKeys) -> tuple[int, Tensor | PackedKeys, list[int], list[int]]:
    """Return the layout of pruned keys, what is read and must stay alive, its place, and the form of packed keys."""
    if isinstance(keys, PackedKeys):
        return PACKED, keys, _table_place(keys), _form(keys)
    if keys.shape[3] > 1 and keys.stride(3) != 1 and (keys.stride(2) == 1 or keys.shape[2] == 1):
        return BY_CHANNEL, keys, _place(keys), NO_FORM
    rows = _rowwise(keys)
    return BY_TOKEN, rows, _place(rows), NO_FORM


def _read_mask(
    attention_mask: Tensor | None, query: Tensor, total: int, causal: bool
) -> tuple[int, Tensor | None, list[int]]:
    """Kind of mask, the tensor that is read, and its place, with steps of zero where it is broadcast."""
    kind = kind_of_mask(attention_mask, query, total, causal)
    if attention_mask is None:
        return kind, None, [0] * 5
    mask = attention_mask if kind == BOOL else attention_mask.detach().to(torch.float32)
    address, *steps = _place(mask)
    return kind, mask, [address, *(0 if n == 1 else step for n, step in zip(mask.shape, steps, strict=True))]


def _rowwise(tensor: Tensor) -> Tensor:
    """Return the tensor, copied unless the numbers of its last dimension are adjacent."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _place(tensor: Tensor) -> list[int]:
    """Address and strides, in bytes."""
    size = tensor.element_size()
    return [tensor.data_ptr(), *(size * step for step in tensor.stride())]


@lru_cache
def scales_of(scaling: float, softcap: float | None) -> tuple[np.float32, np.float32]:
    """Return the factor of queries that makes logits powers of two (with softcap, of e²), and that of capped logits."""
    to_powers_of_two = math.log2(math.e)
    if softcap is None:
        return np.float32(scaling * to_powers_of_two), np.float32(1)
    return np.float32(2 * scaling / softcap * to_powers_of_two), np.float32(softcap * to_powers_of_two)
