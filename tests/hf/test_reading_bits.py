"""``read=`` of a cache with ``bits=``: what is read is right, what was not is bounded, all else is as without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from grace_opt.errors import CacheError
from grace_opt.hf import PrunedKeyCache, PruningConfig, SnapKV, TopTokens
from grace_opt.hf.bits.segment import Segment
from grace_opt.hf.reading import coded
from grace_opt.hf.reading.coded import read_coded_attention
from grace_opt.hf.reading.report import ReadTally
from tests import oracle
from tests.hf.matrix import PADDING, pruning_attention

#: The seventeenth step moves a block.
LENGTH, STEPS = 150, 21
SETTINGS = {"bits": 2.5, "trellis": False, "basis": "none", "recent_window": 8, "tail_block": 16}
WAYS = {
    "pages": TopTokens(0.4, page_size=8),
    "tokens": TopTokens(0.4, "channels"),
    "bounded": TopTokens(0.2, "channels", epsilon=0.2),
    "expected": TopTokens(0.1, "channels", top_p=0.8),
}
OTHERS = {
    "as it is": {},
    "eight bits": {"bits": 8},
    "own basis": {"basis": "prompt", "bits": 12},
    "eviction": {"evict": SnapKV(budget=120)},
    "no sinks": {"sink_tokens": 0},
}


@pytest.fixture
def model(tiny):
    return tiny()


@pytest.fixture
def ids():
    return torch.randint(0, 97, (3, LENGTH + STEPS), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def mask():
    """One row is padded, and one so much that it is too short to be coded."""
    found = torch.ones(3, LENGTH + STEPS, dtype=torch.int64)
    found[1, :PADDING], found[2, : LENGTH - 20] = 0, 0
    return found


def fed(model, cache, ids, mask=None, step=1):
    """Logits after the prompt's last token and each step, and the attention that the newest tokens received."""
    found = []
    with pruning_attention(model), torch.no_grad():
        ends = range(LENGTH, LENGTH + STEPS + 1, step)
        for first, end in zip([0, *ends], ends, strict=False):
            given = {} if mask is None else {"attention_mask": mask[:, :end]}
            found.append(model(ids[:, first:end], past_key_values=cache, **given).logits[:, -1])
    return torch.stack(found), [layer.received for layer in cache.layers]


@pytest.fixture(scope="module")
def of_others():
    """`of_others(other, model, ids, mask, step)`: what `fed` gives without ``read=``, once for each of `OTHERS`."""
    found = {}

    def make(other, model, *given):
        if other not in found:
            found[other] = fed(model, PrunedKeyCache(model, **{**SETTINGS, **OTHERS[other]}), *given)
        return found[other]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("by", ["pages", "channels"])
def test_a_share_of_one_is_the_same_cache_without_read(other, by, model, ids, mask, close, of_others):
    settings, step = {**SETTINGS, **OTHERS[other]}, 3 if other == "as it is" else 1
    cache = PrunedKeyCache(model, read=TopTokens(1.0, by, page_size=8 if by == "pages" else None), **settings)
    found, expected = fed(model, cache, ids, mask, step), of_others(other, model, ids, mask, step)
    # Blocks of new tokens are coded, and a number on the edge between two codes may get either.
    assert close(found[0][: 9 // step], expected[0][: 9 // step])
    assert close(found[0], expected[0], 5e-3)
    assert all(torch.allclose(one, two, atol=5e-3) for one, two in zip(found[1], expected[1], strict=True))
    report = cache.read_report()
    assert (report.share, report.bound_max, report.steps) == (1.0, 0.0, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [LENGTH, 330], ids=["torch", "compiled"])
@pytest.mark.parametrize("way", ["pages", "tokens"])
def test_several_new_tokens_choose_as_each_would_alone(way, prompt, model, close):
    """Though none of them sees the later ones, these were counted."""
    ids = torch.randint(0, 97, (2, prompt + 12), generator=torch.Generator().manual_seed(6))
    logits, shares = [], []
    for step in (1, 12):
        cache = PrunedKeyCache(model, read=WAYS[way], **SETTINGS)
        with pruning_attention(model), torch.no_grad():
            model(ids[:, :prompt], past_key_values=cache)
            parts = ids[:, prompt:].split(step, dim=1)
            logits.append(torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1))
        shares.append(cache.read_report().share)
    assert close(logits[1], logits[0], 1e-3)
    assert shares[1] == pytest.approx(shares[0], rel=1e-6)


@pytest.fixture(scope="module")
def without_read():
    """`without_read(model, ids, mask)`: a cache without ``read=``, fed once for all; nothing changes it."""
    found = []

    def make(model, ids, mask):
        if not found:
            found.append(PrunedKeyCache(model, **SETTINGS))
            fed(model, found[0], ids, mask)
        return found[0]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_no_bound_is_below_the_truth(way, scale, model, ids, mask, without_read):
    """Of every row and query head, for queries that look at all tokens alike, and at few."""
    reading, cache = WAYS[way], without_read(model, ids, mask)
    module, scaling = SimpleNamespace(training=False, is_causal=True), 0.25
    for layer in cache.layers:
        old, tail = layer.compressed, layer.tail
        query, tally = scale * torch.randn(3, 4, 2, 16, generator=torch.Generator().manual_seed(7)), ReadTally()
        keys, values = old.full_width(tail.keys, tail.values)
        seen = mask[:, None, None].bool().expand(3, 1, 2, -1).clone()
        seen[:, :, 0, -1] = False  # of the last two tokens
        output, received, weights = read_coded_attention(
            module, query, tail.keys, tail.values, seen, old, reading, tally, True, scaling
        )
        for place, (shares, bounds) in enumerate(tally._waiting):
            read = (weights[:, :, place] > 0).view(3, 2, 2, -1).any(2).numpy()
            expected, unread = oracle.few_tokens(
                query[:, :, place, None].numpy(),
                keys.numpy(),
                values.numpy(),
                read,
                ~seen[:, 0, place].numpy(),
                scaling,
            )
            assert (unread <= bounds.numpy() + 1e-12).all()
            assert (torch.from_numpy(expected) - output[:, place]).abs().max() <= 1e-4 * float(values.abs().max())
            assert (shares[2] == 1).all(), "a row that is not coded"
            assert (shares[:2] < 1).any()
            if reading.epsilon is not None:
                assert ((bounds <= reading.epsilon) | (shares == 1).repeat_interleave(2, 1)).all()
        part = weights[..., -received.shape[-1] :].view(3, 2, 2, 2, -1)
        assert torch.allclose(received[:, :, 0], part.sum(3).mean(2), atol=1e-6)
        assert received[0, 0, 2, -3:].tolist() == [2, 2, 1]


@pytest.mark.slow
def test_the_bounds_say_something(model, ids):
    cache = PrunedKeyCache(model, read=TopTokens(0.6, "channels"), **{**SETTINGS, "bits": 6})
    fed(model, cache, ids)
    report = cache.read_report()
    assert 0.5 < report.share <= 0.6
    assert 0 < report.bound_mean < 0.6
    assert "high bits of all tokens are read" in str(cache.memory_report())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_compiled_loops_unpack_nothing_and_read_the_same(way, model):
    """Of a prompt that is long enough for them, with padding, tokens that wait, and several new ones at once."""
    ids, found = torch.randint(0, 97, (2, 330), generator=torch.Generator().manual_seed(4)), []
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0

    def unpacked(segment):
        raise AssertionError("codes are unpacked")

    for compiled in (True, False):
        cache = PrunedKeyCache(model, read=WAYS[way], **SETTINGS)
        with pytest.MonkeyPatch.context() as patch, pruning_attention(model), torch.no_grad():
            if compiled:
                patch.setattr(Segment, "key_ranges", unpacked)
            else:
                patch.setattr(coded, "read_in_place", lambda *given: None)
            for first, end in ((0, 310), (310, 312), (312, 313), (313, 329), (329, 330)):
                out = model(ids[:, first:end], past_key_values=cache, attention_mask=mask[:, :end])
        found.append((out.logits, cache.read_report(), cache.layers[0].received))
    (one, report, received), (two, expected, attention) = found
    assert torch.allclose(one, two, atol=5e-3)
    assert torch.allclose(received, attention, atol=5e-3)
    assert report.steps == expected.steps == 20
    assert report.share == pytest.approx(expected.share, abs=2e-3)
    assert report.bound_mean == pytest.approx(expected.bound_mean, abs=2e-3)


def test_weights_are_those_of_what_was_read(tiny, ids, mask):
    model = tiny(attention="grace_eager")
    cache = PrunedKeyCache(model, read=WAYS["tokens"], **SETTINGS)
    with torch.no_grad():
        model(ids[:, :LENGTH], past_key_values=cache, attention_mask=mask[:, :LENGTH])
        out = model(
            ids[:, LENGTH : LENGTH + 2],
            past_key_values=cache,
            attention_mask=mask[:, : LENGTH + 2],
            output_attentions=True,
        )
    weights = out.attentions[0]
    assert weights.shape == (3, 4, 2, LENGTH + 2)
    assert torch.allclose(weights.sum(-1), torch.ones(3, 4, 2), atol=1e-5)
    assert not weights.masked_select(mask[:, None, None, : LENGTH + 2] == 0).any()
    assert (weights[0, :, :, :LENGTH] == 0).any(-1).all()


@pytest.mark.slow
def test_saved_loaded_and_from_a_file(model, ids, tmp_path):
    cache = PrunedKeyCache(model, read=WAYS["pages"], **SETTINGS)
    fed(model, cache, ids)
    cache.save(tmp_path / "cache.safetensors")
    loaded, more = PrunedKeyCache.load(tmp_path / "cache.safetensors", model.config), ids[:, :1]
    with pruning_attention(model), torch.no_grad():
        one, two = (model(more, past_key_values=each).logits for each in (cache, loaded))
    assert torch.equal(one, two)
    config = PruningConfig(bits=2.25, read="channels")
    assert PruningConfig.from_dict(config.to_dict()) == config
    assert (config.read.share, config.read.top_p, config.sink_tokens) == (0.05, 0.95, 4)


@pytest.mark.slow
def test_what_read_cannot_do_is_refused(model, ids):
    cache = PrunedKeyCache(model, read="pages", **SETTINGS)
    fed(model, cache, ids)
    old, tail = cache.layers[0].compressed, cache.layers[0].tail
    given = torch.zeros(3, 4, 1, 16), tail.keys, tail.values, None, old, WAYS["pages"], ReadTally(), False, 1.0
    with pytest.raises(CacheError, match="has no dropout"):
        read_coded_attention(SimpleNamespace(training=True), *given, dropout=0.1)
