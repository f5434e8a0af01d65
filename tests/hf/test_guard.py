"""``guard=``: how unlike its calibration a prompt is, what is said of it, and a basis that comes with a model."""

from __future__ import annotations

import copy
import math
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from grace_opt.errors import CacheError, CalibrationError, OptionError
from grace_opt.hf import Bits, CacheConfig, CompressedCache, SnapKV, attach, attention_implementation, calibrate
from grace_opt.hf.bases import at_hand, basis_folder
from grace_opt.hf.bases.basis import Basis
from grace_opt.hf.bases.calibrated import CalibratedBasis
from grace_opt.hf.bases.divergence import LEAST_ENERGY, LIMITS, LOOKED_AT, Divergence, divergence, excess
from grace_opt.hf.bases.guard import Guard
from grace_opt.hf.bases.importance import spread_queries
from grace_opt.hf.models import POCKET_BASIS, POCKET_FOLDER, load_model, load_pocket
from grace_opt.hf.models.observation import Observation
from grace_opt.hf.stores.coded.saved_row import divergence_of
from grace_opt.hf.tools.needle import make_prompt


@pytest.fixture(scope="module")
def pocket():
    """The pocket model, a prompt of its language, and its basis."""
    model, tokenizer = load_pocket()
    task = make_prompt(400, depth=0.5, count=lambda text: len(tokenizer(text).input_ids), seed=3)
    return model, tokenizer(task.text, return_tensors="pt").input_ids, CalibratedBasis.load(POCKET_BASIS)


def read(model, ids, basis, tmp_path, mask=None, **settings):
    """A cache that has read a prompt with a basis, and what was said of it."""
    basis.save(tmp_path / "basis.safetensors")
    cache = CompressedCache(model, bits=3, basis=tmp_path / "basis.safetensors", **settings)
    with torch.no_grad(), attention_implementation(model, "grace_sdpa"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        places = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=places, past_key_values=cache)
    return cache, [str(each.message) for each in said if "unlike" in str(each.message)]


def of_each(basis, change):
    """A basis whose layers' bases were changed."""
    return replace(
        basis,
        keys={layer: change(each) for layer, each in basis.keys.items()},
        values={layer: change(each) for layer, each in basis.values.items()},
    )


def swapped(basis):
    return of_each(basis, lambda own: Basis(own.encode.flip(0), own.decode.flip(0), own.energy.flip(0), own.rotary))


def turned(basis):
    def turn(own):
        generator = torch.Generator().manual_seed(0)
        turns = torch.linalg.qr(torch.randn(own.encode.shape, generator=generator))[0]
        return replace(own, encode=own.encode @ turns, decode=turns.mT @ own.decode)

    return of_each(basis, turn)


def other_layers(basis):
    def moved(layers):
        return dict(zip(layers, [*list(layers.values())[1:], next(iter(layers.values()))], strict=True))

    return replace(basis, keys=moved(basis.keys), values=moved(basis.values))


class TestDivergence:
    @given(st.lists(st.lists(st.floats(0, 1e300), min_size=2, max_size=2), min_size=1, max_size=3))
    def test_excess_is_the_relative_entropy_of_the_most_unlike_head(self, ratios):
        def plain(ratio):
            return (ratio - 1 - math.log(ratio)) / 2 if ratio > 1 else 0.0

        expected = max(sum(plain(each) for each in head) / 2 for head in ratios)
        assert float(excess(torch.tensor(ratios, dtype=torch.float64))) == pytest.approx(expected, rel=1e-9, abs=1e-12)

    def test_it_is_what_the_definition_says(self, pocket):
        _, _, basis = pocket
        keys, values = (torch.randn(2, 100, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
        energy = basis.keys[0].energy * 3
        found = divergence((basis.keys[0], basis.values[0]), keys, values, energy)
        for number, (tensor, own) in enumerate(((keys, basis.keys[0]), (values, basis.values[0]))):
            heads = []
            for head in range(2):
                coordinates = tensor[head].double() @ own.encode[head].double()
                spread = coordinates.var(0, correction=0).tolist()
                heads.append(sum((v - 1 - math.log(v)) / 2 for v in spread if v > 1) / len(spread))
            assert float(found[number]) == pytest.approx(max(heads), rel=1e-3)
        heads = []
        for own in basis.keys[0].energy:
            least = LEAST_ENERGY * float(own.mean())
            ratios = [(3 * each + least) / (each + least) for each in own.tolist()]
            heads.append(sum((ratio - 1 - math.log(ratio)) / 2 for ratio in ratios) / len(ratios))
        assert float(found[2]) == pytest.approx(max(heads), rel=1e-9)

    def test_of_a_long_prompt_the_beginning_counts(self, pocket):
        """Rotary embeddings turn means farther than texts of 1,024 tokens show: a book of 4,096 is no alarm."""
        bases = pocket[2].keys[1], pocket[2].values[1]
        heads, width = bases[0].energy.shape
        numbers = torch.randn(heads, 3 * LOOKED_AT, width, generator=torch.Generator().manual_seed(0))
        keys, values = numbers @ bases[0].decode.float(), numbers @ bases[1].decode.float()
        short = divergence(bases, keys[:, :LOOKED_AT], values[:, :LOOKED_AT], bases[0].energy.double())
        keys[:, LOOKED_AT:] += 100
        assert torch.equal(divergence(bases, keys, values, bases[0].energy.double()), short)
        assert not Divergence(*short.tolist()).largest[1] > 1

    @pytest.mark.parametrize(("first", "told"), [(0, True), (LOOKED_AT, False)])
    def test_queries_are_those_of_the_same_tokens(self, pocket, monkeypatch, first, told):
        """Queries that ask far too much are told if they come early, and not if they come late."""
        (model, _, basis), prompt = pocket, 2000
        heads, width = basis.keys[1].energy.shape
        found = []
        monkeypatch.setattr(Guard, "check", lambda self, layer, unlike: found.append(unlike))
        cache = CompressedCache(model, bits=3, basis=POCKET_BASIS)
        plan = cache.layers[1].plan
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(1, heads, prompt, width, generator=generator)
        keys, values = (numbers @ each[1].decode.float() for each in (basis.keys, basis.values))
        queries = torch.randn(1, 2 * heads, prompt, width, generator=generator) * 1e-3
        queries[:, :, first:] *= 1e5
        over = spread_queries(Observation(queries, None, prompt, width**-0.5, None), None)
        cache.layers[1].maker.of_prompt(plan, over, keys, values)
        assert (found[0].queries > LIMITS["queries"]) == told

    def test_what_nothing_asks_for_is_no_matter(self, pocket):
        _, _, basis = pocket
        own = basis.keys[0]
        energy = own.energy.clone()
        energy[:, 0] = torch.finfo(torch.float64).tiny
        more = energy.clone()
        more[:, 0] = 1e-9 * energy.mean()
        keys = torch.zeros(2, 70, 64)
        assert float(divergence((replace(own, energy=energy), own), keys, keys, more)[2]) < 1e-9

    def test_values_may_differ_more_than_keys_and_queries(self):
        assert Divergence(keys=0.2, values=0.7, queries=0.0).largest == ("keys", 0.8)
        assert Divergence(keys=0.2, values=0.9, queries=0.0).largest == ("values", 0.9)


class TestWarning:
    def test_a_prompt_of_the_models_language_is_quiet(self, pocket, tmp_path):
        cache, said = read(*pocket, tmp_path)
        assert not said
        assert cache.memory_report().divergence < 0.1
        assert "the prompt is: 0.0" in str(cache.memory_report())

    @pytest.mark.parametrize("plant", [swapped, turned, other_layers])
    def test_wrong_bases_are_told_once_per_prompt_and_first_layer(self, pocket, tmp_path, plant):
        model, ids, basis = pocket
        cache, said = read(model, ids, plant(basis), tmp_path)
        assert len(said) == 1
        assert said[0].startswith("layer 0: the prompt's ")
        assert "calibrate on some of them" in said[0]
        assert cache.memory_report().divergence > 1
        cache.reset()
        assert cache.memory_report().divergence is None
        with torch.no_grad(), attention_implementation(model, "grace_sdpa"), pytest.warns(UserWarning, match="unlike"):
            model(ids, past_key_values=cache)

    def test_one_wrong_layer_is_named(self, pocket, tmp_path):
        model, ids, basis = pocket
        wrong = turned(basis)
        _, said = read(model, ids, replace(basis, keys={**basis.keys, 1: wrong.keys[1]}), tmp_path)
        assert [each.split(" are unlike")[0] for each in said] == ["layer 1: the prompt's queries"]

    def test_weights_that_change_within_a_block(self, pocket):
        model = copy.deepcopy(pocket[0])
        with attach(model, bits=3) as attached, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for factor in (1, 4):
                model.model.layers[1].self_attn.k_proj.weight.data *= factor
                model.generate(pocket[1], max_new_tokens=1)
                found = attached.cache.memory_report().divergence
                assert (found > 1) is (factor == 4)

    def test_numbers_far_out_in_one_layer(self, pocket):
        model = copy.deepcopy(pocket[0])
        projection = model.model.layers[2].self_attn.k_proj
        projection.bias = torch.nn.Parameter(torch.full((128,), 900.0))
        # As if a basis had been made before: it belongs to other weights.
        at_hand._MADE[model] = replace(pocket[2], fingerprint=at_hand.fingerprint(model))
        with attach(model, bits=3), pytest.warns(UserWarning, match="layer 2: the prompt's keys are unlike"):
            model.generate(pocket[1], max_new_tokens=1)

    def test_raise_says_it_and_the_cache_asks_to_be_reset(self, pocket, tmp_path):
        model, ids, basis = pocket
        turned(basis).save(tmp_path / "turned.safetensors")
        cache = CompressedCache(model, Bits(3, basis=tmp_path / "turned.safetensors", guard="raise"))
        with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
            with pytest.raises(CalibrationError, match="layer 0: the prompt's queries are unlike"):
                model(ids, past_key_values=cache)
            with pytest.raises(CacheError, match="reset"):
                model(ids[:, :1], past_key_values=cache)
        good, _ = read(model, ids, basis, tmp_path, guard="raise")
        assert good.memory_report().divergence < 0.1

    def test_off_measures_nothing(self, pocket, tmp_path, monkeypatch):
        monkeypatch.setattr(Guard, "check", lambda *given: pytest.fail("measured"))
        cache, said = read(pocket[0], pocket[1], turned(pocket[2]), tmp_path, guard="off")
        assert not said
        assert cache.memory_report().divergence is None

    def test_a_guard_changes_no_code(self, pocket, tmp_path):
        caches = [read(*pocket, tmp_path, guard=guard)[0] for guard in ("warn", "off")]
        assert all(map(torch.equal, caches[0].layers[1].full_width(), caches[1].layers[1].full_width()))

    def test_the_most_unlike_row_counts_and_padding_does_not(self, pocket, tmp_path):
        model, ids, basis = pocket
        noise = torch.randint(3, 470, ids.shape, generator=torch.Generator().manual_seed(5))
        alone = [read(model, each, basis, tmp_path)[0].memory_report().divergence for each in (ids, noise)]
        both = read(model, torch.cat([ids, noise]), basis, tmp_path)[0].memory_report().divergence
        assert both == pytest.approx(max(alone), rel=1e-3)
        assert alone[1] > 5 * alone[0]
        padded = torch.cat([torch.zeros(1, 40, dtype=torch.long), ids], dim=1)
        mask = (torch.arange(padded.shape[1]) >= 40).long()[None]
        cache, _ = read(model, padded, basis, tmp_path, mask)
        assert cache.memory_report().divergence == pytest.approx(alone[0], rel=0.05)

    def test_it_is_saved_and_unknown_without_a_calibration(self, pocket, tmp_path):
        model, ids, basis = pocket
        cache, _ = read(model, ids, basis, tmp_path)
        cache.save(tmp_path / "cache.safetensors")
        loaded = CompressedCache.load(tmp_path / "cache.safetensors", model, basis=tmp_path / "basis.safetensors")
        assert loaded.memory_report().divergence == cache.memory_report().divergence
        plain = CompressedCache(model, bits=3, basis="none")
        with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
            model(ids, past_key_values=plain)
        assert plain.memory_report().divergence is None


def in_layer(basis, change, layer):
    """A basis of which one layer's was changed."""
    wrong = change(basis)
    return replace(
        basis,
        keys={**basis.keys, layer: wrong.keys[layer]},
        values={**basis.values, layer: wrong.values[layer]},
    )


class TestDense:
    def test_layers_that_are_told_stay_dense_and_others_do_not(self, pocket, tmp_path):
        model, ids, basis = pocket
        cache, said = read(model, ids, in_layer(basis, other_layers, 1), tmp_path, guard="dense")
        report = cache.memory_report()
        assert report.unlike_layers == (1,)
        assert "beyond that in layers 1" in str(report)
        assert len(said) == 1
        assert "layer 1: the prompt's" in said[0]
        assert "it stays dense, as do others like it" in said[0]
        exact = DynamicCache()
        with torch.no_grad():
            model(ids, past_key_values=exact)
        for layer in range(len(exact.layers)):
            held, own = cache.layers[layer].full_width(), (exact.layers[layer].keys, exact.layers[layer].values)
            assert all(map(torch.equal, held, own)) == (layer == 1)

    @pytest.mark.parametrize("reader", ["grace_sdpa", "grace_eager"])
    def test_it_goes_on_as_the_dense_layer_that_it_is(self, pocket, tmp_path, reader):
        """All layers dense: steps, beams, crops and files give what a dense cache gives."""
        model, ids, basis = pocket
        cache, _ = read(model, ids, other_layers(basis), tmp_path, guard="dense", tail_block=64, recent_window=16)
        exact = DynamicCache()
        more = ids[:, :150]
        with torch.no_grad(), attention_implementation(model, reader), warnings.catch_warnings():
            warnings.simplefilter("error")
            dense = model(ids, past_key_values=exact).logits[:, -1:]
            for at in range(more.shape[1]):
                token = more[:, at : at + 1]
                ours, dense = (model(token, past_key_values=each).logits for each in (cache, exact))
            torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-4)
            cache.save(tmp_path / "cache.safetensors")
            cache = CompressedCache.load(tmp_path / "cache.safetensors", model)
            for each in (cache, exact):
                each.reorder_cache(torch.tensor([0, 0]))
            ours, dense = (model(ids[:, :2].repeat(2, 1), past_key_values=each).logits for each in (cache, exact))
            torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-4)
        report = cache.memory_report()
        assert report.bits is None
        assert report.unlike_layers == tuple(range(len(exact.layers)))
        assert "all dense, as the prompt is unlike the calibration's texts" in str(report)

    def test_rows_and_padding(self, pocket, tmp_path):
        """One row that is unlike the calibration leaves the layer dense for all of them."""
        model, ids, basis = pocket
        noise = torch.randint(3, 470, ids.shape, generator=torch.Generator().manual_seed(5))
        padded = torch.cat([torch.zeros(2, 40, dtype=torch.long), torch.cat([ids, noise])], dim=1)
        mask = (torch.arange(padded.shape[1]) >= 40).long().expand(2, -1).contiguous()
        wrong = in_layer(basis, turned, 2)
        cache, _ = read(model, padded, wrong, tmp_path, mask, guard="dense")
        assert 2 in cache.memory_report().unlike_layers
        keys, _ = cache.layers[2].full_width()
        alone, _ = read(model, ids, wrong, tmp_path, guard="dense")
        torch.testing.assert_close(keys[:1, :, 40:], alone.layers[2].full_width()[0], rtol=1e-4, atol=1e-4)

    def test_an_eviction_before_it_is_kept(self, pocket, tmp_path):
        model, ids, basis = pocket
        cache, _ = read(model, ids, other_layers(basis), tmp_path, guard="dense", evict=SnapKV(budget=0.5))
        report = cache.memory_report()
        assert report.evicted_tokens > 100
        assert report.bits is None
        token = ids[:, :1]
        with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
            plain = CompressedCache(model, evict=SnapKV(budget=0.5), ratio=0)
            model(ids, past_key_values=plain)
            ours, expected = (model(token, past_key_values=each).logits for each in (cache, plain))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)

    def test_it_leaves_less_error_than_wrong_codes(self, pocket, tmp_path):
        model, ids, basis = pocket
        wrong = other_layers(basis)
        losses = {}
        for guard in ("off", "dense"):
            cache, _ = read(model, ids, wrong, tmp_path, guard=guard)
            exact = DynamicCache()
            with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
                model(ids, past_key_values=exact)
                ours, dense = (
                    model(ids[:, 100:130], past_key_values=each).logits.log_softmax(-1) for each in (cache, exact)
                )
            losses[guard] = float(torch.nn.functional.kl_div(ours, dense, log_target=True, reduction="batchmean"))
        assert losses["dense"] < 1e-6 < losses["off"]


class TestBesideWeights:
    def test_the_pocket_models_is_found_and_nothing_is_calibrated(self, monkeypatch):
        monkeypatch.setattr(at_hand, "_made_now", lambda *given: pytest.fail("calibrated"))
        model, _ = load_pocket()
        assert at_hand.basis_for(model).digest() == CalibratedBasis.load(POCKET_BASIS).digest()

    def test_one_that_is_damaged_or_of_other_weights_is_not_taken(self, tmp_path, monkeypatch):
        folder = tmp_path / "model"
        shutil.copytree(POCKET_FOLDER, folder)
        monkeypatch.setattr(at_hand, "_made_now", lambda *given: CalibratedBasis.load(POCKET_BASIS))
        monkeypatch.setattr(at_hand, "_place", lambda here: None)
        model, _ = load_model(str(folder))
        model.model.layers[0].self_attn.k_proj.weight.data += 1
        assert at_hand._beside_weights(model, at_hand.fingerprint(model)) is None
        model, _ = load_model(str(folder))
        assert at_hand._beside_weights(model, at_hand.fingerprint(model)) is not None
        (folder / POCKET_BASIS.name).write_bytes(b"no basis")
        assert at_hand._beside_weights(model, at_hand.fingerprint(model)) is None
        with pytest.warns(UserWarning, match=rf"comes with the model is not used.*{POCKET_BASIS.name}"):
            assert at_hand.basis_for(model).texts == 6
        model.config._name_or_path = "x" * 300
        assert at_hand._beside_weights(model, at_hand.fingerprint(model)) is None

    def test_its_kl_is_kept_beside_what_was_calibrated(self, tmp_path, monkeypatch):
        monkeypatch.setattr(basis_folder, "cached_assets_path", lambda *names: tmp_path)
        model, own = load_pocket()[0], CalibratedBasis.load(POCKET_BASIS)
        calibrated = replace(own, key_rates={layer: rates + 1 for layer, rates in own.key_rates.items()})
        basis_folder.write(tmp_path / basis_folder.file_of(own.fingerprint), calibrated, "pocket")
        curve = torch.tensor([[1.0, 0.01], [4.0, 0.001]], dtype=torch.float64)
        measured = []
        for each in (model, load_pocket()[0]):  # the second finds what the first has kept
            found = at_hand.with_measured_kl(each, lambda *given: measured.append(given) or curve)
            assert found.digest() == own.digest()
            assert torch.equal(found.kl, curve)
        assert len(measured) == 1
        kept = CalibratedBasis.load(tmp_path / basis_folder.file_of(own.fingerprint))
        assert kept.digest() == calibrated.digest()


class TestBadInput:
    @pytest.mark.parametrize("guard", ["loud", "", True, 1, ["warn"], np.array(["warn", "off"])])
    def test_names_of_guards(self, guard):
        with pytest.raises(OptionError, match=r"guard=.*: write 'warn', 'dense', 'raise' or 'off'"):
            Bits(2, guard=guard)

    @pytest.mark.parametrize("guard", ["dense", "raise"])
    def test_nothing_is_unlike_no_calibration(self, guard):
        with pytest.raises(OptionError, match=rf'guard="{guard}" and basis="none"'):
            Bits(2, basis="none", guard=guard)

    @pytest.mark.parametrize("budget", ["total_bytes", "max_bytes"])
    def test_dense_layers_and_a_number_of_bytes(self, budget):
        with pytest.raises(OptionError, match=rf'guard="dense" and {budget}='):
            Bits(**{budget: 10**6}, guard="dense")

    @pytest.mark.parametrize("numbers", [[0.1, 0.2], [0.1, -1.0, 0.2], [0.1, "1", 0.2], 3, [0.1, 0.2, math.inf]])
    def test_divergences_in_a_file(self, numbers):
        def require(fits, what):
            assert fits, what

        assert divergence_of(require, {}) is None
        assert divergence_of(require, {"divergence": [0.1, 0.0, 2.0]}) == (0.1, 0.0, 2.0)
        with pytest.raises(AssertionError, match="are not the numbers of keys, values and queries"):
            divergence_of(require, {"divergence": numbers})

    def test_it_is_for_bits(self):
        with pytest.raises(OptionError, match=r"guard='warn' is for bits="):
            CacheConfig(ratio=0.3, guard="warn")

    def test_calibrating_on_such_prompts_helps(self, pocket, tmp_path):
        model, _, basis = pocket
        noise = torch.randint(3, 470, (1, 900), generator=torch.Generator().manual_seed(5))
        own = calibrate.basis(model, None, [noise])
        before, after = (read(model, noise[:, -400:], each, tmp_path)[0].memory_report() for each in (basis, own))
        assert after.divergence < before.divergence / 2
