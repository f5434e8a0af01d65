"""The ways of generating: beams, several sequences, sampling, turns on one cache, bfloat16, cropping, compiling."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from grace_opt.errors import OptionError
from grace_opt.hf.models import compat as _compat

MODES = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "beam sequences": {"num_beams": 4, "num_return_sequences": 2},
    "sampled sequences": {"do_sample": True, "num_return_sequences": 3, "temperature": 2.0},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_with_nothing_pruned_give_the_dense_tokens(mode, family, tiny, prune, padded, generate):
    model = tiny(family)
    outputs = []
    for cache in (DynamicCache(config=model.config), prune(model, "grace", 0.0)):
        torch.manual_seed(5)
        outputs.append(generate(model, cache, *padded, **MODES[mode]))
    assert torch.equal(*outputs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_modes_fused_give_the_zero_filled_tokens(mode, tiny, prune, padded, generate):
    model = tiny()
    outputs = []
    for fused in (True, False, True):
        torch.manual_seed(5)
        outputs.append(generate(model, prune(model, "grace", 0.5, fused=fused), *padded, **MODES[mode]))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2]), "the same seed samples the same tokens"


@pytest.mark.parametrize("second", [5, 45])
def test_turns_on_one_cache(second, tiny, prune, prompt, generate):
    """A second question after the answer: short (fused) and long (through zero-filled keys); nothing is pruned anew."""
    model = tiny()
    question = torch.randint(3, 97, (2, second), generator=torch.Generator().manual_seed(4))
    answers = {}
    for name, cache in (
        ("dense", DynamicCache(config=model.config)),
        ("all kept", prune(model, "grace", 0.0)),
        ("fused", prune(model, "grace", 0.5)),
        ("filled", prune(model, "grace", 0.5, fused=False)),
    ):
        first = generate(model, cache, prompt, max_new_tokens=6)
        history = torch.cat([prompt, first, question], dim=1)
        answers[name] = first, generate(model, cache, history, max_new_tokens=6)
        assert cache.get_seq_length() == history.shape[1] + 5
        if name != "dense":
            assert cache.layers[0].pruned_length == 32
    for turn in (0, 1):
        assert torch.equal(answers["all kept"][turn], answers["dense"][turn])
        assert torch.equal(answers["fused"][turn], answers["filled"][turn])


def test_a_copied_prefix_is_independent(tiny, prune, prompt, generate):
    """Reusing a prompt's cache for several continuations, as transformers' documentation does with deepcopy."""
    model = tiny()
    prefix = prune(model, "grace", 0.5)
    with torch.no_grad():
        model(prompt, past_key_values=prefix)
    ends = [torch.full((2, 3), token) for token in (7, 8, 7)]
    found = [generate(model, copy.deepcopy(prefix), torch.cat([prompt, end], dim=1)) for end in ends]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert prefix.get_seq_length() == 40


@pytest.mark.slow
def test_bfloat16(family, tiny, prune, padded, continuation, step):
    """Tolerance: 4 % of the largest logit, a few roundings of bfloat16's 8 bits over two layers."""
    model = copy.deepcopy(tiny(family)).to(torch.bfloat16)
    prompt, mask = padded
    dense = step(model, DynamicCache(config=model.config), prompt, continuation, mask).float()
    kept = step(model, prune(model, "grace", 0.0), prompt, continuation, mask).float()
    fused = step(model, prune(model, "grace", 0.5), prompt, continuation, mask).float()
    filled = step(model, prune(model, "grace", 0.5, fused=False), prompt, continuation, mask).float()
    assert (kept - dense).abs().max() < 0.04 * dense.abs().max()
    assert (fused - filled).abs().max() < 0.04 * filled.abs().max()
    cache = prune(model, "grace", 0.5)
    model.generate(prompt, attention_mask=mask, past_key_values=cache, max_new_tokens=3)
    assert cache.layers[0].compressed.pruned_keys.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_other_caches_see_no_difference(name, family, tiny, padded, continuation, step):
    """With a plain cache the registered functions are the base functions, bit for bit."""
    prompt, mask = padded
    logits = []
    for attention in (name, f"grace_{name}"):
        model = tiny(family, attention=attention)
        logits.append(step(model, DynamicCache(config=model.config), prompt, continuation, mask))
        with torch.no_grad():
            logits.append(model(prompt, attention_mask=mask, use_cache=False).logits)
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])


def test_sliding_layers_of_a_mixed_model_are_left_alone(tiny, prune, padded, continuation, step, generate, close):
    types = ("sliding_attention", "full_attention")
    model = tiny("Qwen2", use_sliding_window=True, sliding_window=12, layer_types=types)
    cache = prune(model, "grace", 0.0)
    assert cache.prunable_layers == (1,)
    dense = generate(model, DynamicCache(config=model.config), *padded)
    assert torch.equal(generate(model, cache, *padded), dense)
    prompt, mask = padded
    caches = [prune(model, "grace", 0.5), prune(model, "grace", 0.5, fused=False)]
    assert close(*(step(model, cache, prompt, continuation, mask) for cache in caches))
    assert caches[0].channel_mask().pruned.shape == (1, 2, 2, 16)
    report = caches[0].memory_report()
    assert (report.prunable_layers, report.layers) == (1, 2)
    assert report.other_bytes > 0


def test_soft_capped_logits(tiny, prune, padded, generate):
    """Gemma 2: eager attention, sliding and full layers, capped logits."""
    model = tiny(
        "Gemma2", attention="grace_eager", sliding_window=12, attn_logit_softcapping=5.0, query_pre_attn_scalar=16
    )
    dense = generate(model, DynamicCache(config=model.config), *padded)
    assert torch.equal(generate(model, prune(model, "grace", 0.0), *padded), dense)
    fused, filled = (generate(model, prune(model, "grace", 0.5, fused=f), *padded) for f in (True, False))
    assert torch.equal(fused, filled)


@pytest.mark.parametrize("removed", [3, 8, 15, 30])
def test_crop_forgets_the_newest_tokens(removed, tiny, prune, prompt, continuation, step, close):
    """Across the border of the segments as well: 12 dense tokens follow the pruned 32."""
    model = tiny()
    cropped, kept = prune(model, "grace", 0.5), prune(model, "grace", 0.5)
    step(model, cropped, prompt, continuation[:, :4])
    cropped.crop(-removed)
    step(model, kept, prompt, continuation[:, :4])
    assert cropped.get_seq_length() == 44 - removed
    for found, reference in zip(cropped.layers[0].full_width(), kept.layers[0].full_width(), strict=True):
        assert torch.equal(found, reference[:, :, : 44 - removed])
    with torch.no_grad():
        logits = model(continuation[:, 4:5], past_key_values=cropped).logits
    assert logits.isfinite().all()


def test_crop_then_the_same_tokens_gives_the_same_logits(tiny, prune, prompt, continuation, step, close):
    model = tiny()
    cache = prune(model, "grace", 0.5)
    first = step(model, cache, prompt, continuation)
    cache.crop(-7)
    with torch.no_grad():
        again = torch.cat([model(t, past_key_values=cache).logits for t in continuation[:, 5:].split(1, dim=1)], dim=1)
    assert close(again, first[:, -7:])


def test_crop_as_the_installed_transformers_means_it(tiny, prune, prompt, continuation):
    model = tiny()
    cache = prune(model, "grace", 0.5)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    if _compat.crop_is_relative():
        cache.crop(0)
        assert cache.get_seq_length() == 40
        with pytest.raises(OptionError, match=r"write crop\(-15\) to remove that many, or crop\(-25\) to keep"):
            cache.crop(15)
        cache.crop(-25)
    else:
        with torch.no_grad():
            model(continuation[:, :1], past_key_values=cache)
        cache.crop(15)
    assert cache.get_seq_length() == 15
    cache.crop(-99)
    assert cache.get_seq_length() == 0
    assert cache.memory_report().total_bytes == 0


SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 16, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("model", "settings"),
    [(("llama", {}), {}), (("llama", {}), {"dense_layers": 1}), (("qwen3", SLIDING), {})],
    ids=["all pruned", "a dense layer", "a sliding window"],
)
def test_reset_makes_a_new_cache_of_it(model, settings, tiny, prune, prompt, generate):
    model = tiny(model[0], **model[1])
    cache = prune(model, "grace", 0.5, **settings)
    first = generate(model, cache, prompt)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, cache, prompt), first)
    cache.reset()
    assert torch.equal(generate(model, cache, prompt[:1]), first[:1]), "another batch size after reset"


def test_batch_repeat_select_and_reorder(tiny, prune, padded, continuation, close):
    """Rows follow their storage: repeat each twice, take the third, swap, offload and come back."""
    model = tiny()
    prompt, mask = padded
    cache = prune(model, "grace", 0.5)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    @torch.no_grad()
    def next_logits(cache, rows):
        longer = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)[rows]
        where = longer.sum(-1, keepdim=True) - 1
        token = continuation[:, :1][rows]
        return model(token, attention_mask=longer, position_ids=where, past_key_values=copy.deepcopy(cache)).logits

    with torch.no_grad():
        model(prompt, attention_mask=mask, position_ids=positions, past_key_values=cache)
    expected = next_logits(cache, [0, 1])
    cache.batch_repeat_interleave(2)
    assert close(next_logits(cache, [0, 0, 1, 1]), expected[[0, 0, 1, 1]])
    cache.batch_select_indices(torch.tensor([2, 0, 3]))
    assert close(next_logits(cache, [1, 0, 1]), expected[[1, 0, 1]])
    cache.reorder_cache(torch.tensor([1, 2, 0]))
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert close(next_logits(cache, [0, 1, 1]), expected[[0, 1, 1]])


@pytest.mark.slow
def test_the_decode_step_compiles_in_one_piece(tiny, prune, prompt, continuation, close):
    model = tiny(num_hidden_layers=1)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    cache = prune(model, "grace", 0.5)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        plain = copy.deepcopy(cache)
        for token in continuation[:, :2].split(1, dim=1):
            expected = model(token, past_key_values=plain).logits
            assert close(compiled(token, past_key_values=cache).logits, expected)
