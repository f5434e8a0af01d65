"""Masks made once and used for every prompt."""

from __future__ import annotations

import pytest
import torch

from grace_opt.attention.masks import ChannelMask
from grace_opt.hf.models.fingerprint import weights_digest


@pytest.fixture
def made(tiny, prune, padded, generate):
    """A model and the mask that it chose for the padded prompts, (layers, batch, KV heads, head_dim)."""
    model = tiny()
    cache = prune(model, "grace", 0.5)
    generate(model, cache, *padded, max_new_tokens=2)
    return model, cache.channel_mask()


def test_the_mask_of_a_prompt_gives_the_same_logits_again(made, tmp_path, prune, padded, continuation, step):
    model, mask = made
    mask.save(tmp_path / "mask.safetensors")
    loaded = ChannelMask.load(tmp_path / "mask.safetensors")
    prompt, padding = padded
    caches = prune(model, "grace", 0.5), prune(model, masks=loaded)
    assert torch.equal(*(step(model, cache, prompt, continuation, padding) for cache in caches))
    assert torch.equal(caches[1].channel_mask().pruned, mask.pruned)


def test_the_mask_carries_its_model(made):
    _, mask = made
    expected = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16}
    expected |= {"rope": "default, rope_theta=10000.0"}
    assert dict(mask.fingerprint) == expected
    assert mask.pruned.shape == (2, 2, 2, 16)
    assert mask.pruned.sum(-1).eq(8).all()


def test_one_mask_for_every_row_and_batch(made, prune, prompt, continuation, step, zeroed, close):
    model, mask = made
    static = ChannelMask(mask.pruned[:, 0], mask.fingerprint)
    for batch in (1, 2):
        cache = prune(model, masks=static)
        found = step(model, cache, prompt[:batch], continuation[:batch])
        everywhere = static.pruned[:, None].expand(-1, batch, -1, -1)
        assert torch.equal(cache.channel_mask().pruned, everywhere)
        assert close(found, zeroed(model, ChannelMask(everywhere), prompt[:batch], continuation[:batch]))


@pytest.mark.parametrize("layers", [1, 2])
def test_a_mixed_model_takes_a_mask_for_all_layers_or_for_the_prunable_ones(layers, tiny, prune, prompt, generate):
    types = ("sliding_attention", "full_attention")
    model = tiny("Qwen2", use_sliding_window=True, sliding_window=12, layer_types=types)
    pruned = torch.zeros(layers, 2, 16, dtype=torch.bool)
    pruned[-1, :, 3:9] = True
    cache = prune(model, masks=ChannelMask(pruned))
    generate(model, cache, prompt, max_new_tokens=2)
    assert torch.equal(cache.channel_mask().pruned, pruned[-1:, None].expand(-1, 2, -1, -1))


def test_the_digest_reads_large_parameters_to_their_end():
    """Beyond 2**24 entries float32 cannot count; changing the last entry must change the digest."""
    big = torch.nn.Module()
    big.weight = torch.nn.Parameter(torch.zeros(2**24 + 3, dtype=torch.bfloat16), requires_grad=False)
    before = weights_digest(big)
    big.weight[-1] = 1.0
    assert weights_digest(big) != before
