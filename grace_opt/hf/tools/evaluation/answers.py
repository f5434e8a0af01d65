"""Answers to questions that come after a cache was compressed.

When: whether a smaller cache still holds what no query of the prompt had looked for. Source: Kamradt's
needle-in-a-haystack test (2023).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ....errors import EvaluationError
from .checks import check_distributions, check_log_probs, check_tokens
from .predictions import next_token_log_probs


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
    check_log_probs("predicted", predicted)
    check_tokens("answer", answer, predicted.shape[1], (None,))
    if answer.shape != predicted.shape[:1] or not len(answer):
        raise EvaluationError(
            f"{tuple(predicted.shape)} predictions of {tuple(answer.shape)} tokens: give (n, vocabulary) and (n,) of "
            "the same n, at least 1"
        )
    check_distributions("predicted", predicted.double().exp())
    nll = -float(predicted.gather(1, answer[:, None]).sum(dtype=torch.float64))
    return AnswerScore(nll, bool((predicted.argmax(-1) == answer).all()))


def ask(model: PreTrainedModel, cache: Any, question: Tensor, answer: Tensor) -> AnswerScore:
    """Feed a question and its answer to a copy of a cache that was compressed before, and score the answer.

    The cache stays as it is: several questions may be asked of it.

    Parameters
    ----------
    model, cache
        As in `next_token_log_probs`.
    question, answer : Tensor
        ``(1, n)`` tokens each; the answer follows the question.

    Raises
    ------
    EvaluationError
        If one of them is empty, or the cache is, or cannot be copied.

    Examples
    --------
    >>> from transformers.cache_utils import DynamicCache
    >>> from grace_opt.hf.models import load_pocket
    >>> model, tokenizer = load_pocket()
    >>> text, question, answer = (
    ...     tokenizer(part, return_tensors="pt").input_ids for part in ("the quiet river", "runs", "past")
    ... )
    >>> cache = DynamicCache(config=model.config)
    >>> with torch.no_grad():
    ...     _ = model(text, past_key_values=cache)
    >>> ask(model, cache, question, answer).nll > 0
    True
    """
    for name, tokens in (("question", question), ("answer", answer)):
        check_tokens(name, tokens, model.config.get_text_config().vocab_size, (1, None))
    if not question.numel() or not answer.numel():
        raise EvaluationError("the question or the answer has no tokens: give at least one of each")
    try:
        own = copy.deepcopy(cache)
    except RuntimeError as error:  # torch copies no tensors with a history
        raise EvaluationError("the cache cannot be copied: read the prompt within torch.no_grad()") from error
    length = answer.shape[1]
    predicted = next_token_log_probs(model, own, torch.cat([question, answer], dim=1))
    return score_answer(predicted[-length - 1 : -1], answer[0])
