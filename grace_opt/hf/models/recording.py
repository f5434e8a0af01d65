"""Post-RoPE queries, keys and values of one forward pass, as the attention saw them.

When: to study weights and masks on a real model (reconstruction errors per layer, heatmaps, calibration) without
re-implementing its projections, norms and rotary embeddings. During the call, the model's attention is a registered
function that records its arguments and then does the same as ``"grace_sdpa"`` or ``"grace_eager"``.

Source: the attention interface of transformers. Nothing is patched, and the model's attention implementation is
restored even if the forward pass raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...errors import CacheError, OptionError
from .arguments import require_model
from .attention import BASE_IMPLEMENTATIONS, Attended, AttentionFunction, key_validity, logit_scaling, register
from .implementation import attention_implementation, base_for


@dataclass(frozen=True)
class AttentionCall:
    """One call of a model's attention function.

    Attributes
    ----------
    module : Module
        The attention module that called.
    query, key, value, mask
        As the function received them.
    scaling : float
        Factor of the logits.
    softcap : float or None
        Bound of the logits.
    output : Tensor
        ``(B, L, H_q, d_v)``, what it returned.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None
    output: Tensor


Recorder = Callable[[AttentionCall], None]

# A context variable keeps models in other threads from being recorded. Recording has separate attention functions:
# torch.compile cannot trace this variable, and the functions for decoding must stay traceable.
_RECORDER: ContextVar[Recorder | None] = ContextVar("grace_opt_recorder", default=None)


@dataclass(frozen=True)
class CapturedAttention:
    """What one layer's attention was called with.

    Attributes
    ----------
    layer : int
        Position of the layer in the model.
    queries : Tensor
        ``(B, H_q, L, d)``, post-RoPE.
    keys, values : Tensor
        ``(B, H_kv, L, d)`` and ``(B, H_kv, L, d_v)``, keys post-RoPE.
    valid : Tensor or None
        ``(B, L)`` bool, False at padding; None if nothing is padded. In a sliding-window layer: the tokens that the
        last token may attend to.
    scaling : float
        Factor by which the model multiplies the logits.
    softcap : float or None
        Bound of the logits, if the model has one.
    """

    layer: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    valid: Tensor | None
    scaling: float
    softcap: float | None = None


def capture_attention(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    layers: Iterable[int] | None = None,
) -> dict[int, CapturedAttention]:
    """Run the model once, without a cache and without gradients, and keep what its attention layers received.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder whose attention goes through transformers' attention interface.
    input_ids : Tensor
        ``(B, L)``.
    attention_mask : Tensor, optional
        ``(B, L)``, zero at padding; positions then count the real tokens, as in ``generate``.
    layers : iterable of int, optional
        Layers to record; by default all. Each takes the memory of its queries, keys and values.

    Returns
    -------
    dict
        Layer number to :class:`CapturedAttention`, in the model's order.

    Raises
    ------
    OptionError
        If the model or the tokens are of another kind, or ``layers`` names one that the model does not have.
    CacheError
        If the model's attention does not go through the attention interface, or a layer attends several times (HRM).

    Examples
    --------
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> ids = tokenizer("the quiet river runs", return_tensors="pt").input_ids
    >>> captured = capture_attention(model, ids, layers=[0, 2])
    >>> sorted(captured), captured[2].keys.shape
    ([0, 2], torch.Size([1, 2, 4, 64]))
    """
    model = require_model(model, "capture_attention")
    if (
        not isinstance(input_ids, Tensor)
        or input_ids.ndim != 2
        or not input_ids.numel()
        or input_ids.is_floating_point()
    ):
        found = (
            f"{input_ids.dtype} {tuple(input_ids.shape)}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        )
        raise OptionError(
            f"input_ids is {found}: give the numbers of at least one token, (batch, length), as tokenizer(text, "
            'return_tensors="pt").input_ids does'
        )
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    wanted = set(range(count)) if layers is None else set(layers)
    unknown = sorted(wanted - set(range(count)))
    if unknown:
        raise OptionError(f"the model has {count} layers and no {unknown}; write numbers from 0 to {count - 1}")
    captured: dict[int, CapturedAttention] = {}
    again: set[int] = set()

    def keep(call: AttentionCall) -> None:
        index = getattr(call.module, "layer_idx", None)
        if index in captured and not _is_same(captured[index], call):
            again.add(index)
        elif index in wanted:
            valid = key_validity(call.mask, call.query.shape[0], call.key.shape[2])
            tensors = call.query.detach(), call.key.detach(), call.value.detach()
            captured[index] = CapturedAttention(index, *tensors, valid, call.scaling, call.softcap)

    record(model, input_ids, attention_mask, keep)
    if again:
        raise CacheError(
            f"layers {sorted(again)} of {type(model).__name__} attend several times in one pass, each time with other "
            "queries and keys; they cannot be captured"
        )
    missing = sorted(wanted - captured.keys())
    if missing:
        raise CacheError(
            f"layers {missing} of {type(model).__name__} did not call the attention interface; write layers= with "
            f"those that compute attention themselves"
        )
    return {index: captured[index] for index in sorted(captured)}


def _is_same(seen: CapturedAttention, call: AttentionCall) -> bool:
    """Return whether a layer attends again with the same queries and keys, as DiffLlama does for half of the values."""
    return torch.equal(seen.queries, call.query) and torch.equal(seen.keys, call.key)


def record(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    recorder: Recorder,
    cache: Cache | None = None,
    positions: Tensor | None = None,
) -> None:
    """Run the model once, without gradients, and show a function every call of the attention.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder whose attention goes through transformers' attention interface.
    input_ids, attention_mask
        As for `capture_attention`.
    recorder : callable
        Receives each `AttentionCall` when it has returned, layer after layer.
    cache : Cache, optional
        An empty one, which is filled.
    positions : Tensor, optional
        ``(L,)``, those of the tokens, if there is no mask; by default one after the other from 0.
    """
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    if positions is not None:
        # With a mask, as transformers reads gaps between positions without one as the ends of sequences.
        inputs |= {"position_ids": positions[None], "attention_mask": torch.ones_like(input_ids)}
    if attention_mask is not None:
        # As in generate(): positions count real tokens, so a padded row gets the same rotations as the row alone.
        inputs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    with attention_implementation(model, f"grace_capture_{base_for(model)}"), torch.no_grad():
        token = _RECORDER.set(recorder)
        try:
            # Without the language-model head: the logits of a long prompt would take far more memory than what is
            # captured.
            model.base_model(**inputs, past_key_values=cache, use_cache=cache is not None)
        finally:
            _RECORDER.reset(token)


def register_capture() -> None:
    """Register the attention functions that :func:`capture_attention` switches to."""
    for base in BASE_IMPLEMENTATIONS:
        register(f"grace_capture_{base}", _recording(base), base)


def _recording(base_name: str) -> AttentionFunction:
    # Not the base function: another thread may be decoding on this model from a pruned cache.
    attend_as_ever: AttentionFunction = ALL_ATTENTION_FUNCTIONS[f"grace_{base_name}"]

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
        attended = attend_as_ever(module, query, key, value, attention_mask, **kwargs)
        recorder = _RECORDER.get()
        if recorder is not None:
            scaling, softcap = logit_scaling(query, kwargs), kwargs.get("softcap")
            recorder(AttentionCall(module, query, key, value, attention_mask, scaling, softcap, attended[0]))
        return attended

    attend.__name__ = attend.__qualname__ = f"grace_capture_{base_name}_attention"
    return attend
