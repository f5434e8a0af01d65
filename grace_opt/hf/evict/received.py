"""Attention that each cached key receives from a prompt's last queries; eviction scores are built from it.

Source: the definitions in SnapKV (arXiv 2404.14469) and H2O (arXiv 2306.14048); one score per KV head and query head of
its group; the caller pools and averages.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional

from ..._util.arrays import working_dtype
from ...errors import ProblemError

#: Largest number of logits at once: 256 MiB in float32, plus a few temporaries of that size.
MAX_LOGITS = 2**26
#: Number of logits at once on a CPU: 4 MiB, which stay in its caches between the steps of a softmax.
CACHED_LOGITS = 2**20


def attention_received(
    queries: Tensor, keys: Tensor, valid: Tensor | None, scaling: float, softcap: float | None, needed: int | None
) -> Tensor:
    """Return the attention that each key receives from the last `needed` queries, summed: (B, H, group, S)."""
    queries = last_queries(queries, keys, valid, needed)
    (batch, heads, length, width), observed = keys.shape, queries.shape[2]
    dtype = torch.promote_types(working_dtype(queries.dtype), working_dtype(keys.dtype))
    grouped = queries.detach().reshape(batch, heads, -1, observed, width)
    place = torch.arange(length, device=keys.device)
    total = torch.zeros(*grouped.shape[:3], length, dtype=dtype, device=keys.device)
    step = queries_at_once(total[:, 0].numel(), keys.device)
    # Head by head: all keys at once in float32 would take as much memory as two layers in half precision.
    for head, first in itertools.product(range(heads), range(0, observed, step)):
        part = grouped[:, head, :, first : first + step].to(dtype)
        position = place[length - observed + first :][: part.shape[2]]
        seen = length - observed + first + part.shape[2]  # nobody sees a later key
        hidden = (place[:seen] > position[:, None])[None]
        if valid is not None:
            hidden = hidden | ~valid[:, None, :seen]
        weights = attention_weights(part, keys[:, head, :seen].detach().to(dtype), hidden[:, None], scaling, softcap)
        if valid is not None:
            weights.masked_fill_(~valid[:, None, position, None], 0.0)
        total[:, head, :, :seen] += weights.sum(2)
    return total.float()


def queries_at_once(logits: int, device: torch.device) -> int:
    """Return how many queries to compute together, each of which has so many logits."""
    return max((CACHED_LOGITS if device.type == "cpu" else MAX_LOGITS) // logits, 1)


def attention_weights(
    queries: Tensor, keys: Tensor, hidden: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Return the probabilities (B, group, L, S) of queries (B, group, L, d) over the keys of one head (B, S, d).

    What is `hidden`, bool, gets none: of a shape that broadcasts, but with the last keys only, if it has fewer. A query
    that sees nothing still gets numbers.
    """
    logits = ((queries * scaling).flatten(1, 2) @ keys.mT).view(*queries.shape[:3], keys.shape[1])
    if softcap is not None:
        logits = torch.tanh(logits / softcap).mul_(softcap)
    if hidden is not None:  # the smallest number instead of -inf: a row that sees nothing stays finite
        last = logits[..., logits.shape[-1] - hidden.shape[-1] :]
        last.masked_fill_(hidden, torch.finfo(logits.dtype).min)
    return torch.softmax(logits, dim=-1)


def finished_scores(older: Tensor, keys: Tensor, valid: Tensor | None, always: int) -> Tensor:
    """Extend scores of older tokens to all tokens: the newer get +inf (always kept), padding gets -inf."""
    scores = functional.pad(older, (0, min(always, keys.shape[2])), value=torch.inf)
    return scores if valid is None else scores.masked_fill(~valid[:, None], -torch.inf)


def check_valid(keys: Tensor, valid: Tensor | None) -> None:
    """Raise unless keys are (B, H, S, d), S at least 1, and `valid`, if given, is bool (B, S)."""
    if keys.ndim != 4 or not keys.shape[2]:
        raise ProblemError(f"keys has shape {tuple(keys.shape)}: expected (B, H, S, d), of at least one token.")
    if valid is not None and (valid.dtype != torch.bool or valid.shape != (keys.shape[0], keys.shape[2])):
        raise ProblemError(
            f"valid is {valid.dtype} of shape {tuple(valid.shape)}: expected bool {(keys.shape[0], keys.shape[2])}, "
            "False at padding."
        )


def last_queries(queries: Tensor, keys: Tensor, valid: Tensor | None, needed: int | None) -> Tensor:
    """Return the last `needed` queries."""
    check_valid(keys, valid)
    batch, heads, length, width = keys.shape
    if queries.ndim != 4 or (queries.shape[0], queries.shape[3]) != (batch, width) or queries.shape[1] % heads:
        raise ProblemError(
            f"queries has shape {tuple(queries.shape)}, keys {tuple(keys.shape)}: expected (B, H_q, L, d) and "
            "(B, H, S, d), H_q a multiple of H."
        )
    wanted = length if needed is None else min(needed, length)
    if not wanted <= queries.shape[2] <= length:
        raise ProblemError(
            f"{queries.shape[2]} queries for {length} keys, but the scores read the last {wanted}: give at least that "
            f"many, and at most {length}."
        )
    return queries[:, :, queries.shape[2] - wanted :]
