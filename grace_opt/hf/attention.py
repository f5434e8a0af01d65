r"""The attention functions ``"grace_sdpa"`` and ``"grace_eager"``: dense over the prompt, two segments afterwards.

Prompt: the base function (sdpa, or the model's own eager one) runs on dense keys as ever. Then the layer is handed the
post-RoPE queries and the padding that it saw, and compresses itself. Nothing is re-projected, so query norms, biases
and scaling are right by construction.

Decoding, for a query row :math:`q`, kept channels :math:`C`, pruned keys :math:`K_p` and the dense tail :math:`K_t`:

.. math:: o = \operatorname{softmax}\bigl(s\,[\,q_C K_p^\top \mid q K_t^\top\,] + m\bigr)\, V

with one softmax over both segments, in float32. The queries of a group share their KV head's keys without repeating
them. For many new tokens at once (a further turn of a conversation) these logits would take as much memory as eager
attention's, so above ``MAX_FUSED_QUERIES`` the keys are widened with zeros, one layer at a time, and the base function
does the work: the same numbers by another route.

A key tensor without a hand-off (another cache, a sliding layer, no cache) goes straight to the base function.

Source: ``sdpa_attention_forward`` and ``eager_attention_forward`` of transformers, whose call they share.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import CacheError
from .layer import HANDOFF, Handoff, zero_filled

Attended = tuple[Tensor, Tensor | None]
AttentionFunction = Callable[..., Attended]

BASES = ("sdpa", "eager")
MAX_FUSED_QUERIES = 32


def register_attention() -> None:
    """Register ``"grace_sdpa"`` and ``"grace_eager"`` with transformers."""
    for base in BASES:
        register(f"grace_{base}", _pruning(base), base)


def register(name: str, function: AttentionFunction, base_name: str) -> None:
    """Register an attention function and a mask function: without the latter, transformers silently drops padding.

    Parameters
    ----------
    name : str
        What ``model.set_attn_implementation`` is to accept.
    function : callable
        The attention function.
    base_name : str
        ``"sdpa"`` or ``"eager"``, whose masks it expects.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base_name])


def base_function(name: str, module: nn.Module) -> AttentionFunction:
    """The attention function to build on.

    Parameters
    ----------
    name : str
        ``"sdpa"`` or ``"eager"``.
    module : Module
        The attention module that calls: eager attention is no registered function, each model file has its own, with
        its own soft-capping, sinks and so on.
    """
    function: AttentionFunction | None = None
    if name != "eager":
        function = ALL_ATTENTION_FUNCTIONS[name]
    for cls in type(module).__mro__:
        function = function or getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
    if function is None:
        raise CacheError(
            f"{type(module).__name__} has no eager attention function to build on; write "
            'model.set_attn_implementation("grace_sdpa")'
        )
    return function


def _pruning(base_name: str) -> AttentionFunction:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Attended:
        base = base_function(base_name, module)
        handoff: Handoff | None = getattr(key, HANDOFF, None)
        if handoff is None:
            return base(module, query, key, value, attention_mask, **kwargs)
        layer = handoff.layer
        layer.attended()
        _refuse_unsupported(base_name, module, layer.plan.fused, kwargs)
        if handoff.pruned_keys is not None and query.shape[2] <= MAX_FUSED_QUERIES:
            output, weights = segmented_attention(module, query, key, value, attention_mask, handoff, **kwargs)
            return output, weights if base_name == "eager" else None
        keys = zero_filled(handoff.pruned_keys, handoff.kept_indices, key)
        attended = base(module, query, keys, value, attention_mask, **kwargs)
        if layer.prompt_is_over(query.shape[2]):
            layer.compress(query, key_validity(attention_mask, query.shape[0], keys.shape[2]))
        return attended

    attend.__name__ = attend.__qualname__ = f"grace_{base_name}_attention"
    return attend


def segmented_attention(
    module: nn.Module,
    query: Tensor,
    tail: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    handoff: Handoff,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention over a pruned segment and a dense tail with one softmax.

    Parameters
    ----------
    module : Module
        The model's attention module; asked for ``is_causal`` where the keyword does not say.
    query : Tensor
        ``(B, H_q, L, d)``, post-RoPE.
    tail, value : Tensor
        ``(B, H, S_t, d)`` and ``(B, H, S, d_v)``.
    attention_mask : Tensor or None
        ``(B or 1, H_q or 1, L, S)``, bool (True attends) or additive; None means causal, nothing padded.
    handoff : Handoff
        Carries the pruned segment.
    scaling, dropout, softcap, is_causal
        As in transformers' attention functions.

    Returns
    -------
    output : Tensor
        ``(B, L, H_q, d_v)``.
    weights : Tensor
        ``(B, H_q, L, S)``.
    """
    pruned, kept = handoff.pruned_keys, handoff.kept_indices
    if pruned is None or kept is None:
        raise CacheError("there is no pruned segment yet; run the model on a prompt of several tokens first")
    batch, query_heads, length, head_dim = query.shape
    heads = tail.shape[1]
    rows = query_heads // heads * length
    grouped = query.reshape(batch, heads, rows, head_dim)
    narrowed = grouped.gather(-1, kept[:, :, None, :].expand(-1, -1, rows, -1))
    logits = torch.cat([narrowed @ pruned.transpose(-1, -2), grouped @ tail.transpose(-1, -2)], dim=-1)
    logits = logits.view(batch, query_heads, length, -1).float() * (head_dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if attention_mask is None and length > 1:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = causal_mask(length, logits.shape[-1], logits.device) if causal else None
    if attention_mask is not None:
        logits = _masked(logits, attention_mask)
    weights = torch.softmax(logits, dim=-1).to(query.dtype)
    if dropout:
        weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    output = (weights.view(batch, heads, rows, -1) @ value).view(batch, query_heads, length, -1)
    return output.transpose(1, 2).contiguous(), weights


def causal_mask(length: int, total: int, device: torch.device) -> Tensor:
    """``(1, 1, length, total)`` bool: each of the last ``length`` positions attends to itself and those before it."""
    return torch.ones(length, total, dtype=torch.bool, device=device).tril(total - length)[None, None]


def key_validity(attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Which keys are real tokens, read from the mask that the attention got.

    Parameters
    ----------
    attention_mask : Tensor or None
        ``(B or 1, H or 1, L, S)``, bool or additive. None is what mask functions return when nothing is padded.
    batch, length : int
        ``B`` and ``S``.

    Returns
    -------
    Tensor or None
        ``(B, S)`` bool. The last query may look at every key, so its row shows the padding and nothing else.
    """
    if attention_mask is None:
        return None
    _check_covers(attention_mask, length)
    last = attention_mask[:, 0, -1]
    # Additive masks say "never" with the smallest number of their type or, in old code, with -1e4.
    return (last if last.dtype == torch.bool else last > -1e4).expand(batch, length)


def _masked(logits: Tensor, attention_mask: Tensor) -> Tensor:
    _check_covers(attention_mask, logits.shape[-1])
    # The smallest number instead of -inf: a row that sees nothing stays finite.
    if attention_mask.dtype == torch.bool:
        return logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    return logits + attention_mask


def _check_covers(attention_mask: Tensor, length: int) -> None:
    if attention_mask.dim() != 4 or attention_mask.shape[-1] != length:
        raise CacheError(
            f"the attention mask has shape {tuple(attention_mask.shape)} for {length} tokens, cached and new; write a "
            f"mask (batch, {length}) that covers the whole cache, or a 4-D one (batch, 1, new tokens, {length})"
        )


def _refuse_unsupported(base_name: str, module: nn.Module, fused: bool, kwargs: dict[str, Any]) -> None:
    """Name what this model's attention needs and the chosen path can not do, rather than leave it out silently."""
    name = type(module).__name__
    if base_name == "sdpa" and kwargs.get("softcap") is not None:
        raise CacheError(
            f"{name} soft-caps its attention logits, which sdpa can not do; write "
            'model.set_attn_implementation("grace_eager")'
        )
    extra = [argument for argument in ("s_aux", "position_bias") if kwargs.get(argument) is not None]
    if fused and extra:
        raise CacheError(
            f"{name} adds {' and '.join(extra)} to its attention logits, which the fused path can not do; write "
            "PrunedKeyCache(..., fused=False)"
        )
