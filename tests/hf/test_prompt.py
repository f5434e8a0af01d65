"""When the prompt is over: chunks, declared lengths, and candidates of assisted decoding that must not be observed."""

from __future__ import annotations

import copy
import types

import pytest
import torch

from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import H2O, CompressedCache, SnapKV
from grace_opt.hf.engine.prompt import Prompt
from grace_opt.hf.models import compat as _compat
from grace_opt.hf.models.observation import Observation
from tests.hf.matrix import assistant


def chosen(cache):
    return cache.channel_mask().pruned


@torch.no_grad()
def fed(model, cache, prompt, size, token):
    """Logits after a prompt in chunks and one token more; by hand, as 5.2's own chunks get wrong positions."""
    for chunk in prompt.split(size, dim=1):
        model(chunk, past_key_values=cache)
    return model(token, past_key_values=cache).logits


@pytest.mark.parametrize("size", [1, 3, 8, 16, 20, 39, 40, 41])
@pytest.mark.parametrize("evict", [None, SnapKV(budget=24, window=6)])
def test_declared_chunks_choose_as_the_whole_prompt_does(evict, size, tiny, prune, prompt, continuation, close):
    """Also when the last chunk is shorter than the observation window, or a single token."""
    model = tiny()
    plain, declared = (prune(model, "mies", 0.5, evict=evict) for _ in range(2))
    declared.declare_prompt(40)
    expected = fed(model, plain, prompt, 40, continuation[:, :1])
    assert close(fed(model, declared, prompt, size, continuation[:, :1]), expected)
    assert torch.equal(chosen(declared), chosen(plain))


@pytest.mark.parametrize("size", [8, 16, 20])
def test_the_model_s_own_chunk_size_is_known(size, tiny, prune, prompt, continuation, close, monkeypatch):
    """40 is a multiple of 8 and 20: then only the first decode step shows that the prompt is over."""
    model = tiny()
    whole = prune(model, "mies", 0.5)
    expected = fed(model, whole, prompt, 40, continuation[:, :1])
    monkeypatch.setattr(model.generation_config, "prefill_chunk_size", size)
    cache = CompressedCache(model, "mies", 0.5, recent_window=8, observation_window=6)
    assert close(fed(model, cache, prompt, size, continuation[:, :1]), expected)
    assert torch.equal(chosen(cache), chosen(whole))


def test_an_undeclared_chunk_is_taken_for_the_prompt(tiny, prune, prompt, continuation):
    model = tiny()
    cache, whole = prune(model, "mies", 0.5), prune(model, "mies", 0.5)
    fed(model, cache, prompt, 16, continuation[:, :1])
    fed(model, whole, prompt, 40, continuation[:, :1])
    assert cache.layers[0].pruned_length == 8
    assert not torch.equal(chosen(cache), chosen(whole))


def test_beams_and_selected_rows_between_chunks(tiny, prune, prompt, continuation, close):
    model = tiny()
    straight, turned = prune(model, "mies", 0.5), prune(model, "mies", 0.5)
    logits = []
    for cache, rows in ((straight, [0, 1]), (turned, [1, 0])):
        cache.declare_prompt(40)
        with torch.no_grad():
            model(prompt[:, :37], past_key_values=cache)
            cache.reorder_cache(torch.tensor(rows))
            logits.append(model(prompt[rows, 37:], past_key_values=cache).logits[rows])
    assert close(*logits)
    assert torch.equal(chosen(straight), chosen(turned)[:, [1, 0]])


class TestAssisted:
    OPTIONS = ("assistant_model", "prompt_lookup_num_tokens")

    def options(self, model, kind):
        return (
            {"assistant_model": assistant(model)}
            if kind == "assistant_model"
            else {"prompt_lookup_num_tokens": 4, "eos_token_id": 1000}
        )

    @pytest.mark.parametrize("kind", OPTIONS)
    def test_candidates_are_not_observed(self, kind, tiny, prune, prompt, generate):
        model = tiny()
        prompt = torch.cat([prompt, prompt[:, -12:-2]], dim=1)[:1]  # with something to look up
        plain, declared = prune(model, "mies", 0.5), prune(model, "mies", 0.5)
        declared.declare_prompt(50)
        expected = generate(model, plain, prompt)
        assert torch.equal(generate(model, declared, prompt, **self.options(model, kind)), expected)
        assert torch.equal(chosen(declared), chosen(plain))

    @pytest.mark.parametrize("kind", OPTIONS)
    def test_undeclared_is_refused_by_name(self, kind, tiny, prune, prompt, generate):
        model = tiny()
        prompt = torch.cat([prompt, prompt[:, -12:-2]], dim=1)[:1]
        with pytest.raises(CacheError, match=r"assisted decoding .* prompt_length=inputs\.input_ids\.shape\[1\]"):
            generate(model, prune(model), prompt, **self.options(model, kind))

    def test_a_short_declared_prompt_stays_dense_also_when_candidates_follow(self, tiny, prune, prompt, generate):
        model = tiny()
        cache = prune(model, recent_window=12)
        cache.declare_prompt(10)
        with pytest.warns(UserWarning, match="the prompt has 10 tokens"):
            generate(model, cache, prompt[:1, :10], prompt_lookup_num_tokens=4, eos_token_id=1000)
        assert cache.layers[0].compressed is None

    def test_what_follows_a_declared_prompt_is_not_observed(self):
        """Not even where it begins exactly at the prompt's end: nothing is taken for the prompt a second time."""
        observed = Prompt(types.SimpleNamespace(observed=None, chunk_size=None, bits=None))
        observed.declared, said = 6, []
        for new, length in ((4, 4), (2, 6), (3, 9), (1, 10)):
            said.append(observed.observe(Observation(torch.zeros(1, 2, new, 4), None, length, 1.0, None)))
        assert [None if one is None else one.length for one in said] == [None, 6, None, None]
        assert said[1].queries.shape[2] == 6
        assert not observed.waiting

    @pytest.mark.skipif(_compat.crop_is_relative(), reason="crop() is unambiguous here")
    def test_shortening_a_prompt_by_hand(self, tiny, prune, prompt):
        model = tiny()
        cache = prune(model)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        with pytest.raises(CacheError, match=r"write crop\(-2\)"):
            cache.crop(38)
        cache.crop(-2)
        assert cache.get_seq_length() == 38


CROPPED = (
    {"ratio": 0.3},
    {"evict": SnapKV(budget=50, window=6)},
    {"evict": H2O(budget=50, window=None, observed=None)},
    {"bits": 3, "basis": "none"},
    {"bits": 3, "basis": "none", "evict": SnapKV(budget=120)},
    {"read": "channels"},
)


@pytest.mark.parametrize("settings", CROPPED, ids=str)
@pytest.mark.parametrize(("removed", "padding"), [(10, 0), (37, 0), (10, 30)])
def test_a_prompt_cropped_while_it_is_read_is_what_is_left_of_it(removed, padding, settings, tiny, close):
    """Queries of tokens that were taken back choose nothing."""
    model = tiny()
    x, y = (torch.randint(3, 97, (2, size), generator=torch.Generator().manual_seed(size)) for size in (180, 50))
    mask = torch.ones(2, 240, dtype=torch.long)
    mask[1, :padding] = 0
    caches = [CompressedCache(model, prompt_length=180 - removed + 50, **settings) for _ in range(2)]

    @torch.no_grad()
    def feed(cache, tokens):
        seen = mask[:, : cache.get_seq_length() + tokens.shape[1]]
        places = (seen.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        return model(tokens, attention_mask=seen, position_ids=places, past_key_values=cache).logits

    feed(caches[0], x)
    caches[0].crop(-removed)
    feed(caches[1], x[:, :-removed])
    for tokens in (y, x[:, :1], x[:, 1:2]):
        found, expected = (feed(cache, tokens) for cache in caches)
        assert close(found, expected)
    assert not caches[0].is_dense


def test_a_prompt_whose_queries_are_all_taken_back_is_refused(tiny, padded, continuation):
    model, (prompt, mask) = copy.deepcopy(tiny()), padded
    model.generation_config.prefill_chunk_size = 40
    cache = CompressedCache(model, "grace", recent_window=8, observation_window=6)
    with torch.no_grad():
        model(prompt, attention_mask=mask, past_key_values=cache)
    with pytest.raises(CacheError, match="without its last 10 tokens no queries are left to choose by"):
        cache.crop(-10)
    assert [layer.get_seq_length() for layer in cache.layers] == [40, 40]  # as before
    cache.crop(-4)
    with torch.no_grad():
        model(continuation[:, :1], attention_mask=mask[:, :37], past_key_values=cache)
    assert (cache.get_seq_length(), cache.layers[0].compressed.length) == (37, 28)


class TestDeclaring:
    @pytest.mark.parametrize("length", [0, -3, 2.5, True, "40"])
    def test_wrong_lengths(self, length, tiny):
        with pytest.raises(OptionError, match=r"prompt_length=.*: give an integer >= 1"):
            CompressedCache(tiny(), prompt_length=length)

    def test_too_late(self, tiny, prune, prompt):
        model = tiny()
        cache = prune(model)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        with pytest.raises(CacheError, match="the cache holds 40 tokens already"):
            cache.declare_prompt(50)

    def test_reset_forgets_it(self, tiny, prune, prompt):
        model = tiny()
        cache = prune(model, prompt_length=20)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        assert cache.layers[0].compressed.length == 12
        cache.reset()
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        assert cache.layers[0].compressed.length == 32


@pytest.mark.parametrize("settings", [{"ratio": 0.3, "sink_tokens": 4}, {"read": "channels"}])
@pytest.mark.parametrize("attention", ["grace_sdpa", "grace_eager"])
def test_a_mask_that_shows_no_padding_changes_nothing(settings, attention, tiny, prompt):
    """As that of a later chunk, or of eager attention."""
    model, found = tiny(attention=attention), []
    for width in (40, 20):
        cache = CompressedCache(model.config, prompt_length=40, recent_window=8, observation_window=8, **settings)
        with torch.no_grad():
            for part in prompt.split(width, dim=1):
                logits = model(part, past_key_values=cache).logits
        found.append((logits[:, -1], cache.memory_report().total_bytes))
        cache.crop(-20)
        assert cache.get_seq_length() == 20
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
