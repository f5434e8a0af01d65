"""Bits of a cache per element, with everything counted.

When: quality is compared at equal size. Counts are made as if the model had 16 bits, whatever it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...._util.parameters import integer, number
from ....errors import EvaluationError
from ...engine.cache import CompressedCache
from ...engine.layer import PrunedKeyLayer
from ...stores.counting import DENSE_BITS, bits_of, tensors_in


@dataclass(frozen=True)
class StoredBits:
    """Mean number of bits per element of a cache, as if the model had 16 bits.

    Attributes
    ----------
    bits, key_bits, value_bits : float
        Of the compressed tokens' keys and values, codes and parameters; evicted tokens are compressed ones.
    mean_bits : float
        Of all tokens, dense ones included.
    """

    bits: float
    key_bits: float
    value_bits: float
    mean_bits: float

    @property
    def share(self) -> float:
        """Bytes of the whole cache, as a share of those of a dense one."""
        return self.mean_bits / DENSE_BITS


def stored_bits(cache: CompressedCache) -> StoredBits:
    """Count the bits of a compressed cache, with everything: scales, zero points, indices, places of tokens, classes.

    As if the model had 16 bits: floating-point numbers of more count as 16, all else as it is stored. Room to grow does
    not count. Call it before later tokens are fed: they are part of the whole cache.

    Raises
    ------
    EvaluationError
        If it is another kind of cache, or nothing in it is compressed.

    Examples
    --------
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> ids = tokenizer("the quiet river runs past the old mill . " * 20, return_tensors="pt").input_ids
    >>> model.set_attn_implementation("grace_sdpa")
    >>> cache = CompressedCache(model, ratio=0.5)
    >>> _ = model(ids, past_key_values=cache)
    >>> found = stored_bits(cache)
    >>> found.value_bits, 8 < found.key_bits < 9  # half of the keys, and their indices
    (16.0, True)
    """
    if not isinstance(cache, CompressedCache):
        raise EvaluationError(f"{type(cache).__name__} is no CompressedCache: count its bits and call stated_bits")
    bits, elements, dense, everything = [0.0, 0.0], [0, 0], 0, 0
    for layer in cache.layers:
        if not isinstance(layer, PrunedKeyLayer) or layer.tail is None:  # another kind of layer, which stays as it is
            held = [tensor for tensor in tensors_in(vars(layer)) if tensor.is_floating_point()]
            dense += sum(map(bits_of, held))
            everything += sum(tensor.numel() for tensor in held)
            continue
        keys, values = layer.tail.keys, layer.tail.values
        dense += DENSE_BITS * (keys.numel() + values.numel())
        widths = keys.shape[:2].numel() * keys.shape[3], values.shape[:2].numel() * values.shape[3]
        everything += sum(widths) * layer.get_seq_length()
        if layer.compressed is None:
            continue
        found, own, sinks = layer.compressed.bits(widths, layer.plan.config.sink_tokens)
        bits, elements = [a + b for a, b in zip(bits, found, strict=True)], [elements[0] + own[0], elements[1] + own[1]]
        dense += sinks
    return _per_element(bits, elements, dense, everything, keeps_all=cache.config.read is not None)


def stated_bits(key_bits: float, value_bits: float, elements: Sequence[int], all_elements: int) -> StoredBits:
    """Bits per element, from a count of the bits of all compressed tokens.

    Parameters
    ----------
    key_bits, value_bits : float
        Number of bits of the compressed tokens' keys and values, over all layers and heads: codes and parameters,
        these in 16 bits.
    elements : (int, int)
        Number of elements of these tokens' keys, and values, before compression.
    all_elements : int
        Number of elements of all tokens' keys and values; those that are not compressed take 16 bits.

    Raises
    ------
    EvaluationError
        If nothing was compressed: no tokens, or no fewer bits than a dense cache has.

    Examples
    --------
    >>> stated_bits(key_bits=250.0, value_bits=150.0, elements=(100, 100), all_elements=400)
    StoredBits(bits=2.0, key_bits=2.5, value_bits=1.5, mean_bits=9.0)
    """
    for name, count in (("key_bits", key_bits), ("value_bits", value_bits)):
        number(name, count, at_least=0, error=EvaluationError, hint="the number of bits of all compressed tokens")
    try:
        keys, values = elements
    except (TypeError, ValueError):
        raise EvaluationError(f"elements={elements!r}: give two numbers, of the keys' and of the values'") from None
    for name, count in (("elements[0]", keys), ("elements[1]", values), ("all_elements", all_elements)):
        integer(name, count, at_least=0, error=EvaluationError)
    if keys + values > all_elements:
        raise EvaluationError(f"{keys} and {values} compressed elements of {all_elements}: give the number of all")
    return _per_element(
        [key_bits, value_bits], [keys, values], DENSE_BITS * (all_elements - keys - values), all_elements
    )


def _per_element(
    bits: Sequence[float], elements: Sequence[int], dense: float, everything: int, keeps_all: bool = False
) -> StoredBits:
    """Return means; `dense` are the bits of what is not compressed.

    With ``read=``, which `keeps_all`, more bits than a dense cache has are no mistake.

    Raises
    ------
    EvaluationError
        If nothing is compressed.
    """
    if min(elements) <= 0:
        raise EvaluationError(
            f"{elements[0]} elements of keys and {elements[1]} of values are compressed: this cache is dense, and its "
            "numbers would be those of the dense cache. Give a longer prompt, or another setting"
        )
    found = sum(bits) / sum(elements)
    if found >= DENSE_BITS and not keeps_all:
        raise EvaluationError(
            f"{found:g} bits per element: this cache was not compressed, a dense one has {DENSE_BITS}; give a longer "
            "prompt, so that indices and scales do not outweigh what is saved, or another setting"
        )
    return StoredBits(found, bits[0] / elements[0], bits[1] / elements[1], (sum(bits) + dense) / everything)
