"""Attention over a sample of the stored tokens on the CPU: passes tensors, by address, to the compiled loop of
:mod:`grace_opt.kernels.cache.reading.cpu.samples`.

When: as in `grace_opt.kernels.cache.reading.host`. The same hyperplanes draw the same tokens as in `sampled`.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....errors import CacheError
from ..._shared.limits import BITS, BITS_AT_ONCE
from ..._shared.threads import call_in_threads
from ..decode.forms import LANES, ROWS
from .forms import ABOUT, CODES, DRAWN, HASHED, JOINED, LEVELS, LONGEST, LOWER, NORMALS, UPPER
from .hashes import HashTables
from .reference import Few
from .stored import Stored
from .tensors import ALONE_BELOW, TASKS, check, place, place_step, stored_of, unsupported_reason


def read_sample(
    query: Tensor,
    stored: Stored,
    tables: HashTables,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> Few:
    """Compute what `grace_opt.kernels.cache.reading.sampled.attention` defines, whose parameters these are.

    Raises
    ------
    CacheError
        If there is an `unsupported_reason`, or shapes do not match.
    """
    reason = unsupported_reason(query, stored, attention_mask, softcap, tables)
    if reason is not None:
        raise CacheError(f"the compiled reading kernel cannot be used: {reason}; use its reference")
    batch, query_heads, _, width = query.shape
    heads, old, kept_count = stored.keys.shape[1:]
    (sinks, _, tail), value_width, group = stored.lengths, stored.tail_values.shape[3], query_heads // heads
    sides = tables.codes.shape[3]
    _check_shapes(query, stored, tables)
    # All tensors are kept alive until the kernel is done: it gets only their addresses.
    places = stored_of(tables, stored, lambda places: _place_tables(tables, places))
    kind, news = place_step(places, query, stored, attention_mask)
    pairs = batch * heads
    splits = -(-TASKS // max(pairs, 1))
    numbers = heads, group, width, kept_count, value_width, sinks, old, tail, tables.tables, tables.bits, sides, 0
    sizes = np.array([*numbers, kind, splits], np.int64)
    scale = width**-0.5 if scaling is None else scaling
    factors = np.array([abs(scale), math.copysign(scale != 0, scale)], np.float64)
    output = query.new_empty(batch, 1, query_heads, value_width)
    bound = query.new_empty(batch, query_heads, dtype=torch.float64)
    drawn = np.zeros((pairs, splits), np.int64)
    if output.numel():
        from .cpu.samples import attend_sample_at

        padded_rows, wide = -(-group // ROWS) * ROWS, -(-value_width // (2 * LANES)) * 2 * LANES
        # In bytes: numbers of rows, logarithms of bounds, states, bits of the queries.
        parts = [
            8 * ABOUT * group,
            8 * splits * group,
            4 * (splits + 1) * (3 * group + padded_rows * wide),
            4 * group * sides,
        ]
        workspace = torch.empty(pairs * sum(parts), dtype=torch.uint8, device="cpu")
        about, rests, states, words = (
            workspace.data_ptr() + pairs * sum(parts[:number]) for number in range(len(parts))
        )
        taken = np.zeros(1, np.int64)
        addresses = [each.ctypes.data for each in (taken, places, sizes, factors)]
        addresses += [output.data_ptr(), bound.data_ptr()]
        shapes = [HASHED, batch, query_heads, value_width, heads, padded_rows, splits, wide, tables.planes.shape[1]]
        data = np.array([*addresses, *shapes, words, about, rests, drawn.ctypes.data, states], np.int64)
        alone = pairs * (old + tail) * (kept_count + value_width) < ALONE_BELOW
        for phase, most in ((HASHED, pairs * splits), (DRAWN, pairs * splits), (JOINED, pairs)):
            taken[0], data[len(addresses)] = 0, phase
            call_in_threads(attend_sample_at, data.ctypes.data, most, alone=alone)
    del news
    return Few(output, bound, torch.from_numpy(drawn.sum(1)).view(batch, heads))


def _place_tables(tables: HashTables, places: npt.NDArray[np.int64]) -> list[Tensor]:
    """Write where codes, norms, means and limits are; return the tensors."""
    norms, mean, planes = tables.norms.contiguous(), tables.mean.double().contiguous(), tables.planes.contiguous()
    codes, highest, longest = tables.codes.contiguous(), tables.highest.contiguous(), norms.amax(-1)
    places[CODES], places[LEVELS, 0], places[NORMALS, 0] = place(codes)[:5], highest.data_ptr(), planes.data_ptr()
    for row, each in ((LOWER, norms), (UPPER, mean)):
        places[row] = [*place(each), 0]
    places[LONGEST] = [*place(longest), 0, 0]
    return [norms, mean, planes, codes, highest, longest]


def _check_shapes(query: Tensor, stored: Stored, tables: HashTables) -> None:
    batch, (heads, old, kept_count) = len(query), stored.keys.shape[1:]
    planes = tables.planes.shape[1]
    blocks, sides = -(-old // BITS), -(-planes // BITS_AT_ONCE) * BITS_AT_ONCE
    check(
        query,
        stored,
        {
            "planes": (tables.planes, (kept_count, tables.tables * tables.bits)),
            "codes": (tables.codes, (batch, heads, blocks, sides, BITS // 8)),
            "norms": (tables.norms, (batch, heads, old)),
            "mean": (tables.mean, (batch, heads, kept_count)),
            "highest": (tables.highest, (batch, planes + 1)),
            "tokens_per_page": (tables.tokens_per_page, (batch, old)),
            "reach": (tables.reach, (batch, heads, kept_count)),
        },
    )
