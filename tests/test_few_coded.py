"""Attention over few of the coded tokens where they lie is what torch makes of the same tokens, unpacked.

And no bound is below the truth, in float64. Which tokens are read may differ where a score lies on the edge between two
steps, so such cases are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from grace_opt.hf.bits.codebooks import WIDTHS, codebook
from grace_opt.hf.bits.coded import CodedTokens
from grace_opt.hf.bits.codes import stacked
from grace_opt.hf.bits.row import CodedRow
from grace_opt.hf.bits.segment import Segment, packed_classes
from grace_opt.hf.reading import TopTokens
from grace_opt.hf.reading import coded as in_torch
from grace_opt.hf.reading.coded_in_place import read_in_place
from grace_opt.hf.reading.report import ReadTally
from grace_opt.kernels import few_coded
from grace_opt.kernels.coded import CodedSequence
from grace_opt.kernels.coded.host import room_for
from grace_opt.kernels.few_coded import forms, host
from grace_opt.kernels.reading import reference
from grace_opt.kernels.reading.forms import STEPS
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
        room_for(1).numpy().fill(np.nan)  # which shows where anything is read that was written before this call
        found = read_in_place(
            self.query, *self.tails, self.mask, self.old, self.reading, tally, scaling, self.softcap, True
        )
        assume(found is not None)
        return *found, tally

    @property
    def rounding(self) -> float:
        """How many times the reference's bound the loops' may be: float32 allows for more."""
        return 1.01 + 5e-4 * float(self.query.abs().max())

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
            for kind, (basis, sinks) in enumerate(
                zip(row.decodes(self.old.bases), (row.sink_keys, row.sink_values), strict=True)
            ):
                parts = [segment.coordinates()[kind] for segment in row.segments]
                parts += [] if row.waiting is None else [row.waiting_coordinates()[kind]]
                coded = torch.cat([sinks[:, :0], *parts], 1).double()
                both.append(torch.cat([sinks.double(), coded if basis is None else coded @ basis.double()], 1))
            found.append((both[0], both[1]))
        return found


def stopped_on_an_edge(case: Case, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """Whether a head read more than the reference, or less, as the bound of who stopped first is so close to epsilon
    that the other's may have been beyond it; both have stopped where they may."""
    (shares, bounds), (expected_shares, expected_bounds) = found, expected
    epsilon, more = case.reading.epsilon, shares.double() - expected_shares.double()
    own, other = (each.view(*shares.shape, -1).amax(-1) for each in (bounds, expected_bounds))
    assert ((own <= epsilon) | (shares == 1)).all(), (bounds, shares)
    late = (more > 1e-6) & (other * case.rounding + 1e-3 > epsilon)
    early = (more < -1e-6) & (own > 0.999 * epsilon - 1e-6)
    return bool((late | early).any())


def check(case: Case) -> bool:
    """Raise unless both agree, and the bounds hold; return False if a score, or a bound, lies on an edge."""
    output, received, told, weights, near = case.torch()
    if near <= EDGE:
        return False
    found, got, tally = case.compiled()
    exact, newest = case.exact(), got.shape[-1]
    largest = max(float(each.abs().max()) for each in (*case.tails, *(v for _, v in exact)) if each.numel())
    assert torch.equal(got[:, :, 2], received[:, :, 2])
    for place, ((shares, bounds), (expected_shares, expected_bounds)) in enumerate(
        zip(tally._waiting, told._waiting, strict=True)
    ):
        if case.reading.epsilon is not None and stopped_on_an_edge(case, (shares, bounds), told._waiting[place]):
            return False
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
        assert (bounds <= expected_bounds * case.rounding + 1e-3).all(), (bounds, expected_bounds)
        assert (bounds >= expected_bounds * 0.999 - 1e-6).all(), (bounds, expected_bounds)
    assert (found - output).abs().max() <= 3e-5 * largest
    assert (got - received).abs().max() <= 3e-5 * newest
    return True


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
    count = draw(st.integers(1, 2))
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
        page_size=draw(st.sampled_from([1, 3, 16, 32, 500])) if by == "pages" else None,
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


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(cases())
def test_is_what_torch_reads_and_the_bound_holds(case):
    assume(check(case))


def one_case(by: str = "channels", share: float = 0.2, most: int = 400, **how: Any) -> Case:
    """Two segments with all widths, of 700 tokens or more; sixteen wait, and no score lies on an edge."""
    torch.manual_seed(1)
    segments = []
    for counts in ([20, 0, 180], [40, 60, most]):
        keys, values = (codes_of(counts, 2, 24, list(range(8))) for _ in range(2))
        labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).to(torch.uint8)
        classes = torch.stack([labels[torch.randperm(len(labels))] for _ in range(2)])
        segments.append(Segment(keys, values, packed_classes(classes)))
    waiting = codes_of([16], 2, 24, [5]), codes_of([16], 2, 24, [4])
    row = CodedRow(tuple(segments), waiting, torch.randn(2, 4, 24), torch.randn(2, 4, 24), 320 + most)
    tails = torch.randn(2, 1, 2, 9, 24)
    old = CodedTokens(row.length, (row,), None)
    return Case(torch.randn(1, 6, 1, 24), old, (tails[0], tails[1]), TopTokens(share, by, **how))


@pytest.mark.parametrize(
    "how", [{}, {"by": "pages", "page_size": 32, "most": 1400}, {"epsilon": 0.3}, {"share": 0.01, "top_p": 0.7}]
)
def test_of_many_tokens(how):
    assert check(one_case(**how))


def test_threads_change_no_bit():
    case, before, found = one_case(), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            output, received, tally = case.compiled()
            found.append((output, received, *tally._waiting[0]))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_few_are_read_and_the_bound_says_something():
    (shares, bounds), *_ = one_case(share=0.5).compiled()[2]._waiting
    assert ((shares > 0.49) & (shares <= 0.5)).all()
    assert ((bounds > 0) & (bounds < 0.9)).all()


def test_nan_is_not_lost():
    case = one_case()
    case.query[0, 1, 0, 3] = torch.nan
    output, _, tally = case.compiled()
    assert output[0, 0, 1].isnan().all()
    assert not output[0, 0, [0, 2, 3, 4, 5]].isnan().any()
    assert float(tally._waiting[0][1][0, 1]) == 1


def test_what_does_not_fit_is_refused():
    case = one_case()
    two = case.query.expand(1, 6, 2, 24)
    assert host.unsupported_reason(two, *case.tails) == "there are several new tokens"
    assert "65 query rows" not in str(host.unsupported_reason(case.query, *case.tails))
    row = case.old.rows[0]
    sequence = CodedSequence(row.table(), row.sink_keys, row.sink_values, None, None)
    given = case.query, [sequence], [], *case.tails, codebook(case.query.device), 25, [0], [9]
    with pytest.raises(CacheError, match="1 sequences do not fit 0 tables"):
        host.few_coded_attention(*given)


def narrow(ranges):
    ranges[1] *= 0.5


def shifted(ranges):
    ranges[0] += 0.5


def unequal(ranges):
    ranges[1, :, 1:] = 0


@pytest.mark.parametrize("spoil", [narrow, shifted, unequal])
def test_wrong_ranges_are_noticed(spoil, monkeypatch):
    right = host._ranges

    def wrong(books):
        found = right(books).copy()
        spoil(found)
        return found

    monkeypatch.setattr(host, "_ranges", wrong)
    with pytest.raises(AssertionError):
        check(one_case())


@pytest.mark.parametrize("field", [forms.HEAD_STEP, forms.SECOND])
def test_a_wrong_order_is_noticed(field):
    case = one_case(by="pages", page_size=8)
    case.old.rows[0].lying().segments[:, field] = 0
    with pytest.raises(AssertionError):
        check(case)


def beside_a_guard(moved: Callable[[Tensor], Tensor], count: int) -> None:
    """Check a case whose bits end where memory ends: `moved` puts them there."""
    torch.manual_seed(count)
    for levels in ([3, 0, 1], [7], [0, 0, 2], [6, 5]):
        keys, values = (codes_of([count], 1, 5, levels).map(moved) for _ in range(2))
        segment = Segment(keys, values, moved(packed_classes(torch.zeros(1, count, dtype=torch.uint8))))
        row = CodedRow((segment,), None, torch.randn(1, 0, 5), torch.randn(1, 0, 5), count)
        tails = torch.randn(2, 1, 1, 2, 5)
        case = Case(torch.randn(1, 1, 1, 5), CodedTokens(count, (row,), None), (tails[0], tails[1]), TopTokens(0.5))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(few_coded, "CPU_MIN_TOKENS", 1)
            assert check(replace(case, reading=TopTokens(0.5, page_size=3)))
