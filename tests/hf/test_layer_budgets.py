"""`LayerBudgets` and what it divides by: curves, sums and floors; what layers keep in a cache; losses as measured."""

from __future__ import annotations

import copy
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import cache_utils

from grace_opt.errors import CacheError, CalibrationError, OptionError
from grace_opt.hf import (
    H2O,
    CacheConfig,
    CompressedCache,
    GraphEviction,
    LayerBudgets,
    LayerLosses,
    PyramidKV,
    SnapKV,
    StreamingLLM,
    attach,
    attention_implementation,
    calibrate,
    capture_attention,
)
from grace_opt.hf.engine.filling import dense_cache
from grace_opt.hf.evict import layer_budgets
from grace_opt.hf.evict.kept_tokens import kept_tokens, tokens_kept
from grace_opt.hf.evict.names import eviction_from_dict, eviction_to_dict
from grace_opt.hf.models import load_pocket
from grace_opt.hf.models.attention import register
from grace_opt.hf.tools.evaluation import compare_predictions, next_token_log_probs
from tests import oracle

SHARES = (0.1, 0.25, 0.5)
LOSSES = LayerLosses((0, 1, 2), SHARES, ((0.5, 0.2, 0.04), (0.004, 0.001, 0.0001), (0.05, 0.02, 0.01)))
BY_HEADS = LayerLosses(
    (0, 1, 2),
    SHARES,
    (
        ((0.5, 0.2, 0.04), (0.02, 0.01, 0.001)),
        ((0.004, 0.001, 0.0001), (0.0004, 0.0001, 0.00001)),
        ((0.01, 0.004, 0.002), (0.05, 0.02, 0.01)),
    ),
)
numbers = st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.sampled_from([1e-3, 0.1, 2.0]))
drawn = (
    st.integers(1, 4)
    .flatmap(lambda layers: st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=layers, max_size=layers))
    .map(lambda rows: LayerLosses(range_of(rows), SHARES, rows))
)
drawn_by_heads = (
    st.tuples(st.integers(1, 3), st.integers(1, 3))
    .flatmap(
        lambda size: st.lists(
            st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=size[1], max_size=size[1]),
            min_size=size[0],
            max_size=size[0],
        )
    )
    .map(lambda rows: LayerLosses(range_of(rows), SHARES, rows))
)


def range_of(rows):
    return list(range(len(rows)))


# ------------------------------------------------------------------ curves


@given(drawn | drawn_by_heads)
def test_a_curve_goes_through_what_was_measured_and_never_rises(losses):
    shares = np.linspace(0.001, 1, 300)
    curves = losses.relative_curves(shares)
    assert np.isfinite(curves).all()
    assert (np.diff(curves) <= 1e-9 * curves[..., :-1]).all()
    assert (curves[..., -1] == 0).all()
    largest = np.max(losses.losses)
    for row, found in zip(losses.losses, losses.curves(SHARES), strict=True):
        for place, loss in enumerate(found):
            # A larger share that lost more: this one cannot be better.
            expected = sum(max(head[place:]) for head in (row if losses.heads else [row]))
            if max(1e-11 * largest, 1e-290) < expected:  # a loss of nothing counts as 1e-12 of the largest
                assert loss == pytest.approx(expected, rel=1e-9, abs=1e-11 * largest * max(losses.heads - 1, 0))


def test_between_and_beyond_shares_a_curve_is_a_power():
    losses = LayerLosses([3], [0.1, 0.4], [[1e-2, 1e-4]])
    power = np.log(1e-2) / np.log(4)
    found = losses.curves([0.05, 0.2, 0.7])[0]
    assert found == pytest.approx([1e-2 * 0.5**power, 1e-2 * 2**power, 0.5e-4])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (((), SHARES, ()), "at least one"),
        (((1, 0), SHARES, ((1.0,) * 3,) * 2), "ascending"),
        (((True,), SHARES, ((1.0,) * 3,)), "positions in the model"),
        (((0,), (0.5,), ((1.0,),)), "at least two"),
        (((0,), (0.5, 1.0), ((1.0, 0.0),)), "between 0 and 1"),
        (((0,), (0.5, 0.25), ((1.0, 0.0),)), "ascending"),
        (((0, 1), SHARES, ((1.0,) * 3,)), "2 rows"),
        (((0,), SHARES, ((1.0, 0.0),)), "of 3 numbers"),
        (((0,), SHARES, (((1.0, 0.0),),)), "one for each of its heads"),
        (((0, 1), SHARES, (((1.0,) * 3,), (1.0,) * 3)), "one for each of its heads"),
        (((0, 1), SHARES, ((1.0,) * 3, ((1.0,) * 3,))), "losses of layer 1"),
        (((0, 1), SHARES, (((1.0,) * 3,), ((1.0,) * 3,) * 2)), "layer 1: 2 heads, and 1 of the first"),
        (((0,), SHARES, ((),)), "losses of layer 0"),
        (((0,), SHARES, (((1.0, -1.0, 1.0),),)), "not negative"),
        (((0,), SHARES, ((1.0, -1e-9, 0.0),)), "not negative"),
        (((0,), SHARES, ((float("nan"), 0.1, 0.0),)), "losses of layer 0"),
        (((0,), SHARES, (("1", 0.1, 0.0),)), "losses of layer 0"),
        ((0, SHARES, ((1.0,) * 3,)), "layers=0: give a list"),
        (((0,), SHARES, ((1.0,) * 3,), 7), "fingerprint=7"),
    ],
)
def test_losses_that_do_not_belong_together_are_refused(fields, words):
    with pytest.raises(CalibrationError, match=words):
        LayerLosses(*fields)


# ------------------------------------------------------------------ how a budget is divided


@pytest.mark.slow
@given(drawn, st.integers(1, 3000), st.one_of(st.integers(1, 3000), st.floats(0.001, 0.999)), st.integers(0, 40))
def test_no_more_is_kept_than_with_equal_budgets_and_no_more_is_lost(losses, length, budget, sinks):
    if isinstance(budget, int):
        sinks = min(sinks, budget)
    evict = StreamingLLM(budget=budget, sinks=sinks)
    divided, layers, mean = LayerBudgets(evict, losses), len(losses.layers), evict.count(length)
    found = [divided.tokens(layer, layers, length) for layer in losses.layers]
    assert sum(found) <= layers * mean
    assert all(min(sinks, length, mean) <= count <= length for count in found)
    assert all(count >= Fraction(mean, 8) for count in found)
    lost = sum(losses.relative_curves([count / length])[row].sum() for row, count in enumerate(found))
    assert lost <= losses.relative_curves([mean / length]).sum() * (1 + 1e-9)


@pytest.mark.slow
@given(
    drawn_by_heads,
    st.integers(1, 3000),
    st.one_of(st.integers(1, 3000), st.floats(0.001, 0.999)),
    st.integers(0, 200),
    st.sampled_from([1, 2, 32]),
    st.integers(0, 2),
)
def test_heads_keep_no_more_either_and_lose_no_more(losses, length, budget, least, step, dense):
    evict = StreamingLLM(budget=budget, sinks=0)
    divided, mean = LayerBudgets(evict, losses), tokens_kept(evict, 0, 1, length, least)
    layers = [layer for layer in losses.layers if layer >= dense]
    rows = [divided.tokens_of_heads(layer, length, least=least, dense_layers=dense, step=step) for layer in layers]
    assert all(divided.tokens_of_heads(layer, length, dense_layers=dense) == () for layer in range(dense))
    found = [count for row in rows for count in row]
    assert [len(row) for row in rows] == [losses.heads] * len(layers)
    assert sum(found) <= len(found) * mean
    assert all(min(least, length, mean) <= count <= length for count in found)
    assert all(count >= Fraction(mean, 8) for count in found)
    assert {*found} <= {mean} or all((length - count) % step == 0 for count in found)
    lost = sum(
        losses.relative_curves([count / length])[layer, head, 0]
        for layer, row in zip(layers, rows, strict=True)
        for head, count in enumerate(row)
    )
    equal = losses.relative_curves([mean / length])[layers].sum()
    assert lost <= equal * (1 + 1e-9)


@pytest.mark.parametrize("share", SHARES)
def test_what_is_lost_is_the_least_up_to_a_step(share, monkeypatch):
    monkeypatch.setattr(layer_budgets, "STEPS", 8)
    layer_budgets._divided.cache_clear()
    evict = SnapKV(budget=share, window=4)
    mean = evict.count(400)
    found = [LayerBudgets(evict, LOSSES).tokens(layer, 3, 400) for layer in range(3)]
    layer_budgets._divided.cache_clear()
    levels = np.unique([*np.geomspace(max(-(-mean // 8), 4), 400, 8).round(), mean, 400])
    losses, costs = LOSSES.curves(levels / 400).tolist(), [levels.tolist()] * 3
    best = oracle.allocation(losses, costs, [(range(3), 3 * mean)])
    lost = sum(LOSSES.curves([count / 400])[layer, 0] for layer, count in enumerate(found))
    assert float(best) * (1 - 1e-9) <= lost <= float(best + max(map(oracle.largest_step, losses, costs)))
    assert found[0] > found[2] > found[1]


@pytest.mark.parametrize("share", SHARES)
def test_what_heads_lose_is_the_least_up_to_a_step(share, monkeypatch):
    monkeypatch.setattr(layer_budgets, "STEPS", 5)
    layer_budgets._divided.cache_clear()
    evict = SnapKV(budget=share, window=4)
    mean = evict.count(400)
    found = [count for layer in range(3) for count in LayerBudgets(evict, BY_HEADS).tokens_of_heads(layer, 400)]
    layer_budgets._divided.cache_clear()
    levels = np.unique([*np.geomspace(max(-(-mean // 8), 4), 400, 5).round(), mean, 400])
    largest = np.max(BY_HEADS.losses)
    losses = (BY_HEADS.relative_curves(levels / 400) * largest).reshape(6, -1).tolist()
    costs = [levels.tolist()] * 6
    best = oracle.allocation(losses, costs, [(range(6), 6 * mean)])
    lost = sum(row[levels.tolist().index(count)] for row, count in zip(losses, found, strict=True))
    assert float(best) * (1 - 1e-9) <= lost <= float(best + max(map(oracle.largest_step, losses, costs)))
    assert found[0] >= found[1] >= found[3]
    assert found[5] >= found[4]
    assert len({*found}) > 1


def test_a_layer_that_was_not_measured_keeps_the_mean():
    assert LayerBudgets(SnapKV(budget=0.25), LOSSES).tokens(7, 8, 400) == 100


@pytest.mark.parametrize("largest", [1e-300, 1.0, 1e300])
def test_the_size_of_the_losses_does_not_matter_and_a_layer_of_nothing_keeps_least(largest):
    losses = LayerLosses((0, 1), (0.25, 0.5), ((largest, largest / 10), (largest * 1e-9, largest * 1e-10)))
    assert [LayerBudgets(SnapKV(0.25), losses).tokens(layer, 2, 1000) for layer in range(2)] == [468, 32]


@pytest.mark.parametrize("rows", [((0, 0),) * 3, (((0, 0), (0, 0)),) * 3], ids=["layers", "heads"])
@pytest.mark.parametrize("budget", [0.25, 300, 499])
def test_losses_of_nothing_tell_nobody_apart(rows, budget):
    divided = LayerBudgets(SnapKV(budget), LayerLosses((0, 1, 2), (0.25, 0.5), rows))
    equal = SnapKV(budget).count(500)
    assert {divided.tokens(layer, 3, 500) for layer in range(3)} == {equal}
    assert {count for layer in range(3) for count in divided.tokens_of_heads(layer, 500)} <= {equal}


def test_what_no_loss_asks_for_is_kept_all_the_same():
    rows = (((0, 0), (0.2, 0.1)), ((0.3, 0.1), (0.2, 0.1)), ((0.2, 0.1), (0.2, 0.1)))
    divided = LayerBudgets(SnapKV(450), LayerLosses((0, 1, 2), (0.25, 0.5), rows))
    found = [divided.tokens_of_heads(layer, length=499) for layer in range(3)]
    assert found[0][0] > 150
    assert {*found[0][1:], *found[1], *found[2]} == {499}
    assert 0.99 * 6 * 450 < sum(map(sum, found)) <= 6 * 450


@pytest.mark.parametrize("least", [0, 37, 90])
def test_layers_are_divided_alike_by_losses_of_heads_and_by_their_sums(least):
    for budget in (0.1, 0.25, 0.5):
        by_heads, by_sums = (LayerBudgets(SnapKV(budget), each) for each in (BY_HEADS, BY_HEADS.of_layers()))
        for layer in range(3):
            assert by_heads.tokens(layer, 3, 499, least=least) == by_sums.tokens(layer, 3, 499, least=least)


@pytest.mark.parametrize("budget", [0.1, 0.25, 100])
@pytest.mark.parametrize(("least", "dense"), [(0, 0), (33, 0), (90, 0), (33, 1), (0, 2)])
def test_what_stays_dense_is_paid_for(budget, least, dense):
    """Nothing is shared with layers that do not evict, and what each keeps in any case counts."""
    divided = LayerBudgets(StreamingLLM(budget), LOSSES)
    found = [tokens_kept(divided, layer, 3, 400, least, dense) for layer in range(dense, 3)]
    mean = tokens_kept(StreamingLLM(budget), 0, 3, 400, least)
    assert min(found) >= min(least, mean)
    assert 0.97 * len(found) * mean <= sum(found) <= len(found) * mean


@pytest.mark.parametrize("evict", [PyramidKV(), LayerBudgets(SnapKV(), LOSSES), SnapKV, "snapkv", None])
def test_evictions_that_have_no_equal_budget_are_refused(evict):
    with pytest.raises(OptionError, match="write an object of SnapKV"):
        LayerBudgets(evict, LOSSES)
    with pytest.raises(OptionError, match=r"losses=calibrate\.budgets"):
        LayerBudgets(SnapKV(), "losses.safetensors")


# ------------------------------------------------------------------ in a cache


@pytest.fixture(scope="module")
def pocket():
    return load_pocket()


@pytest.fixture(scope="module")
def text(pocket):
    return pocket[1](
        "the quiet river runs past a late singer , and the mill stands . " * 90, return_tensors="pt"
    ).input_ids


@pytest.fixture(scope="module")
def hiding(pocket):
    """Predict later tokens on dense keys and values, of which each head sees only some."""
    model, state = pocket[0], {}

    def attend(module, query, key, value, attention_mask, scaling, **_):
        new, total, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
        mask = torch.ones(query.shape[1], new, total, dtype=torch.bool).tril(total - new)
        if module.layer_idx in state["shown"]:
            shown = state["shown"][module.layer_idx]
            mask[..., : shown.shape[1]] &= shown.repeat_interleave(group, 0)[:, None]
        key, value = (part.repeat_interleave(group, 1) for part in (key, value))
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        return found.transpose(1, 2).contiguous(), None

    register("tests_hiding", attend, "sdpa")

    def predictions(captured, following, shown):
        state["shown"] = shown
        with torch.no_grad(), attention_implementation(model, "tests_hiding"):
            return next_token_log_probs(model, dense_cache(model, captured), following)

    return predictions


EVICTIONS = [
    SnapKV(budget=0.25, window=4),
    SnapKV(budget=60, window=4),
    H2O(budget=0.25, window=None, observed=None),
    StreamingLLM(budget=0.25),
    GraphEviction(budget=0.25),
    GraphEviction(budget=60, observed=8, stride=32, averages=2, block=None),
]


@pytest.mark.slow
@pytest.mark.parametrize("evict", EVICTIONS, ids=[type(one).__name__ + str(n) for n, one in enumerate(EVICTIONS)])
def test_each_layer_keeps_its_share_and_chooses_as_with_that_budget(evict, pocket, text):
    model, divided = pocket[0], LayerBudgets(evict, LOSSES)
    with attention_implementation(model, "grace_sdpa"):
        cache = CompressedCache(model, ratio=0.0, recent_window=8, evict=divided)
        model(text[:, :240], past_key_values=cache)
        counts = [divided.tokens(layer, 3, 240, least=9) for layer in range(3)]
        assert counts[0] > counts[2] > counts[1]
        for layer, count in enumerate(counts):
            alone = CompressedCache(model, ratio=0.0, recent_window=8, evict=divided.keeping(count))
            model(text[:, :240], past_key_values=alone)
            found, expected = cache.layers[layer].compressed, alone.layers[layer].compressed
            assert found.stored == count - 8
            if layer == 0:  # later ones have read what the first has kept
                assert torch.equal(found.positions, expected.positions)


def test_no_layer_keeps_less_than_stays_dense(pocket, text):
    with attention_implementation(pocket[0], "grace_sdpa"):
        cache = CompressedCache(pocket[0], ratio=0.0, recent_window=20, evict=LayerBudgets(SnapKV(30, 4), LOSSES))
        pocket[0](text[:, :240], past_key_values=cache)
    assert [layer.compressed.stored for layer in cache.layers][1] == 1
    with pytest.raises(OptionError, match="nothing would be left to prune"):
        CompressedCache(pocket[0], recent_window=40, evict=LayerBudgets(SnapKV(30, 4), LOSSES))


def test_with_bits_and_in_a_padded_batch(pocket, text):
    evict = LayerBudgets(SnapKV(budget=0.5, window=4), LOSSES)
    ids = torch.cat([text[:, :300], text[:, 7:307]])
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    with attach(pocket[0], bits=4, basis="none", evict=evict, recent_window=16):
        out = pocket[0].generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert out.shape == (2, 303)


def test_goes_into_json_and_saved_caches_and_back(pocket, text, tmp_path):
    evict = LayerBudgets(GraphEviction(budget=0.25), LOSSES)
    assert eviction_from_dict(json.loads(json.dumps(eviction_to_dict(evict)))) == evict
    config = CacheConfig(ratio=0.0, evict=evict)
    assert CacheConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(copy.deepcopy(config))
    with attention_implementation(pocket[0], "grace_sdpa"):
        cache = CompressedCache(pocket[0], ratio=0.0, evict=evict)
        pocket[0](text[:, :240], past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
        again = CompressedCache.load(tmp_path / "cache.safetensors", pocket[0])
    assert again.config.evict == evict
    assert [one.compressed.stored for one in again.layers] == [one.compressed.stored for one in cache.layers]


@pytest.mark.parametrize(
    "change",
    [
        {"evict": 3},
        {"losses": None},
        {"losses": {"layers": [0]}},
        {"losses": {"size": 3}},
        {"more": 1},
        {"evict": {"name": "pyramidkv"}},
    ],
)
def test_damaged_json_is_refused(change):
    saved = json.loads(json.dumps(eviction_to_dict(LayerBudgets(SnapKV(), LOSSES))))
    with pytest.raises(OptionError):
        eviction_from_dict({**saved, **change})


def test_losses_of_another_model_are_refused(pocket):
    model = pocket[0]
    for losses, words in (
        (LayerLosses((0, 9), SHARES, ((1.0,) * 3,) * 2), "losses of layer 9, model with 3 layers"),
        (LayerLosses((0,), SHARES, ((1.0,) * 3,), {"head_dim": 128}), "head_dim: losses 128, model 64"),
        (LayerLosses((0,), SHARES, ((1.0,) * 3,), {"weights": "0"}), "the weights differ"),
    ):
        with pytest.raises(CalibrationError, match=words):
            CompressedCache(model, evict=LayerBudgets(SnapKV(), losses))
        with pytest.raises(CalibrationError, match=words):
            losses.check_model(model)
    CompressedCache(
        model.config, evict=LayerBudgets(SnapKV(), LayerLosses((0,), SHARES, ((1.0,) * 3,), {"weights": "0"}))
    )


# ------------------------------------------------------------------ the calibration


class OneLayer:
    """Evicts in one layer alone, as a policy of one's own does."""

    def __init__(self, layer, evict):
        self.layer, self.evict, self.queries_needed = layer, evict, evict.queries_needed

    def tokens(self, layer, layers, length):
        return self.evict.tokens(layer, layers, length) if layer == self.layer else length

    def scores(self, *arguments):
        return self.evict.scores(*arguments)


@pytest.mark.slow
def test_losses_are_those_of_one_layer_that_evicts_while_the_model_reads(pocket, text):
    model, before = pocket[0], pocket[0].config._attn_implementation
    later, read = 96, text[:, :768]
    model.train()
    steps = []
    evict = SnapKV(budget=3, window=2)  # its budget does not count
    losses = calibrate.budgets(
        model,
        None,
        [text, text[:, :700]],
        evict=evict,
        tokens=768,
        heads=False,
        advance=lambda *now: steps.append((*now, model.training)),
    )
    assert model.training
    model.eval()
    assert steps == [(1, 3, False), (2, 3, False), (3, 3, False)]  # the short text says nothing
    assert model.config._attn_implementation == before
    assert losses.layers == (0, 1, 2)
    losses.check_model(model)
    with torch.no_grad(), attention_implementation(model, "grace_sdpa"):

        def fed(**settings):
            cache = CompressedCache(model, ratio=0.0, **settings)
            model(read[:, :-later], past_key_values=cache)
            return next_token_log_probs(model, cache, read[:, -later:])

        dense = fed()
        for layer in range(3):
            for share, loss in zip(losses.shares, losses.losses[layer], strict=True):
                found = fed(evict=OneLayer(layer, SnapKV(budget=share, window=2)))
                assert loss == pytest.approx(
                    compare_predictions(found, dense, read[0, 1 - later :]).kl, rel=1e-3, abs=1e-9
                )
    assert losses.losses[0][0] > 0


@pytest.mark.slow
def test_losses_of_heads_are_those_of_one_head_whose_tokens_are_hidden(pocket, text, hiding):
    model, read = pocket[0], text[:, :672]
    evict = SnapKV(budget=3, window=2)
    losses = calibrate.budgets(model, None, [text[:, :768]], evict=evict)
    captured = capture_attention(model, read)
    dense = hiding(captured, text[:, 672:768], {})
    assert losses.heads == 2
    for layer, (row, seen) in enumerate(zip(losses.losses, captured.values(), strict=True)):
        for place, share in enumerate(losses.shares):
            parts = seen.queries[:, :, -2:], seen.keys, None, seen.scaling
            kept = kept_tokens(SnapKV(budget=share, window=2), *parts, layer, 3, last=32)
            for head in range(2):
                shown = torch.ones(2, 672, dtype=torch.bool)
                shown[head] = torch.zeros(672, dtype=torch.bool).scatter_(0, kept[0, head], True)
                found = hiding(captured, text[:, 672:768], {layer: shown})
                kl = compare_predictions(found, dense, text[0, 673:768]).kl
                assert row[head][place] == pytest.approx(kl, rel=1e-3, abs=1e-8)
    assert max(head[0] for head in losses.losses[0]) > 0
    assert losses.of_layers().losses[0][0] == pytest.approx(sum(head[0] for head in losses.losses[0]))


@pytest.mark.parametrize("losses", [LOSSES, BY_HEADS], ids=["layers", "heads"])
def test_losses_go_into_a_file_and_back(losses, tmp_path):
    path = tmp_path / "losses.safetensors"
    losses = LayerLosses(losses.layers, SHARES, losses.losses, {"head_dim": 64})
    losses.save(path)
    assert LayerLosses.load(path) == losses
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CalibrationError, match="cannot be read as a file of losses"):
        LayerLosses.load(path)
    with pytest.raises(CalibrationError, match="no file of losses of layers at"):
        LayerLosses.load(tmp_path / "none.safetensors")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((["a text"],), OptionError, r"write calibrate\.budgets\(model, tokenizer, texts\)"),
        ((), OptionError, "need the model's tokenizer"),
        (
            (None, ["a text"]),
            OptionError,
            r"texts need their tokenizer; write calibrate\.budgets\(model, tokenizer, texts\)",
        ),
        ((None, [torch.ones(700, dtype=torch.int64)]), CalibrationError, "no text has 768 tokens"),
        ((None, [torch.full((800,), 10**6)]), OptionError, "text 1 has the token number 1000000"),
        ((None, [torch.ones(800)]), OptionError, "text 1 is of torch.float32, and token numbers are integers"),
    ],
)
def test_what_cannot_be_measured_says_why(arguments, error, words, pocket):
    with pytest.raises(error, match=words):
        calibrate.budgets(pocket[0], *arguments)


def test_a_model_that_predicts_nothing_is_refused(pocket, text):
    with pytest.raises(OptionError, match="LlamaModel predicts no tokens"):
        calibrate.budgets(pocket[0].model, None, [text])


def test_evictions_that_divide_budgets_are_not_calibrated(pocket, text):
    with pytest.raises(OptionError, match=r"calibrate\.budgets\(evict=PyramidKV"):
        calibrate.budgets(pocket[0], None, [text], evict=PyramidKV())


def test_choosing_tokens_without_a_cache_takes_the_layer_s_budget():
    generator = torch.Generator().manual_seed(0)
    queries, keys = (torch.randn(1, 2, 120, 4, generator=generator) for _ in range(2))
    divided = LayerBudgets(SnapKV(budget=0.25, window=4), LOSSES)
    for layer in range(3):
        count = divided.tokens(layer, 3, 120)
        found = kept_tokens(divided, queries[:, :, -4:], keys, None, 0.5, layer, 3)
        assert torch.equal(found, kept_tokens(SnapKV(count, 4), queries[:, :, -4:], keys, None, 0.5, layer, 3))


MIXED = {"layer_types": ("linear_attention", "full_attention"), "linear_num_key_heads": 2, "linear_num_value_heads": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [("Qwen3Next", MIXED), ("GptOss", EXPERTS | {"attention": "grace_eager"})],
    ids=["hybrid", "sinks"],
)
def test_models_with_other_layers_and_sinks_are_measured(name, changes, tiny):
    model = tiny(name, max_position_embeddings=2048, **changes)
    if changes is MIXED and not hasattr(cache_utils, "LinearAttentionLayer"):
        with pytest.raises(CacheError, match=r"states \(linear_attention\).*update transformers"):
            calibrate.budgets(model, None, [torch.ones(1, 800, dtype=torch.int64)])
        return
    ids = torch.randint(1, 60, (1, 800), generator=torch.Generator().manual_seed(0))
    losses = calibrate.budgets(model, None, [ids], evict=StreamingLLM())
    assert losses.layers == CompressedCache(model, ratio=0.0, fused=False).prunable_layers
    assert all(head[0] > 0 for row in losses.losses for head in row)
    assert losses.heads == model.config.num_key_value_heads


def test_too_few_positions_are_said(tiny):
    with pytest.raises(CalibrationError, match="the model has 256 positions"):
        calibrate.budgets(tiny(), None, [torch.ones(1, 900, dtype=torch.int64)])


def test_with_bits_the_message_is_about_the_eviction_inside(pocket):
    with pytest.raises(OptionError, match=r"^GraphEviction needs all.*write GraphEviction\(stride=0"):
        CacheConfig(bits=4, basis="none", evict=LayerBudgets(GraphEviction(), LOSSES))
