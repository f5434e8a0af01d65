"""Codes of a trellis on the GPU: Viterbi's algorithm, a row in each lane, whose costs stay in registers.

Numbers are read column by column, so that the lanes of a program read side by side; what is known of each column (the
better of the two ways into each state, and the nearest level of each subset) is kept in four bytes for the way back.
In torch, every column would take a dozen launches.

Source: as for :mod:`grace_opt.kernels.cache.coding.trellis`, which defines what is computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import trellis

SUBSETS, LEVELS = tl.constexpr(trellis.SUBSETS), tl.constexpr(256)
#: Of what is kept of a column, the bits of the ways, and those of a level's place in its subset.
WAYS, PLACE = tl.constexpr(trellis.STATES), tl.constexpr(5)
#: Rows of one program: those of a warp.
ROWS = 32


def searched(scaled: Tensor, levels: Tensor, bits: Tensor) -> Tensor:
    """As `grace_opt.kernels.cache.coding.trellis.searched`, on the GPU."""
    rows, count = scaled.shape
    columns, codes = scaled.mT.contiguous(), torch.empty(count, rows, dtype=torch.uint8, device=scaled.device)
    if codes.numel():
        survivors = torch.empty(count, rows, dtype=torch.int32, device=scaled.device)
        with torch.cuda.device_of(scaled):
            _search[(triton.cdiv(rows, ROWS),)](
                columns, levels.contiguous(), bits.int(), survivors, codes, rows, count, ROWS=ROWS, num_warps=1
            )
    return codes.mT


@triton.jit
def _way(one, other):
    """The cost of the better way, and whether it is the second one."""
    return tl.minimum(one, other), (other < one).to(tl.int32)


@triton.jit
def _search(columns, levels, bits, survivors, codes, rows, count, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    used = 2 << tl.load(bits + row, mask=exists, other=0)
    book, most = levels + row.to(tl.int64) * LEVELS, tl.max(used, axis=0)
    far = tl.full([ROWS], float("inf"), tl.float32)
    # Above the cost of state 0, which is 0.
    c1, c2, c3, c4, c5, c6, c7 = far, far, far, far, far, far, far
    offset = row.to(tl.int64)  # offsets may pass 2**31
    for _ in range(count):
        x = tl.load(columns + offset, mask=exists, other=0.0)
        e0 = tl.full([ROWS], float("inf"), tl.float32)
        e1, e2, e3 = e0, e0, e0
        n0 = tl.zeros([ROWS], tl.int32)
        n1, n2, n3 = n0, n0, n0
        for place in range(0, most // SUBSETS):
            mine = exists & (place * SUBSETS < used)
            d0 = x - tl.load(book + place * SUBSETS, mask=mine, other=float("inf"))
            d1 = x - tl.load(book + place * SUBSETS + 1, mask=mine, other=float("inf"))
            d2 = x - tl.load(book + place * SUBSETS + 2, mask=mine, other=float("inf"))
            d3 = x - tl.load(book + place * SUBSETS + 3, mask=mine, other=float("inf"))
            n0, e0 = tl.where(d0 * d0 < e0, place, n0), tl.minimum(d0 * d0, e0)
            n1, e1 = tl.where(d1 * d1 < e1, place, n1), tl.minimum(d1 * d1, e1)
            n2, e2 = tl.where(d2 * d2 < e2, place, n2), tl.minimum(d2 * d2, e2)
            n3, e3 = tl.where(d3 * d3 < e3, place, n3), tl.minimum(d3 * d3, e3)
        # The states before a state s are s // 2 and s // 2 + 4; which subset leads where, `trellis.subset` says.
        b0, w0 = _way(e0, c4 + e2)
        b1, w1 = _way(e2, c4 + e0)
        b2, w2 = _way(c1 + e1, c5 + e3)
        b3, w3 = _way(c1 + e3, c5 + e1)
        b4, w4 = _way(c2 + e2, c6 + e0)
        b5, w5 = _way(c2 + e0, c6 + e2)
        b6, w6 = _way(c3 + e3, c7 + e1)
        b7, w7 = _way(c3 + e1, c7 + e3)
        c1, c2, c3, c4, c5, c6, c7 = b1 - b0, b2 - b0, b3 - b0, b4 - b0, b5 - b0, b6 - b0, b7 - b0
        ways = w0 | (w1 << 1) | (w2 << 2) | (w3 << 3) | (w4 << 4) | (w5 << 5) | (w6 << 6) | (w7 << 7)
        places = n0 | (n1 << PLACE) | (n2 << (2 * PLACE)) | (n3 << (3 * PLACE))
        tl.store(survivors + offset, ways | (places << WAYS), mask=exists)
        offset += rows
    state, least = tl.where(c1 < 0, 1, 0), tl.minimum(c1, 0.0)
    state, least = tl.where(c2 < least, 2, state), tl.minimum(c2, least)
    state, least = tl.where(c3 < least, 3, state), tl.minimum(c3, least)
    state, least = tl.where(c4 < least, 4, state), tl.minimum(c4, least)
    state, least = tl.where(c5 < least, 5, state), tl.minimum(c5, least)
    state, least = tl.where(c6 < least, 6, state), tl.minimum(c6, least)
    state = tl.where(c7 < least, 7, state)
    for _ in range(count):
        offset -= rows
        survivor = tl.load(survivors + offset, mask=exists, other=0)
        bit = state & 1
        state = (state >> 1) | (((survivor >> state) & 1) << 2)
        subset = (state & 1) | ((bit ^ ((state >> 1) & 1) ^ (state >> 2)) << 1)
        places = survivor >> WAYS
        places = tl.where(subset % 2 == 1, places >> PLACE, places)
        place = tl.where(subset > 1, places >> (2 * PLACE), places) & (2**PLACE - 1)
        tl.store(codes + offset, (bit | (place << 1)).to(tl.uint8), mask=exists)
