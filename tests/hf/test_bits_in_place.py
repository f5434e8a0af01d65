"""Steps that read codes where they lie give what steps on dense copies give, whatever the cache has been through."""

from __future__ import annotations

import copy

import pytest
import torch

from grace_opt.hf import CompressedCache, SnapKV
from grace_opt.hf.bases.basis import identity_basis
from grace_opt.hf.stores.coded import in_place
from grace_opt.kernels.cache import coded as kernels
from tests.hf.matrix import PADDING, pruning_attention
from tests.hf.test_memory import storage_bytes

LENGTH, STEPS = 150, 30
#: Tokens until the first block is coded anew.
BEFORE = 8
SETTINGS = {"bits": 2.5, "basis": "none", "recent_window": 8, "tail_block": 16}


@pytest.fixture(autouse=True)
def whatever_the_length(monkeypatch):
    monkeypatch.setattr(kernels, "CPU_MIN_TOKENS", 0)


@pytest.fixture
def model(tiny):
    torch.manual_seed(1)
    return tiny()


class Counted:
    """How many calls read codes where they lie, and how many could not."""

    def __init__(self, monkeypatch):
        self.found, real = [], in_place.attention_in_place

        def counting(*args, **kwargs):
            result = real(*args, **kwargs)
            self.found.append(result is not None)
            return result

        monkeypatch.setattr("grace_opt.hf.stores.coded.coded.attention_in_place", counting)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


def fed(model, cache, ids, mask=None, step=1, last=0):
    """Logits after each step, and the attention that the newest tokens received; the last turn has `last` tokens."""
    found = []
    with pruning_attention(model), torch.no_grad():
        ends = [*range(LENGTH, LENGTH + STEPS * step + 1, step)]
        ends += [ends[-1] + last] if last else []
        for first, end in zip([0, *ends], ends, strict=False):
            given = {} if mask is None else {"attention_mask": mask[:, :end]}
            found.append(model(ids[:, first:end], past_key_values=cache, **given).logits[:, -1])
    return torch.stack(found[1:]), [
        layer.compressed.received.sums for layer in cache.layers if hasattr(layer.compressed, "received")
    ]


def on_copies(monkeypatch, run):
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "CPU_MIN_TOKENS", 10**9)
        return run()


def check_alike(monkeypatch, counted, model, ids, mask=None, **settings):
    step, last = settings.pop("step", 1), settings.pop("last", 0)
    expected = on_copies(
        monkeypatch, lambda: fed(model, CompressedCache(model, **{**SETTINGS, **settings}), ids, mask, step, last)
    )
    counted.found.clear()
    found = fed(model, CompressedCache(model, **{**SETTINGS, **settings}), ids, mask, step, last)
    differences = (found[0] - expected[0]).abs().flatten(1).amax(1) / expected[0].abs().max()
    assert differences[: BEFORE // step].max() <= 1e-4
    assert differences.max() <= 5e-3  # a number on the edge between two codes may get either
    for one, two in zip(found[1], expected[1], strict=True):
        assert torch.allclose(one, two, atol=5e-3)
    return list(counted.found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bits": 1},
        {"bits": 8},
        {"key_bits": 3, "value_bits": 1, "bits": None},
        {"evict": SnapKV(budget=120)},
        {"sink_tokens": 0},
        {"step": 3},
        {"step": 4, "tail_block": 64},
        {"trellis": False},
        {"trellis": False, "bits": 5, "step": 3},
    ],
)
def test_steps_are_those_on_dense_copies(settings, model, counted, monkeypatch):
    ids = torch.randint(0, model.config.vocab_size, (2, 320))
    found = check_alike(monkeypatch, counted, model, ids, **settings)
    assert all(found)
    assert len(found) == STEPS * model.config.num_hidden_layers


@pytest.mark.slow
def test_capped_logits_of_eager_attention(tiny, counted, monkeypatch):
    """Gemma 2: eager attention, of which nobody reads the weights."""
    full = ("full_attention", "full_attention")
    model = tiny("Gemma2", attention="eager", attn_logit_softcapping=5.0, query_pre_attn_scalar=16, layer_types=full)
    found = check_alike(monkeypatch, counted, model, torch.randint(0, model.config.vocab_size, (2, 320)))
    assert all(found)
    assert len(found) == STEPS * model.config.num_hidden_layers


@pytest.mark.slow
def test_of_padded_rows_one_of_which_is_too_short_to_be_coded(model, counted, monkeypatch):
    ids, mask = torch.randint(0, model.config.vocab_size, (3, 300)), torch.ones(3, 300, dtype=torch.int64)
    mask[1, :PADDING], mask[2, : LENGTH - 20] = 0, 0
    assert all(check_alike(monkeypatch, counted, model, ids, mask))


def test_a_mask_that_hides_coded_tokens_is_obeyed_on_copies(model, counted, monkeypatch):
    ids, mask = torch.randint(0, model.config.vocab_size, (1, 300)), torch.ones(1, 300, dtype=torch.int64)

    def run():
        cache = CompressedCache(model, **SETTINGS)
        with pruning_attention(model), torch.no_grad():
            model(ids[:, :LENGTH], past_key_values=cache)
            mask[:, 30:40] = 0
            return model(
                ids[:, LENGTH : LENGTH + 1], past_key_values=cache, attention_mask=mask[:, : LENGTH + 1]
            ).logits

    expected = on_copies(monkeypatch, run)
    counted.found.clear()
    assert torch.equal(run(), expected)
    assert not any(counted.found)


@pytest.mark.slow
def test_many_new_tokens_are_read_on_copies(model, counted, monkeypatch):
    ids = torch.randint(0, model.config.vocab_size, (1, 300))
    found = check_alike(monkeypatch, counted, model, ids, last=40)
    assert len(found) == STEPS * model.config.num_hidden_layers


def test_copies_and_moved_tensors_have_tables_of_their_own(model):
    ids = torch.randint(0, model.config.vocab_size, (1, LENGTH + 2))
    cache = CompressedCache(model, **SETTINGS)
    with pruning_attention(model), torch.no_grad():
        model(ids[:, :LENGTH], past_key_values=cache)
        untouched = copy.deepcopy(cache)
        model(ids[:, LENGTH:-1], past_key_values=cache)
        other = copy.deepcopy(cache)
        row = other.layers[0].compressed.rows[0]
        assert not row.table_tensors()
        for codes in (row.segments[0].keys, row.segments[0].values):
            for tensor in codes.tensors().values():
                tensor.set_(tensor.clone())  # as sending it to another process does
        expected = model(ids[:, -1:], past_key_values=cache).logits
        del cache
        assert torch.equal(model(ids[:, -1:], past_key_values=other).logits, expected)
        for tensor in row.segments[0].keys.tensors().values():
            tensor.set_(tensor.clone())
        model(ids[:, LENGTH:-1], past_key_values=untouched)
        assert torch.equal(model(ids[:, -1:], past_key_values=untouched).logits, expected)


def test_what_steps_read_belongs_to_the_basis(model):
    """It is made once for a row, and anew for another basis of its coordinates."""
    cache = CompressedCache(model, **SETTINGS)
    fed(model, cache, torch.randint(0, model.config.vocab_size, (1, 260)))
    row = cache.layers[0].compressed.rows[0]
    heads, width = row.sink_keys.shape[0], row.sink_keys.shape[2]
    plain, other = ((identity_basis(heads, width), identity_basis(heads, width)) for _ in range(2))
    assert row.sequence(plain) is row.sequence(plain)
    assert row.sequence(plain).key_basis is plain[0].decode
    assert row.sequence(other).key_basis is other[0].decode
    before = row.sequence(other)
    row.sink_keys.set_(row.sink_keys.clone())
    assert row.sequence(other) is not before


def test_no_sequence_may_be_left(model):
    cache = CompressedCache(model, **SETTINGS)
    fed(model, cache, torch.randint(0, model.config.vocab_size, (1, 260)))
    cache.batch_select_indices(torch.tensor([], dtype=torch.long))
    assert all(layer.compressed.rows == () for layer in cache.layers)
    assert cache.layers[0].tail.keys.shape[0] == 0


def test_tables_are_counted(model):
    ids = torch.randint(0, model.config.vocab_size, (1, LENGTH + 1))
    cache = CompressedCache(model, **SETTINGS)
    with pruning_attention(model), torch.no_grad():
        model(ids[:, :LENGTH], past_key_values=cache)
        before = cache.memory_report()
        assert before.allocated_bytes == storage_bytes(cache)
        model(ids[:, LENGTH:], past_key_values=cache)
    after = cache.memory_report()
    made = sum(
        part.nbytes for layer in cache.layers for row in layer.compressed.rows for part in row.table_tensors().values()
    )
    assert made > 0
    assert after.allocated_bytes == storage_bytes(cache) + made  # which knows of tensors only
    received = sum(layer.compressed.received.sums.nbytes for layer in cache.layers)
    assert after.index_bytes == before.index_bytes + made + received
    assert after.bits == before.bits


def test_attention_weights_are_made_on_copies(tiny, counted, monkeypatch):
    model = tiny()
    model.set_attn_implementation("grace_eager")
    ids = torch.randint(0, model.config.vocab_size, (1, LENGTH + 1))
    cache = CompressedCache(model, **SETTINGS)
    with torch.no_grad():
        model(ids[:, :LENGTH], past_key_values=cache)
        out = model(ids[:, LENGTH:], past_key_values=cache, output_attentions=True)
    assert out.attentions[0].shape[-1] == LENGTH + 1
    assert not counted.found


@pytest.mark.slow
@pytest.mark.parametrize("least", [0, 10**9])
def test_inside_autocast(least, model, monkeypatch):
    """Coding and counting attention keep their types; the model's own products are rounded to bfloat16."""
    monkeypatch.setattr(kernels, "CPU_MIN_TOKENS", least)
    ids = torch.randint(0, model.config.vocab_size, (1, 320))

    def rounding(make):
        expected = fed(model, make(), ids)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (fed(model, make(), ids)[0] - expected).abs().mean()

    coded = rounding(lambda: CompressedCache(model, **{**SETTINGS, "bits": 8}))
    assert coded <= 2 * rounding(lambda: CompressedCache(model, ratio=0.0))
