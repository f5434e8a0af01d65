"""Coded caches are cropped anywhere: what is left is what was there, and goes on as such."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from grace_opt.errors import CacheError
from grace_opt.hf import CompressedCache, SnapKV, calibrate
from grace_opt.hf.stores.coded import coded
from grace_opt.hf.stores.coded import waiting as waits
from grace_opt.hf.stores.coded.saved_row import HIDDEN
from grace_opt.kernels.cache import coded as kernels
from tests.hf.matrix import model_of

PROMPT, SINKS, RECENT, BLOCK = 300, 4, 16, 24
KINDS = {
    "a mean that turns": {},
    "channels as they are": {"basis": "none"},
    "numbers one by one": {"trellis": False},
}


@pytest.fixture(scope="module", autouse=True)
def read_where_they_lie():
    """However few codes there are; the list says of each attention whether they were."""
    found, real = [], coded.attention_in_place

    def noted(*given, **others):
        result = real(*given, **others)
        found.append(result is not None)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "CPU_MIN_TOKENS", 0)
        patch.setattr(coded, "attention_in_place", noted)
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model whose keys have a mean that turns, and its basis."""
    made = copy.deepcopy(model_of("Qwen2"))
    for number, layer in enumerate(made.model.layers):
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=2.0, generator=torch.Generator().manual_seed(number))
    made.set_attn_implementation("grace_sdpa")
    made.basis_file = tmp_path_factory.mktemp("basis") / "basis.safetensors"
    basis = calibrate.basis(made, None, [tokens(500, 5), tokens(500, 6)])
    assert basis.keys[0].rotary is not None
    basis.save(made.basis_file)
    return made


def tokens(count, seed=0, rows=1):
    return torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(model, cache, ids, width=1, **more):
    return torch.cat([model(each, past_key_values=cache, **more).logits for each in ids.split(width, dim=1)], dim=1)


def filled(model, grown=0, rows=1, mask=None, **kind):
    """A cache with a prompt and some tokens more."""
    every = {"bits": 2.5, "recent_window": RECENT, "tail_block": BLOCK, "basis": model.basis_file, **kind}
    cache = CompressedCache(model, **every)
    places = {} if mask is None else {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    feed(model, cache, tokens(PROMPT, rows=rows), PROMPT, **places)
    if grown:
        feed(model, cache, tokens(grown, 1, rows))
    return cache


def held(cache):
    return [tuple(each.clone() for each in layer.full_width()) for layer in cache.layers]


def check_left(cache, before, keep):
    """The first tokens, up to how their products are rounded in other numbers."""
    for found, expected in zip(held(cache), before, strict=True):
        for own, each in zip(found, expected, strict=True):
            torch.testing.assert_close(own, each[:, :, :keep], rtol=1e-5, atol=1e-5 * float(each.abs().max()))


def plain(cache):
    """A dense cache with the same numbers."""
    made = DynamicCache()
    for number, (keys, values) in enumerate(held(cache)):
        made.update(keys, values, number)
    return made


@pytest.fixture(scope="module")
def known(model):
    """Caches with two segments and tokens that wait, made once: tests get copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "SETTLED", 3 * BLOCK)
        patch.setattr(waits, "NEWEST", BLOCK)
        made = {name: filled(model, 2 * 3 * BLOCK + RECENT, **kind) for name, kind in KINDS.items()}
    row = made["a mean that turns"].layers[0].compressed.rows[0]
    assert len(row.segments) > 1
    assert row.waits == 2 * BLOCK
    return made


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_what_is_left_is_what_was_there(model, known, kind, data):
    """Crop, grow, crop again: as a dense cache with the same numbers, token by token."""
    cache = copy.deepcopy(known[kind])
    dense, length = plain(cache), cache.get_seq_length()
    for seed in range(2):
        keep = data.draw(st.integers(SINKS + 1, length), label="keep")
        before = held(cache)
        for each in (cache, dense):
            if keep < length:
                each.crop(keep - length)
        assert cache.get_seq_length() == keep
        check_left(cache, before, keep)
        most = RECENT + BLOCK - cache.layers[0].tail.length  # before a block leaves the recent window, and is coded
        assume(most > 0)
        new = tokens(data.draw(st.integers(1, most), label="new"), seed + 2)
        width = data.draw(st.sampled_from([1, new.shape[1]]), label="width")
        torch.testing.assert_close(feed(model, cache, new, width), feed(model, dense, new, width), rtol=2e-4, atol=2e-4)
        length = cache.get_seq_length()


@pytest.mark.parametrize("kind", KINDS)
def test_it_grows_is_saved_and_re_ordered_as_ever(model, known, kind, tmp_path, monkeypatch, read_where_they_lie):
    monkeypatch.setattr(waits, "SETTLED", 3 * BLOCK)
    monkeypatch.setattr(waits, "NEWEST", BLOCK)
    cache = copy.deepcopy(known[kind])
    cache.crop(111 - cache.get_seq_length())
    assert cache.layers[0].compressed.rows[0].hidden > 100
    read_where_they_lie.clear()
    feed(model, cache, tokens(5 * BLOCK, 3))
    assert all(read_where_they_lie)
    row = cache.layers[0].compressed.rows[0]
    assert len(row.segments) == 2
    assert row.hidden > 100
    cache.save(tmp_path / "cache.safetensors")
    loaded = CompressedCache.load(tmp_path / "cache.safetensors", model)
    assert HIDDEN in loaded.layers[0].compressed.to_file()[1]
    both, rows = tokens(3, 4), torch.tensor([0, 0])
    loaded.reorder_cache(rows)
    expected = feed(model, plain(cache), both)
    torch.testing.assert_close(feed(model, cache, both), expected, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(feed(model, loaded, both.repeat(2, 1)), expected[rows], rtol=2e-4, atol=2e-4)
    assert cache.memory_report().bits > 2.5  # codes of hidden tokens are counted
    loaded.reset()
    assert loaded.get_seq_length() == 0


def test_rows_with_padding(model):
    mask = torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :70] = 0
    cache = filled(model, rows=2, mask=mask)
    before, keep = held(cache), 150
    cache.crop(keep - PROMPT)
    check_left(cache, before, keep)
    longer = torch.cat([mask[:, :keep], torch.ones(2, 5, dtype=torch.long)], dim=1)
    dense, places = plain(cache), (longer.cumsum(-1) - 1)[:, keep:]
    new = tokens(5, 5, 2)
    found, expected = (feed(model, each, new, 5, attention_mask=longer, position_ids=places) for each in (cache, dense))
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


def test_logits_with_a_cap(tiny, read_where_they_lie):
    """Of which none is too small to be seen: hidden tokens are left out before."""
    model = tiny("Gemma2", "eager", attn_logit_softcapping=5.0, layer_types=("full_attention",) * 2)
    model.set_attn_implementation("grace_eager")
    cache = CompressedCache(model, bits=2.5, basis="none")
    feed(model, cache, tokens(200), 200)
    cache.crop(-90)
    new = tokens(4, 6)
    dense = plain(cache)
    read_where_they_lie.clear()
    torch.testing.assert_close(feed(model, cache, new), feed(model, dense, new), rtol=2e-4, atol=2e-4)
    assert not any(read_where_they_lie)


def test_what_cannot_be_cropped_is_refused_and_stays(model):
    cache = filled(model, evict=SnapKV(budget=200))
    with pytest.raises(CacheError, match=r"284 tokens or more, not to 283: of the older ones, each head"):
        cache.crop(-RECENT - 1)
    cache = filled(model)
    before = held(cache)
    with pytest.raises(CacheError, match=r"cropped to 5 tokens or more, or to none, not to 4: with bits="):
        cache.crop(SINKS - PROMPT)
    for found, expected in zip(held(cache), before, strict=True):
        assert all(map(torch.equal, found, expected))
    cache.crop(-PROMPT)
    assert cache.get_seq_length() == 0


def test_under_a_limit_of_bytes(model, monkeypatch):
    """What is hidden is counted, and coded again with the rest."""
    cache = filled(model, bits=None, max_bytes=90_000)
    cache.crop(120 - PROMPT)
    for part in tokens(500, 7).split(10, dim=1):
        feed(model, cache, part)
        assert cache.memory_report().allocated_bytes <= 90_000
    report = cache.memory_report()
    assert len(report.history) > 1
    dense, new = plain(cache), tokens(2, 8)
    torch.testing.assert_close(feed(model, cache, new), feed(model, dense, new), rtol=2e-4, atol=2e-4)
