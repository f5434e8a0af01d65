"""How far each layer's attention output moves if it reads a smaller cache in place of exact keys and values.

When: `compare_predictions` says that a cache costs too much, and the question is in which layer: of ours, transformers'
`QuantizedCache`, or any other whose layers return all that they hold when they are updated.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ...._util.parameters import integer
from ....errors import EvaluationError
from ...engine.layer import PrunedKeyLayer
from ...models.recording import CapturedAttention, capture_attention


def output_error(model: PreTrainedModel, cache: Cache, ids: Tensor, queries: int = 32) -> dict[int, float]:
    r"""Return the relative error of each layer's attention output.

    .. math:: \frac{\sum_q \lVert \hat o_q - o_q \rVert^2}{\sum_q \lVert o_q \rVert^2}

    with the outputs o of the prompt's last queries over all of its exact keys and values, and :math:`\hat o` over those
    that the cache holds. Every layer is asked by itself, by exact queries: errors of earlier layers do not count.

    Parameters
    ----------
    model : PreTrainedModel
    cache : Cache
        That has read the prompt and no more. It is not changed.
    ids : Tensor
        ``(1, L)``: the prompt.
    queries : int
        Number of last queries. They attend to all tokens, as later ones would.

    Returns
    -------
    dict
        Layer to error, of the layers that hold the whole prompt; those with a sliding window do not.

    Raises
    ------
    EvaluationError
        If the cache holds another number of tokens, or more than one sequence.
    CacheError, OptionError
        As `capture_attention` does.

    Notes
    -----
    Reads the prompt once more; takes memory for the exact keys and values of all layers.

    Examples
    --------
    >>> from grace_opt.hf import CompressedCache, attention_implementation
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> ids = tokenizer("the quiet river runs past the old mill . " * 20, return_tensors="pt").input_ids
    >>> found = {}
    >>> for bits in (2, 4):
    ...     cache = CompressedCache(model, bits=bits)
    ...     with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
    ...         _ = model(ids, past_key_values=cache)
    ...     found[bits] = output_error(model, cache, ids)
    >>> sorted(found[2]), all(found[4][layer] < found[2][layer] < 0.5 for layer in found[2])
    ([0, 1, 2], True)
    """
    count = integer("queries", queries, at_least=1)
    length = ids.shape[1]
    held = {index: layer.get_seq_length() for index, layer in enumerate(cache.layers) if _keeps_all(layer)}
    if {*held.values()} != {length} or ids.shape[0] != 1:
        counts = " or ".join(map(str, sorted({*held.values()} or {0})))
        raise EvaluationError(
            f"the cache holds {counts} tokens, and ids is {tuple(ids.shape)}: give the prompt of one sequence, "
            "(1, length), and a cache that has read it and nothing else"
        )
    found = {}
    with torch.no_grad():
        for index, call in capture_attention(model, ids, layers=held).items():
            pairs = (call.keys, call.values), _held(cache.layers[index], call)
            exact, own = (_outputs(call, *pair, count) for pair in pairs)
            found[index] = float((own - exact).square().sum() / exact.square().sum())
    return found


def _keeps_all(layer: Any) -> bool:
    """Whether a layer has read something, and keeps all tokens: compressed or not, but no window, and no state."""
    return bool(getattr(layer, "is_initialized", False)) and not layer.is_sliding


def _held(layer: Any, call: CapturedAttention) -> tuple[Tensor, Tensor]:
    """Return all keys and values that a layer holds, at full width."""
    if isinstance(layer, PrunedKeyLayer):
        return layer.full_width()
    like = copy.copy(layer)  # an update rebinds what a layer has; quanto's tensors have no deep copies
    found: tuple[Tensor, Tensor] = like.update(call.keys[..., :0, :], call.values[..., :0, :])
    return found


def _outputs(call: CapturedAttention, keys: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the outputs of the last queries over these keys and values, ``(H, ..., d_v)`` float32."""
    heads, width = keys.shape[1], keys.shape[-1]
    queries = call.queries[0, :, -count:].reshape(heads, -1, width).float()
    logits = queries @ keys[0].float().mT * call.scaling
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    return logits.softmax(-1) @ values[0].float()
