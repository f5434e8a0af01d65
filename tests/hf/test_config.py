"""CacheConfig: what can be written, what is refused, and that every setting does what it says."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import grace_opt.hf
from grace_opt.attention.provider import DEFAULT_RATIO
from grace_opt.errors import CacheError, OptionError, ProblemError, UnknownSolverError
from grace_opt.hf import (
    H2O,
    Bits,
    CacheConfig,
    Channels,
    CompressedCache,
    PyramidKV,
    Quantize,
    SnapKV,
    StreamingLLM,
    TopTokens,
)
from grace_opt.hf.settings.keywords import OF_BITS, OF_CHANNELS

BITS = st.sampled_from([None, 2, 4])
EVICTIONS = st.one_of(
    st.none(),
    st.builds(
        SnapKV, budget=st.integers(32, 999), kernel=st.sampled_from([1, 5]), pooling=st.sampled_from("max avg".split())
    ),
    st.builds(PyramidKV, budget=st.integers(32, 999), beta=st.integers(1, 40)),
    st.builds(H2O, budget=st.integers(32, 999), window=st.none() | st.integers(0, 32), observed=st.none() | st.just(7)),
    st.builds(StreamingLLM, budget=st.integers(4, 999), sinks=st.integers(0, 4)),
)
RATIOS = st.floats(0, 1, exclude_max=True) | st.just(0)
BOUNDS = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted).map(tuple)
SETTINGS = {
    "protect": st.none() | BOUNDS,
    "seed": st.integers(0, 2**31),
    "recent_window": st.integers(0, 99),
    "observation_window": st.integers(1, 99),
    "sink_tokens": st.integers(0, 9),
    "dense_layers": st.integers(0, 9),
    "tail_block": st.none() | st.sampled_from([32, 64, 96]),
    "fused": st.booleans(),
    "evict": EVICTIONS,
    "quantize": st.none() | st.builds(Quantize, keys=BITS, values=BITS, group_size=st.sampled_from([1, 8, 32])),
}
METHODS = st.one_of(
    st.fixed_dictionaries({"method": st.sampled_from(["grace", "mies", "think", "random"])}),
    st.fixed_dictionaries({"method": st.just("local_search"), "options": st.just({"start": "think"})}),
)
SIZES = st.one_of(
    st.fixed_dictionaries({"ratio": RATIOS | st.lists(RATIOS, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"kept_channels": st.integers(1, 128)}),
)
BASES = st.sampled_from(["calibrated", "none", "b.safetensors"])
MEANS = st.floats(0, 16, exclude_min=True)
#: What gives every channel its number of bits, instead of a method and a size.
GIVEN_BITS = st.one_of(
    st.fixed_dictionaries(
        {"bits": MEANS, "basis": BASES},
        optional={"trellis": st.booleans(), "guard": st.sampled_from(["warn", "off"])},
    ),
    st.fixed_dictionaries({"key_bits": MEANS, "value_bits": MEANS, "basis": BASES}),
    st.fixed_dictionaries({"total_bytes": st.integers(1, 10**12), "basis": BASES}),
    st.fixed_dictionaries({"max_bytes": st.integers(1, 2**50)}),
    st.fixed_dictionaries({"max_kl": st.floats(1e-9, 1e3)}),
)
SHARES = st.floats(0, 1, exclude_min=True)
PARTS = st.none() | st.floats(0, 1, exclude_min=True, exclude_max=True)
READINGS = st.one_of(
    st.sampled_from(["pages", "channels", "sampling"]),
    st.builds(TopTokens, share=SHARES, page_size=st.integers(1, 99), epsilon=PARTS),
    st.builds(TopTokens, share=SHARES, by=st.just("channels"), epsilon=PARTS, top_p=PARTS),
    st.builds(
        TopTokens,
        by=st.just("sampling"),
        tables=st.none() | st.integers(2, 4096),
        hash_bits=st.none() | st.integers(1, 24),
        seed=st.none() | st.integers(0, 2**70),
        confidence=PARTS,
    ),
)
BESIDE_READING = ("recent_window", "sink_tokens", "dense_layers", "tail_block", "evict")
BESIDE_BITS = ("recent_window", "sink_tokens", "dense_layers", "tail_block")
MIXED = {"use_sliding_window": True, "sliding_window": 12, "layer_types": ("sliding_attention", "full_attention")}


class TestRoundTrip:
    @settings(max_examples=100, deadline=None)
    @given(METHODS, SIZES, st.fixed_dictionaries({}, optional=SETTINGS))
    @pytest.mark.slow
    def test_through_json_gives_an_equal_configuration(self, method, size, others):
        config = CacheConfig(**method, **size, **others)
        again = CacheConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert again == config
        assert again.to_dict() == config.to_dict()
        for name, value in {**method, **size, **others}.items():
            part = again.channels if name in OF_CHANNELS else again
            assert getattr(part, name) == (tuple(value) if isinstance(value, list) else value)

    @settings(max_examples=50, deadline=None)
    @given(GIVEN_BITS, st.fixed_dictionaries({}, optional={name: SETTINGS[name] for name in BESIDE_BITS}))
    def test_of_bits_through_json_gives_an_equal_configuration(self, bits, others):
        config = CacheConfig(**bits, **others)
        again = CacheConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert again == config
        assert again.to_dict() == config.to_dict()
        for name, value in {"sink_tokens": 4, **bits, **others}.items():
            part = again.bits if name in OF_BITS else again
            assert getattr(part, name) == (64 if name == "tail_block" and value is None else value)

    @settings(max_examples=50, deadline=None)
    @given(READINGS, st.fixed_dictionaries({}, optional={name: SETTINGS[name] for name in BESIDE_READING}))
    def test_of_reading_through_json_gives_an_equal_configuration(self, read, others):
        config = CacheConfig(read=read, **others)
        again = CacheConfig.from_dict(json.loads(json.dumps(config.to_dict())))
        assert again == config
        assert again.to_dict() == config.to_dict()
        assert again.channels.ratio == (0.0 if config.read.by != "channels" else DEFAULT_RATIO)
        for name, value in {"sink_tokens": 4, **others}.items():
            assert getattr(again, name) == value

    def test_covers_every_field(self):
        drawn = {*SETTINGS, "method", "options", "ratio", "kept_channels", "weight"}  # one weight exists
        drawn |= {"bits", "key_bits", "value_bits", "total_bytes", "max_bytes", "max_kl", "basis"}
        drawn |= {"trellis", "guard", "read"}
        assert drawn == set(CacheConfig().to_dict())
        own = {f.name for f in dataclasses.fields(CacheConfig)}
        assert drawn == own - {"channels"} | {f.name for part in (Channels, Bits) for f in dataclasses.fields(part)}
        assert len(own) == 10

    def test_missing_names_have_their_defaults(self):
        assert CacheConfig.from_dict({}) == CacheConfig()
        assert CacheConfig.from_dict({"sink_tokens": 3}) == CacheConfig(sink_tokens=3)

    def test_numbers_of_numpy_become_plain(self):
        config = CacheConfig(ratio=np.float32(0.25))
        assert json.loads(json.dumps(config.to_dict()))["ratio"] == 0.25
        listed = CacheConfig(ratio=[np.float32(0.25), np.float64(0.5)])
        assert json.loads(json.dumps(listed.to_dict()))["ratio"] == [0.25, 0.5]

    def test_keyword_arguments_of_the_cache_give_the_same_configuration(self, tiny):
        cache = CompressedCache(tiny().config, "local_search", 0.25, start="think", sink_tokens=2)
        assert cache.config == CacheConfig("local_search", 0.25, options={"start": "think"}, sink_tokens=2)

    @pytest.mark.parametrize(
        ("values", "says"),
        [
            ({"ratoi": 0.5}, "has no ratoi; it has method, ratio, kept_channels"),
            ({"quantize": {"keys": 4, "bits": 3}}, "has no bits; it has keys"),
            ({"evict": {"name": "snapkv", "size": 3}}, "'snapkv' has no 'size'"),
            ({"evict": {"name": "lru"}}, "with a name from 'snapkv'"),
            ({"evict": 3}, "with a name from 'snapkv'"),
            ({"quantize": 3}, r"quantize=3: write the dict that Quantize\.to_dict gives"),
            ({"ratio": 0.3, "protect": 3}, r"protect=3: give \(low, high\)"),
            (None, "None: write the dict that to_dict gives"),
        ],
    )
    def test_names_and_values_that_no_configuration_has(self, values, says):
        with pytest.raises(OptionError, match=says):
            CacheConfig.from_dict(values)


class TestValues:
    @pytest.mark.parametrize(
        ("name", "least"),
        [
            ("recent_window", 0),
            ("observation_window", 1),
            ("sink_tokens", 0),
            ("dense_layers", 0),
            ("tail_block", 1),
            ("kept_channels", 1),
            ("seed", 0),
        ],
    )
    def test_whole_numbers(self, name, least):
        drops = {"method": "grace"}
        config = CacheConfig(**drops, **{name: least})
        assert getattr(config.channels if name in OF_CHANNELS else config, name) == least
        for wrong in (least - 1, least + 0.5, str(least), True, [least]):
            with pytest.raises(OptionError, match=rf"^{name}=.*: give an integer >= {least}"):
                CacheConfig(**drops, **{name: wrong})

    @pytest.mark.parametrize("name", ["recent_window", "observation_window", "dense_layers", "seed"])
    def test_only_some_may_be_left_open(self, name):
        with pytest.raises(OptionError, match=f"{name}=None: give an integer >= [01]."):
            CacheConfig(**{name: None})

    @pytest.mark.parametrize(
        ("name", "value", "says"),
        [
            ("ratio", "half", r"ratio='half': give one number in \[0, 1\), or a list with one per layer"),
            ("ratio", {0.5}, r"ratio={0\.5}: give one number in \[0, 1\), or a list"),
            ("ratio", [], r"ratio=\[\]: give one number in \[0, 1\), or a list"),
            ("ratio", np.array([0.5, 0.5]), r"ratio=array.*: give one number in \[0, 1\), or a list"),
            ("ratio", -0.1, r"ratio=-0\.1: give a number >= 0 and < 1"),
            ("ratio", 1, "ratio=1: give a number >= 0 and < 1.* for instance 0.6"),
            ("ratio", float("nan"), "ratio=nan: give a number"),
            ("ratio", True, "ratio=True: give a number"),
            ("method", 3, r'method=3: write a name, for instance "grace"'),
            ("method", ["mies"], r"method=\['mies'\]: write a name"),
            ("weight", "energy", r"weight='energy': give 'frobenius'"),
            ("weight", ["frobenius"], r"weight=\['frobenius'\]: write a name, for instance \"frobenius\""),
            ("protect", 0.1, r"protect=0\.1: give \(low, high\), for instance \(0\.05, 0\.15\)"),
            ("protect", (0.1, 0.2, 0.3), r"protect=\(0\.1, 0\.2, 0\.3\): give \(low, high\)"),
            ("protect", (0.3, 0.2), r"low=0\.3, high=0\.2: must satisfy 0 <= low <= high <= 1"),
            ("protect", (-0.1, 0.2), r"low=-0\.1, high=0\.2: must satisfy"),
            ("options", 3, "options=3: write a dict from names to values"),
            ("options", "start", "options='start': write a dict from names to values"),
            ("options", {"no_such_option": 1}, "no_such_option"),
            ("options", {"path": True}, r"path=True is for solve\(\): .* leave path out"),
            ("fused", "no", "fused='no': give True or False"),
            ("evict", "snap", r"evict='snap': write one of 'snapkv', .*Did you mean 'snapkv'"),
            ("evict", SimpleNamespace(scores=print), r"one of your own has queries_needed, tokens\(\) and scores\(\)"),
            ("quantize", 4, r"quantize=4: write .* Quantize\(4\)"),
        ],
    )
    def test_wrong_ones_are_named_with_what_to_write(self, name, value, says):
        with pytest.raises(OptionError, match=says):
            CacheConfig(**{"method": "grace", name: value})

    def test_unknown_methods_are_told_at_once(self):
        with pytest.raises(UnknownSolverError, match=r"no method is called 'miess'.*mies"):
            CacheConfig("miess")

    def test_the_same_wrong_values_are_told_by_the_cache(self, tiny):
        for wrong in ({"options": 3}, {"seed": "x"}, {"evict": "snap"}, {"quantize": 4}, {"ratio": []}):
            with pytest.raises(OptionError, match=next(iter(wrong))):
                CompressedCache(tiny().config, **wrong)

    @pytest.mark.parametrize("bad", [-0.1, 1.0, 1.5, float("nan"), "half", True, None])
    @pytest.mark.parametrize("layer", [0, 2])
    def test_a_bad_ratio_in_a_list_is_named_with_its_layer(self, bad, layer):
        ratios = [0.5, 0.5, 0.5]
        ratios[layer] = bad
        with pytest.raises(OptionError, match=f"layer {layer}: ratio={bad!r}: give a number"):
            CacheConfig(ratio=ratios)

    @pytest.mark.parametrize("ratio", [0.25, [0.5, 0.5], DEFAULT_RATIO])
    def test_a_ratio_and_a_number_of_kept_channels_exclude_each_other(self, ratio):
        with pytest.raises(OptionError, match=r"ratio=.* and kept_channels=8: write one of the two"):
            CacheConfig(ratio=ratio, kept_channels=8)

    def test_lists_become_tuples_and_options_a_copy(self):
        options = {"start": "think"}
        config = CacheConfig("local_search", [0.25, 0], protect=[0, 0.1], options=options)
        assert (config.channels.ratio, config.channels.protect) == ((0.25, 0.0), (0.0, 0.1))
        assert config == CacheConfig("local_search", (0.25, 0), protect=(0, 0.1), options=dict(options))
        options["start"] = "mies"
        assert config.channels.options == {"start": "think"}

    def test_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            CacheConfig().recent_window = 8

    def test_changing_what_to_dict_gave_changes_no_configuration(self):
        config = CacheConfig("local_search", [0.25], options={"start": "think"})
        values = config.to_dict()
        values["options"]["start"] = "mies"
        values["ratio"].append(0.5)
        assert config == CacheConfig("local_search", [0.25], options={"start": "think"})


class TestRatioPerLayer:
    @pytest.mark.parametrize("ratios", [[0.25, 0.5, 0.75], (0, 0.5, 0.01)])
    def test_every_layer_keeps_its_own_number_of_channels(self, ratios, tiny, prune, prompt):
        model = tiny(num_hidden_layers=3)
        cache = prune(model, "mies", ratios)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        kept = [16 - int(np.ceil(16 * ratio)) for ratio in ratios]
        assert [layer.compressed.pruned_keys.shape[-1] for layer in cache.layers] == kept
        for layer, ratio in enumerate(ratios):
            alone = prune(model, "mies", ratio)
            with torch.no_grad():
                model(prompt, past_key_values=alone)
            chosen, expected = cache.layers[layer].compressed, alone.layers[layer].compressed
            assert torch.equal(chosen.kept_indices, expected.kept_indices)

    @pytest.mark.parametrize("fused", [True, False])
    def test_tokens_equal_those_of_zero_filled_keys(self, fused, tiny, prune, prompt, generate):
        model = tiny()
        listed = generate(model, prune(model, "mies", [0.75, 0.25], fused=fused), prompt)
        assert torch.equal(listed, generate(model, prune(model, "mies", [0.75, 0.25], fused=not fused), prompt))
        assert not torch.equal(listed, generate(model, prune(model, "mies", [0.25, 0.75], fused=fused), prompt))

    @pytest.mark.parametrize("ratios", [[0.5], [0.5, 0.5, 0.5]])
    def test_another_number_of_layers_is_refused(self, ratios, tiny):
        with pytest.raises(OptionError, match=f"ratio has {len(ratios)} entries and the model 2 layers; write one num"):
            CompressedCache(tiny().config, "mies", ratios)

    def test_ratios_of_layers_that_are_not_pruned_are_ignored(self, tiny, prune, prompt):
        model = tiny("Qwen2", **MIXED)
        caches = [prune(model, "mies", ratios) for ratios in ([0.99, 0.25], [0, 0.25])]
        for cache in caches:
            with torch.no_grad():
                model(prompt, past_key_values=cache)
        assert caches[0].layers[1].compressed.pruned_keys.shape[-1] == 12
        assert torch.equal(*(cache.channel_mask().pruned for cache in caches))


class TestKeptChannels:
    @pytest.mark.parametrize("kept", [1, 7, 16])
    def test_exactly_so_many_stay_in_every_head(self, kept, tiny, prune, prompt):
        model = tiny()
        cache = prune(model, "mies", kept_channels=kept)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        assert (~cache.channel_mask().pruned).sum(-1).eq(kept).all()
        assert all(layer.compressed.pruned_keys.shape == (2, 2, 32, kept) for layer in cache.layers)

    def test_equals_the_ratio_that_keeps_as_many(self, tiny, prune, prompt, generate):
        model = tiny()
        caches = prune(model, kept_channels=4), prune(model, ratio=0.75)
        assert torch.equal(*(generate(model, cache, prompt) for cache in caches))
        assert torch.equal(*(cache.channel_mask().pruned for cache in caches))

    def test_more_than_the_heads_have_are_refused(self, tiny):
        with pytest.raises(ProblemError, match="kept_channels=17: the heads have 16 channels; give at most 16"):
            CompressedCache(tiny().config, kept_channels=17)

    def test_fewer_than_protection_may_need_are_refused(self, tiny):
        with pytest.raises(ProblemError, match=r"kept_channels=1 prunes 15 of 16 .* raise kept_channels to at least 2"):
            CompressedCache(tiny().config, kept_channels=1)
        assert CompressedCache(tiny().config, kept_channels=2).prunable_layers == (0, 1)


class TestDenseLayers:
    @pytest.mark.parametrize("count", [0, 1, 2])
    def test_the_first_layers_are_plain(self, count, tiny, prune, prompt, generate):
        model = tiny(num_hidden_layers=3)
        cache, dense = prune(model, ratio=0.5, dense_layers=count), DynamicCache(config=model.config)
        assert cache.prunable_layers == tuple(range(count, 3))
        for used in (cache, dense):
            generate(model, used, prompt, max_new_tokens=2)
        assert [type(layer) for layer in cache.layers[:count]] == [type(layer) for layer in dense.layers[:count]]
        for mine, plain in zip(cache.layers[:count], dense.layers, strict=False):
            assert torch.equal(mine.keys[:, :, :40], plain.keys[:, :, :40])
        assert cache.channel_mask().pruned.shape[0] == 3 - count
        assert cache.memory_report().prunable_layers == 3 - count

    def test_with_nothing_pruned_gives_the_dense_tokens(self, tiny, prune, padded, generate):
        model = tiny()
        dense = generate(model, DynamicCache(config=model.config), *padded)
        assert torch.equal(generate(model, prune(model, ratio=0.0, dense_layers=1), *padded), dense)

    def test_fused_equals_zero_filled(self, tiny, prune, padded, continuation, step, close):
        model = tiny()
        caches = [prune(model, ratio=0.5, dense_layers=1, fused=fused) for fused in (True, False)]
        assert close(*(step(model, cache, padded[0], continuation, padded[1]) for cache in caches))

    @pytest.mark.parametrize("count", [2, 3, 99])
    def test_all_of_them_is_refused(self, count, tiny):
        with pytest.raises(CacheError, match=f"dense_layers={count} leaves no layer .* can be pruned is 1"):
            CompressedCache(tiny().config, dense_layers=count)

    def test_all_layers_that_could_be_pruned_is_refused(self, tiny):
        model = tiny("Qwen2", **{**MIXED, "layer_types": ("full_attention", "sliding_attention")})
        with pytest.raises(CacheError, match=r"dense_layers=1 leaves no layer .* can be pruned is 0"):
            CompressedCache(model.config, dense_layers=1)


class TestPruning:
    def test_gives_the_tokens_of_the_same_settings_one_by_one(self, tiny, prune, prompt, generate):
        model = tiny()
        given = {"ratio": [0.75, 0.25], "recent_window": 8, "observation_window": 6, "sink_tokens": 2}
        cache = CompressedCache(model.config, config=CacheConfig(**given))
        tokens = generate(model, cache, prompt)
        assert cache.config == CacheConfig(**given)
        assert torch.equal(tokens, generate(model, CompressedCache(model.config, **given), prompt))
        assert cache.layers[0].compressed.sink_keys.shape[2] == 2

    @pytest.mark.parametrize(
        "extra",
        [
            {"ratio": 0.6},
            {"ratio": DEFAULT_RATIO},
            {"ratio": [0.5, 0.5]},
            {"ratio": np.array([0.5, 0.5])},
            {"method": "mies"},
            {"dense_layers": 1},
            {"fused": False},
            {"start": "x"},
        ],
    )
    def test_together_with_other_settings_is_refused(self, extra, tiny):
        with pytest.raises(OptionError, match=f"config= already decides .* leave out {next(iter(extra))}"):
            CompressedCache(tiny().config, config=CacheConfig(), **extra)

    def test_names_all_that_would_be_ignored(self, tiny):
        with pytest.raises(OptionError, match="leave out ratio, sink_tokens"):
            CompressedCache(tiny().config, ratio=0.6, sink_tokens=2, config=CacheConfig())

    def test_of_another_type_is_refused(self, tiny):
        with pytest.raises(OptionError, match=r"CacheConfig\.from_dict"):
            CompressedCache(tiny().config, config={"ratio": 0.5})


def test_a_block_of_the_tail_that_fills_no_group():
    with pytest.raises(OptionError, match=r"tail_block=10 is not a multiple of group_size=32.*write tail_block=32"):
        CacheConfig(tail_block=10, quantize=Quantize(keys=4))


def test_a_misspelt_setting_is_recognised(tiny):
    with pytest.raises(OptionError, match=r"a cache has no setting sink_token. For sink_token, write sink_tokens="):
        CompressedCache(tiny(), sink_token=3)


@pytest.mark.parametrize(
    ("old", "new"),
    [("PrunedKeyCache", "CompressedCache"), ("PruningConfig", "CacheConfig"), ("capture", "capture_attention")],
)
def test_names_that_moved_say_the_new_one(old, new):
    with pytest.raises(OptionError, match=rf"grace_opt\.hf\.{old} has another name now: write grace_opt\.hf\.{new}\.$"):
        exec(f"from grace_opt.hf import {old}")
    assert hasattr(grace_opt.hf, new)


def test_settings_are_no_longer_called_pruning(tiny):
    with pytest.raises(OptionError, match=r"For pruning, write config=\.$"):
        CompressedCache(tiny(), pruning=CacheConfig(ratio=0.3))
