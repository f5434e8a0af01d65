"""The report equals what the tensors hold, and no view keeps a larger tensor alive."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace

import pytest
import torch

from grace_opt.hf import CompressedCache, MemoryReport, PyramidKV, Quantize, SnapKV, attach
from grace_opt.kernels.cache import decode as kernels


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
    assert report.allocated_bytes == storage_bytes(cache)
    assert (report.tokens, report.pruned_tokens) == (52, 32)


@pytest.mark.parametrize("settings", [{"ratio": 0.3}, {"bits": 3, "basis": "none"}], ids=["", "bits"])
def test_as_a_dict_has_everything_and_goes_into_json(settings, tiny, step, continuation):
    model, prompt = tiny(), torch.randint(3, 97, (1, 120), generator=torch.Generator().manual_seed(1))
    cache = CompressedCache(model, **settings)
    for filled in (False, True):
        if filled:
            step(model, cache, prompt, continuation[:1])
        report = cache.memory_report()
        found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        lists = {name: list(getattr(report, name)) for name in ("idle", "unlike_layers")}
        lists |= {"history": [each._asdict() for each in report.history]}
        assert found == {name: getattr(report, name) for name in found} | lists
        public = {name for name in dir(report) if not name.startswith("_") and not callable(getattr(report, name))}
        assert set(found) == public
    assert (found["bits"] is not None) == ("bits" in settings)


@pytest.mark.parametrize("values", [None, 4])
def test_what_tells_kernels_where_the_bits_are_is_counted(values, tiny, prune, prompt, continuation, monkeypatch):
    pytest.importorskip("optimum.quanto")
    monkeypatch.setattr(kernels, "CPU_MIN_TOKENS_IN_FEW_BITS", 0)
    model = tiny()
    cache = prune(model, "mies", 0.5, quantize=Quantize(keys=4, values=values, group_size=8))
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        before = cache.memory_report().allocated_bytes
        assert before == storage_bytes(cache)
        model(continuation[:, :1], past_key_values=cache)
    after = cache.memory_report()
    assert after.allocated_bytes == storage_bytes(cache)
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
        cache = prune(model, "mies", 0.5, quantize=Quantize(keys=4, group_size=8))
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
        assert cache.memory_report().allocated_bytes == storage_bytes(cache)
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
    assert (report.total_bytes, report.allocated_bytes) == (1610, 1910)
    assert report.total_ratio == report.total_bytes / report.dense_equivalent_total_bytes == pytest.approx(0.805)
    assert "61.0% of dense 1,000" in str(report)
    assert "80.5% of dense 2,000" in str(report)
    assert "100 tokens, 80 of them pruned, in 2 of 2 layers" in str(report)
    evicted = replace(report, tokens=150, evicted_tokens=50)
    assert "150 tokens read, 50 of them evicted, 100 kept: 80 pruned and 20 dense, in 2 of 2 layers" in str(evicted)
    by_layer = replace(evicted, evictions_differ=True)
    assert "at least 50 of them evicted in every layer, at most 100 kept, at most 80 of these pruned" in str(by_layer)
    some = replace(by_layer, evicted_tokens=0)
    assert "all kept in some layers, and some evicted in others: at most 80 of them pruned" in str(some)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ratio": 0.3}, ("of them pruned", "keys, pruned ")),
        ({"quantize": "int4"}, ("of them quantised", "keys, quantised ")),
        ({"quantize": "int4", "ratio": 0.3}, ("of them pruned", "keys, pruned ")),
        ({"evict": "snapkv"}, ("of them kept whole", "keys, whole ")),
        ({"read": "channels"}, ("of them kept whole", "keys, whole ")),
        ({"read": "pages", "ratio": 0.3}, ("of them pruned", "keys, pruned ")),
    ],
)
def test_only_what_was_pruned_is_called_pruned(tiny, settings, said):
    """Quantised and evicted caches that drop no channel were called pruned."""
    model = tiny()
    with attach(model, recent_window=8, **settings) as attached, torch.no_grad():
        model.generate(torch.arange(60)[None] % 30, max_new_tokens=2)
    assert all(each in str(attached.cache.memory_report()) for each in said)


def test_an_empty_cache_reports_zeros(tiny, prune):
    report = prune(tiny()).memory_report()
    assert report.total_bytes == report.tokens == 0
    assert report.key_ratio == report.total_ratio == 1.0
    assert str(report).startswith("0 tokens, nothing pruned, in 2 of 2 layers")
    assert "%" not in str(report)
    assert "dense 0" not in str(report)


def test_a_short_prompt_reports_a_dense_cache(tiny, prune, prompt, generate):
    model = tiny()
    cache = prune(model)
    with pytest.warns(UserWarning, match="nothing is pruned"):
        generate(model, cache, prompt[:, :5], max_new_tokens=2)
    report = cache.memory_report()
    assert report.key_ratio == report.total_ratio == 1.0
    assert report.allocated_bytes == storage_bytes(cache)


class TestTokensOfTheReport:
    """80 tokens are read: 79 of the prompt, of which 8 are recent, and one more."""

    @pytest.fixture
    def report(self, tiny):
        def make(**settings):
            model = tiny()
            tokens = torch.randint(3, 97, (1, 80), generator=torch.Generator().manual_seed(1))
            cache = CompressedCache(model, **{"recent_window": 8, **settings})
            with torch.no_grad():
                for part in tokens.split([79, 1], dim=1):
                    model(part, past_key_values=cache)
            return cache.memory_report()

        return make

    @pytest.mark.parametrize(
        "settings", [{"ratio": 0.3}, {"bits": 8, "basis": "none", "sink_tokens": 0}], ids=["", "bits"]
    )
    def test_are_counted_whatever_became_of_them(self, settings, report):
        found = report(evict=SnapKV(budget=75, window=8), **settings)
        assert (found.tokens, found.evicted_tokens, found.pruned_tokens) == (80, 79 - 75, 75 - 8)
        done = "coded" if "bits" in settings else "pruned"
        assert str(found).startswith(f"80 tokens read, 4 of them evicted, 76 kept: 67 {done} and 9 dense, in 2 of 2")
        assert not found.idle

    def test_that_layers_evict_differently(self, report):
        found = report(evict=PyramidKV(budget=40, window=8, beta=4))
        assert (found.evicted_tokens, found.pruned_tokens) == (79 - 64, 64 - 8)  # the first layer keeps 24 more
        assert "at least 15 of them evicted in every layer, at most 65 kept, at most 56" in str(found)

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"evict": SnapKV(budget=79, window=8)}, ["evict=SnapKV(budget=79, .*) has dropped no token: the prompt"]),
            ({"evict": SnapKV(budget=78, window=8)}, []),
            ({"evict": SnapKV(budget=99), "bits": 4, "basis": "none", "sink_tokens": 0}, ["evict=.* no token"]),
            ({"ratio": 0}, ["no channel is dropped, so keys take as many bytes as dense ones: write a larger ratio"]),
            ({"kept_channels": 16}, ["no channel is dropped"]),
            ({"ratio": [0, 0.1]}, []),
            ({"ratio": 0, "evict": SnapKV(budget=78, window=8)}, []),
            ({"ratio": 0, "evict": SnapKV(budget=99)}, ["evict=.* no token"]),  # as without a ratio
            (
                {"ratio": 0.3, "recent_window": 79},
                ["all tokens are dense: the prompt is too short, as its last recent_window=79"],
            ),
            ({"ratio": 0.3, "recent_window": 78}, []),
            (
                {"recent_window": 70, "sink_tokens": 9, "evict": SnapKV(budget=99)},
                ["all tokens are dense: .* recent_window=70 tokens and the first sink_tokens=9"],
            ),
        ],
        ids=str,
    )
    @pytest.mark.filterwarnings("ignore:the prompt has 79 tokens")
    def test_settings_that_changed_nothing_are_named(self, settings, said, report):
        found = report(**settings)
        assert len(found.idle) == len(said)
        assert str(found).endswith("".join(f"\n  {sentence}" for sentence in found.idle))
        for sentence, expected in zip(found.idle, said, strict=True):
            assert re.match(expected.replace("(", r"\(").replace(")", r"\)"), sentence)

    @pytest.mark.parametrize("quantize", [None, Quantize(keys=4, group_size=8)])
    def test_bits_without_pruning_are_no_idle_ratio(self, quantize, report):
        if quantize is not None:
            pytest.importorskip("optimum.quanto")
        assert bool(report(ratio=0, quantize=quantize).idle) == (quantize is None)

    def test_nothing_is_said_before_the_prompt_is_over(self, tiny, prompt):
        model, cache = tiny(), CompressedCache(tiny(), "grace", recent_window=50, prompt_length=45)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
            assert not cache.memory_report().idle
            with pytest.warns(UserWarning, match="stay dense"):
                model(prompt[:, :5], past_key_values=cache)
        assert len(cache.memory_report().idle) == 1

    def test_nothing_is_said_between_chunks_of_a_prompt(self, tiny, prompt, monkeypatch):
        model = tiny()
        monkeypatch.setattr(model.generation_config, "prefill_chunk_size", 20)
        cache = CompressedCache(model, "grace", recent_window=50)
        with torch.no_grad():
            model(prompt[:, :20], past_key_values=cache)
            assert not cache.memory_report().idle
            with pytest.warns(UserWarning, match="stay dense"):
                model(prompt[:, 20:25], past_key_values=cache)
        assert len(cache.memory_report().idle) == 1


@pytest.mark.parametrize(
    ("dense", "of_layers"), [(0, [None, 64, None, 16]), (2, [None, None, None, 40])], ids=["sliding", "and dense"]
)
def test_the_mean_of_a_budget_that_falls_is_over_the_layers_that_evict(dense, of_layers, tiny):
    """Of all layers, sliding and dense ones too, they were 48 and 16 tokens, and 16."""
    kinds = ("sliding_attention", "full_attention") * 2
    changes = {"layer_types": kinds, "sliding_window": 12, "use_sliding_window": True, "num_hidden_layers": 4}
    model, ids = tiny("Qwen2", **changes), torch.arange(3, 90)[None]
    evict = PyramidKV(budget=40, window=8, beta=4)
    cache = CompressedCache(model, ratio=0.0, recent_window=8, dense_layers=dense, evict=evict)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    found = [getattr(layer, "compressed", None) for layer in cache.layers]
    assert [None if each is None else each.stored + 8 for each in found] == of_layers
