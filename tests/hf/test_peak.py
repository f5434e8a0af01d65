"""Memory while the prompt is read: at most one layer's keys above what a dense cache takes at its worst moment."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from grace_opt.hf import CompressedCache, Quantize, SnapKV
from tests.hf.conftest import build

LENGTH = 2048


def peak(run):
    """Most bytes that were allocated at once, by the profiler's allocation events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert len(events) > 20
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


@functools.cache
def wide_model(layers, dtype):
    """Many KV heads and a narrow rest: nothing else may hide what the cache takes."""
    changes = {"num_hidden_layers": layers, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": LENGTH}
    return copy.deepcopy(build("Llama", **changes)).to(dtype)


def prefill(model, make):
    ids = torch.randint(3, 97, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("grace_sdpa")
    with torch.no_grad():
        model.model(ids, past_key_values=make())


@functools.cache
def dense_peak(layers, dtype):
    model = wide_model(layers, dtype)
    prefill(model, lambda: DynamicCache(config=model.config))  # as `load_libraries` does
    return peak(lambda: prefill(model, lambda: DynamicCache(config=model.config)))


@pytest.fixture(scope="module")
def load_libraries():
    """`load_libraries(options, dtype)`: reads one prompt, as libraries are loaded at first use."""
    known = set()

    def load(options, dtype):
        if (str(options), dtype) not in known:
            model = wide_model(1, dtype)
            prefill(model, lambda: CompressedCache(model, **options))
            known.add((str(options), dtype))

    return load


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.3},
        {"ratio": 0.3, "sink_tokens": 4},
        {"evict": SnapKV(256)},
        {"quantize": Quantize(4)},
        {"bits": 2.25, "basis": "none"},
        {"bits": 2, "basis": "none", "evict": SnapKV(1024)},
    ],
    ids=["pruned", "sinks", "SnapKV", "quantised", "bits", "bits, SnapKV"],
)
def test_at_most_one_layer_s_keys_above_dense(options, dtype, layers, load_libraries):
    if "quantize" in options:
        pytest.importorskip("optimum.quanto")
    model, dense = wide_model(layers, dtype), dense_peak(layers, dtype)
    load_libraries(options, dtype)
    pruned = peak(lambda: prefill(model, lambda: CompressedCache(model, **options)))
    assert pruned - dense <= 4 * LENGTH * 64 * dtype.itemsize
    if layers > 1:
        assert pruned < dense
