"""Count what a cache keeps alive: tensors inside anything, their storages, and their bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .packed.tokens import QuantizedTokens

#: Bits of a number in a dense cache, and the most that a floating-point number counts.
DENSE_BITS = 16


def bits_of(tensor: Tensor) -> int:
    """Return the bits of a tensor's elements, of which floating-point numbers have 16 at most."""
    size = 8 * tensor.element_size()
    return tensor.numel() * (min(size, DENSE_BITS) if tensor.is_floating_point() else size)


def storages(part: Any) -> dict[int, int]:
    """Return the bytes, by address, of every storage that the tensors inside something keep alive."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors_in(part)
        if tensor.numel()
    }


def tensors_in(part: Any) -> Iterator[Tensor]:
    """Yield the plain tensors inside lists, dicts and quantised tensors, ours and other libraries'.

    Examples
    --------
    >>> import torch
    >>> [len(one) for one in tensors_in([torch.ones(2), {"scale": torch.ones(3)}, 4])]
    [2, 3]
    """
    if isinstance(part, QuantizedTokens):
        part = [*part.tensors().values(), *part.places()]
    elif isinstance(part, dict):
        part = list(part.values())
    elif hasattr(part, "__tensor_flatten__"):
        part = [getattr(part, name) for name in part.__tensor_flatten__()[0]]
    if isinstance(part, list | tuple):
        for item in part:
            yield from tensors_in(item)
    elif isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
        yield part
