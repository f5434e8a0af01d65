"""Attention of a few new queries over coded tokens on the CPU: passes tensors, by address, to the compiled loops of
:mod:`grace_opt.kernels.coded.cpu`.

When: on a CPU, while decoding, if no gradients, dropout or attention weights are needed; `unsupported_reason` says why
not. Numbers are float32 inside, whatever the model's type is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import CacheError
from .._shared.switches import LLVM, is_off
from .._shared.threads import split_batch, torch_team
from ..decode.checks import kind_of_mask
from ..decode.host import scales_of
from .forms import COUNT, LANES, PAIR, ROWS

#: Most query rows (query heads per KV head times new tokens): beyond, making keys and values dense is faster.
MAX_ROWS = 256
#: Columns of an item: logits of four rows then stay in a processor's first cache.
COLUMNS = 1024
#: If fewer numbers are read, waking other threads takes longer than it saves.
ALONE_BELOW = 2**16


class CodedSequence(NamedTuple):
    """The older tokens of one sequence of a batch.

    Attributes
    ----------
    units : array (H, n, 16) int64
        What `grace_opt.kernels.coded.table.units_of` makes.
    sink_keys, sink_values : Tensor
        ``(H, s, d)`` and ``(H, s, d_v)``, dense.
    key_basis, value_basis : Tensor or None
        ``(H, d, d)``: coordinates times these are keys, or values.
    dense_newest : int
        Number of the last dense tokens, sinks and tail, that are among the newest.
    """

    units: npt.NDArray[np.int64]
    sink_keys: Tensor
    sink_values: Tensor
    key_basis: Tensor | None
    value_basis: Tensor | None
    dense_newest: int


def unsupported_reason(query: Tensor, tail_keys: Tensor, tail_values: Tensor) -> str | None:
    """Return why :func:`coded_attention` does not support these tensors, or None if it does.

    Parameters
    ----------
    query, tail_keys, tail_values : Tensor
        As there.
    """
    tensors = query, tail_keys, tail_values
    if is_off(LLVM):
        return f"{LLVM}=0 turns off what is written as LLVM instructions"
    if any(t.device.type != "cpu" for t in tensors):
        devices = ", ".join(sorted({str(t.device) for t in tensors}))
        return f"tensors are on {devices}; they must all be on the CPU"
    if sys.byteorder != "little":
        return "bits lie as on little-endian machines, which this is not"
    if query.dtype == torch.float64:
        return "queries are float64, and the loops compute in float32"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "gradients are asked for, and the loops have none"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing, and cannot look into the loops"
    rows = query.shape[1] // tail_keys.shape[1] * query.shape[2]
    if rows > MAX_ROWS:
        return f"{rows} query rows share a KV head; at most {MAX_ROWS} is possible"
    return None


def coded_attention(
    query: Tensor,
    sequences: Sequence[CodedSequence],
    tail_keys: Tensor,
    tail_values: Tensor,
    books: Tensor,
    newest: int,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute attention over sinks, coded tokens and a dense tail.

    Parameters
    ----------
    query : Tensor
        ``(B, H_q, L, d)``: L new tokens at the end of the sequence.
    sequences : sequence of CodedSequence
        One per sequence of the batch. New queries see all of their tokens.
    tail_keys, tail_values : Tensor
        ``(B, H, S_t, d)`` and ``(B, H, S_t, d_v)``.
    books : Tensor
        ``(9, 256)`` float32: row b has the numbers that codes of b bits stand for.
    newest : int
        Number of tokens, the last ones, whose attention received is returned.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, L, S_t)`` over the tail, bool (True attends) or additive. None means causal if `causal` is
        true, else nothing is hidden.
    scaling : float or None
        Of the logits; None means ``d ** -0.5``.
    softcap : float or None
        Logits become ``softcap * tanh(logits / softcap)`` before the mask.
    causal : bool
        What ``attention_mask=None`` means.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``, the same for any number of threads.
    received : Tensor
        ``(B, H, 2, newest)`` float32: sums over the queries of p and of p², each the mean of the group's heads.
    """
    reason = unsupported_reason(query, tail_keys, tail_values)
    if reason is not None:
        raise CacheError(f"coded tokens cannot be read where they lie: {reason}; make them dense")
    from .cpu import attend, attend_in_team, join, prepare

    (batch, query_heads, length, width), (heads, tail) = query.shape, tail_keys.shape[1:3]
    value_width, pairs = tail_values.shape[3], batch * heads
    rows = query_heads // heads * length
    padded = -(-rows // ROWS) * ROWS
    # All tensors are kept alive until the loops are done: they get only addresses.
    floats = [_rowwise(tensor) for tensor in (query, tail_keys, tail_values)]
    kind, mask, mask_place = _read_mask(attention_mask, query, tail, causal)
    dense, bases, kept = _dense(sequences, floats[1], floats[2])
    items, units = _items(sequences, heads)
    room = _room(max(sequence.units.shape[1] for sequence in sequences), dense)
    inner, outer = scales_of(width**-0.5 if scaling is None else scaling, softcap)

    full = np.zeros((pairs, padded, -(-width // LANES) * LANES), np.float32)
    turned = np.zeros_like(full)
    steps = [4 * step for step in floats[0].stride()]
    sizes = [heads, query_heads // heads, length, width, value_width, kind, room, newest]
    places, sizes_array = np.array([floats[0].data_ptr(), *steps, *bases], np.int64), np.array(sizes, np.int64)
    prepare(places, sizes_array, inner, full, turned)

    count, wide = len(items), -(-value_width // (2 * LANES)) * 2 * LANES
    ends = np.zeros((2, count, padded), np.float32)
    products = np.zeros((count, padded, wide), np.float32)
    logits = np.full((pairs, padded, -(-newest // LANES) * LANES), -np.inf, np.float32)
    taken, mask_places = np.zeros(1, np.int64), np.array(mask_place, np.int64)
    every, book, capped = (mask_places, sizes_array, items, units, dense), books.numpy(), softcap is not None
    state, read = (ends[0], ends[1], products), int(units[:, COUNT].sum()) * (width + value_width)
    team = torch_team()
    if read < ALONE_BELOW:
        attend(taken, *every, book, capped, outer, full, turned, logits, state)
    elif team is not None:
        scales = np.array([capped, outer], np.float32)
        arrays = taken, *every, book, scales, full, turned, logits, ends, products
        numbers = pairs, padded, full.shape[2], logits.shape[2], count, len(units), wide
        team(attend_in_team.address or 0, np.array([*(a.ctypes.data for a in arrays), *numbers], np.int64))
    else:
        split_batch(
            lambda _: attend(taken, *every, book, capped, outer, full, turned, logits, state), (np.arange(count),)
        )
    output = np.empty((batch, length, query_heads, value_width), np.float32)
    received = np.zeros((pairs, 2, logits.shape[2]), np.float32)
    join(places, sizes_array, items, *state, logits, output, received)
    del mask, kept, floats
    found = torch.from_numpy(received[..., :newest]).view(batch, heads, 2, newest)
    return torch.from_numpy(output).to(query.dtype), found


def _rowwise(tensor: Tensor) -> Tensor:
    """Return float32 numbers of which each row is contiguous."""
    tensor = tensor.detach().float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _read_mask(mask: Tensor | None, query: Tensor, tail: int, causal: bool) -> tuple[int, Tensor | None, list[int]]:
    """Return the kind of mask, the tensor to keep alive, and its address and strides."""
    kind = kind_of_mask(mask, query, tail, causal)
    if mask is None:
        return kind, None, [0] * 5
    mask = mask if mask.dtype == torch.bool else mask.float()
    mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], tail)
    return kind, mask, [mask.data_ptr(), *(mask.element_size() * step for step in mask.stride())]


def _dense(
    sequences: Sequence[CodedSequence], keys: Tensor, values: Tensor
) -> tuple[npt.NDArray[np.int64], list[int], list[Tensor]]:
    """Return what is said of each pair's dense tokens, the addresses of bases, and the tensors behind these."""
    found, bases, kept = [], [], []
    for b, sequence in enumerate(sequences):
        sinks = [_rowwise(tensor) for tensor in (sequence.sink_keys, sequence.sink_values)]
        own = [None if basis is None else basis.float().contiguous() for basis in (sequence.key_basis, sequence.value_basis)]
        kept += [*sinks, *(basis for basis in own if basis is not None)]
        for h in range(keys.shape[1]):
            line = [sinks[0].shape[1], keys.shape[2]]
            for tensor in (*sinks, keys[b], values[b]):
                line += [tensor.data_ptr() + 4 * h * tensor.stride(0), 4 * tensor.stride(1)]
            found.append([*line, sequence.dense_newest])
            bases += [0 if basis is None else basis.data_ptr() + 4 * h * basis.stride(0) for basis in own]
    return np.array(found, np.int64), bases, kept


def _items(sequences: Sequence[CodedSequence], heads: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return all items, those of a pair side by side, and all units."""
    items, first = [], 0
    for b, sequence in enumerate(sequences):
        number = sequence.units.shape[1]
        columns = int(sequence.units[0, :, COUNT].sum()) if number else 0
        for h in range(heads):
            items.append([b * heads + h, -1, -1, 0, 0])
            for start in range(0, columns, COLUMNS):
                items.append([b * heads + h, first, first + number, start, min(start + COLUMNS, columns)])
            first += number
    units = [sequence.units.reshape(-1, sequence.units.shape[2]) for sequence in sequences]
    return np.array(items, np.int64), units[0] if len(units) == 1 else np.concatenate(units)


def _room(units: int, dense: npt.NDArray[np.int64]) -> int:
    """Return how many logits of a row an item has at most, each unit's rounded up on both sides."""
    return max(COLUMNS + 2 * PAIR * units, int(dense[:, :2].sum(1).max()) + 2 * LANES)
