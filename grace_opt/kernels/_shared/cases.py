"""Small random inputs for trials. Shapes are odd on purpose, to need several blocks, some of them not full."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def draw(device: torch.device, *shape: int) -> Tensor:
    """Draw normal numbers, the same on every device."""
    # From a CPU generator: the user's random numbers on the device are not affected.
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device)


def whole_weights(device: torch.device) -> Tensor:
    """Return W (3, 37, 37) of whole numbers: sums are exact in any order."""
    roots = draw(device, 3, 50, 37)
    return (roots.mT @ roots).round().contiguous()


def small_instance() -> npt.NDArray[np.float64]:
    """Return W (9, 9) of whole numbers of both signs, with zero diagonal."""
    W = np.random.default_rng(0).integers(-9, 10, (9, 9)).astype(np.float64)
    W += W.T
    np.fill_diagonal(W, 0.0)
    return W


def least_of_all(W: npt.NDArray[Any], k: int) -> float:
    """Return the least f of all k-subsets, by plain enumeration."""
    return min(float(W[np.ix_(chosen, chosen)].sum()) for chosen in combinations(range(len(W)), k))
