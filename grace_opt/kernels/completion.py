"""Greedy completions of many partial sets at once: the lookahead of beam search, in torch for any device and compiled
for the CPU.

Both make the same choices and sums bit for bit, for the reasons given in `greedy`. Source: the pilot method of Duin &
Voss (1999), with GRACE's Algorithm 1 as the pilot.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .._util.arrays import first_argmin
from .threads import COMPILE_FROM, in_threads


def completions(W: Tensor, owner: Tensor, scores: Tensor, need: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Complete partial sets by MIES.

    Parameters
    ----------
    W : Tensor (B, n, n), float32 or float64
    owner : Tensor (R,), int64
        The instance that each partial set belongs to.
    scores : Tensor (R, n), of W's dtype or wider
        What f grows by when a vertex joins; infinite for those that must not.
    need : Tensor (R,), int64
        How many vertices are missing, at most `width`.
    width : int
        Width of the order.

    Returns
    -------
    order : Tensor (R, width), int64
        What was added, in order, padded with -1.
    cost : Tensor (R,), float64
        What f grew by; infinite where vertices ran out.

    Notes
    -----
    O(need · n) per partial set; W is never copied per set.
    """
    if W.device.type == "cpu" and scores.numel() * width >= COMPILE_FROM:
        from .compiled.completion import complete

        order = np.full((scores.shape[0], width), -1, dtype=np.int64)
        cost = np.zeros(scores.shape[0])
        W_array = W.contiguous().numpy()
        scratch = scores.clone(memory_format=torch.contiguous_format).numpy()
        in_threads(lambda *share: complete(W_array, *share), (owner.numpy(), scratch, need.numpy(), order, cost))
        return torch.from_numpy(order), torch.from_numpy(cost)
    return torch_completions(W, owner, scores, need, width)


def torch_completions(W: Tensor, owner: Tensor, scores: Tensor, need: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The reference: `width` steps of a few tensor operations for all partial sets."""
    n = W.shape[-1]
    rows, scores, first_row = W.reshape(-1, n), scores.clone(), owner * n
    order = torch.full((scores.shape[0], width), -1, dtype=torch.int64, device=W.device)
    cost = torch.zeros(scores.shape[0], dtype=torch.float64, device=W.device)
    for step in range(width):
        best = first_argmin(scores)
        rise = scores.gather(-1, best.unsqueeze(-1)).squeeze(-1)
        wanted = step < need
        cost += torch.where(wanted, rise, 0.0)
        order[:, step] = torch.where(wanted & rise.isfinite(), best, -1)
        scores.add_(rows.index_select(0, first_row + best), alpha=2)
        scores.scatter_(-1, best.unsqueeze(-1), torch.inf)
    return order, cost
