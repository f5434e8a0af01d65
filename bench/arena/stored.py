"""What a way to store a layer's keys and values gets and returns, and what all ways have in common.

These are dense windows, parameters in 16 bits, and blocks of which the last may be shorter. The first 4 and the last 32
tokens of a prompt stay dense in every row, unless a peer has windows of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grace_opt.hf import CalibratedBasis
from grace_opt.hf.bases.classes import WINDOW
from grace_opt.hf.settings.bits import SINKS


@dataclass(frozen=True)
class Layer:
    """What a method sees of one layer of a prompt that was read; all float32.

    Attributes
    ----------
    index : int
        Its position in the model.
    keys, values : Tensor
        ``(H, T, d)`` post-RoPE and ``(H, T, d_v)``, all prompt tokens.
    queries : Tensor
        ``(H, G, T, d)`` post-RoPE, all prompt queries, grouped by KV head.
    scaling : float
        Factor of the logits.
    output : Tensor
        ``(H, G, d_v, D)``: the output projection of each query head.
    """

    index: int
    keys: Tensor
    values: Tensor
    queries: Tensor
    scaling: float
    output: Tensor


@dataclass(frozen=True)
class Stored:
    """One layer, stored and read again.

    Attributes
    ----------
    keys, values : Tensor
        Reconstructed, in the shapes of `Layer`.
    key_bits, value_bits : float
        Bits of all coded tokens' keys and values: codes and parameters, parameters in 16 bits.
    compressed : (int, int)
        Number of tokens of K, and of V, that are not kept dense; dense ones are not in the bits.
    """

    keys: Tensor
    values: Tensor
    key_bits: float
    value_bits: float
    compressed: tuple[int, int]


@dataclass(frozen=True)
class Method:
    """A way to store a cache.

    Attributes
    ----------
    name : str
        Key of rows, as ``"kivi-2-g32"``.
    title : str
        As ``"KIVI, 2 bits, groups of 32 (our implementation)"``.
    family : str
        One line of the picture, as ``"KIVI"``.
    source : str
        The paper, with its arXiv number.
    store : callable
        All layers of a prompt at once.
    """

    name: str
    title: str
    family: str
    source: str
    store: Callable[[list[Layer], CalibratedBasis | None], list[Stored]]


#: Bits of a parameter: a scale, a zero point, a norm.
PARAMETER_BITS = 16
_LARGEST = float(torch.finfo(torch.float16).max)

#: Stores tokens ``(H, n, d)``: returns them reconstructed, and the bits of all.
Coder = Callable[[Tensor], tuple[Tensor, float]]


def in_16_bits(numbers: Tensor) -> Tensor:
    """Return numbers as they are after being kept in 16 bits; what is too large becomes the largest."""
    return numbers.clamp(-_LARGEST, _LARGEST).half().float()


def between(tokens: int, first: int = SINKS, last: int = WINDOW) -> slice:
    """Return the places of the tokens that are not dense; none if the prompt is too short.

    Examples
    --------
    >>> between(100), between(20)
    (slice(4, 68, None), slice(4, 4, None))
    """
    start = min(first, tokens)
    return slice(start, max(tokens - last, start))


def stored(layer: Layer, keys: Coder, values: Coder, places: tuple[slice, slice] | None = None) -> Stored:
    """Store a layer: code some of its tokens, and keep the others as they are.

    Parameters
    ----------
    layer : Layer
    keys, values : callable
        Never called without tokens.
    places : (slice, slice), optional
        The tokens of K and of V to code; by default all between the windows.
    """
    if places is None:
        inner = between(layer.keys.shape[1])
        places = inner, inner
    parts: list[Tensor] = []
    bits: list[float] = []
    for tensor, code, inner in zip((layer.keys, layer.values), (keys, values), places, strict=True):
        found, spent = tensor.clone(), 0.0
        if inner.stop > inner.start:
            found[:, inner], spent = code(tensor[:, inner])
        parts.append(found)
        bits.append(spent)
    counts = tuple(inner.stop - inner.start for inner in places)
    return Stored(parts[0], parts[1], bits[0], bits[1], (counts[0], counts[1]))


def in_blocks(rows: Tensor, size: int, code: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to blocks of neighbours in the last dimension, ``(..., blocks, size)``; the last may be shorter.

    Examples
    --------
    >>> in_blocks(torch.tensor([[1.0, 5.0, 2.0]]), 2, lambda x: x.amax(-1, keepdim=True).expand_as(x))
    tensor([[5., 5., 2.]])
    """
    whole = rows.shape[-1] // size * size
    parts = []
    if whole:
        parts.append(code(rows[..., :whole].unflatten(-1, (-1, size))).flatten(-2))
    if whole < rows.shape[-1]:
        parts.append(code(rows[..., None, whole:]).flatten(-2))
    return torch.cat(parts, -1)


def number_of_blocks(count: int, size: int) -> int:
    """Return the number of blocks, the shorter last one included."""
    return -(-count // size)
