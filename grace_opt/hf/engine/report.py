"""How many bytes a pruned key cache takes, and how many the dense cache would take.

The numbers are measured, not computed by a formula: they are the sizes of the storages that the cache keeps alive. Both
ratios are always given, because keys are only half of a cache: 60 % off K is 30 % off K+V. The indices of kept channels
are counted with the keys. Spare room, allocated for 64 tokens at once, has its own line and is part of neither totals
nor ratios: it is negligible for long prompts and would dominate the ratio of a short one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..bases.byte_limit import BitsAt
from ..stores.counting import storages
from ..stores.plan import LayerPlan
from ..stores.tally import ReadReport, at_confidence
from .layer import PrunedKeyLayer


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache by part, summed over its layers: what is stored, and apart from it the room to grow.

    Attributes
    ----------
    layers, prunable_layers : int
        Number of all layers of the cache, and of those that can be pruned.
    tokens, pruned_tokens : int
        Number of tokens that were read per sequence, evicted ones included; and how many are in the pruned segment
        (coded, with ``bits=``) of the layer that has most there.
    evicted_tokens : int
        How many of `tokens` are not stored any more, in the layer that keeps most.
    pruned_key_bytes, dense_key_bytes, index_bytes, value_bytes : int
        Bytes in the prunable layers: of pruned keys, of dense keys (sink tokens and tail), of the indices of kept
        channels and, after eviction, of kept tokens (with ``bits=``, of the tokens' classes, and of tables of addresses
        and positions once codes are read where they lie), and of values.
    spare_bytes : int
        Bytes of room to grow: allocated for tokens to come, or kept alive by views. Part of `allocated_bytes` alone.
    other_bytes : int
        Bytes in all other layers (sliding windows, recurrent states and the like).
    dense_equivalent_key_bytes, dense_equivalent_value_bytes : int
        Bytes that the keys and values of the prunable layers would take unpruned.
    code_bytes, parameter_bytes : int
        With ``bits=``, of K and V together: codes; what is needed to read them (how many bits each channel has, its
        scale and its mean). They are part of ``pruned_key_bytes`` and ``value_bytes``.
    coded_key_bytes, coded_value_bytes : float
        All of the above for K and for V, and half of the tokens' classes each.
    coded_key_elements, coded_value_elements, all_elements : int
        Numbers of elements that are coded, and of all in the prunable layers.
    predicted_kl : float, optional
        With ``max_kl=``, or with ``bits=`` where that was measured before: the KL divergence, nats per token, that as
        many bits left on other text: a guide, as the KL of a single text may be several times larger or smaller.
    divergence : float, optional
        With ``bits=`` and a calibrated basis: how unlike the calibration's texts the prompt is in the layer where
        most, as a share of what is too much. See ``guard=``.
    unlike_layers : tuple of int
        Layers in which that is more than 1.
    waiting_tokens : int
        With ``bits=``: newer tokens that wait for their classes, with more bits than asked for.
    stored_as : str
        What becomes of old tokens: "coded" with ``bits=``; "pruned" where channels are dropped; "quantised"; "whole"
        where tokens alone are evicted, or few are read; "compressed" with a store of your own.
    reading_bytes : int
        With ``read=``: what finds the tokens to read: ranges of pages, copies of channels and norms, or codes, norms
        and hyperplanes. Counted with K.
    read_share, unread_bound_mean, unread_bound_max : float, optional
        With ``read=``: mean share of the stored tokens that steps have read, and mean and maximum of the bound on the
        share of the attention on all others; None before the first step. `CompressedCache.read_report` has each layer.
    read_confidence : float, optional
        With sampling: the probability with which each of these bounds holds; None if they are certain.
    evictions_differ : bool
        Whether some layers have evicted more tokens than `evicted_tokens`.
    idle : tuple of str
        Settings that have changed nothing so far and why, a sentence each; ``str(report)`` has them at the end.
    max_bytes : int, optional
        The limit that `allocated_bytes` does not exceed, if there is one.
    history : tuple of BitsAt
        With ``max_bytes=``: how many bits were chosen at how many tokens, and the bytes that the cache took then.
    left_out : str, optional
        Why the cache holds less than the text of the latest ``generate``; ``str(report)`` ends with it.
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
    coded_key_bytes: float = 0.0
    coded_value_bytes: float = 0.0
    coded_key_elements: int = 0
    coded_value_elements: int = 0
    all_elements: int = 0
    predicted_kl: float | None = None
    divergence: float | None = None
    unlike_layers: tuple[int, ...] = ()
    waiting_tokens: int = 0
    stored_as: str = "pruned"
    reading_bytes: int = 0
    read_share: float | None = None
    unread_bound_mean: float | None = None
    unread_bound_max: float | None = None
    read_confidence: float | None = None
    evicted_tokens: int = 0
    evictions_differ: bool = False
    idle: tuple[str, ...] = ()
    max_bytes: int | None = None
    history: tuple[BitsAt, ...] = ()
    left_out: str | None = None

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
        """Bytes of K in the prunable layers, indices and what finds tokens to read included."""
        return self.pruned_key_bytes + self.dense_key_bytes + self.index_bytes + self.reading_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all that is stored: K, V and the other layers, without room to grow."""
        return self.key_bytes + self.value_bytes + self.other_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that the cache takes: `total_bytes` and the room to grow."""
        return self.total_bytes + self.spare_bytes

    @property
    def dense_equivalent_total_bytes(self) -> int:
        """What `total_bytes` would be if nothing were pruned."""
        return self.dense_equivalent_key_bytes + self.dense_equivalent_value_bytes + self.other_bytes

    @property
    def key_ratio(self) -> float:
        """Bytes of K divided by those of dense K, in the prunable layers; 1 for an empty cache."""
        return self.key_bytes / self.dense_equivalent_key_bytes if self.dense_equivalent_key_bytes else 1.0

    @property
    def total_ratio(self) -> float:
        """`total_bytes` divided by `dense_equivalent_total_bytes`, so without room to grow; 1 for an empty cache."""
        dense = self.dense_equivalent_total_bytes
        return self.total_bytes / dense if dense else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and everything computed from them, as plain values for JSON.

        ``total_bytes`` and ``total_ratio`` are of what is stored; ``allocated_bytes`` has the room to grow as well.

        Examples
        --------
        >>> from transformers import LlamaConfig
        >>> from grace_opt.hf import CompressedCache
        >>> report = CompressedCache(LlamaConfig(num_hidden_layers=2), ratio=0.3).memory_report().to_dict()
        >>> report["prunable_layers"], report["total_bytes"], report["total_ratio"], report["bits"]
        (2, 0, 1.0, None)
        """
        computed = [name for name, found in vars(type(self)).items() if isinstance(found, property)]
        names = *(each.name for each in fields(self)), *computed
        history = [each._asdict() for each in self.history]
        lists = {"idle": list(self.idle), "unlike_layers": list(self.unlike_layers), "history": history}
        return {name: getattr(self, name) for name in names} | lists

    def __str__(self) -> str:
        rows = [
            (f"keys, {self.stored_as}", self.pruned_key_bytes, ""),
            ("keys, dense", self.dense_key_bytes, ""),
            ("indices", self.index_bytes, ""),
            *([("finding tokens", self.reading_bytes, "ranges, copies or codes")] if self.reading_bytes else []),
            ("K", self.key_bytes, _share(self.key_ratio, self.dense_equivalent_key_bytes)),
            ("V", self.value_bytes, ""),
            *self._coded_rows(),
            ("other layers", self.other_bytes, ""),
            ("K+V", self.total_bytes, _share(self.total_ratio, self.dense_equivalent_total_bytes)),
            ("room to grow", self.spare_bytes, ""),
        ]
        if self.max_bytes is not None:
            share = f"{self.allocated_bytes / self.max_bytes:.1%} of max_bytes={self.max_bytes:,}"
            rows.append(("all", self.allocated_bytes, share))
        lines = [f"{self._header()}, in {self.prunable_layers} of {self.layers} layers (bytes)"]
        lines += [f"  {name:<16} {size:>15,}  {note}".rstrip() for name, size, note in rows]
        if self.bits is not None:
            lines.append(
                f"  coded tokens have {self.bits:.3f} bits per element ({self.key_bits:.3f} of K, "
                f"{self.value_bits:.3f} of V), everything counted; all tokens {self.mean_bits:.3f}"
            )
        if len(self.history) > 1:
            (tokens, first, _), (now, bits, _) = self.history[0], self.history[-1]
            lines.append(
                f"  tokens that do not wait had {first:.3g} bits at {tokens} tokens and have {bits:.3g} since {now}: "
                f"coded again {len(self.history) - 1} times"
            )
        if self.predicted_kl is not None:
            lines.append(f"  a KL divergence of {self.predicted_kl:.2g} nats per token was measured with as many bits")
        if self.divergence is not None:
            share = f"{self.divergence:.2f}" if self.divergence < 10 else f"{self.divergence:,.0f}"
            lines.append(f"  how unlike the calibration's texts the prompt is: {share} times what is too much")
        if self.unlike_layers:
            lines.append(f"  it is beyond that in layers {', '.join(map(str, self.unlike_layers))}")
        if self.read_share is not None:
            lines.append(
                f"  steps read {self.read_share:.1%} of the stored tokens; the others had at most "
                f"{self.unread_bound_mean:.3g} of the attention on average, {self.unread_bound_max:.3g} at worst"
                f"{at_confidence(self.read_confidence)}"
            )
        said = self.idle if self.left_out is None else (*self.idle, self.left_out)
        return "\n".join([*lines, *(f"  {sentence}" for sentence in said)])

    def _header(self) -> str:
        """Return what became of the tokens that were read."""
        done = "kept whole" if self.stored_as == "whole" else self.stored_as
        evicts = bool(self.evicted_tokens) or self.evictions_differ
        if self.stored_as == "coded" and self.tokens and not self.pruned_tokens and not evicts:
            why = "is unlike the calibration's texts" if self.unlike_layers else "is too short for its bits"
            return f"{self.tokens} tokens, all dense, as the prompt {why}"
        pruned = f"{self.pruned_tokens} of them {done}" if self.pruned_tokens else f"nothing {done}"
        if not evicts:
            return f"{self.tokens} tokens, {pruned}"
        if not self.evicted_tokens:
            return (
                f"{self.tokens} tokens read, all kept in some layers, and some evicted in others: "
                f"{'at most ' * bool(self.pruned_tokens)}{pruned}"
            )
        kept = self.tokens - self.evicted_tokens
        if self.evictions_differ:
            return (
                f"{self.tokens} tokens read, at least {self.evicted_tokens} of them evicted in every layer, "
                f"at most {kept} kept, at most {self.pruned_tokens} of these {done}"
            )
        return (
            f"{self.tokens} tokens read, {self.evicted_tokens} of them evicted, {kept} kept: {self.pruned_tokens} "
            f"{done} and {kept - self.pruned_tokens} dense"
        )

    def _coded_rows(self) -> list[tuple[str, int, str]]:
        """Return what codes consist of; nothing if nothing is coded."""
        if self.bits is None:
            return []
        waiting = f"{self.waiting_tokens} tokens still have more bits than asked for" if self.waiting_tokens else ""
        return [
            ("  codes", self.code_bytes, waiting),
            ("  scales, means", self.parameter_bytes, "and how many bits each channel has"),
        ]


def _share(ratio: float, dense: int) -> str:
    """Return a ratio in words; nothing if there is nothing to compare with."""
    return f"{ratio:.1%} of dense {dense:,}" if dense else ""


def _sizes(layers: Iterable[PrunedKeyLayer]) -> Counter[str]:
    """Return the bytes of layers by kind, and numbers of elements."""
    sizes: Counter[str] = Counter()
    for layer in layers:
        if layer.compressed is not None:
            sizes.update(layer.compressed.sizes())
        if layer.tail is not None:
            tail, length = layer.tail, layer.get_seq_length()
            # Without the unused rest of the buffers, which is spare room.
            sizes["tail_keys"] += tail.keys.nbytes
            sizes["tail_values"] += tail.values.nbytes
            sizes["dense keys"] += tail.keys.shape[:2].numel() * length * layer.head_dim * tail.keys.element_size()
            sizes["dense values"] += tail.values[:, :, :1].nbytes * length if tail.length else 0
            width = layer.head_dim + tail.values.shape[-1]
            sizes["all elements"] += tail.keys.shape[:2].numel() * length * width
    return sizes


def measure(every: Iterable[object]) -> MemoryReport:
    """Add up what all layers of a cache hold; at least one is a `PrunedKeyLayer`."""
    layers: list[PrunedKeyLayer] = []
    rest: list[object] = []
    for layer in every:
        if isinstance(layer, PrunedKeyLayer):
            layers.append(layer)
        else:
            rest.append(layer)
    sizes = _sizes(layers)
    used = sum(sizes[name] for name in _PARTS)
    evicted = [layer.evicted_length for layer in layers]
    read = ReadReport(tuple(layer.tally.reading(layer.plan.index) for layer in layers))
    held = sum(storages([layer.stored_parts() for layer in layers]).values())
    unlike = _divergences(layers)
    return MemoryReport(
        layers=len(layers) + len(rest),
        prunable_layers=len(layers),
        tokens=max(layer.get_seq_length() for layer in layers),
        pruned_tokens=max(layer.pruned_length for layer in layers),
        pruned_key_bytes=sizes["keys"],
        dense_key_bytes=sizes["sink_keys"] + sizes["tail_keys"],
        index_bytes=sizes["indices"],
        value_bytes=sizes["values"] + sizes["tail_values"],
        spare_bytes=held - used,
        other_bytes=sum(storages([vars(layer) for layer in rest]).values()),
        dense_equivalent_key_bytes=sizes["dense keys"],
        dense_equivalent_value_bytes=sizes["dense values"],
        code_bytes=sizes["key codes"] + sizes["value codes"],
        parameter_bytes=sizes["key parameters"] + sizes["value parameters"],
        coded_key_bytes=sum(sizes[f"key {part}"] for part in _COUNTED) + sizes["classes"] / 2,
        coded_value_bytes=sum(sizes[f"value {part}"] for part in _COUNTED) + sizes["classes"] / 2,
        coded_key_elements=sizes["key elements"],
        coded_value_elements=sizes["value elements"],
        all_elements=sizes["all elements"],
        predicted_kl=_predicted_kl(layers[0].plan),
        divergence=max(unlike.values(), default=None),
        unlike_layers=tuple(index for index, share in unlike.items() if share > 1),
        waiting_tokens=max(0 if layer.compressed is None else layer.compressed.waiting for layer in layers),
        stored_as=layers[0].maker.stored_as(layers[0].plan),
        reading_bytes=sizes["reading"],
        read_share=read.share if read.steps else None,
        unread_bound_mean=read.bound_mean if read.steps else None,
        unread_bound_max=read.bound_max if read.steps else None,
        read_confidence=None if layers[0].plan.config.read is None else layers[0].plan.config.read.confidence,
        evicted_tokens=min(evicted),
        evictions_differ=min(evicted) < max(evicted)
        or any(one.compressed is not None and one.compressed.needs_mask for one in layers),
        idle=_idle(layers),
    )


def _predicted_kl(plan: LayerPlan) -> float | None:
    """Return the KL that was measured with as many bits, of caches that keep all tokens."""
    return None if plan.bits is None or plan.config.evict is not None else plan.bits.predicted_kl


def _divergences(layers: Sequence[PrunedKeyLayer]) -> dict[int, float]:
    """Return how unlike the calibration the prompt is, by layer, in each that knows it."""
    found = {each.plan.index: each.compressed.divergence for each in layers if each.compressed is not None}
    return {index: own.largest[1] for index, own in found.items() if own is not None}


def _idle(layers: Sequence[PrunedKeyLayer]) -> tuple[str, ...]:
    """Say which settings have changed nothing, once the prompt is over.

    A budget that is larger than the prompt, or a ratio of 0, is no mistake in itself, as the next prompt may be longer:
    so nothing warns.
    """
    plan, evict = layers[0].plan, layers[0].plan.config.evict
    if not any(layer.get_seq_length() for layer in layers) or any(layer.prompt.waiting for layer in layers):
        return ()
    if any(layer.evicted_length for layer in layers):
        return ()
    stores = [layer.compressed for layer in layers if layer.compressed is not None and layer.pruned_length]
    found = layers[0].maker.idle(plan, stores, [layer.tally.reading(layer.plan.index) for layer in layers])
    if evict is not None and stores:
        return (f"evict={evict} has dropped no token: the prompt has no more than it keeps", *found)
    return found


#: Kinds of bytes, each counted once.
_PARTS = ("keys", "sink_keys", "values", "indices", "reading", "tail_keys", "tail_values")
_COUNTED = ("codes", "parameters")
