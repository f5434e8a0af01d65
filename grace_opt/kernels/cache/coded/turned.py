"""Products of queries with a mean that turns with the position, on the CPU: passes tensors to the compiled loop."""

from __future__ import annotations

from array import array
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ..._shared.threads import call_in_threads
from .forms import BLOCK, ROWS

#: If fewer products are summed, waking other threads takes longer than it saves.
ALONE_BELOW = 2**20


def turned_products(
    queries: Tensor, means: Tensor, channels: Tensor, begins: Tensor, places: Tensor, count: int
) -> Tensor:
    """Return the products of query rows with their heads' means, at positions 0, 1, …

    Parameters
    ----------
    queries : Tensor
        ``(B, H, R, d)`` float32.
    means : Tensor
        ``(B, H, 2, P)`` float32: of P pairs of channels, before they are turned.
    channels : Tensor
        ``(2, P)`` int64.
    begins : Tensor
        ``(blocks, 2, P)`` float32: cosines and sines at every 64th position, at least ``count / 64`` of them.
    places : Tensor
        ``(2 P, 64)`` float32: cosines, then sines, at the first 64 positions.
    count : int

    Returns
    -------
    Tensor
        ``(B, H, R, count)`` float32, a view; the same for any number of threads. Computed as
        `grace_opt.hf.bases.rotary.RotaryMean.logits`, which defines it.
    """
    batch, heads, rows, width = queries.shape
    blocks, pairs = -(-count // BLOCK), means.shape[3]
    given = [each.contiguous() for each in (queries, means, channels, begins, places)]
    padded = -(-rows // ROWS) * ROWS
    found = torch.empty(batch, heads, padded, blocks * BLOCK, dtype=torch.float32, device="cpu")
    numbers = [0, batch * heads, rows, width, pairs, blocks, *(each.data_ptr() for each in (*given, found))]
    table, loops = array("q", numbers), _loops()
    alone = found.numel() * pairs < ALONE_BELOW
    call_in_threads(loops.turn_at, table.buffer_info()[0], batch * heads * -(-blocks // loops.AT_ONCE), alone=alone)
    return found[:, :, :rows, :count]


@cache
def _loops() -> ModuleType:
    from .cpu import turned

    return turned
