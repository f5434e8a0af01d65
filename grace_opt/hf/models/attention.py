"""Attention functions of transformers: how they are registered, found, and read.

Source: ``ALL_ATTENTION_FUNCTIONS`` and ``AttentionMaskInterface`` of transformers, its documented registration
interface.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...errors import CacheError

#: An attention's output ``(B, L, H_q, d_v)``, and its weights if there are any.
Attended = tuple[Tensor, Tensor | None]
AttentionFunction = Callable[..., Attended]

BASE_IMPLEMENTATIONS = ("sdpa", "eager")


def register(name: str, function: AttentionFunction, base_name: str) -> None:
    """Register an attention function and its mask function; without one, transformers silently ignores padding.

    Parameters
    ----------
    name : str
        The name for ``model.set_attn_implementation``.
    function : callable
        The attention function.
    base_name : str
        ``"sdpa"`` or ``"eager"``, whose masks it expects.
    """
    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base_name])


def base_function(name: str, module: nn.Module) -> AttentionFunction:
    """Return the attention function to build on.

    Parameters
    ----------
    name : str
        ``"sdpa"`` or ``"eager"``.
    module : Module
        The calling attention module. Eager attention is not a registered function: each model file has its own, with
        its own soft-capping, sinks and so on.
    """
    function: AttentionFunction | None = None
    if name != "eager":
        function = ALL_ATTENTION_FUNCTIONS[name]
    for cls in type(module).__mro__:
        function = function or getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
    if function is None:
        raise CacheError(
            f"{type(module).__name__} has no eager attention function; write "
            'model.set_attn_implementation("grace_sdpa")'
        )
    return function


def logit_scaling(query: Tensor, kwargs: Mapping[str, Any]) -> float:
    """Return the factor by which an attention call multiplies its logits, from its arguments."""
    return float(kwargs.get("scaling") or query.shape[-1] ** -0.5)


def key_validity(attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Return which keys are real tokens, read from the attention mask.

    Parameters
    ----------
    attention_mask : Tensor or None
        ``(B or 1, H or 1, L, S)``, bool or additive. None if nothing is padded.
    batch, length : int
        ``B`` and ``S``.

    Returns
    -------
    Tensor or None
        ``(B, S)`` bool. The last query may look at every key, so its row shows the padding and nothing else.
    """
    if attention_mask is None:
        return None
    check_mask_length(attention_mask, length)
    last = attention_mask[:, 0, -1]
    # Additive masks say "never" with the smallest number of their type or, in old code, with -1e4.
    return (last if last.dtype == torch.bool else last > -1e4).expand(batch, length)


def check_mask_length(attention_mask: Tensor, length: int) -> None:
    """Raise unless a mask is ``(..., ..., ..., length)``: a mask of one token would be broadcast silently."""
    if attention_mask.dim() != 4 or attention_mask.shape[-1] != length:
        raise CacheError(
            f"the attention mask has shape {tuple(attention_mask.shape)} for {length} tokens, cached and new; write a "
            f"mask (batch, {length}) that covers the whole cache, or a 4-D one (batch, 1, new tokens, {length})"
        )
