"""Caches of a prompt that was read once: every kind is filled with what the attention of its layers received.

When: `bench.bits` and `bench.arena`, which compare many caches after the same prompts. A test compares a cache that is
filled with one whose prompt is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from grace_opt.hf import CapturedAttention, PrunedKeyCache
from grace_opt.hf.evaluation import StoredBits
from grace_opt.hf.observation import Observation

#: First and last tokens of a prompt that stay dense, in every row.
SINKS, WINDOW = 4, 32


def filled(cache: PrunedKeyCache, captured: Mapping[int, CapturedAttention]) -> PrunedKeyCache:
    """Fill a new cache with a prompt that was read before, as the attention function does; the model is not run."""
    for index, layer in captured.items():
        keys, values = cache.update(layer.keys, layer.values, index)
        to_fill = cache.layers[index]
        to_fill.attended()
        seen = Observation(layer.queries, layer.valid, layer.keys.shape[2], layer.scaling, None)
        to_fill.observe(seen, keys, values)
    return cache


def dense_cache(model: PreTrainedModel, captured: Mapping[int, CapturedAttention]) -> DynamicCache:
    """Return transformers' cache, filled with a prompt that was read before."""
    cache = DynamicCache(config=model.config)
    for index, layer in captured.items():
        cache.update(layer.keys, layer.values, index)
    return cache


def sizes_of(found: StoredBits) -> dict[str, float]:
    """Return bits per element, and bytes as a share of a dense cache in 16 bits, for a record."""
    return asdict(found) | {"share": found.share}
