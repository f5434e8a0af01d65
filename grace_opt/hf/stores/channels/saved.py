"""Check the file of a store without some channels of its keys, and put it together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....errors import CacheError
from ...settings.reading import CHANNELS
from ..packed.tokens import QuantizedTokens, StoredTensor, dequantized
from ..plan import LayerPlan
from ..saved import LayerCheck, at_least, group_prefix
from ..store import Store
from ..tail import Tail
from .by_heads import ByHeads
from .index import ReadIndex
from .storage import Compressed

_DENSE = ("sink_keys", "kept_indices")
_STORED = ("pruned_keys", "old_values")


def channels_of_file(
    check: LayerCheck, plan: LayerPlan, about: dict[str, Any], tensors: dict[str, Tensor], tail: Tail
) -> Callable[[torch.device], Store]:
    """Check what `Store.to_file` gave; return what puts a `Compressed`, or `ByHeads`, on a device."""
    if "heads" in about:
        return _by_heads(check, plan, about, tensors, tail)
    parts = _put_together(check, plan, about, tensors)
    _fit(check, plan, about, parts, tail)

    def put(device: torch.device) -> Store:
        here = {name: part.to(device) for name, part in parts.items()}
        store = _compressed(about["length"], here)
        if plan.config.read is None:
            return store
        padding = here.get("padding")
        assert padding is None or isinstance(padding, Tensor)
        keys = dequantized(store.pruned_keys)
        return store.with_index(ReadIndex.of(plan.config.read, keys, about["lead"], padding, plan.index))

    return put


def _by_heads(
    check: LayerCheck, plan: LayerPlan, about: dict[str, Any], tensors: dict[str, Tensor], tail: Tail
) -> Callable[[torch.device], Store]:
    """Check each group of heads, as a layer of its own."""
    sizes, quantized, heads = about["heads"], about.get("quantized", {}), tail.keys.shape[1]
    fits = isinstance(sizes, list) and len(sizes) > 1 and all(at_least(size, 1) for size in sizes)
    check.require(fits and sum(sizes) == heads, f"heads={sizes!r} are no groups of {heads} heads")
    check.require(plan.heads_may_differ, "its heads keep different numbers of tokens, which these settings do not")
    check.require(isinstance(quantized, dict), "the list of quantised parts is wrong")
    groups: list[dict[str, StoredTensor]] = []
    left, start = set(tensors) | set(quantized), 0
    for number, size in enumerate(sizes):
        prefix, these = group_prefix(number), slice(start, start + size)
        start += size
        inner, metas = _under(prefix, tensors), _under(prefix, quantized)
        left -= {prefix + name for name in (*inner, *metas)}
        own = {name: value for name, value in about.items() if name not in ("heads", "quantized")}
        own |= {"quantized": metas} if metas else {}
        group = _put_together(check, plan, own, inner)
        _fit(check, plan, own, group, Tail(tail.keys[:, these], tail.values[:, these]))
        groups.append(group)
    check.require(not left, f"it has tensors that do not belong: {', '.join(sorted(left))}")

    def put(device: torch.device) -> Store:
        here = ({name: part.to(device) for name, part in group.items()} for group in groups)
        return ByHeads(tuple(_compressed(about["length"], parts) for parts in here))

    return put


def _under(prefix: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): part for name, part in found.items() if name.startswith(prefix)}


def _compressed(length: int, parts: Mapping[str, Any]) -> Compressed:
    named = {"values" if name == "old_values" else name: part for name, part in parts.items() if name != "padding"}
    return Compressed(length=length, **named)


def _put_together(
    check: LayerCheck, plan: LayerPlan, about: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, StoredTensor]:
    """Return the tensors, with quantised ones put together."""
    quantized = about.get("quantized", {})
    check.require(
        isinstance(quantized, dict) and set(quantized) <= set(_STORED),
        "the list of quantised parts is missing or wrong",
    )
    plain = (*_DENSE, *(name for name in _STORED if name not in quantized))
    reads = plan.config.read is not None
    optional = tuple(name for name in ("positions", *(["padding"] if reads else [])) if name in tensors)
    inner = {name: [key for key in tensors if key.startswith(f"{name}.")] for name in quantized}
    fields = {"length", *(["quantized"] if quantized else []), *(["lead"] if reads else [])}
    check.names(about, fields, tensors, (*plain, *optional, *(key for keys in inner.values() for key in keys)))
    parts: dict[str, StoredTensor] = {name: tensors[name] for name in (*plain, *optional)}
    for name, meta in quantized.items():
        parts[name] = QuantizedTokens.from_tensors({k[len(name) + 1 :]: tensors[k] for k in inner[name]}, meta)
    return parts


def _fit(check: LayerCheck, plan: LayerPlan, about: dict[str, Any], parts: dict[str, StoredTensor], tail: Tail) -> None:
    """Check that the parts of the older tokens fit each other and the tail."""
    keys, values = tail.keys, tail.values
    kept, sinks, pruned, old = (parts[name] for name in ("kept_indices", "sink_keys", "pruned_keys", "old_values"))
    positions, (batch, heads, _, width) = parts.get("positions"), keys.shape
    if not isinstance(kept, Tensor) or not isinstance(sinks, Tensor) or isinstance(positions, QuantizedTokens):
        raise CacheError(f"layer {check.number} of the saved cache has indices in a few bits; save the cache again")
    fits = kept.dtype == torch.int64 and kept.dim() == 3 and kept.shape[:2] == (batch, heads) and kept.numel() > 0
    check.require(fits, f"kept_indices are {kept.dtype} {tuple(kept.shape)}, not int64 of {batch} x {heads} heads")
    within = int(kept.min()) >= 0 and int(kept.max()) < width
    split = _lead(check, plan, about, width)
    ascending = [bool((part[..., 1:] > part[..., :-1]).all()) for part in (kept[..., :split], kept[..., split:])]
    once = split == width or (
        kept.shape[2] == width and bool((kept.sort(-1).values == torch.arange(width, device=kept.device)).all())
    )
    check.require(
        within and all(ascending) and once, f"kept_indices are not sorted channels from 0 to {width - 1}, each once"
    )
    count = sinks.shape[2] if sinks.dim() == 4 else 0
    check.tokens_of("sink_keys", sinks, (batch, heads, count, width), keys.dtype)
    stored = count + (pruned.shape[2] if len(pruned.shape) == 4 else 0)
    check.tokens_of("pruned_keys", pruned, (batch, heads, stored - count, kept.shape[2]), keys.dtype)
    check.tokens_of("old_values", old, (batch, heads, stored, values.shape[3]), values.dtype)
    check.placed(about["length"], stored, positions, batch, heads)
    padding = parts.get("padding")
    if padding is not None:
        fits = isinstance(padding, Tensor) and padding.dtype == torch.int32 and tuple(padding.shape) == (batch,)
        fits = fits and isinstance(padding, Tensor) and 0 <= int(padding.min()) <= int(padding.max()) <= pruned.shape[2]
        check.require(fits, f"padding is not a number of the {pruned.shape[2]} old tokens for each sequence")


def _lead(check: LayerCheck, plan: LayerPlan, about: dict[str, Any], width: int) -> int:
    """Check how many channels give scores, and return where the order of the channels begins anew."""
    if plan.config.read is None:
        return width
    lead = about["lead"]
    if plan.config.read.by != CHANNELS:
        check.require(lead is None, f"lead={lead!r} for a cache that reads no channels first")
        return width
    check.require(at_least(lead, 1) and lead <= width, f"lead={lead!r} is no number of the {width} channels")
    return int(lead)
