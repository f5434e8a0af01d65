"""`idle_channels`: which settings have changed nothing in stores of pruned keys, in words, for the memory report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...settings.config import CacheConfig
from ...settings.reading import SAMPLING
from ..store import Store
from ..tally import LayerReading


def idle_channels(config: CacheConfig, stores: Sequence[Store], readings: Sequence[LayerReading]) -> tuple[str, ...]:
    """Return a sentence for every setting that has changed nothing in a cache.

    Parameters
    ----------
    config : CacheConfig
        The settings.
    stores : sequence of Store
        One of each layer, at least one.
    readings : sequence of LayerReading
        What the steps of each layer have read.
    """
    if config.read is None:
        if config.quantize is None and config.evict is None and all(_keeps_all_channels(store) for store in stores):
            return ("no channel is dropped, so keys take as many bytes as dense ones: write a larger ratio",)
        return ()
    found = []
    if all(each.steps and each.share == 1.0 for each in readings):
        less = (
            "fewer tables, or more hash_bits"
            if config.read.by == SAMPLING
            else "a smaller share, or a smaller page_size"
        )
        found.append(f"{config.read} has left no token unread: write {less}")
    if config.read.by == SAMPLING:
        found.append(_time_of_samples(stores[0]))
    return tuple(found)


def _keeps_all_channels(store: Store) -> bool:
    kept, keys = store.kept_channels(), store.parts()["sink_keys"]
    return kept is not None and kept.shape[-1] == keys.shape[-1]


def _time_of_samples(store: Store) -> str:
    keys = store.parts()["sink_keys"]
    if isinstance(keys, torch.Tensor) and keys.is_cpu and keys.dtype == torch.float32:
        return "a sample takes about as much time as reading all: all codes are compared in each step"
    return (
        "a sample takes many times as long as reading all: torch compares all codes in each step, and only on a CPU in "
        "float32 a compiled loop does"
    )
