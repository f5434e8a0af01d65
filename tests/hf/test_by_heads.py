"""Caches whose heads keep different numbers of tokens: beside hidden tokens, and in all that a cache does."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch.nn import functional

from grace_opt.errors import CacheError, CalibrationError
from grace_opt.hf import (
    CompressedCache,
    GraphEviction,
    LayerBudgets,
    LayerLosses,
    Quantize,
    SnapKV,
    StreamingLLM,
    attach,
    attention_implementation,
    capture_attention,
)
from grace_opt.hf.engine.filling import dense_cache, filled
from grace_opt.hf.engine.saving import FILE_FORMAT, load_about
from grace_opt.hf.evict.kept_tokens import kept_tokens, tokens_of_heads
from grace_opt.hf.models import load_pocket
from grace_opt.hf.models.attention import register
from grace_opt.hf.stores.channels.by_heads import ByHeads
from grace_opt.hf.tools.evaluation import next_token_log_probs, stored_bits
from grace_opt.kernels.cache import decode as by_kernel

SHARES = (0.1, 0.25, 0.5)
LOSSES = LayerLosses(
    (0, 1, 2),
    SHARES,
    (
        ((0.5, 0.2, 0.04), (0.02, 0.01, 0.001)),
        ((0.004, 0.001, 0.0001), (0.0004, 0.0001, 0.00001)),
        ((0.01, 0.004, 0.002), (0.05, 0.02, 0.01)),
    ),
)
PROMPT, RECENT = 240, 8
EVICTIONS = [SnapKV(0.25, window=4), GraphEviction(0.25), StreamingLLM(60), SnapKV(0.6, window=4)]


@pytest.fixture(scope="module")
def pocket():
    return load_pocket()


@pytest.fixture(scope="module")
def text(pocket):
    words = "the quiet river runs past a late singer , and the mill stands . a tiger sees the copper lantern again . "
    return pocket[1](words * 40, return_tensors="pt").input_ids


@pytest.fixture(scope="module")
def predicted(pocket, text):
    """`predicted(evict)`: what the prompt leaves, and what follows it, predicted while each head sees what it keeps."""
    captured, following = capture_attention(pocket[0], text[:, :PROMPT]), text[:, PROMPT : PROMPT + 48]

    @functools.cache
    def find(evict):
        return captured, hidden(pocket, captured, following, shown_to_heads(evict, captured))

    return find


def shown_to_heads(evict, captured):
    """Which tokens of the prompt each head of each layer keeps, ``(H, S)`` bool, chosen for each head alone."""
    found = {}
    for layer, seen in captured.items():
        counts = tokens_of_heads(evict, layer, 2, PROMPT, RECENT + 1, 0, 1)
        shown = torch.ones(2, PROMPT, dtype=torch.bool)
        for head, count in enumerate(counts):
            keys, values = (part[:, head : head + 1] for part in (seen.keys, seen.values))
            queries = seen.queries.unflatten(1, (2, -1))[:, head]
            if evict.queries_needed is not None:
                queries = queries[:, :, PROMPT - evict.queries_needed :]
            parts = queries, keys, None, seen.scaling, layer, 3
            kept = kept_tokens(evict.keeping(count), *parts, values=values, last=RECENT, count=count)
            if kept is not None:
                shown[head, : PROMPT - RECENT] = False
                shown[head, kept[0, 0, : count - RECENT]] = True
        assert shown.sum(1).tolist() == list(counts)
        found[layer] = shown
    return found


def hidden(pocket, captured, following, shown):
    """Predict the next tokens on dense keys and values, of which each head sees only some."""
    model = pocket[0]

    def attend(module, query, key, value, attention_mask, scaling, **_):
        new, total, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
        mask = torch.ones(query.shape[1], new, total, dtype=torch.bool).tril(total - new)
        mask[..., :PROMPT] &= shown[module.layer_idx].repeat_interleave(group, 0)[:, None]
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        return found.transpose(1, 2).contiguous(), None

    register("tests_by_heads", attend, "sdpa")
    with torch.no_grad(), attention_implementation(model, "tests_by_heads"):
        return next_token_log_probs(model, dense_cache(model, captured), following)


@pytest.mark.slow
@pytest.mark.parametrize("evict", EVICTIONS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("implementation", ["grace_sdpa", "grace_eager"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("at_once", [1, 7, 48])
def test_each_head_reads_what_it_keeps(evict, implementation, fused, at_once, pocket, text, predicted):
    model, following = pocket[0], text[:, PROMPT : PROMPT + 48]
    evict = LayerBudgets(evict, LOSSES)
    captured, expected = predicted(evict)
    cache = filled(CompressedCache(model, ratio=0.0, recent_window=RECENT, evict=evict, fused=fused), captured)
    assert sum(isinstance(layer.compressed, ByHeads) for layer in cache.layers) >= 2
    with torch.no_grad(), attention_implementation(model, implementation):
        parts = [model(part, past_key_values=cache).logits[0] for part in following.split(at_once, dim=1)]
    found = torch.cat(parts).log_softmax(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def filled_cache(model, text, **settings):
    settings = {"ratio": 0.0, "recent_window": RECENT, "evict": LayerBudgets(EVICTIONS[0], LOSSES), **settings}
    cache = CompressedCache(model, **settings)
    with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
        model(text[:, :PROMPT], past_key_values=cache)
    return cache


def step(model, cache, ids, **arguments):
    with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
        return model(ids, past_key_values=cache, **arguments).logits


SETTINGS = [
    {},
    {"ratio": 0.5},
    {"ratio": 0.5, "method": "think"},
    {"sink_tokens": 3},
    {"quantize": Quantize(keys=4, values=4, group_size=16)},
    {"ratio": 0.25, "sink_tokens": 2, "quantize": Quantize(keys=4, values=None, group_size=16)},
    {"tail_block": 16},
    {"tail_block": 16, "quantize": Quantize(keys=4, values=4, group_size=16)},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=[str(number) for number in range(len(SETTINGS))])
def test_all_storages_agree_with_full_width_are_saved_and_count(settings, pocket, text, tmp_path):
    if "quantize" in settings:
        pytest.importorskip("optimum.quanto")
    model = pocket[0]
    cache = filled_cache(model, text, **settings)
    assert any(isinstance(layer.compressed, ByHeads) for layer in cache.layers)
    again = copy.deepcopy(cache)
    for _ in range(2):
        again.save(tmp_path / "cache.safetensors")
        again = CompressedCache.load(tmp_path / "cache.safetensors", model)
    found = [step(model, cache, part) for part in text[:, PROMPT : PROMPT + 40].split(1, dim=1)]
    same = [step(model, again, part) for part in text[:, PROMPT : PROMPT + 40].split(1, dim=1)]
    for one, other in zip(found, same, strict=True):
        assert torch.equal(one, other)
    report = cache.memory_report()
    held = sum(part.nbytes for layer in cache.layers for part in layer.stored_parts().values())
    assert (
        report.pruned_key_bytes
        + report.value_bytes
        + report.index_bytes
        + report.dense_key_bytes
        + (report.spare_bytes)
        == held
    )
    assert "at least" in str(report)
    bits = stored_bits(cache)
    assert 0 < bits.key_bits < 16
    assert cache.channel_mask().pruned.shape[:3] == (3, 1, 2)


@pytest.mark.parametrize("recent", [0, RECENT])
@pytest.mark.parametrize(
    "evict", [SnapKV(0.25, window=4), LayerBudgets(SnapKV(0.25, window=4), LOSSES)], ids=["", "by heads"]
)
def test_all_memory_that_is_held_is_in_the_report(recent, evict, pocket, text):
    cache = filled_cache(pocket[0], text, recent_window=recent, evict=evict, ratio=0.3)
    for _ in range(2):
        held = {}
        for layer in cache.layers:
            for part in layer.stored_parts().values():
                held[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        assert cache.memory_report().allocated_bytes == sum(held.values())
        step(pocket[0], cache, text[:, PROMPT : PROMPT + 1])


def test_no_more_is_stored_than_with_equal_budgets(pocket, text):
    model = pocket[0]
    divided = filled_cache(model, text).memory_report()
    equal = filled_cache(model, text, evict=EVICTIONS[0]).memory_report()
    assert divided.pruned_key_bytes <= equal.pruned_key_bytes
    assert divided.pruned_key_bytes > 0.9 * equal.pruned_key_bytes
    assert divided.total_ratio <= equal.total_ratio


def test_groups_of_quantised_keys_are_full_and_at_most_the_budget(pocket, text):
    pytest.importorskip("optimum.quanto")
    cache = filled_cache(pocket[0], text, quantize=Quantize(keys=4, values=4, group_size=16), sink_tokens=2)
    counts = [
        (group.stored, heads.stop - heads.start)
        for layer in cache.layers
        for group, heads in (
            layer.compressed.by_heads() if isinstance(layer.compressed, ByHeads) else [(layer.compressed, slice(0, 2))]
        )
    ]
    assert len(counts) > 3
    assert all((stored - 2) % 16 == 0 for stored, _ in counts)
    tails = [layer.tail.length for layer in cache.layers]
    assert sum(stored * heads for stored, heads in counts) + 2 * sum(tails) <= 6 * 60


@pytest.mark.slow
def test_rows_of_a_batch_are_as_alone_with_padding_and_beams(pocket, text):
    model, long = pocket[0], text[:, :PROMPT]
    short = text[:, 7 : PROMPT - 13]
    ids = torch.cat([long, functional.pad(short, (20, 0))])
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    evict = LayerBudgets(SnapKV(60, window=4), LOSSES)  # a share would count padding
    cache = CompressedCache(model, ratio=0.0, recent_window=RECENT, evict=evict)
    following = text[:, PROMPT : PROMPT + 2].expand(2, -1)
    with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
        model(ids, attention_mask=mask, past_key_values=cache)
        mask = functional.pad(mask, (0, 2), value=1)
        both = model(following, attention_mask=mask, past_key_values=cache).logits
        for row, own in enumerate((long, short)):
            alone = CompressedCache(model, ratio=0.0, recent_window=RECENT, evict=evict)
            model(own, past_key_values=alone)
            if row == 0:
                torch.testing.assert_close(
                    model(following[:1], past_key_values=alone).logits[0], both[0], rtol=1e-4, atol=1e-4
                )
        cache.reorder_cache(torch.tensor([1, 0]))
        assert cache.layers[0].compressed.positions.shape[0] == 2
        beams = model.generate(long, max_new_tokens=4, num_beams=3, do_sample=False)
        assert beams.shape == (1, PROMPT + 4)
    with attach(model, ratio=0.0, recent_window=RECENT, evict=evict):
        assert model.generate(long, max_new_tokens=4, num_beams=3, do_sample=False).shape == (1, PROMPT + 4)


@pytest.mark.slow
def test_candidates_are_read_as_without_them(pocket, text):
    model, evict = pocket[0], LayerBudgets(SnapKV(0.25, window=4), LOSSES)
    for implementation in ("grace_sdpa", "grace_eager"):
        with (
            attention_implementation(model, implementation),
            attach(model, ratio=0.0, recent_window=RECENT, evict=evict),
        ):
            plain = model.generate(text[:, :PROMPT], max_new_tokens=12, do_sample=False)
            looked = model.generate(
                text[:, :PROMPT], max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=4, eos_token_id=1000
            )
        assert torch.equal(plain, looked[:, : plain.shape[1]])


def test_tokens_before_an_eviction_cannot_be_cropped_but_later_ones_can(pocket, text):
    cache = filled_cache(pocket[0], text)
    step(pocket[0], cache, text[:, PROMPT : PROMPT + 4])
    cache.crop(-3)
    assert cache.get_seq_length() == PROMPT + 1
    with pytest.raises(CacheError, match="not to"):
        cache.crop(-PROMPT // 2)


def test_coded_and_read_caches_divide_among_layers_only(pocket, text):
    model = pocket[0]
    evict = LayerBudgets(SnapKV(0.5, window=4), LOSSES)
    for settings in ({"bits": 4, "basis": "none"}, {"ratio": 0.0, "read": "pages"}):
        cache = CompressedCache(model, recent_window=RECENT, evict=evict, **settings)
        with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
            model(text[:, :PROMPT], past_key_values=cache)
        for layer in range(3):
            assert not isinstance(cache.layers[layer].compressed, ByHeads)
            expected = evict.tokens(layer, 3, PROMPT, least=RECENT + 1)
            assert cache.layers[layer].compressed.stored == expected - RECENT


def test_equal_losses_are_equal_budgets(pocket, text):
    model, losses = pocket[0], LayerLosses((0, 1, 2), SHARES, (((0.2, 0.05, 0.02),) * 2,) * 3)
    for budget in (0.25, 60, 150, 400):
        evict = SnapKV(budget, window=4)
        divided, plain = (filled_cache(model, text, evict=each) for each in (LayerBudgets(evict, losses), evict))
        following = text[:, PROMPT : PROMPT + 1]
        assert torch.equal(step(model, divided, following), step(model, plain, following))


def test_losses_of_other_heads_are_refused(pocket):
    losses = LayerLosses((0,), SHARES, (((0.5, 0.2, 0.1),) * 3,))
    with pytest.raises(CalibrationError, match="losses of 3 heads, model with 2"):
        CompressedCache(pocket[0], ratio=0.0, evict=LayerBudgets(SnapKV(0.25), losses))


def _without_a_group(about, tensors):
    about["layers"][0]["heads"] = [2]


def _other_sizes(about, tensors):
    about["layers"][0]["heads"] = [1, 2]


def _no_numbers(about, tensors):
    about["layers"][0]["heads"] = [True, 1]


def _no_sizes(about, tensors):
    del about["layers"][0]["heads"]


def _too_few_tensors(about, tensors):
    del tensors["0.heads.1.pruned_keys"]


def _too_many_tensors(about, tensors):
    tensors["0.heads.2.pruned_keys"] = torch.zeros(1)


def _another_length(about, tensors):
    about["layers"][0]["length"] = 10


def _another_head_s_tokens(about, tensors):
    tensors["0.heads.1.old_values"] = tensors["0.heads.0.old_values"]


def _positions_beyond(about, tensors):
    tensors["0.heads.1.positions"] += PROMPT


def _no_lists_of_codes(about, tensors):
    about["layers"][0]["quantized"] = {"heads.7.pruned_keys": {}}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_each_query_head_are_those_of_its_group(dtype, pocket, text):
    model = pocket[0]
    heads = model.config.num_attention_heads
    mask = torch.rand(1, heads, 1, PROMPT + 1, generator=torch.Generator().manual_seed(0)) > 0.3
    mask[..., -1] = True
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
    found = [
        step(model, filled_cache(model, text, fused=fused), text[:, PROMPT : PROMPT + 1], attention_mask=mask)
        for fused in (True, False)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    plain = step(model, filled_cache(model, text), text[:, PROMPT : PROMPT + 1])
    assert not torch.allclose(found[0], plain, atol=1e-3)


DAMAGE = [
    _without_a_group,
    _other_sizes,
    _no_numbers,
    _no_sizes,
    _too_few_tensors,
    _too_many_tensors,
    _another_length,
    _another_head_s_tokens,
    _positions_beyond,
    _no_lists_of_codes,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda change: change.__name__)
def test_a_file_that_was_edited_is_refused(damage, pocket, text, tmp_path):
    path = tmp_path / "cache.safetensors"
    filled_cache(pocket[0], text).save(path)
    about, tensors = load_about(path)
    damage(about, tensors)
    FILE_FORMAT.write(path, tensors, about)
    with pytest.raises(CacheError, match="save"):
        CompressedCache.load(path, pocket[0])


def test_a_file_for_settings_whose_heads_are_alike_is_refused(pocket, text, tmp_path):
    path = tmp_path / "cache.safetensors"
    filled_cache(pocket[0], text).save(path)
    about, tensors = load_about(path)
    about["pruning"]["read"] = "pages"
    FILE_FORMAT.write(path, tensors, about)
    with pytest.raises(CacheError):
        CompressedCache.load(path, pocket[0])


@pytest.mark.slow
def test_a_compiled_step_gives_the_same(pocket, text):
    model = copy.deepcopy(pocket[0])
    plain, compiled = filled_cache(model, text), filled_cache(model, text)
    following = text[:, PROMPT : PROMPT + 3].split(1, dim=1)
    expected = [step(model, plain, part) for part in following]
    model.forward = torch.compile(model.forward, backend="eager")
    for part, wanted in zip(following, expected, strict=True):
        torch.testing.assert_close(step(model, compiled, part), wanted, rtol=1e-4, atol=1e-4)


def test_kernels_read_each_run_of_heads(pocket, text, monkeypatch):
    seen = []
    decode = by_kernel.kernel_for

    def watched(query, *stored):
        seen.append(query.shape[1])
        return decode(query, *stored)

    monkeypatch.setattr(by_kernel, "kernel_for", watched)
    monkeypatch.setattr(by_kernel, "worth_a_kernel", lambda *rest: True)
    cache = filled_cache(pocket[0], text)
    step(pocket[0], cache, text[:, PROMPT : PROMPT + 1])
    groups = [group.kept_indices.shape[1] for layer in cache.layers for group in layer.compressed.groups]
    assert len(groups) > 3
    assert seen == [pocket[0].config.num_attention_heads // 2 * heads for heads in groups]
