"""Eviction, sink tokens, growth and quantisation in the cache, each against a dense cache that is doctored by hand."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import DynamicCache

import grace_opt.hf
from grace_opt import MaskProvider
from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import H2O, PyramidKV, Quantize, SnapKV, StreamingLLM

EVICTIONS = {
    "none": None,
    "SnapKV": SnapKV(budget=24, window=6),
    "H2O": H2O(budget=24, window=6, observed=6),
    "H2O, all queries": H2O(budget=24, window=None, observed=None),
    "StreamingLLM": StreamingLLM(budget=24, sinks=3),
}


@torch.no_grad()
def doctored(model, cache, prompt, mask, continuation):
    """Logits of one layer with a dense cache: pruned channels are zeroed in it, evicted tokens masked, head by head."""
    old = cache.layers[0].compressed
    sinks, batch, heads = old.sink_keys.shape[2], len(prompt), old.sink_keys.shape[1]
    positions = torch.arange(old.length).expand(batch, 1, -1) if old.positions is None else old.positions.long()
    positions = positions.expand(-1, heads, -1)
    with grace_opt.hf.attention_implementation(model, "sdpa"):
        dense = DynamicCache(config=model.config)
        where = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = [model(prompt, attention_mask=mask, position_ids=where, past_key_values=dense).logits[:, -1:]]
        keys = dense.layers[0].keys
        narrow = keys.masked_fill(cache.channel_mask().pruned[0][:, :, None], 0.0)
        pruned = torch.zeros(keys.shape[:3], dtype=torch.bool).scatter_(2, positions[:, :, sinks:], True)
        dense.layers[0].keys = torch.where(pruned[..., None], narrow, keys)
        stored = torch.zeros(keys.shape[:3], dtype=torch.bool).scatter_(2, positions, True)
        stored[:, :, old.length :] = True
        visible = (stored & mask.bool()[:, None]).repeat_interleave(4 // heads, dim=1)
        for token in continuation.split(1, dim=1):
            visible = torch.cat([visible, torch.ones_like(visible[..., :1])], dim=-1)
            where = where[:, -1:] + 1
            step = model(token, attention_mask=visible[:, :, None], position_ids=where, past_key_values=dense)
            logits.append(step.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("evict", EVICTIONS)
def test_equals_masking_and_zeroing_by_hand(
    evict, sinks, fused, tiny, prune, padded, prompt, continuation, step, close
):
    model = tiny(num_hidden_layers=1)
    for ids, mask in (padded, (prompt, torch.ones_like(prompt))):
        cache = prune(model, "mies", 0.5, evict=EVICTIONS[evict], sink_tokens=sinks, fused=fused)
        found = step(model, cache, ids, continuation, mask)
        assert cache.layers[0].compressed.stored == (32 if evict == "none" else 16)
        assert cache.get_seq_length() == 52
        assert close(found, doctored(model, cache, ids, mask, continuation))


@pytest.mark.parametrize(("sinks", "weight"), [(0, "frobenius"), (3, "frobenius"), (0, "output"), (3, "output")])
@pytest.mark.parametrize("evict", EVICTIONS)
def test_a_padded_row_equals_the_row_alone(evict, sinks, weight, tiny, prune, padded, continuation, step, close):
    model = tiny()
    options = {"evict": EVICTIONS[evict], "sink_tokens": sinks, "weight": weight}
    prompt, mask = padded
    together, alone = prune(model, "grace", 0.5, **options), prune(model, "grace", 0.5, **options)
    a = step(model, together, prompt, continuation, mask)
    b = step(model, alone, prompt[1:, 13:], continuation[1:])
    assert torch.equal(together.channel_mask().pruned[:, 1], alone.channel_mask().pruned[:, 0])
    assert close(a[1:], b)


def test_all_queries_of_a_short_padded_row_count(tiny, prune, padded, continuation, step):
    """Its sinks are stored before its padding: the mask for the choice must not be in that order."""
    model, (prompt, mask), counted = tiny(), padded, []

    def source(queries, keys, attention_mask=None):
        counted.append(attention_mask[:, -queries.shape[2] :].sum(-1).tolist())
        return MaskProvider("mies", 0.5)(queries, keys, attention_mask)

    evict = SnapKV(budget=36, window=4)
    cache = prune(model, provider=source, evict=evict, sink_tokens=3, observation_window=32)
    step(model, cache, prompt, continuation[:, :1], mask)
    assert counted == [[32, 27], [32, 27]]


def test_sink_tokens_of_a_padded_row_are_its_first_real_ones(tiny, prune, padded, continuation, step):
    model = tiny()
    cache = prune(model, "mies", 0.5, sink_tokens=3)
    step(model, cache, *[padded[0], continuation[:, :1], padded[1]])
    positions = cache.layers[0].compressed.positions
    assert positions[:, 0, :3].tolist() == [[0, 1, 2], [13, 14, 15]]
    assert positions.sort().values[1, 0].tolist() == list(range(32))


def test_channels_are_chosen_by_the_values_of_the_tokens_that_are_left(tiny, prune, prompt, continuation, step):
    """Values of evicted tokens must not count, in every head its own."""
    model = tiny()
    cache = prune(model, "think", 0.5, weight="output", evict=SnapKV(budget=20, window=6))
    step(model, cache, prompt, continuation[:, :1])
    choose = grace_opt.MaskProvider("think", 0.5, weight="output")
    for layer, seen in grace_opt.hf.capture_attention(model, prompt).items():
        left = cache.layers[layer].compressed.positions.long().sort().values
        window = torch.arange(32, prompt.shape[1]).expand(*left.shape[:2], -1)
        keys, values = (
            part.gather(2, torch.cat([left, window], -1)[..., None].expand(-1, -1, -1, part.shape[-1]))
            for part in (seen.keys, seen.values)
        )
        observed = seen.queries[:, :, -cache.config.channels.observation_window :]
        expected = choose(observed, keys, None, values, seen.scaling)
        assert torch.equal(cache.channel_mask().pruned[layer], expected.pruned)


def test_evicted_tokens_are_gone_from_memory(tiny, prune, prompt, continuation, step):
    model = tiny()
    cache = prune(model, "mies", 0.5, evict=SnapKV(budget=20, window=6))
    step(model, cache, prompt, continuation[:, :1])
    report = cache.memory_report()
    heads = 2 * 2 * 2  # layers, batch, KV heads
    assert report.pruned_key_bytes == heads * 12 * 8 * 4
    assert report.value_bytes == heads * (12 + 8 + 1) * 16 * 4
    assert report.dense_equivalent_key_bytes == heads * 41 * 16 * 4


def test_channels_are_chosen_from_the_tokens_that_are_left(tiny, prune, prompt, continuation, step):
    """The source is shown the kept keys, in every head its own, and the prompt's last queries."""
    model = tiny()
    seen = []

    def spy(queries, keys, attention_mask=None):
        seen.append((queries, keys, attention_mask))
        return grace_opt.MaskProvider("mies", 0.5)(queries, keys, attention_mask)

    cache = prune(model, evict=SnapKV(budget=20, window=6), provider=spy)
    step(model, cache, prompt, continuation[:, :1])
    truth = grace_opt.hf.capture_attention(model, prompt)
    for layer, (queries, keys, _) in enumerate(seen):
        positions = cache.layers[layer].compressed.positions.long()
        positions = torch.cat([positions, torch.arange(32, 40).expand(2, 2, -1)], dim=-1)
        expected = truth[layer].keys.gather(2, positions[..., None].expand(-1, -1, -1, 16))
        torch.testing.assert_close(keys, expected)
        torch.testing.assert_close(queries, truth[layer].queries[:, :, -6:])


def test_pyramid_gives_early_layers_more(tiny, prune, prompt, continuation, step):
    model = tiny(num_hidden_layers=3)
    cache = prune(model, "mies", 0.5, evict=PyramidKV(budget=20, window=10))
    step(model, cache, prompt, continuation[:, :1])
    stored = [layer.compressed.stored for layer in cache.layers]
    assert stored == sorted(stored, reverse=True)
    assert stored[0] > stored[2]
    assert sum(stored) == pytest.approx(3 * 12, abs=1.5)


def test_a_budget_that_the_prompt_does_not_reach_evicts_nothing(tiny, prune, prompt, continuation, step, close):
    model = tiny()
    caches = prune(model, "mies", 0.5), prune(model, "mies", 0.5, evict=SnapKV(budget=40, window=6))
    a, b = (step(model, cache, prompt, continuation) for cache in caches)
    assert torch.equal(a, b)
    assert caches[1].layers[0].compressed.positions is None


@pytest.mark.parametrize("stored", [{}, {"quantize": Quantize(keys=4, values=4, group_size=8)}], ids=["", "4 bits"])
@pytest.mark.parametrize(("share", "of"), [(0.75, 30), (0.5, 20), (0.1, 16)])
def test_a_share_of_the_prompt_is_that_budget(share, of, stored, tiny, prune, prompt, continuation, step):
    """A share that leaves less than a group beside what stays dense is one group."""
    if stored:
        pytest.importorskip("optimum.quanto")
    model, found = tiny(), []
    for budget in (share, of if stored or share > 0.1 else 9):
        cache = prune(model, "mies", 0.5, evict=SnapKV(budget=budget, window=4), **stored)
        found.append(step(model, cache, prompt, continuation))
    assert torch.equal(*found)


def test_a_budget_that_leaves_nothing_to_prune(tiny, prune):
    model = tiny()
    with pytest.raises(OptionError, match=r"keeps 10 tokens in layer 0, and 11 stay dense .* write a larger budget"):
        prune(model, evict=SnapKV(budget=10, window=6), sink_tokens=3)
    pytest.importorskip("optimum.quanto")
    for budget, fits in ((23, False), (24, True)):
        make = functools.partial(prune, model, evict=SnapKV(budget, window=6), quantize=Quantize(keys=4, group_size=16))
        if fits:
            make()
        else:
            with pytest.raises(OptionError, match=r"and 8 stay dense .* in groups of 16: nothing would be left"):
                make()


class TestGrowth:
    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("block", [1, 4])
    def test_equals_zeroing_by_hand(self, block, fused, tiny, prune, padded, continuation, step, close):
        """Whatever has left the recent window, in whole blocks, is pruned before the step that sees it so."""
        model = tiny()
        prompt, mask = padded
        cache = prune(model, "mies", 0.5, tail_block=block, fused=fused)
        found = step(model, cache, prompt, continuation, mask)
        assert cache.layers[0].compressed.length == 32 + 12 // block * block
        pruned, fed = cache.channel_mask().pruned, []

        def zero(dense):
            border = 32 + len(fed) // block * block
            for layer, channels in zip(dense.layers, pruned, strict=True):
                layer.keys[:, :, :border].masked_fill_(channels[:, :, None], 0.0)

        class Doctored(DynamicCache):
            def update(self, key_states, value_states, layer_idx, *args, **kwargs):
                if key_states.shape[2] == 1 and layer_idx == 0:
                    fed.append(1)
                    zero(self)
                return super().update(key_states, value_states, layer_idx, *args, **kwargs)

        with grace_opt.hf.attention_implementation(model, "sdpa"):
            expected = step(model, Doctored(config=model.config), prompt, continuation, mask)
        assert close(found, expected)

    def test_is_off_by_default(self, tiny, prune, prompt, generate):
        model = tiny()
        cache = prune(model, "mies", 0.5)
        generate(model, cache, prompt, max_new_tokens=100)
        assert cache.layers[0].pruned_length == 32

    def test_with_eviction_and_sinks_keeps_its_positions(self, tiny, prune, padded, continuation, step, close):
        model = tiny(num_hidden_layers=1)
        prompt, mask = padded
        options = {"evict": SnapKV(budget=24, window=6), "sink_tokens": 2}
        grown = prune(model, "mies", 0.0, tail_block=4, **options)
        found = step(model, grown, prompt, continuation, mask)
        expected = step(model, prune(model, "mies", 0.0, **options), prompt, continuation, mask)
        assert close(found, expected), "with every channel kept, moving tokens changes nothing"
        assert grown.layers[0].compressed.positions[0, 0, -12:].tolist() == list(range(32, 44))

    def test_storage_grows_in_chunks_not_by_the_token(self, tiny, prune, prompt, generate):
        model = tiny()
        cache = prune(model, "mies", 0.5)
        addresses = set()
        original = type(cache).update

        def watched(self, *args, **kwargs):
            out = original(self, *args, **kwargs)
            if self.layers[0].compressed is not None:
                addresses.add(self.layers[0].tail.buffers[0].data_ptr())
            return out

        type(cache).update = watched
        try:
            generate(model, cache, prompt, max_new_tokens=150)
        finally:
            type(cache).update = original
        assert len(addresses) <= 4
        assert cache.layers[0].tail.length == 8 + 149

    def test_an_inference_mode_prompt_continues_outside_it(self, tiny, prune, prompt, continuation, step, close):
        model = tiny()
        expected = step(model, prune(model, "mies", 0.5), prompt, continuation)
        cache = prune(model, "mies", 0.5)
        with torch.inference_mode():
            model(prompt, past_key_values=cache)
            model(continuation[:, :1], past_key_values=cache)
        with torch.no_grad():
            out = [model(t, past_key_values=cache).logits for t in continuation[:, 1:].split(1, dim=1)]
        assert close(torch.cat(out, dim=1), expected[:, 2:])

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            {"fused": False},
            {"evict": SnapKV(budget=20, window=6)},
            {"evict": SnapKV(budget=20, window=6), "fused": False},
            {"read": "pages"},
            {"read": "channels"},
            {"read": "sampling"},
        ],
        ids=str,
    )
    def test_gradients_after_an_inference_mode_prompt(self, settings, tiny, prune, prompt, continuation, step, close):
        model = tiny()
        expected = step(model, prune(model, **settings), prompt, continuation)
        cache = prune(model, **settings)
        with torch.inference_mode():
            model(prompt, past_key_values=cache)
            model(continuation[:, :1], past_key_values=cache)
        out = [model(t, past_key_values=cache).logits for t in continuation[:, 1:].split(1, dim=1)]
        assert close(torch.cat(out, dim=1).detach(), expected[:, 2:])
        out[-1].sum().backward()
        assert model.model.layers[0].self_attn.q_proj.weight.grad.isfinite().all()
        model.zero_grad(set_to_none=True)

    def test_gradients_flow_through_later_steps(self, tiny, prune, prompt, continuation):
        """Room that is written in place would break the graph of the step before."""
        model = tiny()
        cache = prune(model, "mies", 0.5)
        model(prompt, past_key_values=cache)
        losses = [model(t, past_key_values=cache).logits.square().mean() for t in continuation[:, :3].split(1, dim=1)]
        sum(losses).backward()
        gradient = model.model.layers[0].self_attn.k_proj.weight.grad
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0
        model.zero_grad(set_to_none=True)


class TestQuantisation:
    @pytest.fixture(params=[("quanto", 4), ("quanto", 2), ("hqq", 8), ("hqq", 3)], ids=str)
    def stored_as(self, request):
        backend, bits = request.param
        pytest.importorskip({"quanto": "optimum.quanto", "hqq": "hqq"}[backend])
        return Quantize(keys=bits, values=bits, group_size=8, backend=backend)

    @pytest.mark.parametrize("fused", [True, False])
    def test_decodes_from_the_dequantised_numbers(
        self, fused, stored_as, tiny, prune, padded, continuation, step, close
    ):
        model = tiny()
        prompt, mask = padded
        cache = prune(model, "mies", 0.5, quantize=stored_as, fused=fused)
        found = step(model, cache, prompt, continuation, mask)

        def replace(dense):
            for mine, layer in zip(cache.layers, dense.layers, strict=True):
                keys, values = mine.full_width()
                layer.keys, layer.values = keys[:, :, :40].clone(), values[:, :, :40].clone()

        with grace_opt.hf.attention_implementation(model, "sdpa"):
            expected = step(model, DynamicCache(config=model.config), prompt, continuation, mask, replace)
        assert close(found, expected)

    def test_the_numbers_are_near_and_the_bytes_few(self, stored_as, tiny, prune, prompt):
        model = tiny()
        plain, coarse = prune(model, "mies", 0.5), prune(model, "mies", 0.5, quantize=stored_as)
        for cache in (plain, coarse):
            with torch.no_grad():
                model(prompt, past_key_values=cache)
        for mine, exact in zip(coarse.layers, plain.layers, strict=True):
            for found, expected in zip(mine.full_width(), exact.full_width(), strict=True):
                steps = 2**stored_as.keys - 1
                spread = expected.amax() - expected.amin()
                assert (found - expected).abs().max() <= 0.6 * spread / steps
                assert torch.equal(found[:, :, 32:], expected[:, :, 32:]), "the recent window is dense"
        few, many = coarse.memory_report(), plain.memory_report()
        assert few.pruned_key_bytes < many.pruned_key_bytes
        assert few.value_bytes < many.value_bytes

    def test_keys_alone_leave_values_exact(self, tiny, prune, prompt, continuation, step):
        pytest.importorskip("optimum.quanto")
        model = tiny()
        cache = prune(model, "mies", 0.5, quantize=Quantize(keys=4, group_size=8))
        step(model, cache, prompt, continuation[:, :1])
        exact = prune(model, "mies", 0.5)
        step(model, exact, prompt, continuation[:, :1])
        assert torch.equal(cache.layers[0].full_width()[1], exact.layers[0].full_width()[1])

    def test_what_fills_no_group_stays_dense_with_the_recent_window(self, tiny, prune, prompt, continuation, step):
        pytest.importorskip("optimum.quanto")
        model = tiny()
        cache = prune(model, "mies", 0.5, sink_tokens=3, quantize=Quantize(keys=4, group_size=8))
        step(model, cache, prompt, continuation[:, :1])
        assert cache.layers[0].pruned_length == 24
        assert cache.layers[0].compressed.length == 27

    @pytest.mark.slow
    def test_evicted_grown_reordered(self, stored_as, tiny, prune, prompt, generate):
        """Beams on quantised, evicted and growing storage: fused as zero-filled."""
        model = tiny()
        options = {"quantize": stored_as, "evict": SnapKV(budget=24, window=6), "tail_block": 8}
        runs = [
            generate(model, prune(model, "grace", 0.5, fused=fused, **options), prompt, num_beams=3, max_new_tokens=24)
            for fused in (True, False)
        ]
        assert torch.equal(*runs)


@pytest.mark.parametrize(
    "options",
    [{"evict": SnapKV(budget=24, window=6)}, {"sink_tokens": 2}, {"quantize": Quantize(keys=4, group_size=8)}],
)
def test_cropping_what_can_not_be_cut_is_refused_and_changes_nothing(options, tiny, prune, padded, continuation, step):
    if "quantize" in options:
        pytest.importorskip("optimum.quanto")
    model = tiny()
    cache = prune(model, "mies", 0.5, **options)
    step(model, cache, padded[0], continuation, padded[1])
    cache.crop(-4)
    assert cache.get_seq_length() == 48
    with pytest.raises(CacheError, match=r"can be cropped to 32 tokens or more, not to 20"):
        cache.crop(-28)
    assert cache.get_seq_length() == 48


def test_every_operation_on_every_kind_of_storage(tiny, prune, padded, continuation, step, close):
    """Repeat, select and re-order rows; move away and back."""
    pytest.importorskip("optimum.quanto")
    model = tiny()
    prompt, mask = padded
    options = {"evict": SnapKV(budget=24, window=6), "sink_tokens": 2, "quantize": Quantize(4, group_size=6)}
    cache, alone = prune(model, "mies", 0.5, **options), prune(model, "mies", 0.5, **options)
    expected = step(model, alone, prompt, continuation, mask)

    longer, logits = mask[[1, 0]], []
    with torch.no_grad():
        where = (mask.cumsum(-1) - 1).clamp(min=0)
        model(prompt, attention_mask=mask, position_ids=where, past_key_values=cache)
        cache.batch_repeat_interleave(2)  # 0 0 1 1
        cache.batch_select_indices(torch.tensor([True, False, True, True]))  # 0 1 1
        cache.reorder_cache(torch.tensor([1, 0]))  # 1 0
        for layer in cache.layers:
            layer.offload()
            layer.prefetch()
        for token in continuation[[1, 0]].split(1, dim=1):
            longer = torch.cat([longer, torch.ones_like(token)], dim=1)
            where = longer.sum(-1, keepdim=True) - 1
            logits.append(model(token, attention_mask=longer, position_ids=where, past_key_values=cache).logits)
    assert close(torch.cat(logits, dim=1), expected[[1, 0], 1:])
