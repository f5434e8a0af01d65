"""What a smaller cache costs: next-token distributions compared with the dense cache's, answers, and bits counted.

When: to compare settings, or methods of other people, on texts of your own. Read a prompt with a dense cache and with
a smaller one, feed both the same later tokens (`next_token_log_probs`), and compare (`compare_predictions`): all layers
count at once. `ask` scores the answer to a question that comes after the cache was compressed, so that no query of the
prompt had looked for it. Quality without size says little: `stored_bits` counts what a `PrunedKeyCache` holds, and
`stated_bits` takes the count of a method that only reconstructs tensors. Both refuse what was not compressed.

Source: KL divergence by next token is llama.cpp's test of quantised weights; retrieval follows Kamradt's
needle-in-a-haystack test (2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import EvaluationError
from .cache import PrunedKeyCache
from .layer import PrunedKeyLayer
from .report import tensors_in

#: Bits of a number in a dense cache, and the most that a parameter counts.
DENSE_BITS = 16
#: How far the probabilities of a distribution may be from 1 in sum.
TOLERANCE = 1e-3
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


@dataclass(frozen=True)
class AnswerScore:
    """How a model takes an expected answer.

    Attributes
    ----------
    nll : float
        Negative log-likelihood of all of the answer's tokens together, nats.
    exact : bool
        Whether each of them was the likeliest.
    """

    nll: float
    exact: bool


@dataclass(frozen=True)
class StoredBits:
    """Mean number of bits per element of a cache, as if the model had 16 bits.

    Attributes
    ----------
    bits, key_bits, value_bits : float
        Of the compressed tokens' keys and values, codes and parameters; evicted tokens are compressed ones.
    mean_bits : float
        Of all tokens, dense ones included.
    """

    bits: float
    key_bits: float
    value_bits: float
    mean_bits: float

    @property
    def share(self) -> float:
        """Bytes of the whole cache, as a share of those of a dense one."""
        return self.mean_bits / DENSE_BITS


@torch.no_grad()
def next_token_log_probs(model: PreTrainedModel, cache: Any, input_ids: Tensor) -> Tensor:
    """Feed tokens to a model in one forward pass, and return the log-probabilities of what comes next.

    Parameters
    ----------
    model : PreTrainedModel
        With the attention ``"grace_sdpa"`` or ``"grace_eager"`` if the cache is a `PrunedKeyCache`.
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
        If that is no text of at least two tokens, or the model's answer is not finite.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 2:
        found = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise EvaluationError(f"input_ids is {found}: give one sequence of at least two tokens, (1, n)")
    found_logits: Tensor = model(input_ids, past_key_values=cache).logits[0].double().log_softmax(-1)
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
    if found.ndim != 2 or found.shape != dense.shape or following.shape != (len(found) - 1,) or len(found) < 2:
        raise EvaluationError(
            f"distributions of shapes {tuple(found.shape)} and {tuple(dense.shape)}, and {tuple(following.shape)} "
            "following tokens: give both (n, vocabulary) of the same n, at least 2, and n - 1 following tokens"
        )
    likelihoods = (part[:-1].gather(1, following[:, None]).double().mean() for part in (dense, found))
    before, after = (float(likelihood) for likelihood in likelihoods)
    kl = 0.0
    for start in range(0, len(found), ROWS):
        one, other = found[start : start + ROWS], dense[start : start + ROWS]
        _check_distributions("found", one.exp())
        shares = other.exp()
        _check_distributions("dense", shares)
        # A token that the dense cache makes impossible adds nothing, whatever the other one says.
        kl += float((shares * (other - one)).masked_fill_(shares == 0, 0.0).sum(dtype=torch.float64))
    return PredictionDifference(
        kl=kl / len(found),
        top1=float((found.argmax(-1) == dense.argmax(-1)).double().mean()),
        nll=before - after,
    )


def score_answer(predicted: Tensor, answer: Tensor) -> AnswerScore:
    """Score an answer by the distributions that predicted its tokens.

    Parameters
    ----------
    predicted : Tensor
        ``(n, vocabulary)``, log-probabilities: the first predicts the answer's first token.
    answer : Tensor
        ``(n,)``, its tokens.

    Raises
    ------
    EvaluationError
        If the answer is empty or has another number of tokens.

    Examples
    --------
    >>> score_answer(torch.tensor([[0.2, 0.8], [0.6, 0.4]]).log(), torch.tensor([1, 1]))
    AnswerScore(nll=1.139..., exact=False)
    """
    if predicted.ndim != 2 or answer.shape != predicted.shape[:1] or not len(answer):
        raise EvaluationError(
            f"{tuple(predicted.shape)} predictions of {tuple(answer.shape)} tokens: give (n, vocabulary) and (n,) of "
            "the same n, at least 1"
        )
    nll = -float(predicted.gather(1, answer[:, None]).sum(dtype=torch.float64))
    return AnswerScore(nll, bool((predicted.argmax(-1) == answer).all()))


def ask(model: PreTrainedModel, cache: Any, question: Tensor, answer: Tensor) -> AnswerScore:
    """Feed a question and its answer to a cache that was compressed before, and score the answer.

    Parameters
    ----------
    model, cache
        As in `next_token_log_probs`.
    question, answer : Tensor
        ``(1, n)`` tokens each; the answer follows the question.

    Raises
    ------
    EvaluationError
        If one of them is empty.

    Examples
    --------
    >>> from transformers.cache_utils import DynamicCache
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> text, question, answer = (
    ...     tokenizer(part, return_tensors="pt").input_ids for part in ("the quiet river", "runs", "past")
    ... )
    >>> cache = DynamicCache(config=model.config)
    >>> _ = model(text, past_key_values=cache)
    >>> ask(model, cache, question, answer).nll > 0
    True
    """
    if not question.numel() or not answer.numel():
        raise EvaluationError("the question or the answer has no tokens: give at least one of each")
    length = answer.shape[1]
    predicted = next_token_log_probs(model, cache, torch.cat([question, answer], dim=1))
    return score_answer(predicted[-length - 1 : -1], answer[0])


def stored_bits(cache: PrunedKeyCache) -> StoredBits:
    """Count the bits of a compressed cache, with everything: scales, zero points, indices, places of tokens, classes.

    As if the model had 16 bits: floating-point numbers of more count as 16, all else as it is stored. Room to grow does
    not count.

    Raises
    ------
    EvaluationError
        If it is another kind of cache, or nothing in it is compressed.

    Examples
    --------
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> ids = tokenizer("the quiet river runs past the old mill . " * 20, return_tensors="pt").input_ids
    >>> model.set_attn_implementation("grace_sdpa")
    >>> cache = PrunedKeyCache(model, ratio=0.5)
    >>> _ = model(ids, past_key_values=cache)
    >>> found = stored_bits(cache)
    >>> found.value_bits, 8 < found.key_bits < 9  # half of the keys, and their indices
    (16.0, True)
    """
    if not isinstance(cache, PrunedKeyCache):
        raise EvaluationError(f"{type(cache).__name__} is no PrunedKeyCache: count its bits and call stated_bits")
    report = cache.memory_report()
    if report.bits is not None:
        return stated_bits(
            8 * report.coded_key_bytes,
            8 * report.coded_value_bytes,
            (report.coded_key_elements, report.coded_value_elements),
            report.all_elements,
        )
    bits, elements = [0.0, 0.0], [0, 0]
    for layer in cache.layers:
        if not isinstance(layer, PrunedKeyLayer) or layer.compressed is None or layer.tail is None:
            continue
        # Sinks' keys are dense, their values are compressed like those of other old tokens.
        for name, part in layer.compressed.parts().items():
            if name != "sink_keys":
                bits["values" in name] += sum(map(_bits_of, tensors_in([part])))
        heads, old = layer.tail.keys.shape[:2].numel(), layer.compressed.length
        elements[0] += heads * layer.head_dim * (old - layer.plan.config.sink_tokens)
        elements[1] += heads * layer.tail.values.shape[-1] * old
    return stated_bits(bits[0], bits[1], elements, report.all_elements)


def stated_bits(key_bits: float, value_bits: float, elements: Sequence[int], all_elements: int) -> StoredBits:
    """Bits per element, from a count of the bits of all compressed tokens.

    Parameters
    ----------
    key_bits, value_bits : float
        Number of bits of the compressed tokens' keys and values, over all layers and heads: codes and parameters,
        these in 16 bits.
    elements : (int, int)
        Number of elements of these tokens' keys, and values, before compression.
    all_elements : int
        Number of elements of all tokens' keys and values; those that are not compressed take 16 bits.

    Raises
    ------
    EvaluationError
        If nothing was compressed: no tokens, or no fewer bits than a dense cache has.

    Examples
    --------
    >>> stated_bits(key_bits=250.0, value_bits=150.0, elements=(100, 100), all_elements=400)
    StoredBits(bits=2.0, key_bits=2.5, value_bits=1.5, mean_bits=9.0)
    """
    counts = {"key_bits": key_bits, "value_bits": value_bits}
    for name, count in counts.items():
        if not (math.isfinite(count) and count >= 0):
            raise EvaluationError(f"{name}={count!r}: give the number of bits of all compressed tokens")
    keys, values = elements
    if min(keys, values) <= 0:
        raise EvaluationError(
            f"{keys} elements of keys and {values} of values are compressed: this cache is dense, and its numbers "
            "would be those of the dense cache. Give a longer prompt, or another setting"
        )
    if keys + values > all_elements:
        raise EvaluationError(f"{keys} and {values} compressed elements of {all_elements}: give the number of all")
    found = (key_bits + value_bits) / (keys + values)
    if found >= DENSE_BITS:
        raise EvaluationError(
            f"{found:g} bits per element: this cache was not compressed, a dense one has {DENSE_BITS}"
        )
    dense = DENSE_BITS * (all_elements - keys - values)
    mean = (key_bits + value_bits + dense) / all_elements
    return StoredBits(found, key_bits / keys, value_bits / values, mean)


def _check_distributions(name: str, shares: Tensor) -> None:
    total = shares.sum(-1)
    if not ((total - 1).abs() <= TOLERANCE).all():
        worst = float(total[(total - 1).abs().argmax()])
        raise EvaluationError(
            f"the probabilities of a row of {name} add up to {worst:g}: give log-probabilities, "
            "logits.double().log_softmax(-1)"
        )


def _bits_of(tensor: Tensor) -> int:
    """Return the bits of a tensor's elements, of which floating-point numbers have 16 at most."""
    size = 8 * tensor.element_size()
    return tensor.numel() * (min(size, DENSE_BITS) if tensor.is_floating_point() else size)
