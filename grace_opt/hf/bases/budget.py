"""`BitBudget`: how many bits per element each head of each layer gets, before its prompt divides them.

Layers are compressed one after the other while the prompt is read, ranks of a tensor-parallel model see only their own
heads, and rows of a batch are coded alone. So the shares of layers and heads, and of K and V, come from the
calibration; within a head, `allocate` divides by what the prompt shows. Without a calibrated basis, all shares are
equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...errors import CacheError
from ..settings.bits import MAX_BITS
from .basis import Basis
from .byte_limit import ByteLimit
from .calibrated import CalibratedBasis
from .guard import Guard
from .kl_curve import kl_of_bits


class BasisSource:
    """A calibrated basis that is found, or made, when it is needed first: a prompt that stays dense needs none.

    Parameters
    ----------
    find : callable
        Returns it.
    """

    def __init__(self, find: Callable[[], CalibratedBasis]) -> None:
        self._find = find
        #: The basis, once it was needed.
        self.known: CalibratedBasis | None = None

    def __call__(self) -> CalibratedBasis:
        """Return the basis."""
        if self.known is None:
            self.known = self._find()
        return self.known

    def __deepcopy__(self, copies: dict[int, Any]) -> BasisSource:
        return self  # it belongs to the model, and copies of a cache share it


@dataclass(frozen=True)
class BitBudget:
    """The budget of a whole cache, and the bases of its layers.

    Attributes
    ----------
    key_bits, value_bits : float or None
        Mean bits per element; None if `total_bytes` or `limit` is given.
    total_bytes : int or None
        Bytes of the whole cache at the end of the prompt.
    basis : str
        "calibrated" or "none".
    source : BasisSource, optional
        Of the calibrated basis.
    layers : tuple of int
        The prunable layers.
    trellis : bool
        Whether the numbers of a channel are coded together.
    limit : ByteLimit or None
        What the whole cache never exceeds, if ``max_bytes`` is given.
    guard : Guard
        Says when a prompt is unlike the calibration.
    """

    key_bits: float | None
    value_bits: float | None
    total_bytes: int | None
    basis: str
    source: BasisSource | None
    layers: tuple[int, ...]
    trellis: bool
    guard: Guard
    limit: ByteLimit | None = None
    _last: dict[object, dict[int, tuple[Tensor, Tensor]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def calibrated(self) -> CalibratedBasis | None:
        """The calibrated basis, which may have to be made now; None without a calibration."""
        return None if self.source is None else self.source()

    @property
    def predicted_kl(self) -> float | None:
        """The KL that was measured for as many bits; None where it was not, as for codes of single numbers."""
        known = None if self.source is None or not self.trellis else self.source.known
        if known is None or known.kl is None or self.key_bits is None or self.key_bits != self.value_bits:
            return None
        return kl_of_bits(known.kl, self.key_bits)

    def bases(self, layer: int, heads: int, rank: int) -> tuple[Basis, Basis] | None:
        """Return the bases of a layer's keys and values, of this rank's heads; None without a calibration."""
        found = self.calibrated
        if found is None:
            return None
        start = _start(len(found.keys[layer].encode), heads, rank)
        return found.keys[layer].heads(start, start + heads), found.values[layer].heads(start, start + heads)

    def head_bits(
        self, layer: int, heads: int, rank: int, mean: tuple[float, float], tokens: tuple[int, ...] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the bits per element of a layer's keys and values, ``(H,)`` float64 each, for given means.

        `tokens` are the numbers that the `layers` code, by which they count in the means; None if all code as many.
        """
        calibrated = self.calibrated
        if calibrated is None:
            keys, values = (torch.full((heads,), each, dtype=torch.float64, device="cpu") for each in mean)
            return keys, values
        found = self._last.get((mean, tokens))
        if found is None:  # once per sequence, not once per layer
            found = calibrated.shares(*mean, tokens)
            self._last.clear()
            self._last[mean, tokens] = found
        keys, values = found[layer]
        start = _start(len(keys), heads, rank)
        return keys[start : start + heads], values[start : start + heads]

    def means(
        self, sequences: int, elements: int, dense_bytes: int, fixed_bytes: float, layers: int = 1
    ) -> tuple[float, float]:
        """Return the mean bits per element of keys and of values.

        Parameters
        ----------
        sequences : int
            Number of sequences in the batch.
        elements : int
            Number of coded elements of some layers, of K and V, in this sequence.
        dense_bytes : int
            Bytes of what stays dense in them, in this sequence.
        fixed_bytes : float
            Bytes that their coded tokens take even if no channel gets any bits.
        layers : int
            How many these are: one that stands for all, or all.

        Raises
        ------
        CacheError
            If ``total_bytes`` is less than both together.
        """
        if self.total_bytes is None:
            assert self.key_bits is not None
            assert self.value_bits is not None
            return self.key_bits, self.value_bits
        self.check(sequences, dense_bytes + fixed_bytes, False, layers)
        mean = min(8 * (self._each(sequences) * layers - dense_bytes) / elements, float(MAX_BITS))
        return mean, mean

    def check(self, sequences: int, least: float, all_dense: bool, layers: int = 1) -> None:
        """Raise `CacheError` if some layers of a sequence take at least so many bytes, and ``total_bytes`` is less.

        Parameters
        ----------
        sequences : int
            Number of sequences in the batch.
        least : float
        all_dense : bool
            Whether the sequence is too short to code.
        layers : int
            As for `means`.
        """
        if self.total_bytes is not None and least > self._each(sequences) * layers:
            dense = "sink tokens, the recent window, means and widths"
            short = "tokens of a prompt that is too short to be coded"
            self._refuse(sequences, least / layers, short if all_dense else dense)

    def _each(self, sequences: int) -> float:
        """Return the bytes for one layer of one sequence."""
        assert self.total_bytes is not None
        return self.total_bytes / sequences / len(self.layers)

    def _refuse(self, sequences: int, needed: float, what: str) -> NoReturn:
        smallest = math.ceil(needed * sequences * len(self.layers))
        given = "this prompt" if sequences == 1 else f"these {sequences} rows, which share it equally"
        raise CacheError(
            f"total_bytes={self.total_bytes} is too few for {given}: {what} take {smallest} already; write "
            f"total_bytes={smallest} or more"
        )


def _start(whole: int, heads: int, rank: int) -> int:
    return 0 if heads == whole else rank * heads
