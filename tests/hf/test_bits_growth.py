"""Coded caches grow, shrink, are re-ordered, copied and compiled; what cannot be is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import H2O, CompressedCache, PyramidKV, SnapKV, StreamingLLM, attach, calibrate
from grace_opt.hf.bases.classes import class_sizes
from grace_opt.hf.settings.bits import TAIL_BLOCK_WITH_BITS
from grace_opt.hf.stores.coded import waiting as waits
from tests.hf.conftest import reads_in_chunks
from tests.hf.matrix_bits import twin

LENGTH, RECENT, SINKS = 130, 32, 4
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 1000}
SETTINGS = {"bits": 2, "basis": "none"}


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def more():
    """Tokens to feed."""
    return torch.randint(3, 97, (2, 400), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def model(tiny):
    return tiny(max_position_embeddings=1024)


def feed(model, cache, tokens, width=1, **options):
    """Some tokens at a time; the logits."""
    with torch.no_grad():
        found = [model(t, past_key_values=cache, **options) for t in tokens.split(width, dim=1)]
    return found if options else torch.cat([each.logits for each in found], dim=1)


def parts(cache):
    return [tensor for layer in cache.layers for tensor in layer.stored_parts().values()]


def full(model, ids, **settings):
    cache = CompressedCache(model, **{**SETTINGS, **settings})
    feed(model, cache, ids, ids.shape[1])
    return cache


def decoded(cache):
    return [tensor for layer in cache.layers for tensor in layer.full_width()]


class TestGeneration:
    @pytest.mark.slow
    def test_moves_blocks_behind_the_codes_where_they_wait(self, model, ids, more):
        cache, lengths, bits = full(model, ids), [], {}
        old = LENGTH - RECENT - SINKS
        for count, step in enumerate(more[:, :200].split(1, dim=1)):
            feed(model, cache, step)
            layer = cache.layers[0]
            lengths.append(layer.tail.length)
            if count % TAIL_BLOCK_WITH_BITS in (0, 1, 30, TAIL_BLOCK_WITH_BITS - 1):
                bits[count] = cache.memory_report().bits
            waiting = (len(lengths) - 1) // TAIL_BLOCK_WITH_BITS * TAIL_BLOCK_WITH_BITS
            assert {row.tokens for row in layer.compressed.rows} == {old + waiting}
            assert layer.compressed.waiting == waiting
            assert layer.compressed.length + layer.tail.length == cache.get_seq_length() == LENGTH + len(lengths)
        assert (min(lengths), max(lengths)) == (RECENT + 1, RECENT + TAIL_BLOCK_WITH_BITS)
        # Keys of 6 bits and values of 4; for every 64, a mean, a scale and a level per channel, and a unit per head.
        each = 5 + (16 + 16 + 3 + 32 / 16) / TAIL_BLOCK_WITH_BITS
        for count, found in bits.items():
            waiting = count // TAIL_BLOCK_WITH_BITS * TAIL_BLOCK_WITH_BITS
            assert found == pytest.approx((bits[0] * old + each * waiting) / (old + waiting), rel=1e-3)

    @pytest.mark.slow
    @pytest.mark.parametrize("basis", ["none", "calibrated"])
    def test_gives_waiting_tokens_classes_and_the_bits_asked_for(self, basis, model, ids, more, tmp_path, monkeypatch):
        monkeypatch.setattr(waits, "SETTLED", 2 * TAIL_BLOCK_WITH_BITS)
        monkeypatch.setattr(waits, "NEWEST", 0)
        if basis == "calibrated":
            basis = tmp_path / "basis.safetensors"
            calibrate.basis(model, None, [ids[0]]).save(basis)
        cache, dense = CompressedCache(model, bits=3, basis=basis), DynamicCache(config=model.config)
        for each, width in ((cache, 4), (dense, 128)):
            feed(model, each, ids, LENGTH)
            feed(model, each, more[:, :128], width)
            feed(model, each, more[:, 128:129])
        compressed, first = cache.layers[0].compressed, dense.layers[0]  # whose keys depend on no other layer's
        assert [[each.tokens for each in row.segments] for row in compressed.rows] == [[94, 128]] * 2
        assert compressed.rows[0].segments[1].keys.counts == class_sizes(128)
        assert compressed.waiting == 0
        assert cache.layers[0].compressed.received.sums.shape[-1] == cache.layers[0].tail.length
        report = cache.memory_report()
        assert 2.7 < report.bits <= 3
        assert max(report.key_bits, report.value_bits) <= 3
        for found, exact in zip(cache.layers[0].full_width(), (first.keys, first.values), strict=True):
            newer = slice(LENGTH - RECENT, LENGTH - RECENT + 128)
            assert (found - exact)[:, :, newer].norm() < 0.5 * exact[:, :, newer].norm()

    @pytest.mark.slow
    @pytest.mark.parametrize("width", [1, 5, 150])
    def test_leaves_the_codes_of_earlier_tokens_as_they_are(self, width, model, ids, more):
        block = 16 if width == 1 else TAIL_BLOCK_WITH_BITS
        cache = full(model, ids, tail_block=block)
        before = [tensor[:, :, : LENGTH - RECENT] for tensor in decoded(cache)]
        feed(model, cache, more[:, : 40 if width == 1 else 200], width)
        feed(model, cache, more[:, :1])
        assert cache.layers[0].compressed.length >= LENGTH - RECENT + 2 * block
        for found, expected in zip(decoded(cache), before, strict=True):
            assert torch.equal(found[:, :, : LENGTH - RECENT], expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("basis", ["none", "calibrated"])
    def test_codes_newer_tokens_near_what_they_are_and_in_their_order(self, basis, model, ids, more, tmp_path):
        if basis == "calibrated":
            basis = tmp_path / "basis.safetensors"
            calibrate.basis(model, None, [ids[0]]).save(basis)
        cache = CompressedCache(model, bits=16, basis=basis)
        dense = DynamicCache(config=model.config)
        for each, width in ((cache, 5), (dense, 70)):
            feed(model, each, ids, LENGTH)
            feed(model, each, more[:, :70], width)
        assert cache.layers[0].compressed.length == LENGTH - RECENT + TAIL_BLOCK_WITH_BITS
        first = dense.layers[0]  # whose keys and values depend on no other layer's
        for found, exact in zip(cache.layers[0].full_width(), (first.keys, first.values), strict=True):
            # Beyond the prompt's largest numbers, those of newer tokens are cut.
            assert (found - exact).norm() < 0.12 * exact.norm()
            assert (found - exact)[:, :, LENGTH - RECENT : -RECENT].norm() < 0.12 * exact[
                :, :, LENGTH - RECENT :
            ].norm()

    @pytest.mark.slow
    @pytest.mark.parametrize("newest", [0, TAIL_BLOCK_WITH_BITS])
    def test_gives_classes_by_the_attention_received_while_waiting(self, newest, model, ids, more, monkeypatch):
        """Summed over steps from the weights that eager attention returns; the newest keep what they have received."""
        count = 2 * TAIL_BLOCK_WITH_BITS
        coded = count - newest
        monkeypatch.setattr(waits, "SETTLED", count)
        monkeypatch.setattr(waits, "NEWEST", newest)
        model.set_attn_implementation("grace_eager")
        cache = full(model, ids)
        sums = [torch.zeros(2, 2, 2, 400) for _ in cache.layers]
        first = cache.layers[0].compressed.length
        for step in more[:, : count + 1].split(1, dim=1):
            before = [layer.compressed for layer in cache.layers]
            held = [layer.compressed.received.sums for layer in cache.layers]
            output = feed(model, cache, step, output_attentions=True)[0]
            for each, weights, layer in zip(sums, output.attentions, cache.layers, strict=True):
                newest = weights[:, :, 0, first:].unflatten(1, (2, 2))
                if len(layer.compressed.rows[0].segments) == 1:
                    each[..., : newest.shape[-1]] += torch.stack([newest.mean(2), newest.square().mean(2)], 2)
                    torch.testing.assert_close(layer.compressed.received.sums[:, :, :2], each[..., : newest.shape[-1]])
        assert before[0].waiting == count - TAIL_BLOCK_WITH_BITS, "the second block has come"
        for layer, weights, sums_before in zip(cache.layers, output.attentions, held, strict=True):
            tail = weights[:, :, 0, first + coded :].unflatten(1, (2, 2))
            now = torch.stack([tail.mean(2), tail.square().mean(2)], 2)
            expected = torch.nn.functional.pad(sums_before[:, :, :2, coded:], (0, 1)) + now
            torch.testing.assert_close(layer.compressed.received.sums[:, :, :2], expected)
        for layer, each in zip(cache.layers, sums, strict=True):
            queries = torch.cat([torch.full((32,), float(count)), count - torch.arange(count - 32.0)])[:coded]
            scores = each[:, :, 0, :coded] / queries
            for row, own in zip(layer.compressed.rows, scores, strict=True):
                segment = row.segments[1]
                top = segment.keys.counts[0]
                for head in range(2):
                    assert set(segment.order()[head, :top].tolist()) == set(own[head].topk(top).indices.tolist())

    def test_of_a_long_turn_waits_until_its_tokens_were_attended_to(self, model, ids, more):
        cache, dense = full(model, ids), None
        dense = twin(cache, model.config)
        found, expected = (feed(model, each, more[:, :200], 200) for each in (cache, dense))
        torch.testing.assert_close(found, expected)
        assert cache.layers[0].compressed.length == LENGTH - RECENT
        feed(model, cache, more[:, :1])
        assert cache.layers[0].compressed.length == LENGTH - RECENT + 3 * TAIL_BLOCK_WITH_BITS

    @pytest.mark.slow
    def test_of_a_row_too_short_keeps_that_row_dense(self, model, ids, more):
        mask = torch.ones_like(ids)
        mask[1, :60] = 0
        caches = [CompressedCache(model, **SETTINGS, tail_block=16) for _ in range(2)]
        given = {"max_new_tokens": 40, "do_sample": False}
        tokens = model.generate(ids, attention_mask=mask, past_key_values=caches[0], **given)
        with pytest.warns(UserWarning, match="stays dense"):
            alone = model.generate(ids[1:, 60:], past_key_values=caches[1], **given)
        assert torch.equal(tokens[1, LENGTH:], alone[0, LENGTH - 60 :])
        rows = caches[0].layers[0].compressed.rows
        assert [row.tokens > 0 for row in rows] == [True, False]
        assert [row.waits for row in rows] == [2 * 16, 0]

    @pytest.mark.slow
    def test_of_many_blocks_keeps_bits_beams_crops_and_files(self, tiny, ids, tmp_path, monkeypatch):
        """Nine hundred tokens; then the same next logits whichever way the cache has taken."""
        monkeypatch.setattr(waits, "SETTLED", 4 * TAIL_BLOCK_WITH_BITS)
        monkeypatch.setattr(waits, "NEWEST", 2 * TAIL_BLOCK_WITH_BITS)
        model = tiny(max_position_embeddings=2048)
        long = torch.randint(3, 97, (2, 900), generator=torch.Generator().manual_seed(4))
        cache = full(model, ids)
        for part in long.split(100, dim=1):
            feed(model, cache, part, 50)
            report, waiting = cache.memory_report(), cache.layers[0].compressed.waiting
            assert waiting == report.waiting_tokens < 4 * TAIL_BLOCK_WITH_BITS
            assert report.bits <= 2 + 3.6 * waiting / cache.layers[0].compressed.coded
            held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts(cache) if t.numel()}
            assert report.allocated_bytes == sum(held.values())
        assert [each.tokens for each in cache.layers[0].compressed.rows[0].segments] == [94, *[128] * 5]
        expected = feed(model, copy.deepcopy(cache), long[:, :70], 70)
        cache.save(tmp_path / "grown.safetensors")
        loaded = CompressedCache.load(tmp_path / "grown.safetensors", model)
        for each, rows in ((loaded, [0, 1]), (cache, [1, 0, 0])):
            each.reorder_cache(torch.tensor(rows))
            feed(model, each, long[rows, 200:210])
            each.crop(-10)
            torch.testing.assert_close(feed(model, each, long[rows, :70], 70), expected[rows])

    @pytest.mark.slow
    def test_of_nothing_that_was_attended_to_gives_classes_all_the_same(self, model, ids, more, monkeypatch, tmp_path):
        """Also where a file has lost what they received."""
        monkeypatch.setattr(waits, "SETTLED", TAIL_BLOCK_WITH_BITS)
        monkeypatch.setattr(waits, "NEWEST", 0)
        cache = full(model, ids)
        feed(model, cache, more[:, :64], 16)
        for layer in cache.layers:
            layer.compressed.received.sums = None
        feed(model, cache, more[:, 64:65])
        for layer in cache.layers:
            assert [each.tokens for each in layer.compressed.rows[0].segments] == [94, 64]
            assert layer.compressed.received.sums.shape[-1] == layer.tail.length
        assert feed(model, cache, more[:, 65:70]).isfinite().all()
        assert cache.memory_report().bits > 1.5

    def test_goes_on_where_gradients_are_on(self, model, ids, more):
        cache, other = full(model, ids), full(model, ids)
        with torch.enable_grad():
            for part in more[:, :200].split(50, dim=1):
                found = model(part, past_key_values=cache).logits
        feed(model, other, more[:, :200], 50)
        assert found.requires_grad
        assert cache.layers[0].compressed.waiting == 2 * TAIL_BLOCK_WITH_BITS
        for each, expected in zip(decoded(cache), decoded(other), strict=True):
            torch.testing.assert_close(each.detach(), expected)

    def test_of_a_first_turn_that_stayed_dense_knows_the_queries_of_a_short_second_one(self, model, ids):
        """Five tokens, none of which is of the set that is spread over the prompt."""
        cache = CompressedCache(model, **SETTINGS)
        with pytest.warns(UserWarning, match="stays dense"):
            feed(model, cache, ids[:, :99], 99)
        found = feed(model, cache, ids[:, 99:104], 5)
        assert cache.layers[0].compressed.coded == 68
        assert feed(model, cache, ids[:, 104:110]).isfinite().all()
        assert found.isfinite().all()
        report = cache.memory_report()
        assert report.key_bits > 0.8 * report.value_bits > 0.8


class TestShrinking:
    @pytest.mark.slow
    def test_cropping_the_tail_forgets_what_was_fed(self, model, ids, more):
        cache, other = full(model, ids, tail_block=16), full(model, ids, tail_block=16)
        for each in (cache, other):
            feed(model, each, more[:, :6])
        feed(model, cache, more[:, 200:205])
        cache.crop(-5)
        # Until a block moves: what tokens have received from those that were cropped still decides its classes.
        found, expected = (feed(model, each, more[:, 6:16]) for each in (cache, other))
        torch.testing.assert_close(found, expected)
        feed(model, cache, more[:, 16:20])
        assert cache.layers[0].compressed.length == LENGTH - RECENT + 16

    @pytest.mark.slow
    def test_cropping_the_tail_leaves_what_waiting_tokens_have_received(self, model, ids, more):
        cache = full(model, ids, tail_block=16)
        feed(model, cache, more[:, :22])
        layer = cache.layers[0]
        before = layer.compressed.received.sums.clone()
        cache.crop(-5)
        newest = layer.compressed.waiting + layer.tail.length
        assert layer.compressed.waiting == 16
        assert torch.equal(layer.compressed.received.sums, before[..., :newest])
        assert before.shape[-1] == newest + 5

    def test_cropping_leaves_some_codes(self, model, ids):
        cache = full(model, ids)
        cache.crop(-RECENT)
        with pytest.raises(CacheError, match=r"to 5 tokens or more, or to none, not to 4: with bits=.* call reset"):
            cache.crop(SINKS - 98)
        cache.reset()
        assert cache.get_seq_length() == 0
        feed(model, cache, ids, LENGTH)
        for found, expected in zip(decoded(cache), decoded(full(model, ids)), strict=True):
            assert torch.equal(found, expected)


class TestRows:
    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_are_repeated_selected_and_re_ordered(self, model, ids, more, dtype):
        model = copy.deepcopy(model).to(dtype)
        cache = full(model, ids, tail_block=16)
        feed(model, cache, more[:, :20])
        before = decoded(cache)
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
        cache.batch_select_indices(torch.tensor([0, 1, 3]))
        rows = torch.tensor([1, 0, 1])
        for found, expected in zip(decoded(cache), before, strict=True):
            assert torch.equal(found, expected[rows])
        other = full(model, ids, tail_block=16)
        feed(model, other, more[:, :20])
        same = copy.deepcopy(other)
        same.batch_select_indices(rows)
        found = feed(model, cache, more[rows, 20:36])
        assert torch.equal(found, feed(model, same, more[rows, 20:36]))
        if dtype == torch.float64:  # a float32 model itself gives three rows other numbers than two, by up to 2e-5
            torch.testing.assert_close(found, feed(model, other, more[:, 20:36])[rows])
        assert cache.layers[0].compressed.waiting == 2 * 16, "one block before, one after"

    @pytest.mark.slow
    def test_of_a_copy_are_its_own(self, model, ids, more):
        cache = full(model, ids, tail_block=16)
        other = copy.deepcopy(cache)
        before = decoded(cache)
        feed(model, other, more[:, :36])
        assert cache.get_seq_length() == LENGTH
        for found, expected in zip(decoded(cache), before, strict=True):
            assert torch.equal(found, expected)
        fresh = full(model, ids, tail_block=16)
        torch.testing.assert_close(feed(model, cache, more[:, :36]), feed(model, fresh, more[:, :36]))


@pytest.mark.parametrize(
    "evict",
    [SnapKV(budget=110, window=16), PyramidKV(budget=220, window=16, beta=2), StreamingLLM(budget=120)],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.slow
def test_tokens_may_be_evicted_before(evict, model, ids, more):
    """Exactly those that the same eviction drops without bits; the others are as in a dense cache of them."""
    ids = torch.cat([ids] * 3, dim=1)
    cache, pruned = (
        full(model, ids, evict=evict, bits=16),
        CompressedCache(model, ratio=0.0, sink_tokens=SINKS, evict=evict),
    )
    feed(model, pruned, ids, 3 * LENGTH)
    for layer, other in zip(cache.layers, pruned.layers, strict=True):
        assert torch.equal(layer.compressed.positions, other.compressed.positions)
        keys, values = layer.compressed.dense(*(t[:, :, :0] for t in (layer.tail.keys, layer.tail.values)))
        assert keys.shape[2] == layer.compressed.positions.shape[-1] < 3 * LENGTH - RECENT
        for found, stored in ((keys, other.full_width()[0]), (values, other.full_width()[1])):
            stored = stored[:, :, : keys.shape[2]]
            assert torch.equal(found[:, :, :SINKS], stored[:, :, :SINKS])
            assert (found - stored).norm() < 0.03 * stored.norm()
    first, before = 3 * LENGTH - RECENT, [layer.compressed.positions for layer in cache.layers]
    feed(model, cache, more[:, :70], 13)
    assert cache.layers[0].compressed.waiting == TAIL_BLOCK_WITH_BITS
    grown = torch.arange(first, first + TAIL_BLOCK_WITH_BITS, dtype=torch.int32)
    for layer, positions in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.compressed.positions, torch.cat([positions, grown.expand(len(ids), 2, -1)], dim=-1))
    assert cache.get_seq_length() == 3 * LENGTH + 70
    assert full(model, ids, evict=evict).memory_report().bits <= 2
    with pytest.raises(OptionError, match=r"all queries .*: write GraphEviction\(stride=0, observed=128\)"):
        full(model, ids, evict="graph", bits=2.25)
    with pytest.raises(OptionError, match="H2O needs all queries"):
        CompressedCache(model, **SETTINGS, evict=H2O(budget=100, observed=None))
    with pytest.raises(OptionError, match=r"SnapKV needs 129 queries .* let it observe 128 or fewer"):
        CompressedCache(model, **SETTINGS, evict=SnapKV(budget=400, window=129))


def test_where_an_eviction_leaves_later_layers_too_little_it_is_told(model, ids):
    long = torch.cat([ids] * 4, dim=1)
    with pytest.warns(UserWarning, match="tokens left and stays dense"):
        cache = full(model, long, evict=PyramidKV(budget=130, window=16, beta=3))
    assert [layer.compressed.coded > 0 for layer in cache.layers] == [True, False]


class TestAttach:
    @pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 48}], ids=str)
    @pytest.mark.slow
    def test_gives_every_call_a_coded_cache(self, options, model, ids):
        if "prefill_chunk_size" in options and not reads_in_chunks(model):
            pytest.skip("this transformers reads a prompt in chunks otherwise than at once, with its own cache too")
        text = torch.cat([ids[:1], ids[:1, 20:60]], dim=1)
        model.set_attn_implementation("sdpa")
        with attach(model, **SETTINGS, tail_block=16) as attached:
            expected = model.generate(text, **{**GREEDY, "max_new_tokens": 30})
            assert attached.cache.memory_report().pruned_tokens == text.shape[1] - RECENT - SINKS + 16
            found = model.generate(text, **{**GREEDY, "max_new_tokens": 30}, **options)
            assert attached.cache.memory_report().waiting_tokens == 16
        if "prompt_lookup_num_tokens" in options:  # it moves blocks at other times, if several tokens are accepted
            found, expected = found[:, : text.shape[1] + 16], expected[:, : text.shape[1] + 16]
        assert torch.equal(found, expected)

    def test_refuses_what_would_be_ignored(self, model):
        with pytest.raises(OptionError, match="does not go together with ratio"):
            attach(model, ratio=0.5, **SETTINGS)


class TestHalfPrecision:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.slow
    def test_loud_keys_and_values_stay_numbers(self, dtype, tiny, ids, more):
        model = copy.deepcopy(tiny("qwen2"))
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.bias[::5] += 1e4
                layer.self_attn.v_proj.bias[3] -= 9e3
                layer.self_attn.q_proj.weight *= 1e-3
                layer.self_attn.q_proj.bias *= 1e-3
        model = copy.deepcopy(model).to(dtype)
        cache = full(model, ids, bits=3, tail_block=16)
        assert feed(model, cache, more[:, :20]).isfinite().all()
        assert cache.layers[0].compressed.waiting == 16
        for tensor in (*decoded(cache), *(layer.compressed.received.sums for layer in cache.layers)):
            assert tensor.isfinite().all()
        stored = cache.layers[0].compressed.rows[0].tensors().values()
        assert all(t.isfinite().all() for t in stored)
        assert {t.dtype for t in stored} <= {torch.uint8, torch.float16, torch.float32, dtype}

    def test_useless_keys_are_told(self, tiny, ids, more):
        model = copy.deepcopy(tiny(max_position_embeddings=1024))
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight[3] = torch.nan
        with pytest.raises(CacheError, match="keys, queries or values of layer 1 are not finite"):
            feed(model, full(model, ids), more[:, :1])


class TestCompiled:
    @pytest.mark.parametrize("look", ["report", "crop", "step"])
    @pytest.mark.slow
    def test_prompt_is_one_graph_and_coded_afterwards(self, look, model, ids, more, in_one_graph):
        caches = CompressedCache(model, **SETTINGS), CompressedCache(model, **SETTINGS)
        with torch.no_grad():
            model(ids, past_key_values=caches[0])
            in_one_graph(model)(ids, past_key_values=caches[1])
        for cache in caches:
            if look == "report":
                assert cache.memory_report().pruned_tokens == LENGTH - RECENT - SINKS
            elif look == "crop":
                cache.crop(-3)
        torch.testing.assert_close(*(feed(model, cache, more[:, :1]) for cache in caches))
        for found, expected in zip(*map(decoded, caches), strict=True):
            torch.testing.assert_close(found, expected)

    @pytest.mark.slow
    def test_steps_are_not_compiled_again_and_again(self, tiny, ids, monkeypatch):
        model, graphs = tiny(attention="sdpa", num_hidden_layers=1), []

        def backend(graph, example):
            graphs.append(graph)
            return graph.forward

        torch.compiler.reset()
        monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend=backend))
        with attach(model, **SETTINGS):
            model.generate(ids, **{**GREEDY, "max_new_tokens": 10})
        torch.compiler.reset()
        assert len(graphs) <= 4, "the prompt, a step, one with a longer tail, one of any length"


def test_observed_queries_of_a_chunked_prompt_are_few(model, ids):
    """Every eighth and the last 128, whatever the chunks are."""
    long = torch.cat([ids] * 5, dim=1)
    cache = CompressedCache(model, **SETTINGS, prompt_length=long.shape[1] + 1)
    for chunk in long.split(65, dim=1):
        feed(model, cache, chunk, 65)
        waiting = cache.layers[0].prompt._waiting
        assert waiting.queries.shape[2] <= -(-waiting.length // 8) + 128
    assert waiting.queries.untyped_storage().nbytes() == waiting.queries.nbytes


@pytest.mark.parametrize("attention", ["grace_sdpa", "grace_eager"])
@pytest.mark.parametrize("change", ["select", "beams", "beams of both"])
def test_rows_that_are_dense_for_good_are_kept_alone(change, attention, tiny, ids, more):
    """The other row's newest tokens wait for their classes when it is left out."""
    model, mask = tiny(max_position_embeddings=1024, attention=attention), torch.ones_like(ids)
    mask[1, : LENGTH - 50] = 0  # of which too few are left for bits
    rows = {"select": [1], "beams": [1, 1], "beams of both": [1, 0]}[change]

    steps = [ids, more[:, :110], more[:, 110:112], *more[:, 112:252].split(10, dim=1)]

    def fed(change_at):
        seen, cache, logits = mask, CompressedCache(model.config, tail_block=64, **SETTINGS), []
        for number, tokens in enumerate(steps):
            if number == change_at:
                assert cache.layers[0].compressed.waiting == 64
                (cache.batch_select_indices if change == "select" else cache.reorder_cache)(torch.tensor(rows))
                seen = seen[rows]
            now = tokens[rows] if number >= change_at else tokens
            seen = torch.cat([seen, torch.ones_like(now)], 1) if number else seen
            places = (seen.cumsum(1) - 1).clamp(min=0)[:, -now.shape[1] :]
            with torch.no_grad():
                out = model(now, attention_mask=seen, position_ids=places, past_key_values=cache)
            logits.append(out.logits if number >= change_at else out.logits[rows])
        return torch.cat(logits[3:], 1), cache

    with pytest.warns(UserWarning, match="dense"):
        found, cache = fed(3)
    with pytest.warns(UserWarning, match="dense"):
        expected, _ = fed(len(steps))
    assert cache.layers[0].compressed.length > LENGTH + 64, "another block has come"
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
