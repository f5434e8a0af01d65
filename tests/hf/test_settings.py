"""What a cache is if little is said: 2.25 bits; and that each setting does what it says, and nothing else."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from grace_opt import ChannelMask, MaskProvider
from grace_opt.attention.provider import DEFAULT_RATIO
from grace_opt.errors import CalibrationError, OptionError
from grace_opt.hf import H2O, Bits, CacheConfig, CompressedCache, Quantize, SnapKV, TopTokens, attach, calibrate
from grace_opt.hf.models import POCKET_BASIS, load_pocket
from grace_opt.hf.tools.lm_eval.arguments import split_arguments
from grace_opt.hf.tools.needle import make_prompt
from grace_opt.hf.tools.tune.candidates import default_candidates
from tests.hf.conftest import SIZES

#: Settings that make a cache smaller without dropping channels, and those that leave it to the default.
ALONE = (
    {"evict": "snapkv"},
    {"evict": H2O(budget=64)},
    {"quantize": "int4"},
    {"quantize": Quantize(keys=None, values=8)},
    {"read": "pages"},
    {"read": TopTokens(by="sampling")},
)
BESIDE = ({}, {"recent_window": 16}, {"sink_tokens": 2}, {"dense_layers": 1}, {"tail_block": 32}, {"basis": "none"})


@pytest.fixture(scope="module")
def pocket():
    model, tokenizer = load_pocket()
    task = make_prompt(400, 0.5, count=lambda text: len(tokenizer(text).input_ids), seed=1)
    return model, tokenizer(task.text, return_tensors="pt", return_token_type_ids=False)


@pytest.mark.slow
def test_without_settings_keys_and_values_have_2_25_bits(pocket, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path))
    model, inputs = pocket
    found = []
    for settings in ({}, {"bits": 2.25}):
        with attach(model, **settings) as attached:
            found.append(model.generate(**inputs, max_new_tokens=2, do_sample=False))
        report = attached.cache.memory_report()
        assert 2 < report.bits <= 2.25
    assert torch.equal(*found)
    assert CompressedCache(model).config == attached.cache.config == CacheConfig(bits=2.25)
    with pytest.raises(OptionError, match="bits= gives every channel its own number"):
        attach(model, bits=2.25, ratio=DEFAULT_RATIO)


@pytest.mark.parametrize("beside", BESIDE, ids=str)
def test_what_makes_nothing_smaller_leaves_the_default(beside):
    config = CacheConfig(**beside)
    assert (config.bits.bits, config.channels.ratio) == (2.25, 0.0)
    assert config == CacheConfig(bits=2.25, **beside)


@pytest.mark.parametrize("alone", ALONE, ids=str)
def test_a_setting_alone_drops_no_channel(alone, pocket):
    """KL .20 where int4 has .0185: 30 % of the channels went as well."""
    model, inputs = pocket
    config = CacheConfig(**alone)
    assert config == CacheConfig(ratio=0.0, **alone)
    assert config.bits is None
    if "evict" in alone:  # the tokens that are kept, in all their channels
        with attach(model, **alone, recent_window=8) as attached:
            model.generate(**inputs, max_new_tokens=1)
        assert attached.cache.layers[0].compressed.pruned_keys.shape[-1] == 64


def test_a_budget_that_drops_nothing_is_no_reason_to_drop_channels(pocket):
    model, inputs = pocket
    with attach(model, evict=SnapKV(budget=4000)) as attached:
        model.generate(**inputs, max_new_tokens=1)
    said = str(attached.cache.memory_report())
    assert "has dropped no token" in said
    assert "larger ratio" not in said


@pytest.mark.parametrize(
    "asks",
    [
        {"method": "grace"},
        {"method": "local_search", "options": {"start": "think"}},
        {"method": "think", "quantize": "int4"},
        {"read": "channels"},
    ],
    ids=str,
)
def test_who_asks_for_channels_to_be_chosen_gets_the_usual_ratio(asks):
    config = CacheConfig(**asks)
    assert (config.channels.ratio, config.bits) == (DEFAULT_RATIO, None)
    assert config == CacheConfig(ratio=DEFAULT_RATIO, **asks)


@pytest.mark.parametrize("name", ["protect", "weight", "seed", "observation_window"])
@pytest.mark.parametrize("beside", [{}, {"evict": "snapkv"}, {"quantize": "int4"}, {"read": "pages"}], ids=str)
def test_how_to_choose_without_a_choice_is_refused(name, beside, tiny):
    value = {"protect": (0.05, 0.15), "weight": "frobenius", "seed": 0, "observation_window": 32}[name]
    with pytest.raises(
        OptionError, match=rf"^{name}=.*without ratio= none is; write ratio=0.3 as well, or leave {name}"
    ):
        CompressedCache(tiny(), **{name: value}, **beside)
    assert getattr(CacheConfig(**{name: value}, ratio=0.3, **beside).channels, name) == value


def test_a_cache_that_pads_its_keys_is_not_the_default():
    with pytest.raises(OptionError, match=r"fused=False: write ratio=0\.3 as well, or evict= or quantize="):
        CacheConfig(fused=False)
    with pytest.raises(OptionError, match="fused=False"):
        CacheConfig.from_dict({"fused": False})
    assert CacheConfig(fused=False, quantize="int4").channels.ratio == 0.0


class TestWhereBitsAreRefused:
    def test_the_bare_call_says_what_else_there_is(self, tiny):
        for given_model in (tiny(), tiny().config):
            with pytest.raises(CalibrationError, match=r"for bits=2\.25, the default; .*: write ratio=0\.3\)$"):
                CompressedCache(given_model)
            with pytest.raises(CalibrationError) as caught:
                CompressedCache(given_model, bits=2.25)
            assert "ratio=" not in str(caught.value)
        with pytest.raises(CalibrationError, match=r"write ratio=0\.3\)$"):
            attach(tiny())
        with attach(tiny(), ratio=0.3):  # what it says works
            pass

    def test_a_mask_of_the_models_own(self, monkeypatch):
        """Doge makes its mask from what the cache returns."""
        if not hasattr(transformers, "DogeForCausalLM"):
            pytest.skip("this transformers has no Doge")
        from grace_opt.errors import CacheError

        sizes = {**SIZES, "keep_window_size": 2048}
        model = transformers.DogeForCausalLM(transformers.DogeConfig(**sizes)).eval()
        ids = torch.randint(3, 97, (1, 160), generator=torch.Generator().manual_seed(1))
        with (
            attach(model, basis="none"),
            pytest.raises(CacheError, match="write ratio= and fused=False in place of bits="),
        ):
            model.generate(ids, max_new_tokens=4, pad_token_id=0)


class TestChannelsChosenElsewhere:
    def test_need_no_ratio(self, tiny):
        masks = ChannelMask(torch.arange(16).expand(2, 2, 16) < 4)
        for chosen in ({"masks": masks}, {"provider": MaskProvider("think", 0.25)}):
            assert CompressedCache(tiny(), **chosen).config == CacheConfig(ratio=0.0)
            beside = CacheConfig(evict="snapkv", recent_window=8)
            assert CompressedCache(tiny(), **chosen, config=beside).config == beside
            with pytest.raises(OptionError, match=r"leave out one \(bits=2\.25 is the default .*: ratio=0\.0 leaves"):
                CompressedCache(tiny(), **chosen, config=CacheConfig())
            with pytest.raises(OptionError, match="already decides which channels go; leave out ratio"):
                CompressedCache(tiny(), **chosen, config=CacheConfig(ratio=0.5))

    def test_static_masks_are_not_made_of_settings_that_drop_none(self, tiny):
        ids = [torch.arange(3, 40)]
        for config, says in (
            (CacheConfig(), "bits= drops none: .* leave out config="),
            (CacheConfig(evict="snapkv"), "config= drops none: give it ratio="),
        ):
            with pytest.raises(OptionError, match=says):
                calibrate.masks(tiny(), texts=ids, config=config)
        assert calibrate.masks(tiny(), texts=ids).pruned.sum(-1).eq(5).all()  # of 16 channels, 0.3


# Files and dicts from before


#: What ``CacheConfig(...).to_dict()`` gave before bits were the default.
BEFORE = {
    "method": "grace",
    "ratio": 0.3,
    "kept_channels": None,
    "protect": None,
    "weight": "frobenius",
    "seed": 0,
    "options": {},
    "recent_window": 32,
    "observation_window": 32,
    "sink_tokens": 0,
    "dense_layers": 0,
    "tail_block": None,
    "fused": True,
    "evict": None,
    "quantize": None,
    "bits": None,
    "key_bits": None,
    "value_bits": None,
    "total_bytes": None,
    "basis": "calibrated",
    "trellis": None,
    "read": None,
}
INT4 = {"keys": 4, "values": 4, "group_size": 32, "backend": "quanto"}
PAGES = {"share": 0.25, "by": "pages", "page_size": 16, "epsilon": None, "top_p": None}


def file_of(path, settings, version="1"):
    path.write_text(
        json.dumps({"format": "grace_opt.pruning", "version": version, "fingerprint": {}, "pruning": settings})
    )
    return path


@pytest.mark.parametrize(
    ("changes", "means"),
    [
        ({}, {"ratio": 0.3}),
        ({"bits": 2.25, "sink_tokens": 4, "tail_block": 64, "trellis": True}, {"bits": 2.25}),
        ({"key_bits": 2.0, "value_bits": 3.0, "sink_tokens": 4, "tail_block": 64, "trellis": True},
         {"key_bits": 2.0, "value_bits": 3.0}),
        ({"quantize": INT4}, {"ratio": 0.3, "quantize": "int4"}),
        ({"ratio": 0.0, "quantize": INT4}, {"quantize": "int4"}),
        ({"ratio": 0.0, "read": PAGES, "sink_tokens": 4}, {"read": "pages"}),
        ({"kept_channels": 24}, {"kept_channels": 24}),
    ],
    ids=str,
)  # fmt: skip
def test_complete_files_of_before_mean_what_they_meant(changes, means, tmp_path):
    settings = {**BEFORE, **changes}
    assert CacheConfig.from_json(file_of(tmp_path / "cache.json", settings)) == CacheConfig(**means)
    assert CacheConfig.from_dict(settings) == CacheConfig(**means)


@pytest.mark.parametrize(
    ("settings", "means"),
    [
        ({}, {"ratio": 0.3}),
        ({"seed": 3}, {"ratio": 0.3, "seed": 3}),
        ({"quantize": INT4}, {"ratio": 0.3, "quantize": "int4"}),
        ({"read": {"by": "pages"}}, {"read": "pages"}),
        ({"read": "sampling"}, {"read": "sampling"}),
        ({"read": {"by": "channels"}}, {"read": "channels", "ratio": 0.3}),
        ({"bits": 2.0}, {"bits": 2.0}),
        ({"kept_channels": 8}, {"kept_channels": 8}),
    ],
    ids=str,
)
def test_a_ratio_that_a_file_of_before_leaves_out_is_the_usual_one(settings, means, tmp_path):
    path = file_of(tmp_path / "cache.json", settings)
    assert CacheConfig.from_json(path) == CacheConfig(**means)


def test_files_of_today_mean_what_the_call_means(tmp_path):
    for settings in ({}, {"quantize": INT4}, {"recent_window": 8}):
        again = CacheConfig.from_json(file_of(tmp_path / "cache.json", settings, version="2"))
        assert again == CacheConfig.from_dict(settings)
    assert CacheConfig.from_json(file_of(tmp_path / "cache.json", {}, version="2")).bits == Bits(2.25)
    assert json.loads(CacheConfig().to_json())["version"] == "2"
    with pytest.raises(OptionError, match="has format version '3', and this grace_opt reads '2'"):
        CacheConfig.from_json(file_of(tmp_path / "cache.json", {}, version="3"))


# Bits at the ends


@pytest.mark.parametrize("asked", [{"bits": 16}, {"bits": 8.5}, {"key_bits": 2, "value_bits": 12}], ids=str)
def test_more_bits_than_a_code_has_are_told_of_at_the_call(asked, pocket):
    model, inputs = pocket
    name = list(asked)[-1]
    with pytest.warns(UserWarning, match=rf"^{name}=.*: no code has more than 8 bits.*; write {name}=8") as said:
        block = attach(model, **asked, basis=POCKET_BASIS)
    assert [each.filename for each in said] == [__file__]
    with warnings.catch_warnings(), block as attached:  # and not again for every prompt
        warnings.simplefilter("error")
        model.generate(**inputs, max_new_tokens=1)
    assert attached.cache.memory_report().value_bits < 8.5


@pytest.mark.parametrize("bits", [0.5, 2.25, 8, np.float64(8)])
def test_as_many_bits_as_a_code_has_are_nothing_to_tell_of(bits):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CacheConfig(bits=bits)


@given(st.floats(max_value=0) | st.floats(min_value=16, exclude_min=True))
def test_other_numbers_of_bits_are_refused(bits):
    for asked in ({"bits": bits}, {"key_bits": bits, "value_bits": 2}, {"key_bits": 2, "value_bits": bits}):
        with pytest.raises(OptionError, match=r"_?bits=.*: give a number > 0 and <= 16"):
            CacheConfig(**asked)


# Caches of others in the block


def test_a_cache_that_is_not_ours_is_told_of_once_in_each_block(pocket):
    model, inputs = pocket
    for _ in range(2):
        with attach(model, ratio=0.3), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                model.generate(**inputs, past_key_values=DynamicCache(config=model.config), max_new_tokens=1)
            model.generate(**inputs, max_new_tokens=1)
        (line,) = [str(each.message) for each in said if each.filename == __file__]
        assert line.startswith("past_key_values is a DynamicCache, which generate() uses as it is, without grace_opt")
    with attach(model, ratio=0.3) as attached, warnings.catch_warnings():
        warnings.simplefilter("error")  # what it says to write works
        cache = attached.new_cache()
        model.generate(**inputs, past_key_values=cache, max_new_tokens=1, use_cache=True)
    assert cache.memory_report().pruned_tokens > 0


# Other ways in


def test_tune_measures_what_was_asked_first():
    names = [one.name for one in default_candidates(700, bits=[3, 2])]
    assert names[:2] == ["bits 3", "bits 2"]
    for one in default_candidates(700):
        if one.config is not None:  # what it shows is what it measures
            assert eval(f"CacheConfig({one.words})", vars(transformers) | globals()) == one.config


def test_the_harness_takes_settings_alone():
    settings, _ = split_arguments({"evict": {"name": "snapkv", "budget": 99}, "quantize": {"keys": 4}}, [])
    assert CacheConfig(**settings).channels.ratio == 0.0
