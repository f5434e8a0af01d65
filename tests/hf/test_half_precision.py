"""Loud keys in half precision: where sdpa's logits stay finite, so do those on pruned keys, and as exact.

Qwen2's keys have biases of hundreds in a few channels. In float16, q k passes 65,504 long before s q k does anything
unusual, and a bfloat16 logit of 1,000 is off by up to 2.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from grace_opt.errors import CacheError
from grace_opt.hf import CompressedCache, Quantize, SnapKV, attach
from grace_opt.hf.evict.received import attention_received
from grace_opt.hf.stores.channels.attention import pruned_attention
from grace_opt.hf.stores.channels.storage import Compressed

LENGTH, SINKS, TAIL, WIDTH = 100, 3, 9, 64
DENSE = {"ratio": 0.0, "recent_window": 8}


@pytest.fixture
def loud(tiny):
    """A Qwen2 in float16 with biases of 110 in eight channels, as the stranger's."""
    sizes = {"hidden_size": 256, "head_dim": 64, "initializer_range": 0.2, "vocab_size": 128}
    model = copy.deepcopy(tiny("qwen2", attention="sdpa", **sizes)).half()
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                projection.bias[[28, 29, 30, 31, 60, 61, 62, 63]] += 110.0
    return model


def answer(model, ids, **options):
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False, **options}
    output = model.generate(ids, return_dict_in_generate=True, output_scores=True, **options)
    return output.sequences[:, ids.shape[1] :], output.scores


@pytest.fixture
def ids():
    return torch.randint(5, 120, (1, LENGTH + 28), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "settings",
    [{}, {"fused": False}, {"sink_tokens": 4}, {"tail_block": 4}, {"evict": SnapKV(budget=128, window=8)}],
    ids=str,
)
def test_nothing_pruned_gives_the_dense_tokens(settings, loud, ids):
    dense, scores = answer(loud, ids)
    assert all(score.isfinite().all() for score in scores), "the dense model is fine"
    assert len(set(dense[0].tolist())) > 3, "a constant output would prove little"
    with attach(loud, **{**DENSE, **settings}) as attached:
        found, _ = answer(loud, ids)
    assert torch.equal(found, dense)
    assert attached.cache.memory_report().pruned_tokens > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"quantize": Quantize(keys=None, values=4)},
        {"quantize": Quantize(keys=4, values=4)},
        {"evict": SnapKV(budget=90, window=8)},
    ],
    ids=str,
)
def test_what_is_lossy_gives_the_tokens_of_zero_filled_keys(settings, loud, ids):
    if "quantize" in settings:
        pytest.importorskip("optimum.quanto")
    tokens = []
    for fused in (True, False):
        with attach(loud, **DENSE, **settings, fused=fused):
            tokens.append(answer(loud, ids)[0])
    assert torch.equal(*tokens)
    assert len(set(tokens[0][0].tolist())) > 3


@pytest.mark.parametrize("settings", [{}, {"evict": SnapKV(budget=64)}], ids=["pruned", "SnapKV"])
@pytest.mark.parametrize("how", [{"do_sample": True}, {"num_beams": 2}], ids=str)
def test_a_pruned_model_samples_and_searches(settings, how, loud, ids):
    """inf or NaN in the probabilities raises in either."""
    with attach(loud, ratio=0.3, **settings):
        _, scores = answer(loud, ids, **how)
    assert not any(score.isnan().any() for score in scores)


def stored(scale, dtype, kept=WIDTH):
    """Queries, and keys and values of two heads, in two segments and whole."""
    draw = torch.Generator().manual_seed(int(scale))
    query, keys, values = (torch.randn(1, n, t, WIDTH, generator=draw) for n, t in ((4, 1), (2, LENGTH), (2, LENGTH)))
    for loud in (query, keys):
        loud[..., [3, 20, 31, 39]] += scale  # all logits are large and differ by little, as with a bias
    query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
    border = LENGTH - TAIL
    channels = torch.arange(kept).expand(1, 2, kept)
    old = Compressed(
        length=border,
        sink_keys=keys[:, :, :SINKS],
        pruned_keys=keys[:, :, SINKS:border, :kept],
        kept_indices=channels,
        values=values[:, :, :border],
        positions=None,
    )
    return query, keys, values, old, keys[:, :, border:], values[:, :, border:]


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("scale", [1, 10, 30, 100, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_head_is_as_close_to_the_truth_as_sdpa(dtype, scale, softcap):
    """Logits up to 45,000 scaled, and 360,000 unscaled. What is left is the rounding of weights and outputs."""
    query, keys, values, old, tail, tail_values = stored(scale, dtype)
    found, _ = pruned_attention(torch.nn.Module(), query, tail, tail_values, None, old, softcap=softcap)
    q, k, v = query.double(), keys.double().repeat_interleave(2, 1), values.double().repeat_interleave(2, 1)
    logits = q @ k.mT * WIDTH**-0.5
    truth = (softcap * torch.tanh(logits / softcap) if softcap else logits).softmax(-1) @ v
    error = (found.transpose(1, 2) - truth).abs().amax((-1, -2))
    unit = torch.finfo(dtype).eps / 2
    # Weights, two products and their sum are rounded; float32 is exact to 1e-7 of a logit.
    rounding = 4 * unit + 2 * WIDTH * 2.0**-24 * float(logits.abs().max())
    assert bool((error <= rounding * values.abs().max()).all()), error
    if softcap is None:
        group = {"k": keys.repeat_interleave(2, 1), "v": values.repeat_interleave(2, 1)}
        theirs = scaled_dot_product_attention(query, group["k"], group["v"])
        theirs = (theirs - truth).abs().amax((-1, -2))
        assert bool((error <= theirs + rounding * values.abs().max()).all())


@pytest.mark.parametrize("scale", [1, 300])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_triton_s_kernel_accumulates_in_float32(dtype, scale):
    """In the interpreter, without a GPU; on one, by the device's own product."""
    pytest.importorskip("triton")
    from grace_opt.kernels.cache.decode.gpu import decode_attention

    query, keys, values, old, tail, tail_values = stored(scale, dtype)
    on = (t.cuda() if torch.cuda.is_available() else t for t in (query, old.pruned_keys, old.kept_indices))
    rest = (t.cuda() if torch.cuda.is_available() else t for t in (old.sink_keys, tail, old.values, tail_values))
    found = decode_attention(*on, *rest).cpu()
    expected, _ = pruned_attention(torch.nn.Module(), query, tail, tail_values, None, old)
    largest = float((query.double() @ keys.double().repeat_interleave(2, 1).mT).abs().max()) * WIDTH**-0.5
    rounding = 8 * torch.finfo(dtype).eps + 2 * WIDTH * 2.0**-24 * largest
    assert bool(((found - expected).abs() <= rounding * values.abs().max()).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_received_is_computed_in_float32(dtype):
    query, keys, _, _, _, _ = stored(300, dtype)
    found = attention_received(query, keys, None, WIDTH**-0.5, None, 1)
    logits = query.double() @ keys.double().repeat_interleave(2, 1).mT * WIDTH**-0.5
    expected = logits.softmax(-1).view(1, 2, 2, LENGTH)
    assert float((found - expected).abs().max()) <= 2 * WIDTH * 2.0**-24 * float(logits.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_never_in_a_half_precision_mask_hides_the_loudest_key(dtype):
    """-65,504, the smallest float16, is small beside a logit of 200,000 in float32."""
    query, _, _, old, tail, tail_values = stored(1, dtype)
    query, loud = torch.full_like(query, 1000), 250
    old.pruned_keys[:, :, 5], hidden = loud, SINKS + 5
    mask = torch.zeros(1, 1, 1, LENGTH, dtype=dtype)
    mask[..., hidden] = torch.finfo(dtype).min
    assert float(query[0, 0, 0, 0]) * loud * WIDTH**0.5 > 2e5
    output, weights = pruned_attention(torch.nn.Module(), query, tail, tail_values, mask, old)
    assert bool(weights[..., hidden].eq(0).all())
    expected, _ = pruned_attention(torch.nn.Module(), query, tail, tail_values, mask > -1, old)
    assert torch.equal(output, expected)


def test_float32_is_multiplied_as_it_ever_was():
    query, _, _, old, tail, tail_values = stored(30, torch.float32, kept=40)
    output, _ = pruned_attention(torch.nn.Module(), query, tail, tail_values, None, old)
    grouped = query.reshape(1, 2, 2, WIDTH)
    parts = grouped @ old.sink_keys.mT, grouped[..., :40] @ old.pruned_keys.mT, grouped @ tail.mT
    weights = (torch.cat(parts, -1).view(1, 4, 1, -1) * WIDTH**-0.5).softmax(-1).view(1, 2, 2, -1)
    border = LENGTH - TAIL
    expected = weights[..., :border] @ old.values + weights[..., border:] @ tail_values
    assert torch.equal(output, expected.view(1, 4, 1, WIDTH).transpose(1, 2))


@pytest.mark.parametrize(
    "settings", [{"ratio": 0.5}, {"ratio": 0.5, "fused": False}, {"bits": 4, "basis": "none"}], ids=str
)
def test_a_prompt_under_autocast_is_not_continued_without(settings, tiny, ids):
    model = tiny("llama", vocab_size=128)  # whose rotated keys are float32 in both
    cache = CompressedCache(model, recent_window=8, **settings)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(ids, past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)
    with (
        torch.no_grad(),
        pytest.raises(CacheError, match=r"holds bfloat16, but the new values are float32; .*autocast"),
    ):
        model(ids[:, :1], past_key_values=cache)


def test_a_prompt_without_autocast_is_continued_under_it(tiny, ids):
    model = tiny("llama", vocab_size=128)
    logits = []
    for cache in (CompressedCache(model, ratio=0.0, recent_window=8), DynamicCache(config=model.config)):
        with torch.no_grad():
            model(ids, past_key_values=cache)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits.append(model(ids[:, :1], past_key_values=cache).logits.float())
    torch.testing.assert_close(*logits, rtol=0, atol=0.05 * float(logits[1].abs().max()))
