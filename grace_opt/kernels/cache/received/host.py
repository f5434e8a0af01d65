"""Attention received on the CPU: passes one head after the other to the compiled loop, in torch's threads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..._shared.threads import call_in_threads
from .forms import LOG2E, MOST_TASKS, ROWS_AT_ONCE


def attention_received(queries: Tensor, weights: Tensor, keys: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """See `grace_opt.kernels.cache.received.attention_received`; without softcap."""
    from ..._shared.products import BYTES, ROWS, TILE
    from .cpu import add_received_at, fill_tiles_at

    (heads, length, width), rows = keys.shape, queries.shape[1]
    spare, tiles = -rows % ROWS, -(-length // TILE)
    share = -(-rows // (MOST_TASKS * ROWS_AT_ONCE)) * ROWS_AT_ONCE
    tasks = -(-rows // share)
    received = np.empty((2, heads, length), np.float32)
    scaled_queries = torch.zeros(rows + spare, width, dtype=torch.float32, device="cpu")
    padded_weights = torch.nn.functional.pad(weights, (0, spare)).contiguous().numpy()
    turned = np.empty((tiles, width, TILE), np.float32)
    sums, taken = np.empty((tasks, 2, tiles * TILE), np.float32), np.empty(1, np.int64)
    addresses = [array.ctypes.data for array in (taken, scaled_queries.numpy(), padded_weights, turned, sums)]
    data = np.array([*addresses, len(scaled_queries), width, tiles, tasks, length, share], np.int64)
    for head in range(heads):
        scaled_queries[:rows] = queries[head]
        scaled_queries *= scaling * LOG2E
        stored = keys[head].float()
        stored = stored if stored.stride(1) == 1 else stored.contiguous()
        entries = [addresses[0], addresses[3], stored.data_ptr(), width, tiles, length, stored.stride(0) * BYTES]
        to_fill = np.array(entries, np.int64)
        taken.fill(0)
        call_in_threads(fill_tiles_at, to_fill.ctypes.data, tiles)
        sums.fill(0)
        taken.fill(0)
        call_in_threads(add_received_at, data.ctypes.data, tasks)
        np.sum(sums[..., :length], axis=0, out=received[:, head])
    first, second = torch.from_numpy(received)
    return first, second
