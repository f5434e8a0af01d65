"""A sample is what the plain version in `oracle` draws, its sums are right on average, bounds hold as often as said.

Values are the unit vectors, so outputs are attention weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom
from torch import Tensor

from grace_opt.errors import CacheError
from grace_opt.hf.settings.reading import TopTokens
from grace_opt.hf.stores.channels.index import ReadIndex
from grace_opt.kernels.cache.reading import HashTables, Stored, attention_for, hashes, sampled, sampled_host
from grace_opt.kernels.cache.reading.cpu import codes
from grace_opt.kernels.cache.reading.reference import Few
from tests import oracle

ATTEND = {"torch": sampled.attention, "compiled": sampled_host.read_sample}
#: Exponentials below this are zero.
TINY = 1e-30


@dataclass
class Case:
    """One call: keys of the old tokens, sinks and tail beside them."""

    query: Tensor
    keys: Tensor
    sinks: Tensor
    tail: Tensor
    reading: TopTokens
    padding: Tensor | None = None
    added: Tensor | None = None  # by the mask, (B, S)
    softcap: float | None = None

    def tables(self, layer: int = 0) -> HashTables:
        units = ReadIndex.of(self.reading, self.keys, None, self.padding, layer).units
        assert isinstance(units, HashTables)
        return units

    @property
    def all_added(self) -> np.ndarray:
        """What is added to logits, minus infinity at padding."""
        total = self.sinks.shape[2] + self.keys.shape[2] + self.tail.shape[2]
        found = torch.zeros(len(self.keys), total) if self.added is None else self.added.clone()
        if self.padding is not None:
            place = torch.arange(total) - self.sinks.shape[2]
            found[(place >= 0) & (place < self.padding[:, None])] = -torch.inf
        return found.double().numpy()

    def run(self, tables: HashTables, name: str = "torch") -> Few:
        batch, heads, _, width = self.keys.shape
        total, recent = self.all_added.shape[1], self.tail.shape[2]
        eye = torch.eye(total).expand(batch, heads, -1, -1)
        kept = torch.arange(width).expand(batch, heads, -1)
        mask = None
        if self.padding is not None or self.added is not None:
            mask = torch.from_numpy(self.all_added)[:, None, None].clamp(min=torch.finfo(torch.float64).min)
            if name == "compiled":
                assert ((mask == 0) | (mask < -1e300)).all(), "masks that add are torch's"
                mask = mask == 0
        values = eye[:, :, : total - recent], eye[:, :, total - recent :]
        stored = Stored(self.keys, kept, self.sinks, self.tail, *values)
        return ATTEND[name](self.query, stored, tables, mask, softcap=self.softcap)


def check(case: Case, tables: HashTables | None = None, name: str = "torch") -> Few:
    """Raise unless the output, what was read, and the bound are right."""
    tables = case.tables() if tables is None else tables
    found = case.run(tables, name)
    batch, heads, old = case.keys.shape[:3]
    sinks, whole = case.sinks.shape[2], torch.cat([case.sinks, case.keys, case.tail], 2).numpy()
    always, added = np.ones(whole.shape[2], bool), case.all_added
    always[sinks : sinks + old] = False
    first = np.zeros(batch) if case.padding is None else case.padding.numpy()
    real = np.arange(old)[:, None] >= first[:, None, None, None]
    mean = (np.where(real, case.keys.double().numpy(), 0).sum(2) / real.sum(2)).astype(np.float32)
    assert np.allclose(mean, tables.mean.numpy(), rtol=1e-6, atol=1e-6 * np.abs(whole).max())
    eye = np.broadcast_to(np.eye(whole.shape[2]), (batch, heads, whole.shape[2], whole.shape[2]))
    given = case.query.numpy(), whole, eye, always, tables.planes.numpy(), tables.bits, tables.mean.double().numpy()
    expected, read, unread = oracle.sampled_tokens(*given, added, case.softcap)
    counted = read.reshape(batch, heads, -1, whole.shape[2]).any(2)[..., sinks : sinks + old].sum(-1)
    assert (found.tokens.numpy() == counted).all()
    largest = max(1.0, float(case.query.abs().max()) * float(np.abs(whole).max()) * whole.shape[3])
    output, rounding = found.output[:, 0].numpy(), largest * (1e-12 if name == "torch" else 1e-6)
    usable = np.isfinite(output).all(-1)  # what float32 cannot hold
    assert np.abs(output - expected)[usable].max(initial=0) <= min(rounding + 1e-6, 1.0)
    assert usable.all() or (name == "compiled" and largest > 1e30)
    if name == "torch":
        assert found.weights is not None
        assert torch.equal(found.weights[:, :, 0], found.output[:, 0])
    bound = found.bound.numpy()
    assert ((bound >= 0) & (bound <= 1)).all()
    assert (unread <= bound + TINY).all(), (unread, bound)
    return found


@st.composite
def cases(draw: Any, plain: bool = False) -> Case:
    """Scales from 1e-30 to 1e30, ties, equal keys, zeros, padding, masks; bounds that fail once in a billion calls."""
    batch, heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    width, old, sinks, tail = (draw(st.integers(*ends)) for ends in ((1, 12), (1, 25), (0, 3), (1, 4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["normal", "integers", "equal", "zero", "huge norms", "far from zero"]))

    def drawn(*shape: int) -> Tensor:
        found = rng.standard_normal(shape)
        if kind == "integers":
            found = rng.integers(-2, 3, shape)
        if kind == "equal":
            found = np.broadcast_to(found[:, :, :1], shape)
        if kind == "huge norms":
            found = found * 10 ** rng.uniform(-3, 3, (*shape[:3], 1))
        if kind == "far from zero":
            found = found + 100
        return torch.from_numpy(found * (kind != "zero")).float()

    scale, other = (10.0 ** draw(st.integers(-30, 30)) if draw(st.booleans()) else 1.0 for _ in range(2))
    reading = TopTokens(
        by="sampling",
        tables=draw(st.integers(2, 12)),
        hash_bits=draw(st.integers(1, 5) | st.sampled_from([9, 17])),
        seed=draw(st.integers(0, 2**40)),
        confidence=1 - 1e-9,
    )
    added = torch.from_numpy(rng.uniform(-3, 3, (batch, sinks + old + tail))) if draw(st.booleans()) else None
    if added is not None and plain:
        added = torch.where(added > 2, -torch.inf, 0.0)
        added[:, -1] = 0.0
    return Case(
        drawn(batch, heads * group, 1, width) * scale,
        drawn(batch, heads, old, width) * other,
        drawn(batch, heads, sinks, width) * other,
        drawn(batch, heads, tail, width) * other,
        reading,
        torch.from_numpy(rng.integers(0, old, batch)).int() if draw(st.booleans()) else None,
        added,
        None if plain else draw(st.none() | st.floats(0.5, 50)),
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_a_sample_is_what_the_plain_version_draws(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(case=cases(plain=True))
def test_and_so_is_that_of_the_compiled_loop(case):
    check(case, name="compiled")


@pytest.mark.parametrize(
    ("old", "batch", "group", "way"),
    [
        (2100, 2, 3, {"tables": 37, "hash_bits": 7}),
        (513, 1, 1, {"tables": 400, "hash_bits": 17}),
        (256, 1, 5, {"tables": 2, "hash_bits": 1}),
        (1000, 1, 9, {}),
    ],
)
def test_the_compiled_loop_agrees_with_torch(old, batch, group, way):
    """Several blocks in a run, of tokens, of drawn ones, and of query heads; padding, and tokens that are hidden."""
    rng = torch.Generator().manual_seed(old)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    reading, padding = TopTokens(by="sampling", **way), torch.tensor([0, 1300]) if batch > 1 else None
    added = torch.where(drawn(batch, old + 9) > 1, -torch.inf, 0.0).double() if batch > 1 else None
    parts = (
        drawn(batch, 2 * group, 1, 20),
        drawn(batch, 2, old, 20) + 0.5,
        drawn(batch, 2, 4, 20),
        drawn(batch, 2, 5, 20),
    )
    case = Case(*parts, reading, padding, added)
    one, two = (case.run(case.tables(), name) for name in ATTEND)
    assert torch.equal(one.tokens, two.tokens)
    assert two.tokens.sum() > 0
    assert torch.allclose(one.output, two.output, atol=1e-6)
    assert torch.allclose(one.bound, two.bound, rtol=2e-3)
    assert (two.bound >= one.bound * (1 - 1e-6)).all(), "float32 allows for more"


def test_the_compiled_loop_is_taken_where_it_can_be():
    case = ordinary()
    longer = torch.cat([case.keys] * 7, 2)
    kept = torch.arange(8).expand(1, 1, 8)
    stored = Stored(longer, kept, case.sinks, case.tail, torch.cat([case.sinks, longer], 2), case.tail)
    tables = replace(case, keys=longer).tables()
    assert attention_for(case.query, stored, None, None, tables) is ATTEND["compiled"]
    assert attention_for(case.query, stored, None, 20.0, tables) is ATTEND["torch"]
    assert attention_for(case.query, stored._replace(keys=case.keys), None, None, tables) is ATTEND["torch"]
    with pytest.raises(CacheError, match="codes has shape"):
        ATTEND["compiled"](case.query, stored, replace(tables, codes=tables.codes[:, :, :1]))
    with pytest.raises(CacheError, match="all must be float32; use its reference"):
        ATTEND["compiled"](case.query.double(), stored, tables)


def ordinary(group: int = 1, scale: float = 1.0, **more: Any) -> Case:
    rng = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    reading = TopTokens(by="sampling", **{"tables": 12, "hash_bits": 3, **more})
    keys, sinks = drawn(1, 1, 40, 8) + 2, drawn(1, 1, 2, 8)
    return Case(drawn(1, group, 1, 8) * scale, keys, sinks, drawn(1, 1, 1, 8), reading)


@pytest.mark.parametrize(("tables", "bits"), [(2, 1), (2, 24), (9, 4), (150, 10)])
def test_the_probability_of_a_sample_is_the_binomial_one(tables, bits):
    equal = torch.linspace(0.2, 1, 50, dtype=torch.float64)
    exact = [oracle.at_least_two(p**bits, tables) for p in equal.tolist()]
    found = hashes.log_sampling_probability(equal, bits, tables).exp().numpy()
    assert np.allclose(found, exact, rtol=1e-9 + 1e-15 / equal.numpy() ** bits, atol=0)
    compiled = [codes.sampling_probability(p, bits, tables) for p in equal.tolist()]
    assert np.allclose(compiled, exact, rtol=1e-8, atol=0)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_codes_are_equal_as_often_as_the_angle_says(bits):
    """And of other layers, and seeds, hyperplanes are others."""
    draws, angle = 40_000, 0.7
    planes = hashes.hyperplanes(5, 2, 6, draws * bits)
    pair = torch.zeros(1, 1, 2, 6, dtype=torch.float64)
    pair[..., 0, 0], pair[..., 1, 0], pair[..., 1, 3] = 1, math.cos(angle), math.sin(angle)
    sides = hashes.sides_of(pair, planes)[0, 0].unflatten(-1, (draws, bits))
    expected = (1 - angle / math.pi) ** bits
    found = float((sides[0] == sides[1]).all(-1).double().mean())
    assert abs(found - expected) < 5 * math.sqrt(expected * (1 - expected) / draws)
    assert torch.equal(planes, hashes.hyperplanes(5, 2, 6, draws * bits))
    for other in ((5, 3), (6, 2), (5 + 2**32, 2)):
        assert float(torch.isclose(planes, hashes.hyperplanes(*other, 6, draws * bits)).float().mean()) < 0.01


def over_seeds(case: Case, count: int) -> list[Few]:
    return [case.run(replace(case, reading=replace(case.reading, seed=seed)).tables()) for seed in range(count)]


@pytest.mark.slow
def test_sums_are_right_on_average():
    """Without dividing by their sum, weights of each token are on average those of all attention; 5 sigma."""
    case = ordinary(group=2)
    whole = torch.cat([case.sinks, case.keys, case.tail], 2).double()
    exact = (case.query.double() @ whole.mT * 8**-0.5).exp()[0, :, 0]
    found = []
    for few in over_seeds(case, 800):
        assert few.weights is not None
        weights = few.weights[0, :, 0].double()
        found.append(weights / weights[:, -1:] * exact[:, -1:])  # the tail's last token has its exact weight
    table = torch.stack(found)
    for what, truth in ((table, exact), (table.sum(-1), exact.sum(-1))):
        error = what.std(0) / math.sqrt(len(found))
        assert ((what.mean(0) - truth).abs() <= 5 * error + 1e-6 * truth).all()
    assert (table.sum(-1).std(0) / math.sqrt(len(found)) < 0.02 * exact.sum(-1)).all(), "the test has power"
    share = (table[..., 2:-1] == 0).float().mean()
    assert 0.2 < float(share) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.5, 0.9])
def test_bounds_hold_as_often_as_said_and_hardly_more(confidence):
    """Of one unread token at a right angle to the query, many times as long as all others."""
    reading = TopTokens(by="sampling", tables=8, hash_bits=8, confidence=confidence)
    keys = torch.zeros(1, 1, 2, 6)
    keys[..., 0, 1], keys[..., 1, 1] = 3.0, -3.0  # centred as they are; one of them hidden
    query = torch.zeros(1, 1, 1, 6)
    query[..., 0] = 3.0
    tail, added = torch.zeros(1, 1, 1, 6), torch.tensor([[0.0, -torch.inf, 0.0]])
    case = Case(query, keys, tail[:, :, :0], tail, reading, added=added)
    found = over_seeds(case, 600)
    truth = 0.5
    wrong = [bool(few.tokens.sum() == 0) and float(few.bound) < truth for few in found]
    unread = np.mean([bool(few.tokens.sum() == 0) for few in found])
    assert unread > 0.9
    allowed = (1 - confidence) / 2  # shared by both tokens
    assert np.mean(wrong) <= allowed + 4 * math.sqrt(allowed / 600)
    assert np.mean(wrong) >= allowed / 2


@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_the_confidence_is_shared_by_the_tokens(confidence):
    """The limit for a number of equal bits is where so few, or fewer, have exactly the token's part of the error."""
    tokens, bits = torch.tensor([1, 7, 1000]), 60
    cosines = hashes.highest_cosines(tokens, bits, confidence).numpy()
    limit = np.arccos(-cosines) / np.pi
    tail = binom.cdf(np.arange(bits), bits, limit[:, :-1])
    allowed = (1 - confidence) / tokens.numpy()[:, None]
    assert (tail <= allowed * (1 + 1e-6)).all()
    assert (tail >= allowed * 0.99).all()
    assert (cosines[:, -1] == 1).all()


def test_more_bits_read_less_and_more_tables_tell_more():
    drawn = [ordinary(4, **way) for way in ({"hash_bits": 6}, {}, {"tables": 90})]
    less, usual, more = (case.run(case.tables()) for case in drawn)
    assert less.tokens < usual.tokens < more.tokens
    rows = [ordinary(1, 0.5, tables=tables, hash_bits=8) for tables in (4, 40, 400)]
    means = [float(case.run(case.tables()).bound.mean()) for case in rows]
    assert means[0] > means[1] > means[2]


@pytest.mark.parametrize("name", ATTEND)
def test_a_wrong_table_is_noticed(name):
    case = ordinary(3)
    right = case.tables()
    check(case, name=name)
    for wrong in (
        {"codes": right.codes ^ 255},
        {"mean": right.mean + 1},
        {"highest": right.highest.flip(-1) * 0 - 1},
        {"tokens_per_page": right.tokens_per_page * (torch.arange(40) > 20)},
    ):
        with pytest.raises(AssertionError):
            check(case, replace(right, **wrong), name)


def test_large_inputs_are_compared_in_parts(monkeypatch):
    case = ordinary(3)
    whole = case.run(case.tables())
    monkeypatch.setattr(hashes, "_AT_ONCE", 200)
    parts = case.run(case.tables())
    assert torch.equal(whole.output, parts.output)
    assert torch.equal(whole.bound, parts.bound)
