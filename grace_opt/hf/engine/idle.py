"""`idle_settings`: which settings of a cache have changed nothing, in words, for the memory report.

When: `grace_opt.hf.engine.report` measures a cache. A budget that is larger than the prompt, or a ratio of 0, is no
mistake in itself, as the next prompt may be longer; so nothing warns, and the report says it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..settings.reading import SAMPLING
from .layer import PrunedKeyLayer


def idle_settings(layers: Sequence[PrunedKeyLayer]) -> tuple[str, ...]:
    """Return a sentence for every setting that has changed nothing; none before the end of the prompt.

    Parameters
    ----------
    layers : sequence of PrunedKeyLayer
        The prunable layers of a cache, at least one.
    """
    config = layers[0].plan.config
    if not any(layer.get_seq_length() for layer in layers) or any(layer.prompt.waiting for layer in layers):
        return ()
    if any(layer.evicted_length for layer in layers):
        return ()
    if not any(layer.pruned_length for layer in layers):
        # With bits=, the report's first line says why.
        return () if layers[0].plan.bits is not None else (_too_short(layers[0]),)
    found = []
    if config.evict is not None:
        found.append(f"evict={config.evict} has dropped no token: the prompt has no more than it keeps")
    if config.read is not None:
        shares = [layer.tally.reading(layer.plan.index) for layer in layers]
        if all(each.steps and each.share == 1.0 for each in shares):
            less = "a smaller share, or a smaller page_size"
            if config.read.by == SAMPLING:
                less = "fewer tables, or more hash_bits"
            found.append(f"{config.read} has left no token unread: write {less}")
        if config.read.by == SAMPLING:
            found.append(_time_of_samples(layers[0]))
    elif config.quantize is None and config.evict is None and all(_keeps_all_channels(layer) for layer in layers):
        found.append("no channel is dropped, so keys take as many bytes as dense ones: write a larger ratio")
    return tuple(found)


def _keeps_all_channels(layer: PrunedKeyLayer) -> bool:
    """Whether a layer has a store that could drop channels, and drops none."""
    kept = None if layer.compressed is None else layer.compressed.kept_channels()
    return kept is not None and kept.shape[-1] == layer.head_dim


def _time_of_samples(layer: PrunedKeyLayer) -> str:
    assert layer.tail is not None, "it has a store"
    where = layer.tail.keys
    if where.is_cpu and where.dtype == torch.float32:
        return "a sample takes about as much time as reading all: all codes are compared in each step"
    return (
        "a sample takes many times as long as reading all: torch compares all codes in each step, and only on a CPU in "
        "float32 a compiled loop does"
    )


def _too_short(layer: PrunedKeyLayer) -> str:
    config = layer.plan.config
    first = f" and the first sink_tokens={config.sink_tokens}" if config.sink_tokens else ""
    evicted = " and none is evicted" if config.evict is not None else ""
    return (
        f"all tokens are dense{evicted}: the prompt is too short, as its last recent_window={config.recent_window} "
        f"tokens{first} stay so"
    )
