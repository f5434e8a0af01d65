"""The attention functions ``"grace_sdpa"`` and ``"grace_eager"``: dense over the prompt, then on pruned keys.

Prompt: the base function (sdpa, or the model's own eager function) runs on dense keys as usual. The layer then receives
the post-RoPE queries and the padding, and compresses its keys when the prompt is over. Nothing is projected again, so
query norms, biases and scaling are those of the model.

Decoding: the two-segment attention of :mod:`grace_opt.hf.stores.channels.attention`, by a kernel if one fits
(:mod:`grace_opt.hf.stores.channels.fused`); coded tokens (``bits=``) are read where they lie if a kernel fits
(:mod:`grace_opt.hf.stores.coded.in_place`). Kernels return no attention weights: eager attention uses them where nobody
reads weights (by ``output_attentions``, or a forward hook). For many new tokens at once (another turn of a
conversation), the two segments' logits would take as much memory as those of eager attention. Above
``MAX_FUSED_QUERIES`` new tokens, the keys are therefore widened with zeros, or made dense, one layer at a time, and the
base function computes the same.

With ``read=``, up to as many new tokens read few of the old ones (:mod:`grace_opt.hf.stores.channels.reading`).

Keys that do not come from a `PrunedKeyLayer` (another cache, a sliding layer, no cache) go straight to the base
function. Soft-capped logits, which sdpa cannot compute, are refused with any cache.

Source: ``sdpa_attention_forward`` and ``eager_attention_forward`` of transformers, which have the same signature.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..._util.arrays import without_autocast
from ...errors import CacheError
from ...kernels.cache.decode.reference import causal_mask
from ..bases.importance import tail_attention
from ..models.attention import (
    BASE_IMPLEMENTATIONS,
    Attended,
    AttentionFunction,
    base_function,
    key_validity,
    logit_scaling,
    register,
)
from ..models.compat import weights_may_be_read
from ..models.observation import Observation
from ..stores.channels.attention import (
    check_mask_covers_cache,
    gather_mask_columns,
    scatter_channels,
    weights_in_sequence,
)
from ..stores.channels.by_heads import ByHeads
from ..stores.channels.fused import fused_attention
from ..stores.channels.reading import read_attention
from ..stores.channels.storage import Compressed
from ..stores.coded.coded import CodedTokens, added_attention
from ..stores.coded.in_place import attention_in_place
from .layer_context import LayerProtocol, context_of

MAX_FUSED_QUERIES = 32


def register_attention() -> None:
    """Register ``"grace_sdpa"`` and ``"grace_eager"`` with transformers."""
    for base in BASE_IMPLEMENTATIONS:
        register(f"grace_{base}", pruning_function(base), base)


def pruning_function(base_name: str) -> AttentionFunction:
    """Return the attention function to register as ``grace_`` plus the base's name."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,  # by position, if kvpress has wrapped the function
        **kwargs: Any,
    ) -> Attended:
        kwargs["dropout"] = dropout
        if base_name == "sdpa" and kwargs.get("softcap") is not None:
            raise CacheError(
                f"{type(module).__name__} soft-caps its attention logits, which sdpa cannot do (old transformers "
                'silently ignores it); write model.set_attn_implementation("grace_eager")'
            )
        context = context_of(key)
        if context is None:
            return base_function(base_name, module)(module, query, key, value, attention_mask, **kwargs)
        if context_of(value) is None:
            raise CacheError(
                f"{type(module).__name__} changes its values between cache and attention, so the cached values would "
                f"be wrong; this model cannot be pruned"
            )
        layer, old = context.layer, context.compressed
        # Layers that share another layer's keys (Gemma 3n) get here too, after the one that has added them. A module's
        # number does not tell: recurrent models (HRM) write to another layer of the cache in each cycle.
        is_owner = layer.attended()
        if is_owner:
            layer.check_filled_by(module)
        if layer.plan.config.read is not None:
            _refuse_unsupported(module, kwargs, "leave out read=")
        elif layer.plan.config.fused and layer.plan.bits is None:
            _refuse_unsupported(module, kwargs, "write fused=False among the settings of CompressedCache() or attach()")
        if old is not None:
            output, weights = _decoded(base_name, module, query, key, value, attention_mask, layer, old, kwargs)
            return output, None if weights is None else weights_in_sequence(weights, old)
        attended = base_function(base_name, module)(module, query, key, value, attention_mask, **kwargs)
        behind = layer.prompt.behind(query.shape[2], key.shape[2])
        if is_owner:  # whose queries choose
            now = Observation(
                query,
                key_validity(attention_mask, query.shape[0], key.shape[2]),
                key.shape[2],
                logit_scaling(query, kwargs),
                kwargs.get("softcap"),
            )
            layer.observe(now, key, value, at_once=behind > 0)
        if behind and layer.compressed is not None:
            pruned = layer.compressed.to(key.device)  # an offloading cache has moved the layer away
            return _candidates(
                base_name, module, query, key, value, attention_mask, layer, pruned, behind, attended, kwargs
            )
        return attended

    attend.__name__ = attend.__qualname__ = f"grace_{base_name}_attention"
    return attend


def _decoded(
    base_name: str,
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    layer: LayerProtocol,
    old: Compressed | ByHeads | CodedTokens,
    kwargs: dict[str, Any],
) -> Attended:
    """Compute attention of new tokens over the compressed part and the dense tail."""
    fused = layer.plan.config.fused and query.shape[2] <= MAX_FUSED_QUERIES
    want_weights = base_name == "eager" and (bool(kwargs.get("output_attentions")) or weights_may_be_read(module))
    if fused and isinstance(old, Compressed) and old.index is not None and old.pruned_keys.shape[2]:
        few: Attended = read_attention(
            module, query, tail, value, attention_mask, old, layer.tally, want_weights, **kwargs
        )
        return few
    if fused and isinstance(old, Compressed):
        return fused_attention(module, query, tail, value, attention_mask, old, want_weights, **kwargs)
    if isinstance(old, ByHeads):
        if fused and not want_weights:
            return _decoded_by_heads(module, query, tail, value, attention_mask, old, kwargs), None
        if attention_mask is None:
            attention_mask = _mask(module, base_name, query, old.length + tail.shape[2], kwargs.get("is_causal"))
    if attention_mask is not None:
        check_mask_covers_cache(module, attention_mask, old, tail.shape[2])
        attention_mask = gather_mask_columns(attention_mask, old, query.shape[1])
    scaling, softcap = logit_scaling(query, kwargs), kwargs.get("softcap")
    if fused and isinstance(old, CodedTokens) and not want_weights:
        given = {**kwargs, "scaling": scaling}
        found = attention_in_place(module, query, tail, value, attention_mask, old, received=layer.received, **given)
        if found is not None:
            output, layer.received = found
            return output, None
    keys, values = scatter_channels(old, tail, value)
    if isinstance(old, CodedTokens):
        newest = old.waiting + tail.shape[2]
        with without_autocast(keys):
            now = tail_attention(query, keys, attention_mask, newest, scaling, softcap)
            layer.received = added_attention(layer.received, now)
    return base_function(base_name, module)(module, query, keys, values, attention_mask, **kwargs)


def _decoded_by_heads(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    old: ByHeads,
    kwargs: dict[str, Any],
) -> Tensor:
    """Compute the same for heads that keep different numbers of tokens, one group of heads after the other."""
    group = query.shape[1] // tail.shape[1]
    found = []
    for part, heads in old.by_heads():
        asking = slice(group * heads.start, group * heads.stop)
        mask = attention_mask
        if mask is not None and mask.shape[1] > 1:
            mask = mask[:, asking]
        newer = tail[:, heads], value[:, heads]
        found.append(fused_attention(module, query[:, asking], *newer, mask, part, False, **kwargs)[0])
    return torch.cat(found, dim=2)


def _mask(module: nn.Module, base_name: str, query: Tensor, length: int, is_causal: bool | None) -> Tensor:
    """Return the mask that no mask stands for, of the kind that the base function reads."""
    seen = causal_mask(query.shape[2], length, query.device)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        seen = torch.ones_like(seen)
    if base_name != "eager":
        return seen
    return torch.zeros_like(seen, dtype=query.dtype).masked_fill(~seen, torch.finfo(query.dtype).min)


def _candidates(
    base_name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    layer: LayerProtocol,
    old: Compressed | ByHeads | CodedTokens,
    behind: int,
    attended: Attended,
    kwargs: dict[str, Any],
) -> Attended:
    """Recompute, on the pruned keys, the output rows of candidates that follow the prompt.

    Each candidate then sees what it would see if fed alone, after the prompt.
    """
    shown, length = query.shape[2] - behind, key.shape[2]
    mask = causal_mask(behind, length, key.device) if attention_mask is None else attention_mask[:, :, shown:]
    tail, values = key[:, :, old.length :], value[:, :, old.length :]
    rows, weights = _decoded(base_name, module, query[:, :, shown:], tail, values, mask, layer, old, kwargs)
    output, dense_weights = attended
    output = torch.cat([output[:, :shown], rows], dim=1)
    if dense_weights is None or weights is None:
        return output, None
    return output, torch.cat([dense_weights[:, :, :shown], weights_in_sequence(weights, old)], dim=2)


def _refuse_unsupported(module: nn.Module, kwargs: dict[str, Any], instead: str) -> None:
    """Raise if this model's attention needs something that the fused path cannot compute."""
    extra = [argument for argument in ("s_aux", "position_bias") if kwargs.get(argument) is not None]
    if extra:
        raise CacheError(
            f"{type(module).__name__} adds {' and '.join(extra)} to its attention logits, which the fused path cannot "
            f"do; {instead}"
        )
