"""Attention received in torch operations, for any device: the definition of the compiled loop."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_received(
    queries: Tensor, weights: Tensor, keys: Tensor, scaling: float, softcap: float | None, most: int
) -> tuple[Tensor, Tensor]:
    """See `grace_opt.kernels.cache.received.attention_received`."""
    if keys.device.type != "cpu":
        return of_all_heads(queries, weights, keys, scaling, softcap, most)
    heads, length, _ = keys.shape
    first, second = (torch.zeros(heads, length, dtype=torch.float32, device=keys.device) for _ in range(2))
    step = max(most // length, 1)
    for head in range(heads):
        transposed = keys[head].float().mT * scaling
        for start in range(0, queries.shape[1], step):
            logits = queries[head, start : start + step].float() @ transposed
            if softcap is not None:
                logits = torch.tanh(logits / softcap).mul_(softcap)
            shares, share = torch.softmax(logits, dim=-1), weights[start : start + step]
            first[head].addmv_(shares.mT, share)
            second[head].addmv_(shares.square_().mT, share)
    return first, second


def of_all_heads(
    queries: Tensor, weights: Tensor, keys: Tensor, scaling: float, softcap: float | None, most: int
) -> tuple[Tensor, Tensor]:
    """Return the same up to rounding, all heads at once: on a GPU every operation has to be started."""
    heads, length, _ = keys.shape
    first, second = (torch.zeros(heads, 1, length, dtype=torch.float32, device=keys.device) for _ in range(2))
    transposed, step = keys.float().mT * scaling, max(most // (heads * length), 1)
    for start in range(0, queries.shape[1], step):
        logits = queries[:, start : start + step].float() @ transposed
        if softcap is not None:
            logits = torch.tanh(logits / softcap).mul_(softcap)
        shares, share = torch.softmax(logits, dim=-1), weights[start : start + step].expand(heads, 1, -1)
        first.baddbmm_(share, shares)
        second.baddbmm_(share, shares.square_())
    return first[:, 0], second[:, 0]
