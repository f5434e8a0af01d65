"""KIVI (arXiv 2402.02750): keys quantised per channel in groups of tokens, values per token in groups of channels.

Asymmetric: code = round((x - lowest) / step), step = (highest - lowest) / (2^b - 1), both kept in 16 bits. Groups of
32 as published, and of 128 (keys) and 64 (values), with which it takes a quarter and half a bit less. The last group
may be shorter, and its parameters count like any other's.

Once with our windows. Groups of 32 also with KIVI's own residual of 128, as its code has it: no first tokens; of the
keys, as many last ones stay dense as do not fill 128; of the values, the last 128.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from bench.arena.stored import PARAMETER_BITS, Layer, Method, Stored, in_16_bits, in_blocks, number_of_blocks, stored
from grace_opt.hf import CalibratedBasis

SOURCE = "KIVI, arXiv 2402.02750"
WIDTHS = (4, 3, 2)
#: Sizes of groups: tokens of a key's channel, and channels of a token's value.
GROUPS = ((32, 32), (128, 64))
RESIDUAL = 128


def affine(block: Tensor, bits: int) -> Tensor:
    """Quantise blocks ``(..., size)`` asymmetrically and read them again; each block has a step and a lowest level."""
    lowest, highest = block.aminmax(dim=-1, keepdim=True)
    levels = 2**bits - 1
    step, lowest = in_16_bits((highest - lowest) / levels), in_16_bits(lowest)
    codes = ((block - lowest) / torch.where(step > 0, step, 1)).round().clamp(0, levels)
    return codes * step + lowest


def per_channel(tokens: Tensor, bits: int, group: int) -> tuple[Tensor, float]:
    """Quantise each channel of ``(H, n, d)`` in groups of tokens; return it read again, and its bits."""
    found = in_blocks(tokens.mT, group, functools.partial(affine, bits=bits)).mT
    heads, count, width = tokens.shape
    return found, tokens.numel() * bits + 2 * PARAMETER_BITS * heads * width * number_of_blocks(count, group)


def per_token(tokens: Tensor, bits: int, group: int) -> tuple[Tensor, float]:
    """Quantise each token of ``(H, n, d)`` in groups of channels; return it read again, and its bits."""
    found = in_blocks(tokens, group, functools.partial(affine, bits=bits))
    heads, count, width = tokens.shape
    return found, tokens.numel() * bits + 2 * PARAMETER_BITS * heads * count * number_of_blocks(width, group)


def residual(tokens: int) -> tuple[slice, slice]:
    """Return the places of the tokens of K and of V that KIVI quantises.

    Examples
    --------
    >>> residual(300), residual(100)
    ((slice(0, 256, None), slice(0, 172, None)), (slice(0, 0, None), slice(0, 0, None)))
    """
    return slice(0, tokens // RESIDUAL * RESIDUAL), slice(0, max(tokens - RESIDUAL, 0))


def store(
    layers: list[Layer], basis: CalibratedBasis | None, *, bits: int, groups: tuple[int, int], own_windows: bool
) -> list[Stored]:
    """Store a prompt."""
    return [
        stored(
            layer,
            functools.partial(per_channel, bits=bits, group=groups[0]),
            functools.partial(per_token, bits=bits, group=groups[1]),
            residual(layer.keys.shape[1]) if own_windows else None,
        )
        for layer in layers
    ]


def methods() -> list[Method]:
    """Return every width with both sizes of groups, with our windows and with its own."""
    found = []
    for own in (False, True):
        for groups in GROUPS[:1] if own else GROUPS:
            for bits in WIDTHS:
                sizes = f"groups of {groups[0]}" if len(set(groups)) == 1 else f"groups of {groups[0]} and {groups[1]}"
                windows = f", its own residual of {RESIDUAL}" if own else ""
                family = "KIVI, own windows" if own else "KIVI"
                found.append(
                    Method(
                        f"kivi-{bits}-g{groups[0]}{f'-r{RESIDUAL}' if own else ''}",
                        f"KIVI, {bits} bits, {sizes}{windows} (our implementation)",
                        family if groups == GROUPS[0] else f"{family}, groups of {groups[0]}",
                        SOURCE,
                        functools.partial(store, bits=bits, groups=groups, own_windows=own),
                    )
                )
    return found
