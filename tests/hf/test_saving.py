"""A saved cache is the cache: the same bits, the same next tokens, in another process too; and what is refused."""

from __future__ import annotations

import copy
import importlib.util
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grace_opt._util import tensor_files
from grace_opt.attention.masks import ChannelMask
from grace_opt.attention.provider import MaskProvider
from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import CacheConfig, CompressedCache, Quantize, SnapKV, attach
from grace_opt.hf.engine import saving
from grace_opt.hf.engine.layer import PrunedKeyLayer
from grace_opt.hf.stores.packed.tokens import QuantizedTokens
from tests import children

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).parent / "data"
WINDOWS = {"recent_window": 8, "observation_window": 6}
BITS = Quantize(keys=4, values=4, group_size=8)
SNAP = SnapKV(budget=24, window=4)
MIXED = {"use_sliding_window": True, "sliding_window": 12, "layer_types": ("sliding_attention", "full_attention")}
#: What is saved: settings, tokens that are cached by then, changes to the model.
KINDS = {
    "plain": ({}, 44, {}),
    "right after the prompt": ({}, 40, {}),
    "sinks": ({"sink_tokens": 3}, 44, {}),
    "evicted": ({"evict": SNAP}, 44, {}),
    "quantised": ({"quantize": BITS}, 44, {}),
    "tail block": ({"tail_block": 3}, 47, {}),
    "all at once": ({"sink_tokens": 3, "evict": SNAP, "quantize": BITS, "tail_block": 8}, 51, {}),
    "a ratio per layer": ({"ratio": [0.25, 0.75]}, 44, {}),
    "a dense layer": ({"dense_layers": 1}, 44, {}),
    "sliding and full": ({}, 44, MIXED),
    "empty": ({}, 0, {}),
    "short and dense": ({"recent_window": 40}, 40, {}),
}


def go_on_elsewhere(folder):
    """Load models and caches from a folder, go on with each, and write logits and new saves beside."""
    torch.set_num_threads(1)
    for which in ("full", "mixed"):
        model = AutoModelForCausalLM.from_pretrained(folder / which, attn_implementation="grace_sdpa").eval()
        for path in sorted(folder.glob(f"{which} *.safetensors")):
            cache = CompressedCache.load(path, model)
            cache.save(folder / f"again {path.name}")
            save_file({"logits": go_on(model, cache)}, folder / f"logits {path.name}")


def same_tensors(path, other):
    """Whether two files hold the same tensors, bit for bit."""
    one, two = load_file(path), load_file(other)
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def kind(name):
    if KINDS[name][0].get("quantize") and importlib.util.find_spec("optimum") is None:
        return pytest.param(name, marks=pytest.mark.skip("optimum-quanto is not installed"))
    return name


def sequence():
    """Two sequences of 56 tokens, the second one padded with 13 loud tokens, and their mask."""
    ids = torch.randint(3, 97, (2, 56), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    return ids.masked_fill(mask == 0, 50), mask


@torch.no_grad()
def go_on(model, cache, until=56):
    """Feed what the cache lacks of the sequence: the prompt of 40 at once, then one by one; the logits after each."""
    ids, mask = sequence()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, start = [], cache.get_seq_length()
    while start < until:
        stop = max(start + 1, 40)
        part = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        logits.append(model(ids[:, start:stop], past_key_values=cache, **part).logits[:, -1:])
        start = stop
    return torch.cat(logits, dim=1).contiguous() if logits else None


@pytest.fixture
def filled(tiny):
    """`filled("evicted")`: a model, and its cache as it will be saved."""

    def make(name="plain", source=None, **more):
        settings, tokens, changes = KINDS[name]
        model = tiny("Qwen2" if changes else "llama", **changes)
        drops = {} if {"provider", "masks"} & more.keys() else {"method": "grace"}
        cache = CompressedCache(source or model, **{**drops, **WINDOWS, **settings, **more})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # one kind is short on purpose
            go_on(model, cache, tokens)
        return model, cache

    return make


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


def tensors_of(cache):
    """Every number that a cache holds, by name."""
    found = {}
    for number, layer in enumerate(cache.layers):
        parts = {}
        if isinstance(layer, PrunedKeyLayer):
            if layer.tail is not None:
                parts = {"tail keys": layer.tail.keys, "tail values": layer.tail.values}
            if layer.compressed is not None:
                parts.update(layer.compressed.parts())
        elif layer.is_initialized:
            parts = {"keys": layer.keys, "values": layer.values}
        for name, part in parts.items():
            several = part.tensors() if isinstance(part, QuantizedTokens) else {"": part}
            found.update({f"{number} {name} {key}": tensor for key, tensor in several.items()})
    return found


def same_bits(found, expected):
    one, other = tensors_of(found), tensors_of(expected)
    assert one.keys() == other.keys()
    return all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(one[name].contiguous().view(torch.uint8), other[name].contiguous().view(torch.uint8))
        for name in one
    )


class TestRoundTrip:
    @pytest.mark.parametrize("name", [kind(name) for name in KINDS])
    def test_gives_the_same_bits_and_next_tokens(self, name, filled, path, close):
        model, cache = filled(name)
        cache.save(path)
        loaded = CompressedCache.load(path, model)
        assert same_bits(loaded, cache)
        assert loaded.config == cache.config
        assert loaded.prunable_layers == cache.prunable_layers
        assert loaded.get_seq_length() == cache.get_seq_length() == KINDS[name][1]
        assert [layer.get_seq_length() for layer in loaded.layers] == [layer.get_seq_length() for layer in cache.layers]
        found, expected = go_on(model, loaded), go_on(model, cache)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        assert close(found, expected)
        assert {n: t.shape for n, t in tensors_of(loaded).items()} == {n: t.shape for n, t in tensors_of(cache).items()}

    @pytest.mark.slow
    def test_gives_them_in_another_process(self, filled, tmp_path, close):
        expected = {}
        for number, name in enumerate(KINDS):
            if not isinstance(kind(name), str):
                continue
            model, cache = filled(name)
            which = "mixed" if KINDS[name][2] else "full"
            if not (tmp_path / which).exists():
                model.save_pretrained(tmp_path / which)
            file = f"{which} {number}.safetensors"
            cache.save(tmp_path / file)
            expected[file] = name, go_on(model, cache)
        children.run(go_on_elsewhere, tmp_path)
        for file, (name, logits) in expected.items():
            found = load_file(tmp_path / f"logits {file}")["logits"]
            assert torch.equal(found.argmax(-1), logits.argmax(-1)), name
            assert close(found, logits), name
            assert same_tensors(tmp_path / file, tmp_path / f"again {file}"), name

    def test_a_file_holds_no_more_than_the_cache(self, filled, path):
        """Views are written as what they show, without room to grow."""
        _, cache = filled()
        cache.save(path)
        numbers = sum(tensor.nbytes for tensor in tensors_of(cache).values())
        assert sum(tensor.nbytes for tensor in load_file(path).values()) == numbers
        assert path.stat().st_size < numbers + 5000

    def test_saving_changes_nothing(self, filled, path):
        model, cache = filled()
        before = copy.deepcopy(cache)
        cache.save(path)
        assert same_bits(cache, before)
        assert torch.equal(go_on(model, cache), go_on(model, before))

    def test_a_loaded_cache_is_cropped_re_ordered_and_reset_like_the_first(self, filled, path):
        model, cache = filled("sinks")
        cache.save(path)
        loaded = CompressedCache.load(path, model)
        for each in (cache, loaded):
            each.reorder_cache(torch.tensor([1, 0]))
            each.crop(-3)
        assert same_bits(loaded, cache)
        loaded.reset()
        assert torch.equal(
            go_on(model, loaded), go_on(model, CompressedCache(model, "grace", **WINDOWS, sink_tokens=3))
        )

    def test_repeated_rows_of_a_quantised_cache_come_back(self, filled, path):
        pytest.importorskip("optimum.quanto")
        model, cache = filled("quantised")
        cache.batch_repeat_interleave(3)
        cache.save(path)
        assert same_bits(CompressedCache.load(path, model), cache)

    def test_of_what_attach_made(self, tiny, prompt, path):
        model = tiny(attention="sdpa")
        with attach(model, "grace", **WINDOWS) as attached:
            model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
        attached.cache.save(path)
        assert same_bits(CompressedCache.load(path, model), attached.cache)

    def test_of_a_declared_prompt_that_was_too_short_prunes_no_later_turn(self, tiny, prompt, continuation, path):
        model = tiny()
        caches = [CompressedCache(model, "grace", prompt_length=6, **WINDOWS)]
        with pytest.warns(UserWarning, match="6 tokens"), torch.no_grad():
            model(prompt[:, :6], past_key_values=caches[0])
        caches[0].save(path)
        caches.append(CompressedCache.load(path, model))
        for cache in caches:
            with torch.no_grad():
                model(continuation, past_key_values=cache)
            assert cache.layers[0].compressed is None
        assert same_bits(*caches)

    def test_bfloat16(self, tiny, prompt, path):
        model = copy.deepcopy(tiny()).to(torch.bfloat16)
        cache = CompressedCache(model, "grace", **WINDOWS)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        cache.save(path)
        loaded = CompressedCache.load(path, model)
        assert loaded.layers[0].compressed.pruned_keys.dtype == torch.bfloat16
        assert same_bits(loaded, cache)

    @pytest.mark.parametrize("name", ["plain", "right after the prompt", "all at once", "short and dense"])
    def test_a_model_in_another_type_is_refused_when_it_goes_on(self, name, filled, prompt, path):
        model, cache = filled(name)
        cache.save(path)
        other = copy.deepcopy(model).to(torch.bfloat16)
        loaded = CompressedCache.load(path, other)
        with torch.no_grad():
            with pytest.raises(
                CacheError, match=r"layer 0 .* holds float32, but the new keys are bfloat16; .*=torch.float32"
            ):
                other(prompt[:, :1], past_key_values=loaded)
            loaded.reset()
            other(prompt, past_key_values=loaded)

    # The declared length of a prompt that has not begun is not in the file: a prompt that then comes in chunks would
    # be pruned after the first one.
    def test_of_an_empty_cache_keeps_the_declared_prompt(self, tiny, path):
        cache = CompressedCache(tiny(), "grace", prompt_length=40, **WINDOWS)
        cache.save(path)
        loaded = CompressedCache.load(path, tiny())
        assert [layer.prompt.declared for layer in loaded.layers] == [40, 40]


class TestModel:
    def test_with_other_weights_is_refused(self, filled, path):
        model, cache = filled()
        cache.save(path)
        torch.manual_seed(9)
        other = type(model)(model.config).eval()
        with pytest.raises(
            CacheError, match=r"saved for another model \(weights: .* in the file, .* in this model\); run the prompt"
        ):
            CompressedCache.load(path, other)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"num_hidden_layers": 3}, "num_hidden_layers: 2 in the file, 3 in this model"),
            ({"num_key_value_heads": 4}, "num_key_value_heads: 2 in the file, 4 in this model"),
            ({"head_dim": 32}, "head_dim: 16 in the file, 32 in this model"),
        ],
    )
    @pytest.mark.parametrize("by", ["model", "configuration"])
    def test_of_another_shape_is_refused(self, by, changes, says, filled, tiny, path):
        _, cache = filled()
        cache.save(path)
        other = tiny(**changes)
        with pytest.raises(CacheError, match=f"saved for another model .*{says}"):
            CompressedCache.load(path, other if by == "model" else other.config)

    def test_of_another_type_is_refused(self, filled, tiny, path):
        filled()[1].save(path)
        with pytest.raises(CacheError, match="model_type: 'llama' in the file, 'qwen2' in this model"):
            CompressedCache.load(path, tiny("qwen2").config)

    def test_with_another_rotary_embedding_is_refused(self, filled, path):
        model, cache = filled()
        cache.save(path)
        assert cache.fingerprint()["rope"] == "default, rope_theta=10000.0"
        for changed, says in (
            ({"rope_type": "default", "rope_theta": 5e5}, "default, rope_theta=500000.0"),
            (
                {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
                r"yarn, factor=4\.0, original_max_position_embeddings=64\.0, rope_theta=10000\.0",
            ),
            (
                {"rope_type": "longrope", "rope_theta": 10000, "long_factor": [1, 1.5], "short_factor": [1.0, 1.0]},
                "longrope, long_factor=2 numbers #[0-9a-f]{8}, rope_theta=10000.0, short_factor=2 numbers #[0-9a-f]{8}",
            ),
        ):
            config = copy.deepcopy(model.config)
            config.rope_parameters = changed
            with pytest.raises(
                CacheError, match=f"rope: 'default, rope_theta=10000.0' in the file, '{says}.*' in this"
            ):
                CompressedCache.load(path, config)

    def test_with_the_same_rotary_embedding_in_other_words_loads(self, filled, path):
        model, cache = filled()
        cache.save(path)
        config = copy.deepcopy(model.config)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000, "factor": None}
        assert same_bits(CompressedCache.load(path, config), cache)

    def test_a_file_from_before_rotary_embeddings_were_noted_still_loads(self, filled, path):
        model, cache = filled()
        cache.save(path)
        about, tensors = saving.FILE_FORMAT.read(path)
        del about["fingerprint"]["rope"]
        saving.FILE_FORMAT.write(path, tensors, about)
        assert same_bits(CompressedCache.load(path, model), cache)

    def test_with_other_active_adapters_is_refused(self, filled, path):
        """As peft keeps them: all weights are the model's, whichever are active."""
        model = copy.deepcopy(filled()[0])
        layer = model.model.layers[0].self_attn.q_proj
        layer.active_adapters, layer.disable_adapters = ["default"], False
        cache = filled(source=model)[1]
        assert cache.fingerprint()["adapters"] == "default"
        cache.save(path)
        assert same_bits(CompressedCache.load(path, model), cache)
        for change in ({"active_adapters": ["other"]}, {"disable_adapters": True}):
            before = {name: getattr(layer, name) for name in change}
            vars(layer).update(change)
            with pytest.raises(CacheError, match=r"adapters: 'default' in the file, '(other)?' in this model"):
                CompressedCache.load(path, model)
            with pytest.raises(CacheError, match=r"adapters were switched .*then: default, now: (other|none)"):
                cache.check_model(model)
            assert cache.fingerprint()["adapters"] == "default"  # those that made its keys
            cache.save(path)
            vars(layer).update(before)
            assert same_bits(CompressedCache.load(path, model), cache)
        layer.active_adapters = ["other"]
        cache.reset()
        cache.check_model(model)
        assert cache.fingerprint()["adapters"] == "other"

    def test_by_its_configuration_loads_whatever_the_weights(self, filled, path):
        model, cache = filled()
        cache.save(path)
        loaded = CompressedCache.load(path, model.config)
        assert same_bits(loaded, cache)
        assert torch.equal(go_on(model, loaded).argmax(-1), go_on(model, cache).argmax(-1))

    def test_is_not_known_to_a_cache_that_was_made_from_the_configuration(self, filled, tiny, path):
        model, cache = filled(source=tiny().config)
        cache.save(path)
        torch.manual_seed(9)
        other = type(model)(model.config).eval()
        assert same_bits(CompressedCache.load(path, other), cache)


class TestSource:
    def test_channels_of_a_provider_load_and_another_prompt_asks_for_it(self, filled, path):
        model, cache = filled(provider=MaskProvider("think", 0.75))
        cache.save(path)
        loaded = CompressedCache.load(path, model)
        assert same_bits(loaded, cache)
        assert torch.equal(go_on(model, loaded).argmax(-1), go_on(model, cache).argmax(-1))
        loaded.reset()
        with pytest.raises(
            CacheError, match=r"write CompressedCache\.load\(path, model, provider=\.\.\.\) or masks=\.\.\."
        ):
            go_on(model, loaded)

    def test_a_provider_given_on_loading_chooses_for_the_next_prompt(self, filled, path):
        provider = MaskProvider("think", 0.75)
        model, cache = filled(provider=provider)
        cache.save(path)
        loaded = CompressedCache.load(path, model, provider=provider)
        loaded.reset()
        go_on(model, loaded, 44)
        assert same_bits(loaded, cache)

    def test_masks_given_on_loading_choose_for_the_next_prompt(self, filled, path):
        pruned = torch.zeros(2, 2, 16, dtype=torch.bool)
        pruned[..., 2:9] = True
        model, cache = filled(masks=ChannelMask(pruned))
        cache.save(path)
        forgetful, loaded = (
            CompressedCache.load(path, model),
            CompressedCache.load(path, model, masks=ChannelMask(pruned)),
        )
        for each in (forgetful, loaded):
            assert same_bits(each, cache)
            each.reset()
        go_on(model, loaded, 44)
        assert same_bits(loaded, cache)
        with pytest.raises(CacheError, match="which are not part of the file"):
            go_on(model, forgetful)

    def test_is_still_asked_for_after_saving_twice(self, filled, path):
        model, cache = filled(provider=MaskProvider("think", 0.75))
        cache.save(path)
        CompressedCache.load(path, model).save(path)
        loaded = CompressedCache.load(path, model)
        assert same_bits(loaded, cache)
        loaded.reset()
        with pytest.raises(CacheError, match="chosen by a provider or by masks"):
            go_on(model, loaded)


class TestFile:
    def test_missing(self, tiny, path):
        with pytest.raises(CacheError, match=r"no saved cache at .*cache\.safetensors"):
            CompressedCache.load(path, tiny())

    @pytest.mark.parametrize("kept", [0, 1, 7, 8, 100, 0.3, 0.6, -1])
    def test_truncated(self, kept, filled, path):
        model, cache = filled()
        cache.save(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
        with pytest.raises(CacheError, match="cannot be read as a saved cache"):
            CompressedCache.load(path, model)

    @pytest.mark.parametrize("content", [b"not a cache", b"{}", b"\x80\x04K\x01.", bytes(1000)])
    def test_something_else(self, content, tiny, path):
        path.write_bytes(content)
        with pytest.raises(CacheError, match=r"truncated or not safetensors"):
            CompressedCache.load(path, tiny())

    def test_a_folder(self, tiny, tmp_path):
        with pytest.raises(CacheError, match="cannot be read as a saved cache"):
            CompressedCache.load(tmp_path, tiny())

    def test_a_channel_mask(self, filled, path):
        model, cache = filled()
        cache.channel_mask().save(path)
        with pytest.raises(CacheError, match="is a safetensors file, but not a saved cache"):
            CompressedCache.load(path, model)

    def test_plain_tensors(self, tiny, path):
        save_file({"pruned_keys": torch.zeros(3)}, path)
        with pytest.raises(CacheError, match="is a safetensors file, but not a saved cache"):
            CompressedCache.load(path, tiny())

    @staticmethod
    def rewrite(path, about=lambda found: found, tensors=lambda found: found):
        """As somebody would who knows the format: the digest fits again."""
        saving.FILE_FORMAT.write(path, tensors(load_file(path)), about(saving.FILE_FORMAT.read(path)[0]))

    def test_of_a_later_version(self, filled, path):
        model, cache = filled()
        cache.save(path)
        with safe_open(path, framework="pt") as file:
            found = file.metadata()
        save_file(load_file(path), path, {**found, "version": "3"})
        with pytest.raises(
            CacheError, match="has format version '3'; this grace_opt reads '1' and '2': update grace_opt, or sav"
        ):
            CompressedCache.load(path, model)

    @pytest.mark.parametrize("name", ["evicted", kind("quantised")])
    def test_of_version_1(self, name, tiny, path):
        """Written by grace_opt before coded caches (data/README.md says how), read, used, and saved as version 2."""
        old, model = DATA / f"cache_v1_{name}.safetensors", tiny()
        with safe_open(old, framework="pt") as file:
            assert file.metadata()["version"] == "1"
        loaded = CompressedCache.load(old, model)
        assert loaded.get_seq_length() == 47
        assert loaded.config == CacheConfig.from_dict(loaded.config.to_dict())
        loaded.save(path)
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["version"] == "2"
        one, other = load_file(old), load_file(path)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        assert go_on(model, loaded).isfinite().all()
        assert loaded.get_seq_length() == 56

    @pytest.mark.parametrize(
        "change", [{"method": "a_later_method"}, {"a_later_setting": 1}, {"ratio": 7}, {"evict": 3}, {"protect": 3}]
    )
    def test_with_settings_that_this_version_does_not_know(self, change, filled, path):
        model, cache = filled()
        cache.save(path)
        self.rewrite(path, lambda about: {**about, "pruning": {**about["pruning"], **change}})
        with pytest.raises(CacheError, match=f"settings that this grace_opt does not know: .*{next(iter(change))}"):
            CompressedCache.load(path, model)

    def test_with_metadata_that_is_no_json(self, filled, path):
        model, cache = filled()
        cache.save(path)
        with safe_open(path, framework="pt") as file:
            found = file.metadata()
        found["about"] = found["about"][:-9]
        found["digest"] = tensor_files.digest(load_file(path), {n: t for n, t in found.items() if n != "digest"})
        save_file(load_file(path), path, found)
        with pytest.raises(CacheError, match="cannot be read as a saved cache"):
            CompressedCache.load(path, model)

    @pytest.mark.parametrize("lost", ["0.tail_keys", "1.pruned_keys", "0.old_values", "1.kept_indices"])
    def test_that_has_lost_a_tensor(self, lost, filled, path):
        model, cache = filled()
        cache.save(path)
        self.rewrite(path, tensors=lambda found: {name: t for name, t in found.items() if name != lost})
        with pytest.raises(CacheError, match=lost):
            CompressedCache.load(path, model)


class TestSaving:
    def test_in_a_folder_that_does_not_exist(self, filled, tmp_path):
        with pytest.raises(CacheError, match=r"cannot write .*: there is no folder"):
            filled()[1].save(tmp_path / "none" / "cache.safetensors")

    @pytest.mark.parametrize("error", [OSError("no space left"), SafetensorError("i/o"), KeyboardInterrupt()])
    def test_that_breaks_off_leaves_the_old_file_and_nothing_else(self, error, filled, path, monkeypatch):
        model, cache = filled()
        cache.save(path)
        before = path.read_bytes()

        def half(tensors, name, metadata):
            Path(name).write_bytes(before[:500])
            raise error

        monkeypatch.setattr("safetensors.torch.save_file", half)
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CacheError):
            filled("sinks")[1].save(path)
        assert list(path.parent.iterdir()) == [path]
        assert path.read_bytes() == before
        assert same_bits(CompressedCache.load(path, model), cache)

    def test_that_breaks_off_leaves_no_first_file(self, filled, path, monkeypatch):
        def half(tensors, name, metadata):
            Path(name).write_bytes(b"half")
            raise OSError("no space left")

        monkeypatch.setattr("safetensors.torch.save_file", half)
        with pytest.raises(CacheError, match="no space left"):
            filled()[1].save(path)
        assert not list(path.parent.iterdir())

    def test_over_a_folder_leaves_nothing_behind(self, filled, path):
        path.mkdir()
        with pytest.raises(CacheError):
            filled()[1].save(path)
        assert list(path.parent.iterdir()) == [path]

    def test_in_a_folder_that_can_not_be_written_leaves_nothing_behind(self, filled, path):
        path.parent.chmod(0o500)
        try:
            if os.access(path.parent, os.W_OK):
                pytest.skip("this user may write everywhere")
            with pytest.raises(CacheError):
                filled()[1].save(path)
            assert not list(path.parent.iterdir())
        finally:
            path.parent.chmod(0o700)

    @pytest.mark.parametrize("known_by", ["chunk size", "declared length"])
    def test_in_the_middle_of_a_chunked_prompt_is_refused(self, known_by, tiny, prompt, path, monkeypatch):
        model = tiny()
        if known_by == "chunk size":
            monkeypatch.setattr(model.generation_config, "prefill_chunk_size", 16, raising=False)
        declared = {"prompt_length": 40} if known_by == "declared length" else {}
        cache = CompressedCache(model, "grace", **WINDOWS, **declared)
        for chunk in prompt.split(16, dim=1):
            if cache.get_seq_length():
                with pytest.raises(CacheError, match="still coming in chunks; save the cache after the last chunk"):
                    cache.save(path)
                assert not path.exists()
            with torch.no_grad():
                model(chunk, past_key_values=cache)
        cache.save(path)
        loaded = CompressedCache.load(path, model)
        assert same_bits(loaded, cache)
        assert loaded.layers[0].pruned_length == 32

    def test_before_the_attention_function_was_reached_is_refused(self, tiny, prompt, path):
        model = tiny(attention="sdpa", num_hidden_layers=1)
        cache = CompressedCache(model, "grace", **WINDOWS)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        with pytest.raises(CacheError, match=r'write model\.set_attn_implementation\("grace_sdpa"\)'):
            cache.save(path)
        assert not path.exists()

    def test_an_eviction_of_ones_own_is_refused(self, filled, path):
        class Own(SnapKV):
            pass

        with pytest.raises(OptionError, match="cannot be saved: give one of SnapKV"):
            filled(evict=Own(budget=24, window=4))[1].save(path)
        assert not path.exists()
