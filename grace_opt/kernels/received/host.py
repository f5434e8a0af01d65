"""Attention received on the CPU: passes one head after the other to the compiled loop, in torch's threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .._shared.threads import call_in_threads
from .forms import LOG2E, MOST_ITEMS, ROWS_AT_ONCE


def attention_received(queries: Tensor, weights: Tensor, keys: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """See `grace_opt.kernels.received.attention_received`; without softcap."""
    from .._shared.products import ROWS, TILE
    from .cpu import add_received_at

    (heads, length, width), rows = keys.shape, queries.shape[1]
    spare = -rows % ROWS
    share = -(-rows // (MOST_ITEMS * ROWS_AT_ONCE)) * ROWS_AT_ONCE
    items, full, rest = -(-rows // share), length // TILE, length % TILE
    found = torch.zeros(2, heads, length, dtype=torch.float32, device="cpu")
    whole = torch.zeros(rows + spare, width, dtype=torch.float32, device="cpu")
    each = torch.nn.functional.pad(weights, (0, spare)).contiguous().numpy()
    tiles = torch.zeros(full + bool(rest), width, TILE, dtype=torch.float32, device="cpu")
    for head in range(heads):
        whole[:rows] = queries[head]
        whole *= scaling * LOG2E
        tiles[:full] = keys[head, : full * TILE].view(full, TILE, width).mT
        if rest:
            tiles[full, :, :rest] = keys[head, full * TILE :].mT
        sums, taken = np.zeros((items, 2, len(tiles) * TILE), np.float32), np.zeros(1, np.int64)
        arrays = taken, whole.numpy(), each, tiles.numpy(), sums
        addresses = [array.ctypes.data for array in arrays]
        data = np.array([*addresses, len(whole), width, len(tiles), items, length, share], np.int64)
        call_in_threads(add_received_at, data, items)
        found[:, head] = torch.from_numpy(sums.sum(0)[:, :length])
    return found[0], found[1]
