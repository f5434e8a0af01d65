"""``max_bytes=``: no step leaves a cache with more bytes, and what cannot be kept is refused in time."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import Bits, CacheConfig, CompressedCache, SnapKV, attach, calibrate
from grace_opt.hf.bases.codebooks import distortions
from grace_opt.hf.engine.layer import PrunedKeyLayer
from grace_opt.hf.stores.coded.again import coded_again
from grace_opt.hf.stores.coded.room import BLOCKS, ready_within
from tests.hf.conftest import build
from tests.hf.test_bits_budget import held

LENGTH, FED = 200, 450
#: Bytes of a dense token of the tiny models: two layers, two heads, 16 numbers of K and of V, float32.
TOKEN = 2 * 2 * 32 * 4
GREEDY = {"do_sample": False, "eos_token_id": 1000, "pad_token_id": 0}


@pytest.fixture
def ids():
    return torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def more():
    """Tokens to feed."""
    return torch.randint(3, 97, (2, FED), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def model(tiny):
    return tiny(max_position_embeddings=2048)


@pytest.fixture(scope="module")
def basis_file(tmp_path_factory):
    """The basis of the tiny Llama."""
    path = tmp_path_factory.mktemp("basis") / "llama.safetensors"
    text = torch.randint(3, 97, (200,), generator=torch.Generator().manual_seed(9))
    calibrate.basis(build("Llama", max_position_embeddings=2048), None, [text]).save(path)
    return path


def feed(model, cache, tokens, width=1):
    """Feed some tokens at a time; the most bytes after any step, by asking the cache, and often by looking."""
    most = 0
    with torch.no_grad():
        for number, part in enumerate(tokens.split(width, dim=1)):
            model(part, past_key_values=cache)
            most = max(most, cache.memory_report().allocated_bytes)
            if number % 7 == 0:
                most = max(most, looked_at(cache))
    return most


def looked_at(cache):
    """The bytes that layers of ours keep alive."""
    return held(SimpleNamespace(layers=[layer for layer in cache.layers if isinstance(layer, PrunedKeyLayer)]))


def cache_of(model, tokens, **changes):
    """A cache for so many dense tokens of one sequence."""
    return CompressedCache(model, **{"max_bytes": tokens * TOKEN, "basis": "none", **changes})


def smallest(error):
    """The bytes that an error says would do."""
    return int(re.search(r"write max_bytes=(\d+) or more", str(error.value))[1])


class TestPromise:
    @pytest.mark.parametrize("basis", ["none", "calibrated"])
    @pytest.mark.parametrize(
        ("prompt", "width"), [(LENGTH, 1), (LENGTH, 7), (LENGTH, 150), (70, 1), (5, 1), (1, 1), (5, 100)]
    )
    def test_no_step_leaves_more_bytes(self, prompt, width, basis, model, ids, more, basis_file):
        basis = basis_file if basis == "calibrated" else basis
        cache = cache_of(model, 230, basis=basis)
        most = feed(model, cache, ids[:1, :prompt], prompt)
        most = max(most, feed(model, cache, more[:1], width))
        assert (0.6 if width > 32 else 0.75) * 230 * TOKEN < most <= 230 * TOKEN  # few tokens are dense after many
        report = cache.memory_report()
        assert report.tokens == prompt + FED
        if basis != "none" or prompt == LENGTH:
            assert report.history[-1].bits < 8

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_in_half_precision(self, dtype, ids, more):
        model = copy.deepcopy(build("Llama", max_position_embeddings=2048)).to(dtype)
        model.set_attn_implementation("grace_sdpa")
        cache = cache_of(model, 130)
        most = max(feed(model, cache, ids[:1], LENGTH), feed(model, cache, more[:1]))
        assert 0.8 * 130 * TOKEN < most <= 130 * TOKEN

    @pytest.mark.parametrize("padding", [0, 60, 195])
    def test_rows_share_it(self, padding, model, ids, more):
        """A padded row has fewer tokens, and one of five is too short to be coded."""
        mask = torch.ones_like(ids)
        mask[1, :padding] = 0
        cache = cache_of(model, 380)
        with torch.no_grad():
            model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), past_key_values=cache)
            most = cache.memory_report().allocated_bytes
            for part in more[:, :300].split(1, 1):
                mask = torch.cat([mask, torch.ones_like(part)], 1)
                model(part, attention_mask=mask, position_ids=mask.sum(1)[:, None] - 1, past_key_values=cache)
                most = max(most, cache.memory_report().allocated_bytes)
        assert 0.7 * 380 * TOKEN < most <= 380 * TOKEN

    def test_sliding_layers_count(self, tiny, ids, more):
        types = ("sliding_attention", "full_attention")
        model = tiny(
            "Qwen2", max_position_embeddings=2048, use_sliding_window=True, sliding_window=24, layer_types=types
        )
        cache = cache_of(model, 150)
        assert cache.limit.elsewhere == 24 * TOKEN // 2
        most = max(feed(model, cache, ids[:1], LENGTH), feed(model, cache, more[:1]))
        assert 0.7 * 150 * TOKEN < most <= 150 * TOKEN

    def test_a_turn_is_stored_before_the_next_step(self, model, ids, more):
        cache = cache_of(model, 230)
        feed(model, cache, ids[:1], LENGTH)
        assert feed(model, cache, more[:1, :400], 400) <= 230 * TOKEN
        assert cache.layers[0].tail.length < 32 + 64

    def test_room_that_is_there_is_used(self, model, ids, more):
        """Eight bits as long as these fit; then fewer, and never more again."""
        cache = cache_of(model, 260)
        feed(model, cache, ids[:1], LENGTH)
        assert cache.memory_report().history[0][:2] == (LENGTH, 8.0)
        feed(model, cache, more[:1])
        history = cache.memory_report().history
        assert [each.bits for each in history] == sorted((each.bits for each in history), reverse=True)
        assert [each.tokens for each in history] == sorted(each.tokens for each in history)
        assert all(0 < each.nbytes <= 260 * TOKEN for each in history)
        assert f"coded again {len(history) - 1} times" in str(cache.memory_report())

    def test_when_all_tokens_are_known_nothing_is_coded_again(self, model, ids, more):
        cache = cache_of(model, 260)
        cache.declare_prompt(LENGTH, new_tokens=FED)
        most = max(feed(model, cache, ids[:1], LENGTH), feed(model, cache, more[:1]))
        assert 0.7 * 260 * TOKEN < most <= 260 * TOKEN
        assert len(cache.memory_report().history) == 1

    @pytest.mark.parametrize("beams", [1, 3])
    def test_generate_says_how_many_come(self, beams, model, ids):
        with attach(model, max_bytes=beams * 230 * TOKEN, basis="none") as attached:
            model.generate(ids[:1], max_new_tokens=300, num_beams=beams, **GREEDY)
        cache = attached.cache
        assert cache.limit.until == LENGTH + 300
        assert len(cache.memory_report().history) == 1
        assert held(cache) <= cache.limit.nbytes

    def test_more_turns_than_were_known(self, model, ids, more):
        with attach(model, max_bytes=230 * TOKEN, basis="none") as attached:
            text = model.generate(ids[:1], max_new_tokens=20, **GREEDY)
            for _ in range(3):
                text = torch.cat([text, more[:1, :200]], 1)
                text = model.generate(text, past_key_values=attached.cache, max_new_tokens=20, **GREEDY)
        assert held(attached.cache) <= 230 * TOKEN
        assert len(attached.cache.memory_report().history) > 1

    @pytest.mark.parametrize(("rows", "prompt"), [(8, 50), (16, 3), (2, 99)])
    def test_rows_of_short_prompts(self, rows, prompt, model, ids):
        tokens = ids[:1, :prompt].repeat(rows, 1)
        with pytest.raises(CacheError, match=f"in each of {rows} rows") as error:
            feed(model, cache_of(model, 230), tokens, prompt)
        cache = CompressedCache(model, max_bytes=smallest(error), basis="none")
        feed(model, cache, tokens, prompt)
        most = feed(model, cache, tokens[:, :1].repeat(1, 40))
        assert most <= smallest(error)

    def test_eight_bits_that_fit_are_taken(self, model, ids, more):
        """Few tokens come: there need be no room for blocks that never leave the recent window."""
        peaks = []
        for limit in (4000 * TOKEN, None):
            cache = CompressedCache(model, max_bytes=limit or int(1.03 * peaks[0]), basis="none")
            cache.declare_prompt(LENGTH, new_tokens=20)
            peaks.append(max(feed(model, cache, ids[:1], LENGTH), feed(model, cache, more[:1, :20])))
            assert cache.memory_report().history[0].bits == pytest.approx(8, abs=0.5)
        assert peaks[1] <= 1.03 * peaks[0]
        most = feed(model, cache, more[:1, 20:]) if 1.03 * peaks[0] > 230 * TOKEN else 0  # more than were known
        assert most <= 1.03 * peaks[0]

    def test_padded_rows_are_planned_for(self, model, ids):
        mask = torch.ones_like(ids)
        mask[1, :150] = 0
        with attach(model, max_bytes=420 * TOKEN, basis="none") as attached:
            model.generate(ids, attention_mask=mask, max_new_tokens=150, **GREEDY)
        assert held(attached.cache) <= 420 * TOKEN
        assert len(attached.cache.memory_report().history) == 1

    def test_tokens_are_what_a_cache_of_bits_predicts(self, model, ids, more):
        """Far from the limit nothing differs from eight bits."""
        caches = cache_of(model, 4000), CompressedCache(model, bits=8, basis="none")
        for cache in caches:
            cache.declare_prompt(LENGTH)
        with torch.no_grad():
            for part in (ids[:1], *more[:1, :200].split(1, 1)):
                first, second = (model(part, past_key_values=cache).logits for cache in caches)
                assert torch.equal(first, second)


class TestRefusals:
    @pytest.mark.parametrize("given", [0, -5, float("nan"), 1.5, True, "", "0 B", "1 GX", "-3 MiB", "many", "1.2.3 GB"])
    def test_what_is_no_number_of_bytes(self, given):
        with pytest.raises(OptionError, match="max_bytes="):
            Bits(max_bytes=given)

    @pytest.mark.parametrize(("given", "found"), [("1 GB", 10**9), ("1.5KiB", 1536), (" 7 kb", 7000), ("12", 12)])
    def test_what_is_one(self, given, found):
        assert Bits(max_bytes=given).max_bytes == found
        assert CacheConfig(max_bytes=given).to_dict()["max_bytes"] == found

    @pytest.mark.parametrize("prompt", [0, LENGTH])
    def test_the_smallest_that_is_named_will_do(self, prompt, model, ids, more):
        def read(most):
            cache = CompressedCache(model, max_bytes=most, basis="none")
            if not prompt:
                return 0
            cache.declare_prompt(LENGTH, new_tokens=FED)
            return max(feed(model, cache, ids[:1], LENGTH), feed(model, cache, more[:1]))

        with pytest.raises(CacheError, match="too few for") as error:
            read(140 * TOKEN if prompt else 1)
        assert read(smallest(error)) <= smallest(error)
        with pytest.raises(CacheError, match="too few for"):
            read(int(0.99 * smallest(error)))

    def test_a_text_that_outgrows_it_loses_nothing(self, model, ids, more, tmp_path):
        cache = cache_of(model, 150)
        feed(model, cache, ids[:1], LENGTH)
        with pytest.raises(CacheError, match="Nothing was changed") as error:
            feed(model, cache, more[:1].repeat(1, 4))
        length, before = cache.get_seq_length(), [layer.full_width() for layer in cache.layers]
        assert len({layer.get_seq_length() for layer in cache.layers}) == 1
        with pytest.raises(CacheError, match="Nothing was changed"):
            feed(model, cache, more[:1, :1])
        assert cache.get_seq_length() == length
        assert all(
            torch.equal(*pair)
            for own, layer in zip(before, cache.layers, strict=True)
            for pair in zip(own, layer.full_width(), strict=True)
        )
        cache.save(tmp_path / "cache.safetensors")
        larger = CompressedCache.load(tmp_path / "cache.safetensors", model, max_bytes=smallest(error) + 20 * TOKEN)
        assert feed(model, larger, more[:1, :1]) <= larger.limit.nbytes
        assert larger.get_seq_length() == length + 1

    @pytest.mark.parametrize("sliding", [False, True])
    def test_a_turn_that_outgrows_it_is_taken_back(self, sliding, tiny, ids, more, tmp_path):
        types = ("sliding_attention", "full_attention")
        windows = {"use_sliding_window": True, "sliding_window": 24, "layer_types": types} if sliding else {}
        model, most = tiny("Qwen2", max_position_embeddings=2048, **windows), 87 if sliding else 150
        cache = cache_of(model, most)
        feed(model, cache, ids[:1], LENGTH)
        with torch.no_grad(), pytest.raises(CacheError, match="Nothing was changed") as error:
            model(more[:1].repeat(1, 3), past_key_values=cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {LENGTH}
        assert feed(model, cache, more[:1, :40]) <= most * TOKEN
        cache.save(tmp_path / "cache.safetensors")
        larger = CompressedCache.load(tmp_path / "cache.safetensors", model, max_bytes=3 * smallest(error))
        assert feed(model, larger, more[:1].repeat(1, 3), 1200) <= 3 * smallest(error)

    def test_a_prompt_that_does_not_fit_leaves_an_empty_cache(self, model, ids):
        cache = cache_of(model, 160)
        cache.declare_prompt(LENGTH, new_tokens=1500)
        with pytest.raises(CacheError, match="max_new_tokens"):
            feed(model, cache, ids[:1], LENGTH)
        assert cache.get_seq_length() == 0
        cache.declare_prompt(LENGTH, new_tokens=5)
        assert feed(model, cache, ids[:1], LENGTH) <= 160 * TOKEN

    def test_more_sequences_share_it_or_are_refused(self, model, ids, more):
        cache = cache_of(model, 330)
        feed(model, cache, ids[:1], LENGTH)
        feed(model, cache, more[:1, :200])
        bits = cache.memory_report().history[-1].bits
        cache.batch_repeat_interleave(2)
        assert cache.memory_report().history[-1].bits < bits
        assert feed(model, cache, more[:, :200]) <= 330 * TOKEN
        before = [layer.compressed for layer in cache.layers]
        with pytest.raises(CacheError, match="in each of 20 rows"):
            cache.batch_repeat_interleave(10)
        assert all(layer.compressed is one for layer, one in zip(cache.layers, before, strict=True))
        short = cache_of(model, 330)
        feed(model, short, ids[:1, :50], 50)
        with pytest.raises(CacheError, match="in each of 20 rows"):
            short.batch_repeat_interleave(20)
        feed(model, cache, more[:, :1])

    def test_a_prompt_in_parts_is_dense_until_its_end(self, model, ids):
        cache = cache_of(model, 300, prompt_length=LENGTH)
        with pytest.raises(CacheError, match="read in parts") as error:
            feed(model, cache, ids[:1], 50)
        assert cache.get_seq_length() == 100
        cache = CompressedCache(model, max_bytes=smallest(error) + 50 * TOKEN, basis="none", prompt_length=LENGTH)
        assert feed(model, cache, ids[:1], 50) <= cache.limit.nbytes
        assert cache.memory_report().pruned_tokens

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"dense_layers": 1}, "dense_layers"),
            ({"evict": SnapKV(0.5)}, "evict"),
            ({"bits": 2}, "alone"),
            ({"total_bytes": 10**6}, "alone"),
        ],
    )
    def test_what_it_does_not_go_with(self, given, says, model):
        with pytest.raises(OptionError, match=says):
            cache_of(model, 400, **given)

    def test_layers_with_states(self, tiny):
        states = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        model = tiny("Qwen3Next", layer_types=("linear_attention", "full_attention"), **states)
        with pytest.raises((OptionError, CacheError), match=r"layer 0 is neither|states"):
            cache_of(model, 400)

    def test_assisted_decoding(self, model, ids):
        with attach(model, max_bytes=400 * TOKEN, basis="none"), pytest.raises(CacheError, match="assisted"):
            model.generate(ids[:1], max_new_tokens=5, prompt_lookup_num_tokens=2, **GREEDY)


class TestFiles:
    def test_a_saved_cache_goes_on_under_its_promise(self, model, ids, more, tmp_path):
        cache = cache_of(model, 230)
        feed(model, cache, ids[:1], LENGTH)
        feed(model, cache, more[:1, :300])
        cache.save(tmp_path / "cache.safetensors")
        loaded = CompressedCache.load(tmp_path / "cache.safetensors", model)
        assert loaded.limit.nbytes == 230 * TOKEN
        assert max(feed(model, cache, more[:1, 300:]), feed(model, loaded, more[:1, 300:])) <= 230 * TOKEN
        pairs = zip(cache.layers, loaded.layers, strict=True)
        assert all(
            torch.equal(*each) for one, two in pairs for each in zip(one.full_width(), two.full_width(), strict=True)
        )
        assert [each[:2] for each in cache.limit.chosen[-1:]] == [each[:2] for each in loaded.limit.chosen[-1:]]

    @pytest.mark.parametrize("before", [{"max_bytes": 400 * TOKEN}, {"bits": 6}])
    def test_another_promise_at_loading(self, before, model, ids, more, tmp_path):
        cache = CompressedCache(model, basis="none", **before)
        feed(model, cache, ids[:1], LENGTH)
        feed(model, cache, more[:1, :300])
        cache.save(tmp_path / "cache.safetensors")
        loaded = CompressedCache.load(tmp_path / "cache.safetensors", model, max_bytes=200 * TOKEN)
        assert held(loaded) <= 200 * TOKEN < held(cache)
        assert feed(model, loaded, more[:1, 300:400]) <= 200 * TOKEN
        with pytest.raises(CacheError, match="too few"):
            CompressedCache.load(tmp_path / "cache.safetensors", model, max_bytes=100 * TOKEN)

    def test_copies_have_limits_of_their_own(self, model, ids, more):
        cache = cache_of(model, 230)
        feed(model, cache, ids[:1], LENGTH)
        other = copy.deepcopy(cache)
        assert all(layer.plan.bits.limit is other.limit for layer in other.layers)
        assert other.memory_report().max_bytes == 230 * TOKEN
        feed(model, other, more[:1, :300])
        assert len(other.limit.chosen) > len(cache.limit.chosen) == 1


class TestCodedAgain:
    @pytest.fixture(scope="class")
    def segments(self):
        """Segments of one layer, the first a prompt's."""
        model = copy.deepcopy(build("Llama", max_position_embeddings=4096))
        model.set_attn_implementation("grace_sdpa")
        tokens = torch.randint(3, 97, (1, 2500), generator=torch.Generator().manual_seed(3))
        cache = cache_of(model, 4000)
        feed(model, cache, tokens[:, :400], 400)
        feed(model, cache, tokens[:, 400:], 100)
        layer = cache.layers[1]
        row = layer.compressed.rows[0]
        assert len(row.segments) > 2
        return layer.plan, row.segments, row._energies(None)

    @given(share=st.floats(0.05, 1))
    @settings(max_examples=15)
    def test_bits_are_those_asked_for_and_no_channel_has_more(self, share, segments):
        plan, before, energies = segments
        bits = 1.0 + 7 * share
        after = coded_again(plan, before, energies, (bits, bits))
        for kind in ("keys", "values"):
            stored = sum(8 * getattr(each, kind).nbytes + 4 * each.classes.nbytes for each in after)
            elements = sum(each.tokens for each in after) * 2 * 16
            assert stored <= bits * elements
            assert stored >= min(0.9 * bits, 7) * elements - 32 * 16 * 4 * len(after)
            for one, two in zip(before, after, strict=True):
                old, new = getattr(one, kind), getattr(two, kind)
                assert bool((new.widths() <= old.widths()).all())
                same = (new.widths() == old.widths()).cpu()
                first = 0
                for number, count in enumerate(old.counts):
                    own = slice(first, first + count)
                    first += count
                    pair = old.decode()[:, own].mT[same[number]], new.decode()[:, own].mT[same[number]]
                    assert torch.equal(*pair)

    def test_errors_are_those_of_the_widths(self, segments):
        """A channel's error is about that of a Gaussian in its new width, and not the sum of several."""
        plan, before, energies = segments
        after = coded_again(plan, before, energies, (3.0, 3.0))
        lost = torch.tensor(distortions(True))
        for one, two in zip(before, after, strict=True):
            old, new = one.values.decode(), two.values.decode()
            first = 0
            for number, count in enumerate(one.values.counts):
                own = slice(first, first + count)
                first += count
                squares = (old[:, own] - one.values.means[:, None]).square().mean(1)
                errors = (old[:, own] - new[:, own]).square().mean(1)
                expected = squares * lost[two.values.indices()[number].long()]
                if count >= 64:
                    assert float(errors.mean()) <= 1.3 * float(expected.mean())

    def test_one_price_is_better_than_the_same_bits_for_each(self, segments):
        plan, before, energies = segments
        lost = torch.tensor(distortions(True), dtype=torch.float64)

        def loss(found):
            total = 0.0
            for one, two in zip(before, found, strict=True):
                numbers, first = one.keys.decode().double(), 0
                for number, count in enumerate(one.keys.counts):
                    own = numbers[:, first : first + count] - one.keys.means[:, None].double()
                    first += count
                    share = lost[two.keys.indices()[number].long()]
                    total += float((own.square().sum(1) * share * one.weight(0)[:, number, None]).sum())
            return total

        together = coded_again(plan, before, energies, (2.5, 2.5))
        apart = [coded_again(plan, [each], energies, (2.5, 2.5))[0] for each in before]
        assert loss(together) < 0.95 * loss(apart)

    def test_small_segments_become_one(self, model, ids, more):
        cache = cache_of(model, 260)
        feed(model, cache, ids[:1], LENGTH)
        with torch.no_grad():
            for part in torch.cat([more, more, more], 1)[:1].split(8, 1):
                model(part, past_key_values=cache)
        sizes = [each.tokens for each in cache.layers[0].compressed.rows[0].segments]
        assert sum(sizes) + cache.layers[0].compressed.waiting + cache.layers[0].tail.length + 4 == LENGTH + 3 * FED
        assert max(sizes) >= 512
        assert len(sizes) < 10

    @given(waits=st.integers(1, 40), most=st.integers(BLOCKS, 30))
    def test_half_of_the_waiting_blocks_are_coded(self, waits, most):
        coded = ready_within(64 * waits, 64, 64 * most)
        assert coded % 64 == 0
        assert 0 <= coded <= 64 * waits
        assert (coded > 0) == (waits >= min(most, 16))


class TestReading:
    @pytest.mark.parametrize("basis", ["none", "calibrated"])
    def test_codes_are_read_as_they_are_decoded(self, basis, model, ids, more, basis_file):
        """Waiting blocks of several widths, segments of several sizes, and a beginning without a prompt's codes."""
        widths = set()
        for prompt in (LENGTH, 5):
            cache = cache_of(model, 170, basis=basis_file if basis == "calibrated" else basis, tail_block=16)
            feed(model, cache, ids[:1, :prompt], prompt)
            for part in more[:1].split(70, 1):
                feed(model, cache, part, 7)
                for codes in cache.layers[0].compressed.rows[0].waiting or ():
                    widths.add(len(set(codes.widths().flatten().tolist())))
                dense = DynamicCache()
                for number, layer in enumerate(cache.layers):
                    layer.keep_within()  # as the next step begins
                    dense.update(*(each.clone() for each in layer.full_width()), number)
                with torch.no_grad():
                    expected = model(more[:1, :1], past_key_values=dense).logits
                    found = model(more[:1, :1], past_key_values=copy.deepcopy(cache)).logits
                assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())
        assert basis == "none" or max(widths) > 1
