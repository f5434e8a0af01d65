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

from ...errors import CacheError
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
from ..stores.masks import causal_mask, check_mask_covers_cache, gather_mask_columns, weights_in_sequence
from ..stores.store import Step, Store
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
        instead = layer.maker.instead_of_terms(layer.plan)
        if instead is not None:
            _refuse_unsupported(module, kwargs, instead)
        if old is not None:
            output, weights = _decoded(base_name, module, query, key, value, attention_mask, layer, old, kwargs)
            if is_owner:
                layer.attention_over(query.shape[2])
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
    old: Store,
    kwargs: dict[str, Any],
) -> Attended:
    """Compute attention of new tokens over the compressed part and the dense tail."""
    fused = layer.plan.config.fused and query.shape[2] <= MAX_FUSED_QUERIES
    want_weights = base_name == "eager" and (bool(kwargs.get("output_attentions")) or weights_may_be_read(module))
    step = Step(module, query, tail, value, attention_mask, want_weights, layer.tally, kwargs)
    found = old.attend(step) if fused else None
    if found is not None:
        return found
    if attention_mask is None and old.needs_mask:
        attention_mask = _mask(module, base_name, query, old.length + tail.shape[2], kwargs.get("is_causal"))
    if attention_mask is not None:
        check_mask_covers_cache(module, attention_mask, old, tail.shape[2])
        attention_mask = gather_mask_columns(attention_mask, old, query.shape[1])
    keys, values = old.dense(tail, value)
    old.attended(keys, step, attention_mask)
    return base_function(base_name, module)(module, query, keys, values, attention_mask, **kwargs)


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
    old: Store,
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
