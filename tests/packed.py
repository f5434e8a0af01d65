"""Keys in a few bits, made and read the plain way, as :class:`grace_opt.kernels.packed.PackedKeys` defines them."""

from __future__ import annotations

from itertools import pairwise, product

import torch
from torch import Tensor

from grace_opt.kernels.packed import PackedKeys


def packed_keys(
    generator: torch.Generator,
    shape: tuple[int, ...],
    bits: int,
    backend: str,
    group_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    blocks: int = 1,
    device: str = "cpu",
) -> tuple[PackedKeys, Tensor]:
    """Random keys ``(B, H, S, C)`` and the numbers that they stand for, in float64.

    As `backend` packs, with up to so many blocks per sequence, each in tensors of its own; what stands in the rows that
    fill up the last byte is nonsense.
    """
    batch, heads, tokens, channels = shape
    groups, high_first = tokens // group_size, backend == "hqq"
    table, tensors = torch.zeros(batch, groups, 6, dtype=torch.int64), []
    numbers = torch.zeros(shape, dtype=torch.float64)
    for b in range(batch):
        borders = sorted({0, groups, *torch.randint(groups + 1, (blocks - 1,), generator=generator).tolist()})
        for start, stop in pairwise(borders):
            count = stop - start
            rows = heads * count * channels
            plane = -(-rows * bits // 8)  # so many rows of bytes hold all
            shifts = [8 - (p + 1) * bits if high_first else p * bits for p in range(8 // bits)]
            levels = torch.randint(2**bits, (plane * len(shifts), group_size), generator=generator)
            scale = (torch.randn(len(levels), generator=generator) * 3 / 2**bits).to(dtype)
            zero = torch.randn(len(levels), generator=generator).to(dtype) * (2**bits / 2 if high_first else 1)
            summands = [part << shift for part, shift in zip(levels.split(plane), shifts, strict=True)]
            stored = [t.to(device) for t in (torch.stack(summands).sum(0).to(torch.uint8), scale, zero)]
            tensors += stored
            addresses = [tensor.data_ptr() for tensor in stored]
            table[b, start:stop] = torch.tensor(
                [(*addresses, plane, count * channels, n * channels) for n in range(count)]
            )
            factor, shift = scale.double()[:, None], zero.double()[:, None]
            wide = factor * (levels - shift) if high_first else factor * levels - shift
            wide = wide[:rows].view(heads, count, channels, group_size).transpose(2, 3)
            numbers[b, :, start * group_size : stop * group_size] = wide.reshape(heads, count * group_size, channels)
    form = group_size, bits, high_first, high_first
    return PackedKeys(torch.Size(shape), dtype, dtype, *form, table.to(device), tuple(tensors)), numbers


def numbers_of(packed: PackedKeys) -> Tensor:
    """The numbers that packed keys stand for, in float64, one by one as the definition says."""
    by_address = {tensor.data_ptr(): tensor for tensor in packed.tensors}
    numbers, bits = torch.zeros(packed.shape, dtype=torch.float64), packed.bits
    for b, h, t, c in product(*map(range, packed.shape)):
        group, place = divmod(t, packed.group_size)
        *addresses, plane, step, first = packed.table[b, group].tolist()
        levels, scale, zero = (by_address[address] for address in addresses)
        row = h * step + first + c
        p, position = divmod(row, plane)
        shift = 8 - (p + 1) * bits if packed.high_first else p * bits
        level = levels[position, place].item() >> shift & 2**bits - 1
        factor, offset = scale.flatten()[row].item(), zero.flatten()[row].item()
        numbers[b, h, t, c] = factor * (level - offset) if packed.zero_in_levels else factor * level - offset
    return numbers
