"""Next-token distributions after a smaller cache, compared with those after the dense one.

When: how much a cache changes what a model predicts; all layers count at once. Source: llama.cpp's test of quantised
weights compares by the same KL divergence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....errors import EvaluationError
from ...engine.attention import MAX_FUSED_QUERIES
from ...engine.cache import CompressedCache
from .checks import check_cache, check_distributions, check_log_probs, check_tokens

#: Number of distributions compared at a time: all at once would be slower.
ROWS = 16


@dataclass(frozen=True)
class PredictionDifference:
    """How far next-token distributions are from those of the dense cache, means over tokens.

    Attributes
    ----------
    kl : float
        KL divergence from the dense cache's distribution, nats.
    top1 : float
        Share of the tokens after which both find the same next token the likeliest.
    nll : float
        How much less likely the text's own tokens are, nats per token (ΔNLL); below zero if they are likelier.
    """

    kl: float
    top1: float
    nll: float


@torch.no_grad()
def next_token_log_probs(model: PreTrainedModel, cache: Any, input_ids: Tensor) -> Tensor:
    """Feed tokens to a model in one forward pass, and return the log-probabilities of what comes next.

    A cache that reads few tokens (``read=``) reads all of them for many new ones at once; it is fed in several passes.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"`` or ``"grace_eager"`` if the cache is a `CompressedCache`.
    cache : Cache
        Holds the tokens before; it grows by those fed.
    input_ids : Tensor
        ``(1, n)``, at least two tokens.

    Returns
    -------
    Tensor
        ``(n, vocabulary)``, float64.

    Raises
    ------
    EvaluationError
        If that is no text of at least two tokens, the cache holds no tokens, or the model's answer is not finite.
    """
    check_tokens("input_ids", input_ids, model.config.get_text_config().vocab_size, (1, None))
    if input_ids.shape[1] < 2:
        raise EvaluationError("input_ids has too few tokens: give at least two tokens")
    check_cache(cache)
    few = isinstance(cache, CompressedCache) and cache.config.read is not None
    passes = torch.split(input_ids, MAX_FUSED_QUERIES if few else input_ids.shape[1], dim=1)
    found = [model(part, past_key_values=cache).logits[0].double().log_softmax(-1) for part in passes]
    found_logits = torch.cat(found)
    if found_logits.isnan().any():
        raise EvaluationError("the model's next-token logits are not finite, so nothing can be compared with them")
    return found_logits


def compare_predictions(found: Tensor, dense: Tensor, following: Tensor) -> PredictionDifference:
    """Compare next-token distributions with those of a dense cache, after the same tokens.

    Parameters
    ----------
    found, dense : Tensor
        ``(n, vocabulary)``, log-probabilities.
    following : Tensor
        ``(n - 1,)``: the tokens that the text has after all but the last.

    Raises
    ------
    EvaluationError
        If the shapes do not fit, there are fewer than two tokens, or rows are no distributions.

    Examples
    --------
    >>> dense = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    >>> found = torch.tensor([[0.5, 0.5], [0.1, 0.9]]).log()
    >>> compare_predictions(found, dense, torch.tensor([0]))
    PredictionDifference(kl=0.878..., top1=0.5, nll=0.0)
    """
    check_log_probs("found", found)
    check_log_probs("dense", dense)
    check_tokens("following", following, found.shape[1], (None,))
    if found.shape != dense.shape or following.shape != (len(found) - 1,) or len(found) < 2:
        raise EvaluationError(
            f"distributions of shapes {tuple(found.shape)} and {tuple(dense.shape)}, and {tuple(following.shape)} "
            "following tokens: give both (n, vocabulary) of the same n, at least 2, and n - 1 following tokens"
        )
    likelihoods = (part[:-1].gather(1, following[:, None]).double().mean() for part in (dense, found))
    before, after = (float(likelihood) for likelihood in likelihoods)
    kl = 0.0
    for start in range(0, len(found), ROWS):
        one, other = found[start : start + ROWS], dense[start : start + ROWS]
        check_distributions("found", one.exp())
        shares = other.exp()
        check_distributions("dense", shares)
        # A token that the dense cache makes impossible adds nothing, whatever the other one says.
        kl += float((shares * (other - one)).masked_fill_(shares == 0, 0.0).sum(dtype=torch.float64))
    if not math.isfinite(before - after):
        raise EvaluationError("one of the following tokens has probability 0, so the text's likelihood says nothing")
    return PredictionDifference(
        kl=kl / len(found),
        top1=float((found.argmax(-1) == dense.argmax(-1)).double().mean()),
        nll=before - after,
    )
