"""Settings as objects: they mean what the keywords mean, and the files of before are read and written bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grace_opt.hf
from grace_opt.errors import OptionError
from grace_opt.hf import (
    H2O,
    Bits,
    CacheConfig,
    Channels,
    CompressedCache,
    Quantize,
    SnapKV,
    TopTokens,
    attach,
    calibrate,
)
from grace_opt.solvers import TabuOptions
from tests.hf.test_config import BESIDE_BITS, EVICTIONS, GIVEN_BITS, METHODS, SETTINGS, SIZES

BEFORE = [json.loads(line) for line in (Path(__file__).parent / "data/settings.jsonl").read_text().splitlines()]
WINDOWS = {name: SETTINGS[name] for name in BESIDE_BITS}


@pytest.mark.parametrize("row", BEFORE, ids=lambda row: json.dumps(row["said"]))
def test_what_keywords_wrote_into_a_file_they_write_today(row):
    config = CacheConfig(**row["said"])
    assert json.dumps(config.to_dict()) == json.dumps(row["file"])  # in the same order, too
    assert CacheConfig.from_dict(row["file"]) == config


class TestKeywords:
    @settings(max_examples=50, deadline=None)
    @given(GIVEN_BITS, st.fixed_dictionaries({}, optional=WINDOWS))
    def test_of_bits_make_the_object(self, bits, others):
        assert CacheConfig(**bits, **others) == CacheConfig(Bits(**bits), **others)
        assert CacheConfig(**bits, **others) == CacheConfig(bits=Bits(**bits), **others)

    @settings(max_examples=50, deadline=None)
    @given(METHODS, SIZES, EVICTIONS, st.fixed_dictionaries({}, optional={"seed": SETTINGS["seed"], **WINDOWS}))
    def test_of_channels_make_the_object(self, method, size, evict, others):
        channels = Channels(**method, **size, seed=others.get("seed", 0))
        beside = {name: value for name, value in others.items() if name != "seed"}
        assert CacheConfig(**method, **size, evict=evict, **others) == CacheConfig(channels, evict=evict, **beside)

    def test_the_usual_objects_are_what_is_usual(self):
        assert CacheConfig(Bits()) == CacheConfig() == CacheConfig(bits=2.25)
        assert CacheConfig(Channels()) == CacheConfig("grace") == CacheConfig(ratio=0.3)
        assert CacheConfig(Channels(kept_channels=8)) == CacheConfig(kept_channels=8)
        assert CacheConfig(Channels(0.5, TabuOptions(iterations=5))) == CacheConfig(TabuOptions(iterations=5), 0.5)
        assert CacheConfig(Quantize(4)) == CacheConfig(quantize="int4") == CacheConfig(Quantize())
        assert CacheConfig(TopTokens()) == CacheConfig(read="pages")
        assert CacheConfig(TopTokens(by="channels")) == CacheConfig(Channels(), read="channels")
        assert CacheConfig(SnapKV(0.5)) == CacheConfig(evict=SnapKV(0.5))

    def test_go_to_every_call(self, tiny):
        model, chosen = tiny(), Bits(3, basis="none")
        expected = CacheConfig(bits=3, basis="none", evict=SnapKV(0.5), recent_window=8)
        assert CompressedCache(model, chosen, evict=SnapKV(0.5), recent_window=8).config == expected
        with attach(model, chosen, evict=SnapKV(0.5), recent_window=8) as attached:
            model.generate(torch.arange(3, 60)[None], max_new_tokens=1)
        assert attached.cache.config == expected
        ids = [torch.arange(3, 40)]
        found = calibrate.masks(model, None, ids, Channels(0.5, "think"))
        assert torch.equal(found.pruned, calibrate.masks(model, None, ids, "think", 0.5).pruned)
        with pytest.raises(OptionError, match=r"and bits= drops none: write calibrate\.basis"):
            calibrate.masks(model, None, ids, Bits(2))
        with pytest.raises(OptionError, match="the channels do not depend on evict; give them to the cache"):
            calibrate.masks(model, None, ids, SnapKV(0.5))


@pytest.mark.parametrize(
    ("setting", "others", "says"),
    [
        (Bits(2), {"ratio": 0.3}, r"^bits= gives every channel .* does not go together with ratio; leave it out"),
        (Bits(2), {"seed": 0}, r"^bits= gives every channel .* does not go together with seed; leave it out"),
        (Bits(2), {"channels": Channels(0.3)}, r"^bits= gives every .* does not go together with ratio; leave it out"),
        (Bits(2), {"channels": Channels(kept_channels=3)}, r"does not go together with ratio, kept_channels; leave"),
        (Bits(total_bytes=9), {"quantize": Quantize(4)}, r"^bits= gives .* does not go together with quantize"),
        (Bits(2), {"basis": "none"}, r"^basis beside Bits\(\.\.\.\): write Bits\(\.\.\., basis=\.\.\.\)"),
        (Bits(2), {"key_bits": 2, "value_bits": 3}, r"^key_bits, value_bits beside Bits"),
        (Bits(2), {"bits": 3}, r"^bits is given twice: Bits\(bits=2"),
        (Bits(2), {"read": "pages"}, r"^read= goes without bits="),
        (Channels(0.3), {"bits": 2.25}, r"^bits= gives every channel .* does not go together with ratio"),
        (Channels(0.3), {"ratio": 0.5}, r"^ratio beside Channels\(\.\.\.\): write Channels\(\.\.\., ratio=\.\.\.\)"),
        (Channels(0.3), {"method": "think"}, r"^method beside Channels"),
        (Channels(0.3), {"options": {"start": "think"}}, r"^options beside Channels"),
        (Channels(0.3), {"basis": "none"}, r"^basis='none' is for bits=: write bits=2.25 as well"),
        ("think", {"method": "mies"}, r"^method is given twice: 'think' and 'mies'"),
        (SnapKV(99), {"evict": "h2o"}, r"^evict is given twice"),
        (CacheConfig(), {}, r"^a CacheConfig has all settings: write config=, and no others"),
        (None, {"channels": 0.3}, r"^channels=0\.3: write Channels\(ratio=0\.3\)"),
        (0.3, {}, r"^method=0\.3: write a name, for instance \"grace\"; the share to prune is .* ratio="),
        (Bits, {}, r"^bits=<class .*: give a number > 0"),
        (SnapKV, {}, r"^evict=<class .*: write an eviction, for instance SnapKV"),
    ],
    ids=str,
)  # fmt: skip
def test_what_contradicts_an_object_is_refused_by_name(setting, others, says, tiny):
    with pytest.raises(OptionError, match=says):
        CacheConfig(setting, **others)
    with pytest.raises(OptionError, match=says):
        CompressedCache(tiny().config, setting, **others)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Channels(0.3, kept_channels=8), r"^ratio=0\.3 and kept_channels=8: write one of the two"),
        (lambda: Channels("think"), r"^ratio='think': give one number in \[0, 1\)"),
        (lambda: Channels(sparsity=0.3), r"^Channels has no sparsity; .* For sparsity, write ratio="),
        (lambda: Channels(start="think"), r"^Channels has no start; .* Give the options of a method as options="),
        (lambda: Channels(options={"seed": 3}), r"^options has seed, which is no option of a method: write seed="),
        (lambda: Bits(keys=3), r"^Bits has no keys; .* For keys, write key_bits="),
        (lambda: Bits(2, 3), r"^bits and key_bits given: write bits= alone"),
        (lambda: Bits(2, trellis=None), r"^trellis=None: give True or False"),
        (lambda: Quantize(4, keys=8), r"^bits=4 is for keys and values alike; leave out keys, or bits"),
        (lambda: Quantize("4"), r"^bits='4': give an integer >= 1, or None; .*quanto"),
        (lambda: Quantize(4, 2), r"^Quantize got 2 arguments by position; its arguments are bits, group_size"),
        (lambda: Quantize(nbits=4), r"^Quantize has no nbits; .* write bits=4, or keys=4 and values=4"),
    ],
)
def test_objects_check_themselves(make, says):
    with pytest.raises(OptionError, match=says):
        make()


def test_what_is_quantised_is_what_is_named():
    assert [(each.keys, each.values) for each in (Quantize(), Quantize(8), Quantize(keys=3), Quantize(values=2))] == [
        (4, 4), (8, 8), (3, None), (None, 2)
    ]  # fmt: skip
    assert Quantize.from_dict({"values": 2}) == Quantize(keys=4, values=2)  # as files have meant it


@pytest.mark.parametrize("name", ["ratio", "method", "seed", "observation_window", "basis", "trellis", "key_bits"])
def test_settings_that_moved_into_an_object_say_where_they_are(name):
    config = CacheConfig()
    of = "channels" if hasattr(config.channels, name) else "bits"
    with pytest.raises(OptionError, match=rf"^CacheConfig\.{name} has another name now: write config\.{of}\.{name}\.$"):
        getattr(config, name)
    assert not hasattr(config, name)
    with pytest.raises(AttributeError, match="'CacheConfig' object has no attribute 'ratios_'"):
        config.ratios_  # noqa: B018
    with pytest.raises(OptionError, match=r"grace_opt\.hf\.Quantization has another name now: write grace_opt\.hf\.Qu"):
        grace_opt.hf.Quantization  # noqa: B018


@pytest.mark.parametrize("setting", [Bits(2), Channels(kept_channels=8), Quantize(4), TopTokens(), H2O(64)], ids=repr)
def test_copies_are_equal_and_one_thing_can_be_changed(setting):
    config = CacheConfig(setting)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config  # noqa: S301
    changed = dataclasses.replace(config, recent_window=8)
    assert dataclasses.replace(changed, recent_window=32) == config != changed
    assert hash(config) == hash(copy.copy(config))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            Channels(0.3),
            Quantize(4),
            r"Channels\(\.\.\.\) and Quantize\(\.\.\.\) both come first, .*: write quantize=Quantize",
        ),
        (Bits(2.25), SnapKV(0.5), "write evict=SnapKV"),
        (Bits(2.25), Channels(0.3), "write channels=Channels"),
    ],
    ids=str,
)
def test_a_second_setting_needs_its_name(first, second, says):
    with pytest.raises(OptionError, match=says):
        CacheConfig(first, second)
