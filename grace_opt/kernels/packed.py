r"""Keys in a few bits where they lie: what a decoding kernel is given instead of a dense tensor.

:class:`PackedKeys` says where each number's bits, scale and zero point are, so that a kernel can read them without a
dense copy being made first. It holds addresses, not numbers: it is made from tensors that never change, and keeps them
alive.

Source: ours; the arrangement is what optimum-quanto and hqq have in common (docs/adr/0005-quantised-storage.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Columns of the table: addresses of levels, scales and zero points; rows per plane; rows per head; the first row.
LEVELS, SCALE, ZERO, PLANE, STEP, FIRST = range(6)
ENTRIES = 6


@dataclass(frozen=True, eq=False)
class PackedKeys:
    r"""Keys ``(B, H, S, C)`` whose numbers share a scale and a zero point along ``group_size`` tokens.

    Token ``t`` of sequence ``b`` belongs to the group that ``table[b, t // group_size]`` describes. In the tensors that
    this entry names, head ``h`` and channel ``c`` have row ``r = h * step + first + c``. The levels of ``8 // bits``
    rows share their bytes: row ``r`` is in plane ``p = r // plane``, and its bytes are those of row ``r % plane``:

    .. math:: l = \lfloor \text{levels}[r \bmod \text{plane},\ t \bmod \text{group\_size}] / 2^{s_p} \rfloor
        \bmod 2^\text{bits}

    with :math:`s_p = p \cdot \text{bits}`, or :math:`8 - (p + 1)\,\text{bits}` if ``high_first``. The number is
    ``scale[r] * l - zero[r]``, or ``scale[r] * (l - zero[r])`` if ``zero_in_levels``.

    Attributes
    ----------
    shape : torch.Size
        ``(B, H, S, C)``; ``S`` is a multiple of ``group_size``.
    dtype : torch.dtype
        Of the numbers.
    parameters : torch.dtype
        Of scales and zero points.
    group_size, bits : int
        ``bits`` is 1, 2, 4 or 8.
    high_first, zero_in_levels : bool
        See above.
    table : Tensor
        ``(B, S // group_size, 6)`` int64, contiguous, on the device of the tensors.
    tensors : tuple of Tensor
        What the addresses point to.
    """

    shape: torch.Size
    dtype: torch.dtype
    parameters: torch.dtype
    group_size: int
    bits: int
    high_first: bool
    zero_in_levels: bool
    table: Tensor
    tensors: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        """Where the bits are."""
        return self.table.device

    @property
    def requires_grad(self) -> bool:
        """Levels have no gradient."""
        return False
