"""What the metrics take: tokens, caches that hold some, log-probabilities. Anything else is named.

When: first thing in each public function of this package. Source: the project's rules for bad input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....errors import EvaluationError

#: How far the probabilities of a distribution may be from 1 in sum.
TOLERANCE = 1e-3


def check_tokens(name: str, tokens: Any, vocabulary: int, shape: tuple[int | None, ...]) -> None:
    """Raise unless tokens are integers of a vocabulary, in a tensor of such a shape; None is any size."""
    wanted = "(n,)" if len(shape) == 1 else "(1, n)"
    if not isinstance(tokens, Tensor):
        raise EvaluationError(f"{name} is {type(tokens).__name__}: give a tensor of tokens, {wanted}")
    fits = tokens.ndim == len(shape) and all(n in (None, size) for n, size in zip(shape, tokens.shape, strict=True))
    if not fits or tokens.dtype not in (torch.int32, torch.int64):
        raise EvaluationError(f"{name} is {tokens.dtype} of shape {tuple(tokens.shape)}: give int64 tokens, {wanted}")
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise EvaluationError(
            f"{name} has tokens from {int(tokens.min())} to {int(tokens.max())}: give tokens from 0 to {vocabulary - 1}"
        )


def check_cache(cache: Any) -> None:
    length = getattr(cache, "get_seq_length", None)
    if length is None or isinstance(cache, type) or not length():
        found = cache.__name__ if isinstance(cache, type) else type(cache).__name__
        raise EvaluationError(f"cache is {found} and holds no tokens: let the model read a prompt into it first")


def check_log_probs(name: str, log_probs: Any) -> None:
    if not isinstance(log_probs, Tensor):
        raise EvaluationError(f"{name} is {type(log_probs).__name__}: give a tensor of log-probabilities")
    if log_probs.ndim != 2 or log_probs.dtype not in (torch.float32, torch.float64):
        raise EvaluationError(
            f"{name} is {log_probs.dtype} of shape {tuple(log_probs.shape)}: give log-probabilities "
            "(n, vocabulary) in float32 or float64, logits.double().log_softmax(-1)"
        )


def check_distributions(name: str, shares: Tensor) -> None:
    total = shares.sum(-1)
    if not ((total - 1).abs() <= TOLERANCE).all():
        worst = float(total[(total - 1).abs().argmax()])
        raise EvaluationError(
            f"the probabilities of a row of {name} add up to {worst:g}: give log-probabilities, "
            "logits.double().log_softmax(-1)"
        )
