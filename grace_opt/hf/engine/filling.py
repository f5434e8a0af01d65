"""Fill caches with a prompt that was read once: many settings compared for the price of one reading.

When: `grace_opt.hf.tune`, `calibrate.kl` and the benchmarks, which measure many caches after the same prompt. A test
compares a filled cache with one whose prompt the model reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ...errors import CacheError
from ..models.observation import Observation
from ..models.recording import CapturedAttention, capture_attention
from .layer import PrunedKeyLayer

AnyCache = TypeVar("AnyCache", bound=Any)


def filled(cache: AnyCache, captured: Mapping[int, CapturedAttention]) -> AnyCache:
    """Fill a new cache with a prompt, as the attention of each layer would; the model is not run.

    Parameters
    ----------
    cache : Cache
        Empty; ours, or one of transformers.
    captured : mapping
        What `grace_opt.hf.models.recording` returned for the prompt, of every layer of the cache.

    Returns
    -------
    Cache
        The same object.

    Examples
    --------
    >>> from grace_opt.hf import CompressedCache, capture_attention
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> ids = tokenizer("the quiet river runs past the old mill . " * 20, return_tensors="pt").input_ids
    >>> cache = filled(CompressedCache(model, ratio=0.5), capture_attention(model, ids))
    >>> cache.get_seq_length() == ids.shape[1], cache.memory_report().pruned_tokens > 0
    (True, True)
    """
    for index, layer in captured.items():
        keys, values = cache.update(layer.keys, layer.values, index)
        to_fill = cache.layers[index]
        if isinstance(to_fill, PrunedKeyLayer):
            to_fill.attended()
            seen = Observation(layer.queries, layer.valid, layer.keys.shape[2], layer.scaling, layer.softcap)
            to_fill.observe(seen, keys, values)
    return cache


def dense_cache(model: PreTrainedModel, captured: Mapping[int, CapturedAttention]) -> DynamicCache:
    """Return transformers' cache, filled with a prompt that was read before."""
    return filled(DynamicCache(config=model.config), captured)


class ReadOnce:
    """A prompt that a model has read, with which caches are filled.

    Where what its attention received is not enough (layers without attention, or that share a cache), the model reads
    the prompt again for each cache.

    Parameters
    ----------
    model : PreTrainedModel
    ids : Tensor
        ``(1, n)``, on the model's device.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self._model, self._ids, self._captured = model, ids, None
        count = len(DynamicCache(config=model.config).layers)
        with suppress(CacheError):
            captured = capture_attention(model, ids)
            self._captured = captured if sorted(captured) == list(range(count)) else None

    def fill(self, cache: AnyCache) -> AnyCache:
        """Fill a new cache; return the same object."""
        if self._captured is not None:
            return filled(cache, self._captured)
        self._model(self._ids, past_key_values=cache, logits_to_keep=1)
        return cache
