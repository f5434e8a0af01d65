"""Calibrated bases: moments and rates against numpy in float64, files that cannot be trusted, and when one is made."""

from __future__ import annotations

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from grace_opt.cli.app import app
from grace_opt.errors import CacheError, CalibrationError, OptionError
from grace_opt.hf import CalibratedBasis, calibrate, capture_attention
from grace_opt.hf.bases import at_hand, basis_folder
from grace_opt.hf.bases.at_hand import basis_for
from grace_opt.hf.bases.basis import SHRINKAGE, Basis, joint_basis
from grace_opt.hf.bases.basis_file import FORMAT
from grace_opt.hf.bases.calibrate import places
from grace_opt.hf.bases.classes import WEIGHT_FLOOR, WINDOW, class_sizes
from grace_opt.hf.bases.codebooks import WIDTHS, distortions
from grace_opt.hf.bases.moments import ENERGY_STRIDE
from grace_opt.hf.bases.rates import hull, rates, rates_of_mean, steps
from grace_opt.hf.models import POCKET_FOLDER, load_pocket
from grace_opt.hf.models.projection import value_metric
from grace_opt.hf.models.recording import record
from grace_opt.hf.settings.bits import SINKS
from tests import oracle
from tests.hf.matrix import FAMILIES, model_of

INNER = slice(SINKS, -WINDOW)
#: Of the 150 tokens of `ids`, a quarter is fed later, with gradients.
PROMPT = 150 - 150 // 4


def ids(length=150, seed=1):
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def made():
    model = model_of("Llama")
    return model, calibrate.basis(model, None, [ids()])


def moment(rows):
    rows = np.asarray(rows, dtype=np.float64)
    return rows.T @ rows


def seen_by(model, length):
    """The attention calls of the first tokens of `ids`, at the positions of a calibration, by layer."""
    found = {}
    text, where = ids()[None], places(model, 150, 0.0)
    record(
        model, text[:, :length], None, lambda call: found.update({call.module.layer_idx: call}), None, where[:length]
    )
    return found


def without_turned_mean(model, seen, basis):
    """What a layer's keys are, but sinks and the recent window, without the mean that turns with the position."""
    keys, rotary = seen.key[0, :, INNER].double().numpy(), basis.keys[seen.module.layer_idx].rotary
    if rotary is not None:
        where = places(model, 150, 0.0)[: seen.key.shape[2]][INNER].numpy()
        keys = keys - oracle.rotary_mean(keys, rotary.frequencies.tolist(), rotary.channels.tolist(), where)
    return keys - keys.mean(1, keepdims=True)


def test_both_moments_are_diagonal_and_logits_unchanged(made):
    model, basis = made
    for layer, seen in seen_by(model, PROMPT).items():
        queries, keys = seen.query[0].double().numpy(), seen.key[0].double().numpy()
        for head in range(2):
            asked = queries[2 * head : 2 * head + 2].reshape(-1, 16)
            found = basis.keys[layer]
            encode, decode = found.encode[head].double().numpy(), found.decode[head].double().numpy()
            metric = moment(asked) / len(asked) * seen.scaling**2
            metric = (1 - SHRINKAGE) * metric + SHRINKAGE * np.diag(np.diag(metric))
            inner = without_turned_mean(model, seen, basis)[head]
            stored = moment(inner @ encode) / len(inner)
            cost = decode @ metric @ decode.T
            np.testing.assert_allclose(stored, np.eye(16), atol=1e-4)
            np.testing.assert_allclose(cost, np.diag(np.diag(cost)), atol=1e-4 * cost.max())
            np.testing.assert_allclose(basis.keys[layer].energy[head], np.diag(cost), rtol=1e-3)
            turned = (asked @ decode.T) @ (keys[head] @ encode).T
            np.testing.assert_allclose(turned, asked @ keys[head].T, atol=1e-3 * np.abs(asked @ keys[head].T).max())


def test_values_are_measured_by_the_output_projection(made):
    model, basis = made
    for layer, seen in seen_by(model, PROMPT).items():
        weight = model.model.layers[layer].self_attn.o_proj.weight.detach().double().numpy()
        probabilities = seen.query @ seen.key.repeat_interleave(2, 1).mT * seen.scaling
        hidden = ~torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril()
        outputs = probabilities.masked_fill(hidden, -torch.inf).softmax(-1) @ seen.value.repeat_interleave(2, 1)
        flat = outputs[0].transpose(0, 1).flatten(1).double().numpy()[SINKS::ENERGY_STRIDE]
        energy = np.square(flat @ weight.T).sum(1).mean()
        for head in range(2):
            blocks = [weight[:, 16 * each : 16 * each + 16] for each in (2 * head, 2 * head + 1)]
            metric = sum(block.T @ block for block in blocks) / energy
            metric = (1 - SHRINKAGE) * metric + SHRINKAGE * np.diag(np.diag(metric))
            decode = basis.values[layer].decode[head].double().numpy()
            cost = decode @ metric @ decode.T
            np.testing.assert_allclose(cost, np.diag(np.diag(cost)), atol=1e-4 * cost.max())
            np.testing.assert_allclose(basis.values[layer].energy[head], np.diag(cost), rtol=1e-3)
            values = seen.value[0, head, INNER].double().numpy()
            stored = moment((values - values.mean(0)) @ np.linalg.inv(decode)) / len(values)
            np.testing.assert_allclose(stored, np.eye(16), atol=1e-4)


@pytest.mark.parametrize("tokens", [5.0, 8.0, 20.0, 64.0, 1000.0])
def test_hulls_leave_no_better_width(tokens):
    """At every price, the width of least cost is the one that the slopes say."""
    costs, slopes = hull(tokens)
    whole = -(-tokens // 8) * 8
    every = np.array([width * whole + 16 * (width > 0) for width in WIDTHS])
    assert (np.diff(slopes) < 0).all()
    for price in np.geomspace(1e-8, 1, 200):
        best = every[np.argmin(np.array(distortions()) + price * every)]
        assert costs[(slopes > price).sum()] == best


def test_rates_are_what_every_channel_takes_by_itself():
    spread = torch.rand(3, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 4
    sizes = (8, 30, 90)
    prices = torch.logspace(-6, 1, 23, dtype=torch.float64)
    found = rates(*steps(spread, sizes), prices)
    bits, elements = np.array(WIDTHS), 128 * 5
    for number, price in enumerate(prices):
        for head in range(2):
            taken = 0.0
            for part, count in enumerate(sizes):
                costs = bits * -(-count // 8) * 8 + 16 * (bits > 0)
                losses = np.array(distortions()) * spread[part, head].numpy()[:, None]
                taken += costs[np.argmin(losses + float(price) * costs / elements, axis=1)].sum()
            assert found[head, number] == pytest.approx(taken / elements)


def received(queries, keys, scaling):
    """Weighted means of p and p² over the observed queries of a group, in numpy."""
    length = len(keys)
    share = np.zeros(length)
    for last in (32, 128):
        share[-last:] += 1 / min(last, length)
    share[::8] += 1 / len(share[::8])
    logits = queries @ keys.T * scaling
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    weight = share[:, None] / share.sum() / len(queries)
    return (p * weight).sum((0, 1)), (p**2 * weight).sum((0, 1))


def test_rates_follow_from_the_attention_of_the_text():
    model = model_of("Llama")
    basis = calibrate.basis(model, None, [ids()], end_to_end=False)
    bits = np.array(WIDTHS)
    for layer, seen in seen_by(model, 150).items():
        queries, keys, values = (each[0].double().numpy() for each in (seen.query, seen.key, seen.value))
        for head in range(2):
            first, second = received(queries[2 * head : 2 * head + 2], keys[head], seen.scaling)
            first, second = first[INNER], second[INNER]
            geometric = np.sqrt(second * second.mean())
            order, sizes = np.argsort(-first), class_sizes(114)
            assert len(sizes) == 3
            for stored, weight, kind, curves in (
                (keys, first + WEIGHT_FLOOR * first.mean(), basis.keys, basis.key_rates),
                (values, geometric + WEIGHT_FLOOR * geometric.mean(), basis.values, basis.value_rates),
            ):
                rest = stored[head, INNER] - stored[head, INNER].mean(0)
                if stored is keys:
                    rest = without_turned_mean(model, seen, basis)[head]
                rows = rest @ kind[layer].encode[head].double().numpy()
                squares = weight[:, None] * rows**2 * kind[layer].energy[head].numpy()
                for place in (100, 150, 200, 230):
                    price, taken = float(basis.multipliers[place]), 0.0
                    for part in np.split(order, np.cumsum(sizes)[:-1]):
                        costs = bits * -(-len(part) // 8) * 8 + 16 * (bits > 0)
                        losses = squares[part].sum(0)[:, None] * np.array(distortions())
                        taken += costs[np.argmin(losses + price * costs / (114 * 16), axis=1)].sum()
                    assert float(curves[layer][head, place]) == pytest.approx(taken / (114 * 16), abs=0.01)


def test_a_text_that_comes_twice_counts_as_once(made):
    model, basis = made
    twice = calibrate.basis(model, None, [ids(), ids()])
    torch.testing.assert_close(twice.multipliers, basis.multipliers, rtol=1e-5, atol=0)  # made from float32
    for layer in basis.layers:
        torch.testing.assert_close(twice.keys[layer].energy, basis.keys[layer].energy)
        torch.testing.assert_close(twice.value_rates[layer], basis.value_rates[layer], atol=0.01, rtol=0)


def test_shares_have_the_mean_asked_for_and_never_fall(made):
    _, basis = made
    before = None
    for bits in np.linspace(0, 9, 91):
        shares = basis.shares(bits, 9 - bits)
        keys, values = (torch.stack([pair[which] for pair in shares.values()]) for which in (0, 1))
        assert float(keys.mean()) == pytest.approx(bits, abs=1e-9)
        assert float(values.mean()) == pytest.approx(9 - bits, abs=1e-9)
        assert keys.dtype == torch.float64
        assert bits > 8 or (keys.min() >= 0 and keys.max() <= 8 + 1e-12)
        assert before is None or (keys >= before - 1e-12).all()
        before = keys
    assert len(set(torch.cat([pair[0] for pair in basis.shares(2, 2).values()]).tolist())) == 4
    for wrong in (-1, 17, float("nan"), True, "2", None):
        with pytest.raises(OptionError, match="value_bits"):
            basis.shares(2, wrong)


def test_heads_that_nothing_needs_get_nothing():
    assert rates_of_mean(torch.tensor([[4.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), 1.0).tolist() == [2.0, 0.0]
    model = copy.deepcopy(model_of("Llama"))
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, :32] = 0  # the query heads of KV head 0
        model.model.layers[1].self_attn.k_proj.weight[16:] = 0  # all keys of KV head 1 are equal
    basis = calibrate.basis(model, None, [ids()])
    shares = basis.shares(2, 2)
    assert shares[0][1][0] == 0 < shares[0][1][1]
    assert shares[1][0][1] == 0 < shares[1][0][0]


def test_texts_of_any_lengths_count_and_order_does_not():
    model = model_of("Llama")
    texts = [ids(250, 1), ids(256, 2), ids(90, 3), ids(20, 4)]
    # The first text decides which pairs of channels have a mean that turns.
    with mock.patch("grace_opt.hf.bases.calibrate.frequencies_of", return_value=[]):
        forwards, backwards = (calibrate.basis(model, None, each) for each in (texts, texts[::-1]))
    assert forwards.texts == 3
    assert forwards.tokens == 596
    for layer in forwards.layers:
        torch.testing.assert_close(forwards.keys[layer].energy, backwards.keys[layer].energy, rtol=1e-5, atol=0)
        torch.testing.assert_close(forwards.value_rates[layer], backwards.value_rates[layer], atol=0.05, rtol=0)
    # All channels of all classes in 8 bits, and their scales; of texts with more and with fewer classes, the mean.
    assert all(8 < float(each.max()) < 9 for each in forwards.key_rates.values())
    cut = calibrate.basis(model, None, texts, tokens=100)
    assert cut.tokens == 100 + 100 + 90
    assert len({len(class_sizes(each - SINKS - WINDOW)) for each in (188, 192, 68)}) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_calibrated_or_refused_by_name(family):
    model = model_of(family)
    before = model.config._attn_implementation
    try:
        capture_attention(model, ids(9)[None])
        refused = family == "Mistral, sliding window"
    except CacheError:  # DiffLlama too, in transformers 5.2
        refused = family in ("Falcon", "Bloom", "DiffLlama")
    if refused:
        with pytest.raises(CacheError, match="transformers"):
            calibrate.basis(model, None, [ids()])
    else:
        basis = calibrate.basis(model, None, [ids()])
        basis.check_model(model)
        for layer, seen in capture_attention(model, ids()[None], layers=basis.layers).items():
            assert basis.keys[layer].encode.shape == (seen.keys.shape[1], *seen.keys.shape[-1:] * 2)
            assert basis.values[layer].encode.shape == (seen.values.shape[1], *seen.values.shape[-1:] * 2)
    assert model.config._attn_implementation == before


def test_output_projections_of_other_kinds_have_the_same_metric():
    """Conv1D stores its weights transposed; a bias does not count; LoRA changes the weights."""
    from transformers.pytorch_utils import Conv1D

    class Attention(torch.nn.Module):
        def __init__(self, name, projection):
            super().__init__()
            setattr(self, name, projection)

    plain, transposed = torch.nn.Linear(24, 10), Conv1D(10, 24)
    with torch.no_grad():
        transposed.weight.copy_(plain.weight.T)
        transposed.bias.fill_(3.0)
    like = torch.zeros(1, 5, 4, 6)
    expected = value_metric(Attention("o_proj", plain), 2, like)
    torch.testing.assert_close(value_metric(Attention("c_proj", transposed), 2, like), expected, rtol=1e-4, atol=1e-6)

    class Lora(torch.nn.Module):
        def forward(self, rows):
            return plain(rows) + rows @ down.mT @ up.mT

    down, up = torch.randn(2, 24), torch.randn(10, 2)
    merged = torch.nn.Linear(24, 10)
    merged.weight.data = plain.weight.data + up @ down
    adapted = value_metric(Attention("o_proj", Lora()), 2, like)
    torch.testing.assert_close(adapted, value_metric(Attention("o_proj", merged), 2, like), rtol=1e-4, atol=1e-4)
    parts = plain.weight.detach().double().split(6, dim=1)[2:]
    torch.testing.assert_close(expected[1], sum(part.mT @ part for part in parts), rtol=1e-4, atol=1e-6)
    with pytest.raises(CalibrationError, match="no output projection"):
        value_metric(Attention("other", plain), 2, like)
    with pytest.raises(CalibrationError, match="does not take its attention's 20 features"):
        value_metric(Attention("dense", plain), 2, torch.zeros(1, 5, 4, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_large_activations(dtype):
    model = copy.deepcopy(model_of("Llama"))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(1000)
            layer.self_attn.q_proj.weight.div_(1000)
    assert max(seen.keys.abs().max() for seen in capture_attention(model, ids()[None]).values()) > 5e3
    basis = calibrate.basis(model.to(dtype), None, [ids()])
    assert all(each.encode.isfinite().all() and each.decode.isfinite().all() for each in basis.keys.values())


def test_numbers_that_are_not_finite_are_named():
    model = copy.deepcopy(model_of("Llama"))
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3, 3] = torch.nan
    with pytest.raises(CalibrationError, match="layer 1, text 1: the values are not finite"):
        calibrate.basis(model, None, [ids()])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_singular_moments_give_an_invertible_basis(rank):
    """Rounding makes the small eigenvalues of a singular matrix negative."""
    rows = torch.randn(40, rank, generator=torch.Generator().manual_seed(0)) @ torch.randn(rank, 12)
    rows[:, 3] = 0
    singular = (rows.mT @ rows)[None]
    for metric, stored in ((singular, torch.eye(12)[None]), (torch.eye(12)[None], singular), (singular, singular)):
        basis = joint_basis(metric, stored)
        assert (basis.energy > 0).all()
        product = basis.encode.double() @ basis.decode.double()
        torch.testing.assert_close(product, torch.eye(12, dtype=torch.float64)[None], atol=1e-3, rtol=0)


def test_the_model_is_left_as_it_was_and_gradients_still_work():
    model = copy.deepcopy(model_of("Llama")).train()
    model.model.layers[0].eval()
    with torch.inference_mode():
        basis = calibrate.basis(model, None, [ids()])
    assert model.training
    assert model.model.layers[1].self_attn.training
    assert not model.model.layers[0].self_attn.training
    assert not basis.keys[0].encode.is_inference()
    (torch.ones(3, 16, requires_grad=True) @ basis.keys[0].encode).sum().backward()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "need the model's tokenizer"),
        ((["text"],), "tokenizer comes before the texts"),
        ((None, []), "empty list"),
        ((None, "text"), "must be a list"),
        ((None, ids()), "must be a list"),
        ((None, ["text"]), r"write calibrate\.basis\(model, texts, tokenizer\)|need their tokenizer"),
        ((None, [3]), "text 1 is of type int"),
        ((None, [ids(99), ids(0)]), "text 2 has token numbers of shape"),
        ((5,), "an? int is not a tokenizer"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(OptionError, match=message):
        calibrate.basis(model_of("Llama"), *arguments)


def test_texts_that_are_too_short():
    for texts in ([ids(30)] * 9, [ids(60)] * 2, [ids(99)]):
        with pytest.raises(CalibrationError, match="at least 64 are needed"):
            calibrate.basis(model_of("Llama"), None, texts)
    with pytest.raises(OptionError, match="tokens"):
        calibrate.basis(model_of("Llama"), None, [ids()], tokens=0)


def test_texts_with_few_tokens_for_their_channels_are_told_of():
    few, many = (torch.arange(3, 90).repeat(9)[: SINKS + WINDOW + count] for count in (255, 256))
    with pytest.warns(UserWarning, match="made from 255 tokens, and with fewer than 256 it is mostly chance") as said:
        calibrate.basis(load_pocket()[0], None, [few], end_to_end=False)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        calibrate.basis(load_pocket()[0], None, [many, ids(30)], end_to_end=False)


def test_a_file_gives_back_everything(made, tmp_path):
    model, basis = made
    basis.save(tmp_path / "b.safetensors")
    found = CalibratedBasis.load(tmp_path / "b.safetensors")
    assert (found.layers, found.texts, found.tokens, found.fingerprint) == ((0, 1), 1, 150, basis.fingerprint)
    assert torch.equal(found.multipliers, basis.multipliers)
    for layer in found.layers:
        for mine, other in ((found.keys, basis.keys), (found.values, basis.values)):
            for part in ("encode", "decode", "energy"):
                assert torch.equal(getattr(mine[layer], part), getattr(other[layer], part))
        assert torch.equal(found.key_rates[layer], basis.key_rates[layer])
        assert torch.equal(found.value_rates[layer], basis.value_rates[layer])
    found.check_model(model)
    with pytest.raises(CalibrationError, match="no folder"):
        basis.save(tmp_path / "missing" / "b.safetensors")
    with pytest.raises(CalibrationError, match="no calibrated basis at"):
        CalibratedBasis.load(tmp_path / "other")


def test_truncated_and_changed_files_are_named(made, tmp_path):
    path = tmp_path / "b.safetensors"
    made[1].save(path)
    whole = path.read_bytes()
    for damaged in (b"", whole[:7], whole[:-5], whole[:3000], b"x" * 500):
        path.write_bytes(damaged)
        with pytest.raises(CalibrationError, match="cannot be read as a calibrated basis"):
            CalibratedBasis.load(path)
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(CalibrationError, match="digest differs"):
        CalibratedBasis.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, a: t.pop("0.keys.energy"), "layer 0 has no energy of keys"),
        (lambda t, a: t.pop("multipliers"), "prices are missing"),
        (lambda t, a: t["multipliers"].neg_(), "not positive and ascending"),
        (lambda t, a: t.update(extra=torch.zeros(1)), "belong to no layer"),
        (lambda t, a: t.update({"0.keys.extra": torch.zeros(1)}), "belong to no layer"),
        (lambda t, a: t["1.values.encode"].mul_(2), "layer 1, values: decode is not the inverse"),
        (lambda t, a: t["1.values.encode"].fill_(torch.nan), "not all numbers are finite"),
        (lambda t, a: t["0.keys.energy"][0].zero_(), "an energy is not positive"),
        (lambda t, a: t.update({"0.keys.energy": t["0.keys.energy"].float()}), "expected torch.float64"),
        (lambda t, a: t.update({"0.keys.rates": t["0.keys.rates"][:1]}), "do not fit each other"),
        (lambda t, a: t.update({"0.keys.rates": t["0.keys.rates"].flip(-1)}), "rates do not fall"),
        (lambda t, a: [t.update({n: t[n][:1]}) for n in list(t) if n.startswith("0.keys")], "rotary mean: .* 1 heads"),
        (lambda t, a: [t.update({n: t[n][:1]}) for n in list(t) if n.startswith("0.values")], "2 heads .*, but 1"),
        (lambda t, a: t.pop("0.keys.rotary.mean"), "layer 0 has no mean of the rotary mean of keys"),
        (lambda t, a: t["0.keys.rotary.channels"].fill_(3), "channels are not different ones from 0 to 15"),
        (lambda t, a: t["0.keys.rotary.mean"].fill_(torch.inf), "rotary mean, mean: not all numbers are finite"),
        (lambda t, a: [t.update({n.replace("1.", "7.", 1): t.pop(n)}) for n in list(t) if n[0] == "1"], "model has 2"),
        (lambda t, a: a.update(fingerprint=[1]), "do not say which model"),
        (lambda t, a: a.update(texts=-1), "number of texts is -1"),
        (lambda t, a: a.pop("tokens"), "number of tokens is None"),
    ],
)
def test_every_field_is_checked(made, tmp_path, change, message):
    path = tmp_path / "b.safetensors"
    made[1].save(path)
    about, tensors = FORMAT.read(path)
    change(tensors, about)
    FORMAT.write(path, tensors, about)
    with pytest.raises(CalibrationError, match=message) as caught:
        CalibratedBasis.load(path)
    assert str(path) in str(caught.value)


def test_another_models_basis_is_refused_by_name(made, monkeypatch):
    model, basis = made
    basis.check_model(model.config)
    with pytest.raises(CalibrationError, match="num_key_value_heads: basis 2, model 1"):
        basis.check_model(model_of("Llama, one KV head (MQA)"))
    with pytest.raises(CalibrationError, match="model_type: basis llama, model qwen3"):
        basis.check_model(model_of("Qwen3").config)
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.lm_head.weight.mul_(1.5)
    with pytest.raises(CalibrationError, match="the weights differ"):
        basis.check_model(tuned)
    basis.check_model(copy.deepcopy(model).to(torch.bfloat16))
    monkeypatch.setattr(type(tuned), "tp_size", 2, raising=False)  # whose weights have no digest
    basis.check_model(tuned)
    with pytest.raises(CalibrationError, match="rank 0 of 1 of the model"):
        calibrate.basis(tuned, None, [ids()])
    with pytest.raises(CalibrationError, match="rank 0 of 1 of the model"):
        basis_for(tuned, "calibrated")


def test_parts_that_do_not_belong_together_are_refused(made):
    basis = made[1]
    eye = torch.eye(16).expand(2, 16, 16)
    with pytest.raises(CalibrationError, match="not the inverse"):
        replace(basis, keys=basis.keys | {0: Basis(eye * 2, eye, torch.ones(2, 16, dtype=torch.float64))})
    with pytest.raises(CalibrationError, match="same layers"):
        replace(basis, values={})


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """A cache folder of this test's own; counts what is calibrated, on one text."""
    folder, calls = tmp_path / "assets", []
    folder.mkdir()
    monkeypatch.setattr(basis_folder, "cached_assets_path", lambda *names: folder)
    monkeypatch.setattr(at_hand, "OWN_BASIS", "missing.safetensors")
    monkeypatch.setattr(at_hand, "shipped_texts", lambda: ["the quiet river runs past a late singer " * 20])
    original = at_hand.calibrate.basis

    def counted(*arguments, **options):
        calls.append(threading.get_ident())
        return original(*arguments, **options)

    monkeypatch.setattr(at_hand.calibrate, "basis", counted)
    return folder, calls


@pytest.mark.slow
def test_first_use_calibrates_once_whatever_the_threads(cache_folder, capsys):
    folder, calls = cache_folder
    model = load_pocket()[0]
    capsys.readouterr()
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: basis_for(model), range(16)))
    assert len(calls) == 1
    assert all(each is found[0] for each in found)
    (file,) = folder.iterdir()
    before, after = capsys.readouterr().err.splitlines()
    assert "calibrating" in before
    assert "once per model" in before
    assert str(file) in after
    again = basis_for(load_pocket()[0])  # another process would find the file
    assert len(calls) == 1
    assert torch.equal(again.keys[0].encode, found[0].keys[0].encode)
    file.write_bytes(file.read_bytes()[:-100])
    assert basis_for(load_pocket()[0]).layers == (0, 1, 2)
    assert len(calls) == 2
    assert CalibratedBasis.load(file).tokens == found[0].tokens


def test_a_file_from_before_rotary_embeddings_were_noted_is_read_once(cache_folder, monkeypatch):
    folder, calls = cache_folder
    made = basis_for(load_pocket()[0])
    (file,) = folder.iterdir()
    older = {name: value for name, value in made.fingerprint.items() if name != "rope"}
    replace(made, fingerprint=older).save(file)
    model, read, load = load_pocket()[0], [], CalibratedBasis.load
    monkeypatch.setattr(CalibratedBasis, "load", lambda path: read.append(path) or load(path))
    assert basis_for(model) is basis_for(model)
    assert (len(calls), len(read)) == (1, 1)
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    made.save(file)
    basis_for(load_pocket()[0])
    assert len(calls) == 1
    at_hand._MADE.pop(model)
    basis_for(model).check_model(model)  # a file of another embedding is not for this one
    assert len(calls) == 2


def test_weights_that_have_changed_are_calibrated_anew(cache_folder, capsys):
    folder, calls = cache_folder
    model = load_pocket()[0]
    basis_for(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)
    assert "once per model" in capsys.readouterr().err
    basis_for(model).check_model(model)
    assert "as its weights have changed" in capsys.readouterr().err
    assert len(calls) == 2
    assert len(list(folder.iterdir())) == 2


def test_without_a_folder_it_is_kept_in_memory_with_one_warning(cache_folder, monkeypatch):
    _, calls = cache_folder

    def refuse(*names):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(basis_folder, "cached_assets_path", refuse)
    monkeypatch.setattr(at_hand, "_WARNED", threading.Event())
    model, other = load_pocket()[0], load_pocket()[0]
    with pytest.warns(UserWarning, match="each process makes its own: Permission denied"):
        assert basis_for(model) is basis_for(model)
    assert len(calls) == 1
    basis_for(other)  # pytest turns a second warning into an error
    assert len(calls) == 2


def test_what_is_missing_is_named(made, tmp_path):
    model, basis = made
    assert basis_for(model, basis) is basis
    with pytest.raises(CalibrationError, match=r"configuration has no weights.*grace-opt calibrate basis"):
        basis_for(model.config)
    with pytest.raises(CalibrationError, match=r"tokenizer is unknown.*basis=FILE"):
        basis_for(copy.deepcopy(model))
    lost = copy.deepcopy(model)
    lost.config._name_or_path = str(tmp_path / "nobody")
    with pytest.raises(CalibrationError, match=r'not on this machine.*basis="none"'):
        basis_for(lost)
    with pytest.raises(OptionError, match="basis=3"):
        basis_for(model, 3)
    basis.save(tmp_path / "b.safetensors")
    assert basis_for(model.config, tmp_path / "b.safetensors").layers == (0, 1)
    with pytest.raises(CalibrationError, match="made for another model"):
        basis_for(model_of("Qwen3"), str(tmp_path / "b.safetensors"))


def test_a_file_is_read_again_once_it_has_changed(made, tmp_path):
    model, basis = made
    path = tmp_path / "b.safetensors"
    basis.save(path)
    first = basis_for(model, path)
    assert basis_for(model, str(path)) is first
    replace(basis, tokens=basis.tokens + 1).save(path)
    assert basis_for(model, path).tokens == first.tokens + 1
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CalibrationError, match=r"b\.safetensors"):
        basis_for(model, path)
    path.unlink()
    with pytest.raises(CalibrationError, match=r"b\.safetensors"):
        basis_for(model, path)


@pytest.mark.slow
def test_the_command_line_writes_a_file(tmp_path):
    (tmp_path / "t.txt").write_text("the quiet river runs past a late singer " * 20, encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    run = lambda *given: CliRunner().invoke(app, ["calibrate", "basis", *map(str, given)])  # noqa: E731
    out = tmp_path / "b.safetensors"
    shown = run("pocket", "--text", tmp_path / "t.txt", "-o", out)
    assert shown.exit_code == 0, shown.output
    assert "3 layers, 2 KV heads; 1 text, 160 tokens" in shown.output
    basis = CalibratedBasis.load(out)
    basis.check_model(load_pocket()[0])
    first = basis.shares(2.25, 2.25)[0][0]
    assert f"{first[0]:.2f}  {first[1]:.2f}" in shown.output
    for wrong in (
        (str(POCKET_FOLDER), "-o", tmp_path / "missing" / "b.safetensors"),
        ("pocket", "--text", tmp_path / "none.txt", "-o", out),
        ("pocket", "--text", tmp_path / "latin.txt", "-o", out),
        ("pocket", "--text", "", "-o", out),
        (tmp_path / "no model", "-o", out),
    ):
        failed = run(*wrong)
        assert failed.exit_code == 2, failed.output


@pytest.mark.parametrize("files", [("one.gguf",), ("one.gguf", "two.gguf"), ("one.gguf", "config.json"), ()])
def test_the_tokenizer_in_a_gguf_file_is_found(files, tmp_path, monkeypatch):
    """transformers reads it only if the file is named, and a model does not say which one it came from."""

    def read(name, *, local_files_only, gguf_file=None):
        assert local_files_only
        if gguf_file is None:
            raise ValueError("no tokenizer:\nneither this\nnor that")
        return name, gguf_file

    for file in files:
        (tmp_path / file).touch()
    monkeypatch.setattr(at_hand.AutoTokenizer, "from_pretrained", read)
    model = model_of("Llama")
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path))
    if len(files) == 1:
        assert at_hand.tokenizer_of(model) == (str(tmp_path), "one.gguf")
    else:
        with pytest.raises(CalibrationError, match="ValueError: no tokenizer: neither this nor that"):
            at_hand.tokenizer_of(model)
