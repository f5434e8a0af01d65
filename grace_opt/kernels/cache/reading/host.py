"""Attention over few of the stored tokens on the CPU: passes tensors, by address, to the compiled loop of
:mod:`grace_opt.kernels.cache.reading.cpu`.

When: on a CPU, in float32, for one new token, without softcap, gradients or attention weights;
`tensors.unsupported_reason` says why not. Keys are read in place if channels are adjacent.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....errors import CacheError
from ..._shared.threads import call_in_threads
from ..decode.forms import LANES, ROWS
from .forms import ABOUT, BUCKETS, CODES, DONE, LEVELS, LOWER, MORE_CHOSEN, PER_PAIR, READ, REAL, SCORED, STOP, UPPER
from .pages import PADDED_TO, FirstChannels, PageRanges, PageScores
from .reference import Few, pages_at_a_time
from .stored import Stored
from .tensors import ALONE_BELOW, TASKS, check, check_shapes, place, place_step, rowwise, stored_of, unsupported_reason


def read_attention(
    query: Tensor,
    stored: Stored,
    pages: PageScores,
    least: Tensor,
    most: int,
    epsilon: float | None = None,
    top_p: float | None = None,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> Few:
    """Compute what `grace_opt.kernels.cache.reading.reference.attention` defines, whose parameters these are.

    Raises
    ------
    CacheError
        If there is an `unsupported_reason`, or shapes do not match.
    """
    reason = unsupported_reason(query, stored, attention_mask, softcap, pages)
    if reason is not None:
        raise CacheError(f"the compiled reading kernel cannot be used: {reason}; use its reference")
    batch, query_heads, _, width = query.shape
    heads, old, kept_count = stored.keys.shape[1:]
    (sinks, _, tail), value_width, group = stored.lengths, stored.tail_values.shape[3], query_heads // heads
    check(query, stored, {"least": (least, (batch,))})
    lead = pages.lead if isinstance(pages, FirstChannels) else 0
    # All tensors are kept alive until the kernel is done: it gets only their addresses.
    places = stored_of(pages, stored, lambda places: _place_pages(pages, stored, places))
    kind, news = place_step(places, query, stored, attention_mask)
    pairs = batch * heads
    splits = -(-TASKS // max(pairs, 1))
    numbers = heads, group, width, kept_count, value_width, sinks, old, tail, pages.count, pages.size, pages.first, lead
    sizes = np.array([*numbers, kind, splits], np.int64)
    scale = width**-0.5 if scaling is None else scaling
    factors = np.array([scale, -1.0 if epsilon is None else epsilon, -1.0 if top_p is None else top_p], np.float64)
    starts = np.array([least.numpy(), least.numpy() if epsilon is None else pages_at_a_time(pages).numpy()], np.int64)
    output = query.new_empty(batch, 1, query_heads, value_width)
    bound = query.new_empty(batch, query_heads, dtype=torch.float64)
    counts = np.zeros((pairs, REAL + splits), np.int64)
    if output.numel():
        from .cpu import attend_few_at

        padded_rows, columns, wide = -(-group // ROWS) * ROWS, _rounded(pages.count + LANES), _rounded(value_width)
        # In bytes: scores, steps below the first, numbers at each step, what is chosen, numbers of rows, states.
        parts = [4 * padded_rows * columns, 2 * columns, 8 * BUCKETS, 8 * columns, 8 * ABOUT * group]
        parts.append(4 * (splits + 1) * (2 * group + padded_rows * wide))
        workspace = torch.empty(pairs * sum(parts), dtype=torch.uint8, device="cpu")
        areas = [workspace.data_ptr() + pairs * sum(parts[:number]) for number in range(len(parts))]
        taken = np.zeros(1 + pairs * PER_PAIR, np.int64)
        addresses = [each.ctypes.data for each in (taken, places, sizes, factors, starts)]
        addresses += [output.data_ptr(), bound.data_ptr()]
        shapes = [SCORED, batch, query_heads, value_width, heads, padded_rows, columns, pages.count, splits]
        data = np.array([*addresses, *shapes, *areas[:5], counts.ctypes.data, areas[5], wide], np.int64)
        alone = pairs * (old + tail) * (kept_count + value_width) < ALONE_BELOW

        def run(phase: int, most: int) -> None:
            taken[0], data[len(addresses)] = 0, phase
            call_in_threads(attend_few_at, data.ctypes.data, most, alone=alone)

        run(SCORED, pairs * splits)
        while epsilon is not None and (counts[:, DONE] < counts[:, STOP]).any():
            taken[:] = 0
            run(MORE_CHOSEN, pairs)
            run(READ, pairs * splits)
    del news
    return Few(output, bound, torch.from_numpy(counts[:, REAL:].sum(1)).view(batch, heads))


def _place_pages(pages: PageScores, stored: Stored, places: npt.NDArray[np.int64]) -> list[Tensor]:
    """Check the shapes of what is read in every step; write where pages' ranges, or channels' scores, are."""
    (batch, heads, old, kept_count), count = stored.keys.shape, pages.count
    expected: dict[str, tuple[int, ...]] = {"tokens_per_page": (batch, count), "reach": (batch, heads, kept_count)}
    if isinstance(pages, FirstChannels):
        expected["norms"] = batch, heads, old
        expected["mean"] = batch, heads, kept_count - pages.lead
        expected["codes"] = batch, heads, pages.lead, -(-old // PADDED_TO) * PADDED_TO
        expected["levels"] = batch, heads, 3, pages.lead
    elif isinstance(pages, PageRanges):
        expected["lower"] = expected["upper"] = (
            batch,
            heads,
            -(-max(old - pages.first, 0) // pages.size) + 1,
            kept_count,
        )
    check_shapes({name: (getattr(pages, name), shape) for name, shape in expected.items()})
    if isinstance(pages, PageRanges):
        ranges = [rowwise(pages.lower), rowwise(pages.upper)]
        places[LOWER], places[UPPER] = (place(t) for t in ranges)
        return ranges
    assert isinstance(pages, FirstChannels)
    ranges = [pages.norms.float().contiguous(), pages.mean.float().contiguous()]
    codes, levels = pages.codes.contiguous(), pages.levels.contiguous()
    places[CODES], places[LEVELS] = place(codes), place(levels)
    places[LOWER], places[UPPER] = [*place(ranges[0])[:3], 4, 0], [*place(ranges[1])[:3], 0, 4]
    return [*ranges, codes, levels]


def _rounded(count: int) -> int:
    """Round up to whole pairs of vectors."""
    return -(-count // (2 * LANES)) * 2 * LANES
