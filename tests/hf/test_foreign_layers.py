"""Layers of our cache that are transformers' own: whatever is done to a cache is done to them, or refused by name."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, cache_utils

from grace_opt.errors import CacheError
from grace_opt.hf import CompressedCache, Quantize, SnapKV
from grace_opt.hf.engine import saving
from grace_opt.hf.engine.in_step import InStep
from grace_opt.hf.models.foreign_layers import states_of
from grace_opt.hf.stores.counting import storages
from tests.hf.conftest import SIZES, build
from tests.hf.every_family import kinds
from tests.hf.every_family import tiny as tiny_of
from tests.hf.test_saving import same_tensors

WINDOWS = {"ratio": 0.3, "recent_window": 8, "observation_window": 6}
BITS = {"bits": 3.0, "basis": "none"}
needs_states = pytest.mark.skipif(
    not hasattr(cache_utils, "LinearAttentionLayer"), reason="this transformers keeps states in other caches"
)
#: Selective state spaces, gated delta rules, convolutions, and layers without anything.
HYBRIDS = ("Jamba", "Qwen3Next", "Lfm2", "NemotronH")
#: Windows in two of three layers, the second of them full.
WINDOWED = {"num_hidden_layers": 3, "layer_types": ("sliding_attention", "full_attention", "sliding_attention")}
WINDOWED |= {"sliding_window": 12, "use_sliding_window": True}


@functools.cache
def hybrid(name):
    if name == "Lfm2":
        torch.manual_seed(0)
        sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
        config = transformers.Lfm2Config(**sizes, layer_types=["conv", "full_attention"])
        model = transformers.Lfm2ForCausalLM(config).eval()
    else:
        model = tiny_of(kinds()[f"{name}ForCausalLM"])
    model.set_attn_implementation("grace_sdpa")
    return model


def tokens(rows, count, seed=0):
    return torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, cache, ids):
    """The logits after each token, fed one by one."""
    return torch.cat([model(token, past_key_values=cache).logits for token in ids.split(1, dim=1)], dim=1)


@torch.no_grad()
def filled(model, ids, **settings):
    cache = CompressedCache(model, **(settings or WINDOWS))
    model(ids, past_key_values=cache)
    return cache


def with_layers(*layers):
    """A cache with these layers and one of ours."""
    config = LlamaConfig(num_hidden_layers=len(layers) + 1)
    cache = CompressedCache(config, ratio=0.3, dense_layers=len(layers))
    cache.layers[: len(layers)] = layers
    cache._in_step = InStep(cache.layers, config)
    return cache


@needs_states
@pytest.mark.slow
@pytest.mark.parametrize("settings", [WINDOWS, BITS], ids=["ratio", "bits"])
@pytest.mark.parametrize("name", HYBRIDS)
class TestHybrids:
    def test_saved_in_the_middle_go_on_as_before(self, name, settings, tmp_path):
        model, later = hybrid(name), tokens(2, 9, seed=1)
        cache = filled(model, tokens(2, 200), **settings)
        logits(model, cache, later[:, :3])
        cache.save(tmp_path / "cache")
        loaded = CompressedCache.load(tmp_path / "cache", model)
        assert [states_of(layer).keys() for layer in loaded.layers] == [states_of(x).keys() for x in cache.layers]
        assert any(states_of(layer) for layer in loaded.layers)
        assert torch.equal(logits(model, loaded, later[:, 3:]), logits(model, cache, later[:, 3:]))
        loaded.save(tmp_path / "again")
        cache.save(tmp_path / "cache")
        assert same_tensors(tmp_path / "again", tmp_path / "cache")

    def test_rows_are_repeated_and_selected_everywhere(self, name, settings):
        model, ids, later = hybrid(name), tokens(2, 200), tokens(2, 5, seed=1)
        cache = filled(model, ids, **settings)
        expected = logits(model, copy.deepcopy(cache), later)
        cache.batch_repeat_interleave(2)  # 0 0 1 1
        cache.batch_select_indices(torch.tensor([False, True, True, True]))  # 0 1 1
        cache.batch_select_indices(torch.tensor([2, 0]))  # 1 0
        found = logits(model, cache, later.flip(0)).flip(0)
        assert torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        with pytest.raises(IndexError):
            cache.batch_select_indices(torch.tensor([2]))

    def test_are_cropped_or_say_what_keeps_them_from_it(self, name, settings):
        model, later = hybrid(name), tokens(1, 3, seed=1)
        cache = filled(model, tokens(1, 200), **settings)
        before = copy.deepcopy(cache)
        says = "last inputs of a convolution alone" if name == "Lfm2" else "has recurrent states, from which no token"
        with pytest.raises(CacheError, match=rf"layer 0 \(LinearAttentionLayer\) .*{says}.*copy\.deepcopy\(cache\)"):
            cache.crop(-1)
        cache.crop(0)
        assert torch.equal(logits(model, cache, later), logits(model, before, later))


@needs_states
@pytest.mark.parametrize("name", ["Jamba", "NemotronH"])
def test_states_are_counted_by_the_report(name):
    cache = filled(hybrid(name), tokens(2, 40))
    states = [states_of(layer) for layer in cache.layers]
    assert cache.memory_report().other_bytes == sum(state.nbytes for each in states for state in each.values()) > 0


@needs_states
def test_more_inputs_of_convolutions_than_the_next_step_needs_are_not_saved(tmp_path):
    model = hybrid("Lfm2")
    cache = CompressedCache(model, **WINDOWS, prompt_length=200)
    if not hasattr(cache.layers[0], "activate_past_recording"):
        pytest.skip("this version of transformers never keeps more")
    cache.activate_past_recording()
    ids, later = tokens(1, 200), tokens(1, 5, seed=1)
    model(ids, past_key_values=cache)
    size = model.config.conv_L_cache
    assert cache.layers[0].conv_states[0].shape[-1] > size
    assert {state.shape[-1] for layer in cache.layers for state in states_of(layer).values()} == {size}
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model)
    cache.crop(0)
    assert torch.equal(logits(model, loaded, later), logits(model, cache, later))


@needs_states
def test_states_that_were_reset_are_none(tmp_path):
    model = hybrid("Jamba")
    cache = filled(model, tokens(2, 40))
    cache.reset()
    cache.save(tmp_path / "cache")
    loaded = CompressedCache.load(tmp_path / "cache", model)
    assert not any(states_of(layer) for layer in (*cache.layers, *loaded.layers))
    found, expected = (logits(model, each, tokens(2, 5, seed=3)) for each in (loaded, cache))
    assert torch.equal(found, expected)


@needs_states
@pytest.mark.parametrize("name", ["Jamba", "Lfm2"])
def test_damaged_states_are_told_at_loading(name, tmp_path):
    model, path = hybrid(name), tmp_path / "cache"
    filled(model, tokens(2, 40)).save(path)
    about, tensors = saving.FILE_FORMAT.read(path)
    names = [key for key in tensors if "_states." in key]
    assert names
    for key in names:
        state = tensors[key]
        for other in (None, state[:1].contiguous(), state.to(torch.int64), state.flatten(), state[:, :0].contiguous()):
            rest = {each: tensor for each, tensor in tensors.items() if each != key}
            saving.FILE_FORMAT.write(path, rest if other is None else {**rest, key: other}, about)
            with pytest.raises(CacheError, match=r"layer 0|layers of the file differ"):
                CompressedCache.load(path, model)
    described = about["layers"][0]
    for states in (None, [], [3], ["keys"], ["conv_states.1"], [*described["states"], "conv_states.7"], {"a": 1}):
        changed = [{**described, "states": states}, *about["layers"][1:]]
        saving.FILE_FORMAT.write(path, tensors, {**about, "layers": changed})
        with pytest.raises(CacheError, match="layer 0"):
            CompressedCache.load(path, model)


@needs_states
def test_a_convolution_that_may_be_cropped_is_saved_and_cropped(tmp_path):
    """As assisted decoding does: more inputs are kept than the next step needs, and fewer in a short prompt."""
    model, later = hybrid("Lfm2"), tokens(1, 6, seed=1)
    for length in (2, 40):
        cache, plain = (CompressedCache(model, prompt_length=length, **WINDOWS) for _ in range(2))
        cache.activate_past_recording()
        if not getattr(cache.layers[0], "record_past", False):
            pytest.skip("this transformers crops no convolution")
        with torch.no_grad():
            for each in (cache, plain):
                model(tokens(1, length), past_key_values=each)
            cache.crop(0)
            model(later[:, :4], past_key_values=cache)
        cache.crop(-2)
        logits(model, plain, later[:, :2])
        cache.save(tmp_path / "cache")
        loaded = CompressedCache.load(tmp_path / "cache", model)
        assert loaded.get_seq_length() == length + 2
        found, expected = (logits(model, each, later[:, 2:]) for each in (loaded, plain))
        assert torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@needs_states
def test_a_crop_that_is_refused_changes_no_layer_of_any_kind():
    """A convolution is cropped in place, before a window refuses."""
    convolution, window = cache_utils.LinearAttentionLayer(), cache_utils.DynamicSlidingWindowLayer(sliding_window=4)
    if not hasattr(convolution, "record_past"):
        pytest.skip("this transformers crops no convolution")
    cache = with_layers(convolution, window)
    convolution.activate_past_recording()
    convolution.update_conv_state(torch.randn(1, 3, 9), conv_kernel_size=4)
    window.update(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4))
    before = convolution.conv_states[0].clone()
    with pytest.raises(CacheError, match="a layer with a sliding window"):
        cache.crop(-2)
    assert torch.equal(convolution.conv_states[0], before)


def fill_by_hand(layer):
    """Give a layer 9 tokens of two sequences, by whatever it has for that."""
    keys = torch.randn(2, 2, 9, 4)
    if hasattr(layer, "update_conv_state"):
        layer.update_conv_state(torch.randn(2, 3, 4))
        layer.update_recurrent_state(torch.randn(2, 3, 4))
    if hasattr(layer, "update_indexer"):
        layer.update_indexer(torch.randn(2, 9, 4))
    if type(layer).__name__ != "DummyLayer" and hasattr(layer, "update"):
        layer.update(keys, keys + 1)


def kinds_of_layers():
    """Every class that this transformers, or one of its models, may put into a cache, by name."""
    found = dict(getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", {}))
    found |= {"full": cache_utils.DynamicLayer, "sliding": cache_utils.DynamicSlidingWindowLayer}
    return {kind.__name__: kind for kind in found.values() if kind.__module__ == cache_utils.__name__}


@pytest.mark.parametrize("name", sorted(kinds_of_layers()))
def test_everything_done_to_a_cache_suits_every_kind_of_layer(name, tmp_path):
    """Nothing ends in an AttributeError or the like: it is done, or refused by name, and then nothing has changed."""
    cache = with_layers(kinds_of_layers()[name](**({"sliding_window": 4} if "Sliding" in name else {})))
    fill_by_hand(cache.layers[0])
    keys = torch.randn(2, 2, 9, 4)
    cache.layers[1].update(keys, keys + 1)
    cache.layers[1].attended()
    assert cache.memory_report().other_bytes == sum(storages(vars(cache.layers[0])).values())
    for change in (lambda each: each.crop(-1), lambda each: each.crop(0), lambda each: each.save(tmp_path / "cache")):
        own = copy.deepcopy(cache)
        try:
            change(own)
        except CacheError as error:
            said = str(error)
        else:
            continue
        assert "sliding window" in said or name in said
        held, before = (storages(vars(each.layers[0])).values() for each in (own, cache))
        assert sorted(held) == sorted(before)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([1, 5]))
    cache.reorder_cache(torch.tensor([1, 0]))
    held = list(states_of(cache.layers[0]).values())
    held += [part for part in (getattr(cache.layers[0], "keys", None),) if part is not None]
    assert {len(part) for part in held} <= {2}
    cache.reset()
    assert cache.get_seq_length() == 0


def test_other_kinds_cannot_be_saved_and_say_what_to_do(tmp_path):
    class Own(cache_utils.DynamicLayer):
        pass

    cache = with_layers(Own())
    with pytest.raises(
        CacheError, match=r"layer 0 is a Own, which cannot be saved; layers with .*copy\.deepcopy\(cache\)"
    ):
        cache.save(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


class TestWindows:
    """What is needed of a prompt's last tokens is copied when it ends: a stored prompt is small."""

    @pytest.fixture
    def model(self):
        model = build("Qwen2", **WINDOWED)
        model.set_attn_implementation("grace_sdpa")
        return model

    @pytest.mark.parametrize("settings", [WINDOWS, BITS], ids=["ratio", "bits"])
    @pytest.mark.parametrize("chunks", [1, 3])
    def test_are_small_after_the_prompt(self, chunks, settings, model, tmp_path):
        ids, later = tokens(2, 240), tokens(2, 15, seed=1)
        cache = CompressedCache(model, prompt_length=240, **settings)
        reference = DynamicCache(config=model.config)
        with torch.no_grad():
            for part in ids.chunk(chunks, dim=1):
                model(part, past_key_values=cache)
                model(part, past_key_values=reference)
        window = 2 * 2 * 11 * 16 * 4  # sequences, KV heads, tokens before the next one, width, bytes
        for held in (cache, copy.deepcopy(cache)):
            for layer in (held.layers[0], held.layers[2]):
                assert layer.keys.untyped_storage().nbytes() == layer.values.untyped_storage().nbytes() == window
            assert held.memory_report().other_bytes == 4 * window + 2 * 8  # and the width of the window
        for number in (0, 2):
            assert torch.equal(cache.layers[number].keys, reference.layers[number].keys)
        cache.save(tmp_path / "cache")
        loaded = CompressedCache.load(tmp_path / "cache", model)
        assert torch.equal(logits(model, loaded, later), logits(model, cache, later))

    def test_that_may_be_cropped_are_saved_as_what_the_next_token_needs(self, model, tmp_path):
        later = tokens(1, 4, seed=1)
        cache = CompressedCache(model, prompt_length=40, **WINDOWS)
        if not hasattr(cache, "activate_past_recording"):
            pytest.skip("this transformers crops no full window")
        cache.activate_past_recording()
        with torch.no_grad():
            model(tokens(1, 40), past_key_values=cache)
        cache.save(tmp_path / "cache")
        loaded = CompressedCache.load(tmp_path / "cache", model)
        assert loaded.layers[0].keys.shape[2] == 11
        assert torch.equal(logits(model, loaded, later), logits(model, cache, later))

    @pytest.mark.parametrize("removed", [5, 30])
    def test_a_cropped_layer_keeps_no_more_than_it_shows(self, removed):
        model = build("Llama")
        model.set_attn_implementation("grace_sdpa")
        cache = filled(model, tokens(2, 40), dense_layers=1, **WINDOWS)
        cache.crop(-removed)
        layer = cache.layers[0]
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes == 2 * 2 * (40 - removed) * 16 * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"evict": SnapKV(budget=24, window=4)},
        {"quantize": Quantize(keys=4, values=4, group_size=8)},
        {"evict": SnapKV(budget=24, window=4), "quantize": Quantize(keys=4, values=4, group_size=8)},
        {"ratio": 0.5},
    ],
    ids=["evicted", "quantised", "both", "pruned"],
)
def test_nor_do_our_own_layers_keep_the_prompt_alive(settings):
    """Its values, of which a slice is the tail, stayed in memory until the next step."""
    model = build("Llama")
    model.set_attn_implementation("grace_sdpa")
    if "quantize" in settings:
        pytest.importorskip("optimum.quanto")
    report = filled(model, tokens(2, 240), **(WINDOWS | settings)).memory_report()
    assert report.spare_bytes == 0
