"""Attention over few of the stored tokens on the CPU: passes tensors, by address, to the compiled loop of
:mod:`grace_opt.kernels.reading.cpu`.

When: on a CPU, in float32, for one new token, without softcap, gradients or attention weights; `unsupported_reason`
says why not. Keys are read in place if channels are adjacent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import CacheError
from .._shared.switches import LLVM, is_off
from .._shared.threads import call_in_threads
from ..decode.checks import check_lengths, kind_of_mask
from ..decode.forms import BOOL, LANES, ROWS
from .forms import (
    ABOUT,
    BUCKETS,
    CODES,
    COUNTS,
    DONE,
    FIRST_CHOSEN,
    JOINED,
    KEPT,
    LEVELS,
    LOWER,
    MASK,
    MORE_CHOSEN,
    OLD_KEYS,
    OLD_VALUES,
    PLACES,
    QUERY,
    REACH,
    READ,
    REAL,
    SCORED,
    SINK_KEYS,
    STOP,
    TAIL_KEYS,
    TAIL_VALUES,
    UPPER,
)
from .reference import Few, units_at_a_time
from .units import ROOM, FirstChannels, PageRanges, TokenRanges, Units

#: Most query heads of a KV head.
MAX_GROUP = 64
#: Number of pieces, at least, that the work is cut into: some for each thread of a few, whatever their number is.
PIECES = 12
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
    if not all(t.is_cpu and t.dtype == torch.float32 for t in tensors):
        if not all(t.is_cpu for t in tensors):
            return "tensors are not on the CPU"
        return f"{', '.join(sorted({str(t.dtype) for t in tensors}))}: all must be float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are asked for, and the kernel has none"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, and cannot look into the kernel"
    if isinstance(units, TokenRanges):
        return "tokens are coded"
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
    mine = _stored(units, keys, kept_indices, sink_keys, old_values)
    news = [_rowwise(t) for t in (query, tail_keys, tail_values)]
    places = mine.places.copy()
    for row, tensor in zip((QUERY, TAIL_KEYS, TAIL_VALUES), news, strict=True):
        places[row] = _place(tensor)
    kind = kind_of_mask(attention_mask, query, sinks + old + tail, causal=False)
    if attention_mask is not None:
        address, *steps = _place(attention_mask)
        broadcast = enumerate(zip(attention_mask.shape, steps, strict=True))
        places[MASK] = [address, *(0 if n == 1 and place < 3 else step for place, (n, step) in broadcast)]
    assert kind != BOOL or attention_mask is not None
    items = batch * heads
    runs = -(-PIECES // max(items, 1))
    sizes = np.array(
        [
            *(heads, group, width, kept, value_width, sinks, old, tail),
            *(units.units, units.size, units.first, mine.lead, kind, runs),
        ],
        np.int64,
    )
    scale = width**-0.5 if scaling is None else scaling
    factors = np.array([scale, -1.0 if epsilon is None else epsilon, -1.0 if top_p is None else top_p], np.float64)
    starts = torch.stack([least.to(torch.int64), least if epsilon is None else units_at_a_time(units)])
    output = query.new_empty(batch, 1, query_heads, value_width)
    bound = query.new_empty(batch, query_heads, dtype=torch.float64)
    told = np.zeros((items, REAL + runs), np.int64)
    if output.numel():
        from .cpu import attend_few_at

        room, columns, wide = -(-group // ROWS) * ROWS, _rounded(units.units + LANES), _rounded(value_width)
        # In bytes: scores, steps below the first, numbers at each step, what is chosen, numbers of rows, states.
        parts = [4 * room * columns, 2 * columns, 8 * BUCKETS, 8 * columns, 8 * ABOUT * group]
        parts.append(4 * (runs + 1) * (2 * group + room * wide))
        work = torch.empty(items * sum(parts), dtype=torch.uint8, device="cpu")
        at = [work.data_ptr() + items * sum(parts[:number]) for number in range(len(parts))]
        taken = np.zeros(1, np.int64)
        addresses = [each.ctypes.data for each in (taken, places, sizes, factors)]
        addresses += [t.data_ptr() for t in (starts, output, bound)]
        shapes = [SCORED, batch, query_heads, value_width, heads, room, columns, units.units, runs]
        data = np.array([*addresses, *shapes, *at[:5], told.ctypes.data, at[5], wide], np.int64)
        alone = items * (old + tail) * (kept + value_width) < ALONE_BELOW

        def run(phase: int, most: int) -> None:
            taken[0], data[len(addresses)] = 0, phase
            call_in_threads(attend_few_at, data, most, alone=alone)

        run(SCORED, items * runs)
        choose = FIRST_CHOSEN
        while choose == FIRST_CHOSEN or (epsilon is not None and (told[:, DONE] < told[:, STOP]).any()):
            run(choose, items)
            run(READ, items * runs)
            run(JOINED, items)
            choose = MORE_CHOSEN
    del news, mine, starts
    return Few(output, bound, torch.from_numpy(told[:, REAL:].sum(1)).view(batch, heads))


class _Stored(NamedTuple):
    """What is read in every step, by address.

    Attributes
    ----------
    where : tuple
        Addresses and shapes of the tensors that this was made for.
    places : array (14, 5)
        As `grace_opt.kernels.reading.cpu.attend_few` reads them; zeros for what each step brings.
    lead : int
        Number of channels that give scores; 0 for pages.
    alive : list of Tensor
    """

    where: tuple[Any, ...]
    places: npt.NDArray[np.int64]
    lead: int
    alive: list[Tensor]


def _stored(units: Units, keys: Tensor, kept_indices: Tensor, sink_keys: Tensor, old_values: Tensor) -> _Stored:
    """Return it, made once for as long as the tensors stay where they are."""
    given = keys, kept_indices, sink_keys, old_values, units.counts, units.reach
    where = tuple((t.data_ptr(), t.shape, t.stride()) for t in given)
    assert not isinstance(units, TokenRanges)
    found: _Stored | None = units.places.get("found")
    if found is not None and found.where == where:
        return found
    kept, counts = kept_indices.to(torch.int64).contiguous(), units.counts.to(torch.int32).contiguous()
    reach, rows = units.reach.contiguous(), [_rowwise(t) for t in (sink_keys, keys, old_values)]
    places = np.zeros((PLACES, 5), np.int64)
    if isinstance(units, PageRanges):
        lead, pair = 0, [_rowwise(units.lower), _rowwise(units.upper)]
        places[LOWER], places[UPPER] = (_place(t) for t in pair)
    else:
        assert isinstance(units, FirstChannels)
        lead, pair = units.lead, [units.norms.float().contiguous(), units.mean.float().contiguous()]
        pair += [units.codes.contiguous(), units.levels.contiguous()]
        places[CODES], places[LEVELS] = _place(pair[2]), _place(pair[3])
        places[LOWER], places[UPPER] = [*_place(pair[0])[:3], 4, 0], [*_place(pair[1])[:3], 0, 4]
    places[KEPT] = [kept.data_ptr(), 8 * kept.stride(0), 8 * kept.stride(1), 0, 8]
    for row, tensor in zip((SINK_KEYS, OLD_KEYS, OLD_VALUES), rows, strict=True):
        places[row] = _place(tensor)
    places[COUNTS], places[REACH] = [counts.data_ptr(), 4 * counts.stride(0), 0, 4, 0], [*_place(reach), 0]
    # What was given is kept alive as well: as long as it is, nothing else can lie at its address.
    found = _Stored(where, places, lead, [*given, kept, counts, reach, *rows, *pair])
    units.places["found"] = found
    return found


def _rounded(count: int) -> int:
    """Round up to whole pairs of vectors."""
    return -(-count // (2 * LANES)) * 2 * LANES


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
        expected["codes"] = (units.codes, (batch, heads, units.lead, -(-old // ROOM) * ROOM))
        expected["levels"] = (units.levels, (batch, heads, 3, units.lead))
    elif isinstance(units, PageRanges):
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
