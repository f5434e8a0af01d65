"""Keys and values in a few bits, made and read the plain way, as `kernels.cache.decode.packed` defines them."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from grace_opt.kernels.cache.decode.packed import PackedKeys, PackedValues


def packed_keys(
    generator: torch.Generator, shape: tuple[int, ...], bits: int, backend: str, group_size: int, **rest: Any
) -> tuple[PackedKeys, Tensor]:
    """Random keys ``(B, H, S, C)``, as `backend` packs them, and the numbers that they stand for, in float64.

    With up to `blocks` blocks per sequence, each in tensors of its own; what stands in the rows that fill up the last
    byte is nonsense.
    """
    units, channels = shape[2] // group_size, shape[3]
    form, rows = _random(generator, shape, bits, backend, group_size, units, channels, **rest)
    numbers = rows.view(*shape[:2], units, channels, group_size).mT.reshape(shape)
    return PackedKeys(**form), numbers


def packed_values(
    generator: torch.Generator, shape: tuple[int, ...], bits: int, backend: str, group_size: int, **rest: Any
) -> tuple[PackedValues, Tensor]:
    """As `packed_keys`, of values: in groups of channels, blocks of any number of tokens."""
    form, rows = _random(generator, shape, bits, backend, group_size, shape[2], shape[3] // group_size, **rest)
    return PackedValues(**form), rows.view(shape)


def _random(
    generator: torch.Generator,
    shape: tuple[int, ...],
    bits: int,
    backend: str,
    group_size: int,
    units: int,
    rows_per_unit: int,
    *,
    dtype: torch.dtype = torch.float32,
    blocks: int = 1,
    device: str = "cpu",
) -> tuple[dict[str, Any], Tensor]:
    """All of `Packed`, and the numbers of all rows ``(B, H, units * rows_per_unit, group_size)``."""
    batch, heads = shape[:2]
    borders = sorted({0, units, *torch.randint(units + 1, (blocks - 1,), generator=generator).tolist()})
    numbers = torch.zeros(batch, heads, units * rows_per_unit, group_size, dtype=torch.float64)
    table, owners = torch.zeros(batch, len(borders) - 1, 6, dtype=torch.int64), torch.zeros(units, dtype=torch.int32)
    tensors, high_first, element = [], backend == "hqq", torch.int32 if bits == 3 else torch.uint8
    shifts = _shifts(bits, high_first)
    for b, (n, (start, stop)) in product(range(batch), enumerate(pairwise(borders))):
        first, step = start * rows_per_unit, (stop - start) * rows_per_unit
        plane = -(-heads * step // len(shifts))  # rows of bytes, or int32, that hold all
        levels = torch.randint(2**bits, (plane * len(shifts), group_size), generator=generator)
        scale = (torch.randn(len(levels), generator=generator) * 3 / 2**bits).to(dtype)
        zero = torch.randn(len(levels), generator=generator).to(dtype) * (2**bits / 2 if high_first else 1)
        summands = [part << shift for part, shift in zip(levels.split(plane), shifts, strict=True)]
        parts = [t.to(device) for t in (torch.stack(summands).sum(0).to(element), scale, zero)]
        factor, offset = scale.double()[:, None], zero.double()[:, None]
        wide = factor * (levels - offset) if high_first else factor * levels - offset
        numbers[b, :, first : first + step] = wide[: heads * step].view(heads, step, group_size)
        table[b, n] = torch.tensor((*(t.data_ptr() for t in parts), plane, step, -first))
        owners[start:stop] = n
        tensors += parts
    form = {
        "shape": torch.Size(shape),
        "dtype": dtype,
        "parameters": dtype,
        "group_size": group_size,
        "bits": bits,
        "high_first": high_first,
        "zero_in_levels": high_first,
        "table": table.to(device),
        "owners": owners.to(device),
        "tensors": tuple(tensors),
    }
    return form, numbers


def _shifts(bits: int, high_first: bool) -> list[int]:
    """Bits below those of each plane: as many planes as fit into a byte, or ten into an int32."""
    shifts = list(range(0, 30, 3) if bits == 3 else range(0, 8, bits))
    return shifts[::-1] if high_first else shifts


def numbers_of(packed: PackedKeys | PackedValues) -> Tensor:
    """The numbers that packed keys or values stand for, in float64, one by one as the definition says."""
    by_address = {tensor.data_ptr(): tensor for tensor in packed.tensors}
    numbers, bits, size = torch.zeros(packed.shape, dtype=torch.float64), packed.bits, packed.group_size
    for b, h, t, c in product(*map(range, packed.shape)):
        if isinstance(packed, PackedKeys):
            (unit, place), rows, within = divmod(t, size), packed.shape[3], c
        else:
            unit, rows, (within, place) = t, packed.shape[3] // size, divmod(c, size)
        *addresses, plane, step, first = packed.table[b, packed.owners[unit].item()].tolist()
        levels, scale, zero = (by_address[address] for address in addresses)
        row = h * step + first + unit * rows + within
        p, position = divmod(row, plane)
        level = levels[position, place].item() >> _shifts(bits, packed.high_first)[p] & 2**bits - 1
        factor, offset = scale.flatten()[row].item(), zero.flatten()[row].item()
        numbers[b, h, t, c] = factor * (level - offset) if packed.zero_in_levels else factor * level - offset
    return numbers
