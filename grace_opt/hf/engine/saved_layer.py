"""Check one layer of a saved cache before it is used.

When: `grace_opt.hf.engine.saving.restore_layers`. Every field and tensor must be one that a layer can hold and must fit
all others; otherwise a `CacheError` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...errors import CacheError
from ..models.foreign_layers import EMPTY, RECURRENT, restore_states, state_names
from ..models.placement import rank
from ..settings.bits import OF_PROMPT
from ..settings.reading import CHANNELS
from ..stores.channels.by_heads import ByHeads
from ..stores.channels.index import ReadIndex
from ..stores.channels.storage import Compressed, StoredTensor, Tail, dequantized
from ..stores.coded.coded import CodedTokens
from ..stores.coded.saved_row import CODED_FIELDS, RowCheck
from ..stores.packed.tokens import QuantizedTokens
from ..stores.plan import LayerPlan
from .layer import PrunedKeyLayer

_FIELDS = {"kind", "filled"}
_DENSE = ("sink_keys", "kept_indices")
_STORED = ("pruned_keys", "old_values")


def group_prefix(number: int) -> str:
    """Return how the names of the tensors begin that a group of heads has for itself."""
    return f"heads.{number}."


@dataclass(frozen=True)
class SavedLayer:
    """The saved parts of one layer, checked to fit together.

    Attributes
    ----------
    number : int
    description : mapping
    parts : dict
        Tensors, and quantised ones, by name.
    batch, tokens : int
        Number of sequences, and number of tokens that each has seen; 0 if the layer is empty. Recurrent states do not
        tell their number of tokens: None.
    coded : CodedTokens, optional
        The older tokens of a layer with ``bits=``.
    """

    number: int
    description: Mapping[str, Any]
    parts: dict[str, StoredTensor]
    batch: int
    tokens: int | None
    coded: CodedTokens | None = None

    @staticmethod
    def of(number: int, layer: Any, description: Any, found: dict[str, Tensor]) -> SavedLayer:
        """Check a layer's description and tensors.

        Parameters
        ----------
        number : int
            For messages.
        layer : cache layer
            An empty layer of the expected kind.
        description : Any
            The layer's entry in the metadata.
        found : dict of Tensor
            The layer's tensors.

        Raises
        ------
        CacheError
            Naming what is wrong.
        """
        return _Check(number).layer(layer, description, found)

    def restore(self, layer: Any, device: torch.device) -> None:
        """Fill the empty layer."""
        parts: dict[str, Any] = {name: part.to(device) for name, part in self.parts.items()}
        if isinstance(layer, PrunedKeyLayer):
            layer.prompt.declared = self.description["declared"]
        if not self.description["filled"]:
            return
        if isinstance(layer, RECURRENT):
            restore_states(layer, parts)
            return
        if not isinstance(layer, PrunedKeyLayer):
            layer.lazy_initialization(parts["keys"], parts["values"])
            layer.keys, layer.values = parts["keys"], parts["values"]
            if self.description["cumulative_length"] is not None:
                layer.cumulative_length = self.description["cumulative_length"]
            return
        tail = Tail(parts["tail_keys"], parts["tail_values"])
        layer.lazy_initialization(tail.keys, tail.values)
        layer.tail = tail
        if self.coded is not None:
            layer.compressed = self.coded.to(device)
            layer.received = parts.get("received")
        elif "heads" in self.description:
            layer.compressed = ByHeads(
                tuple(self._stored(parts, group_prefix(number)) for number in range(len(self.description["heads"])))
            )
        elif "length" in self.description:
            read, index = layer.plan.config.read, None
            if read is not None:
                keys = dequantized(parts["pruned_keys"])
                lead, number = self.description["lead"], layer.plan.index
                index = ReadIndex.of(read, keys, lead, parts.get("padding"), number)
            layer.compressed = self._stored(parts, "", index)

    def _stored(self, parts: Mapping[str, Any], prefix: str, index: ReadIndex | None = None) -> Compressed:
        return Compressed(
            length=self.description["length"],
            sink_keys=parts[f"{prefix}sink_keys"],
            pruned_keys=parts[f"{prefix}pruned_keys"],
            kept_indices=parts[f"{prefix}kept_indices"],
            values=parts[f"{prefix}old_values"],
            positions=parts.get(f"{prefix}positions"),
            index=index,
        )


@dataclass(frozen=True)
class _Check:
    """The checks of one layer; every message begins with the layer's number."""

    number: int

    def require(self, fits: bool, what: str) -> None:
        if not fits:
            raise CacheError(f"layer {self.number} of the saved cache: {what}; save the cache again")

    def layer(self, layer: Any, said: Any, found: dict[str, Tensor]) -> SavedLayer:
        self.require(isinstance(said, dict) and set(said) >= _FIELDS, "its description lacks a kind, or what is filled")
        if said["kind"] != type(layer).__name__:
            raise CacheError(
                f"layer {self.number} was saved as {said['kind']} and is {type(layer).__name__} in this "
                "transformers; load the cache with the version that saved it"
            )
        self.require(type(said["filled"]) is bool, f"filled={said['filled']!r} is not true or false")
        if isinstance(layer, PrunedKeyLayer):
            declared = said.get("declared", "missing")
            self.require(
                declared is None or _at_least(declared, 1), f"declared={declared!r} is not the length of a prompt"
            )
            return self.pruned(layer.plan, said, found)
        return (self.states if isinstance(layer, (*RECURRENT, *EMPTY)) else self.plain)(layer, said, found)

    def states(self, layer: Any, said: dict[str, Any], found: dict[str, Tensor]) -> SavedLayer:
        """Check a layer that has states in place of keys, or nothing."""
        expected = said.get("states")
        fits = isinstance(expected, list) and all(name in sorted(state_names(layer)) for name in expected)
        self.require(fits and said["filled"] == bool(expected), f"states={expected!r}, filled={said['filled']!r}")
        self.names(said, {*_FIELDS, "states"}, found, tuple(expected or ()))
        for name, state in found.items():
            fits = state.is_floating_point() and state.dim() >= 3 and state.numel() > 0
            self.require(fits, f"{name} is {state.dtype} {tuple(state.shape)} and no state of a batch")
        batches = {state.shape[0] for state in found.values()}
        self.require(len(batches) < 2, f"its states are of {' and of '.join(map(str, sorted(batches)))} sequences")
        return SavedLayer(self.number, said, dict(found), *((batches.pop(), None) if batches else (0, 0)))

    def plain(self, layer: Any, said: dict[str, Any], found: dict[str, Tensor]) -> SavedLayer:
        kind = type(layer)
        fields = _FIELDS | ({"cumulative_length"} if said["filled"] else set())
        self.names(said, fields, found, ("keys", "values") if said["filled"] else ())
        if not said["filled"]:
            return SavedLayer(self.number, said, {}, 0, 0)
        keys, values = found["keys"], found["values"]
        self.tokens_of("keys", keys, keys.shape[:3])
        self.tokens_of("values", values, keys.shape[:3], keys.dtype)
        length = said["cumulative_length"]
        if kind is DynamicSlidingWindowLayer:
            self.require(_at_least(length, keys.shape[2]), f"cumulative_length={length!r} for {keys.shape[2]} tokens")
        else:
            self.require(
                kind is DynamicLayer and length is None, f"cumulative_length={length!r} but the layer has none"
            )
        return SavedLayer(self.number, said, dict(found), keys.shape[0], keys.shape[2] if length is None else length)

    def pruned(self, plan: LayerPlan, said: dict[str, Any], found: dict[str, Tensor]) -> SavedLayer:
        fields, compressed = {*_FIELDS, "declared"}, said["filled"] and "length" in said
        if not said["filled"]:
            self.names(said, fields, found, ())
            return SavedLayer(self.number, said, {}, 0, 0)
        if compressed and plan.bits is not None:
            return self.coded(plan, said, found)
        if compressed and "heads" in said:
            return self.by_heads(plan, said, found)
        if not compressed:
            self.names(said, fields, found, ("tail_keys", "tail_values"))
        parts = self.put_together(plan, said, found) if compressed else dict[str, StoredTensor](found)
        keys, values = found["tail_keys"], found["tail_values"]
        self.tokens_of("tail_keys", keys, keys.shape[:3])
        self.tokens_of("tail_values", values, keys.shape[:3], keys.dtype)
        if compressed:
            self.compressed(plan, said, parts, keys, values)
        length = said["length"] if compressed else 0
        return SavedLayer(self.number, said, parts, keys.shape[0], length + keys.shape[2])

    def by_heads(self, plan: LayerPlan, said: dict[str, Any], found: dict[str, Tensor]) -> SavedLayer:
        """Check a layer whose heads keep different numbers of tokens: each group of heads, as a layer of its own."""
        dense = {name: tensor for name, tensor in found.items() if not name.startswith("heads.")}
        self.names({}, set(), dense, ("tail_keys", "tail_values"))
        keys, values = dense["tail_keys"], dense["tail_values"]
        self.tokens_of("tail_keys", keys, keys.shape[:3])
        self.tokens_of("tail_values", values, keys.shape[:3], keys.dtype)
        sizes, quantized = said["heads"], said.get("quantized", {})
        fits = isinstance(sizes, list) and len(sizes) > 1 and all(_at_least(size, 1) for size in sizes)
        self.require(fits and sum(sizes) == keys.shape[1], f"heads={sizes!r} are no groups of {keys.shape[1]} heads")
        self.require(plan.heads_may_differ, "its heads keep different numbers of tokens, which these settings do not")
        self.require(isinstance(quantized, dict), "the list of quantised parts is wrong")
        parts: dict[str, StoredTensor] = {**dense}
        left, start = (set(found) - set(dense)) | set(quantized), 0
        for number, size in enumerate(sizes):
            prefix, run = group_prefix(number), slice(start, start + size)
            start += size
            inner = {name.removeprefix(prefix): found[name] for name in found if name.startswith(prefix)}
            metas = {name.removeprefix(prefix): quantized[name] for name in quantized if name.startswith(prefix)}
            left -= {prefix + name for name in (*inner, *metas)}
            own = {name: value for name, value in said.items() if name not in ("heads", "quantized")}
            own |= {"quantized": metas} if metas else {}
            tails = {"tail_keys": keys[:, run], "tail_values": values[:, run]}
            group = self.put_together(plan, own, {**inner, **tails})
            self.compressed(plan, own, group, keys[:, run], values[:, run])
            parts |= {prefix + name: part for name, part in group.items() if name not in tails}
        self.require(not left, f"it has tensors that do not belong: {', '.join(sorted(left))}")
        return SavedLayer(self.number, said, parts, keys.shape[0], said["length"] + keys.shape[2])

    def coded(self, plan: LayerPlan, said: dict[str, Any], found: dict[str, Tensor]) -> SavedLayer:
        """Check a layer whose older tokens are coded."""
        assert plan.bits is not None
        rows = {name: tensor for name, tensor in found.items() if name.startswith("rows.")}
        others = {name: tensor for name, tensor in found.items() if name not in rows}
        optional = tuple(name for name in ("positions", "received") if name in others)
        fields = {*_FIELDS, "declared", "length", *CODED_FIELDS}
        self.names(said, fields, others, ("tail_keys", "tail_values", *optional))
        keys, values = found["tail_keys"], found["tail_values"]
        self.tokens_of("tail_keys", keys, keys.shape[:3])
        self.tokens_of("tail_values", values, keys.shape[:3], keys.dtype)
        (batch, heads, recent, width), depth = keys.shape, values.shape[3]
        coded = isinstance(said["rows"], list) and any(said["rows"])  # else no basis is needed
        bases = plan.bits.bases(plan.index, heads, rank()) if coded else None
        if bases is not None:
            made = tuple(tuple(basis.decode.shape) for basis in bases)
            self.require(
                made == ((heads, width, width), (heads, depth, depth)),
                f"the model's basis is for keys {made[0]} and values {made[1]}, and the tail has {heads} heads of "
                f"{width} and {depth} channels",
            )
        check = RowCheck(self.require, heads, width, depth, keys.dtype, plan.bits.basis == OF_PROMPT, plan.bits.trellis)
        block = plan.config.tail_block
        self.require(said["block"] in (0, block), f"block={said['block']!r} for a cache with tail_block={block}")
        made_rows = check.rows(said, rows, batch)
        self.placed(said["length"], said["stored"], found.get("positions"), batch, heads)
        received, newest = found.get("received"), recent + max(row.waits for row in made_rows)
        if received is not None:
            fits = received.dtype == torch.float32 and received.dim() == 4 and received.shape[3] == newest
            fits = fits and received.shape[:3] == (batch, heads, 3)
            self.require(fits, f"received is {received.dtype} {tuple(received.shape)} for {newest} newest tokens")
            usable = bool(received.isfinite().all()) and bool((received >= 0).all())
            self.require(usable, "received has numbers that are negative or not finite")
        old = CodedTokens(said["length"], made_rows, bases, found.get("positions"))
        parts = {name: tensor for name, tensor in others.items() if name != "positions"}
        return SavedLayer(self.number, said, {**parts}, batch, said["length"] + recent, old)

    def put_together(self, plan: LayerPlan, said: dict[str, Any], found: dict[str, Tensor]) -> dict[str, StoredTensor]:
        """Return the tensors, with quantised ones put together."""
        quantized = said.get("quantized", {})
        self.require(
            isinstance(quantized, dict) and set(quantized) <= set(_STORED),
            "the list of quantised parts is missing or wrong",
        )
        plain = ("tail_keys", "tail_values", *_DENSE, *(name for name in _STORED if name not in quantized))
        reads = plan.config.read is not None
        optional = tuple(name for name in ("positions", *(["padding"] if reads else [])) if name in found)
        inner = {name: [key for key in found if key.startswith(f"{name}.")] for name in quantized}
        fields = {*_FIELDS, "declared", "length", *(["quantized"] if quantized else []), *(["lead"] if reads else [])}
        self.names(said, fields, found, (*plain, *optional, *(key for keys in inner.values() for key in keys)))
        parts: dict[str, StoredTensor] = {name: found[name] for name in (*plain, *optional)}
        for name, meta in quantized.items():
            parts[name] = QuantizedTokens.from_tensors({k[len(name) + 1 :]: found[k] for k in inner[name]}, meta)
        return parts

    def compressed(
        self, plan: LayerPlan, said: dict[str, Any], parts: dict[str, StoredTensor], keys: Tensor, values: Tensor
    ) -> None:
        """Check that the parts of the older tokens fit each other and the tail."""
        kept, sinks, pruned, old = (parts[name] for name in ("kept_indices", "sink_keys", "pruned_keys", "old_values"))
        positions, (batch, heads, _, width) = parts.get("positions"), keys.shape
        if not isinstance(kept, Tensor) or not isinstance(sinks, Tensor) or isinstance(positions, QuantizedTokens):
            raise CacheError(f"layer {self.number} of the saved cache has indices in a few bits; save the cache again")
        fits = kept.dtype == torch.int64 and kept.dim() == 3 and kept.shape[:2] == (batch, heads) and kept.numel() > 0
        self.require(fits, f"kept_indices are {kept.dtype} {tuple(kept.shape)}, not int64 of {batch} x {heads} heads")
        within = int(kept.min()) >= 0 and int(kept.max()) < width
        split = self.lead(plan, said, width)
        ascending = [bool((part[..., 1:] > part[..., :-1]).all()) for part in (kept[..., :split], kept[..., split:])]
        once = split == width or (
            kept.shape[2] == width and bool((kept.sort(-1).values == torch.arange(width, device=kept.device)).all())
        )
        self.require(
            within and all(ascending) and once, f"kept_indices are not sorted channels from 0 to {width - 1}, each once"
        )
        self.tokens_of("sink_keys", sinks, (batch, heads, sinks.shape[2] if sinks.dim() == 4 else 0, width), keys.dtype)
        stored = sinks.shape[2] + (pruned.shape[2] if len(pruned.shape) == 4 else 0)
        self.tokens_of("pruned_keys", pruned, (batch, heads, stored - sinks.shape[2], kept.shape[2]), keys.dtype)
        self.tokens_of("old_values", old, (batch, heads, stored, values.shape[3]), values.dtype)
        self.placed(said["length"], stored, positions, batch, heads)
        padding = parts.get("padding")
        if padding is not None:
            fits = padding.dtype == torch.int32 and tuple(padding.shape) == (batch,)
            fits = fits and isinstance(padding, Tensor) and 0 <= int(padding.min()) <= int(padding.max())
            fits = fits and isinstance(padding, Tensor) and int(padding.max()) <= pruned.shape[2]
            self.require(fits, f"padding is not a number of the {pruned.shape[2]} old tokens for each sequence")

    def lead(self, plan: LayerPlan, said: dict[str, Any], width: int) -> int:
        """Check how many channels give scores, and return where the order of the channels begins anew."""
        if plan.config.read is None:
            return width
        lead = said["lead"]
        if plan.config.read.by != CHANNELS:
            self.require(lead is None, f"lead={lead!r} for a cache that reads no channels first")
            return width
        self.require(_at_least(lead, 1) and lead <= width, f"lead={lead!r} is no number of the {width} channels")
        return int(lead)

    def placed(self, length: Any, stored: int, positions: Tensor | None, batch: int, heads: int) -> None:
        """Check the number of tokens that were seen, and which of them are stored."""
        self.require(stored > 0 and _at_least(length, stored), f"length={length!r} for {stored} stored tokens")
        if positions is None:
            self.require(length == stored, f"length={length} for {stored} stored tokens, although none was evicted")
            return
        shapes = ((batch, 1, stored), (batch, heads, stored))
        fits = positions.dtype == torch.int32 and tuple(positions.shape) in shapes
        self.require(fits, f"positions are {positions.dtype} {tuple(positions.shape)}, not int32 of {stored} tokens")
        order = positions.sort(dim=-1).values
        within = int(order.min()) >= 0 and int(order.max()) < length and bool((order[..., 1:] > order[..., :-1]).all())
        self.require(within, f"positions are not distinct tokens from 0 to {length - 1}")

    def names(self, said: dict[str, Any], fields: set[str], found: dict[str, Tensor], tensors: tuple[str, ...]) -> None:
        """Check that there are exactly these fields and tensors."""
        for have, want, what in ((set(said), fields, "fields"), (set(found), set(tensors), "tensors")):
            lost = ", ".join(f"{self.number}.{name}" for name in sorted(want - have))
            self.require(not lost, f"it lacks {what}: {lost}")
            more = ", ".join(f"{self.number}.{name}" for name in sorted(have - want))
            self.require(not more, f"it has {what} that do not belong: {more}")

    def tokens_of(
        self, name: str, part: StoredTensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> None:
        """Check that keys or values are floating-point tensors (B, H, S, ...) with these first dimensions."""
        fits = len(part.shape) == 4 and tuple(part.shape[: len(shape)]) == tuple(shape)
        sizes = fits and min(part.shape[0], part.shape[1], part.shape[3]) > 0
        kind = part.dtype.is_floating_point if dtype is None else part.dtype == dtype
        self.require(sizes and kind, f"{name} are {part.dtype} {tuple(part.shape)} and do not fit the other tensors")


def _at_least(value: Any, least: int) -> bool:
    return type(value) is int and value >= least
