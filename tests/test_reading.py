"""Few tokens are read as the plain version in `oracle` reads them, and no bound is ever below the truth.

Values are the unit vectors, so outputs are attention weights; and others that are not numbers at one token each, which
spoil the output of every head that read it, whatever its weight.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grace_opt.errors import CacheError
from grace_opt.hf.settings.reading import TopTokens
from grace_opt.hf.stores.channels.index import ReadIndex, all_channels
from grace_opt.kernels.cache.reading import Stored, host, reference
from grace_opt.kernels.cache.reading.certificate import unread_bound
from grace_opt.kernels.cache.reading.forms import HIDDEN, STEPS
from grace_opt.kernels.cache.reading.pages import FirstChannels, PageRanges
from tests import oracle

ATTEND = {"torch": reference.attention, "compiled": host.read_attention}
#: Bounds are float64's; exponentials below this are zero in float32.
TINY = 1e-30


@dataclass
class Case:
    """One call: keys of the old tokens at full width, in the order of their channels, sinks and tail beside them."""

    query: Tensor
    keys: Tensor
    sinks: Tensor
    tail: Tensor
    reading: TopTokens
    kept: Tensor
    padding: Tensor | None = None

    @property
    def total(self) -> int:
        return self.sinks.shape[2] + self.keys.shape[2] + self.tail.shape[2]

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """The stored keys, and which channels they are."""
        order = all_channels(self.kept, self.keys.shape[3])
        return self.keys.gather(3, order[:, :, None].expand(self.keys.shape)), order

    def index(self) -> ReadIndex:
        return ReadIndex.of(self.reading, self.stored[0], self.kept.shape[2], self.padding)

    def hidden(self) -> np.ndarray | None:
        """Which of all tokens are padding, (B, S)."""
        if self.padding is None:
            return None
        place = torch.arange(self.total) - self.sinks.shape[2]
        return ((place >= 0) & (place < self.padding[:, None])).numpy()

    def run(self, name: str, index: ReadIndex | None = None) -> reference.Few:
        index = self.index() if index is None else index
        keys, kept = self.stored
        sinks, tail, batch, heads = self.sinks.shape[2], self.tail.shape[2], len(keys), keys.shape[1]
        eye = torch.eye(self.total)
        values = torch.cat([eye, eye.masked_fill(eye > 0, torch.nan)], 1).expand(batch, heads, -1, -1)
        hidden = self.hidden()
        mask = None if hidden is None else torch.from_numpy(~hidden)[:, None, None]
        least, most = index.least(keys.shape[2], sinks + tail)
        parts = keys, kept, self.sinks, self.tail, *values.split([self.total - tail, tail], 2)
        conditions = self.reading.epsilon, self.reading.top_p
        return ATTEND[name](self.query, Stored(*parts), index.units, least, most, *conditions, mask)


def split(case: Case, found: reference.Few) -> tuple[np.ndarray, np.ndarray]:
    """The weights (B, H_q, S), and which tokens each KV head has read (B, H, S)."""
    batch, heads = case.keys.shape[:2]
    weights, spoilt = found.output[:, 0].split(case.total, -1)
    read = spoilt.isnan().view(batch, heads, -1, case.total).any(2)
    if found.order is not None:  # torch gathers more than it reads
        assert found.pages is not None
        size = case.reading.unit_size
        old, first = case.keys.shape[2], case.sinks.shape[2]
        ends = torch.arange(old, 0, -size).flip(0) + first
        read[..., first : first + old] = False
        for b, h in np.ndindex(batch, heads):
            for unit in found.order[b, h, : int(found.pages[b, h])].tolist():
                read[b, h, max(int(ends[unit]) - size, first) : int(ends[unit])] = True
    return weights.numpy(), read.numpy()


def check(case: Case, name: str, index: ReadIndex | None = None) -> None:
    """Raise unless the output, what was read, and the bound are right."""
    found = case.run(name, index)
    (weights, read), bound = split(case, found), found.bound.numpy()
    batch, heads = case.keys.shape[:2]
    sinks, tail = case.sinks.shape[2], case.tail.shape[2]
    dense = np.ones(case.total, bool)
    dense[sinks : case.total - tail] = False
    whole = torch.cat([case.sinks, case.keys, case.tail], 2).numpy()
    eye, hidden = np.broadcast_to(np.eye(case.total), (batch, heads, case.total, case.total)), case.hidden()
    expected, unread = oracle.few_tokens(case.query.numpy(), whole, eye, read | dense, hidden)
    assert (bound >= 0).all()
    assert (bound <= 1).all()
    assert (unread <= bound + TINY).all(), (unread, bound)
    usable = np.isfinite(weights).all(-1)
    rounding = 1e-5 * max(1.0, float(case.query.abs().amax() * np.abs(whole).max() * whole.shape[-1]))
    assert np.abs(weights - expected)[usable].max(initial=0) <= min(rounding, 1.0)
    old = case.keys.shape[2] - (0 if case.padding is None else case.padding.numpy()[:, None])
    tokens, real = found.tokens.numpy(), read if hidden is None else read & ~hidden[:, None]
    if usable.all():
        assert (tokens == real[..., ~dense].sum(-1)).all()
    if case.reading.epsilon is not None:
        done = (bound.reshape(batch, heads, -1).max(-1) <= case.reading.epsilon) | (tokens == old)
        assert done.all()
    if case.reading.epsilon is None and case.reading.top_p is None:
        allowed = np.floor(case.reading.share * (old + sinks + tail) + 1e-6) - sinks - tail
        size = case.reading.unit_size
        assert (tokens <= np.maximum(allowed, size)).all()
        if usable.all():
            scores_are_the_highest(case, read[..., ~dense], rounding)


def scores_are_the_highest(case: Case, read: np.ndarray, rounding: float) -> None:
    """Of one query head: no unit that was left has a higher score than one that was read, but for a step."""
    if case.query.shape[1] > case.keys.shape[1] or case.padding is not None or rounding > 0.01:
        return
    keys, kept = case.stored
    scaled = (case.query[:, :, 0].double() * case.query.shape[3] ** -0.5).gather(2, kept).numpy()
    size = case.reading.unit_size
    for b, h in np.ndindex(*read.shape[:2]):
        q, k = scaled[b, h], keys[b, h].double().numpy()
        if case.reading.by == "channels":
            units, lead = case.index().units, case.kept.shape[2]
            assert isinstance(units, FirstChannels)
            step, low, _ = units.levels[b, h].double().numpy()
            copies = units.codes[b, h, :, : len(k)].double().numpy().T * step + low
            scores, parts = copies @ q[:lead], [[t] for t in range(len(k))]
        else:
            ends = range(len(k), 0, -size)
            parts = [list(range(max(end - size, 0), end)) for end in ends][::-1]
            scores = np.array([np.maximum(q * k[p].min(0), q * k[p].max(0)).sum() + np.log(len(p)) for p in parts])
        scores = np.maximum(scores, scores.max() - (HIDDEN - 1) / STEPS)  # lower ones are equal
        taken = np.array([read[b, h, part].any() for part in parts])
        if taken.any() and not taken.all():
            assert scores[~taken].max() <= scores[taken].min() + 1 / 16 + 1e-3


@st.composite
def cases(draw: Any) -> Case:
    """Scales from 1e-30 to 1e30, ties, equal keys, zeros, padding, one page, pages larger than the prompt."""
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    width, old, sinks, tail = (draw(st.integers(*ends)) for ends in ((1, 20), (1, 60), (0, 3), (1, 5)))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["normal", "integers", "equal", "zero", "huge norms"]))

    def drawn(*shape: int) -> Tensor:
        if kind == "integers":
            return torch.from_numpy(rng.integers(-2, 3, shape)).float()
        if kind == "zero":
            return torch.zeros(shape)
        found = rng.standard_normal(shape)
        if kind == "equal":
            found = np.broadcast_to(found[:, :, :1], shape)
        if kind == "huge norms":
            found = found * 10 ** rng.uniform(-3, 3, (*shape[:3], 1))
        return torch.from_numpy(found.copy()).float()

    scale, other = (10.0 ** draw(st.integers(-30, 30)) if draw(st.booleans()) else 1.0 for _ in range(2))
    by = draw(st.sampled_from(["pages", "channels"]))
    part = st.none() | st.floats(0.01, 0.99)
    reading = TopTokens(
        share=draw(st.floats(0.01, 1)),
        by=by,
        page_size=draw(st.integers(1, 70)) if by == "pages" else None,
        epsilon=draw(part),
        top_p=draw(part) if by == "channels" else None,
    )
    kept = torch.from_numpy(rng.permuted(np.tile(np.arange(width), (batch, heads, 1)), axis=-1))
    lead = draw(st.integers(1, width)) if by == "channels" else width
    return Case(
        drawn(batch, heads * group, 1, width) * scale,
        drawn(batch, heads, old, width) * other,
        drawn(batch, heads, sinks, width) * other,
        drawn(batch, heads, tail, width) * other,
        reading,
        kept[..., :lead].sort(-1).values,
        torch.from_numpy(rng.integers(0, old, batch)).int() if draw(st.booleans()) else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTEND)
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_what_is_read_is_right_and_the_bound_holds(name, case):
    check(case, name)


def ordinary(by: str, group: int = 1, **more: Any) -> Case:
    """300 tokens whose attention is spread, so that bounds are close to the truth."""
    rng = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    kept = torch.arange(12).expand(2, 2, 12)
    keys = drawn(2, 2, 300, 16) * torch.tensor([1.0] * 12 + [0.1] * 4)
    keys = keys[:, :, :1] + 0.05 * keys if by == "pages" else keys
    reading = TopTokens(**{"share": 0.3, "by": by, "page_size": 8 if by == "pages" else None, **more})
    kept = torch.arange(16).expand(2, 2, 16) if by == "pages" else kept
    return Case(drawn(2, 2 * group, 1, 16), keys, drawn(2, 2, 2, 16), drawn(2, 2, 20, 16), reading, kept)


@pytest.mark.parametrize("by", ["pages", "channels"])
@pytest.mark.parametrize("more", [{}, {"epsilon": 0.5}, {"share": 1.0}])
def test_the_compiled_loop_agrees_with_torch(by, more):
    case = ordinary(by, 3, **more)
    one, two = (case.run(name) for name in ATTEND)
    assert torch.equal(one.tokens, two.tokens)
    assert torch.allclose(one.output[..., : case.total], two.output[..., : case.total], atol=1e-6)
    assert torch.allclose(one.bound, two.bound, rtol=0.01)
    for name in ATTEND:
        check(case, name)
    if more == {"share": 1.0}:
        assert not one.bound.any()
        assert not two.bound.any()


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("more", [{"top_p": 0.9}, {"epsilon": 0.5}])
def test_threads_change_no_bit(heads, more):
    """Heads are scored, chosen for and read by whoever comes first, again and again; choosing takes a while."""
    rng, before = torch.Generator().manual_seed(3), torch.get_num_threads()
    keys, tail = (torch.randn(1, heads, count, 16, generator=rng) for count in (8000, 20))
    query, order = torch.randn(1, heads, 1, 16, generator=rng), torch.arange(16).expand(1, heads, 16)
    index = ReadIndex.of(TopTokens(0.05, "channels", **more), keys, 12, None)
    stored, found = Stored(keys, order, keys[:, :, :0], tail, keys.flip(2), tail.flip(2)), None
    try:
        for threads in (1, *[2, 3] * 20):
            torch.set_num_threads(threads)
            now = host.read_attention(query, stored, index.units, *index.limits(8000, 20))
            found = found or now
            assert torch.equal(found.tokens, now.tokens)
            assert torch.equal(found.output, now.output)
            assert torch.equal(found.bound, now.bound)
    finally:
        torch.set_num_threads(before)
    assert 0 < int(found.tokens.min()) < 8000


@pytest.mark.parametrize("name", ATTEND)
def test_an_expected_share_is_read(name):
    tokens = [int(ordinary("channels", share=0.01, top_p=p).run(name).tokens.sum()) for p in (0.5, 0.9, 0.99)]
    assert 0 < tokens[0] < tokens[1] < tokens[2] < 4 * 300


def spoiled(index: ReadIndex, how: str) -> ReadIndex:
    units = index.units
    if isinstance(units, PageRanges):
        middle = (units.lower + units.upper) / 2
        changed: Any = {
            "tighter": {"lower": middle, "upper": middle},
            "counts": {"tokens_per_page": torch.ones_like(units.tokens_per_page)},
        }[how]
    else:
        assert isinstance(units, FirstChannels)
        changed = {"tighter": {"norms": units.norms * 0}, "counts": {"mean": units.mean - 9}}[how]
    return replace(index, units=replace(units, **changed))


@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.parametrize("by", ["pages", "channels"])
@pytest.mark.parametrize("how", ["tighter", "counts"])
def test_a_wrong_bound_is_noticed(name, by, how):
    case = ordinary(by)
    if by == "channels":  # a query to which the other channels matter, and of one sign
        case.query = case.query.abs() * torch.tensor([0.05] * 12 + [20.0] * 4)
    check(case, name)
    with pytest.raises(AssertionError):
        check(case, name, spoiled(case.index(), how))


@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.parametrize("by", ["pages", "channels"])
@pytest.mark.parametrize("scale", [1.0, 40.0, 400.0])
def test_bounds_allow_for_rounding(name, by, scale):
    """Of equal keys, no bound is larger than the truth but by what it allows for rounding: with the other sign, that
    would make it smaller."""
    rng = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 1, 16, generator=rng).expand(1, 1, 64, 16) * scale
    kept = torch.arange(16).expand(1, 1, 16)
    reading = TopTokens(share=0.5, by=by, page_size=8 if by == "pages" else None)
    for _ in range(20):
        query = torch.randn(1, 1, 1, 16, generator=rng) * scale
        case = Case(query, keys.contiguous(), keys[:, :, :0], keys[:, :, :1], reading, kept)
        check(case, name)
        bound, unread = float(case.run(name).bound), 1 - (1 + int(case.run(name).tokens)) / 65
        assert bound > unread * (1 + 1e-6)
        if scale == 1:
            assert bound < unread * (1 + 1e-3)


@pytest.mark.slow
@given(
    read=st.floats(-700, 700),
    rest=st.floats(-700, 700),
    terms=st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)),
    width=st.integers(1, 256),
    signs=st.tuples(st.sampled_from([-1, 0, 1]), st.sampled_from([-1, 0, 1])),
)
@settings(max_examples=200, deadline=None)
def test_a_bound_holds_whatever_rounding_did_to_its_sums(read, rest, terms, width, signs):
    """Each sum may be off by what a product of its terms may be; the share of the exact ones is not above the bound."""
    precision = 2.0**-23
    off = [sign * width * precision * each for sign, each in zip(signs, terms, strict=True)]
    exact = 1 / (1 + np.exp(np.longdouble(read) - np.longdouble(rest) + np.longdouble(off[0]) + np.longdouble(off[1])))
    given = (torch.tensor(each, dtype=torch.float64) for each in (read, rest, *terms))
    assert float(unread_bound(*given, width, 64, precision)) >= float(exact)


def test_what_is_kept_between_steps_is_of_the_tensors_that_are_given():
    case = ordinary("channels")
    index = case.index()
    before = case.run("compiled", index)
    case.sinks = -case.sinks
    one, two = case.run("compiled", index), case.run("torch", index)
    assert torch.allclose(one.output[..., : case.total], two.output[..., : case.total], atol=1e-6)
    assert not torch.allclose(one.output[..., : case.total], before.output[..., : case.total], atol=1e-3)
    assert not copy.deepcopy(index).units.places, "addresses are of the original"


def test_tensors_that_do_not_fit_are_refused():
    case = ordinary("pages")
    index = case.index()
    short = replace(index, units=replace(index.units, tokens_per_page=index.units.tokens_per_page[:, 1:]))
    with pytest.raises(CacheError, match="tokens_per_page has shape"):
        case.run("compiled", short)
    case.query = case.query.double()
    with pytest.raises(CacheError, match="all must be float32; use its reference"):
        case.run("compiled")


@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.parametrize("by", ["pages", "channels"])
def test_with_an_epsilon_a_padded_row_reads_what_it_would_alone(by, name):
    generator, padding = torch.Generator().manual_seed(3), 400
    query = torch.randn(1, 2, 1, 8, generator=generator, device="cpu")
    keys = torch.randn(1, 1, 90, 8, generator=generator, device="cpu")
    around = torch.randn(1, 1, 2, 8, generator=generator, device="cpu")
    reading = TopTokens(0.05, by, page_size=1 if by == "pages" else None, epsilon=0.3)
    kept = torch.arange(6)[None, None]
    alone = Case(query, keys, around, around, reading, kept).run(name)
    longer = torch.cat([torch.randn(1, 1, padding, 8, generator=generator, device="cpu"), keys], dim=2)
    padded = Case(query, longer, around, around, reading, kept, torch.tensor([padding], dtype=torch.int32)).run(name)
    assert 5 < int(alone.tokens) < 85
    assert torch.equal(padded.tokens, alone.tokens)


@pytest.mark.parametrize("name", ATTEND)
@pytest.mark.parametrize("by", ["pages", "channels"])
def test_far_tokens_are_read_before_padding(by, name):
    """All but one have the lowest rank that a score can have; padding, which lies before them, has a lower one."""
    keys = torch.cat([torch.zeros(4), -100.0 * torch.arange(8)])[None, None, :, None]
    around, kept, padding = torch.zeros(1, 1, 1, 1), torch.tensor([[[0]]]), torch.tensor([4], dtype=torch.int32)
    reading = TopTokens(0.9, by, page_size=1 if by == "pages" else None)
    found = Case(torch.ones(1, 1, 1, 1), keys, around, around, reading, kept, padding).run(name)
    assert int(found.tokens) == 7  # of 8; two dense ones count in the share of all ten
