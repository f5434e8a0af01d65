"""How many bytes a pruned key cache takes, and how many the dense cache would take.

The numbers are measured, not computed by a formula: they are the sizes of the storages that the cache keeps alive. Both
ratios are always given, because keys are only half of a cache: 60 % off K is 30 % off K+V. The indices of kept channels
are counted with the keys. Spare room, allocated for 64 tokens at once, is part of the total but has its own line and is
left out of the ratios: it is negligible for long prompts and would dominate the ratio of a short one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from .bits.coded import CodedTokens
from .layer import PrunedKeyLayer
from .quantization import QuantizedTokens


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache by part, summed over its layers.

    Attributes
    ----------
    layers, prunable_layers : int
        Number of all layers of the cache, and of those that can be pruned.
    tokens, pruned_tokens : int
        Number of cached tokens per sequence, and how many of them are in the pruned segment.
    pruned_key_bytes, dense_key_bytes, index_bytes, value_bytes : int
        Bytes in the prunable layers: of pruned keys, of dense keys (sink tokens and tail), of the indices of kept
        channels and, after eviction, of kept tokens (with ``bits=``, of the tokens' classes, and of tables of addresses
        once codes are read where they lie), and of values.
    spare_bytes : int
        Bytes of spare room, and of memory that only views keep alive.
    other_bytes : int
        Bytes in all other layers (sliding windows and the like).
    dense_equivalent_key_bytes, dense_equivalent_value_bytes : int
        Bytes that the keys and values of the prunable layers would take unpruned.
    code_bytes, parameter_bytes, basis_bytes : int
        With ``bits=``, of K and V together: codes; widths, scales and means; bases of the prompt. They are part of
        ``pruned_key_bytes`` and ``value_bytes``.
    coded_key_bytes, coded_value_bytes : float
        All of the above for K and for V, and half of the tokens' classes each.
    coded_key_elements, coded_value_elements, all_elements : int
        Numbers of elements that are coded, and of all in the prunable layers.
    waiting_tokens : int
        With ``bits=``: newer tokens that wait for their classes, with more bits than asked for.
    asks_for_bits : bool
        Whether the cache was made with ``bits=``.
    """

    layers: int
    prunable_layers: int
    tokens: int
    pruned_tokens: int
    pruned_key_bytes: int
    dense_key_bytes: int
    index_bytes: int
    value_bytes: int
    spare_bytes: int
    other_bytes: int
    dense_equivalent_key_bytes: int
    dense_equivalent_value_bytes: int
    code_bytes: int = 0
    parameter_bytes: int = 0
    basis_bytes: int = 0
    coded_key_bytes: float = 0.0
    coded_value_bytes: float = 0.0
    coded_key_elements: int = 0
    coded_value_elements: int = 0
    all_elements: int = 0
    waiting_tokens: int = 0
    asks_for_bits: bool = False

    @property
    def key_bits(self) -> float | None:
        """Mean bits per element of the coded tokens' keys, with everything counted; None if nothing is coded."""
        return 8 * self.coded_key_bytes / self.coded_key_elements if self.coded_key_elements else None

    @property
    def value_bits(self) -> float | None:
        """The same for values."""
        return 8 * self.coded_value_bytes / self.coded_value_elements if self.coded_value_elements else None

    @property
    def bits(self) -> float | None:
        """Mean bits per element of the coded tokens' keys and values; None if nothing is coded."""
        elements = self.coded_key_elements + self.coded_value_elements
        return 8 * (self.coded_key_bytes + self.coded_value_bytes) / elements if elements else None

    @property
    def mean_bits(self) -> float | None:
        """Mean bits per element of all tokens, dense ones included, without spare room; None for an empty cache."""
        return 8 * (self.key_bytes + self.value_bytes) / self.all_elements if self.all_elements else None

    @property
    def key_bytes(self) -> int:
        """Bytes of K in the prunable layers, indices included."""
        return self.pruned_key_bytes + self.dense_key_bytes + self.index_bytes

    @property
    def total_bytes(self) -> int:
        """All bytes that the cache holds: K, V, spare room and the other layers."""
        return self.key_bytes + self.value_bytes + self.spare_bytes + self.other_bytes

    @property
    def dense_equivalent_total_bytes(self) -> int:
        """All bytes that the cache would hold if nothing were pruned."""
        return self.dense_equivalent_key_bytes + self.dense_equivalent_value_bytes + self.other_bytes

    @property
    def key_ratio(self) -> float:
        """Bytes of K divided by those of dense K, in the prunable layers; 1 for an empty cache."""
        return self.key_bytes / self.dense_equivalent_key_bytes if self.dense_equivalent_key_bytes else 1.0

    @property
    def total_ratio(self) -> float:
        """Bytes of K+V divided by those of dense K+V, in all layers, without spare room; 1 for an empty cache."""
        dense = self.dense_equivalent_total_bytes
        return (self.total_bytes - self.spare_bytes) / dense if dense else 1.0

    def to_dict(self) -> dict[str, int | float | bool | None]:
        """Return all fields and everything computed from them, as plain values for JSON.

        Examples
        --------
        >>> from transformers import LlamaConfig
        >>> from grace_opt.hf import PrunedKeyCache
        >>> report = PrunedKeyCache(LlamaConfig(num_hidden_layers=2)).memory_report().to_dict()
        >>> report["prunable_layers"], report["total_bytes"], report["total_ratio"], report["bits"]
        (2, 0, 1.0, None)
        """
        computed = [name for name, found in vars(type(self)).items() if isinstance(found, property)]
        return {name: getattr(self, name) for name in (*(each.name for each in fields(self)), *computed)}

    def __str__(self) -> str:
        dense = f"of dense {self.dense_equivalent_total_bytes:,}"
        rows = [
            ("keys, pruned" if self.bits is None else "keys, coded", self.pruned_key_bytes, ""),
            ("keys, dense", self.dense_key_bytes, ""),
            ("indices", self.index_bytes, ""),
            ("K", self.key_bytes, f"{self.key_ratio:.1%} of dense {self.dense_equivalent_key_bytes:,}"),
            ("V", self.value_bytes, ""),
            *self._coded_rows(),
            ("other layers", self.other_bytes, ""),
            (
                "K+V",
                self.total_bytes - self.spare_bytes,
                f"{self.total_ratio:.1%} {dense}",
            ),
            ("room to grow", self.spare_bytes, ""),
        ]
        done = "coded" if self.asks_for_bits else "pruned"
        pruned = f"{self.pruned_tokens} of them {done}" if self.pruned_tokens else f"nothing {done}"
        if self.asks_for_bits and self.tokens and not self.pruned_tokens:
            pruned = "all dense, as the prompt is too short for its bits"
        lines = [f"{self.tokens} tokens, {pruned}, in {self.prunable_layers} of {self.layers} layers (bytes)"]
        lines += [f"  {name:<16} {size:>15,}  {note}".rstrip() for name, size, note in rows]
        return "\n".join(lines)

    def _coded_rows(self) -> list[tuple[str, int, str]]:
        """Return what codes consist of; nothing if nothing is coded."""
        if self.bits is None:
            return []
        share = f"{self.bits:.3f} bits per element ({self.key_bits:.3f} of K, {self.value_bits:.3f} of V)"
        return [
            ("  codes", self.code_bytes, share + f", {self.waiting_tokens} tokens wait" * (self.waiting_tokens > 0)),
            ("  parameters", self.parameter_bytes, f"{self.mean_bits:.3f} bits per element of all tokens"),
            ("  bases", self.basis_bytes, ""),
        ]


def measure(pruned: Iterable[PrunedKeyLayer], others: Iterable[object]) -> MemoryReport:
    """Add up what the layers of a cache hold.

    Parameters
    ----------
    pruned : iterable of PrunedKeyLayer
        The prunable layers, at least one.
    others : iterable of cache layers
        The rest.
    """
    layers, rest = list(pruned), list(others)
    sizes: dict[str, int] = dict.fromkeys((*_PARTS, "dense keys", "dense values"), 0)
    coded: Counter[str] = Counter()
    for layer in layers:
        old, parts = layer.compressed, layer.stored_parts()
        if isinstance(old, CodedTokens):
            coded.update(old.sizes())
            parts = {name: part for name, part in parts.items() if name not in old.parts()}
        for name, part in parts.items():
            sizes[name] += part.nbytes
        if layer.tail is not None:
            tail, length = layer.tail, layer.get_seq_length()
            # The unused rest of the buffers is spare room.
            sizes["tail_keys"] += tail.keys.nbytes - tail.buffers[0].nbytes
            sizes["tail_values"] += tail.values.nbytes - tail.buffers[1].nbytes
            sizes["dense keys"] += tail.keys.shape[:2].numel() * length * layer.head_dim * tail.keys.element_size()
            sizes["dense values"] += tail.values[:, :, :1].nbytes * length if tail.length else 0
            width = layer.head_dim + tail.values.shape[-1]
            coded["all elements"] += tail.keys.shape[:2].numel() * length * width
    for name, also in _CODED.items():
        sizes[name] += sum(coded[each] for each in also)
    used = sum(sizes[name] for name in _PARTS)
    held = sum(storages(part for layer in layers for part in layer.stored_parts().values()).values())
    return MemoryReport(
        layers=len(layers) + len(rest),
        prunable_layers=len(layers),
        tokens=max(layer.get_seq_length() for layer in layers),
        pruned_tokens=max(layer.pruned_length for layer in layers),
        pruned_key_bytes=sizes["pruned_keys"],
        dense_key_bytes=sizes["sink_keys"] + sizes["tail_keys"],
        index_bytes=sizes["kept_indices"] + sizes["positions"] + sizes["received"],
        value_bytes=sizes["old_values"] + sizes["tail_values"],
        spare_bytes=held - used,
        other_bytes=sum(storages(value for layer in rest for value in vars(layer).values()).values()),
        dense_equivalent_key_bytes=sizes["dense keys"],
        dense_equivalent_value_bytes=sizes["dense values"],
        code_bytes=coded["key codes"] + coded["value codes"],
        parameter_bytes=coded["key parameters"] + coded["value parameters"],
        basis_bytes=coded["key bases"] + coded["value bases"],
        coded_key_bytes=sum(coded[f"key {part}"] for part in _COUNTED) + coded["classes"] / 2,
        coded_value_bytes=sum(coded[f"value {part}"] for part in _COUNTED) + coded["classes"] / 2,
        coded_key_elements=coded["key elements"],
        coded_value_elements=coded["value elements"],
        all_elements=coded["all elements"],
        waiting_tokens=max(
            layer.compressed.waiting if isinstance(layer.compressed, CodedTokens) else 0 for layer in layers
        ),
        asks_for_bits=layers[0].plan.bits is not None,
    )


_PARTS = (
    *("sink_keys", "pruned_keys", "kept_indices", "old_values", "positions", "tail_keys", "tail_values"),
    "received",
)
_COUNTED = ("codes", "parameters", "bases")
#: Which sizes of `CodedTokens` belong to which part.
_CODED = {
    "sink_keys": ("key sinks",),
    "pruned_keys": tuple(f"key {part}" for part in _COUNTED),
    "old_values": ("value sinks", *(f"value {part}" for part in _COUNTED)),
    "kept_indices": ("classes", "tables"),
    "positions": ("positions",),
}


def storages(things: Iterable[Any]) -> dict[int, int]:
    """Return the bytes, by address, of every storage that the given tensors and quantised tokens keep alive."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors_in(things)
        if tensor.numel()
    }


def tensors_in(things: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the plain tensors among some things, and those that quantised tokens consist of."""
    for thing in things:
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, QuantizedTokens):
            yield from (*thing.tensors().values(), *thing.places())
