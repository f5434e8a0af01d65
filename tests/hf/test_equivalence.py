"""The numbers are right: nothing pruned equals the dense cache, fused equals zero-filled equals zeroing by hand.

The wrong implementations at the end show that these comparisons would notice.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

from grace_opt.hf.engine import attention
from grace_opt.hf.stores.channels import attention as pruned_attention
from grace_opt.hf.stores.channels import fused as decoding
from grace_opt.hf.stores.channels.storage import Compressed
from grace_opt.kernels.cache.decode.reference import causal_mask


@pytest.fixture
def fused_calls(monkeypatch):
    """How often the two-segment attention ran."""
    calls = []
    original = decoding.pruned_attention
    monkeypatch.setattr(
        decoding, "pruned_attention", lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs)
    )
    return calls


def test_nothing_pruned_gives_the_dense_tokens(family, tiny, prune, padded, generate, fused_calls):
    model = tiny(family)
    dense = generate(model, DynamicCache(config=model.config), *padded)
    cache = prune(model, "grace", 0.0)
    assert torch.equal(generate(model, cache, *padded), dense)
    assert len(fused_calls) == 15 * 2, "the fused path ran at every decode step of every layer"
    assert cache.layers[0].pruned_length == 40 - 8
    assert len(set(dense.flatten().tolist())) > 4, "a constant output would prove little"


@pytest.mark.parametrize("method", ["grace", "mies", "think"])
def test_fused_equals_zero_filled_equals_zeroing_by_hand(
    method, family, tiny, prune, padded, continuation, step, zeroed, close
):
    model = tiny(family)
    prompt, mask = padded
    fused, filled = prune(model, method, 0.5), prune(model, method, 0.5, fused=False)
    a = step(model, fused, prompt, continuation, mask)
    b = step(model, filled, prompt, continuation, mask)
    chosen = fused.channel_mask()
    assert torch.equal(chosen.pruned, filled.channel_mask().pruned)
    reference = zeroed(model, chosen, prompt, continuation, mask)
    assert close(a, reference)
    assert close(b, reference)
    dense = step(model, DynamicCache(config=model.config), prompt, continuation, mask)
    assert not close(reference, dense, 1e-2), "half of the channels matter in these models"


def test_eager_equals_sdpa(tiny, prune, padded, continuation, step, close):
    prompt, mask = padded
    logits = []
    for name in ("grace_sdpa", "grace_eager"):
        model = tiny(attention=name)
        logits.append(step(model, prune(model, "mies", 0.5), prompt, continuation, mask))
    assert close(*logits)


def test_eager_returns_its_attention_weights_sdpa_none(tiny, prune, padded, continuation):
    """While decoding on pruned keys as before: rows that sum to one and look at no padding."""
    prompt, mask = padded
    longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    for name in ("grace_eager", "grace_sdpa"):
        model = tiny(attention=name)
        cache = prune(model, "mies", 0.5)
        seen = []
        with torch.no_grad():
            model(prompt, attention_mask=mask, past_key_values=cache)
            hook = model.model.layers[0].self_attn.register_forward_hook(
                lambda *call, seen=seen: seen.append(call[2][1])
            )
            model(continuation[:, :1], attention_mask=longer, past_key_values=cache)
            hook.remove()
        (weights,) = seen
        if name == "grace_sdpa":
            assert weights is None
        else:
            assert weights.shape == (2, 4, 1, 41)
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 1))
            assert weights[1, :, :, :13].eq(0).all()


@pytest.mark.parametrize("width", [2, 12])
@pytest.mark.parametrize("limit", [32, 1])
def test_several_new_tokens_at_once_are_causal(
    width, limit, tiny, prune, padded, continuation, step, zeroed, close, monkeypatch
):
    monkeypatch.setattr(attention, "MAX_FUSED_QUERIES", limit)
    model = tiny()
    prompt, mask = padded
    cache = prune(model, "mies", 0.5)
    found = step(model, cache, prompt, continuation, mask, width=width)
    assert close(found, zeroed(model, cache.channel_mask(), prompt, continuation, mask))


def test_without_padding_several_new_tokens_are_causal(tiny, prune, prompt, continuation, step, zeroed, close):
    model = tiny()
    cache = prune(model, "mies", 0.5)
    found = step(model, cache, prompt, continuation, width=3)
    assert close(found, zeroed(model, cache.channel_mask(), prompt, continuation))


def test_everything_but_one_channel_pruned(tiny, prune, prompt, continuation, step, zeroed, close):
    model = tiny()
    cache = prune(model, "mies", 0.93, recent_window=0)
    found = step(model, cache, prompt, continuation)
    assert cache.channel_mask().kept_indices.shape[-1] == 1
    assert close(found, zeroed(model, cache.channel_mask(), prompt, continuation, recent=0))


def test_one_kv_head_and_equal_heads(tiny, prune, prompt, continuation, step, zeroed, close):
    for kv_heads in (1, 4):
        model = tiny(num_key_value_heads=kv_heads)
        cache = prune(model, "mies", 0.5)
        found = step(model, cache, prompt, continuation)
        assert close(found, zeroed(model, cache.channel_mask(), prompt, continuation))


@pytest.mark.parametrize("kind", ["none", "bool", "additive", "per head"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [0, 2])
def test_pruned_attention_entry_by_entry(sinks, kind, softcap):
    """Against a transcription of the definition with Python loops over heads and queries."""
    generator = torch.Generator().manual_seed(3)
    batch, heads, group, length, d, old, recent = 2, 2, 3, 4, 8, 5, 6
    total = old + recent

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    query, tail = draw(batch, heads * group, length, d), draw(batch, heads, recent, d)
    value, pruned = draw(batch, heads, total, 7), draw(batch, heads, old - sinks, 3)
    sink_keys = draw(batch, heads, sinks, d)
    kept = torch.stack([torch.randperm(d, generator=generator)[:3].sort().values for _ in range(batch * heads)])
    kept = kept.view(batch, heads, 3)
    causal = causal_mask(length, total, torch.device("cpu"))
    allowed = causal.expand(batch, heads * group, -1, -1).clone()
    if kind != "none":
        allowed[1, :, :, :2] = False
    if kind == "per head":
        allowed[:, 1, :, 3] = False
    mask = {"none": None, "bool": allowed[:, :1], "per head": allowed}.get(kind, allowed[:, :1])
    if kind == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    stored = Compressed(old, sink_keys, pruned, kept, value[:, :, :old])
    output, weights = pruned_attention.pruned_attention(
        torch.nn.Identity(), query, tail, value[:, :, old:], mask, stored, scaling=0.4, softcap=softcap
    )
    for b in range(batch):
        for h in range(heads * group):
            kv = h // group
            for i in range(length):
                q = query[b, h, i]
                logits = [q @ key for key in sink_keys[b, kv]] + [q[kept[b, kv]] @ key for key in pruned[b, kv]]
                logits += [q @ key for key in tail[b, kv]]
                logits = [0.4 * float(x) for x in logits]
                if softcap:
                    logits = [softcap * math.tanh(x / softcap) for x in logits]
                terms = [math.exp(x) if ok else 0.0 for x, ok in zip(logits, allowed[b, h, i], strict=True)]
                expected = torch.tensor(terms) / sum(terms)
                torch.testing.assert_close(weights[b, h, i], expected, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(output[b, i, h], expected @ value[b, kv], rtol=1e-5, atol=1e-5)


def forget_to_gather(module, query, tail, value, mask, old, **kwargs):
    kept = torch.arange(old.kept_indices.shape[-1]).expand_as(old.kept_indices)
    return RIGHT(module, query, tail, value, mask, replace(old, kept_indices=kept), **kwargs)


def forget_padding(module, query, tail, value, mask, old, **kwargs):
    return RIGHT(module, query, tail, value, None, old, **kwargs)


def forget_scaling(module, query, tail, value, mask, old, scaling, **kwargs):
    return RIGHT(module, query, tail, value, mask, old, scaling=1.0, **kwargs)


def forget_the_old_tokens(module, query, tail, value, mask, old, **kwargs):
    nothing = replace(old, length=0, pruned_keys=old.pruned_keys[:, :, :0], values=old.values[:, :, :0])
    return RIGHT(module, query, tail, value, mask[..., -tail.shape[2] :], nothing, **kwargs)


def mix_up_the_groups(module, query, tail, value, mask, old, **kwargs):
    swapped = query[:, torch.arange(query.shape[1]).view(-1, tail.shape[1]).T.flatten()]
    return RIGHT(module, swapped, tail, value, mask, old, **kwargs)


RIGHT = pruned_attention.pruned_attention


@pytest.mark.parametrize(
    "wrong", [forget_to_gather, forget_padding, forget_scaling, forget_the_old_tokens, mix_up_the_groups]
)
def test_a_wrong_implementation_would_be_noticed(
    wrong, tiny, prune, padded, continuation, step, zeroed, close, monkeypatch
):
    monkeypatch.setattr(decoding, "pruned_attention", wrong)
    model = tiny()
    prompt, mask = padded
    cache = prune(model, "mies", 0.5)
    found = step(model, cache, prompt, continuation, mask)
    assert not close(found, zeroed(model, cache.channel_mask(), prompt, continuation, mask), 1e-3)
