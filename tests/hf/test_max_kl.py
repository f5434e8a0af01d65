"""``max_kl=``: the curve of KL by bits, how it is measured and kept, and the bits that it gives."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache
from typer.testing import CliRunner

from grace_opt.cli.app import app
from grace_opt.errors import CalibrationError, OptionError
from grace_opt.hf import Bits, CacheConfig, CompressedCache, SnapKV, attach, attention_implementation, calibrate
from grace_opt.hf.bases import at_hand, basis_folder
from grace_opt.hf.bases.at_hand import basis_for
from grace_opt.hf.bases.calibrated import CalibratedBasis
from grace_opt.hf.bases.kl_curve import POINTS, bits_of_kl, curve_of, kl_of_bits
from grace_opt.hf.engine import kl_by_bits
from grace_opt.hf.models import load_pocket
from tests.hf.matrix import model_of

LENGTH = 256  # all positions of these models
CURVES = st.lists(st.floats(1e-9, 10.0), min_size=len(POINTS), max_size=len(POINTS)).map(
    lambda kl: curve_of(POINTS, sorted(kl, reverse=True))
)
GREEDY = {"max_new_tokens": 2, "do_sample": False}


def text(seed=1, length=LENGTH):
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))


def plain_kl(model, ids, later, **settings):
    """The KL of a cache that the model reads itself, token after token in float64: the plainest version."""
    logits = []
    for cache in (DynamicCache(config=model.config), CompressedCache(model, **settings)):
        with torch.no_grad(), attention_implementation(model, "grace_sdpa"):
            model(ids[:, :-later], past_key_values=cache)
            logits.append(model(ids[:, -later:], past_key_values=cache).logits[0].double())
    kl = 0.0
    for dense, own in zip(*logits, strict=True):
        p, q = torch.softmax(dense, 0), torch.softmax(own, 0)
        kl += float((p * (p / q).log()).sum()) / later
    return kl


@pytest.fixture(scope="module")
def known():
    """A model and its basis, with what bits leave on it."""
    model = copy.deepcopy(model_of("Llama"))
    texts = [text(seed) for seed in range(3)]
    return model, calibrate.kl(model, calibrate.basis(model, None, texts), None, texts, tokens=0)


class TestCurve:
    @given(CURVES, st.floats(0, 1))
    def test_bits_are_the_fewest_that_keep_a_kl(self, curve, part):
        least, most = float(curve[-1, 1]), float(curve[0, 1])
        asked = math.exp((1 - part) * math.log(least) + part * math.log(most))
        asked = min(max(asked, least), most)
        bits = bits_of_kl(curve, asked)
        assert kl_of_bits(curve, bits) <= asked * (1 + 1e-9)
        if bits > POINTS[0]:
            assert kl_of_bits(curve, bits - 1e-3) >= asked * (1 - 1e-9)

    @given(CURVES, st.floats(0.1, 9), st.floats(0.1, 9))
    def test_it_never_rises_and_goes_through_its_points(self, curve, one, two):
        low, high = sorted((one, two))
        assert kl_of_bits(curve, high) <= kl_of_bits(curve, low) * (1 + 1e-12)
        for bits, kl in curve.tolist():
            assert kl_of_bits(curve, bits) == pytest.approx(kl, rel=1e-12)

    @given(st.lists(st.floats(-1e-9, 10.0), min_size=len(POINTS), max_size=len(POINTS)))
    def test_measurements_that_rise_count_as_those_before(self, kl):
        curve = curve_of(POINTS, kl)
        assert (curve[1:, 1] <= curve[:-1, 1]).all()
        assert (curve[:, 1] > 0).all()
        assert curve[0, 1] == max(kl[0], 1e-12)

    def test_less_than_was_measured_is_refused_with_the_least(self):
        curve = curve_of((1.0, 4.0), (0.01, 0.000123))
        with pytest.raises(OptionError, match=r"max_kl=1e-06: the most .*, 4, leave a KL of 0.00012 .* max_kl=0.00013"):
            bits_of_kl(curve, 1e-6)
        assert bits_of_kl(curve, 0.00013) < 4


class TestMeasured:
    def test_it_is_the_kl_of_caches_that_the_model_fills_itself(self, known, tmp_path):
        model, basis = known
        file = tmp_path / "basis.safetensors"
        basis.save(file)
        found = [
            [plain_kl(model, text(seed)[None], 128, bits=bits, basis=file) for seed in range(3)] for bits in POINTS
        ]
        expected = curve_of(POINTS, [sum(row) / 3 for row in found])
        assert torch.allclose(basis.kl, expected, rtol=0.02, atol=1e-9)
        assert basis.kl[0, 1] > 5 * basis.kl[-1, 1]

    def test_first_tokens_are_left_out_but_the_very_first(self, known, monkeypatch):
        model, basis = known
        read = []
        original = kl_by_bits.ReadOnce
        monkeypatch.setattr(kl_by_bits, "ReadOnce", lambda own, ids: read.append(ids[0]) or original(own, ids))
        calibrate.kl(model, basis, None, [text(length=420), text(2, 300)], tokens=100)
        (ids,) = read  # of the other, too few are left
        assert torch.equal(ids, torch.cat([text(length=420)[:1], text(length=420)[100:227]]))

    def test_a_file_keeps_it_and_codes_do_not_depend_on_it(self, known, tmp_path):
        _, basis = known
        basis.save(tmp_path / "basis.safetensors")
        again = CalibratedBasis.load(tmp_path / "basis.safetensors")
        assert torch.equal(again.kl, basis.kl)
        assert again.digest() == basis.digest() == replace(basis, kl=None).digest()

    @pytest.mark.parametrize(
        ("kl", "says"),
        [
            (torch.tensor([[1.0, 0.1], [2.0, 0.2]], dtype=torch.float64), "does not fall"),
            (torch.tensor([[2.0, 0.2], [1.0, 0.1]], dtype=torch.float64), "does not fall"),
            (torch.tensor([[1.0, 0.1]], dtype=torch.float64), r"is \(1, 2\), and not some bits"),
            (torch.tensor([[1.0, 0.1], [2.0, -0.1]], dtype=torch.float64), "and not some bits"),
            (torch.tensor([[1.0, math.nan], [2.0, 0.1]], dtype=torch.float64), "not all numbers are finite"),
            (torch.tensor([[1.0, 0.1], [2.0, 0.05]]), "expected torch.float64"),
        ],
    )
    def test_what_cannot_be_is_refused(self, known, kl, says):
        with pytest.raises(CalibrationError, match=says):
            replace(known[1], kl=kl)

    def test_texts_that_are_too_short(self, known):
        model, basis = known
        with pytest.raises(CalibrationError, match=r"no text has 256 tokens more than the first 200"):
            calibrate.kl(model, basis, None, [text()], tokens=200)


class TestBits:
    def test_they_are_those_of_the_curve(self, known, tmp_path):
        model, basis = known
        file, prompt = tmp_path / "basis.safetensors", text(9)[None]
        basis.save(file)
        asked = math.sqrt(float(basis.kl[1, 1] * basis.kl[2, 1]))
        bits = bits_of_kl(basis.kl, asked)
        found = []
        for settings in ({"max_kl": asked}, {"bits": bits}):
            with attach(model, **settings, basis=file) as attached:
                output = model.generate(prompt, **GREEDY, output_logits=True, return_dict_in_generate=True)
            report = attached.cache.memory_report()
            found.append((output.logits, report.total_bytes))
            assert report.bits <= bits
            assert report.predicted_kl == pytest.approx(asked)
            assert report.to_dict()["predicted_kl"] == report.predicted_kl
            assert f"KL divergence of {asked:.2g} nats" in str(report)
        assert all(torch.equal(one, two) for one, two in zip(found[0][0], found[1][0], strict=True))
        assert found[0][1] == found[1][1]

    def test_nothing_is_said_of_what_was_not_measured(self, known, tmp_path):
        model, basis = known
        basis.save(tmp_path / "with.safetensors")
        replace(basis, kl=None).save(tmp_path / "without.safetensors")
        for name, settings in (
            ("without", {"bits": 2}),
            ("with", {"key_bits": 3, "value_bits": 2}),
            ("with", {"bits": 2, "trellis": False}),
            ("with", {"bits": 2, "evict": SnapKV(150)}),
        ):
            with attach(model, **settings, basis=tmp_path / f"{name}.safetensors") as attached:
                model.generate(text(9)[None], **GREEDY)
            assert attached.cache.memory_report().predicted_kl is None

    def test_settings_go_to_files_and_back(self, known, tmp_path):
        config = CacheConfig(max_kl=0.002, basis="b.safetensors")
        assert CacheConfig.from_dict(config.to_dict()) == config
        config.to_json(tmp_path / "config.json")
        assert CacheConfig.from_json(tmp_path / "config.json") == config

    def test_a_saved_cache_goes_on_with_the_same(self, known, tmp_path):
        model, basis = known
        basis.save(tmp_path / "basis.safetensors")
        with attach(model, max_kl=float(basis.kl[2, 1]), basis=tmp_path / "basis.safetensors") as attached:
            model.generate(text(9)[None], **GREEDY)
        attached.cache.save(tmp_path / "cache.safetensors")
        loaded = CompressedCache.load(tmp_path / "cache.safetensors", model)
        assert loaded.config == attached.cache.config
        assert loaded.memory_report().predicted_kl == attached.cache.memory_report().predicted_kl


class TestFirstUse:
    @pytest.fixture
    def measured(self, tmp_path, monkeypatch):
        """How often something was measured, with a folder of bases and texts of its own."""
        found, original = [], kl_by_bits.kl_curve
        (tmp_path / "bases").mkdir()
        monkeypatch.setattr(basis_folder, "cached_assets_path", lambda *names: tmp_path / "bases")
        monkeypatch.setattr(at_hand, "shipped_texts", lambda: [text(seed) for seed in range(2)])
        monkeypatch.setattr(at_hand, "tokenizer_of", lambda model: None)
        monkeypatch.setattr(kl_by_bits, "TOKENS", 0)
        monkeypatch.setattr(kl_by_bits, "kl_curve", lambda *given: found.append(given) or original(*given))
        return found

    def test_it_is_measured_once_and_kept(self, measured):
        model = copy.deepcopy(model_of("Llama"))
        with attach(model, bits=4) as attached:  # a block that has a basis without it
            model.generate(text()[None], **GREEDY)
            assert not measured
            assert attached.cache.memory_report().predicted_kl is None
            for _ in range(2):
                with attach(model, max_kl=50) as inner:
                    model.generate(text()[None], **GREEDY)
                    model.generate(text()[None], **GREEDY)
                assert inner.cache.memory_report().predicted_kl is not None
        assert len(measured) == 1
        at_hand._MADE.pop(model)  # as in another process
        assert CompressedCache(model, max_kl=50).budget.key_bits == 1.0
        assert len(measured) == 1

    def test_of_threads_that_come_at_once_one_measures(self, measured):
        model = copy.deepcopy(model_of("Llama"))
        basis_for(model)
        with ThreadPoolExecutor(3) as pool:
            caches = list(pool.map(lambda _: CompressedCache(model, max_kl=50), range(3)))
        assert len(measured) == 1
        assert len({cache.budget.key_bits for cache in caches}) == 1

    def test_the_command_writes_it(self, tmp_path, monkeypatch):
        (tmp_path / "text.txt").write_text("the quiet river runs past a late singer " * 60)
        file = tmp_path / "pocket.safetensors"
        given = ["calibrate", "basis", "pocket", "-o", str(file), "--text", str(tmp_path / "text.txt")]
        shown = CliRunner().invoke(app, [*given, "--tokens", "200", "--kl"])
        assert shown.exit_code == 0, shown.output
        assert "KL divergence left, nats per token, by bits: 1: " in shown.output
        model, _ = load_pocket()
        assert CompressedCache(model, max_kl=5, basis=file).budget.key_bits == 1.0


class TestBadInput:
    @pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "0.002"], ids=str)
    def test_that_is_no_kl(self, value):
        with pytest.raises(OptionError, match=r"^max_kl=.*: give a finite number > 0"):
            CacheConfig(max_kl=value)

    @pytest.mark.parametrize(
        ("more", "says"),
        [
            ({"bits": 2}, "^bits and max_kl given"),
            ({"total_bytes": 10**6}, "^total_bytes and max_kl given"),
            ({"basis": "none"}, r'max_kl=0.002 and basis="none": .* leave out basis="none", or write bits='),
            ({"trellis": False}, "max_kl=0.002 and trellis=False: .* leave out trellis=False"),
            ({"evict": SnapKV(budget=99)}, r"max_kl=0.002 and evict=SnapKV\(...\): .* write bits= beside evict="),
            ({"ratio": 0.3}, "max_kl= gives every channel its own number of bits"),
        ],
        ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
    )
    def test_beside_others(self, more, says):
        with pytest.raises(OptionError, match=says):
            CacheConfig(max_kl=0.002, **more)

    def test_a_file_that_does_not_say_what_bits_leave(self, known, tmp_path):
        model, basis = known
        file = tmp_path / "basis.safetensors"
        replace(basis, kl=None).save(file)
        with pytest.raises(CalibrationError, match=r"does not say what bits leave .* grace-opt calibrate basis MODEL"):
            CompressedCache(model, max_kl=0.002, basis=file)

    def test_a_configuration_alone(self, known):
        with pytest.raises(CalibrationError, match="a configuration has no weights"):
            CompressedCache(known[0].config, max_kl=0.002)

    def test_names_that_others_have(self):
        with pytest.raises(OptionError, match="For target_kl, write max_kl="):
            Bits(target_kl=0.002)
