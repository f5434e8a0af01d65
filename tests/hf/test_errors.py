"""What goes wrong says so: what was wrong, and what to write instead."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import DynamicCache, MambaConfig, T5Config

import grace_opt
from grace_opt.attention.masks import ChannelMask
from grace_opt.attention.provider import MaskProvider
from grace_opt.errors import CacheError, GraceError, MaskError, OptionError, ProblemError, UnknownSolverError
from grace_opt.hf import CompressedCache, SnapKV


class TestForgottenAttention:
    SENTENCE = r'write model\.set_attn_implementation\("grace_sdpa"\)'

    @pytest.mark.parametrize("fused", [True, False])
    def test_is_noticed_in_the_first_forward_pass(self, fused, tiny, prune, prompt, generate):
        model = tiny(attention="sdpa")
        with pytest.raises(CacheError, match=self.SENTENCE):
            generate(model, prune(model, fused=fused), prompt, max_new_tokens=1)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_is_noticed_with_one_layer_at_the_first_decode_step(self, attention, tiny, prune, prompt, generate):
        model = tiny(attention=attention, num_hidden_layers=1)
        cache = prune(model)
        with pytest.raises(CacheError, match=self.SENTENCE):
            generate(model, cache, prompt, max_new_tokens=2)

    def test_is_noticed_by_the_report_if_nothing_else_runs(self, tiny, prune, prompt, generate):
        model = tiny(attention="sdpa", num_hidden_layers=1)
        cache = prune(model)
        generate(model, cache, prompt, max_new_tokens=1)
        for ask in (cache.memory_report, cache.channel_mask):
            with pytest.raises(CacheError, match=self.SENTENCE):
                ask()

    def test_is_noticed_when_it_is_taken_away_later(self, tiny, prune, prompt, continuation):
        model = tiny()
        cache = prune(model)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            model.set_attn_implementation("sdpa")
            with pytest.raises(CacheError, match=self.SENTENCE):
                model(continuation[:, :1], past_key_values=cache)

    def test_does_not_matter_after_the_prompt_with_zero_filled_keys(self, tiny, prune, prompt, continuation, close):
        logits = []
        for attention in ("grace_sdpa", "sdpa"):
            model = tiny()
            cache = prune(model, fused=False)
            with torch.no_grad():
                model(prompt, past_key_values=cache)
                model.set_attn_implementation(attention)
                logits.append(model(continuation[:, :1], past_key_values=cache).logits)
        assert close(*logits)

    def test_leaves_the_cache_usable_after_reset(self, tiny, prune, prompt, generate):
        model = tiny(attention="sdpa")
        cache = prune(model)
        with pytest.raises(CacheError):
            generate(model, cache, prompt)
        model.set_attn_implementation("grace_sdpa")
        with pytest.raises(CacheError, match=r"reset\(\)"), torch.no_grad():
            model(prompt, past_key_values=cache)
        cache.reset()
        assert torch.equal(generate(model, cache, prompt), generate(model, prune(model), prompt))


class TestInterrupted:
    """A forward pass that ends between two layers leaves one token more in the first of them."""

    SENTENCE = r"different numbers of tokens \({}\): a forward pass ended in the middle, .* call reset\(\)"
    SETTINGS = ({}, {"bits": 3, "basis": "none"}, {"read": "pages"}, {"fused": False}, {"dense_layers": 1})

    def interrupt(self, model, tokens, cache):
        def stop(*_):
            raise KeyboardInterrupt

        hook = model.model.layers[1].self_attn.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(tokens, past_key_values=cache)
        hook.remove()

    @pytest.mark.parametrize("settings", SETTINGS, ids=str)
    @pytest.mark.parametrize("new", [1, 3])
    def test_in_a_step(self, new, settings, tiny, prune, prompt, continuation, step, tmp_path):
        model = tiny(num_hidden_layers=3)
        prompt, continuation = prompt.repeat(1, 4), continuation[:, :3]
        cache = CompressedCache(model, **settings) if "bits" in settings else prune(model, **settings)
        expected = step(model, cache, prompt, continuation)
        length = prompt.shape[1] + continuation.shape[1]
        self.interrupt(model, continuation[:, :new], cache)
        with pytest.raises(CacheError, match=self.SENTENCE.format(f"{length}, {length + new}")):
            cache.save(tmp_path / "cache.safetensors")
        assert not list(tmp_path.iterdir())
        with pytest.raises(CacheError, match=self.SENTENCE.format(f"{length}, {length + new}")), torch.no_grad():
            model(continuation[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(step(model, cache, prompt, continuation), expected)
        cache.save(tmp_path / "cache.safetensors")

    @pytest.mark.parametrize("order", ["ffs", "fss", "fsf", "sfs"])
    def test_beside_sliding_windows(self, order, tiny, prune, prompt, continuation, tmp_path):
        kinds = tuple({"f": "full_attention", "s": "sliding_attention"}[kind] for kind in order)
        model = tiny("qwen3", num_hidden_layers=3, layer_types=kinds, sliding_window=16, use_sliding_window=True)
        cache = prune(model)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        self.interrupt(model, continuation[:, :2], cache)
        for go_on in (
            lambda: cache.save(tmp_path / "cache.safetensors"),
            lambda: model(continuation[:, :1], past_key_values=cache),
        ):
            with pytest.raises(CacheError, match=self.SENTENCE.format(r"4\d, 4\d")), torch.no_grad():
                go_on()

    def test_in_the_prompt(self, tiny, prune, prompt, continuation):
        model = tiny()
        cache = prune(model)
        self.interrupt(model, prompt, cache)
        with pytest.raises(CacheError, match=self.SENTENCE.format("0, 40")), torch.no_grad():
            model(continuation[:, :1], past_key_values=cache)

    @pytest.mark.parametrize("settings", [{}, {"bits": 3, "basis": "none"}], ids=str)
    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
    def test_while_the_last_layer_is_compressed(
        self, error, settings, tiny, prune, prompt, continuation, step, tmp_path, monkeypatch
    ):
        """All layers have all tokens then, and one would stay dense."""
        model, prompt, calls = tiny(), prompt.repeat(1, 4), []

        cache = CompressedCache(model, **settings) if "bits" in settings else prune(model, **settings)
        maker = type(cache.maker)
        right = maker.of_prompt

        def stop(self, plan, *given):
            calls.append(plan.index)
            if plan.index == 1:
                raise error
            return right(self, plan, *given)

        with monkeypatch.context() as patch:
            patch.setattr(maker, "of_prompt", stop)
            with pytest.raises(error), torch.no_grad():
                model(prompt, past_key_values=cache)
        assert calls == [0, 1]
        says = r"compression ended in the middle of layer 1, .* call reset\(\)"
        with pytest.raises(CacheError, match=says):
            cache.save(tmp_path / "cache.safetensors")
        with pytest.raises(CacheError, match=says), torch.no_grad():
            model(continuation[:, :1], past_key_values=cache)
        cache.reset()
        step(model, cache, prompt, continuation)
        assert all(layer.compressed is not None for layer in cache.layers)
        cache.save(tmp_path / "cache.safetensors")


@pytest.mark.parametrize(
    ("family", "changes", "settings", "removed", "says"),
    [
        ("llama", {}, {"dense_layers": 1, "evict": SnapKV(budget=20, window=6)}, 20, r"cropped to \d+ tokens or more"),
        ("llama", {}, {"dense_layers": 1, "quantize": "int4"}, 20, r"cropped to \d+ tokens or more"),
        (
            "qwen3",
            {
                "layer_types": ("full_attention", "sliding_attention", "full_attention"),
                "sliding_window": 16,
                "use_sliding_window": True,
            },
            {},
            4,
            "a layer with a sliding window, which transformers keeps, cannot be cropped",
        ),
    ],
    ids=["eviction", "quantised", "sliding"],
)
def test_a_crop_that_is_refused_changes_nothing(
    family, changes, settings, removed, says, tiny, prune, prompt, continuation, step
):
    model = tiny(family, num_hidden_layers=3, **changes)
    caches = [prune(model, **settings) for _ in range(2)]
    for cache in caches:
        step(model, cache, prompt.repeat(1, 2), continuation[:, :2])
    with pytest.raises(CacheError, match=says):
        caches[0].crop(-removed)
    assert [layer.get_seq_length() for layer in caches[0].layers] == [82, 82, 82]
    with torch.no_grad():
        found, expected = (model(continuation[:, :2], past_key_values=cache).logits for cache in caches)
    assert torch.equal(found, expected)


class TestShortPrompt:
    @pytest.mark.parametrize("length", [1, 5, 8])
    def test_stays_dense_and_says_so_once(self, length, tiny, prune, prompt, generate):
        model = tiny()
        cache = prune(model)
        with pytest.warns(UserWarning, match=f"the prompt has {length} tokens? and the last recent_window=8") as found:
            tokens = generate(model, cache, prompt[:, :length])
        assert len(found) == 1
        dense = generate(model, DynamicCache(config=model.config), prompt[:, :length])
        assert torch.equal(tokens, dense)
        with pytest.raises(CacheError, match=f"nothing is pruned yet: the cache holds {length + 15} tokens"):
            cache.channel_mask()

    def test_is_pruned_at_a_later_turn_that_is_longer(self, tiny, prune, prompt, continuation, generate):
        model = tiny()
        cache = prune(model)
        with pytest.warns(UserWarning, match="nothing is pruned"):
            first = generate(model, cache, prompt[:, :6], max_new_tokens=2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            generate(model, cache, torch.cat([prompt[:, :6], first, continuation], dim=1), max_new_tokens=3)
        assert cache.layers[0].pruned_length == 6 + 2 + 12 - 8

    def test_one_token_longer_is_pruned(self, tiny, prune, prompt, generate):
        model = tiny()
        cache = prune(model)
        generate(model, cache, prompt[:, :9])
        assert cache.layers[0].pruned_length == 1


class TestArguments:
    @pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan"), "half", True])
    def test_ratio_out_of_range(self, ratio, tiny):
        with pytest.raises(OptionError, match="ratio"):
            CompressedCache(tiny().config, "mies", ratio)

    def test_ratio_that_protection_does_not_leave(self, tiny):
        with pytest.raises(ProblemError, match="lower ratio"):
            CompressedCache(tiny().config, "grace", 0.95)

    @pytest.mark.parametrize("name", ["recent_window", "observation_window"])
    @pytest.mark.parametrize("value", [-1, 1.5, "32", None, True])
    def test_windows(self, name, value, tiny):
        with pytest.raises(OptionError, match=f"{name}=.*: give an integer >= "):
            CompressedCache(tiny().config, ratio=0.3, **{name: value})

    def test_an_observation_window_of_nothing(self, tiny):
        with pytest.raises(OptionError, match="observation_window=0: give an integer >= 1"):
            CompressedCache(tiny().config, ratio=0.3, observation_window=0)

    def test_unknown_method_and_option(self, tiny):
        with pytest.raises(UnknownSolverError, match="mies"):
            CompressedCache(tiny().config, "miess")
        with pytest.raises(OptionError, match="no_such_option"):
            CompressedCache(tiny().config, "mies", no_such_option=1)

    @pytest.mark.parametrize(
        "extra",
        [{"ratio": 0.6}, {"ratio": 0.3}, {"method": "mies"}, {"seed": 3}, {"kept_channels": 8}, {"start": "think"}],
    )
    def test_a_provider_and_what_it_already_decides(self, extra, tiny):
        method = {"method": "local_search"} if "start" in extra else {}
        with pytest.raises(OptionError, match=f"provider= already decides .* leave out .*{next(iter(extra))}"):
            CompressedCache(tiny().config, provider=MaskProvider("mies"), **method, **extra)

    def test_a_provider_and_masks(self, tiny):
        masks = ChannelMask(torch.zeros(2, 2, 16, dtype=torch.bool))
        with pytest.raises(OptionError, match="leave out masks"):
            CompressedCache(tiny().config, provider=MaskProvider("mies"), masks=masks)

    def test_neither_a_model_nor_its_configuration(self):
        with pytest.raises(
            OptionError,
            match=r"must be a transformers model, not str; write CompressedCache\(model, \.\.\.\) with model =",
        ):
            CompressedCache("a-model")
        with pytest.raises(OptionError, match=r"model or its configuration, not int; write CompressedCache\(model"):
            CompressedCache(3)

    def test_all_of_them_are_grace_errors(self, tiny):
        with pytest.raises(GraceError):
            CompressedCache(tiny().config, "mies", 7)


class TestModels:
    def test_with_a_cache_of_its_own(self, tiny):
        model = tiny("MiniMax", num_experts_per_tok=1, num_local_experts=1)
        for make in (CompressedCache, grace_opt.hf.attach):
            with pytest.raises(CacheError, match=r"minimax has (a kind of cache of its own|layers with states)"):
                make(model)

    def test_nothing_but_sliding_layers(self, tiny):
        model = tiny("Mistral", sliding_window=16)
        with pytest.raises(CacheError, match=r"mistral has no full-attention layer .* only DynamicSlidingWindowLayer"):
            CompressedCache(model.config)

    def test_no_attention_at_all(self):
        with pytest.raises(CacheError, match=r"mamba has no .* only layers without attention heads; use"):
            CompressedCache(MambaConfig(num_hidden_layers=2, hidden_size=16))

    def test_encoder_decoder(self):
        with pytest.raises(CacheError, match="decoder-only"):
            CompressedCache(T5Config(num_layers=1, d_model=16, num_heads=2))

    def test_more_layers_than_the_cache(self, tiny, prune, prompt):
        cache = prune(tiny(num_hidden_layers=1))
        with pytest.raises(CacheError, match="writes to layer 1 but this cache was made for 1 layers"):
            tiny()(prompt, past_key_values=cache)

    def test_another_batch_in_the_same_cache(self, tiny, prune, prompt):
        model = tiny()
        cache = prune(model)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            with pytest.raises(CacheError, match=r"\(2, 2, 16\) but the new keys have \(1, 2, 16\)"):
                model(prompt[:1], past_key_values=cache)

    def test_soft_capping_needs_eager(self, tiny, prune, prompt):
        model = tiny("Gemma2", attention="eager", sliding_window=12, query_pre_attn_scalar=16)
        # Written past set_attn_implementation, because new transformers refuse already there.
        model.config._attn_implementation = "grace_sdpa"
        with pytest.raises(CacheError, match=r'write model\.set_attn_implementation\("grace_eager"\)'), torch.no_grad():
            model(prompt, past_key_values=prune(model))

    def test_what_the_fused_path_can_not_do_is_named(self):
        from grace_opt.hf.engine.attention import _refuse_unsupported

        with pytest.raises(CacheError, match=r"Identity adds s_aux .*; leave it out"):
            _refuse_unsupported(torch.nn.Identity(), {"s_aux": torch.zeros(4)}, "leave it out")

    def test_a_mask_that_covers_only_the_new_tokens(self, tiny, prune, prompt, continuation):
        model = tiny()
        cache = prune(model)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            with pytest.raises(CacheError, match="covers the whole cache"):
                model(
                    continuation[:, :2],
                    attention_mask=torch.ones(2, 1, 2, 2, dtype=torch.bool),
                    past_key_values=cache,
                )


class TestMasks:
    def mask(self, *shape, **fingerprint):
        pruned = torch.zeros(shape, dtype=torch.bool)
        pruned[..., :8] = True
        return ChannelMask(pruned, fingerprint)

    @pytest.mark.parametrize(
        ("shape", "fingerprint", "says"),
        [
            ((3, 2, 16), {}, "it has 3 layers, the model has 2"),
            ((2, 4, 16), {}, "num_key_value_heads: mask 4, model 2"),
            ((2, 2, 32), {}, "head_dim: mask 32, model 16"),
            ((2, 2, 16), {"model_type": "qwen2"}, "model_type: mask 'qwen2', model 'llama'"),
            ((2, 2, 16), {"num_hidden_layers": 30}, "num_hidden_layers: mask 30, model 2"),
        ],
    )
    def test_for_another_model(self, shape, fingerprint, says, tiny, prune):
        with pytest.raises(MaskError, match="for another model") as error:
            prune(tiny(), masks=self.mask(*shape, **fingerprint))
        assert says in str(error.value)

    def test_without_a_layer_dimension(self, tiny, prune):
        with pytest.raises(MaskError, match=r"give one entry per layer"):
            prune(tiny(), masks=self.mask(2, 16))

    def test_of_the_wrong_type(self, tiny, prune):
        with pytest.raises(OptionError, match=r"write ChannelMask\.load\(path\)"):
            prune(tiny(), masks=torch.zeros(2, 2, 16, dtype=torch.bool))

    def test_made_for_another_batch(self, tiny, prune, prompt):
        model = tiny()
        cache = prune(model, masks=self.mask(2, 3, 2, 16))
        with pytest.raises(MaskError, match="made for 3 sequences but the batch has 2"), torch.no_grad():
            model(prompt, past_key_values=cache)

    @pytest.mark.parametrize("answer", [None, torch.zeros(2, 2, 16, dtype=torch.bool), "(2, 16)", "(1, 2, 16)"])
    def test_from_a_source_that_returns_something_else(self, answer, tiny, prune, prompt):
        model = tiny()
        wrong = self.mask(*map(int, answer.strip("()").split(","))) if isinstance(answer, str) else answer
        cache = prune(model, provider=lambda queries, keys, attention_mask=None: wrong)
        with pytest.raises(MaskError, match="the mask source returned"), torch.no_grad():
            model(prompt, past_key_values=cache)

    def test_from_a_source_whose_parameters_have_other_names(self, tiny, prune, prompt):
        model = tiny()
        cache = prune(model, provider=lambda q, k, m: MaskProvider("think", 0.5)(q, k, m))
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        assert cache.channel_mask().pruned.sum(-1).eq(8).all()

    def test_with_unequal_heads(self, tiny, prune, prompt):
        model = tiny()
        uneven = self.mask(2, 2, 16)
        uneven.pruned[0, 1, 8:10] = True
        with pytest.raises(MaskError, match="between 6 and 8 channels"), torch.no_grad():
            model(prompt, past_key_values=prune(model, masks=uneven))


def test_importing_the_adapter_registers_and_changes_nothing_else():
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in ("grace_sdpa", "grace_eager"):
        assert name in AttentionInterface()
        assert name in AttentionMaskInterface()
        assert "flash" not in name
    assert grace_opt.hf.CompressedCache is CompressedCache
