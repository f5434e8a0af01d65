"""Hadamard rotation and blocks of 32 with one scale, as llama.cpp stores K and V.

llama.cpp (pull request 21038) rotates K and V before it quantises them: K by the largest Hadamard matrix whose size
divides the head's width, V by blocks of 64; so a width that is no power of two is rotated in blocks. Each token's
coordinates are then stored in blocks of 32 as ``q4_0``: the entry of largest magnitude, with its sign, is code 0 = -8
steps, and the others are rounded to steps from -8 to 7; the step is kept in 16 bits, so 4 bits take 4.5. Three and two
bits follow the same formula with 4 and 2 in place of 8: llama.cpp has no such cache.

Widths that are no multiple of 32 are refused, as by llama.cpp. (It rotates only multiples of 64.)
"""

from __future__ import annotations

import functools

import torch
from scipy.linalg import hadamard
from torch import Tensor

from bench.arena.stored import PARAMETER_BITS, Layer, Method, Stored, in_16_bits, in_blocks, number_of_blocks, stored
from grace_opt.errors import OptionError
from grace_opt.hf import CalibratedBasis

SOURCE = "llama.cpp, pull request 21038; the rotation as in QuaRot, arXiv 2404.00456"
WIDTHS = (4, 3, 2)
BLOCK = 32
#: Largest size of the matrix that rotates V.
VALUE_ROTATION = 64


@functools.lru_cache(maxsize=8)
def rotation(width: int, largest: int | None = None) -> Tensor:
    """Return the orthogonal, symmetric matrix ``(width, width)``: a Hadamard matrix, repeated on the diagonal.

    Raises
    ------
    OptionError
        If the width is no multiple of 32.
    """
    if width % BLOCK:
        raise OptionError(
            f"the Hadamard peer stores blocks of {BLOCK} channels, and the heads have {width}; leave it out for this "
            f"model, or take a model whose head width is a multiple of {BLOCK}"
        )
    size = width & -width  # the largest power of two that divides it
    size = size if largest is None else min(size, largest)
    one = torch.from_numpy(hadamard(size)).float() / size**0.5
    return torch.block_diag(*[one] * (width // size))


def symmetric(block: Tensor, bits: int) -> Tensor:
    """Quantise blocks ``(..., size)`` as ``q4_0`` does, and read them again."""
    half = 2 ** (bits - 1)
    extreme = block.gather(-1, block.abs().argmax(-1, keepdim=True))
    step = extreme / -half
    # Codes are made with the step itself, and read with the step in 16 bits.
    codes = (block / torch.where(step == 0, 1, step) + half + 0.5).floor().clamp(0, 2 * half - 1)
    return (codes - half) * in_16_bits(step)


def rotated(tokens: Tensor, bits: int, largest: int | None = None) -> tuple[Tensor, float]:
    """Rotate tokens ``(H, n, d)``, quantise each in blocks, and rotate back; return them, and their bits."""
    turn = rotation(tokens.shape[-1], largest)
    found = in_blocks(tokens @ turn, BLOCK, functools.partial(symmetric, bits=bits)) @ turn
    blocks = tokens.shape[:2].numel() * number_of_blocks(tokens.shape[-1], BLOCK)
    return found, tokens.numel() * bits + PARAMETER_BITS * blocks


def store(layers: list[Layer], basis: CalibratedBasis | None, *, bits: int) -> list[Stored]:
    """Store a prompt."""
    keys = functools.partial(rotated, bits=bits)
    return [stored(layer, keys, functools.partial(keys, largest=VALUE_ROTATION)) for layer in layers]


def methods() -> list[Method]:
    """Return every width."""
    return [
        Method(
            f"hadamard-{bits}",
            f"Hadamard rotation, {bits} bits, blocks of {BLOCK} (our implementation of what llama.cpp does)",
            "Hadamard",
            SOURCE,
            functools.partial(store, bits=bits),
        )
        for bits in WIDTHS
    ]
