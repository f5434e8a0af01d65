"""GracePress inside kvpress, and our token eviction against kvpress'; skipped where kvpress is not installed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

pytest.importorskip("kvpress")

import kvpress

import grace_opt.hf
from grace_opt import registry
from grace_opt.errors import OptionError, UnknownSolverError
from grace_opt.hf.evict.eviction import H2O, PyramidKV, SnapKV, StreamingLLM
from grace_opt.hf.evict.kept_tokens import kept_tokens
from grace_opt.hf.tools import press as press_module
from grace_opt.hf.tools.press import GracePress

HEADS, WIDTH, LAYERS = 2, 16, 2


@pytest.fixture(params=["llama", "qwen3"])
def model(request, tiny):
    """Queries of Qwen3 are normalised before RoPE, those of Llama are not."""
    return tiny(request.param, attention="sdpa")


def prefill(model, prompt, press, **options):
    """The cache after the prompt, under a press."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(model):
        model(prompt, past_key_values=cache, **options)
    return cache


def zeroed(cache):
    """Which channels are zero in every token: (layers, B, H, d)."""
    return torch.stack([(layer.keys == 0).all(dim=2) for layer in cache.layers])


def captured(model, prompt):
    """Post-RoPE queries and keys of every layer, as the attention saw them."""
    return list(grace_opt.hf.capture_attention(model, prompt).values())


class Noted(kvpress.BasePress):
    """What a scorer of kvpress says, layer by layer; nothing is evicted."""

    def __init__(self, inner):
        self.inner, self.scores = inner, []

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        self.scores.append(self.inner.score(module, hidden_states, keys, values, attentions, kwargs))
        return keys, values


def scores_of(inner, model, prompt, **options):
    noted = Noted(inner)
    prefill(model, prompt, noted, **options)
    return noted.scores


# ------------------------------------------------------------------------------------------------------ GracePress


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])  # of 16 channels, so that rounding up and down agree
@pytest.mark.parametrize("window", [6, 32, 100])
def test_think_prunes_what_ThinKPress_prunes(model, prompt, ratio, window):
    theirs = prefill(model, prompt, kvpress.ThinKPress(ratio, window))
    ours = prefill(model, prompt, GracePress(ratio, window, method="think"))
    assert (zeroed(ours).sum(-1) == ratio * WIDTH).all()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


@pytest.mark.parametrize("method", ["grace", *registry.specs()])
def test_every_method_prunes_the_number_that_MaskProvider_says(tiny, prompt, method):
    model = tiny(attention="sdpa")
    dense = prefill(model, prompt, kvpress.ThinKPress(0.0))
    cache = prefill(model, prompt, GracePress(0.3, method=method))  # rounded up: 5 of 16, where ThinKPress takes 4
    channels = zeroed(cache)
    assert (channels.sum(-1) == 5).all()
    for layer, original, pruned in zip(cache.layers, dense.layers, channels, strict=True):
        assert torch.equal(layer.keys, original.keys.masked_fill(pruned[:, :, None], 0.0))


def test_the_provider_decides(tiny, prompt):
    model = tiny(attention="sdpa")
    press = GracePress(0.5, 6, method="local_search", protect=(0.1, 0.2), seed=3)
    channels = zeroed(prefill(model, prompt, press))
    for layer, found in zip(captured(model, prompt), channels, strict=True):
        assert torch.equal(press.provider()(layer.queries[:, :, -6:], layer.keys).pruned, found)


@pytest.mark.parametrize("share", [0.5, 0.9])  # the second leaves fewer tokens than the window has queries
def test_after_a_press_that_evicts_tokens(model, prompt, share):
    first = kvpress.SnapKVPress(share, window_size=8)
    press = kvpress.ComposedPress([first, GracePress(0.5, method="grace")])
    cache = prefill(model, prompt, press)
    length = kvpress.utils.compute_n_kept(prompt.shape[1], share)
    assert cache.layers[0].keys.shape[2] == length
    assert (zeroed(cache).sum(-1) == 8).all()
    assert press.compression_ratio == pytest.approx(1 - (1 - share) * 0.75)
    with press(model):
        tokens = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert tokens.shape == (2, prompt.shape[1] + 4)


def test_a_ratio_of_zero_changes_nothing(tiny, prompt):
    assert not zeroed(prefill(tiny(attention="sdpa"), prompt, GracePress())).any()


def test_the_ratio_may_be_set_later(tiny, prompt):
    """The evaluation harness of kvpress does so, for every ThinKPress."""
    press = GracePress(method="mies")
    assert isinstance(press, kvpress.ThinKPress)
    press.key_channel_compression_ratio = 0.5
    assert press.compression_ratio == 0.25
    assert (zeroed(prefill(tiny(attention="sdpa"), prompt, press)).sum(-1) == 8).all()


def test_bad_arguments():
    with pytest.raises(UnknownSolverError):
        GracePress(method="thinc")
    for wrong in ({"key_channel_compression_ratio": 1.0}, {"weight": "x"}, {"protect": 3}, {"options": {"x": 1}}):
        with pytest.raises(OptionError):
            GracePress(**wrong)
    assert dataclasses.replace(GracePress(0.5), seed=1).key_channel_compression_ratio == 0.5


# ------------------------------------------------------------------------------------------------ is kvpress there?


@pytest.mark.parametrize("version", ["0.5.4", "0.4.10", "0.5"])
def test_old_kvpress(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ImportError, match=rf'>= 0.5.5, but {version} is installed; write: pip install "\.\[kvp'):
        press_module.require_kvpress()


@pytest.mark.parametrize("version", ["0.5.5", "0.5.5.dev1", "0.6", "0.10.0", "1.0rc1"])
def test_new_enough_kvpress(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    press_module.require_kvpress()


def test_no_kvpress(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=r'not installed; write: pip install "\.\[kvpress\]".*environment'):
        press_module.require_kvpress()


@pytest.mark.parametrize("attention", ["grace_sdpa", "grace_eager"])
def test_our_attention_functions_work_inside_those_of_kvpress(tiny, prune, prompt, generate, attention):
    """kvpress wraps every registered attention function, ours as well, and passes dropout by position."""
    model = tiny(attention=attention)
    cache = prune(model, "mies", 0.5)
    assert generate(model, cache, prompt, max_new_tokens=3).shape == (2, 3)
    assert (cache.channel_mask().pruned.sum(-1) == 8).all()


def test_the_adapter_does_not_import_kvpress():
    code = "import sys, grace_opt.hf; sys.exit('kvpress' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---------------------------------------------------------------------------------------------------- token eviction


@pytest.mark.parametrize(("window", "kernel", "budget"), [(8, 5, 20), (8, 7, 9), (4, 1, 30)])
def test_snapkv_keeps_what_SnapKVPress_keeps(model, prompt, window, kernel, budget):
    method = SnapKV(budget, window, kernel, pooling="avg")
    theirs = scores_of(kvpress.SnapKVPress(0.5, window, kernel), model, prompt)
    for layer, expected in zip(captured(model, prompt), theirs, strict=True):
        observed = layer.queries[:, :, -window:]
        older = slice(0, prompt.shape[1] - window)
        found = method.scores(observed, layer.keys, None, layer.scaling)
        torch.testing.assert_close(found[..., older] / window, expected[..., older], rtol=1e-4, atol=1e-6)
        kept = kept_tokens(method, observed, layer.keys, None, layer.scaling, 0, 1)
        assert torch.equal(kept, expected.topk(budget, dim=-1).indices.sort().values)


@pytest.mark.parametrize("beta", [1, 2, 5])
@pytest.mark.parametrize("layers", [2, 3, 32])
@pytest.mark.parametrize("length", [256, 1000, 5000])
@pytest.mark.parametrize("share", [0.25, 0.75])  # with the second, the first layer keeps everything
def test_pyramid_budgets_are_those_of_PyramidKVPress_and_the_window(beta, layers, length, share):
    """kvpress counts the window into what the layers share; we add it, as PyramidKV's own code does.

    The window is small enough that kvpress does not fall back to a flat budget.
    """
    window, config = 8, SimpleNamespace(num_hidden_layers=layers)
    theirs = kvpress.PyramidKVPress(1 - share, window, beta=beta)
    ours = PyramidKV(window + int(share * length), window, beta=beta)
    for index in range(layers):
        expected = theirs.get_layer_budget(SimpleNamespace(config=config, layer_idx=index), length)
        assert ours.tokens(index, layers, length) == window + expected


def test_h2o_of_all_queries_is_ObservedAttentionPress_before_its_division(tiny, prompt):
    eager = tiny(attention="eager")
    theirs = scores_of(kvpress.ObservedAttentionPress(0.5), eager, prompt, output_attentions=True)
    length = prompt.shape[1]
    seen_by = torch.arange(length, 0, -1)
    for layer, expected in zip(captured(eager, prompt), theirs, strict=True):
        found = H2O(10, window=0, observed=None).scores(layer.queries, layer.keys, None, layer.scaling)
        torch.testing.assert_close(found / seen_by, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("budget", "sinks"), [(10, 4), (30, 0), (20, 20)])
def test_streaming_llm_keeps_what_StreamingLLMPress_keeps(tiny, prompt, budget, sinks):
    model = tiny(attention="sdpa")
    theirs = scores_of(kvpress.StreamingLLMPress(1 - budget / prompt.shape[1], sinks), model, prompt)
    for layer, expected in zip(captured(model, prompt), theirs, strict=True):
        kept = kept_tokens(StreamingLLM(budget, sinks), layer.queries, layer.keys, None, layer.scaling, 0, 1)
        assert torch.equal(kept, expected.topk(budget, dim=-1).indices.sort().values)
