"""Attention of new tokens over few of the old ones: a layer's storage, and the kernels that read it.

Each of several new tokens (candidates of assisted decoding, a short turn) chooses for itself, as if it came alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....errors import CacheError
from ....kernels.cache import reading as kernels
from ..masks import decoding_mask
from ..packed.tokens import dequantized
from ..tally import ReadTally
from .parts import ChannelParts


@torch.compiler.disable  # type: ignore[untyped-decorator]
def read_attention(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: ChannelParts,
    tally: ReadTally,
    want_weights: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention of new tokens over few of the compressed ones and the dense tail.

    Parameters
    ----------
    module, query, tail, value, attention_mask, old, scaling, dropout, softcap, is_causal
        As in :func:`~grace_opt.hf.stores.channels.attention.pruned_attention`.
    tally : ReadTally
        Is told what was read.
    want_weights : bool
        Whether the attention weights are needed.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``.
    weights : Tensor or None
        ``(B, H_q, L, stored tokens)``, zeros at unread tokens.
    """
    if dropout and module.training:
        raise CacheError("read= reads few tokens of each step, which has no dropout: write model.eval()")
    index, count, recent = old.index, query.shape[2], tail.shape[2]
    assert index is not None
    keys, values = dequantized(old.pruned_keys), dequantized(old.values)
    sinks, count_old = old.sink_keys.shape[2], keys.shape[2]
    if attention_mask is not None:
        attention_mask = decoding_mask(module, attention_mask, old, recent, query.shape[1])
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    outputs, weights = [], []
    for row in range(count):
        shown = recent - (count - 1 - row) * causal
        mask, upto = None, shown
        if attention_mask is not None:  # which hides what comes later
            mask, upto = _plain(attention_mask[:, :, row : row + 1]), recent
        mine = query[:, :, row : row + 1]
        newer = (tail, value) if upto == recent else (tail[:, :, :upto], value[:, :, :upto])
        stored = kernels.Stored(keys, old.kept_indices, old.sink_keys, newer[0], values, newer[1])
        attend = kernels.attention_for(mine, stored, mask, softcap, index.units)
        if want_weights:
            attend = kernels.reference_for(index.units)
        few = attend(mine, stored, index.units, *index.limits(count_old, sinks + shown), mask, scaling, softcap)
        outputs.append(few.output)
        real = count_old if index.padding is None else count_old - index.padding[:, None]
        tally.add((few.tokens + sinks + shown).double() / (real + sinks + shown), few.bound.detach())
        if want_weights:
            assert few.weights is not None
            weights.append(torch.nn.functional.pad(few.weights, (0, recent - upto)))
    output = outputs[0] if count == 1 else torch.cat(outputs, dim=1)
    return output, torch.cat(weights, dim=2) if want_weights else None


def _plain(mask: Tensor) -> Tensor | None:
    """Return a mask as truths, or None if it hides nothing; on a GPU, and if it adds to logits, as it is."""
    if mask.device.type != "cpu":
        return mask
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (mask == 0)).all()):
            return mask
        mask = ~hidden
    return None if bool(mask.all()) else mask
