"""A cache that one model has filled is refused by another of the same shape, wherever that can be known."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from grace_opt.errors import CacheError
from grace_opt.hf import CompressedCache, attach
from tests.hf.conftest import RECENT, build

SETTINGS = {"pruned": {"ratio": 0.3}, "coded": {"bits": 4, "basis": "none"}, "dense": {"ratio": 0}}


def tuned(model):
    """A copy whose attention has other weights, as after fine-tuning."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.self_attn.k_proj.weight.mul_(1.1)
    return other


@pytest.fixture
def model(tiny):
    return tiny()


@pytest.fixture
def long():
    return torch.randint(3, 97, (1, 120), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=SETTINGS.values(), ids=SETTINGS)
def filled(request, model, long):
    """A cache that knows only the configuration of its model, which has read a prompt into it."""
    cache = CompressedCache(model.config, recent_window=RECENT, **request.param)
    with torch.no_grad():
        model(long, past_key_values=cache)
    return cache


def test_another_model_of_the_same_shape_is_refused(filled, model, long):
    with (
        pytest.raises(CacheError, match="layer 0 of the cache was filled by a model with other weights"),
        torch.no_grad(),
    ):
        tuned(model)(long[:, :1], past_key_values=filled)
    filled.reset()
    with torch.no_grad():
        tuned(model)(long, past_key_values=filled)
    assert filled.get_seq_length() == 120


def test_a_copy_of_the_cache_remembers(filled, model, long):
    with pytest.raises(CacheError, match="other weights"), torch.no_grad():
        tuned(model)(long[:, :1], past_key_values=copy.deepcopy(filled))


def test_a_copy_of_the_model_goes_on(filled, model, long):
    with torch.no_grad():
        expected = model(long[:, :1], past_key_values=copy.deepcopy(filled)).logits
        assert torch.equal(copy.deepcopy(model)(long[:, :1], past_key_values=filled).logits, expected)


def test_models_are_not_kept_alive(long):
    model = copy.deepcopy(build("Llama"))
    model.set_attn_implementation("grace_sdpa")
    cache = CompressedCache(model.config, "grace")
    with torch.no_grad():
        model(long, past_key_values=cache)
    assert cache.layers[0]._filler._module() is not None
    del model
    gc.collect()
    assert cache.layers[0]._filler._module() is None


@pytest.mark.parametrize("loaded", [False, True], ids=["filled", "loaded"])
def test_attach_refuses_a_cache_of_another_model_before_anything_is_appended(loaded, model, long, tmp_path):
    with attach(model, "grace") as attached:
        model.generate(long, max_new_tokens=2, do_sample=False)
    cache = attached.cache
    if loaded:
        cache.save(tmp_path / "cache.safetensors")
        cache = CompressedCache.load(tmp_path / "cache.safetensors", model)
    length, other = cache.get_seq_length(), tuned(model)
    longer = torch.cat([long, long], dim=1)
    with (
        attach(other, "grace"),
        pytest.raises(CacheError, match=r"of another model \(the weights differ, as after fine-tuning\)"),
    ):
        other.generate(longer, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.get_seq_length() == length
    same = copy.deepcopy(model)
    with attach(same, "grace"):
        same.generate(longer, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.get_seq_length() == 241
