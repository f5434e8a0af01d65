"""Saved caches with ``bits=``: the same bits and next tokens, in another process too; edited files are refused."""

from __future__ import annotations

import copy
import functools
import math
import os
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grace_opt.errors import CacheError
from grace_opt.hf import CompressedCache, SnapKV, calibrate
from grace_opt.hf.bases.calibrated import CalibratedBasis
from grace_opt.hf.engine import saving
from grace_opt.hf.stores.coded import waiting as waits
from grace_opt.hf.stores.coded.coded import CodedTokens
from grace_opt.hf.stores.tail import Tail
from tests import children
from tests.hf.conftest import build
from tests.hf.test_saving import MIXED, same_tensors
from tests.hf.test_tampering import VALUES, changed_at, fields, tensors_changed

#: Two blocks of a cache with 124 tokens leave for the codes, and one of a cache with 150.
PROMPT, ALL = 120, 160
SETTINGS = {"bits": 3.0, "basis": "none", "recent_window": 8, "tail_block": 16}
#: What is saved: settings, tokens that are cached by then, number of tokens of padding, changes to the model.
KINDS = {
    "plain": ({}, 124, 0, {}),
    "right after the prompt": ({}, PROMPT, 0, {}),
    "grown": ({}, 150, 0, {}),
    "settled": ({}, 150, 13, {}),
    "padded": ({}, 150, 13, {}),
    "too short a row": ({}, 150, 60, {}),
    "evicted": ({"evict": SnapKV(budget=90, window=4)}, 150, 13, {}),
    "a calibrated basis": ({"basis": "FILE"}, 150, 13, {}),
    "sliding and full": ({}, 124, 0, MIXED),
    "a dense layer": ({"dense_layers": 1}, 124, 0, {}),
    "empty": ({}, 0, 0, {}),
    "numbers one by one": ({"trellis": False}, 150, 13, {}),
    "in few bytes": ({"bits": None, "total_bytes": 60_000}, 124, 0, {}),
    "in more bytes than codes can take": ({"bits": None, "total_bytes": 10_000_000}, 124, 0, {}),
}


def go_on_elsewhere(folder) -> None:
    """Load a model and caches from a folder, go on with each, and write logits and new saves beside."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="grace_sdpa").eval()
    for number, (_, _, padding, _) in enumerate(KINDS.values()):
        path = folder / f"{number}.safetensors"
        if path.exists():
            cache = CompressedCache.load(path, model)
            cache.save(folder / f"{number} again.safetensors")
            save_file({"logits": go_on(model, cache, padding)}, folder / f"{number} logits.safetensors")


@functools.cache
def calibrated(model) -> CalibratedBasis:
    return calibrate.basis(model, None, [torch.arange(3, 90).repeat(3)])


@torch.no_grad()
def go_on(model, cache, padding, until=ALL):
    """Feed what the cache lacks of two sequences: the prompt at once, then one by one; the logits after each."""
    ids = torch.randint(3, 97, (2, ALL), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits, start = [], cache.get_seq_length()
    while start < until:
        stop = max(start + 1, PROMPT)
        part = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        logits.append(model(ids[:, start:stop], past_key_values=cache, **part).logits[:, -1:])
        start = stop
    return torch.cat(logits, dim=1).contiguous()


@functools.cache
def with_tokens(name, basis=None):
    """A cache of a kind: tests get copies."""
    settings, tokens, padding, changes = KINDS[name]
    model = build("Qwen2" if changes else "Llama", **changes)
    cache = CompressedCache(model, **{**SETTINGS, **settings, **({"basis": basis} if basis else {})})
    if tokens:
        go_on(model, cache, padding, tokens)
    return cache


@pytest.fixture
def filled(tmp_path, monkeypatch):
    """`filled("plain")`: a model, its cache as it will be saved, and the padding to go on with."""

    def make(name="plain"):
        settings, _, padding, changes = KINDS[name]
        if name == "settled":
            monkeypatch.setattr(waits, "SETTLED", 16)
            monkeypatch.setattr(waits, "NEWEST", 0)
        model = build("Qwen2" if changes else "Llama", **changes)
        model.set_attn_implementation("grace_sdpa")
        basis = None
        if settings.get("basis") == "FILE":
            basis = tmp_path / "basis.safetensors"
            calibrated(model).save(basis)
        return model, copy.deepcopy(with_tokens(name, basis)), padding

    return make


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache.safetensors"


def parts_of(cache):
    """Every number that a cache holds, by name, without room to grow."""
    found = {}
    for number, layer in enumerate(cache.layers):
        tail, old = getattr(layer, "tail", None), getattr(layer, "compressed", None)
        parts = {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
        if tail is not None:
            parts |= {"tail keys": tail.keys, "tail values": tail.values}
        if old is not None:
            parts |= {**old.parts(), "received": layer.stored_parts().get("received", torch.zeros(0))}
        found |= {f"{number} {name}": tensor.contiguous() for name, tensor in parts.items()}
    return found


def same_bits(found, expected):
    one, other = parts_of(found), parts_of(expected)
    assert one.keys() == other.keys()
    return all(
        one[name].dtype == other[name].dtype and torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
        for name in one
    )


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.slow
def test_a_loaded_cache_has_the_same_bits_and_next_tokens(name, filled, path, close):
    model, cache, padding = filled(name)
    cache.save(path)
    loaded = CompressedCache.load(path, model)
    assert same_bits(loaded, cache)
    assert loaded.config == cache.config
    assert loaded.get_seq_length() == cache.get_seq_length() == KINDS[name][1]
    if KINDS[name][1]:
        assert any(isinstance(layer.compressed, CodedTokens) for layer in loaded._pruned_layers())
        report, before = loaded.memory_report(), cache.memory_report()
        assert (report.bits, report.mean_bits) == (before.bits, before.mean_bits)
    found, expected = go_on(model, loaded, padding), go_on(model, cache, padding)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    assert close(found, expected)
    assert parts_of(loaded).keys() == parts_of(cache).keys()
    for layer, other in zip(loaded._pruned_layers(), cache._pruned_layers(), strict=True):
        counts = [[each.keys.counts for row in old.compressed.rows for each in row.segments] for old in (layer, other)]
        assert counts[0] == counts[1]
        assert layer.compressed.waiting == other.compressed.waiting


@pytest.mark.slow
def test_in_another_process(filled, tmp_path, close):
    expected = {}
    for number, name in enumerate(KINDS):
        if name not in ("grown", "evicted", "a calibrated basis"):
            continue
        model, cache, padding = filled(name)
        cache.save(tmp_path / f"{number}.safetensors")
        expected[number] = name, go_on(model, cache, padding)
    model.save_pretrained(tmp_path / "model")
    children.run(go_on_elsewhere, tmp_path)
    for number, (name, logits) in expected.items():
        found = load_file(tmp_path / f"{number} logits.safetensors")["logits"]
        assert torch.equal(found.argmax(-1), logits.argmax(-1)), name
        assert close(found, logits), name
        assert same_tensors(tmp_path / f"{number}.safetensors", tmp_path / f"{number} again.safetensors"), name


def test_rows_that_sequences_share_are_saved_once(filled, path):
    model, cache, _ = filled()
    cache.save(path)
    once = path.stat().st_size
    cache.batch_repeat_interleave(3)
    cache.save(path)
    loaded = CompressedCache.load(path, model)
    assert same_bits(loaded, cache)
    rows = loaded.layers[0].compressed.rows
    assert rows[0] is rows[2] is not rows[3]
    tails = sum(layer.tail.keys.nbytes + layer.tail.values.nbytes + 3000 for layer in cache.layers)
    assert path.stat().st_size < once + tails
    for each in (cache, loaded):
        each.reorder_cache(torch.tensor([5, 0, 3, 3, 1, 2]))
    assert same_bits(loaded, cache)


def test_a_file_from_before_there_were_trellises_has_none(filled, path, monkeypatch):
    model, cache, _ = filled()
    assert cache.config.bits.trellis
    values = {name: value for name, value in cache.config.to_dict().items() if name != "trellis"}
    monkeypatch.setattr(type(cache.config), "to_dict", lambda self: values)
    cache.save(path)
    assert CompressedCache.load(path, model).config.bits.trellis is False


@pytest.mark.slow
def test_a_loaded_cache_is_reset_for_another_prompt(filled, path):
    model, cache, padding = filled("a calibrated basis")
    cache.save(path)
    loaded = CompressedCache.load(path, model)
    loaded.reset()
    go_on(model, loaded, padding, 150)
    assert same_bits(loaded, cache)


class TestBasis:
    @pytest.mark.slow
    def test_that_is_gone_is_named_and_may_be_elsewhere(self, filled, path, tmp_path):
        model, cache, _ = filled("a calibrated basis")
        cache.save(path)
        (tmp_path / "basis.safetensors").rename(tmp_path / "moved")
        with pytest.raises(CacheError, match=r"basis=.*basis\.safetensors.* write CompressedCache\.load\(.*basis=FILE"):
            CompressedCache.load(path, model)
        assert same_bits(CompressedCache.load(path, model, basis=tmp_path / "moved"), cache)
        assert same_bits(CompressedCache.load(path, model.config, basis=str(tmp_path / "moved")), cache)

    @pytest.mark.slow
    def test_that_is_another_one_is_refused(self, filled, path, tmp_path):
        model, cache, _ = filled("a calibrated basis")
        cache.save(path)
        other = tmp_path / "other"
        calibrate.basis(model, None, [torch.arange(5, 90).repeat(2)]).save(other)
        for wrong in (other, "none"):
            with pytest.raises(CacheError, match=r"coded in another basis of this model .*basis=FILE\) with the file"):
                CompressedCache.load(path, model, basis=wrong)
        os.replace(other, tmp_path / "basis.safetensors")
        with pytest.raises(CacheError, match="coded in another basis"):
            CompressedCache.load(path, model)
        without = filled("plain")[1]
        without.save(path)
        with pytest.raises(CacheError, match="coded in no calibrated basis; leave basis= out"):
            CompressedCache.load(path, model, basis=tmp_path / "basis.safetensors")

    def test_of_a_cache_without_bits_says_so(self, path):
        model = build("Llama")
        CompressedCache(model, ratio=0.5).save(path)
        with pytest.raises(CacheError, match="coded in no calibrated basis; leave basis= out"):
            CompressedCache.load(path, model, basis="b")


@torch.no_grad()
def usable(path, model, padding, what):
    """Load, decode, append a block: works with numbers everywhere, or a `CacheError` says why not."""
    try:
        loaded = CompressedCache.load(path, model)
    except CacheError as error:
        return str(error)
    try:
        go_on(model, loaded, padding, loaded.get_seq_length() + 1)
        for layer in loaded._pruned_layers()[:1]:
            block = torch.ones(2, 2, 16, 16)
            grown = layer.compressed.extended(layer.plan, Tail(block, block))
            settled = grown.settled(layer.plan, torch.ones(2, 2, 3, grown.waiting))
            parts = [row.waiting_coordinates() for row in grown.rows if row.waits]
            parts += [each.coordinates() for row in settled.rows for each in row.segments]
            assert all(tensor.isfinite().all() for part in parts for tensor in part)
    except Exception as error:
        if isinstance(error, CacheError) and "head_dim" in str(error):
            return str(error)
        pytest.fail(f"{what}: loaded, then {type(error).__name__}: {error}")
    return None


@pytest.fixture
def saved(filled, path, request):
    model, cache, padding = filled(request.param)
    cache.save(path)
    return model, padding, path


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["evicted"], indirect=True)
def test_every_field_edited_by_somebody_who_knows_the_digest(saved, digest_known):
    model, padding, path = saved
    assert usable(path, model, padding, "nothing") is None
    about, tensors = digest_known(path)
    places = [at for at in fields(about) if at[0] in ("basis", "layers") and at[1:2] in ((), (0,))]
    refused = 0
    for at in places:
        changes = [lambda owner, key: owner.__delitem__(key)]
        changes += [lambda owner, key, v=value: owner.__setitem__(key, v) for value in VALUES]
        for number, change in enumerate(changes):
            saving.FILE_FORMAT.write(path, tensors, changed_at(about, at, change))
            value = VALUES[number - 1] if number else "dropped"
            refused += usable(path, model, padding, f"{at} {value!r}") is not None
    assert refused > 100


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["evicted"], indirect=True)
def test_every_tensor_edited_by_somebody_who_knows_the_digest(saved, digest_known):
    model, padding, path = saved
    about, tensors = digest_known(path)
    # Those of one layer; of its rows, the padded one.
    first = {n: t for n, t in tensors.items() if n.startswith("0.") and not n.startswith("0.rows.0")}
    for name, tensor in first.items():
        saving.FILE_FORMAT.write(path, {key: t for key, t in tensors.items() if key != name}, about)
        said = usable(path, model, padding, f"{name} dropped")
        # Without it, the attention that the tail has received counts from here on.
        assert said is not None or name.endswith("received"), name
        for what, other in tensors_changed(tensor):
            saving.FILE_FORMAT.write(path, {**tensors, name: other}, about)
            said = usable(path, model, padding, f"{name}, {what}")
            alike = (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
            shared = name.endswith("positions") and what == "fewer heads"  # all heads may have the same
            assert said is not None or alike or shared, (name, what)
            part = name.rpartition(".")[2]
            if what == "not a number" and "rows" in name and not part.startswith("sink"):
                assert said is not None, (name, what)
    for more in (
        "0.more",
        "0.rows.0.more",
        "0.rows.9.sink_keys",
        "0.rows.0.segments.0.keys.planes9",
        "0.rows.x.classes",
    ):
        saving.FILE_FORMAT.write(path, {**tensors, more: torch.ones(1)}, about)
        assert usable(path, model, padding, f"{more} added") is not None


def bit(tensor, place=0):
    """The tensor with one bit turned."""
    other = tensor.clone()
    other.view(-1)[place] ^= 1
    return other


EDITS = {
    "0.rows.0.segments.0.classes": (bit, "classes do not have 8, 32, 68 tokens in every head"),
    "0.rows.0.segments.0.keys.levels": (bit, r"keys\.(scales|planes0) is "),
    "0.rows.0.segments.0.values.scales": (lambda t: -t, "scales are not all positive"),
    "0.rows.1.segments.0.keys.unit": (lambda t: t * 3, "unit is not made of powers of two"),
    "0.rows.0.segments.0.keys.unit": (lambda t: t * 2.0**127, "not finite"),
    "0.rows.0.segments.0.keys.means": (lambda t: t * math.inf, "not finite"),
    "0.rows.0.segments.0.keys.planes1": (
        lambda t: t[:, 1:],
        r"planes1 is torch\.uint8 \(\d+, 3\), not torch\.uint8 \(\d+, 4\)",
    ),
    "0.rows.1.sink_keys": (lambda t: t[:, 1:], "differs in its sink tokens"),
    "0.received": (lambda t: -t, "received has numbers that are negative"),
}


OF_BLOCKS = {
    "0.rows.0.waiting.keys.means": (lambda t: t * math.nan, "not finite"),
    "0.rows.1.waiting.values.scales": (
        lambda t: t[1:],
        r"scales is torch\.float16 \(31,\), not torch\.float16 \(32\)",
    ),
    "0.rows.0.waiting.keys.planes0": (lambda t: t[:, 1:], r"planes0 is torch\.uint8 \(\d+, 1\), not .* \(\d+, 2\)"),
    "0.rows.0.waiting.values.unit": (lambda t: t * 3, "unit is not made of powers of two"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_BLOCKS)
def test_what_is_wrong_with_blocks_is_named(name, filled, path):
    model, cache, _ = filled("grown")
    cache.save(path)
    about, tensors = saving.FILE_FORMAT.read(path)
    change, says = OF_BLOCKS[name]
    saving.FILE_FORMAT.write(path, {**tensors, name: change(tensors[name])}, about)
    with pytest.raises(CacheError, match=rf"cache\.safetensors: layer 0 of the saved cache: .*{says}"):
        CompressedCache.load(path, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("waiting", [32, 16], "differ, and rows grow together"),
        ("waiting", [8, 8], "in blocks of 16"),
        ("waiting", [0, 0], "tensors that do not belong"),
        ("block", 8, "block=8 for a cache with tail_block=16"),
        ("block", 0, "in blocks of 0"),
        ("bits", [[3.0, 3.0], [3.0, -1.0]], "not the bits of keys and values of 2 rows"),
        ("bits", [[3.0, 3.0]], "not the bits of keys and values of 2 rows"),
    ],
)
def test_what_is_wrong_with_numbers_of_tokens_is_named(field, value, says, filled, path):
    model, cache, _ = filled("grown")
    cache.save(path)
    about, tensors = saving.FILE_FORMAT.read(path)
    about["layers"][0][field] = value
    saving.FILE_FORMAT.write(path, tensors, about)
    with pytest.raises(CacheError, match=says):
        CompressedCache.load(path, model)


@pytest.mark.parametrize("name", EDITS)
def test_what_is_wrong_is_named(name, filled, path):
    model, cache, _ = filled()
    cache.save(path)
    about, tensors = saving.FILE_FORMAT.read(path)
    change, says = EDITS[name]
    saving.FILE_FORMAT.write(path, {**tensors, name: change(tensors[name])}, about)
    with pytest.raises(CacheError, match=rf"cache\.safetensors: layer 0 of the saved cache: .*{says}"):
        CompressedCache.load(path, model)


@torch.no_grad()
def test_a_layer_of_which_an_eviction_has_left_too_little_is_saved_too(path):
    model = build("Llama")
    model.set_attn_implementation("grace_sdpa")
    cache = CompressedCache(model, **SETTINGS, evict=SnapKV(budget=60, window=4))
    with pytest.warns(UserWarning, match="tokens left and stays dense"):
        go_on(model, cache, 0, PROMPT)
    assert cache.layers[1].compressed.coded == 0
    cache.save(path)
    loaded = CompressedCache.load(path, model)
    assert same_bits(loaded, cache)
    assert torch.equal(go_on(model, loaded, 0).argmax(-1), go_on(model, cache, 0).argmax(-1))


@torch.no_grad()
def test_rows_too_short_for_bits_that_beams_have_left(path):
    model = build("Llama")
    model.set_attn_implementation("grace_sdpa")
    cache, mask = CompressedCache(model, bits=3, basis="none"), torch.ones(2, 130, dtype=torch.int64)
    mask[1, :70] = 0
    ids = torch.randint(3, 97, (2, 130), generator=torch.Generator().manual_seed(3))
    with pytest.warns(UserWarning, match="1 of the batch's 2 prompts stays dense"):
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), past_key_values=cache)
    cache.batch_select_indices(torch.tensor([1]))
    assert not any(row.tokens for row in cache.layers[0].compressed.rows)
    cache.save(path)
    loaded = CompressedCache.load(path, model)
    assert same_bits(loaded, cache)
    assert torch.equal(*[model(ids[:1, :1], past_key_values=each).logits for each in (cache, loaded)])


@pytest.mark.slow
def test_padding_that_does_not_fit_is_named(filled, path):
    model, cache, _ = filled("padded")
    cache.save(path)
    about, tensors = saving.FILE_FORMAT.read(path)
    name = next(name for name in tensors if name.endswith("present"))
    saving.FILE_FORMAT.write(path, {**tensors, name: bit(tensors[name])}, about)
    with pytest.raises(CacheError, match=r"row 1 has 4 sink tokens and \d+ coded ones for \d+ places"):
        CompressedCache.load(path, model)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("sequences", [0, 2], "not the numbers of rows 0 to 1 for 2 sequences"),
        ("sequences", [0, 0], "not the numbers of rows 0 to 1 for 2 sequences"),
        ("sequences", [0], "not the numbers of rows 0 to 1 for 2 sequences"),
        ("stored", 111, "4 sink tokens and 108 coded ones for 111 places"),
        ("length", 113, "length=113 for 112 stored tokens, although none was evicted"),
        ("rows", [[[8, 32, 68]], [[8, 32, 68, 8, 0]]], "not lists of the numbers of tokens"),
    ],
)
def test_numbers_that_do_not_fit_are_named(field, value, says, filled, path):
    model, cache, _ = filled("right after the prompt")
    cache.save(path)
    about, tensors = saving.FILE_FORMAT.read(path)
    about = copy.deepcopy(about)
    assert about["layers"][0]["stored"] == 112
    about["layers"][0][field] = value
    saving.FILE_FORMAT.write(path, tensors, about)
    with pytest.raises(CacheError, match=says):
        CompressedCache.load(path, model)


def test_pruned_and_coded_caches_are_not_taken_for_each_other(filled, path):
    model, cache, _ = filled()
    other = CompressedCache(model, ratio=0.5, recent_window=8, observation_window=6)
    go_on(model, other, 0, 124)
    for one, two in ((cache, other), (other, cache)):
        one.save(path)
        about, tensors = saving.FILE_FORMAT.read(path)
        saving.FILE_FORMAT.write(path, tensors, {**about, "pruning": two.config.to_dict()})
        with pytest.raises(CacheError, match=r"layer 0 of the saved cache: it (lacks|has) (fields|tensors)"):
            CompressedCache.load(path, model)


def test_short_and_dense(path):
    model = build("Llama")
    model.set_attn_implementation("grace_sdpa")
    cache = CompressedCache(model, **SETTINGS)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", UserWarning)
        model(torch.arange(3, 43)[None], past_key_values=cache)
    cache.save(Path(path))
    loaded = CompressedCache.load(path, model)
    assert same_bits(loaded, cache)
    assert loaded.layers[0].compressed is None
