"""Shares by end-to-end sensitivity: Fisher information against the KL divergence that noise causes, and its factors."""

from __future__ import annotations

import copy
import threading
from functools import partial

import pytest
import torch
from huggingface_hub import cached_assets_path
from transformers.cache_utils import DynamicCache

from grace_opt.errors import CacheError, CalibrationError, OptionError
from grace_opt.hf import calibrate
from grace_opt.hf.bases import at_hand, basis_folder
from grace_opt.hf.bases.basis import identity_basis
from grace_opt.hf.bases.calibrate import SPARSEST
from grace_opt.hf.bases.classes import WINDOW
from grace_opt.hf.bases.sensitivity import LARGEST_FACTOR, TRUST, GradientError, factors, information
from grace_opt.hf.models.recording import record
from grace_opt.hf.settings.bits import SINKS
from tests.hf.matrix import FAMILIES, model_of
from tests.hf.test_bits_calibration import ids

#: Of each text of `ids`, a quarter is fed later.
LENGTH, LATER = 75, 24


@torch.no_grad()
def kl_of_noise(model, text, every, layer, head, which, sigma, draws=8):
    """The mean KL divergence that noise in one head's keys or values causes, over later tokens and draws for each."""
    clean = model(text[:, :LENGTH], use_cache=True).past_key_values
    generator, found = torch.Generator().manual_seed(7), []
    for fed in every:
        dense, noisy = DynamicCache(config=model.config), DynamicCache(config=model.config)
        for index, stored in enumerate(clean.layers):
            pair = [stored.keys, stored.values]
            dense.update(*pair, index)
            wide = [each.repeat(draws, 1, 1, 1) for each in pair]
            if index == layer:
                inner = wide[which][:, head, SINKS : LENGTH - WINDOW]
                inner += sigma * torch.randn(inner.shape, generator=generator, dtype=inner.dtype, device="cpu")
            noisy.update(*wide, index)
        dense = model(fed, past_key_values=dense).logits.double().log_softmax(-1)
        other = model(fed.repeat(draws, 1), past_key_values=noisy).logits.double().log_softmax(-1)
        found.append(float((dense.exp() * (dense - other)).sum(-1).mean()))
    return sum(found) / len(found)


def asked(model, text, **rest):
    """The information of both layers in a prompt that a cache has read, as asked by the rest of the text."""
    length = text.shape[1] - LATER
    cache = model(text[:, :length], use_cache=True, past_key_values=DynamicCache(config=model.config)).past_key_values
    return information(model, text, cache, (0, 1), **rest)


@pytest.fixture(scope="module")
def of_sixty_seeds():
    """The tiny Llama in double precision, a text, and what was fed and found by each of sixty seeds."""
    model = copy.deepcopy(model_of("Llama")).double()  # a KL divergence of so little noise is lost in float32
    text = ids(LENGTH + LATER, 3)[None]
    every = []
    hook = model.register_forward_pre_hook(lambda _, given: every.append(given[0]))
    found = [asked(model, text, seed=seed) for seed in range(60)]
    hook.remove()
    return model, text, every[1::2], found


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.slow
def test_half_the_information_is_the_kl_divergence_of_small_noise(which, of_sixty_seeds):
    (model, text, every, found), sigma = of_sixty_seeds, 1e-3
    for layer in (0, 1):
        for head in (0, 1):
            traces = torch.stack([torch.trace(each[layer][which][head]) for each in found]) * sigma**2 / 2
            error = float(traces.std()) / len(found) ** 0.5
            measured = kl_of_noise(model, text, every, layer, head, which, sigma)
            assert error < 0.1 * measured
            assert measured == pytest.approx(float(traces.mean()), rel=0.1, abs=3 * error)


def test_half_of_the_later_tokens_repeat_a_piece_of_the_prompt():
    model, text, fed = model_of("Llama"), ids()[None], []
    hook = model.register_forward_pre_hook(lambda _, given: fed.append(given[0]))
    found, again, other = (asked(model, text, seed=seed) for seed in (0, 0, 1))
    hook.remove()
    length = text.shape[1] - LATER
    for piece in fed[1::2]:  # the others read the prompt
        assert torch.equal(piece[:, : LATER // 2], text[:, length : length + LATER // 2])
        windows = text[0, :length].unfold(0, LATER // 2, 1)
        assert (windows == piece[0, LATER // 2 :]).all(1).any()
    assert list(found) == [0, 1]
    for layer in found:
        for part in (0, 1):
            assert found[layer][part].shape == (2, 16, 16)
            assert found[layer][part].dtype == torch.float64
            assert torch.equal(found[layer][part], again[layer][part])
            assert not torch.allclose(found[layer][part], other[layer][part])
            assert (torch.linalg.eigvalsh(found[layer][part]) >= -1e-12).all()


@pytest.mark.parametrize("family", ["Llama", "Gemma 2"])
def test_a_text_is_read_once_and_its_later_tokens_after_it(family):
    """In runs with gaps, or in one run where layers have windows; texts begin at different positions."""
    model, texts, read = copy.deepcopy(model_of(family)), [ids(), ids(seed=5)], []

    def note(_module, args, kwargs):
        tokens = args[0] if args else kwargs["input_ids"]
        read.append((tokens.shape[1], kwargs.get("position_ids"), kwargs.get("past_key_values")))

    model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    calibrate.basis(model, None, texts)
    lengths, places, caches = zip(*read, strict=True)
    later = texts[0].shape[0] // 4
    assert lengths == (texts[0].shape[0] - later, later) * 2
    assert caches[0] is caches[1] is not caches[2]
    whole = [torch.cat(places[start : start + 2], 1)[0] for start in (0, 2)]
    limit = min(model.config.max_position_embeddings, SPARSEST * len(whole[0]))
    for each in whole:
        steps = each.diff()
        assert (steps > 0).all()
        assert int(each.max()) < limit
        assert (steps > 1).any() == (family == "Llama")
    assert int(whole[1][0]) == (0 if family == "Llama" else limit - len(whole[1]))


def test_gaps_are_no_ends_of_sequences():
    """transformers reads gaps between positions as such where it has neither a mask nor a cache."""
    model, text, seen = model_of("Llama"), ids(64), {}
    positions = torch.arange(64, device="cpu") + torch.arange(64, device="cpu") // 32 * 100
    for cache in (None, DynamicCache(config=model.config)):
        calls = []
        record(model, text[None], None, calls.append, cache, positions)
        seen[cache is None] = calls[-1].output
    torch.testing.assert_close(seen[True], seen[False])


def test_factors_are_shrunk_logarithms_around_their_mean():
    eye = torch.eye(3, dtype=torch.float64)
    measured = {5: torch.tensor([2.0, 32.0], device="cpu")[:, None, None] * eye / 3}
    local = {5: torch.tensor([2.0, 2.0], dtype=torch.float64)}
    bases = {5: identity_basis(2, 3)}
    # Ratios of 1 and 16.
    expected = torch.tensor([4.0**-TRUST, 4.0**TRUST], dtype=torch.float64)
    torch.testing.assert_close(factors(measured, local, bases)[5], expected)
    scaled = {5: bases[5].__class__(bases[5].encode / 3, bases[5].decode * 3, bases[5].energy)}
    torch.testing.assert_close(factors(measured, local, scaled)[5], expected)
    assert factors({}, local, bases) == {}


def test_heads_that_reach_nothing_or_lose_nothing_have_finite_factors():
    eye, zero = torch.eye(3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    measured = {0: torch.stack([eye, zero, eye, zero])}
    local = {0: torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)}
    found = factors(measured, local, {0: identity_basis(4, 3)})[0]
    assert found.tolist() == pytest.approx([1.0, 1 / LARGEST_FACTOR, LARGEST_FACTOR, 1.0])
    nothing = factors({0: torch.zeros(4, 3, 3).double()}, local, {0: identity_basis(4, 3)})[0]
    assert nothing.isfinite().all()


def test_a_layer_that_later_layers_drown_gets_fewer_bits():
    """By the change of its own output, it would get as many as before."""
    model = copy.deepcopy(model_of("Llama"))
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(1e-3)
    locally, wholly = (calibrate.basis(model, None, [ids()], end_to_end=each).shares(2, 2) for each in (False, True))
    for part in (0, 1):
        assert wholly[0][part].sum() < locally[0][part].sum() - 0.5
        assert wholly[1][part].sum() > locally[1][part].sum() + 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_gradients(family):
    model = model_of(family)
    try:
        locally = calibrate.basis(model, None, [ids()], end_to_end=False)
    except CacheError:
        pytest.skip("its attention cannot be calibrated: tests/hf/test_bits_calibration.py")
    before = [parameter.requires_grad for parameter in model.parameters()]
    wholly = calibrate.basis(model, None, [ids()])
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())
    pairs = ((wholly.key_rates, locally.key_rates), (wholly.value_rates, locally.value_rates))
    assert any(not torch.equal(one[layer], other[layer]) for one, other in pairs for layer in wholly.layers)


def without_gradients(model):
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: output.detach())
    return model


def test_a_model_without_a_head_is_named_and_can_do_without():
    model = model_of("Llama")
    with pytest.raises(GradientError, match=r"LlamaModel has no language-model head.*end_to_end=False"):
        calibrate.basis(model.model, None, [ids()])
    found, expected = (calibrate.basis(each, None, [ids()], end_to_end=False) for each in (model.model, model))
    assert all(torch.equal(found.key_rates[layer], expected.key_rates[layer]) for layer in expected.layers)


def test_a_model_without_gradients_is_named_and_can_do_without(monkeypatch, capsys, tmp_path):
    model = without_gradients(model_of("Llama"))
    with pytest.raises(CalibrationError, match=r"LlamaForCausalLM gives no gradients.*end_to_end=False") as caught:
        calibrate.basis(model, None, [ids()])
    assert isinstance(caught.value, GradientError)
    assert model.config._attn_implementation == "sdpa"
    expected = calibrate.basis(model, None, [ids()], end_to_end=False)
    monkeypatch.setattr(at_hand, "tokenizer_of", lambda model: None)
    monkeypatch.setattr(at_hand, "shipped_texts", lambda: [ids()])
    for _ in range(2):  # made, and then read
        found = at_hand._made_now(model, tmp_path / "llama.safetensors", None, lambda done: None)
        assert torch.equal(found.key_rates[1], expected.key_rates[1])
        said = capsys.readouterr().err
        assert "LlamaForCausalLM gives no gradients" in said
        assert "by their local errors only" in said
    # A process with gradients must not take it for its own.
    assert [path.name for path in tmp_path.iterdir()] == ["llama-local.safetensors"]
    with pytest.raises(OptionError, match="end_to_end"):
        calibrate.basis(model, None, [ids()], end_to_end=1)


def test_next_tokens_that_are_not_finite_are_no_lack_of_gradients():
    model = copy.deepcopy(model_of("Llama"))
    model.lm_head.register_forward_hook(lambda module, args, output: output * torch.nan)
    with pytest.raises(CalibrationError, match="next-token distributions of LlamaForCausalLM are not finite") as caught:
        calibrate.basis(model, None, [ids()])
    assert not isinstance(caught.value, GradientError)


def test_a_folder_of_bases_that_is_a_file_keeps_them_in_memory(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(basis_folder, "cached_assets_path", partial(cached_assets_path, assets_dir=tmp_path / "file"))
    monkeypatch.setattr(at_hand, "_WARNED", threading.Event())
    with pytest.warns(UserWarning, match="kept in memory only"):
        assert at_hand._place({"weights": "0" * 64, "model_type": "llama"}) is None
