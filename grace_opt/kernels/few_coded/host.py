"""Attention of one new token over few of the coded ones, on the CPU: passes tensors, by address, to the compiled loops
of :mod:`grace_opt.kernels.few_coded.cpu`.

When: where `grace_opt.kernels.coded.host` would read all of them, for one new token; `unsupported_reason` says why not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import CacheError
from .._shared.threads import call_in_threads
from ..coded import host as coded
from ..coded.forms import LANES, ROWS, WIDTHS
from ..coded.host import check_shapes, laid_out, rounded
from ..coded.table import CodedSequence
from ..reading.forms import BUCKETS, ROUNDS
from .forms import (
    ABOUT,
    BOUNDED,
    CELLS,
    DONE,
    FIRST_CHOSEN,
    FIRST_ITEM,
    GIVEN,
    LAST_ITEM,
    MORE_CHOSEN,
    OF_HEAD,
    PHASE,
    READ,
    READ_TOKENS,
    SCORED,
    STOP,
)
from .table import Lying

#: Most query heads of a KV head.
MAX_GROUP = 64
_RANGES: dict[int, tuple[Tensor, npt.NDArray[np.float32]]] = {}


class FewCoded(NamedTuple):
    """What attention over few coded tokens gives.

    Attributes
    ----------
    output : Tensor
        ``(B, 1, H_q, d_v)``.
    received : Tensor
        ``(B, H, 3, newest)``: see `grace_opt.kernels.coded.host.coded_attention`.
    bound : Tensor
        ``(B, H_q)`` float64: the largest possible share of the attention on tokens that were not read.
    tokens : Tensor
        ``(B, H)`` int64: number of coded tokens that were read, waiting ones not counted.
    """

    output: Tensor
    received: Tensor
    bound: Tensor
    tokens: Tensor


def unsupported_reason(query: Tensor, tail_keys: Tensor, tail_values: Tensor) -> str | None:
    """Return why :func:`few_coded_attention` does not support these tensors, or None if it does."""
    reason = coded.unsupported_reason(query, tail_keys, tail_values)
    if reason is None and query.shape[2] != 1:
        reason = "there are several new tokens"
    if reason is None and query.shape[1] // tail_keys.shape[1] > MAX_GROUP:
        reason = f"more than {MAX_GROUP} query heads share a KV head"
    return reason


def few_coded_attention(
    query: Tensor,
    sequences: Sequence[CodedSequence],
    lying: Sequence[Lying],
    tail_keys: Tensor,
    tail_values: Tensor,
    books: Tensor,
    newest: int,
    dense_newest: Sequence[int],
    least: Sequence[int],
    page_size: int = 1,
    epsilon: float | None = None,
    top_p: float | None = None,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
) -> FewCoded:
    """Compute attention over sinks, few of the coded tokens, those that wait, and a dense tail.

    Parameters
    ----------
    query, sequences, tail_keys, tail_values, books, newest, dense_newest, attention_mask, scaling, softcap
        As in `grace_opt.kernels.coded.host.coded_attention`, with one new token.
    lying : sequence of Lying
        Where each sequence's coded tokens are.
    least : sequence of int
        How many units of each are read at least: pages, which are counted from the last token backwards, or tokens.
    page_size : int
        Tokens of a page; 1 reads single tokens.
    epsilon, top_p : float, optional
        As in `grace_opt.kernels.reading.reference.attention`; `top_p` goes with single tokens.

    Raises
    ------
    CacheError
        If shapes do not go together. What `unsupported_reason` says must have been asked before.
    """
    from ..coded.cpu import join_at, prepare_at
    from .cpu import attend_few_at

    (batch, query_heads, _, width), heads = query.shape, tail_keys.shape[1]
    check_shapes(query, sequences, tail_keys, tail_values)
    if not len(lying) == len(least) == batch:
        raise CacheError(f"{batch} sequences do not fit {len(lying)} tables and {len(least)} numbers of units")
    every = Lying.together(lying, heads)
    given = laid_out(
        *(query, sequences, every.table, tail_keys, tail_values, books, newest, dense_newest),
        *(attention_mask, scaling, softcap, True, None),
    )
    pairs, group, items = batch * heads, query_heads // heads, every.table.items
    padded, columns = -(-group // ROWS) * ROWS, max(every.places)
    tokens, wide = rounded(max(every.tokens) + LANES), rounded(width)
    told = _sequences(every, least, page_size)
    of_heads = np.zeros((pairs, OF_HEAD), np.int64)
    of_heads[:, FIRST_ITEM] = np.searchsorted(items[:, 0], np.arange(pairs), "left")
    of_heads[:, LAST_ITEM] = np.searchsorted(items[:, 0], np.arange(pairs), "right")
    limits = np.array([-1.0 if epsilon is None else epsilon, -1.0 if top_p is None else top_p], np.float64)
    ranges = _ranges(books)
    reach, bound = np.zeros((len(items), wide), np.float32), np.empty((batch, query_heads), np.float64)
    # In bytes: scores, largest logits, places, ranks, numbers of units at each, chosen tokens and their numbers, rows.
    parts = [4 * padded * columns] * 2 + [8 * tokens, 2 * tokens, 8 * BUCKETS, columns // 8, columns // 8]
    parts.append(8 * ABOUT * padded)
    work = torch.empty(pairs * sum(parts), dtype=torch.uint8, device="cpu")
    at = [work.data_ptr() + pairs * sum(parts[:number]) for number in range(len(parts))]
    tables = [each.ctypes.data for each in (every.segments, told, every.firsts, ranges, limits)]
    more = [SCORED, *tables, *at[:7], of_heads.ctypes.data, at[7], reach.ctypes.data, bound.ctypes.data]
    data = np.array([*given.data[: given.taken], *more, len(every.segments), columns, tokens], np.int64)
    assert len(data) == GIVEN
    alone = every.table.numbers * width < coded.ALONE_BELOW

    def run(phase: int, most: int, alone: bool = alone) -> None:
        given.data[given.taken], data[PHASE] = 0, phase
        call_in_threads(attend_few_at, data.ctypes.data, most, alone=alone)

    prepare_at(given.at)
    run(SCORED, len(items))
    choose = FIRST_CHOSEN
    while choose == FIRST_CHOSEN or (of_heads[:, DONE] < of_heads[:, STOP]).any():
        run(choose, pairs, alone or pairs == 1)
        run(READ, len(items))
        run(BOUNDED, pairs, True)
        choose = MORE_CHOSEN
    join_at(given.at)
    found = torch.from_numpy(of_heads[:, READ_TOKENS].reshape(batch, heads).copy())
    del work, told, every
    return FewCoded(given.output.to(query.dtype), given.received, torch.from_numpy(bound), found)


def _sequences(every: Lying, least: Sequence[int], page_size: int) -> npt.NDArray[np.int64]:
    """Return what `grace_opt.kernels.few_coded.forms.FIRST_SEGMENT` and what follows it say of each sequence."""
    found, segment = [], 0
    for places, tokens, parts, few in zip(every.places, every.tokens, every.parts, least, strict=True):
        size = min(page_size, max(tokens, 1))
        units = -(-tokens // size)
        first = tokens - (units - 1) * size if units else size
        more = -(-units // ROUNDS)
        found.append([segment, segment + parts, tokens, places, size, first, units, few, more])
        segment += parts
    return np.array(found, np.int64)


def _ranges(books: Tensor) -> npt.NDArray[np.float32]:
    """Return the middles, half lengths and largest numbers of the ranges that high bits leave; made once for books."""
    found = _RANGES.get(books.data_ptr())
    if found is not None and found[0] is books:
        return found[1]
    made, numbers = np.zeros((3, len(books), CELLS), np.float32), books.double().numpy()
    for bits in WIDTHS[1:]:
        ends = numbers[bits, : 2**bits].reshape(-1, 2 ** (bits // 2))[:, [0, -1]]
        cells = len(ends)
        made[0, bits, :cells] = ends.mean(1)
        half = np.abs(ends - made[0, bits, :cells, None].astype(np.float64)).max(1)
        # Ranges of few or many bits are of one length, which is no less than any of theirs.
        half = np.full(cells, half.max()) if bits in (1, 2, 8) else half
        made[1, bits, :cells] = half * (1 + 2.0**-22)
        made[2, bits] = np.abs(numbers[bits, : 2**bits]).max()
    _RANGES[books.data_ptr()] = books, made
    return made
