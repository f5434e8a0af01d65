"""The greedy loop of MIES and drop-greedy on the CPU, several instances in turn.

The next row of W is known only once the minimum is found, and it comes from main memory: a single instance would wait
for it most of the time. Therefore ``TOGETHER`` instances take turns: each finds its vertex and prefetches the row,
which is in the cache when its turn comes again.

Source: Algorithm 1 of GRACE (arXiv 2604.16983).
"""

from __future__ import annotations

import numpy as np
import torch
from numba import b1, f4, f8, i8, void
from torch import Tensor

from ..._shared.inner import add_twice, first_place, least, prefetch
from ..._shared.jit import jit
from ..._shared.threads import ALONE_BELOW, split_batch

#: Number of instances that take turns: enough to hide memory latency, few enough to keep their scores in the cache.
TOGETHER = 8
CACHE_LINE = 64


def greedy_order(
    W: Tensor, scores: Tensor | None, candidates: Tensor, k: Tensor, k_max: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return order, mask and rise as `kernels.solve.greedy.greedy_order`; the batch is shared among threads."""
    order = np.full((W.shape[0], k_max), -1, dtype=np.int64)
    mask, rise = np.zeros(W.shape[:-1], dtype=np.bool_), np.zeros(len(order))
    # By numpy: torch would wake its threads, which then compete with ours.
    free = np.ascontiguousarray(candidates.numpy())
    initial = W.new_empty(len(W), 0) if scores is None else scores.contiguous()
    arrays = W.contiguous().numpy(), initial.numpy(), free, k.numpy(), order, mask, rise
    split_batch(greedy, arrays, alone=W.numel() < ALONE_BELOW)
    return torch.from_numpy(order), torch.from_numpy(mask), torch.from_numpy(rise)


@jit(
    ahead=[
        void(f[:, :, ::1], initial[:, ::1], b1[:, ::1], i8[::1], i8[:, ::1], b1[:, ::1], f8[::1])
        for f, initial in ((f4, f4), (f4, f8), (f8, f8))
    ]
)
def greedy(W, initial, candidates, k, order, mask, rise):
    """Fill `order`, `mask` (which is False), and `rise` with the sum of the scores taken.

    W : (B, n, n) float32 or float64
    initial : (B, n) of W's type or float64, the scores at first; without columns, the diagonal of the candidates
    candidates, mask : (B, n) bool; k : (B,) int64; order : (B, k_max) int64; rise : (B,) float64
    """
    size, n = candidates.shape
    line = CACHE_LINE // W.itemsize
    diagonal = initial.shape[1] == 0
    scores, lowest = np.empty((TOGETHER, n), initial.dtype), np.empty(TOGETHER, initial.dtype)
    for start in range(0, size, TOGETHER):
        stop = min(start + TOGETHER, size)
        for b in range(start, stop):
            here = scores[b - start]
            for i in range(n):
                here[i] = (W[b, i, i] if candidates[b, i] else np.inf) if diagonal else initial[b, i]
            rise[b] = 0.0
            lowest[b - start] = least(here)
        steps = 0
        for b in range(start, stop):
            steps = max(steps, k[b])
        for step in range(steps):
            for b in range(start, stop):
                if diagonal and b + TOGETHER < size and step < n:
                    prefetch(W[b + TOGETHER, step], step)  # the next diagonals: every entry is in another cache line
                if step < k[b]:
                    here, value = scores[b - start], lowest[b - start]
                    best = first_place(here, value)
                    order[b, step] = best
                    mask[b, best] = True
                    rise[b] += value
                    here[best] = np.inf
                    for i in range(0, n, line):
                        prefetch(W[b, best], i)
            for b in range(start, stop):
                if step < k[b]:
                    lowest[b - start] = add_twice(scores[b - start], W[b, order[b, step]])
