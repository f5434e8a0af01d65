"""What a pruned key cache costs, in bytes, beside what the dense cache would cost.

The numbers are those of the tensors that the cache keeps alive, not of a formula: they equal the sizes of the storages.
Both ratios are always given, because keys are only half of a cache: 60 % off K is 30 % off K+V. The kept indices are
counted with the keys.

Source: ours; peers' users ask for real memory instead of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .layer import PrunedKeyLayer


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache by part, summed over its layers.

    Attributes
    ----------
    layers, prunable_layers : int
        All layers of the cache and those that can be pruned.
    tokens, pruned_tokens : int
        Cached tokens per sequence, and those of them in the pruned segment.
    pruned_key_bytes, dense_key_bytes, index_bytes, value_bytes : int
        What the prunable layers hold: pruned keys, the dense tail's keys, kept indices, values.
    other_bytes : int
        What the layers that are left as they are hold (sliding windows and the like).
    dense_equivalent_key_bytes : int
        Keys of the prunable layers if nothing were pruned.
    """

    layers: int
    prunable_layers: int
    tokens: int
    pruned_tokens: int
    pruned_key_bytes: int
    dense_key_bytes: int
    index_bytes: int
    value_bytes: int
    other_bytes: int
    dense_equivalent_key_bytes: int

    @property
    def key_bytes(self) -> int:
        """Everything that K costs in the prunable layers, indices included."""
        return self.pruned_key_bytes + self.dense_key_bytes + self.index_bytes

    @property
    def total_bytes(self) -> int:
        """Everything that the cache holds: K, V and the other layers."""
        return self.key_bytes + self.value_bytes + self.other_bytes

    @property
    def dense_equivalent_total_bytes(self) -> int:
        """Everything that the cache would hold if nothing were pruned."""
        return self.dense_equivalent_key_bytes + self.value_bytes + self.other_bytes

    @property
    def key_ratio(self) -> float:
        """K beside dense K, in the prunable layers; 1 for an empty cache."""
        return self.key_bytes / self.dense_equivalent_key_bytes if self.dense_equivalent_key_bytes else 1.0

    @property
    def total_ratio(self) -> float:
        """K+V beside dense K+V, all layers together; 1 for an empty cache."""
        dense = self.dense_equivalent_total_bytes
        return self.total_bytes / dense if dense else 1.0

    def __str__(self) -> str:
        rows = [
            ("keys, pruned", self.pruned_key_bytes, ""),
            ("keys, dense tail", self.dense_key_bytes, ""),
            ("kept indices", self.index_bytes, ""),
            ("K", self.key_bytes, f"{self.key_ratio:.1%} of dense {self.dense_equivalent_key_bytes:,}"),
            ("V", self.value_bytes, ""),
            ("other layers", self.other_bytes, ""),
            ("K+V", self.total_bytes, f"{self.total_ratio:.1%} of dense {self.dense_equivalent_total_bytes:,}"),
        ]
        tokens = f"{self.tokens} tokens, {self.pruned_tokens} of them pruned"
        lines = [f"{tokens}, in {self.prunable_layers} of {self.layers} layers (bytes)"]
        lines += [f"  {name:<16} {size:>15,}  {note}".rstrip() for name, size, note in rows]
        return "\n".join(lines)


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
    parts = dict.fromkeys(PrunedKeyLayer.TENSORS, 0)
    dense = 0
    for layer in layers:
        for name, tensor in layer.stored_tensors().items():
            parts[name] += tensor.nbytes
        if layer.keys is not None:
            batch, heads = layer.keys.shape[:2]
            dense += batch * heads * layer.get_seq_length() * layer.head_dim * layer.keys.element_size()
    other = sum(tensor.nbytes for layer in rest for tensor in vars(layer).values() if isinstance(tensor, Tensor))
    return MemoryReport(
        layers=len(layers) + len(rest),
        prunable_layers=len(layers),
        tokens=max(layer.get_seq_length() for layer in layers),
        pruned_tokens=max(layer.pruned_length for layer in layers),
        pruned_key_bytes=parts["pruned_keys"],
        dense_key_bytes=parts["keys"],
        index_bytes=parts["kept_indices"],
        value_bytes=parts["values"],
        other_bytes=other,
        dense_equivalent_key_bytes=dense,
    )
