"""Prompts and calls at the border of what makes sense: padding only, nothing left, too short, not quantisable."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
import warnings

import pytest
import torch
from transformers import DynamicCache

from grace_opt.attention.masks import ChannelMask
from grace_opt.errors import CacheError, MaskError, OptionError
from grace_opt.hf import (
    H2O,
    CacheConfig,
    CompressedCache,
    PyramidKV,
    Quantize,
    SnapKV,
    StreamingLLM,
    attach,
    calibrate,
)
from grace_opt.hf.models import compat as _compat
from grace_opt.hf.models.observation import Observation

quantises = pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="optimum-quanto is not installed")
BITS = Quantize(keys=4, values=4, group_size=8)


class TestRowOfPadding:
    SETTINGS = (
        {},
        {"fused": False},
        {"sink_tokens": 3},
        {"tail_block": 2},
        {"evict": SnapKV(budget=20, window=4)},
        {"evict": PyramidKV(budget=20, window=4, beta=2)},
        {"evict": H2O(budget=20, window=4)},
        {"evict": StreamingLLM(budget=20)},
        {"evict": SnapKV(budget=20, window=4), "sink_tokens": 3},
        pytest.param({"quantize": BITS}, marks=quantises),
    )

    @pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(map(str, settings)) or "plain")
    @pytest.mark.parametrize("attention", ["grace_sdpa", "grace_eager"])
    def test_is_finite_and_leaves_the_others_as_they_are_alone(
        self, attention, settings, tiny, prune, prompt, continuation, step, close
    ):
        model = tiny(attention=attention)
        mask = torch.ones_like(prompt)
        mask[1] = 0
        cache, alone = prune(model, **settings), prune(model, **settings)
        found = step(model, cache, prompt, continuation, mask)
        assert found.isfinite().all()
        assert close(found[:1], step(model, alone, prompt[:1], continuation[:1]))
        assert torch.equal(cache.channel_mask().pruned[:, 0], alone.channel_mask().pruned[:, 0])
        assert cache.channel_mask().pruned.sum(-1).eq(5).all()
        cache.batch_select_indices(torch.tensor([0]))
        with torch.no_grad():
            more = [model(continuation[:1, :1], past_key_values=each).logits for each in (cache, alone)]
        assert close(*more)

    def test_generates_beside_the_others(self, tiny, prune, prompt, generate):
        model = tiny()
        mask = torch.ones_like(prompt)
        mask[0] = 0
        tokens = generate(model, prune(model), prompt, mask)
        assert torch.equal(tokens[1:], generate(model, prune(model), prompt[1:]))


class TestCrop:
    @pytest.mark.parametrize("fed", [0, 4])
    @pytest.mark.parametrize("beyond", [0, 1, 1000])
    def test_of_more_tokens_than_there_are_empties_the_cache(
        self, beyond, fed, tiny, prune, prompt, generate, continuation
    ):
        model = tiny()
        cache = prune(model)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            if fed:
                model(continuation[:, :fed], past_key_values=cache)
        cache.crop(-40 - fed - beyond)
        assert cache.get_seq_length() == 0
        assert cache.memory_report().total_bytes == 0
        with pytest.raises(CacheError, match="nothing is pruned yet: the cache holds 0 tokens"):
            cache.channel_mask()
        assert torch.equal(generate(model, cache, prompt), generate(model, prune(model), prompt)), (
            "it can be used again"
        )

    def test_of_an_empty_cache_does_nothing(self, tiny, prune, prompt, generate):
        model = tiny()
        cache = prune(model)
        cache.crop(-3)
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(model, cache, prompt), generate(model, prune(model), prompt))

    @pytest.mark.skipif(not _compat.crop_is_relative(), reason="these transformers name the length to keep")
    def test_of_a_positive_number_says_what_to_write_and_changes_nothing(self, tiny, prune, prompt):
        model = tiny()
        cache = prune(model)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        with pytest.raises(OptionError, match=r"of 40 tokens: write crop\(-n\) to remove n tokens"):
            cache.crop(41)
        with pytest.raises(OptionError, match=r"write crop\(-39\) to remove that many, or crop\(-1\) to keep"):
            cache.crop(39)
        assert cache.get_seq_length() == 40


class TestNumberOfLayers:
    @pytest.mark.parametrize("layers", [1, 3])
    def test_of_masks_is_that_of_the_model(self, layers, tiny, prune):
        masks = ChannelMask(torch.zeros(layers, 2, 16, dtype=torch.bool))
        with pytest.raises(MaskError, match=f"it has {layers} layers, the model has 2, of which 2 can be pruned"):
            prune(tiny(), masks=masks)

    def test_of_calibrated_masks_is_that_of_the_layers_that_are_pruned(self, tiny, prune):
        model = tiny(num_hidden_layers=3)
        masks = calibrate.masks(model, texts=[torch.arange(3, 20)], dense_layers=1)
        assert masks.pruned.shape[0] == 2
        assert prune(model, masks=masks, dense_layers=1).prunable_layers == (1, 2)
        with pytest.raises(MaskError, match="it has 2 layers, the model has 3, of which 3 can be pruned"):
            prune(model, masks=masks)


class TestQuantisation:
    @quantises
    @pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
    def test_of_a_type_that_the_back_end_can_not_do_is_refused(self, dtype, tiny):
        masks = ChannelMask(torch.arange(16).lt(8).expand(2, 2, 16))
        cache = CompressedCache(tiny().config, masks=masks, quantize=BITS, recent_window=8)
        layer = cache.layers[0]
        keys, values = cache.update(torch.ones(1, 2, 24, 16, dtype=dtype), torch.ones(1, 2, 24, 16, dtype=dtype), 0)
        layer.attended()
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(OptionError, match=f"{name} numbers cannot be quantised; convert them to one of float16"):
            layer.observe(Observation(torch.ones(1, 4, 24, 16, dtype=dtype), None, 24, 0.25, None), keys, values)
        cache.reset()
        assert cache.get_seq_length() == 0

    # The prompt fills no group beside the recent window, so a smaller recent_window alone may not help either.
    @quantises
    def test_of_a_prompt_that_fills_no_group_says_that_the_group_is_too_large(self, tiny, prune, prompt):
        model = tiny()
        with pytest.warns(UserWarning, match="group_size=64"), torch.no_grad():
            model(prompt, past_key_values=prune(model, quantize=Quantize(keys=4, group_size=64)))


class TestPromptWithoutTokens:
    """transformers itself fails in the middle of a layer, over a reshape."""

    SAYS = "the prompt has no tokens: input_ids, or inputs_embeds, has the length 0; give at least one token"

    @pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
    @pytest.mark.parametrize("settings", [{"ratio": 0.3}, {"bits": 2, "basis": "none"}], ids=["pruned", "coded"])
    def test_is_refused_by_generate(self, settings, given, tiny):
        model = tiny()
        empty = torch.zeros(1, 0, 64) if given == "inputs_embeds" else torch.zeros(1, 0, dtype=torch.long)
        with attach(model, **settings), pytest.raises(OptionError, match=self.SAYS):
            model.generate(**{given: empty}, max_new_tokens=2)

    def test_is_refused_by_the_cache(self, tiny, prune):
        with pytest.raises(CacheError, match=self.SAYS), torch.no_grad():
            tiny()(torch.zeros(1, 0, dtype=torch.long), past_key_values=prune(tiny()))


class TestShortPrompt:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("settings", "longest", "says"),
        [
            ({}, 8, "the last recent_window=8 stay dense"),
            ({"sink_tokens": 4}, 12, "the last recent_window=8 and the first sink_tokens=4 stay dense"),
            ({"recent_window": 0, "sink_tokens": 4}, 4, "recent_window=0 and the first sink_tokens=4 stay dense"),
            ({"evict": StreamingLLM(budget=20)}, 8, "the last recent_window=8 stay dense"),
        ],
    )
    def test_stays_dense_and_says_so_once(self, settings, longest, says, tiny, prune, prompt, generate):
        model = tiny()
        cache = prune(model, **settings)
        with pytest.warns(UserWarning, match=f"the prompt has {longest} tokens and .*{says}") as found:
            tokens = generate(model, cache, prompt[:, :longest])
        assert len(found) == 1
        assert torch.equal(tokens, generate(model, DynamicCache(config=model.config), prompt[:, :longest]))
        assert cache.layers[0].compressed is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.reset()
            generate(model, cache, prompt[:, :longest])  # the same cache does not repeat itself
            longer = prune(model, **settings)
            generate(model, longer, prompt[:, : longest + 1])
        assert longer.layers[0].pruned_length == 1

    def test_says_so_for_every_new_cache(self, tiny, prune, prompt):
        model = tiny()
        for _ in range(2):
            with pytest.warns(UserWarning, match="nothing is pruned"), torch.no_grad():
                model(prompt[:, :5], past_key_values=prune(model))

    def test_in_chunks_says_its_whole_length(self, tiny, prune, prompt):
        model = tiny()
        cache = prune(model, recent_window=40, prompt_length=40)
        with warnings.catch_warnings(record=True) as found, torch.no_grad():
            warnings.simplefilter("always")
            for chunk in prompt.split(16, dim=1):
                model(chunk, past_key_values=cache)
        assert [str(warning.message)[:24] for warning in found] == ["the prompt has 40 tokens"]


@pytest.mark.parametrize(
    ("settings", "length", "smaller"),
    [
        ({"recent_window": 8}, 8, "recent_window"),
        ({"recent_window": 8, "sink_tokens": 40}, 40, "sink_tokens"),
        ({"recent_window": 8, "sink_tokens": 4}, 12, "recent_window or sink_tokens"),
        ({"recent_window": 40, "sink_tokens": 4}, 40, "recent_window"),
        ({"recent_window": 40, "sink_tokens": 40}, 40, "recent_window and sink_tokens"),
        ({"recent_window": 8, "quantize": Quantize(keys=4)}, 40 - 1, "group_size or recent_window"),
        ({"recent_window": 8, "sink_tokens": 40, "quantize": Quantize(keys=4)}, 40, "sink_tokens"),
        ({"recent_window": 8, "read": "channels"}, 8, "recent_window"),
    ],
)
def test_a_prompt_that_is_too_short_names_the_setting_that_is_the_cause(settings, length, smaller, tiny, prompt):
    if "quantize" in settings:
        pytest.importorskip("optimum.quanto")
    cache = CompressedCache(tiny(), ratio=0.5, **settings)
    missed = "every token is read; to read few of" if "read" in settings else "nothing is pruned; to prune"
    with (
        pytest.warns(UserWarning, match=f"{missed} prompts this short, write a smaller {smaller}"),
        torch.no_grad(),
    ):
        tiny()(prompt[:1, :length], past_key_values=cache)


def test_values_of_wrong_kinds_are_named(tiny, prune, prompt, tmp_path):
    model = tiny()
    cache = prune(model)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
    with pytest.raises(OptionError, match="tokens_to_remove='x': give an integer"):
        cache.crop("x")
    with pytest.raises(CacheError, match=r"cannot write '': "):
        cache.save("")
    with pytest.raises(OptionError, match="offloading='yes': write True or False"):
        CompressedCache(model, offloading="yes")
    with pytest.raises(OptionError, match="has no 1; it has method"):
        CacheConfig.from_dict({1: 2})
    with pytest.raises(
        OptionError, match=r"the settings in '\{.{90,120}\.\.\. cannot be read: that is the text"
    ) as raised:
        CacheConfig.from_json(CacheConfig().to_json())
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("write", [pickle.dumps, lambda cache: torch.save(cache, io.BytesIO())])
def test_a_cache_is_not_pickled_but_copied(write, tiny, prune, prompt, continuation):
    """transformers' way to use a prompt twice: a deep copy of its cache."""
    model = tiny()
    cache = prune(model)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        with pytest.raises(CacheError, match=r"is not pickled; write cache\.save\(FILE\), and CompressedCache\.load"):
            write(cache)
        twice, same = copy.deepcopy(cache), copy.copy(cache)
        assert same.layers is cache.layers
        expected = model(continuation, past_key_values=twice).logits
        assert (twice.get_seq_length(), cache.get_seq_length()) == (
            prompt.shape[1] + continuation.shape[1],
            prompt.shape[1],
        )
        assert torch.equal(model(continuation, past_key_values=cache).logits, expected)
