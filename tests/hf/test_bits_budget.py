"""Bits are never more than asked for, bytes are those of the storages, and what cannot be kept is refused by name."""

from __future__ import annotations

import copy
import math
import re
import warnings
from dataclasses import replace

import pytest
import torch

from grace_opt import allocate
from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import (
    CacheConfig,
    CompressedCache,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    attention_implementation,
    calibrate,
)
from grace_opt.hf.bases.codebooks import distortions
from grace_opt.hf.stores.coded import heads
from grace_opt.hf.stores.coded.code_prompt import MIN_TOKENS
from tests.hf.conftest import RECENT, build

LENGTH, PADDING = 150, 21
SINKS = 4
CODED = LENGTH - RECENT - SINKS


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def basis_file(tmp_path_factory):
    """The basis of the tiny Llama."""
    path = tmp_path_factory.mktemp("basis") / "llama.safetensors"
    text = torch.randint(3, 97, (200,), generator=torch.Generator().manual_seed(9))
    calibrate.basis(build("Llama"), None, [text]).save(path)
    return path


@pytest.fixture(params=["none", "calibrated"])
def basis(request, basis_file):
    return basis_file if request.param == "calibrated" else request.param


@pytest.fixture
def read():
    """`read(model, ids, mask=None, **settings)`: a cache that has read a prompt."""

    def run(model, ids, mask=None, **settings):
        cache = CompressedCache(model, **{"basis": "none", "recent_window": RECENT, **settings})
        mask = torch.ones_like(ids) if mask is None else mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        return cache

    return run


def feed(model, cache, tokens):
    """One token at a time."""
    with torch.no_grad():
        for token in tokens.split(1, dim=1):
            model(token, past_key_values=cache)


def held(cache):
    """Bytes of all storages that the cache keeps alive, found by looking, not by asking it; bases not counted."""
    found, seen, open_ = {}, set(), list(cache.layers)
    bases = {id(each) for layer in cache.layers for each in (getattr(layer.compressed, "bases", None) or ())}
    while open_:
        thing = open_.pop()
        if id(thing) in seen or id(thing) in bases:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            if thing.numel():
                found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, (list, tuple)):
            open_ += thing
        elif type(thing).__module__.startswith("grace_opt.hf") and "Plan" not in type(thing).__name__:
            open_ += vars(thing).values()
    return sum(found.values())


class TestBits:
    @pytest.mark.parametrize("bits", [1, 2, 2.25, 3, 6.5])
    def test_are_at_most_those_asked_for_and_nearly_all_of_them(self, bits, basis, tiny, ids, read):
        report = read(tiny(), ids, bits=bits, basis=basis).memory_report()
        assert report.pruned_tokens == CODED
        for found in (report.key_bits, report.value_bits, report.bits):
            assert 0.97 * bits <= found <= bits
        assert (report.bits < 4) == (bits < 4)

    @pytest.mark.parametrize(("keys", "values"), [(3, 1.5), (1.5, 3)])
    def test_of_keys_and_values_apart(self, keys, values, basis_file, tiny, ids, read):
        report = read(tiny(), ids, key_bits=keys, value_bits=values, basis=basis_file).memory_report()
        assert 0.97 * keys <= report.key_bits <= keys
        assert 0.97 * values <= report.value_bits <= values
        assert report.bits == pytest.approx((report.key_bits + report.value_bits) / 2)

    @pytest.mark.parametrize("padding", [0, PADDING])
    def test_of_layers_that_keep_different_numbers_of_tokens(self, padding, tiny, ids, read, tmp_path):
        """Each layer counts by its tokens: shares of layers that keep few cost little."""
        model, file, mask = tiny(num_hidden_layers=3), tmp_path / "basis.safetensors", torch.ones_like(ids)
        mask[1, :padding] = 0
        basis = calibrate.basis(model, None, [ids[0]])
        kinds = ("key_rates", "value_rates")
        few = {kind: {n: each * 0.3**n for n, each in getattr(basis, kind).items()} for kind in kinds}
        replace(basis, **few).save(file)
        uneven = {"basis": file, "evict": PyramidKV(budget=115, window=8)}
        cache = read(model, ids, mask, key_bits=2, value_bits=3, **uneven)
        assert len({layer.compressed.stored for layer in cache.layers}) == 3
        report = cache.memory_report()
        assert 0.97 * 2 <= report.key_bits <= 2 + (0.02 if padding else 0)  # which places are padding is counted
        assert 0.97 * 3 <= report.value_bits <= 3 + (0.02 if padding else 0)
        asked = int(0.25 * cache.layers[0].keys.nbytes * 6)
        assert 0.98 * asked <= read(model, ids, mask, total_bytes=asked, **uneven).memory_report().total_bytes <= asked

    def test_are_eight_at_most_whatever_is_asked_for(self, tiny, ids, read):
        report = read(tiny(), ids, bits=16).memory_report()
        assert report.bits < 9
        assert report.code_bytes >= 2 * 2 * 2 * 2 * 16 * CODED

    def test_are_kept_by_the_layers_that_are_coded(self, tiny, ids, read, tmp_path):
        """Shares are those among the coded layers, not among all that were calibrated."""
        model = tiny(num_hidden_layers=3)
        basis = calibrate.basis(model, None, [ids[0]])
        rates = {layer: each * (0.2 if layer == 0 else 1.0) for layer, each in basis.key_rates.items()}
        replace(basis, key_rates=rates).save(tmp_path / "basis.safetensors")
        settings = {"bits": 2, "basis": tmp_path / "basis.safetensors"}
        for dense_layers in (0, 1):
            report = read(model, ids, dense_layers=dense_layers, **settings).memory_report()
            assert 1.94 <= report.key_bits <= 2
        layers = read(model, ids, **settings).layers
        assert layers[0].compressed.sizes()["key codes"] < 0.5 * layers[1].compressed.sizes()["key codes"]

    def test_of_a_padded_row_are_those_of_the_row_alone(self, basis, tiny, ids, read):
        mask = torch.ones_like(ids)
        mask[1, :PADDING] = 0
        both = read(tiny(), ids, mask, bits=4, basis=basis)
        alone = read(tiny(), ids[1:, PADDING:], bits=4, basis=basis)
        for layer, single in zip(both.layers, alone.layers, strict=True):
            row, expected = layer.compressed.rows[1], single.compressed.rows[0]
            assert torch.equal(row.segments[0].classes, expected.segments[0].classes)
            for name, tensor in expected.tensors().items():
                assert torch.equal(row.tensors()[name], tensor), name
        for layer in both.layers:
            sizes, stored = layer.compressed.sizes(), layer.compressed.held().values()
            kinds = ("keys", "sink_keys", "values", "indices", "reading")
            assert sum(sizes[kind] for kind in kinds) == sum(part.nbytes for part in stored)
        spare = 8 * 2 * -(-(LENGTH - RECENT) // 8)  # which places are padding, a bit each
        elements = both.memory_report().coded_key_elements + both.memory_report().coded_value_elements
        assert both.memory_report().bits <= 4 + spare / elements

    def test_come_back_as_what_they_are_called(self, tiny, ids, read):
        report = read(tiny(), ids, key_bits=3, value_bits=1.5).memory_report()
        text = str(report)
        assert f"{report.tokens} tokens, {CODED} of them coded, in 2 of 2 layers" in text
        assert f"{report.bits:.3f} bits per element ({report.key_bits:.3f} of K, {report.value_bits:.3f} of V)" in text
        assert f"everything counted; all tokens {report.mean_bits:.3f}" in text
        for name, size in (("codes", report.code_bytes), ("scales, means", report.parameter_bytes)):
            assert any(name in line and f"{size:,}" in line for line in text.splitlines()), name
        elements = 2 * 2 * 2 * LENGTH * 2 * 16
        assert report.mean_bits == pytest.approx(8 * (report.total_bytes) / elements)
        assert report.mean_bits > report.bits


class TestTotalBytes:
    @pytest.mark.parametrize("share", [0.16, 0.2, 0.26])
    @pytest.mark.parametrize("evict", [None, SnapKV(budget=120, window=8)], ids=["all", "SnapKV"])
    def test_are_met_and_never_exceeded(self, share, evict, basis_file, tiny, ids, read):
        share = share if evict is None else 0.75 * share
        mask = torch.ones_like(ids)
        mask[1, :PADDING] = 0
        dense = 2 * 2 * 2 * 2 * LENGTH * 16 * 4
        asked = int(share * dense)
        for given in (None, mask):
            report = read(tiny(), ids, given, total_bytes=asked, basis=basis_file, evict=evict).memory_report()
            assert 0.99 * asked <= report.total_bytes <= asked
            assert report.spare_bytes == 0

    def test_too_few_are_refused_with_the_smallest_that_will_do(self, tiny, ids, read):
        with pytest.raises(CacheError, match=r"total_bytes=500 is too few .* write total_bytes=\d+ or more") as raised:
            read(tiny(), ids, total_bytes=500)
        smallest = int(str(raised.value).split("total_bytes=")[-1].split()[0])
        report = read(tiny(), ids, total_bytes=smallest).memory_report()
        assert 0.97 * smallest <= report.total_bytes <= smallest
        with pytest.raises(CacheError, match=f"write total_bytes={smallest} or more"):
            read(tiny(), ids, total_bytes=smallest - 4)

    def test_of_a_prompt_too_short_to_code_are_refused_if_too_few(self, tiny, ids, read):
        short = ids[:, : RECENT + SINKS + MIN_TOKENS - 1]
        dense = 2 * 2 * 2 * 2 * short.shape[1] * 16 * 4
        with pytest.raises(CacheError, match=f"too short to be coded take {dense} already; write total_bytes={dense}"):
            read(tiny(), short, total_bytes=dense - 1)
        with pytest.warns(UserWarning, match="stays dense"):
            assert read(tiny(), short, total_bytes=dense).memory_report().total_bytes == dense

    def test_need_every_layer(self, tiny):
        with pytest.raises(OptionError, match=r"total_bytes= is for models in which every layer is coded"):
            CompressedCache(tiny(), total_bytes=10**6, basis="none", dense_layers=1)

    def test_are_those_of_one_process(self, tiny, monkeypatch):
        monkeypatch.setattr(type(tiny()), "_tp_size", 2, raising=False)
        with pytest.raises(OptionError, match=r"total_bytes= .* tensor-parallel; write bits="):
            CompressedCache(tiny(), total_bytes=10**6, basis="none")


class TestReport:
    @pytest.mark.slow
    def test_is_the_storages_to_the_byte(self, basis, tiny, ids, read):
        mask = torch.ones_like(ids)
        mask[1, :PADDING] = 0
        for settings in ({}, {"evict": SnapKV(budget=120, window=8)}, {"evict": StreamingLLM(budget=120)}):
            cache = read(tiny(), ids, mask, bits=4, basis=basis, tail_block=16, **settings)
            assert cache.memory_report().allocated_bytes == held(cache)
            feed_padded(tiny(), cache, ids[:, :20], mask)
            assert cache.layers[0].compressed.length == LENGTH - RECENT + 16
            report = cache.memory_report()
            assert report.allocated_bytes == held(cache)
            parts = report.pruned_key_bytes, report.dense_key_bytes, report.index_bytes, report.value_bytes
            assert sum(parts) + report.other_bytes == report.total_bytes

    @pytest.mark.slow
    def test_counts_rows_that_beams_share_once(self, tiny, ids, read):
        cache = read(tiny(), ids, bits=2, tail_block=16)
        before = cache.memory_report()
        cache.batch_repeat_interleave(3)
        after = cache.memory_report()
        assert after.allocated_bytes == held(cache)
        for name in ("code_bytes", "parameter_bytes", "coded_key_elements", "bits"):
            assert getattr(after, name) == getattr(before, name)
        assert after.dense_key_bytes - before.dense_key_bytes == 2 * 2 * 2 * 2 * RECENT * 16 * 4
        feed(tiny(), cache, ids[:1, :20].expand(6, -1))
        assert cache.layers[0].compressed.waiting == 16
        assert cache.memory_report().allocated_bytes == held(cache)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_parameters_are_16_bits_whatever_the_model_is(self, dtype, tiny, ids, read):
        sizes = [
            read(model, ids, bits=3).memory_report().parameter_bytes
            for model in (tiny(), copy.deepcopy(tiny()).to(dtype))
        ]
        assert math.isclose(*sizes, rel_tol=0.03)  # not every channel has the same bits, so not the same scales


def feed_padded(model, cache, tokens, mask):
    with torch.no_grad():
        for token in tokens.split(1, dim=1):
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            model(token, attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1, past_key_values=cache)


def test_bits_that_means_and_widths_alone_would_take_leave_a_prompt_dense(tiny, ids, read):
    with pytest.warns(UserWarning, match=r"stays dense: .* would take more than the bits"):
        cache = read(tiny(), ids, bits=0.2)
    assert cache.is_dense
    assert cache.memory_report().bits is None
    assert cache.memory_report().mean_bits == 32


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bits": 2, "key_bits": 2}, "bits and key_bits given"),
        ({"key_bits": 2}, "key_bits given"),
        ({"bits": 2, "total_bytes": 10**6}, "bits and total_bytes given"),
        ({"bits": 2, "method": "think"}, "does not go together with method"),
        ({"bits": 2, "ratio": 0.5}, "does not go together with ratio"),
        ({"bits": 2, "kept_channels": 4}, "does not go together with kept_channels"),
        ({"bits": 2, "protect": (0.0, 0.2)}, "does not go together with protect"),
        ({"bits": 2, "fused": False}, "does not go together with fused"),
        ({"bits": 2, "masks": object()}, r"masks= chooses .* and bits= gives"),
        ({"bits": 2, "provider": len}, r"provider= chooses .* and bits= gives"),
        ({"bits": 0.05}, "the classes of the tokens alone take 0.0625 bits"),
    ],
)
def test_contradictions_are_refused_by_name(settings, said, tiny):
    with pytest.raises(OptionError, match=said):
        CompressedCache(tiny(), basis="none", **settings)


def test_settings_of_bits_survive_json():
    config = CacheConfig(key_bits=3, value_bits=2, basis="none")
    assert CacheConfig.from_dict(config.to_dict()) == config
    assert (config.sink_tokens, config.recent_window, config.tail_block) == (4, 32, 64)


@pytest.mark.parametrize("bits", [0, 0.3, 2.25, 8, 16])
def test_widths_are_those_that_allocate_chooses(bits):
    """By its steps alone, at any size of losses, also 0."""
    sizes, generator = (8, 24, 68), torch.Generator().manual_seed(1)
    squares = torch.randn(4, 3, 16, generator=generator, dtype=torch.float64).mul(3).exp() * 1e-30
    squares[0, 1:] = 0
    whole = squares * torch.rand(4, 16, generator=generator, dtype=torch.float64)[:, None]
    losses = whole[..., None] * torch.tensor(distortions(), dtype=torch.float64)
    limits = torch.tensor([0.5, 1, 1, 1.5], dtype=torch.float64) * bits * sum(sizes) * 16
    costs = heads._costs(sizes, losses.device)[:, None].expand(-1, 16, -1).reshape(48, -1)
    best = allocate(losses.flatten(1, 2), costs, limits)
    found = heads.divided_levels(whole, sizes, limits)
    assert torch.equal(found.transpose(0, 1).flatten(1), best.levels)


@pytest.mark.parametrize("eviction", [SnapKV(budget=60), SnapKV(budget=99), PyramidKV(budget=150)], ids=str)
def test_an_eviction_that_leaves_too_few_tokens_to_code_is_one_all_the_same(eviction):
    model, ids = build("Llama"), torch.randint(3, 97, (1, 300), generator=torch.Generator().manual_seed(2))
    sizes = {}
    for name, settings in (("coded", {"bits": 2, "basis": "none"}), ("pruned", {"ratio": 0.0})):
        cache = CompressedCache(model, evict=eviction, **settings)
        with (
            attention_implementation(model, "grace_sdpa"),
            torch.no_grad(),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            model(ids, past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
        sizes[name] = cache.memory_report().total_bytes
        if name == "coded" and type(eviction) is SnapKV:
            assert any("left and stays dense: bits are given from 100 tokens on" in str(each.message) for each in said)
            assert "nan" not in str(cache.memory_report())
    # Positions are stored, and counted, for each head by both.
    assert sizes["coded"] < 1.1 * sizes["pruned"]


@pytest.mark.parametrize("short", [99, 50])
def test_total_bytes_of_a_padded_batch_with_a_row_that_stays_dense(short):
    model, ids = build("Llama"), torch.randint(3, 97, (2, 300), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, : 300 - short] = 0

    def report(total):
        cache = CompressedCache(model, total_bytes=total, basis="none")
        with (
            attention_implementation(model, "grace_sdpa"),
            torch.no_grad(),
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            model(ids, attention_mask=mask, past_key_values=cache)
        told = [str(each.message) for each in said if "prompts stays dense" in str(each.message)]
        assert [text[:23] for text in told] == ["1 of the batch's 2 prom"]  # once, not for every layer
        assert "from 100 tokens on" in told[0]
        return cache.memory_report()

    with pytest.raises(CacheError, match="write total_bytes=") as caught:
        report(10_000)
    least = int(re.search(r"write total_bytes=(\d+)", str(caught.value)).group(1))
    assert report(least).total_bytes <= least
    assert report(2 * least).total_bytes <= 2 * least
