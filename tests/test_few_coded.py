"""Attention over few of the coded tokens where they lie is what torch makes of the same tokens, unpacked.

And no bound is below the truth, in float64. Which tokens are read may differ where a score lies on the edge between two
steps, so such cases are left out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from grace_opt.errors import CacheError
from grace_opt.hf.bits.basis import Basis
from grace_opt.hf.bits.bitplanes import pack_bits
from grace_opt.hf.bits.codebooks import WIDTHS
from grace_opt.hf.bits.coded import CodedTokens
from grace_opt.hf.bits.codes import stacked
from grace_opt.hf.bits.row import CodedRow
from grace_opt.hf.bits.segment import Segment, packed_classes
from grace_opt.hf.reading import TopTokens
from grace_opt.hf.reading import coded as in_torch
from grace_opt.hf.reading.coded_in_place import read_in_place
from grace_opt.hf.reading.report import ReadTally
from grace_opt.kernels import few_coded
from grace_opt.kernels.few_coded import host
from grace_opt.kernels.reading import reference
from grace_opt.kernels.reading.forms import STEPS
from tests import oracle
from tests.test_coded import codes_of

#: How close to an edge a score may be, in steps.
EDGE = 2e-4


@pytest.fixture(autouse=True, scope="module")
def _of_any_size():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_coded, "CPU_MIN_TOKENS", 1)
        yield


@dataclass
class Case:
    """One call."""

    query: Tensor
    old: CodedTokens
    tails: tuple[Tensor, Tensor]
    reading: TopTokens
    mask: Tensor | None = None
    softcap: float | None = None

    def compiled(self) -> tuple[Tensor, Tensor, ReadTally]:
        tally, scaling = ReadTally(), self.query.shape[3] ** -0.5
        found = read_in_place(
            self.query, *self.tails, self.mask, self.old, self.reading, tally, scaling, self.softcap, True
        )
        assume(found is not None)
        return *found, tally

    def torch(self) -> tuple[Tensor, Tensor, ReadTally, Tensor, float]:
        """What the reference computes, and how close to an edge a score is."""
        near, order = [1.0], reference.reading_order

        def watched(scores: Tensor) -> Tensor:
            relative = scores - scores.logsumexp(-1, keepdim=True) if scores.shape[2] > 1 else scores
            best = relative.amax(2)
            below = ((best.amax(-1, keepdim=True) - best) * STEPS)[..., None]
            below = below[(below > EDGE) & (below < 1023)]
            near.append(float((below - below.round()).abs().min()) if below.numel() else 1.0)
            return order(scores)

        tally, scaling = ReadTally(), self.query.shape[3] ** -0.5
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "reading_order", watched)
            output, received, weights = in_torch.read_coded_attention(
                SimpleNamespace(training=False, is_causal=True),
                *(self.query, *self.tails, self.mask, self.old, self.reading, tally, True, scaling, self.softcap),
            )
        assert weights is not None
        return output, received, tally, weights, min(near)

    def exact(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each row, float64, without padding."""
        found = []
        for row in self.old.rows:
            both = []
            for kind, (basis, sinks) in enumerate(zip(row.decodes(self.old.bases), (row.sink_keys, row.sink_values))):
                parts = [segment.coordinates()[kind] for segment in row.segments]
                parts += [] if row.waiting is None else [row.waiting_coordinates()[kind]]
                coded = torch.cat([sinks[:, :0], *parts], 1).double()
                both.append(torch.cat([sinks.double(), coded if basis is None else coded @ basis.double()], 1))
            found.append((both[0], both[1]))
        return found


def check(case: Case) -> None:
    """Raise unless both agree, and the bounds hold."""
    output, received, told, weights, near = case.torch()
    assume(near > EDGE)
    found, got, tally = case.compiled()
    exact, newest = case.exact(), got.shape[-1]
    largest = max(float(each.abs().max()) for each in (*case.tails, *(v for _, v in exact)) if each.numel())
    assert torch.equal(got[:, :, 2], received[:, :, 2])
    for place, ((shares, bounds), (expected_shares, expected_bounds)) in enumerate(
        zip(tally._waiting, told._waiting, strict=True)
    ):
        assert torch.allclose(shares.double(), expected_shares.double(), atol=1e-6), (shares, expected_shares)
        for b, (keys, _) in enumerate(exact):
            shown = case.tails[0].shape[2] - (0 if case.mask is not None else case.query.shape[2] - 1 - place)
            every = torch.cat([keys, case.tails[0][b, :, :shown].double()], 1)
            groups, heads = case.query.shape[1] // len(keys), len(keys)
            query = case.query[b, :, place].double().view(heads, groups, -1)
            logits = query @ every.mT * case.query.shape[3] ** -0.5
            if case.softcap is not None:
                logits = torch.tanh(logits / case.softcap) * case.softcap
            columns = in_torch._columns(case.old.rows[b], case.tails[0].shape[2], logits.device)[: every.shape[1]]
            if case.mask is not None:
                shows = case.mask[min(b, len(case.mask) - 1)][..., place, :][..., columns]
                shows = shows.expand(heads * groups, -1).reshape(heads, groups, -1)
                logits = logits.masked_fill(~shows, -torch.inf)
            read = (weights[b, :, place][:, columns].view(heads, groups, -1) > 0).any(1, keepdim=True)
            read[..., len(keys[0]) - case.old.rows[b].waits :] = True
            read[..., : case.old.rows[b].sink_keys.shape[1]] = True
            unread = logits.softmax(-1).masked_fill(read, 0).sum(-1).flatten()
            assert (unread <= bounds[b] + 1e-12).all(), (unread, bounds[b])
        largest_query = float(case.query.abs().max())  # float32 allows for more rounding
        assert (bounds <= expected_bounds * (1.01 + 5e-4 * largest_query) + 1e-3).all(), (bounds, expected_bounds)
        if case.reading.epsilon is not None:
            done = (bounds <= case.reading.epsilon) | (shares == 1).repeat_interleave(groups, 1)
            assert done.all()
    assert (found - output).abs().max() <= 3e-5 * largest
    assert (got - received).abs().max() <= 3e-5 * newest


LEVELS = st.lists(st.integers(0, len(WIDTHS) - 1), min_size=1, max_size=9)
COUNTS = st.lists(st.sampled_from([1, 7, 8, 31, 33, 64, 70, 130]), min_size=1, max_size=4)


def rows(draw: Any, heads: int, widths: tuple[int, int], blocks: int, count: int) -> list[CodedRow]:
    """Rows of one cache: as many places, some of them padding; some rows are too short to be coded."""
    made, length = [], 0
    for _ in range(count):
        segments, waiting, sinks = [], None, draw(st.integers(0, 4))
        for _ in range(draw(st.integers(0 if count > 1 else 1, 2))):
            counts = draw(COUNTS)
            keys, values = (codes_of(counts, heads, width, draw(LEVELS)) for width in widths)
            labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(torch.uint8)
            classes = torch.stack([labels[torch.randperm(len(labels))] for _ in range(heads)])
            segments.append(Segment(keys, values, packed_classes(classes)))
        if segments:
            for _ in range(blocks):
                block = [codes_of([8], heads, width, [draw(st.integers(1, 7))]) for width in widths]
                waiting = (block[0], block[1]) if waiting is None else tuple(map(stacked, waiting, block))
        else:
            sinks += 8 * blocks
        dense = [torch.randn(heads, sinks, width) for width in widths]
        row = CodedRow(tuple(segments), waiting, *dense, length=sinks)
        made.append(row)
        length = max(length, sinks + row.tokens)
    found = []
    for row in made:
        real = row.length + row.tokens
        bits = None if real == length else pack_bits((torch.arange(length) >= length - real).to(torch.uint8))
        found.append(CodedRow(row.segments, row.waiting, row.sink_keys, row.sink_values, length, bits))
    return found


@st.composite
def cases(draw: Any) -> Case:
    torch.manual_seed(draw(st.integers(0, 2**20)))
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    widths = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    count = draw(st.integers(1, 3))
    tail, blocks = count + draw(st.integers(0, 9)), draw(st.integers(0, 2))
    made = rows(draw, heads, widths, blocks, batch)
    bases = None
    if draw(st.booleans()):
        bases = tuple(
            Basis(torch.linalg.inv(decode), decode, torch.ones(heads, width))
            for width in widths
            for decode in [torch.randn(heads, width, width) / width**0.5]
        )
    old = CodedTokens(made[0].length, tuple(made), bases)
    by = draw(st.sampled_from(["pages", "channels"]))
    part = st.none() | st.floats(0.05, 0.95)
    reading = TopTokens(
        share=draw(st.floats(0.01, 1)),
        by=by,
        page_size=draw(st.sampled_from([1, 3, 16, 32, 500])),
        epsilon=draw(part),
        top_p=draw(part) if by == "channels" else None,
    )
    mask = None
    if draw(st.booleans()):
        mask = torch.ones(batch, 1, count, old.length + tail, dtype=torch.bool).tril(old.length + tail - count)
        for b, row in enumerate(made):
            mask[b, ..., : row.length - row.sink_keys.shape[1] - row.tokens] = False
    scale = draw(st.sampled_from([0.3, 1.0, 5.0, 50.0]))
    query = scale * torch.randn(batch, heads * group, count, widths[0])
    tails = tuple(torch.randn(batch, heads, tail, width) for width in widths)
    return Case(query, old, tails, reading, mask, draw(st.sampled_from([None, 3.0])))


@settings(max_examples=100, deadline=None)
@given(cases())
def test_is_what_torch_reads_and_the_bound_holds(case):
    check(case)
