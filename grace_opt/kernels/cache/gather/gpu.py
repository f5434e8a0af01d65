"""Copy the kept channels of keys in one pass, on the GPU, to build the pruned storage.

One program takes some tokens of one head, and reads and writes whole rows; torch's ``gather`` looks up an index for
every number. In the result, either tokens or channels may be adjacent; docs/adr/0007 says which is used, and why. Use
it on the device of the keys, which may have any strides.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...._util.array_like import FLOATS
from ....errors import CacheError

#: Approximate number of entries that one program copies.
COPIED = 8192


def gather_channels(keys: Tensor, kept_indices: Tensor, channel_major: bool = False) -> Tensor:
    """Copy the kept channels of all keys.

    Parameters
    ----------
    keys : Tensor
        ``(B, H, S, d)``, floating.
    kept_indices : Tensor
        ``(B, H, d')`` int64, from 0 to d - 1.
    channel_major : bool
        Whether each channel's tokens are adjacent in memory, instead of each token's channels.

    Returns
    -------
    Tensor
        ``(B, H, S, d')``, of the keys' type.

    Raises
    ------
    CacheError
        On shapes, types or devices that do not fit.

    Notes
    -----
    Reads at most B H S d numbers and writes B H S d', in one launch.
    """
    if (
        keys.ndim != 4
        or kept_indices.ndim != 3
        or kept_indices.shape[:2] != keys.shape[:2]
        or kept_indices.device != keys.device
    ):
        raise CacheError(
            f"keys {tuple(keys.shape)} on {keys.device} and kept channels {tuple(kept_indices.shape)} on "
            f"{kept_indices.device} do not match: give keys (B, H, S, d) and indices (B, H, d') on one device."
        )
    if keys.dtype not in FLOATS or kept_indices.dtype != torch.int64:
        raise CacheError(
            f"keys are {keys.dtype} and indices {kept_indices.dtype}; give floating keys and int64 indices."
        )
    (batch, heads, tokens, _), count = keys.shape, kept_indices.shape[-1]
    shape = (batch, heads, count, tokens) if channel_major else (batch, heads, tokens, count)
    buffer = keys.new_empty(shape)
    result = buffer.mT if channel_major else buffer
    if result.numel():
        width = triton.next_power_of_2(count)
        block = max(COPIED // width, 1)
        with torch.cuda.device_of(keys):
            _gather_kernel[(batch * heads, triton.cdiv(tokens, block))](
                keys, kept_indices, result, heads, tokens, count,
                *keys.stride(), *kept_indices.stride(), *result.stride(),
                WIDTH=width, BLOCK=block, num_warps=4,
            )  # fmt: skip
    return result


@triton.jit
def _gather_kernel(
    keys, kept_indices, result, heads, tokens, count,
    keys_b, keys_h, keys_s, keys_d, kept_b, kept_h, kept_d, result_b, result_h, result_s, result_d,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)  # offsets may pass 2**31
    b, h = program // heads, program % heads
    token = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, WIDTH)
    channel = tl.load(kept_indices + b * kept_b + h * kept_h + place * kept_d, mask=place < count, other=0)
    exists = (token < tokens)[:, None] & (place < count)[None, :]
    source = keys + b * keys_b + h * keys_h + token[:, None] * keys_s + channel[None, :] * keys_d
    target = result + b * result_b + h * result_h + token[:, None] * result_s + place[None, :] * result_d
    tl.store(target, tl.load(source, mask=exists), mask=exists)
