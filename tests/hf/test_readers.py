"""Models that look into the cache, change keys behind it, or compute keys that are no numbers: served, or named."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import MllamaConfig, MllamaForConditionalGeneration

from grace_opt.attention import weights
from grace_opt.errors import CacheError
from grace_opt.hf import CompressedCache, SnapKV, attach, calibrate
from grace_opt.hf.stores.channels import choice as channel_choice
from tests.hf.conftest import OBSERVED, RECENT, SIZES

WINDOWS = {"recent_window": RECENT, "observation_window": OBSERVED}
GREEDY = {"max_new_tokens": 6, "do_sample": False}


class TestKeysOfALayer:
    @pytest.mark.parametrize("settings", [{}, {"evict": SnapKV(budget=20, window=4)}], ids=["plain", "evict"])
    def test_are_all_that_is_stored_with_zeros_where_channels_went(self, settings, tiny, prompt):
        model = tiny()
        cache = CompressedCache(model, "grace", **WINDOWS, **settings)
        layer = cache.layers[1]
        assert layer.keys is None
        assert layer.values is None
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        stored = 20 if settings else 40
        assert layer.keys.shape == layer.values.shape == (2, 2, stored, 16)
        gone = layer.keys[:, :, : stored - RECENT].eq(0).all(2)
        assert torch.equal(gone, cache.channel_mask().pruned[1])
        with pytest.raises(CacheError, match="layer 1 of the cache cannot be written to"):
            layer.keys = layer.keys

    @pytest.fixture
    def mllama(self):
        text = {**SIZES, "num_hidden_layers": 4, "cross_attention_layers": [1, 3]}
        vision = {
            **{"hidden_size": 32, "attention_heads": 2, "num_hidden_layers": 1, "num_global_layers": 1},
            **{"image_size": 28, "patch_size": 14, "max_num_tiles": 1, "vision_output_dim": 64},
            **{"intermediate_size": 32, "supported_aspect_ratios": [[1, 1]], "intermediate_layers_indices": [0]},
        }
        del text["head_dim"]
        torch.manual_seed(0)
        model = MllamaForConditionalGeneration(
            MllamaConfig(text_config=text, vision_config=vision, image_token_index=95)
        ).eval()
        for name, parameter in model.named_parameters():
            if "gate" in name:
                parameter.data.fill_(1.0)  # or no image is seen
        return model

    @pytest.mark.parametrize("image", [True, False])
    def test_are_read_by_mllama_whose_image_layers_stay_as_they_are(self, image, mllama):
        prompt = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(1))
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        if image:
            inputs["pixel_values"] = torch.randn(1, 1, 1, 3, 28, 28, generator=torch.Generator().manual_seed(2))
            inputs["aspect_ratio_ids"] = torch.ones(1, 1, dtype=torch.long)
            inputs["aspect_ratio_mask"] = torch.ones(1, 1, 1, dtype=torch.long)
            inputs["cross_attention_mask"] = torch.ones(1, 40, 1, 1, dtype=torch.long)
        dense = mllama.generate(**inputs, **GREEDY)
        with attach(mllama, ratio=0.0, **WINDOWS) as attached:
            assert torch.equal(mllama.generate(**inputs, **GREEDY), dense)
        assert attached.cache.prunable_layers == (0, 2)
        texts = []
        for fused in (True, False):
            with attach(mllama, ratio=0.75, fused=fused, **WINDOWS) as attached:
                texts.append(mllama.generate(**inputs, **GREEDY))
            assert attached.cache.memory_report().pruned_tokens == 32
        assert torch.equal(*texts)


def test_latent_attention_is_named_and_nobody_is_told_to_select_what_is_selected(tiny, prompt):
    """DeepSeek's keys are made from the cache's behind it; attach has selected our attention already."""
    latent = {
        **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "num_key_value_heads": 4},
        **{"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    }
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**{**sizes, **latent})).eval()
    dense = model.generate(prompt, **GREEDY)
    with attach(model, ratio=0.0, **WINDOWS) as attached:
        try:
            found = model.generate(prompt, **GREEDY)
        except CacheError as error:
            assert "changes its keys between cache and attention (as multi-head latent attention" in str(error)  # noqa: PT017
            assert "set_attn_implementation" not in str(error)  # noqa: PT017
        else:  # old transformers store the keys that are attended to
            assert torch.equal(found, dense)
            assert attached.cache.memory_report().pruned_tokens


def nobody_waits(monkeypatch):
    """As on a device: what is on it is not asked for while the prompt is read."""
    monkeypatch.setattr(channel_choice, "_SYNCHRONOUS_DEVICES", ())
    monkeypatch.setattr(weights, "_refuse_out_of_range", lambda *tensors: None)
    monkeypatch.setattr(weights, "_refuse_infinite", lambda norms: None)


class TestNotFinite:
    SAYS = r"keys or queries of layer 1 are not finite .* float16 has overflowed: load .* dtype=torch\.bfloat16"

    @pytest.fixture(params=["k_proj", "q_proj"])
    def broken(self, request, tiny):
        """A model one of whose layers overflows; put back afterwards, because models are shared."""
        model = tiny(attention="sdpa")
        weight = getattr(model.model.layers[1].self_attn, request.param).weight
        before = weight.detach().clone()
        weight.data[0, 0] = float("inf")
        yield model
        weight.data.copy_(before)

    @pytest.mark.parametrize("where", ["at hand", "on a device that nobody waits for"])
    @pytest.mark.parametrize("method", ["grace", "think", "local_search"])
    def test_names_the_layer_and_what_to_do(self, method, where, broken, prompt, monkeypatch):
        if where != "at hand":
            nobody_waits(monkeypatch)
        with attach(broken, method, **WINDOWS), pytest.raises(CacheError, match=self.SAYS):
            broken.generate(prompt, **GREEDY)

    @pytest.mark.parametrize("settings", [{"ratio": 0.0}, {"kept_channels": 16}], ids=str)
    def test_does_not_matter_where_nothing_is_pruned(self, settings, broken, prompt):
        dense = broken.generate(prompt, **GREEDY)
        with attach(broken, **settings, **WINDOWS):
            assert torch.equal(broken.generate(prompt, **GREEDY), dense)

    def test_is_told_by_calibrate(self, broken):
        with pytest.raises(CacheError, match=self.SAYS):
            calibrate.masks(broken, texts=[torch.arange(3, 40)])

    def test_is_told_by_the_mask_where_no_step_follows(self, broken, prompt, monkeypatch):
        nobody_waits(monkeypatch)
        with attach(broken, "grace", **WINDOWS) as attached:
            broken.generate(prompt, **{**GREEDY, "max_new_tokens": 1})
        with pytest.raises(CacheError, match=self.SAYS):
            attached.cache.channel_mask()

    def test_does_not_matter_where_channels_are_not_chosen(self, broken, tiny, prompt):
        masks = calibrate.masks(tiny(num_hidden_layers=2, vocab_size=98), texts=[torch.arange(3, 40)])
        dense = broken.generate(prompt, **GREEDY)
        masks = type(masks)(masks.pruned)
        with attach(broken, masks=masks, **WINDOWS):
            assert broken.generate(prompt, **GREEDY).shape == dense.shape


class TestOutOfRange:
    """Keys of 1e19 are finite, and float32 holds no square of them."""

    SAYS = r"layer 1 are finite, but so large or small .*float64, or prune nothing .* ratio=\[...\], or ratio=0 for all"

    @pytest.fixture(params=[1e19, 1e-30])
    def extreme(self, request, tiny):
        """A model one of whose layers has keys of this size."""
        model = copy.deepcopy(tiny(attention="sdpa"))
        model.model.layers[1].self_attn.k_proj.weight.data.mul_(request.param)
        return model

    @pytest.mark.parametrize("where", ["at hand", "on a device that nobody waits for"])
    @pytest.mark.parametrize("method", ["grace", "think", "mies"])
    def test_names_the_layer_and_what_to_do(self, method, where, extreme, prompt, monkeypatch):
        if where != "at hand":
            nobody_waits(monkeypatch)
        with attach(extreme, method, **WINDOWS), pytest.raises(CacheError, match=self.SAYS):
            extreme.generate(prompt, **GREEDY)

    def test_is_told_by_calibrate(self, extreme):
        with pytest.raises(CacheError, match=self.SAYS):
            calibrate.masks(extreme, texts=[torch.arange(3, 40)])
        assert not calibrate.masks(extreme, texts=[torch.arange(3, 40)], ratio=[0.5, 0]).pruned[1].any()

    @pytest.mark.parametrize("settings", [{"ratio": 0.0}, {"ratio": [0.0, 0.0]}, {"kept_channels": 16}], ids=str)
    def test_does_not_matter_where_nothing_is_pruned(self, settings, extreme, prompt):
        dense = extreme.generate(prompt, **GREEDY)
        with attach(extreme, **settings, **WINDOWS) as attached:
            assert torch.equal(extreme.generate(prompt, **GREEDY), dense)
        assert attached.cache.memory_report().pruned_tokens > 0

    @pytest.mark.parametrize("settings", [{"ratio": [0.5, 0.0]}, {"ratio": 0.3}], ids=["left alone", "float64"])
    def test_what_the_message_says_works(self, settings, extreme, prompt):
        model = extreme if isinstance(settings["ratio"], list) else extreme.double()
        with attach(model, **settings, **WINDOWS) as attached:
            model.generate(prompt, **GREEDY)
        assert attached.cache.memory_report().pruned_tokens > 0


class TestMasksOfTheModelsOwn:
    """Doge makes a mask from the values that the cache hands out, and adds it per key and head."""

    @pytest.fixture
    def doge(self):
        if not hasattr(transformers, "DogeForCausalLM"):
            pytest.skip("this transformers has no Doge")
        torch.manual_seed(0)
        return transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES)).eval()

    @pytest.mark.parametrize("settings", [{}, {"fused": False, "evict": SnapKV(budget=20, window=4)}], ids=str)
    def test_are_refused_by_name(self, settings, doge, prompt):
        says = "mask of DogeAttention has .* makes its own from the keys or values .* fused=False, and leave out evict"
        with attach(doge, "grace", **WINDOWS, **settings), pytest.raises(CacheError, match=says):
            doge.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)

    def test_with_bits_the_message_names_a_ratio(self, doge):
        ids = torch.randint(3, 97, (1, 150), generator=torch.Generator().manual_seed(1))
        with (
            attach(doge, bits=3, basis="none"),
            pytest.raises(CacheError, match="write ratio= and fused=False in place of bits=, and leave out evict"),
        ):
            doge.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)

    def test_what_the_message_says_works(self, doge, prompt):
        call = {"attention_mask": torch.ones_like(prompt), **GREEDY}
        dense = doge.generate(prompt, **call)
        with attach(doge, ratio=0.0, fused=False, **WINDOWS) as attached:
            assert torch.equal(doge.generate(prompt, **call), dense)
        assert attached.cache.memory_report().pruned_tokens > 0
