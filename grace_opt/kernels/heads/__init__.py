"""Code whole heads of keys or values: coordinates, weighted squares, the division of bits, codes. Compiled for the CPU
only; callers import `host` where they use it, and elsewhere take these steps one by one (`coding`, `steps`).

A head is done by one thread, in one pass over its tokens, where torch would start some fifty operations.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._shared.operation import Compiled, Operation, trial_of
from .._shared.switches import LLVM, is_off
from .._shared.threads import COMPILE_FROM, enough_steps

#: Numbers that a head has, at least, for its coding to be compiled: asked per head, so that ranks choose alike.
HEAD_FROM = COMPILE_FROM // 4

OPERATION = Operation(
    "heads",
    "coding of whole heads of keys and values",
    reference=False,
    cpu=Compiled(f"float32, from {HEAD_FROM:,} numbers per head on", trial_of(__name__, "cpu"), "torch, step by step"),
)


class Heads(NamedTuple):
    """Keys, or values, of one sequence.

    Attributes
    ----------
    tensor : Tensor (H, n, d), float32
        Finite.
    order : Tensor (H, n), int64
        The tokens, class by class.
    encode : Tensor (H, d, d), float32
        Coordinates are ``tensor @ encode``.
    weights : Tensor (H, n), float32
        Of the tokens, in this order.
    energy : Tensor (H, d), float64
        What a unit of squared error in a coordinate costs.
    bits : Tensor (H,), float64
        What the widths of a head may cost.
    """

    tensor: Tensor
    order: Tensor
    encode: Tensor
    weights: Tensor
    energy: Tensor
    bits: Tensor


class Tables(NamedTuple):
    """What does not depend on the numbers.

    Attributes
    ----------
    counts : Tensor (C,), int64
        Number of tokens of each class; not all zero.
    costs : Tensor (C, L), float64
        Bits that each level takes in each class; no sum of them is rounded, and a plane costs eight bits per byte.
    widths : Tensor (L,), uint8
        Bits of each level.
    distortions : Tensor (L,), float64
        Mean squared error of each level, on numbers of variance one.
    small, large : float
        A head whose largest number is not between them is coded in another unit: float16 must hold means and scales.
    lowest : int
        Exponent of the smallest unit.
    """

    counts: Tensor
    costs: Tensor
    widths: Tensor
    distortions: Tensor
    small: float
    large: float
    lowest: int


class Coded(NamedTuple):
    """The codes.

    Attributes
    ----------
    levels : Tensor (C, H, d), int64
    means : Tensor (H, d), float16
        In units of `unit`, as are the scales.
    scales : Tensor (C, H, d), float16
    unit : Tensor (H,), float32
        Powers of two.
    planes : tuple of Tensor (Σ widths, ⌈n/8⌉), uint8
        Of each class.
    """

    levels: Tensor
    means: Tensor
    scales: Tensor
    unit: Tensor
    planes: tuple[Tensor, ...]


def is_compiled(*tensors: Tensor) -> bool:
    """Return whether heads ``(H, n, d)`` like these are coded by the compiled loop."""
    return not is_off(LLVM) and all(
        tensor.device.type == "cpu"
        and str(tensor.dtype) == "torch.float32"
        and tensor.stride(2) == 1
        and enough_steps(tensor[0].numel() * (COMPILE_FROM // HEAD_FROM))
        for tensor in tensors
    )
