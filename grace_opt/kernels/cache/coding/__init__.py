"""Code rows of numbers in a few bits each: their weighted variances, scales, nearest levels, and these as bit planes.

In torch, or compiled for the CPU: variances, scales and planes each read a row once from memory, where torch takes a
pass for every operation and width. Both give the same scales and planes. (Sums are in float64, in any order; a scale
that lies within their rounding of a tie between two numbers of 16 bits could differ.) On a GPU, codes of a trellis are
found by Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..._shared.dispatch import use_triton
from ..._shared.operation import Compiled, Operation, Triton, trial_of
from ..._shared.switches import LLVM, is_off
from ..._shared.threads import COMPILE_FROM, worth_compiling
from . import reference
from .reference import Codebooks as Codebooks
from .reference import pack_bits as pack_bits
from .reference import pack_codes as pack_codes
from .trellis import searched

KERNEL = Triton("codes of a trellis", "with bits=, unless trellis=False", trial_of(__name__, "gpu"))
OPERATION = Operation(
    "coding",
    "codes of keys and values in a few bits each",
    cpu=Compiled(f"once a process has coded {COMPILE_FROM:,} numbers", trial_of(__name__, "cpu"), "torch"),
    gpu=(KERNEL,),
)


def scaled_and_coded(
    rows: Tensor, means: Tensor, widths: Tensor, counts: Sequence[int], books: Codebooks
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the scale of every row in every class of columns, and the codes as bit planes.

    Parameters
    ----------
    rows : Tensor (R, Σ counts), float32
        Finite; the classes are side by side.
    means : Tensor (R,), float32
        Subtracted from the rows.
    widths : Tensor (C, R), uint8
        Number of bits of each row in each class; on the CPU, wherever the rows are, as sizes depend on them.
    counts : sequence of int
        Number of columns of each class.
    books : Codebooks

    Returns
    -------
    scales : Tensor (C, R), float16
        0 where a row has no bits, or is constant.
    planes : tuple of Tensor (Σ widths, ⌈n/8⌉), uint8
        For each class, the bits of every row, lowest first; eight columns to a byte.
    """
    if _is_compiled(rows):
        from .cpu import scaled_and_coded as compiled

        return compiled(rows, means, widths, counts, books)
    search = searched
    if books.trellis is not None and use_triton(KERNEL, rows.device):
        from .gpu import searched as search
    return reference.scaled_and_coded(rows, means, widths, counts, books, search)


def weighted_squares(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the largest number of each head, and sums of squares around the mean of each row, by class.

    Parameters
    ----------
    rows : Tensor (H, d, n), float32
        Finite; the classes are side by side.
    weights : Tensor (H, n), float32
        Of the columns.
    counts : sequence of int
        Number of columns of each class.

    Returns
    -------
    largest : Tensor (H,), float32
        Absolute values.
    squares : Tensor (H, C, d), float64
        In units of the head's largest number, unless that is 0: squares must not overflow.
    """
    if _is_compiled(rows):
        from .cpu import weighted_squares as compiled

        return compiled(rows, weights, counts)
    return reference.weighted_squares(rows, weights, counts)


def _is_compiled(rows: Tensor) -> bool:
    return rows.device.type == "cpu" and not is_off(LLVM) and worth_compiling(rows.numel())
