"""``read=`` in a cache: all that composes with it gives what it should, all that does not is refused by name."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import DynamicCache

from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import CacheConfig, CompressedCache, Quantize, SnapKV, StreamingLLM, TopTokens, attach
from grace_opt.hf.stores.channels.index import ReadIndex
from grace_opt.hf.tools.evaluation import next_token_log_probs, stored_bits
from grace_opt.kernels.cache import reading as kernels

WAYS = {
    "pages": TopTokens(share=0.6, page_size=4),
    "channels": TopTokens(share=0.6, by="channels"),
    "bounded": TopTokens(share=0.4, page_size=2, epsilon=0.3),
    "expected": TopTokens(share=0.1, by="channels", top_p=0.8),
    "sampled": TopTokens(by="sampling", tables=8, hash_bits=3),
}
#: Reads all tokens; a sample does but for those that are opposite to the query, of which there are none.
ALL = {
    "pages": TopTokens(share=1.0, page_size=4),
    "channels": TopTokens(share=1.0, by="channels"),
    "sampling": TopTokens(by="sampling", tables=400, hash_bits=1),
}


@pytest.fixture(params=WAYS)
def read(request):
    return WAYS[request.param]


@pytest.mark.slow
@pytest.mark.parametrize("by", ALL)
def test_reading_all_is_dense_attention(by, family, tiny, prune, padded, continuation, step, close):
    model = tiny(family)
    cache = prune(model, read=ALL[by])
    found = step(model, cache, *padded[:1], continuation, padded[1])
    expected = step(model, DynamicCache(config=model.config), *padded[:1], continuation, padded[1])
    assert close(found, expected)
    report = cache.read_report()
    assert (report.share, report.bound_max, report.steps) == (1.0, 0.0, 12)
    assert "has left no token unread" in str(cache.memory_report())


@pytest.mark.slow
def test_padded_rows_read_what_they_read_alone(read, tiny, prune, padded, continuation, step, close):
    """Of the first row, nothing is padding; the second row's pages are those that it has alone."""
    (prompt, mask), model = padded, tiny()
    cache = prune(model, read=read)
    together = step(model, cache, prompt, continuation, mask)
    shares = []
    for row, first in ((0, 0), (1, 13)):
        alone = prune(model, read=read)
        found = step(model, alone, prompt[row : row + 1, first:], continuation[row : row + 1])
        assert close(together[row : row + 1], found)
        shares.append(alone.read_report().share)
    assert cache.read_report().share == pytest.approx(sum(shares) / 2)
    assert 0.1 < cache.read_report().share < 1


def test_less_is_read_and_the_rest_is_bounded(tiny, prune, prompt, continuation, step):
    model, bounds = tiny(), []
    for share in (0.6, 0.75, 0.9):
        cache = prune(model, read=TopTokens(share=share, page_size=2))
        step(model, cache, prompt, continuation)
        report = cache.read_report()
        assert report.share <= share + 1e-6
        assert all(0 < each.bound_mean <= each.bound_max <= 1 for each in report.layers)
        bounds.append(report.bound_mean)
        said = cache.memory_report()
        assert (said.read_share, said.unread_bound_max) == (report.share, report.bound_max)
        assert 0 < said.reading_bytes < said.key_bytes
        assert said.spare_bytes >= 0
    assert bounds[0] > bounds[1] > bounds[2]
    assert "layer 1:" in str(report)
    assert json.dumps(said.to_dict())
    cache.reset()
    assert str(cache.read_report()) == "no step has read few tokens yet"


def test_an_epsilon_holds_in_every_step(tiny, prune, prompt, continuation, step):
    model = tiny()
    cache = prune(model, read=TopTokens(share=0.3, page_size=2, epsilon=0.05))
    step(model, cache, prompt, continuation)
    assert cache.read_report().bound_max <= 0.05
    assert cache.read_report().share < 1


def test_weights_of_unread_tokens_are_zero(read, tiny, prune, prompt, continuation, step, close):
    model = tiny(attention="grace_eager")
    first, second = (prune(model, read=read) for _ in range(2))
    step(model, first, prompt, continuation[:, :3])
    with torch.no_grad():
        model(prompt, past_key_values=second)
        out = model(continuation[:, :3], past_key_values=second, output_attentions=True)
    weights = out.attentions[0]
    assert weights.shape == (2, 4, 3, 43)
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 3), atol=1e-5)
    assert (weights[..., :32] == 0).any()
    assert not weights[:, :, 0, -2:].any(), "nobody sees what comes later"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 4, 12])
def test_new_tokens_at_once_read_as_one_by_one(width, read, tiny, prune, padded, continuation, step, close):
    model = tiny()
    one, many = prune(model, read=read), prune(model, read=read)
    expected = step(model, one, padded[0], continuation, padded[1])
    assert close(step(model, many, padded[0], continuation, padded[1], width=width), expected)
    assert many.read_report().steps == 12
    assert many.read_report().bound_mean == pytest.approx(one.read_report().bound_mean, rel=1e-6)


OTHERS = {
    "growth": {"tail_block": 4},
    "growth past a page": {"tail_block": 3},
    "few channels": {"ratio": 0.5},
    "eviction": {"evict": SnapKV(budget=24, window=4)},
    "first and last": {"evict": StreamingLLM(budget=24)},
    "no sinks": {"sink_tokens": 0},
    "one dense layer": {"dense_layers": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("by", ALL)
def test_together_with_other_settings_all_is_read_of_what_they_leave(
    other, by, tiny, prune, padded, continuation, step, close
):
    """Reading all gives what the same cache gives without `read`; of channels, all are stored."""
    model, settings = tiny(), {"sink_tokens": 4, **OTHERS[other]}
    ratio = settings.pop("ratio", 0.5 if by == "channels" else 0.0)
    cache = prune(model, ratio=ratio, read=ALL[by], **settings)
    found = step(model, cache, padded[0], continuation, padded[1])
    plain = prune(model, ratio=0.0 if by == "channels" else ratio, **settings)
    assert close(found, step(model, plain, padded[0], continuation, padded[1]))
    few = WAYS["sampled"] if by == "sampling" else TopTokens(share=0.5, by=by, page_size=4 if by == "pages" else None)
    fewer = prune(model, ratio=ratio, read=few, **settings)
    step(model, fewer, padded[0], continuation, padded[1])
    # What is always read may be more than the share.
    assert fewer.read_report().share < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("by", ["pages", "sampling"])
@pytest.mark.parametrize("quantize", [{"keys": 8, "values": 8}, {"values": 8}])
def test_quantised_tokens_are_read(by, quantize, tiny, prune, prompt, continuation, step, close):
    model, quantize = tiny(), Quantize(**quantize, group_size=8)
    cache = prune(model, read=ALL[by], quantize=quantize, sink_tokens=0)
    expected = step(model, prune(model, ratio=0.0, quantize=quantize), prompt, continuation)
    assert close(step(model, cache, prompt, continuation), expected)


@pytest.mark.slow
def test_generating(read, tiny, prune, padded, generate):
    """Beams, chunks, and candidates that are dropped again."""
    model, mask = tiny(), padded[1]
    again = [generate(model, prune(model, read=read), *padded, num_beams=3) for _ in range(2)]
    assert torch.equal(*again)
    cache = prune(model, read=read)
    expected = generate(model, cache, padded[0][:1], mask[:1])
    with attach(model, config=cache.config) as attached:
        found = generate(model, None, padded[0][:1], mask[:1], prompt_lookup_num_tokens=3, eos_token_id=1000)
    assert torch.equal(found, expected)
    assert attached.cache.read_report().steps >= 15


def test_a_prompt_in_chunks_is_read_as_at_once(read, tiny, prune, prompt, continuation, close):
    model, caches = tiny(), []
    for size in (40, 10):
        cache = prune(model, read=read, prompt_length=40)
        with torch.no_grad():
            for part in prompt.split(size, dim=1):
                model(part, past_key_values=cache)
            logits = model(continuation[:, :1], past_key_values=cache).logits
        caches.append((cache, logits))
    assert close(caches[0][1], caches[1][1])
    units = [cache.layers[0].compressed.index.units for cache, _ in caches]
    assert torch.allclose(units[0].reach, units[1].reach)


def test_another_long_turn_reads_everything(tiny, prune, prompt, continuation, step, close):
    model, turn = tiny(), torch.randint(3, 97, (2, 36), generator=torch.Generator().manual_seed(9))
    cache = prune(model, read=TopTokens(share=0.4, page_size=2))
    found = step(model, cache, prompt, turn, width=36)
    assert close(found, step(model, DynamicCache(config=model.config), prompt, turn, width=36))
    assert cache.read_report().steps == 0


def test_comparing_predictions_does_not_read_everything(tiny, prune, prompt):
    model, turn = tiny(), torch.randint(3, 97, (1, 40), generator=torch.Generator().manual_seed(9))
    cache = prune(model, read=TopTokens(share=0.4, page_size=2))
    with torch.no_grad():
        model(prompt[:1], past_key_values=cache)
    assert next_token_log_probs(model, cache, turn).shape == (40, 97)
    assert cache.read_report().steps == 40


def indexes(cache):
    return [layer.compressed.index for layer in cache.layers]


def same(one: ReadIndex, other: ReadIndex) -> bool:
    first, second = one.tensors(), other.tensors()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_saved_and_loaded_bit_for_bit(read, tiny, prune, padded, continuation, step, tmp_path):
    model, mask = tiny(), padded[1]
    cache = prune(model, read=read, tail_block=4)
    step(model, cache, padded[0], continuation[:, :6], mask)
    cache.save(tmp_path / "cache.safetensors")
    loaded = CompressedCache.load(tmp_path / "cache.safetensors", model.config)
    assert all(same(one, other) for one, other in zip(indexes(cache), indexes(loaded), strict=True))
    mask = torch.cat([mask, torch.ones(2, 7, dtype=mask.dtype)], 1)
    with torch.no_grad():
        logits = [
            model(
                continuation[:, 6:7],
                attention_mask=mask,
                position_ids=mask.sum(-1, keepdim=True) - 1,
                past_key_values=each,
            ).logits
            for each in (cache, loaded)
        ]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lead": 0}, "lead=0 is no number of the 16 channels"),
        ({"lead": 99}, "lead=99 is no number"),
        ({"lead": 3}, "kept_indices are not sorted channels"),
    ],
)
def test_files_that_were_edited_are_refused(
    change, says, tiny, prune, padded, continuation, step, tmp_path, digest_known
):
    model, path = tiny(), tmp_path / "cache.safetensors"
    cache = prune(model, read="channels", ratio=0.5)
    step(model, cache, padded[0], continuation[:, :2], padded[1])
    cache.save(path)
    about, tensors = digest_known(path)
    about["layers"][0].update(change)
    from grace_opt.hf.engine import saving

    saving.FILE_FORMAT.write(path, tensors, about)
    with pytest.raises(CacheError, match=says):
        CompressedCache.load(path, model.config)
    about["layers"][0]["lead"] = cache.layers[0].compressed.index.lead
    tensors["0.padding"] = tensors["0.padding"] + 90
    saving.FILE_FORMAT.write(path, tensors, about)
    with pytest.raises(CacheError, match="padding is not a number of the"):
        CompressedCache.load(path, model.config)


def test_cropped_and_reordered_caches_have_the_index_of_what_is_left(read, tiny, prune, prompt, continuation, step):
    model = tiny()
    cache = prune(model, read=read)
    step(model, cache, prompt, continuation[:, :2])
    before = copy.deepcopy(cache)
    cache.batch_select_indices(torch.tensor([1]))
    cache.reorder_cache(torch.tensor([0]))
    for one, other in zip(indexes(before), indexes(cache), strict=True):
        pairs = zip(one.tensors().values(), other.tensors().values(), strict=True)
        assert all(torch.equal(a[1:], b) for a, b in pairs)
    cache.crop(-20)
    for layer in cache.layers:
        old = layer.compressed
        assert same(old.index, ReadIndex.of(read, old.pruned_keys, old.index.lead, None, layer.plan.index))
    with torch.no_grad():
        assert model(continuation[1:, :1], past_key_values=cache).logits.isfinite().all()


def test_a_cache_cropped_to_its_sinks_reads_all_of_them(read, tiny, prune, prompt, continuation, step, close):
    model, caches = tiny(), [prune(tiny(), read=read, tail_block=2), DynamicCache(config=tiny().config)]
    found = []
    for cache in caches:
        step(model, cache, prompt, continuation[:, :1])
        cache.crop(-38)
        with torch.no_grad():
            logits = [model(continuation[:, i : i + 1], past_key_values=cache).logits for i in range(12)]
        found.append(torch.cat(logits[:9], 1))
    assert close(*found)
    assert caches[0].layers[0].compressed.stored > 3, "newer tokens have joined the sinks"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype, read, tiny, prune, prompt, continuation, step):
    model = copy.deepcopy(tiny()).to(dtype)
    cache = prune(model, read=read)
    assert step(model, cache, prompt, continuation[:, :3]).isfinite().all()
    assert 0 < cache.read_report().share < 1
    slow = "a sample takes many times as long as reading all: torch compares all codes"
    assert (slow in str(cache.memory_report())) == (read.by == "sampling")


def test_by_name_and_from_a_file(tiny, tmp_path):
    path = tmp_path / "cache.json"
    CacheConfig(read=TopTokens(0.1, epsilon=0.5)).to_json(path)
    cache = CompressedCache(tiny().config, config=str(path))
    assert cache.config.read == TopTokens(0.1, epsilon=0.5)
    assert CompressedCache(tiny().config, read="channels").config.read == TopTokens(by="channels")
    assert CacheConfig.from_dict({"read": "pages"}).read == TopTokens()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"share": 0}, "share=0: give a number > 0 and <= 1"),
        ({"share": 25}, "for 25 %, write share=0.25"),
        ({"share": float("nan")}, "share=nan"),
        ({"page_size": 0}, "page_size=0: give an integer >= 1"),
        ({"page_size": 4, "by": "channels"}, "page_size=4 goes with by=\"pages\", and by='channels' reads single"),
        ({"page_size": 4, "by": "sampling"}, 'page_size=4 goes with by="pages"'),
        ({"epsilon": 0}, "epsilon=0: give a number > 0 and < 1, or None"),
        ({"epsilon": -0.1}, "epsilon=-0.1"),
        ({"by": "page"}, "by='page': give 'pages', 'channels' or 'sampling'"),
        ({"by": "sampling", "share": 0.25}, "share=0.25 does not go with .*leave out share="),
        ({"by": "sampling", "epsilon": 0.1}, 'epsilon=0.1 does not go with .*write by="channels" with epsilon='),
        ({"by": "sampling", "top_p": 0.9}, "top_p=0.9 does not go with"),
        ({"by": "sampling", "tables": 1}, "tables=1: give an integer >= 2 .*in 2 of them"),
        ({"by": "sampling", "tables": 0}, "tables=0: give an integer >= 2"),
        ({"by": "sampling", "hash_bits": 0}, "hash_bits=0: give an integer >= 1 and <= 24"),
        ({"by": "sampling", "hash_bits": 25}, "hash_bits=25"),
        ({"by": "sampling", "seed": -1}, "seed=-1: give an integer >= 0"),
        ({"by": "sampling", "confidence": 95}, "confidence=95: give a number > 0 and < 1; for 95 %, write"),
        ({"by": "sampling", "confidence": 1.0}, "confidence=1.0: give a number > 0 and < 1"),
        ({"tables": 75}, 'tables=75 goes with by="sampling"'),
        ({"confidence": 0.9, "by": "channels"}, "confidence=0.9 goes with"),
        ({"nbits": 10}, "For nbits, write hash_bits="),
        ({"top_p": 0.9}, 'top_p=0.9 goes with by="channels"'),
        ({"top_p": 1, "by": "channels"}, "top_p=1: give a number > 0 and < 1"),
        ({"budget": 0.5}, "For budget, write share="),
    ],
)
def test_wrong_settings_are_named(settings, says):
    with pytest.raises(OptionError, match=says):
        TopTokens(**settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"read": "page"}, "read='page': write one of 'pages', 'channels', 'sampling'.*Did you mean 'pages'"),
        ({"read": 0.25}, r"read=0.25: write TopTokens\(share=0.25\)"),
        ({"read": "pages", "fused": False}, "read= needs fused=True"),
        ({"read": "sampling", "bits": 2.25}, "read= goes without bits="),
        ({"read": "channels", "quantize": "int4"}, "stores all channels of the keys as they are"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, says):
    with pytest.raises(OptionError, match=says):
        CacheConfig(**settings)
    with pytest.raises(OptionError, match="TopTokens has no page; it has share"):
        CacheConfig.from_dict({"read": {"page": 3}})


def test_samples_hold_at_a_confidence_and_their_layers_draw_for_themselves(tiny, prune, prompt, continuation, step):
    model = tiny()
    caches = [prune(model, read=TopTokens(by="sampling", tables=8, hash_bits=3, seed=seed)) for seed in (0, 0, 1)]
    logits = [step(model, cache, prompt, continuation) for cache in caches]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    planes = [layer.compressed.index.units.planes for layer in caches[0].layers]
    assert not torch.equal(*planes)
    report, memory = caches[0].read_report(), caches[0].memory_report()
    assert report.confidence == memory.read_confidence == 0.95
    assert "each bound at 95 % confidence" in str(report)
    assert "each bound at 95 % confidence" in str(memory)
    assert "a sample takes about as much time as reading all: all codes are compared in each step" in str(memory)
    # Norms in 8 bytes, and 1 count for each old token; codes of 8 times 3 bits, rounded up to 32, are of 256 tokens
    # always. The rest does not grow with them.
    old = caches[0].layers[0].compressed.pruned_keys.shape[2]
    fixed = sum(part.nbytes for part in (planes[0], caches[0].layers[0].compressed.index.units.highest))
    reach = 2 * 2 * 16 * 4
    assert memory.reading_bytes == 2 * (2 * 2 * (old * 8 + 32 * 32) + 2 * old * 4 + fixed + 2 * reach)
    certain = prune(model, read="pages")
    step(model, certain, prompt, continuation)
    assert certain.read_report().confidence is None
    assert "confidence" not in str(certain.memory_report())


def test_samples_are_the_same_compiled_and_in_torch(tiny, prune, padded, continuation, step, close, monkeypatch):
    model, logits, reports = tiny(), [], []
    for fewest in (10**9, 0):
        monkeypatch.setattr(kernels, "CPU_MIN_TOKENS", fewest)
        cache = prune(model, read=WAYS["sampled"])
        logits.append(step(model, cache, padded[0], continuation, padded[1]))
        reports.append(cache.read_report())
    assert close(*logits)
    assert reports[0].share == reports[1].share < 1
    assert reports[0].bound_mean == pytest.approx(reports[1].bound_mean, rel=1e-3)


def test_a_report_of_a_cache_that_reads_all_is_refused(tiny, prune):
    with pytest.raises(CacheError, match="this cache reads every token"):
        prune(tiny()).read_report()


def test_pages_beyond_the_prompt_are_the_prompt(tiny, prune, prompt, continuation, step, close):
    model = tiny()
    found = [step(model, prune(model, read=TopTokens(page_size=size)), prompt, continuation) for size in (64, 10**30)]
    assert close(*found)


def test_layers_that_read_all_count_in_the_share(tiny, prune, prompt, continuation, step):
    model, read = tiny(), TopTokens(share=0.3, page_size=2)
    cache = prune(model, read=read, dense_layers=1)
    step(model, cache, prompt, continuation)
    report = cache.read_report()
    assert report.layers[0].share == 1
    assert report.share == pytest.approx(sum(each.share for each in report.layers) / len(report.layers))
    assert report.layers[1].share < 1


def test_a_cache_that_keeps_all_has_a_size(tiny, prune, prompt, continuation, step):
    model = tiny()
    cache = prune(model, read="pages")
    step(model, cache, prompt, continuation)
    assert stored_bits(cache).mean_bits > 16


@pytest.mark.parametrize(("name", "way"), [("quest", "pages"), ("MagicPIG", "sampling")])
def test_names_of_systems_are_known(name, way):
    with pytest.raises(OptionError, match=f"Its way is '{way}'"):
        CacheConfig(read=name)
