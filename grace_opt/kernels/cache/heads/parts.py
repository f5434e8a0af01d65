"""What the coding of whole heads takes and returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
        A head whose largest number is not between them is divided by a power of two: float16 must hold means and
        scales.
    lowest : int
        Exponent of the smallest of these powers.
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
        On the CPU, wherever the others are.
    means : Tensor (H, d), float16
        To be multiplied by `head_scale`, as are the scales.
    scales : Tensor (C, H, d), float16
    head_scale : Tensor (H,), float32
        Powers of two.
    planes : tuple of Tensor (Σ widths, ⌈n/8⌉), uint8
        Of each class.
    """

    levels: Tensor
    means: Tensor
    scales: Tensor
    head_scale: Tensor
    planes: tuple[Tensor, ...]
