"""Keys and values in a few bits, made and read the plain way, as :mod:`grace_opt.kernels.packed` defines them."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from grace_opt.kernels.packed import PackedKeys, PackedValues


def packed_keys(
    generator: torch.Generator, shape: tuple[int, ...], bits: int, backend: str, group_size: int, **rest: Any
) -> tuple[PackedKeys, Tensor]:
    """Random keys ``(B, H, S, C)``, as `backend` packs them, and the numbers that they stand for, in float64.

    With up to so many `blocks` per sequence, each in tensors of its own; what stands in the rows that fill up the last
    byte is nonsense.
    """
    batch, heads, tokens, channels = shape
    groups = tokens // group_size
    packed, stored = _random(generator, shape, bits, backend, group_size, groups, **rest)
    table, numbers = torch.zeros(batch, groups, 6, dtype=torch.int64), torch.zeros(shape, dtype=torch.float64)
    for b, blocks in enumerate(stored):
        for start, stop, addresses, plane, wide in blocks:
            count = stop - start
            rows = wide[: heads * count * channels].view(heads, count, channels, group_size)
            numbers[b, :, start * group_size : stop * group_size] = rows.mT.reshape(heads, -1, channels)
            entries = [(*addresses, plane, count * channels, n * channels) for n in range(count)]
            table[b, start:stop] = torch.tensor(entries)
    return PackedKeys(**packed, table=table.to(packed["tensors"][0].device)), numbers


def packed_values(
    generator: torch.Generator, shape: tuple[int, ...], bits: int, backend: str, group_size: int, **rest: Any
) -> tuple[PackedValues, Tensor]:
    """As `packed_keys`, of values: in groups of channels, blocks of any number of tokens."""
    batch, heads, tokens, channels = shape
    packed, stored = _random(generator, shape, bits, backend, group_size, tokens, **rest)
    per_token, numbers = channels // group_size, torch.zeros(shape, dtype=torch.float64)
    table, owners = torch.zeros(batch, len(stored[0]), 6, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int32)
    for b, blocks in enumerate(stored):
        for n, (start, stop, addresses, plane, wide) in enumerate(blocks):
            rows = wide[: heads * (stop - start) * per_token]
            numbers[b, :, start:stop] = rows.view(heads, stop - start, channels)
            table[b, n] = torch.tensor((*addresses, plane, (stop - start) * per_token, -start * per_token))
            owners[start:stop] = n
    device = packed["tensors"][0].device
    return PackedValues(**packed, table=table.to(device), owners=owners.to(device)), numbers


def _random(
    generator: torch.Generator,
    shape: tuple[int, ...],
    bits: int,
    backend: str,
    group_size: int,
    units: int,
    *,
    dtype: torch.dtype = torch.float32,
    blocks: int = 1,
    device: str = "cpu",
) -> tuple[dict[str, Any], list[list[Any]]]:
    """Blocks of random levels: first and last of its `units` (tokens, or groups of them), addresses, plane, numbers."""
    batch, high_first, tensors = shape[0], backend == "hqq", []
    borders = sorted({0, units, *torch.randint(units + 1, (blocks - 1,), generator=generator).tolist()})
    stored: list[list[Any]] = [[] for _ in range(batch)]
    for b, (start, stop) in product(range(batch), pairwise(borders)):
        rows = shape.numel() // batch // units * (stop - start) // group_size
        plane = -(-rows * bits // 8)  # so many rows of bytes hold all
        shifts = [8 - (p + 1) * bits if high_first else p * bits for p in range(8 // bits)]
        levels = torch.randint(2**bits, (plane * len(shifts), group_size), generator=generator)
        scale = (torch.randn(len(levels), generator=generator) * 3 / 2**bits).to(dtype)
        zero = torch.randn(len(levels), generator=generator).to(dtype) * (2**bits / 2 if high_first else 1)
        summands = [part << shift for part, shift in zip(levels.split(plane), shifts, strict=True)]
        parts = [t.to(device) for t in (torch.stack(summands).sum(0).to(torch.uint8), scale, zero)]
        tensors += parts
        factor, offset = scale.double()[:, None], zero.double()[:, None]
        wide = factor * (levels - offset) if high_first else factor * levels - offset
        stored[b].append((start, stop, [t.data_ptr() for t in parts], plane, wide))
    names = "shape", "dtype", "parameters", "group_size", "bits", "high_first", "zero_in_levels", "tensors"
    values = shape, dtype, dtype, group_size, bits, high_first, high_first, tuple(tensors)
    return dict(zip(names, values, strict=True)), stored


def numbers_of(packed: PackedKeys | PackedValues) -> Tensor:
    """The numbers that packed keys or values stand for, in float64, one by one as the definition says."""
    by_address = {tensor.data_ptr(): tensor for tensor in packed.tensors}
    numbers, bits, size = torch.zeros(packed.shape, dtype=torch.float64), packed.bits, packed.group_size
    per_token = packed.shape[3] // size
    for b, h, t, c in product(*map(range, packed.shape)):
        if isinstance(packed, PackedKeys):
            (entry, place), row = divmod(t, size), c
        else:
            entry, place, row = packed.owners[t].item(), c % size, t * per_token + c // size
        *addresses, plane, step, first = packed.table[b, entry].tolist()
        levels, scale, zero = (by_address[address] for address in addresses)
        row += h * step + first
        p, position = divmod(row, plane)
        shift = 8 - (p + 1) * bits if packed.high_first else p * bits
        level = levels[position, place].item() >> shift & 2**bits - 1
        factor, offset = scale.flatten()[row].item(), zero.flatten()[row].item()
        numbers[b, h, t, c] = factor * (level - offset) if packed.zero_in_levels else factor * level - offset
    return numbers
