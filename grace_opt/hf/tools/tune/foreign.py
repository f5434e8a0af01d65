"""Bits of a cache that is not ours: transformers' ``QuantizedCache``, counted by the tensors that it holds."""

from __future__ import annotations

from typing import Any

from ....errors import EvaluationError
from ...stores.counting import bits_of, tensors_in
from ..evaluation import StoredBits, stated_bits


def quantized_bits(cache: Any, elements: tuple[int, int]) -> StoredBits:
    """Count what a ``QuantizedCache`` holds, with numbers of more than 16 bits as 16.

    Parameters
    ----------
    cache : QuantizedCache
        Filled with a prompt, all of which it has quantised.
    elements : (int, int)
        Numbers of elements of the prompt's keys, and of its values.

    Raises
    ------
    EvaluationError
        If one of its layers has quantised nothing, or the whole takes no less than a dense cache.
    """
    bits = [0.0, 0.0]
    for number, layer in enumerate(cache.layers):
        for at, name in enumerate(("_quantized_keys", "_quantized_values")):
            held = list(tensors_in(getattr(layer, name, None)))
            if not any(not tensor.is_floating_point() for tensor in held):
                raise EvaluationError(f"layer {number} of this {type(cache).__name__} has quantised nothing")
            bits[at] += sum(map(bits_of, held))
    return stated_bits(bits[0], bits[1], elements, sum(elements))
