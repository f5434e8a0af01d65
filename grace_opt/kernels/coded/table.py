"""Describe stored codes by address: the table that the loops of :mod:`grace_opt.kernels.coded` read.

It has addresses, not numbers: who keeps it must keep the codes, which never change, alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from .forms import (
    COUNT,
    FIELDS,
    KEYS,
    LEVEL,
    LEVEL_BYTES,
    LEVELS,
    MEANS,
    NEWEST,
    PLANES,
    SCALES,
    UNIT,
    VALUES,
)


class Stored(Protocol):
    """Codes of H heads with d channels in C classes, as :class:`grace_opt.hf.bits.codes.Codes` describes them."""

    @property
    def levels(self) -> Tensor: ...  # noqa: D102
    @property
    def means(self) -> Tensor: ...  # noqa: D102
    @property
    def scales(self) -> Tensor: ...  # noqa: D102
    @property
    def unit(self) -> Tensor: ...  # noqa: D102
    @property
    def planes(self) -> tuple[Tensor, ...]: ...  # noqa: D102
    @property
    def counts(self) -> tuple[int, ...]: ...  # noqa: D102
    def widths(self) -> Tensor: ...  # noqa: D102


def units_of(keys: Stored, values: Stored, heads: int, newest: bool = False) -> npt.NDArray[np.int64]:
    """Return the units of each head, ``(heads, n, FIELDS)`` int64, without those that have no tokens.

    Parameters
    ----------
    keys, values : Stored
    heads : int
        Number of heads; codes of a multiple of it are those of consecutive blocks of tokens.
    newest : bool
        Whether their tokens are the first of the newest ones, in the order of the sequence.
    """
    blocks, classes = len(keys.means) // heads, len(keys.counts)
    found = np.zeros((classes, blocks * heads, FIELDS), np.int64)
    found[..., COUNT] = np.array(keys.counts)[:, None]
    found[..., NEWEST] = np.arange(blocks * heads) // heads * keys.counts[0] if newest else -1
    for first, codes in ((KEYS, keys), (VALUES, values)):
        widths = codes.widths().numpy()
        _describe(found[..., first : first + UNIT + 1], codes, widths)
    found = found.reshape(classes, blocks, heads, FIELDS).transpose(2, 0, 1, 3).reshape(heads, -1, FIELDS)
    return np.ascontiguousarray(found[:, found[0, :, COUNT] > 0])


def _describe(fields: npt.NDArray[np.int64], codes: Stored, widths: npt.NDArray[np.uint8]) -> None:
    """Fill ``(C, H, 7)`` fields, of codes with widths ``(C, H, d)``."""
    classes, heads, width = widths.shape
    numbers = np.arange(classes * heads).reshape(classes, heads)
    wide = np.cumsum((widths > 0).sum(2).ravel())
    fields[..., SCALES] = codes.scales.data_ptr() + 2 * np.concatenate([[0], wide[:-1]]).reshape(classes, heads)
    planes = widths.sum(2, dtype=np.int64)
    for number, (of_class, count) in enumerate(zip(codes.planes, codes.counts, strict=True)):
        before = np.cumsum(planes[number]) - planes[number]
        fields[number, :, PLANES] = of_class.data_ptr() + before * -(-count // 8)
    fields[..., LEVELS] = codes.levels.data_ptr()
    fields[..., LEVEL_BYTES] = codes.levels.shape[1]
    fields[..., LEVEL] = numbers * width
    fields[..., MEANS] = codes.means.data_ptr() + 2 * width * np.arange(heads)
    fields[..., UNIT] = codes.unit.data_ptr() + 4 * np.arange(heads)


def joined(parts: Sequence[npt.NDArray[np.int64]], heads: int) -> npt.NDArray[np.int64]:
    """Return the units of several codes of the same heads, one after the other."""
    return np.concatenate([np.zeros((heads, 0, FIELDS), np.int64), *parts], axis=1)
