"""The report equals what the tensors hold, and no view keeps a larger tensor alive."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from grace_opt.hf import MemoryReport, PrunedKeyCache, Quantization
from grace_opt.kernels import decode as kernels


def storage_bytes(cache):
    """Bytes of all storages that can be reached from the cache, each once; found without knowing how it stores."""
    storages, seen, pending = {}, set(), [cache.layers]
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, (list, tuple)):
            pending += thing
        elif isinstance(thing, dict):
            pending += thing.values()
        elif type(thing).__module__.startswith(("grace_opt", "transformers.cache_utils")):
            pending.append(vars(thing))
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.7])
def test_the_report_equals_the_storages_and_the_formula(dtype, ratio, tiny, prune, prompt, continuation, step):
    model = copy.deepcopy(tiny()).to(dtype)
    cache = prune(model, "mies", ratio)
    step(model, cache, prompt, continuation)
    report = cache.memory_report()
    size, kept = dtype.itemsize, 16 - {0.0: 0, 0.5: 8, 0.7: 12}[ratio]
    heads = 2 * 2 * 2  # layers, batch, KV heads
    assert report.pruned_key_bytes == heads * 32 * kept * size
    assert report.dense_key_bytes == heads * (8 + 12) * 16 * size
    assert report.index_bytes == heads * kept * 8
    assert report.value_bytes == report.dense_equivalent_key_bytes == heads * 52 * 16 * size
    assert report.spare_bytes == heads * 53 * 32 * size  # room was made for 8 + 1 + 64 tokens, and 20 are there
    assert report.other_bytes == 0
    assert report.total_bytes == storage_bytes(cache)
    assert (report.tokens, report.pruned_tokens) == (52, 32)


@pytest.mark.parametrize("settings", [{}, {"bits": 3, "basis": "none"}], ids=["", "bits"])
def test_as_a_dict_has_everything_and_goes_into_json(settings, tiny, step, continuation):
    model, prompt = tiny(), torch.randint(3, 97, (1, 120), generator=torch.Generator().manual_seed(1))
    cache = PrunedKeyCache(model, **settings)
    for filled in (False, True):
        if filled:
            step(model, cache, prompt, continuation[:1])
        report = cache.memory_report()
        found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert found == {name: getattr(report, name) for name in found}
        public = {name for name in dir(report) if not name.startswith("_") and not callable(getattr(report, name))}
        assert set(found) == public
    assert (found["bits"] is not None) == bool(settings)


@pytest.mark.parametrize("values", [None, 4])
def test_what_tells_kernels_where_the_bits_are_is_counted(values, tiny, prune, prompt, continuation, monkeypatch):
    pytest.importorskip("optimum.quanto")
    monkeypatch.setattr(kernels, "CPU_MIN_TOKENS_IN_FEW_BITS", 0)
    model = tiny()
    cache = prune(model, "mies", 0.5, quantize=Quantization(4, values, group_size=8))
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        before = cache.memory_report().total_bytes
        assert before == storage_bytes(cache)
        model(continuation[:, :1], past_key_values=cache)
    after = cache.memory_report()
    assert after.total_bytes == storage_bytes(cache)
    layers = model.config.num_hidden_layers
    # Per layer and sequence an entry of six int64; an int32 for each group of keys and for each token of values.
    keys, tokens = layers * (2 * 48 + 4 * 4), layers * (2 * 48 + 4 * 32)
    assert after.pruned_key_bytes == layers * 2 * 2 * (32 * 8 // 2 + 4 * 8 * 2 * 4) + keys
    if values:
        assert after.value_bytes == layers * 2 * 2 * (32 * 16 // 2 + 32 * 2 * 2 * 4 + (8 + 1) * 16 * 4) + tokens


def test_no_table_is_made_that_no_kernel_reads(tiny, prune, prompt, continuation, monkeypatch):
    """On the CPU the kernel is for float32."""
    pytest.importorskip("optimum.quanto")
    monkeypatch.setattr(kernels, "CPU_MIN_TOKENS_IN_FEW_BITS", 0)
    for dtype, made in ((torch.float32, 2), (torch.bfloat16, 0)):
        model = copy.deepcopy(tiny()).to(dtype)
        cache = prune(model, "mies", 0.5, quantize=Quantization(4, group_size=8))
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            model(continuation[:, :1], past_key_values=cache)
        assert len(cache.layers[0].compressed.pruned_keys.places()) == made


def test_every_operation_leaves_tensors_that_own_their_bytes(tiny, prune, prompt, continuation):
    model = tiny()
    cache = prune(model, "mies", 0.5)
    changes = [
        lambda: model(prompt, past_key_values=cache),
        lambda: model(continuation[:, :1], past_key_values=cache),
        lambda: model(continuation[:, 1:], past_key_values=cache),
        lambda: cache.batch_repeat_interleave(3),
        lambda: cache.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0])),
        lambda: cache.batch_select_indices(torch.tensor([1])),
        lambda: cache.crop(-5),
        lambda: cache.crop(-25),
        lambda: [layer.offload() for layer in cache.layers],
    ]
    for change in changes:
        with torch.no_grad():
            change()
        assert cache.memory_report().total_bytes == storage_bytes(cache)
    assert cache.get_seq_length() == 22


def test_ratios_and_text():
    report = MemoryReport(
        layers=2,
        prunable_layers=2,
        tokens=100,
        pruned_tokens=80,
        pruned_key_bytes=400,
        dense_key_bytes=200,
        index_bytes=10,
        value_bytes=1000,
        spare_bytes=300,
        other_bytes=0,
        dense_equivalent_key_bytes=1000,
        dense_equivalent_value_bytes=1000,
    )
    assert report.key_bytes == 610
    assert report.key_ratio == pytest.approx(0.61)
    assert report.total_bytes == 1910
    assert report.total_ratio == pytest.approx(0.805)
    assert "61.0% of dense 1,000" in str(report)
    assert "80.5% of dense 2,000" in str(report)
    assert "100 tokens, 80 of them pruned, in 2 of 2 layers" in str(report)


def test_an_empty_cache_reports_zeros(tiny, prune):
    report = prune(tiny()).memory_report()
    assert report.total_bytes == report.tokens == 0
    assert report.key_ratio == report.total_ratio == 1.0
    assert "0 tokens" in str(report)


def test_a_short_prompt_reports_a_dense_cache(tiny, prune, prompt, generate):
    model = tiny()
    cache = prune(model)
    with pytest.warns(UserWarning, match="nothing is pruned"):
        generate(model, cache, prompt[:, :5], max_new_tokens=2)
    report = cache.memory_report()
    assert report.key_ratio == report.total_ratio == 1.0
    assert report.total_bytes == storage_bytes(cache)
