"""`budgets`: measure how much of its output a model loses if one KV head alone evicts.

When: once per model, before an eviction's budget is divided among layers and heads by `LayerBudgets`. Nothing is
assumed of how they differ: the beginning of a text is read once, each head in turn keeps each share of its tokens while
all others keep everything, and the next tokens are predicted again.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..._util.parameters import flag, integer
from ...errors import CalibrationError, OptionError
from ..bases.evaluated import evaluated
from ..bases.texts import check_known, given_texts, token_ids
from ..engine.cache import CompressedCache
from ..engine.filling import filled
from ..evict.graph_eviction import GraphEviction
from ..evict.layer_budgets import check_divisible
from ..evict.layer_losses import LayerLosses
from ..models.arguments import require_model
from ..models.fingerprint import fingerprint
from ..models.implementation import attention_implementation, base_for
from ..models.placement import input_device
from ..models.prunable import text_config
from ..models.recording import capture_attention
from ..stores.channels.by_heads import ByHeads, some_heads
from ..tools.evaluation import compare_predictions, next_token_log_probs
from .known_layers import decoder_layers, outputs_recorded, returning

#: Shares of the prompt's tokens that a head keeps.
SHARES = (0.05, 0.1, 0.25, 0.5, 0.75)
#: Number of first tokens of each text that are used, the later ones among them.
TOKENS = 1152
#: Number of later tokens, at most an eighth of the text, whose predictions are compared.
LATER = 128
#: Fewest tokens of a text that count: of shorter ones, the least share is hardly more than the recent window.
FEWEST_TOKENS = 768


@torch.no_grad()
def budgets(
    model: PreTrainedModel,
    tokenizer: Any = None,
    texts: Sequence[str | Tensor] | None = None,
    *,
    evict: Any = None,
    tokens: int = TOKENS,
    heads: bool = True,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> LayerLosses:
    """Measure what a model's output loses if one KV head alone keeps few of a prompt's tokens.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder that computes attention through transformers' attention interface.
    tokenizer : callable, optional
        Needed if ``texts`` contains strings, or is None.
    texts : sequence of str or Tensor, optional
        Texts, or their token ids of shape ``(L,)`` or ``(1, L)``. By default those that ship with grace_opt.
    evict : SnapKV, H2O, StreamingLLM or GraphEviction, optional
        Chooses the tokens that stay; its budget does not count. By default `GraphEviction`, whose losses divide the
        budgets of the others well, too.
    tokens : int
        Number of first tokens of each text that are used, at most as many as the model has positions: the last eighth,
        but no more than 128, is predicted, and what comes before is evicted.
    heads : bool
        False measures whole layers, which takes less time, and less is gained.
    advance : callable
        Called with the number of layers measured so far, and of all in all texts, for a progress bar.

    Returns
    -------
    LayerLosses
        Means over the texts, weighted by predicted tokens.

    Raises
    ------
    OptionError
        If strings come without a tokenizer, or ``evict`` divides its budget itself.
    CalibrationError
        If no text has 768 tokens, or the model is spread over several processes.
    CacheError
        If the model's attention does not go through the attention interface.

    Notes
    -----
    One pass over a text, then five over its later tokens for each head, in which only the layers from its own on are
    computed. Nothing else may use the model meanwhile.

    Examples
    --------
    >>> from grace_opt.hf import CompressedCache, GraphEviction, LayerBudgets, SnapKV, calibrate
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> losses = calibrate.budgets(model, tokenizer, ["the quiet river runs by " * 200], evict=SnapKV())
    >>> losses
    LayerLosses(3 layers, 2 heads)
    >>> cache = CompressedCache(model, ratio=0.0, evict=LayerBudgets(GraphEviction(budget=0.25), losses))
    """
    model = require_model(model, "calibrate.budgets")
    if not model.can_generate():
        raise OptionError(
            f"{type(model).__name__} predicts no tokens, and the loss of these is measured; load the whole model, for "
            "instance by AutoModelForCausalLM"
        )
    given = given_texts(texts, tokenizer, "calibrate.budgets")
    chosen = GraphEviction() if evict is None else evict
    check_divisible(chosen, "calibrate.budgets")
    by_heads = flag("heads", heads)
    config = text_config(model, "calibrate.budgets")
    most = getattr(config, "max_position_embeddings", None) or TOKENS
    longest = min(integer("tokens", tokens, at_least=FEWEST_TOKENS), most)
    made_for = fingerprint(model)
    if "tensor_parallel" in made_for:
        raise CalibrationError(
            f"this process has only {made_for['tensor_parallel']} of the model; measure it in one process, with "
            "grace-opt calibrate budgets MODEL -o FILE"
        )
    every = [token_ids(text, tokenizer, n, "calibrate.budgets")[:, :longest] for n, text in enumerate(given, 1)]
    check_known(every, model)
    every = [ids for ids in every if ids.shape[1] >= FEWEST_TOKENS]
    if longest < FEWEST_TOKENS:
        raise CalibrationError(
            f"the model has {longest} positions, and losses are measured with {FEWEST_TOKENS} tokens"
        )
    if not every:
        raise CalibrationError(
            f"no text has {FEWEST_TOKENS} tokens, fewer than which say little of an eviction; give longer ones"
        )
    device = input_device(model)
    layers = _whole(model).prunable_layers
    sums: Tensor | None = None
    count = done = 0
    with evaluated(model), attention_implementation(model, f"grace_{base_for(model)}"):
        for ids in every:
            later = min(LATER, ids.shape[1] // 8)
            text = _Text(model, ids.to(device), later, layers)
            found = []
            for layer in layers:
                evicting = (dataclasses.replace(chosen, budget=share) for share in SHARES)
                found.append([text.losses(layer, each, by_heads) for each in evicting])
                done += 1
                advance(done, len(every) * len(layers))
            weighted = later * torch.tensor(found, dtype=torch.float64, device="cpu").mT
            sums = weighted if sums is None else sums + weighted
            count += later
    assert sums is not None
    # Rounding may leave a divergence that is nothing below zero.
    means = (sums / count).clamp(min=0)
    return LayerLosses(layers, SHARES, tuple((means if by_heads else means[:, 0]).tolist()), made_for)


def _whole(model: PreTrainedModel, evict: Any = None) -> CompressedCache:
    """Return an empty cache that keeps all channels, for any model: not all can decode without copies (``fused``)."""
    return CompressedCache(model, ratio=0.0, fused=False, evict=evict)


class _Text:
    """A text whose beginning was read, and whose later tokens can be predicted with any layer's cache replaced."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, later: int, layers: Sequence[int]) -> None:
        self.model, self.following, read = model, ids[:, -later:], ids[:, :-later]
        self.cache = _whole(model)
        model(read, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.captured, self.layers = capture_attention(model, read, layers=layers), decoder_layers(model)
        with outputs_recorded(self.layers) as self.outputs:
            self.dense = next_token_log_probs(model, copy.deepcopy(self.cache), self.following)

    def losses(self, layer: int, evict: Any, by_heads: bool) -> list[float]:
        """Return the KL divergence per token if one head of a layer evicts, for each; or if all do."""
        evicting = filled(_whole(self.model, evict), {layer: self.captured[layer]}).layers[layer]
        if not by_heads:
            return [self._loss(layer, evicting)]
        found, every, few = [], self.cache.layers[layer].compressed, evicting.compressed
        for head in range(few.kept_indices.shape[1]):
            runs = (every, slice(head)), (few, slice(head, head + 1)), (every, slice(head + 1, None))
            groups = tuple(some_heads(stored, run) for stored, run in runs)
            evicting.compressed = ByHeads(tuple(group for group in groups if group.kept_indices.shape[1]))
            found.append(self._loss(layer, copy.deepcopy(evicting)))
        return found

    def _loss(self, layer: int, evicting: Any) -> float:
        cache = copy.deepcopy(self.cache)
        cache.layers[layer] = evicting
        with returning(self.layers, self.outputs[:layer]):
            log_probs = next_token_log_probs(self.model, cache, self.following)
        return compare_predictions(log_probs, self.dense, self.following[0, 1:]).kl
