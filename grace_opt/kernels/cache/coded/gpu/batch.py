"""`batch_of`: where all sequences of a batch are, as one table on the GPU, copied there once for many steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..forms import COUNT
from ..table import CodedSequence, Numbers, batched
from .numbers import CHUNKS, EMPTY, PADDING, list_channels

#: Fields of a pair, one head of one sequence: its first unit, how many it has; how many sinks, and how many of these,
#: the last ones, are among the newest tokens; address and step, in numbers, of the sinks' keys, then of their values;
#: addresses of the bases of keys and of values, or 0; address and bytes of the positions of coded tokens, or 0.
FIRST_UNIT, UNIT_COUNT, SINKS, NEWEST_SINKS, SINK_KEYS, SINK_VALUES, KEY_BASIS, VALUE_BASIS = 0, 1, 2, 3, 4, 6, 8, 9
POSITIONS, PAIR_FIELDS = 10, 12
#: Types of queries, of dense tokens and of sinks.
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class Batch(NamedTuple):
    """A batch by address.

    Attributes
    ----------
    pairs, units : Tensor
        On the GPU: ``(B H, PAIR_FIELDS)`` and ``(all units, FIELDS)`` int64.
    slots, chunks : Tensor
        ``(all units, 2, slots)`` and ``(all units, 2, CHUNKS)`` int32: see
        `grace_opt.kernels.cache.coded.gpu.numbers.list_channels`.
    copies : tuple of Tensor
        Those of sinks and bases that `pairs` has addresses of and that had to be copied, to another type or layout.
    sink_type : torch.dtype
        Of the sinks that `pairs` has addresses of.
    counts : tuple of arrays
        Of each sequence, the number of tokens of each unit of a head.
    most, sinks : int
        Most units of a head, and most sinks.
    key : tuple
        What it was made of, but for the table of the first sequence, which keeps it.
    splits_by_size : dict
        What `splits` has returned.
    """

    pairs: Tensor
    units: Tensor
    slots: Tensor
    chunks: Tensor
    copies: tuple[Tensor, ...]
    sink_type: torch.dtype
    counts: tuple[Numbers, ...]
    most: int
    sinks: int
    key: tuple[object, ...]
    splits_by_size: dict[int, Tensor]

    def splits(self, size: int) -> Tensor:
        """Return splits of so many tokens, ``(B, P, 3)`` int32: unit (-1: none), first token in it, and in the head."""
        if size not in self.splits_by_size:
            every = [
                [
                    (unit, first, int(before) + first)
                    for unit, (count, before) in enumerate(zip(counts, np.cumsum(counts) - counts, strict=True))
                    for first in range(0, int(count), size)
                ]
                for counts in self.counts
            ]
            most = max(map(len, every))
            table = np.array([each + [(-1, 0, 0)] * (most - len(each)) for each in every], np.int32)
            self.splits_by_size[size] = torch.from_numpy(table.reshape(len(every), most, 3)).to(self.pairs.device)
        return self.splits_by_size[size]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that were made for it, by name."""
        named = {"pairs": self.pairs, "units": self.units, "slots": self.slots, "chunks": self.chunks}
        named |= {f"splits of {size}": tensor for size, tensor in self.splits_by_size.items()}
        return named | {f"copy{number}": tensor for number, tensor in enumerate(self.copies)}


def batch_of(sequences: Sequence[CodedSequence], newest_sinks: Sequence[int], trellis: bool = False) -> Batch:
    """Return the table of a batch; made once, and again only for other sequences.

    Parameters
    ----------
    sequences : sequence of CodedSequence
        At least one, all with the same number of heads and widths, on the current device.
    newest_sinks : sequence of int
        How many sinks of each, the last ones, are among the newest tokens.
    trellis : bool
        Whether codes are those of a trellis.
    """
    first = sequences[0].table
    places = [tensor.data_ptr() for sequence in sequences for tensor in (sequence.sink_keys, sequence.sink_values)]
    # The first table keeps the batch, which must not keep that table in turn.
    parts = [
        None if part is first else part for sequence in sequences for part in (sequence.table, *sequence.tensors())
    ]
    key = (*places, *newest_sinks, int(trellis), *parts)
    batch: Batch | None = first.on_device[0] if first.on_device else None
    if batch is None or not _same(batch.key, key):
        batch = _made(sequences, newest_sinks, trellis, key)
        first.on_device[:] = [batch]
    return batch


def _same(first: tuple[object, ...], second: tuple[object, ...]) -> bool:
    """Compare tables and tensors as objects: what is in them would have to be read from the device."""
    return len(first) == len(second) and all(
        a is b or (isinstance(a, int) and a == b) for a, b in zip(first, second, strict=True)
    )


def _made(
    sequences: Sequence[CodedSequence], newest_sinks: Sequence[int], trellis: bool, key: tuple[object, ...]
) -> Batch:
    heads = len(sequences[0].sink_keys)
    table = batched([sequence.table for sequence in sequences], heads)
    types = {tensor.dtype for sequence in sequences for tensor in (sequence.sink_keys, sequence.sink_values)}
    dtype = types.pop() if len(types) == 1 and types < TYPES.keys() else torch.float32
    pairs = np.zeros((len(sequences), heads, PAIR_FIELDS), np.int64)
    head, before, copies, counts = np.arange(heads), 0, [], []
    for pair, sequence, newest in zip(pairs, sequences, newest_sinks, strict=True):
        of_head = len(sequence.table.units) // heads
        pair[:, FIRST_UNIT], pair[:, UNIT_COUNT] = before + head * of_head, of_head
        pair[:, SINKS], pair[:, NEWEST_SINKS] = sequence.sink_keys.shape[1], newest
        for field, sinks in ((SINK_KEYS, sequence.sink_keys), (SINK_VALUES, sequence.sink_values)):
            rows = sinks.detach().to(dtype)
            rows = rows if rows.stride(2) == 1 else rows.contiguous()
            pair[:, field] = rows.data_ptr() + rows.element_size() * rows.stride(0) * head
            pair[:, field + 1] = rows.stride(1)
            copies += [] if rows.data_ptr() == sinks.data_ptr() else [rows]
        for field, basis in ((KEY_BASIS, sequence.key_basis), (VALUE_BASIS, sequence.value_basis)):
            if basis is not None:
                own = basis.detach().float().contiguous()
                pair[:, field] = own.data_ptr() + own.element_size() * own.stride(0) * head
                copies += [] if own.data_ptr() == basis.data_ptr() else [own]
        if (places := sequence.positions) is not None:
            pair[:, POSITIONS] = places.data_ptr() + places.itemsize * places.stride(0) * head
            pair[:, POSITIONS + 1] = places.itemsize
        counts.append(sequence.table.units[:of_head, COUNT])
        before += len(sequence.table.units)
    device, count = sequences[0].sink_keys.device, len(table.units)
    both = torch.from_numpy(np.concatenate([pairs.ravel(), table.units.ravel()])).to(device)
    units = both[pairs.size :].view(table.units.shape)
    widths = sequences[0].sink_keys.shape[2], sequences[0].sink_values.shape[2]
    most_slots = triton.next_power_of_2(max(widths) + PADDING)
    slots = torch.full((count, 2, most_slots), EMPTY, dtype=torch.int32, device=device)
    chunks = torch.empty(count, 2, CHUNKS.value, dtype=torch.int32, device=device)
    if count:
        width = triton.next_power_of_2(max(widths))
        sizes = {"WIDTH": width, "SLOTS": most_slots, "TRELLIS": trellis}
        list_channels[(count, 2)](units, slots, chunks, *widths, **sizes, num_warps=4)
    most, most_sinks = max(map(len, counts)), max(sequence.sink_keys.shape[1] for sequence in sequences)
    of_pairs = both[: pairs.size].view(-1, PAIR_FIELDS)
    return Batch(of_pairs, units, slots, chunks, tuple(copies), dtype, tuple(counts), most, most_sinks, key, {})
