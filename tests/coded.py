"""Coded tokens made and read the plain way, as `grace_opt.hf.stores.coded.codes` defines them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from grace_opt.kernels.cache.coded.forms import WIDTHS
from grace_opt.kernels.cache.coded.table import CodedSequence, table_of, units_of
from grace_opt.kernels.cache.coded.trial import StoredCodes
from tests.oracle import read_of_trellis

#: A class of so many tokens, or several, are a segment.
Segments = tuple[tuple[int, ...], ...]


def books_of(device: str = "cpu", trellis: bool = False) -> Tensor:
    """Numbers that codes stand for, symmetric and only with 8 bits evenly spaced; codes that a width does not have are
    NaN. Of a trellis those of codes as they are read."""
    books = torch.full((9, 256), float("nan"))
    for width in range(2, 9) if trellis else WIDTHS[1:]:
        levels = torch.linspace(-2, 2, 2**width)
        books[width, : 2**width] = levels if width == 8 else levels * levels.abs().sqrt()
    return books.to(device)


def packed(bits: np.ndarray, device: str) -> Tensor:
    """Rows of bits, the first in the lowest bit of a byte."""
    return torch.from_numpy(np.packbits(bits.astype(bool), axis=1, bitorder="little")).to(device)


def codes(
    generator: torch.Generator,
    heads: int,
    d: int,
    counts: tuple[int, ...],
    widths: Sequence[int],
    device: str = "cpu",
    trellis: bool = False,
) -> tuple[StoredCodes, Tensor]:
    """Random codes of `widths` only, and the coordinates that they stand for, (heads, tokens, d) float64."""
    shape = len(counts), heads, d
    wide = torch.tensor(widths)[torch.randint(len(widths), shape, generator=generator)]
    means = torch.randn(heads, d, generator=generator).half()
    scales = ((torch.randn(shape, generator=generator).abs() + 0.3) * (wide > 0)).half()
    unit = torch.tensor([4.0, 1.0, 0.5]).repeat(heads)[:heads]
    planes, found, books = [], [], books_of(trellis=trellis)
    for number, count in enumerate(counts):
        of_class, rows, numbers = wide[number].flatten().tolist(), [], []
        for width in of_class:
            code = torch.randint(2**width, (count,), generator=generator)
            rows += [(code >> place & 1).numpy() for place in range(width)]
            read = width
            if trellis and 0 < width < 8:
                code, read = torch.tensor(read_of_trellis(code.tolist()), dtype=torch.int64), width + 1
            numbers.append(books[read, code] if width else torch.zeros(count))
        bits = np.stack(rows) if rows else np.zeros((0, count))
        planes.append(packed(bits, device))
        every = torch.stack(numbers).view(heads, d, count).double()
        every = (every * scales[number, ..., None].double() + means[..., None].double()) * unit[:, None, None]
        found.append(every.mT)
    level = np.searchsorted(WIDTHS, wide.flatten().numpy())
    levels = packed(np.stack([level >> place & 1 for place in range(3)]), device)
    tensors = (t.to(device) for t in (levels, means, scales[wide > 0], unit))
    return StoredCodes(*tensors, tuple(planes), counts, wide.to(torch.uint8).to(device)), torch.cat(found, dim=1)


class Coded:
    """One sequence: `sinks` dense tokens, then coded segments, then `waiting` blocks of `size` newest tokens.

    Attributes
    ----------
    sequence : CodedSequence
    dense : (Tensor, Tensor)
        What its keys and values are, in this order, ``(heads, tokens, d)`` float64.
    waits : int
        Number of waiting tokens.
    books : Tensor
    kept : list
        The codes: the sequence has only their addresses.
    """

    def __init__(
        self,
        generator: torch.Generator,
        heads: int,
        d: int,
        d_v: int,
        segments: Segments,
        dtype: torch.dtype = torch.float32,
        *,
        sinks: int = 0,
        waiting: int = 0,
        size: int = 8,
        widths: Sequence[int] = WIDTHS,
        bases: bool = True,
        device: str = "cpu",
        trellis: bool = False,
    ) -> None:
        self.books, self.waits, self.kept, self.trellis = books_of(device, trellis), waiting * size, [], trellis
        units, found, own = [], ([], []), []
        for counts in segments:
            pair = [codes(generator, heads, width, counts, widths, device, trellis) for width in (d, d_v)]
            units.append(units_of(pair[0][0], pair[1][0], heads))
            for number, each in enumerate(pair):
                found[number].append(each[1])
            self.kept.append(pair)
        if waiting:  # one block after the other, each with all heads
            pair = [codes(generator, heads * waiting, width, (size,), widths, device, trellis) for width in (d, d_v)]
            units.append(units_of(pair[0][0], pair[1][0], heads, newest=True))
            for number, each in enumerate(pair):
                blocks = each[1].view(waiting, heads, size, -1).transpose(0, 1)
                found[number].append(blocks.reshape(heads, self.waits, -1))
            self.kept.append(pair)
        every = []
        for number, width in enumerate((d, d_v)):
            first = torch.full((sinks, heads, width + 1), float("nan"), dtype=dtype).transpose(0, 1)[..., :width]
            first.copy_(torch.randn(heads, sinks, width, generator=generator))
            basis = torch.randn(heads, width, width, generator=generator) * width**-0.5 if bases else None
            coded = torch.cat([torch.zeros(heads, 0, width, dtype=torch.float64), *found[number]], dim=1)
            coded = coded if basis is None else coded @ basis.double()
            every.append(torch.cat([first.double(), coded], dim=1))
            own.append((first.to(device), None if basis is None else basis.to(device)))
        self.dense = every[0], every[1]
        (key, key_basis), (value, value_basis) = own
        self.sequence = CodedSequence(table_of(units, heads), key, value, key_basis, value_basis)
