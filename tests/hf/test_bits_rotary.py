"""The mean of keys that turns with the position: against complex numbers, what it saves, and that nothing loses it.

Models with random weights have no such mean; those here get key biases, as Qwen2 has.
"""

from __future__ import annotations

import copy
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt.hf import CompressedCache, calibrate
from grace_opt.hf.bases.rotary import RotaryMean, choose_pairs, explained_by, frequencies_of
from grace_opt.hf.evict.eviction import SnapKV
from grace_opt.hf.stores.coded import coded, row
from grace_opt.kernels.cache.coded import turned_products
from tests import oracle
from tests.hf.matrix import model_of

SETTINGS = {"bits": 3, "recent_window": 8, "sink_tokens": 2}


def frequencies(pairs, base=1e4):
    return base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)


@st.composite
def means(draw):
    heads, pairs = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    width = 2 * pairs + draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    channels = torch.randperm(width, generator=generator)[: 2 * pairs].view(2, pairs)
    scale = draw(st.sampled_from([1e-30, 1.0, 1e15]))
    mean = scale * torch.randn(heads, 2, pairs, generator=generator)
    return RotaryMean(frequencies(pairs, draw(st.sampled_from([1e2, 1e4, 1e6]))), channels, mean), width, generator


def complex_mean(rotary, positions, width):
    """The plain version, ``(H, n, d)`` float64."""
    found = np.zeros((len(rotary.mean), len(positions), width))
    turns = np.exp(1j * np.asarray(positions)[:, None] * rotary.frequencies.numpy())
    pairs = (rotary.mean[:, 0].double().numpy() + 1j * rotary.mean[:, 1].double().numpy())[:, None] * turns
    found[..., rotary.channels[0].tolist()], found[..., rotary.channels[1].tolist()] = pairs.real, pairs.imag
    return found


@settings(max_examples=60)
@given(means(), st.integers(1, 300), st.integers(1, 4))
def test_products_and_differences_are_those_of_complex_numbers(drawn, count, rows):
    rotary, width, generator = drawn
    expected = complex_mean(rotary, range(count), width)
    gain = torch.rand(len(expected), generator=generator).half()
    keys = torch.randn(*expected.shape, generator=generator) * float(rotary.mean.abs().max())
    taken = rotary.taken_off(keys, gain, torch.arange(count)).double().numpy()
    allowed = 1e-5 * float(rotary.mean.abs().max())
    parts = gain.double().numpy()[:, None, None] * expected
    np.testing.assert_allclose(taken, keys.double().numpy() - parts, atol=allowed, rtol=1e-6)
    queries = torch.randn(len(expected), rows, width, generator=generator)
    products = np.einsum("hrd,hnd->hrn", queries.double().numpy(), parts)
    found = rotary.logits(queries, rotary.mean * gain[:, None, None], count)
    assert found.shape == (len(expected), rows, count)
    np.testing.assert_allclose(found.double().numpy(), products, atol=20 * allowed * width**0.5, rtol=1e-5)
    means = (rotary.mean * gain.float()[:, None, None])[None]
    compiled = turned_products(queries[None], means, rotary.channels, *rotary.tables(count), count)[0]
    np.testing.assert_allclose(compiled.double().numpy(), products, atol=20 * allowed * width**0.5, rtol=1e-5)
    back = rotary.turned_back(torch.from_numpy(expected), torch.arange(count))
    np.testing.assert_allclose(back.numpy(), rotary.mean.double().numpy(), atol=allowed, rtol=1e-4)


def test_threads_change_no_bit():
    rotary = RotaryMean(frequencies(20), torch.arange(40).view(2, 20), torch.randn(3, 2, 20))
    queries, means = torch.randn(2, 3, 5, 40), torch.randn(2, 3, 2, 20)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(turned_products(queries, means, rotary.channels, *rotary.tables(9000), 9000))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    expected = rotary.logits(queries[1], means[1], 9000)
    torch.testing.assert_close(found[0][1], expected, atol=1e-4, rtol=1e-5)


def test_far_positions_are_exact():
    rotary = RotaryMean(frequencies(4), torch.arange(8).view(2, 4), torch.ones(1, 2, 4))
    far = 2**20 + torch.arange(3)
    expected = complex_mean(rotary, far.numpy(), 8)
    found = -rotary.taken_off(torch.zeros(1, 3, 8), torch.ones(1), far)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(
        rotary.logits(torch.eye(8)[None], rotary.mean, 2**20 + 3)[0, :, -3:].T, expected[0], atol=1e-5
    )


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("pairs", "last"), [(8, False), (5, False), (5, True)])
def test_pairs_and_frequencies_are_found(apart, pairs, last):
    generator, own = torch.Generator().manual_seed(pairs), frequencies(pairs)
    start = 16 - 2 * pairs if last else 0
    first = torch.arange(pairs)
    channels = start + (torch.stack([first, first + pairs]) if apart else torch.stack([2 * first, 2 * first + 1]))
    truth = RotaryMean(own, channels, 3 * torch.randn(2, 2, pairs, generator=generator))
    positions = torch.arange(400) * 3
    keys = truth.taken_off(torch.randn(2, 400, 16, generator=generator), -torch.ones(2), positions)
    asked = torch.rand(2, 16, generator=generator) + 0.5
    found = choose_pairs(keys, asked, positions, [frequencies(pairs, 500.0), own, frequencies(3), frequencies(20)])
    assert torch.equal(found.frequencies, own)
    assert torch.equal(found.channels, channels)
    expected = oracle.best_rotary_mean(
        keys.double().numpy(), asked.numpy(), positions.numpy(), [frequencies(pairs, 500.0).numpy(), own.numpy()]
    )
    np.testing.assert_allclose(complex_mean(found, positions.numpy(), 16), expected, atol=1e-4)
    explained = oracle.rotary_explained(keys.double().numpy(), expected, asked.numpy())
    mine = explained_by(found, keys, positions, asked)
    np.testing.assert_allclose(mine.numpy(), explained[channels[0]] + explained[channels[1]], rtol=1e-4)
    gain, saved = found.gain(keys, torch.diag_embed(asked), positions)
    assert (gain > 0.97).all()
    shifted, less = found.gain(keys, torch.diag_embed(asked), positions + 5)
    assert (shifted < gain - 0.05).all()
    assert less < saved
    nothing, _ = found.gain(torch.randn(2, 400, 16, generator=generator), torch.diag_embed(asked), positions)
    assert nothing.max() < 0.2


def test_nothing_turns_without_frequencies():
    keys = torch.randn(1, 50, 8)
    assert choose_pairs(keys, torch.ones(1, 8), torch.arange(50), []) is None
    assert frequencies_of(torch.nn.Linear(2, 2)) == []
    (found,) = frequencies_of(model_of("Llama"))
    torch.testing.assert_close(found, frequencies(8), rtol=1e-6, atol=0)


def prompt(length=300, seed=1, batch=1):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


TEXTS = [prompt(500, 5), prompt(500, 6)]


@pytest.fixture(scope="module")
def biased(tmp_path_factory):
    """A model, its basis, and the file of that."""
    model = copy.deepcopy(model_of("Qwen2"))
    for number, layer in enumerate(model.model.layers):
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=2.0, generator=torch.Generator().manual_seed(number))
    model.set_attn_implementation("grace_sdpa")
    return model, *saved(calibrate.basis(model, None, TEXTS), tmp_path_factory)


def saved(basis, tmp_path_factory):
    path = tmp_path_factory.mktemp("basis") / "basis.safetensors"
    basis.save(path)
    return basis, path


def read(model, cache, ids, positions=True, **options):
    """Read tokens at the positions that `generate` gives padded ones, or at the model's own."""
    mask = options.get("attention_mask")
    if mask is not None and positions:
        options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, past_key_values=cache, **options).logits


def keys_of(cache):
    return torch.stack([layer.full_width()[0] for layer in cache.layers]).double()


def test_keys_lose_less_at_the_same_bits(biased, tmp_path_factory):
    model, basis, path = biased
    assert all(keys.rotary is not None for keys in basis.keys.values())
    with mock.patch("grace_opt.hf.bases.calibrate.frequencies_of", return_value=[]):
        plain, other = saved(calibrate.basis(model, None, TEXTS), tmp_path_factory)
    assert all(keys.rotary is None for keys in plain.keys.values())
    exact = CompressedCache(model, ratio=0.0)
    read(model, exact, prompt())
    errors = []
    for each in (path, other):
        cache = CompressedCache(model, **SETTINGS, basis=each)
        read(model, cache, prompt())
        assert cache.memory_report().bits <= 3
        errors.append(float((keys_of(cache) - keys_of(exact)).square().mean()))
    assert errors[0] < 0.8 * errors[1]


def steps_in_place_and_dense(model, basis, ids, more, **options):
    """Logits of steps that read the codes where they lie, and of the same steps on dense copies."""
    found = []
    for attend in (coded.CodedTokens.attend, lambda self, step: None):
        cache = CompressedCache(model, **{**SETTINGS, "basis": basis, **options.get("settings", {})})
        mask = options.get("mask")
        given = {} if mask is None else {"attention_mask": mask}
        read(model, cache, ids, **given)
        with mock.patch.object(coded.CodedTokens, "attend", attend):
            logits = []
            for token in more.split(1, dim=1):
                if mask is not None:
                    given["attention_mask"] = mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                logits.append(read(model, cache, token, **given))
        found.append((torch.cat(logits, 1), keys_of(cache), cache))
    return found


PADDED = torch.ones(2, 700, dtype=torch.long)
PADDED[1, :90] = 0


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (1, {}),
        (2, {"mask": PADDED}),
        (1, {"settings": {"evict": SnapKV(budget=520)}}),
        (2, {"settings": {"evict": SnapKV(budget=520)}, "mask": PADDED}),
    ],
)
def test_codes_are_read_alike_where_they_lie(biased, batch, options):
    model, _, basis = biased
    ids, more = prompt(700, 2, batch), prompt(70, 3, batch)
    (found, keys, cache), (expected, dense, _) = steps_in_place_and_dense(model, basis, ids, more, **options)
    assert all((each.gain > 0.5).any() for layer in cache.layers for each in layer.compressed.rows)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=1e-4 * scale, rtol=0)
    assert float((keys - dense).square().mean()) < 1e-6 * float(dense.square().mean())  # some codes may be neighbours
    tables = [name for layer in cache.layers for name in layer.stored_parts() if "positions" in name]
    assert any("table" in name for name in tables)  # which the report counts


@pytest.mark.parametrize("mask", [None, PADDED])
@pytest.mark.parametrize("settings", [{}, {"evict": SnapKV(budget=520)}])
def test_newer_tokens_are_at_their_own_positions(biased, mask, settings):
    """Those that wait, and those with classes: of dense keys they lose little more than the prompt's."""
    model, _, basis = biased
    batch = 1 if mask is None else 2
    ids, more = prompt(700, 2, batch), prompt(64, 3, batch)
    caches = [CompressedCache(model, **SETTINGS, basis=basis, **settings), CompressedCache(model, ratio=0.0)]
    given = {} if mask is None else {"attention_mask": mask}
    for cache in caches:
        read(model, cache, ids, **given)
        whole = None if mask is None else torch.nn.functional.pad(mask, (0, 64), value=1)
        # Twice, so that the first block is stored.
        read(model, cache, more, **({} if whole is None else {"attention_mask": whole}))
        whole = None if whole is None else torch.nn.functional.pad(whole, (0, 8), value=1)
        read(model, cache, more[:, :8], **({} if whole is None else {"attention_mask": whole}))
    layer, dense = (cache.layers[0] for cache in caches)  # the other layers' keys are those of other inputs
    waits, tail = layer.compressed.waiting, layer.tail.length
    assert waits == 64
    found, exact = layer.full_width()[0][:, :, -waits - tail : -tail], dense.full_width()[0]
    exact = exact[:, :, exact.shape[2] - waits - tail : exact.shape[2] - tail]
    assert float((found - exact).square().mean()) < 1e-3 * float(exact.var(2).mean())


@pytest.mark.parametrize("settings", [{}, {"evict": SnapKV(budget=520)}])
def test_padding_may_count_as_positions(biased, settings):
    """As with a model that is called by itself."""
    model, _, basis = biased
    found = []
    for positions in (True, False):
        cache = CompressedCache(model, **SETTINGS, basis=basis, **settings)
        read(model, cache, prompt(700, 2, 2), positions, attention_mask=PADDED)
        found.append(list(cache.layers[0].compressed.rows))
    assert [[row.origin for row in rows] for rows in found] == [[0, 90], [0, 0]]
    torch.testing.assert_close(found[0][1].gain, found[1][1].gain, atol=0.02, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"evict": SnapKV(budget=520)}])
def test_saved_and_loaded_with_padding(biased, settings, tmp_path):
    model, _, basis = biased
    ids = prompt(700, 2, 2)
    given = {**SETTINGS, "basis": basis, **settings}
    cache = CompressedCache(model, **given)
    read(model, cache, ids, attention_mask=PADDED)
    cache.save(tmp_path / "cache.safetensors")
    other = CompressedCache.load(tmp_path / "cache.safetensors", model)
    assert torch.equal(keys_of(other), keys_of(cache))
    mask = torch.nn.functional.pad(PADDED, (0, 70), value=1)
    logits = [read(model, each, prompt(70, 3, 2), attention_mask=mask) for each in (cache, other)]
    assert torch.equal(*logits)
    assert [each.origin for each in other.layers[0].compressed.rows] == [0, 90]


def test_other_positions_cost_no_more_than_without(biased):
    """Positions that the cache cannot know: the mean explains nothing there, and little of it is taken off."""
    model, _, basis = biased
    cache = CompressedCache(model, **SETTINGS, basis=basis)
    read(model, cache, prompt(700), position_ids=7 * torch.arange(700)[None])
    gains = torch.stack([layer.compressed.rows[0].gain for layer in cache.layers])
    usual = CompressedCache(model, **SETTINGS, basis=basis)
    read(model, usual, prompt(700))
    assert (gains < torch.stack([layer.compressed.rows[0].gain for layer in usual.layers])).all()


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        (row.CodedRow, lambda self, columns=None: torch.arange(self.sink_keys.shape[1] + self.tokens)),
        (row.CodedRow, lambda self, columns=None: torch.arange(1, 1 + self.sink_keys.shape[1] + self.tokens)),
    ],
)
def test_wrong_positions_would_be_noticed(biased, where, wrong):
    model, _, basis = biased
    ids = prompt(700, 2)
    settings = {**SETTINGS, "basis": basis, "evict": SnapKV(budget=520)}
    cache = CompressedCache(model, **settings)
    read(model, cache, ids)
    right = keys_of(cache)
    with mock.patch.object(where, "positions", wrong):
        assert (keys_of(cache) - right).abs().max() > 0.1 * right.abs().max()


def test_some_heads_and_other_devices(biased):
    _, basis, _ = biased
    rotary = basis.keys[0].rotary
    part = basis.keys[0].heads(1, 2).to("cpu").rotary
    assert torch.equal(part.mean, rotary.mean[1:2])
    assert part.logits(torch.ones(1, 1, 16), rotary.mean[:1], 5).shape == (1, 1, 5)
