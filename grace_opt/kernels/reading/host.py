"""Attention over few of the stored tokens on the CPU: passes tensors, by address, to the compiled loop of
:mod:`grace_opt.kernels.reading.cpu`.

When: on a CPU, in float32, for one new token, without softcap, gradients or attention weights; `unsupported_reason`
says why not. Keys are read in place if channels are adjacent.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...errors import CacheError
from .._shared.switches import LLVM, is_off
from .._shared.threads import call_in_threads
from ..decode.checks import check_lengths, kind_of_mask
from ..decode.forms import BOOL
from .reference import Few
from .units import FirstChannels, PageRanges, Units

#: Most query heads of a KV head.
MAX_GROUP = 64
#: If fewer numbers are read, waking other threads takes longer than it saves.
ALONE_BELOW = 2**17


def unsupported_reason(
    query: Tensor, keys: Tensor, *others: Tensor, mask: Tensor | None, softcap: float | None, units: Units
) -> str | None:
    """Return why `read_attention` does not support these tensors, or None if it does.

    Parameters
    ----------
    query, keys, *others : Tensor
        What is read, as there.
    mask, softcap, units
        As there.
    """
    tensors = (query, keys, *others, units.reach)
    if is_off(LLVM):
        return f"{LLVM}=0 turns off what is written as LLVM instructions"
    if any(t.device.type != "cpu" for t in tensors):
        return "tensors are not on the CPU"
    if any(t.dtype != torch.float32 for t in tensors):
        return f"{', '.join(sorted({str(t.dtype) for t in tensors}))}: all must be float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are asked for, and the kernel has none"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, and cannot look into the kernel"
    if softcap is not None or query.shape[2] != 1:
        return "logits are capped, or there are several new tokens"
    if query.shape[1] // keys.shape[1] > MAX_GROUP:
        return f"more than {MAX_GROUP} query heads share a KV head"
    if mask is not None and mask.dtype != torch.bool:
        return "the mask is additive"
    return None


def read_attention(
    query: Tensor,
    keys: Tensor,
    kept_indices: Tensor,
    sink_keys: Tensor,
    tail_keys: Tensor,
    old_values: Tensor,
    tail_values: Tensor,
    units: Units,
    least: Tensor,
    most: int,
    epsilon: float | None = None,
    top_p: float | None = None,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> Few:
    """Compute what `grace_opt.kernels.reading.reference.attention` defines, whose parameters these are.

    Raises
    ------
    CacheError
        If there is an `unsupported_reason`, or shapes do not match.
    """
    stored = sink_keys, tail_keys, old_values, tail_values
    reason = unsupported_reason(query, keys, *stored, mask=attention_mask, softcap=softcap, units=units)
    if reason is not None:
        raise CacheError(f"the compiled reading kernel cannot be used: {reason}; use its reference")
    batch, query_heads, _, width = query.shape
    heads, old, kept = keys.shape[1:]
    sinks, tail, value_width, group = sink_keys.shape[2], tail_keys.shape[2], tail_values.shape[3], query_heads // heads
    _check_shapes(query, keys, kept_indices, *stored, units, least)
    # All tensors are kept alive until the kernel is done: it gets only their addresses.
    rowwise = [_rowwise(t) for t in (query, sink_keys, keys, tail_keys, old_values, tail_values)]
    kept_indices, counts = kept_indices.to(torch.int64).contiguous(), units.counts.to(torch.int32).contiguous()
    if isinstance(units, PageRanges):
        lead, pair = 0, [_rowwise(units.lower), _rowwise(units.upper)]
        lower, upper = (_place(t) for t in pair)
    else:
        lead, pair = units.lead, [units.norms.float().contiguous(), units.mean.float().contiguous()]
        lower, upper = [*_place(pair[0]), 0], [*_place(pair[1])[:3], 0, 4]
        lower[3] = 4
    reach = units.reach.contiguous()
    kind = kind_of_mask(attention_mask, query, sinks + old + tail, causal=False)
    mask_place = [0] * 5
    if attention_mask is not None:
        address, *steps = _place(attention_mask)
        broadcast = zip(attention_mask.shape, steps, strict=True)
        mask_place = [address, *(0 if n == 1 and place < 3 else step for place, (n, step) in enumerate(broadcast))]
    assert kind != BOOL or attention_mask is not None
    places = np.array(
        [
            _place(rowwise[0]),
            [kept_indices.data_ptr(), 8 * kept_indices.stride(0), 8 * kept_indices.stride(1), 0, 8],
            *(_place(t) for t in rowwise[1:]),
            mask_place,
            lower,
            upper,
            [counts.data_ptr(), 4 * counts.stride(0), 0, 4, 0],
            [*_place(reach), 0],
        ],
        np.int64,
    )
    sizes = np.array(
        [heads, group, width, kept, value_width, sinks, old, tail, units.units, units.size, units.first, lead, kind],
        np.int64,
    )
    scale = width**-0.5 if scaling is None else scaling
    factors = np.array([scale, -1.0 if epsilon is None else epsilon, -1.0 if top_p is None else top_p], np.float64)
    starts = least.to(torch.int64).contiguous()
    output = query.new_empty(batch, 1, query_heads, value_width)
    bound = query.new_empty(batch, query_heads, dtype=torch.float64)
    tokens = query.new_empty(batch, heads, dtype=torch.int64)
    if output.numel():
        from .cpu import attend_few_at

        taken = np.zeros(1, np.int64)
        addresses = [taken.ctypes.data, places.ctypes.data, sizes.ctypes.data, factors.ctypes.data]
        addresses += [t.data_ptr() for t in (starts, output, bound, tokens)]
        data = np.array([*addresses, batch, query_heads, value_width, heads], np.int64)
        read = batch * heads * (old + tail) * (kept + value_width)
        call_in_threads(attend_few_at, data, batch * heads, alone=read < ALONE_BELOW)
    del rowwise, pair, counts, reach, starts
    return Few(output, bound, tokens)


def _check_shapes(
    query: Tensor,
    keys: Tensor,
    kept_indices: Tensor,
    sink_keys: Tensor,
    tail_keys: Tensor,
    old_values: Tensor,
    tail_values: Tensor,
    units: Units,
    least: Tensor,
) -> None:
    """Check shapes: the kernel reads by address, so a tensor that is too small must not get there."""
    batch, query_heads, _, width = query.shape
    heads, old, kept = keys.shape[1:]
    sinks, tail, value_width = sink_keys.shape[2], tail_keys.shape[2], tail_values.shape[3]
    check_lengths(sinks, old, tail, old_values, tail_values)
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "keys": (keys, (batch, heads, old, kept)),
        "kept_indices": (kept_indices, (batch, heads, kept)),
        "sink_keys": (sink_keys, (batch, heads, sinks, width)),
        "tail_keys": (tail_keys, (batch, heads, tail, width)),
        "old_values": (old_values, (batch, heads, sinks + old, value_width)),
        "tail_values": (tail_values, (batch, heads, tail, value_width)),
        "counts": (units.counts, (batch, units.units)),
        "reach": (units.reach, (batch, heads, kept)),
        "least": (least, (batch,)),
    }
    if isinstance(units, FirstChannels):
        expected["norms"] = (units.norms, (batch, heads, old))
        expected["mean"] = (units.mean, (batch, heads, kept - units.lead))
    else:
        ranges = batch, heads, -(-max(old - units.first, 0) // units.size) + 1, kept
        expected |= {"lower": (units.lower, ranges), "upper": (units.upper, ranges)}
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise CacheError(f"{name} has shape {tuple(tensor.shape)} and should have {shape}, to go with the others")
    if query_heads % heads:
        raise CacheError(f"{query_heads} query heads cannot share {heads} KV heads; their number must be a multiple")


def _rowwise(tensor: Tensor) -> Tensor:
    """The tensor, copied unless the numbers of its last dimension lie side by side."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


def _place(tensor: Tensor) -> list[int]:
    """Address and strides, in bytes."""
    size = tensor.element_size()
    return [tensor.data_ptr(), *(size * step for step in tensor.stride())]
