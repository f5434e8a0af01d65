r"""Keys and values in a few bits, described by address: a decoding kernel's input instead of dense tensors.

:class:`PackedKeys` and :class:`PackedValues` say where each number's bits, scale and zero point are, so a kernel can
read them without a dense copy. They hold addresses, not numbers; the tensors behind the addresses never change and are
kept alive.

The levels of ``n = 8 // bits`` rows share their bytes, or, in 3 bits, those of ``n = 10`` rows their int32, whose two
highest bits are zero. Row ``r`` is in plane ``p = r // plane``, and its bytes or int32 are those of row ``r % plane``:

.. math:: l = \lfloor \text{levels}[r \bmod \text{plane},\ i] / 2^{s_p} \rfloor \bmod 2^\text{bits}

at place ``i`` of the group, with :math:`s_p = p \cdot \text{bits}`, or :math:`(n - 1 - p)\,\text{bits}` if
``high_first``. The number is ``scale[r] * l - zero[r]``, or ``scale[r] * (l - zero[r])`` if ``zero_in_levels``.

Source: the layout that optimum-quanto and hqq have in common (docs/adr/0005-quantised-storage.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Columns of the table: addresses of levels, scales and zero points; rows per plane; rows per head; the first row.
LEVELS, SCALE, ZERO, PLANE, STEP, FIRST = range(6)
ENTRIES = 6


def element_of(bits: int) -> tuple[torch.dtype, int]:
    """Return the type of the integers that hold levels of so many bits, and how many rows share them."""
    return (torch.int32, 10) if bits == 3 else (torch.uint8, 8 // bits)


@dataclass(frozen=True, eq=False)
class Packed:
    """The fields that packed keys and packed values share.

    Their *token groups* have ``group_size`` tokens, or one. Token group ``u`` of sequence ``b`` is described by
    ``table[b, owners[u]]``, as are all that are stored in the same tensors; its rows begin at ``h * step + first + u *
    rows``, where ``rows`` of them belong to each head ``h``.

    Attributes
    ----------
    shape : torch.Size
        ``(B, H, S, C)``.
    dtype : torch.dtype
        Type of the numbers.
    parameters : torch.dtype
        Type of scales and zero points.
    group_size, bits : int
        Numbers per group; ``bits`` is 1, 2, 3, 4 or 8.
    high_first, zero_in_levels : bool
        See above.
    table : Tensor
        ``(B, N, 6)`` int64, contiguous, on the device of the tensors.
    owners : Tensor
        ``(token_groups,)`` int32, ascending.
    tensors : tuple of Tensor
        The tensors that the addresses point to.
    """

    shape: torch.Size
    dtype: torch.dtype
    parameters: torch.dtype
    group_size: int
    bits: int
    high_first: bool
    zero_in_levels: bool
    table: Tensor
    owners: Tensor
    tensors: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        """The device of the bits."""
        return self.table.device

    @property
    def requires_grad(self) -> bool:
        """False: levels have no gradient."""
        return False


class PackedKeys(Packed):
    """Keys in groups of ``group_size`` consecutive tokens of a channel, of which ``S`` is a multiple.

    A token group is ``group_size`` tokens; each head has ``C`` rows of it, one for each channel.
    """


class PackedValues(Packed):
    """Values in groups of ``group_size`` consecutive channels of a token, of which ``C`` is a multiple.

    A token group is a token; each head has ``C // group_size`` rows of it.
    """
