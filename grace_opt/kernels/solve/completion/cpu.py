"""Complete many partial sets greedily, one after the other: beam search's lookahead on the CPU.

Source: the pilot method of Duin & Voss (1999), with GRACE's Algorithm 1 as the pilot.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import f4, f8, i8, void
from torch import Tensor

from ..._shared.jit import jit
from ..._shared.threads import split_batch


def completions(W: Tensor, owner: Tensor, scores: Tensor, need: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return order and cost; the partial sets are shared among threads."""
    order, cost = np.full((scores.shape[0], width), -1, dtype=np.int64), np.zeros(scores.shape[0])
    W_array = W.contiguous().numpy()
    scratch = scores.clone(memory_format=torch.contiguous_format).numpy()
    split_batch(lambda *share: complete(W_array, *share), (owner.numpy(), scratch, need.numpy(), order, cost))
    return torch.from_numpy(order), torch.from_numpy(cost)


@jit(ahead=[void(f[:, :, ::1], i8[::1], f[:, ::1], i8[::1], i8[:, ::1], f8[::1]) for f in (f4, f8)])
def complete(W, owner, scores, need, order, cost):
    """Fill `order` and `cost`. See `grace_opt.kernels.solve.completion.completions`.

    W : (B, n, n) float32 or float64; owner : (R,) int64
    scores : (R, n) of W's type, scratch; need : (R,) int64
    order : (R, width) int64; cost : (R,) float64
    """
    n = W.shape[-1]
    for r in range(scores.shape[0]):
        score = scores[r]
        best = 0
        for i in range(1, n):
            if score[i] < score[best]:
                best = i
        for step in range(need[r]):
            cost[r] += score[best]
            if score[best] == np.inf:
                break
            order[r, step] = best
            row = W[owner[r], best]
            score[best] = np.inf
            best, least = 0, score[best]
            for i in range(n):  # update and look for the next minimum in one pass
                value = score[i] + (row[i] + row[i])
                score[i] = value
                if value < least:
                    best, least = i, value
