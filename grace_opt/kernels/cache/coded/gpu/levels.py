"""`levels_of`: what the GPU's kernels read of codebooks, made once for each.

Numbers of up to three bits are sums of signs times factors (`grace_opt.kernels.cache.coded.gpu.weights`), which
symmetric books allow: with two bits, and a and b above zero, ``(b - a) / 2`` times the low bit's sign and ``(a + b) /
2`` times the other's. Numbers of more bits are looked up, in two float16 tables that add up to them.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from .....errors import CacheError

#: Numbers of a table; factors of signs in a row; and which of these is at least as large as all.
BOOK, SIGNS, MOST = tl.constexpr(256), tl.constexpr(8), tl.constexpr(4)
#: Largest number of a codebook: well within float16.
LARGEST = 1024.0


class Levels(NamedTuple):
    """What kernels read.

    Attributes
    ----------
    high, low : Tensor
        ``(2, 256)`` float16, which together are numbers of codes: those of b < 8 bits, with a bit b that is set, and
        those of 8 bits.
    signs : Tensor
        ``(4, SIGNS)`` float32: factors of the signs of 1, 2 and 3 bits, and the largest number of these.
    """

    high: Tensor
    low: Tensor
    signs: Tensor


_made: dict[int, tuple[weakref.ref[Tensor], Levels]] = {}


def levels_of(books: Tensor, trellis: bool = False) -> Levels:
    """Return the tables of codebooks; waits for the device at the first call with these.

    Raises
    ------
    CacheError
        If they are not those of `grace_opt.kernels.cache.coded.host.coded_attention`, not symmetric or too large.
    """
    known = _made.get(id(books))
    if known is not None and known[0]() is books:
        return known[1]
    if tuple(books.shape) != (9, 256) or books.dtype != torch.float32:
        raise CacheError(f"codebooks are {books.dtype} of shape {tuple(books.shape)}; (9, 256) float32 is needed")
    made, key = _tables(books, trellis), id(books)
    _made[key] = weakref.ref(books, lambda _: _made.pop(key, None)), made
    return made


def _tables(books: Tensor, trellis: bool) -> Levels:
    own = books.cpu().double()
    used = torch.arange(256, device="cpu") < 2 ** torch.arange(9, device="cpu")[:, None]
    used[0] = used[1 if trellis else 7] = False  # as codes are read, with a trellis one bit longer
    own = own.where(used, 0.0)
    small = [own[bits, : 2**bits] for bits in (1, 2, 3)]
    if any(not torch.equal(levels, -levels.flip(0)) for levels in small) or not own.abs().amax() <= LARGEST:
        raise CacheError(
            f"codebooks of 1 to 3 bits must be symmetric, and numbers at most {LARGEST:g}, for the GPU's kernels"
        )
    signs = torch.zeros(4, SIGNS.value, dtype=torch.float64, device="cpu")
    signs[0, 0] = 1.0
    (_, one), (_, _, near, far), (*_, v4, v5, v6, v7) = (levels.tolist() for levels in small)
    signs[1, 0] = one
    signs[2, 0], signs[2, 1] = (far - near) / 2, (far + near) / 2
    # Of bits 0, 1 and 2, the lowest first, and of their product.
    signs[3, 0], signs[3, 1] = (v7 - v6 + v5 - v4) / 4, (v7 + v6 - v5 - v4) / 4
    signs[3, 2], signs[3, 3] = (v7 + v6 + v5 + v4) / 4, (v7 - v6 - v5 + v4) / 4
    signs[:, MOST.value] = signs.abs().amax(1)
    every = torch.zeros(2, BOOK.value, dtype=torch.float64, device="cpu")
    for bits in range(1, 8):
        every[0, 2**bits : 2 ** (bits + 1)] = own[bits, : 2**bits]
    every[1] = own[8]
    high = every.half()
    low = (every - high.double()).half()
    return Levels(*(part.to(books.device) for part in (high, low, signs.float())))
