"""Check that the other searches end as well as the reference, on a small case of whole numbers."""

from __future__ import annotations

import numpy as np
import torch

from ..._shared.cases import whole_weights
from .reference import improve, row_sums, swap_costs
from .rounding import tolerance

CHOSEN, STEPS = 15, 1000


def cpu() -> bool:
    """Check that the compiled search makes the same choices."""
    from . import cpu as compiled

    W, start, every = _case(torch.device("cpu"))
    expected, actual = start.clone(), start.numpy().copy()
    improve(W, expected, every, lambda done, active: active[: 0 if done >= STEPS else None])
    compiled.improve(STEPS, tolerance(W.shape[-1]), W.numpy(), actual, every.numpy(), np.zeros(len(W), np.int64))
    return torch.equal(torch.from_numpy(actual), expected)


def gpu(device: torch.device) -> bool:
    """Check that Triton's kernel keeps the number of vertices and leaves no exchange that improves f."""
    from . import gpu as on_chip

    W, start, every = _case(device)
    mask = on_chip.swap_refine(W, start, every, STEPS)
    change = swap_costs(W.double(), mask, row_sums(W, mask), every)
    return bool((mask.sum(-1) == CHOSEN).all()) and bool((change >= 0).all())


def _case(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    W = whole_weights(device)
    start = (torch.arange(W.shape[-1], device=device) < CHOSEN).repeat(len(W), 1)
    return W, start, torch.ones_like(start)
