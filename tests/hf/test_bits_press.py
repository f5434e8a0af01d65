"""DecodedBitsPress holds what the cache with `bits=` holds, in dense tensors; skipped where kvpress is missing."""

from __future__ import annotations

import doctest
import functools
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

pytest.importorskip("kvpress")

import kvpress

from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import CompressedCache, attention_implementation
from grace_opt.hf.models import POCKET_BASIS, load_pocket
from grace_opt.hf.tools.bits_press import DecodedBitsPress
from grace_opt.hf.tools.evaluation import stored_bits
from grace_opt.hf.tools.needle import make_prompt

pocket = functools.cache(load_pocket)


@pytest.fixture(scope="module")
def prompt():
    """A text, a question about it, and its answer."""
    _, tokenizer = pocket()
    return make_prompt(300, 0.5, count=lambda text: len(tokenizer(text).input_ids), seed=2)


def ids_of(text):
    return pocket()[1](text, return_tensors="pt").input_ids


def filled(press, ids):
    model, _ = pocket()
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(model):
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize("bits", [3, 1.5])
def test_it_holds_what_the_cache_with_bits_holds(prompt, bits):
    """Keys, values and sizes are those of a cache that attention itself has filled."""
    model, _ = pocket()
    press, ids = DecodedBitsPress(bits, basis=POCKET_BASIS), ids_of(prompt.context)
    theirs = filled(press, ids)
    ours = CompressedCache(model, bits=bits, basis=POCKET_BASIS)
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        model(ids, past_key_values=ours)
    # All layers read the prompt from dense keys in both, so each layer's input is the same.
    for layer, expected in zip(theirs.layers, ours.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.values, expected.values, rtol=1e-4, atol=1e-4)
        assert layer.keys.shape[2] == ids.shape[1]  # nothing is saved
    assert press.stored.bits == pytest.approx(stored_bits(ours).bits, rel=1e-6)
    assert press.compression_ratio == 0


def test_kvpress_own_pipeline_asks_it_several_questions(prompt):
    """The next prompt starts anew, and the pipeline takes its answers out of the cache again."""
    model, tokenizer = pocket()
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    press = DecodedBitsPress(3, basis=POCKET_BASIS)
    questions = [f"What is the password of {city}? Password of {city}:" for city, _ in prompt.passwords]
    tokenizer.bos_token = ""  # the pocket model has none, which the pipeline does not expect
    for _ in range(2):
        found = pipe(prompt.context, questions=questions, press=press, max_new_tokens=2)["answers"]
        assert found == [answer for _, answer in prompt.passwords]


def test_the_cache_itself_does_not_go_through_their_pipeline(prompt):
    """It writes into layers, to take answers out again; ours refuses instead of forgetting its codes."""
    model, tokenizer = pocket()
    tokenizer.bos_token = ""
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    cache = CompressedCache(model, bits=3, basis=POCKET_BASIS)
    with attention_implementation(model, "grace_sdpa"), pytest.raises(CacheError, match="cannot be written to"):
        pipe(prompt.context, question="What is it?", cache=cache, max_new_tokens=2)


def test_what_it_cannot_do(prompt):
    ids = ids_of(prompt.context)
    with pytest.raises(CacheError, match="no prompt was read to its end"):
        _ = DecodedBitsPress().stored
    with pytest.raises(CacheError, match=r"on no model yet"):
        DecodedBitsPress().compress(None, ids, ids, ids, None, {})
    after = kvpress.ComposedPress([kvpress.KnormPress(0.5), DecodedBitsPress(3, basis=POCKET_BASIS)])
    with pytest.raises(CacheError, match=r"are left for DecodedBitsPress: leave the press out"):
        filled(after, ids)
    with pytest.raises(CacheError, match="give a longer prompt"):
        filled(DecodedBitsPress(3, basis=POCKET_BASIS), ids[:, :60])
    with pytest.raises(OptionError, match="bits"):
        filled(DecodedBitsPress(-1), ids)
    press = DecodedBitsPress(3, basis=POCKET_BASIS)
    filled(press, ids)
    assert press.stored.bits > 0
    with pytest.raises(CacheError, match="give a longer prompt"):
        filled(press, ids[:, :60])
    with pytest.raises(CacheError, match="no prompt was read to its end"):  # neither the one before, nor some of both
        _ = press.stored


def test_layers_with_a_sliding_window_pass_through(tiny):
    kinds = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
    model = tiny("qwen3", "sdpa", num_hidden_layers=4, layer_types=kinds, sliding_window=16, use_sliding_window=True)
    ids = torch.randint(3, 97, (1, 200), generator=torch.Generator().manual_seed(0))
    press, cache = DecodedBitsPress(6, basis="none"), DynamicCache(config=model.config)
    with press(model), torch.no_grad():
        model(ids, past_key_values=cache)
    assert 5 < press.stored.bits <= 6
    assert [layer.keys.shape[2] for layer in cache.layers][1::2] == [200, 200]


def test_the_page_about_kvpress_runs():
    """It is not run with the other pages, whose environment has no kvpress."""
    page = Path(__file__).parents[2] / "docs" / "howto" / "kvpress.md"
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, tried = doctest.testfile(str(page), module_relative=False, optionflags=flags)
    assert failed == 0
    assert tried > 10
