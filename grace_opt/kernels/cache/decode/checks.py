"""What the host and the GPU's kernel check alike before they read by address: numbers of tokens, and the mask."""

from __future__ import annotations

import torch
from torch import Tensor

from ....errors import CacheError
from .forms import ADDITIVE, BOOL, CAUSAL, NO_MASK
from .packed import PackedValues


def check_lengths(sinks: int, pruned: int, tail: int, old_values: Tensor | PackedValues, tail_values: Tensor) -> None:
    """Raise unless there are as many values as keys, and at least one."""
    old, new = old_values.shape[2], tail_values.shape[2]
    if sinks + pruned + tail == 0 or old != sinks + pruned or new != tail:
        raise CacheError(
            f"{sinks} sink, {pruned} pruned and {tail} tail keys do not go with {old} old and {new} tail values; there "
            "must be as many values as keys, and at least one"
        )


def kind_of_mask(attention_mask: Tensor | None, query: Tensor, total: int, causal: bool) -> int:
    """Return which of the kinds in `forms` a mask over `total` stored tokens is; raise if its shape does not fit."""
    batch, query_heads, length, _ = query.shape
    if attention_mask is None:
        return CAUSAL if causal and length > 1 else NO_MASK
    full, shape = (batch, query_heads, length, total), tuple(attention_mask.shape)
    if len(shape) != 4 or shape[3] != total or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise CacheError(
            f"the attention mask has shape {shape} for {full}, of which only the number of columns must match exactly"
        )
    return BOOL if attention_mask.dtype == torch.bool else ADDITIVE
