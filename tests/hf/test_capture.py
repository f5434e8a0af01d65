"""capture returns what the attention saw and leaves the model as it found it."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import attention_implementation, capture_attention


def test_queries_and_keys_give_the_models_own_attention_weights(family, tiny, padded):
    """Checked against eager attention's weights, padding and causality included."""
    prompt, mask = padded
    model = tiny(family, attention="eager")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(prompt, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
    for name in ("sdpa", "eager", "grace_sdpa"):
        model.set_attn_implementation(name)
        found = capture_attention(model, prompt, mask)
        assert model.config._attn_implementation == name
        assert list(found) == [0, 1]
        for index, layer in found.items():
            assert layer.layer == index
            assert torch.equal(layer.valid, mask.bool())
            keys = layer.keys.repeat_interleave(layer.queries.shape[1] // layer.keys.shape[1], dim=1)
            logits = layer.queries @ keys.mT * layer.scaling
            allowed = torch.ones(40, 40, dtype=torch.bool).tril() & layer.valid[:, None, None, :]
            weights = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min).softmax(-1)
            torch.testing.assert_close(weights[:, :, 13:], expected[index][:, :, 13:], rtol=1e-4, atol=1e-5)


def test_keys_and_values_are_those_of_the_dense_cache(tiny, prompt):
    model = tiny()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    for index, layer in capture_attention(model, prompt).items():
        assert layer.valid is None
        torch.testing.assert_close(layer.keys, cache.layers[index].keys)
        torch.testing.assert_close(layer.values, cache.layers[index].values)
        assert not layer.queries.requires_grad


def test_the_factor_is_that_of_the_call_not_of_the_module(tiny, prompt):
    """OPT scales its queries itself and calls the attention with 1."""
    model = tiny("OPT", ffn_dim=96, word_embed_proj_dim=64)
    assert model.model.decoder.layers[0].self_attn.scaling == 0.25
    assert [layer.scaling for layer in capture_attention(model, prompt).values()] == [1.0, 1.0]


def test_only_the_layers_asked_for(tiny, prompt):
    assert list(capture_attention(tiny(), prompt, layers=[1])) == [1]
    with pytest.raises(OptionError, match=r"2 layers and no \[-1, 2\]; write numbers from 0 to 1"):
        capture_attention(tiny(), prompt, layers=[-1, 0, 2])


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, 2], "is list"),
        (torch.tensor([1, 2]), r"is torch.int64 \(2,\)"),
        (torch.zeros(1, 2), r"is torch.float32 \(1, 2\)"),
        (torch.zeros(1, 0, dtype=torch.long), r"is torch.int64 \(1, 0\)"),
    ],
)
def test_what_are_no_tokens(ids, says, tiny):
    with pytest.raises(OptionError, match=f"input_ids {says}: give the numbers of at least one token"):
        capture_attention(tiny(), ids)


def test_what_is_no_model(tiny, prompt):
    with pytest.raises(OptionError, match="not LlamaConfig; write capture_attention"):
        capture_attention(tiny().config, prompt)
    with pytest.raises(OptionError, match=r"AutoModelForCausalLM\.from_pretrained"):
        capture_attention("gpt2", prompt)


def test_the_model_is_left_as_found_also_after_an_error(tiny, prompt):
    model = tiny(attention="eager")
    with pytest.raises(IndexError):
        capture_attention(model, prompt + 1000)
    assert model.config._attn_implementation == "eager"
    assert capture_attention(model, prompt).keys() == {0, 1}, "and nothing of the failed call lingers"


def test_attention_implementation_as_a_context(tiny):
    model = tiny(attention="sdpa")
    with attention_implementation(model, "grace_eager"):
        assert model.config._attn_implementation == "grace_eager"
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="grace_sdp"), attention_implementation(model, "grace_sdp"):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_soft_capped_models_are_captured_with_eager_attention(tiny, prompt):
    model = tiny("Gemma2", attention="eager", sliding_window=12, query_pre_attn_scalar=16)
    found = capture_attention(model, prompt)
    assert found[0].scaling == pytest.approx(0.25)
    assert len(found) == 2


def test_a_model_whose_attention_can_not_be_chosen_is_refused(tiny, prompt, monkeypatch):
    model = tiny()
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: None)
    with pytest.raises(CacheError, match="does not let its attention be chosen"):
        capture_attention(model, prompt)
