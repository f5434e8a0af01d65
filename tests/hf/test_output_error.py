"""`output_error`: the error of each layer's attention output, with caches of ours and of transformers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache, QuantizedCache

from grace_opt.errors import EvaluationError
from grace_opt.hf import CompressedCache, SnapKV, attention_implementation, capture_attention
from grace_opt.hf.models import load_pocket
from grace_opt.hf.tools.evaluation import output_error
from tests.hf.matrix import model_of


@pytest.fixture(scope="module")
def prompt():
    model, tokenizer = load_pocket()
    return model, tokenizer(
        "the quiet river runs past the old mill and a late singer . " * 14, return_tensors="pt"
    ).input_ids


def read(model, ids, cache):
    with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
        model(ids, past_key_values=cache)
    return cache


def plain(call, keys, values, head, query):
    """One query's output over a head's keys and values, term by term in float64."""
    q = call.queries[0, head, query].double()
    logits = [float(q @ key.double()) * call.scaling for key in keys]
    most = max(logits)
    weights = [math.exp(each - most) for each in logits]
    return sum(weight * value.double() for weight, value in zip(weights, values, strict=True)) / sum(weights)


def test_it_is_what_the_definition_says(prompt):
    model, ids = prompt
    ids = ids[:, :120]
    cache = read(model, ids, CompressedCache(model, bits=2))
    found = output_error(model, cache, ids, queries=3)
    for layer, call in capture_attention(model, ids).items():
        keys, values = cache.layers[layer].full_width()
        wrong = right = 0.0
        for head in range(call.queries.shape[1]):
            own = head // (call.queries.shape[1] // keys.shape[1])
            for query in range(-3, 0):
                exact = plain(call, call.keys[0, own], call.values[0, own], head, query)
                wrong += float((plain(call, keys[0, own], values[0, own], head, query) - exact).square().sum())
                right += float(exact.square().sum())
        assert found[layer] == pytest.approx(wrong / right, rel=1e-3)


def test_dense_caches_have_none_and_fewer_bits_more(prompt):
    model, ids = prompt
    assert max(output_error(model, read(model, ids, DynamicCache(config=model.config)), ids).values()) == 0
    found = [output_error(model, read(model, ids, CompressedCache(model, bits=bits)), ids) for bits in (8, 4, 2, 1)]
    for fewer, more in zip(found[1:], found[:-1], strict=True):
        assert all(more[layer] < fewer[layer] for layer in more)
    assert max(found[0].values()) < 1e-3


def test_other_caches_and_none_is_changed(prompt):
    model, ids = prompt
    pytest.importorskip("optimum.quanto")
    theirs = read(model, ids, QuantizedCache("quanto", model.config, nbits=4, residual_length=16))
    ours = read(model, ids, CompressedCache(model, ratio=0.5))
    evicted = read(model, ids, CompressedCache(model, evict=SnapKV(80)))
    for cache in (theirs, ours, evicted):
        before = cache.get_seq_length()
        found, again = (output_error(model, cache, ids) for _ in range(2))
        assert found == again
        assert cache.get_seq_length() == before
        assert all(0 < error < 1 for error in found.values()), found


def test_layers_with_a_sliding_window_are_left_out():
    model = model_of("Gemma 3")
    ids = torch.randint(3, 97, (1, 120), generator=torch.Generator().manual_seed(0))
    cache = read(model, ids, CompressedCache(model, bits=3, basis="none"))
    assert list(output_error(model, cache, ids)) == [1]


def test_bad_input(prompt):
    model, ids = prompt
    cache = read(model, ids, CompressedCache(model, bits=2))
    for wrong in (ids[:, :-1], ids.repeat(2, 1)):
        with pytest.raises(EvaluationError, match=r"the cache holds \d+ tokens, and ids is"):
            output_error(model, cache, wrong)
    with pytest.raises(EvaluationError, match="the cache holds 0 tokens"):
        output_error(model, CompressedCache(model, bits=2), ids)
