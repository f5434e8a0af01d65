"""What the channels are chosen from: all cached keys, the last queries, and no padding."""

from __future__ import annotations

import pytest
import torch

from grace_opt.attention.provider import MaskProvider
from grace_opt.hf import CompressedCache, attention_implementation, capture_attention
from grace_opt.hf.engine import attention
from grace_opt.kernels.cache.decode.reference import causal_mask
from tests.hf.matrix import model_of


class Spy:
    """A mask source that remembers what it was shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, queries, keys, attention_mask=None):
        self.seen.append((queries, keys, attention_mask))
        return MaskProvider("mies", 0.5)(queries, keys, attention_mask)


def test_the_source_sees_all_keys_and_the_last_queries(tiny, prune, padded, generate):
    model, spy = tiny(), Spy()
    prompt, mask = padded
    cache = prune(model, provider=spy)
    generate(model, cache, prompt, mask)
    assert len(spy.seen) == 2, "once per layer, not once per token"
    truth = capture_attention(model, prompt, mask)
    for layer, (queries, keys, valid) in enumerate(spy.seen):
        assert torch.equal(valid, mask.bool())
        real = mask.bool()[:, None, :, None]
        torch.testing.assert_close(keys * real, truth[layer].keys * real)
        torch.testing.assert_close(queries, truth[layer].queries[:, :, -6:])
        expected = MaskProvider("mies", 0.5)(truth[layer].queries[:, :, -6:], truth[layer].keys, mask.bool())
        assert torch.equal(cache.channel_mask().pruned[layer], expected.pruned)


def test_values_are_seen_where_the_weight_needs_them(tiny, prune, padded, generate):
    model, (prompt, mask) = tiny(), padded
    cache = prune(model, "think", 0.5, weight="output")
    generate(model, cache, prompt, mask)
    choose = MaskProvider("think", 0.5, weight="output")
    for layer, seen in capture_attention(model, prompt, mask).items():
        expected = choose(seen.queries[:, :, -6:], seen.keys, mask.bool(), seen.values, seen.scaling)
        assert torch.equal(cache.channel_mask().pruned[layer], expected.pruned)


def test_tokens_before_the_recent_window_are_pruned_and_no_others(tiny, prune, prompt, generate):
    model = tiny()
    cache = prune(model, "mies", 0.5)
    generate(model, cache, prompt, max_new_tokens=5)
    layer = cache.layers[0]
    assert layer.compressed.pruned_keys.shape == (2, 2, 32, 8)
    assert layer.tail.keys.shape == (2, 2, 8 + 4, 16)
    assert layer.compressed.values.shape == (2, 2, 32, 16)


@pytest.mark.parametrize("real", [27, 12, 9, 4])
def test_a_padded_row_equals_the_row_alone(real, tiny, prune, prompt, continuation, step, close):
    """12 is near the windows' sum; 4 is shorter than both windows, so that row must come out dense."""
    model = tiny()
    mask = torch.ones_like(prompt)
    mask[1, : 40 - real] = 0
    together, alone = prune(model, "grace", 0.5), prune(model, "grace", 0.5)
    a = step(model, together, prompt.masked_fill(mask == 0, 50), continuation, mask)
    if real > 8:
        b = step(model, alone, prompt[1:, 40 - real :], continuation[1:])
        assert torch.equal(together.channel_mask().pruned[:, 1], alone.channel_mask().pruned[:, 0])
    else:
        with pytest.warns(UserWarning, match="nothing is pruned"):
            b = step(model, alone, prompt[1:, 40 - real :], continuation[1:])
    assert close(a[1:], b)


def test_padding_is_excluded_also_when_eager_masks_are_additive(tiny, prune, padded, generate):
    prompt, mask = padded
    chosen = []
    for name in ("grace_sdpa", "grace_eager"):
        model = tiny(attention=name)
        cache = prune(model, "mies", 0.5)
        generate(model, cache, prompt, mask, max_new_tokens=2)
        chosen.append(cache.channel_mask().pruned)
    assert torch.equal(*chosen)


def test_padding_that_is_not_excluded_would_be_noticed(tiny, prune, padded, generate, monkeypatch):
    model = tiny()
    prompt, mask = padded
    right, wrong = prune(model, "mies", 0.5), prune(model, "mies", 0.5)
    generate(model, right, prompt, mask, max_new_tokens=2)
    monkeypatch.setattr(attention, "key_validity", lambda *_: None)
    generate(model, wrong, prompt, mask, max_new_tokens=2)
    assert torch.equal(right.channel_mask().pruned[:, 0], wrong.channel_mask().pruned[:, 0])
    assert not torch.equal(right.channel_mask().pruned[:, 1], wrong.channel_mask().pruned[:, 1])


def test_an_observation_window_longer_than_the_prompt_is_clipped(tiny, prune, prompt, generate):
    model = tiny()
    long, exact = prune(model, "mies", 0.5, observation_window=4000), prune(model, "mies", 0.5, observation_window=40)
    for cache in (long, exact):
        generate(model, cache, prompt, max_new_tokens=2)
    assert torch.equal(long.channel_mask().pruned, exact.channel_mask().pruned)


def test_a_four_dimensional_mask_of_the_user_counts(tiny, prune, padded):
    """Bool or additive, with the smallest number or the old -1e4."""
    model = tiny()
    prompt, mask = padded
    allowed = causal_mask(40, 40, prompt.device) & mask.bool()[:, None, None, :]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    masks = [allowed, *(torch.zeros(allowed.shape).masked_fill(~allowed, low) for low in (-1e4, -3e38))]
    chosen = []
    for given in masks:
        cache = prune(model, "mies", 0.5)
        with torch.no_grad():
            model(prompt, attention_mask=given, position_ids=positions, past_key_values=cache)
        chosen.append(cache.channel_mask().pruned)
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])
    cache = prune(model, "mies", 0.5)
    with torch.no_grad():
        model(prompt, attention_mask=mask, position_ids=positions, past_key_values=cache)
    assert torch.equal(cache.channel_mask().pruned, chosen[0])


@pytest.mark.parametrize("chunk", [40, 16])
def test_of_layers_that_share_a_cache_the_owner_alone_is_observed(chunk, prompt):
    """Gemma 3n: layer 3 attends to the keys of layer 1, whose queries choose, once; also if the prompt is in chunks."""
    model, seen = model_of("Gemma 3n (layers share caches)"), []

    def spy(queries, keys, attention_mask=None):
        seen.append(queries)
        return MaskProvider("mies", 0.5)(queries, keys, attention_mask)

    cache = CompressedCache(model, provider=spy, recent_window=8, observation_window=32, prompt_length=40)
    with attention_implementation(model, "grace_sdpa"), torch.no_grad():
        for part in prompt.split(chunk, dim=1):
            model(part, past_key_values=cache)
    (queries,) = seen
    torch.testing.assert_close(queries, capture_attention(model, prompt)[1].queries[:, :, -32:])
