"""Quanto without a compiler: it would compile its way to unpack bits at first use, which takes most of a minute."""

import sys
from types import SimpleNamespace

import torch


def use_no_compiler() -> None:
    """From now on bits are unpacked by torch, if quanto has been imported."""
    kernels = sys.modules.get("optimum.quanto.library.extensions.cpp")
    if kernels is not None and kernels.ext._lib is None:
        kernels.ext._lib = SimpleNamespace(unpack=_unpacked)


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.cat([packed >> place & 2**bits - 1 for place in range(0, 8, bits)])
