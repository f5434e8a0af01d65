"""What a way to store a layer's keys and values returns: reconstructed tensors, and the bits that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from grace_opt.hf import CalibratedBasis


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
