"""Check that the other greedy loops equal the reference, bit for bit, on a small case."""

from __future__ import annotations

import torch

from ..._shared.cases import whole_weights
from .reference import greedy_order

STEPS = [0, 9, 37]


def cpu() -> bool:
    """Compare order, choice and sums of the compiled loop."""
    from . import cpu as compiled

    W, k = whole_weights(torch.device("cpu")), torch.tensor(STEPS, dtype=torch.int64, device="cpu")
    every = torch.ones(W.shape[:2], dtype=torch.bool, device="cpu")
    scores = W.diagonal(dim1=-2, dim2=-1).clone()
    actual, expected = compiled.greedy_order(W, scores, every, k, max(STEPS)), greedy_order(W, scores, k, max(STEPS))
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def gpu(device: torch.device) -> bool:
    """Compare order and sums of Triton's kernel."""
    from . import gpu as on_chip

    W, k = whole_weights(device), torch.tensor(STEPS, dtype=torch.int64, device=device)
    scores = W.diagonal(dim1=-2, dim2=-1).clone()
    actual, expected = on_chip.greedy_order(W, scores, k, max(STEPS)), greedy_order(W, scores, k, max(STEPS))
    return torch.equal(actual.order, expected.order) and torch.equal(actual.rise, expected.rise)
