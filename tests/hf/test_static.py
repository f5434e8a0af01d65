"""Static codings: the file, read by safetensors alone, says all that is needed to code as the library does."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from typer.testing import CliRunner

from grace_opt.cli.app import app
from grace_opt.errors import CalibrationError, OptionError
from grace_opt.hf import calibrate_basis, capture_attention, export_static
from grace_opt.hf.bits import calibrate as calibrate_room
from grace_opt.hf.bits.basis import identity_basis
from grace_opt.hf.bits.classes import SINKS
from grace_opt.hf.bits.codebooks import WIDTHS, codebooks, distortions
from grace_opt.hf.bits.export import _Spread, _starts
from grace_opt.hf.bits.static import FORMAT, StaticCoders
from grace_opt.hf.models import load_pocket
from grace_opt.hf.recording import record
from grace_opt.kernels.coding import fitted
from tests.hf.matrix import model_of

BITS = 2.25


def ids(length=150, seed=1):
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))


TEXTS = [ids(), ids(90, seed=2)]


@pytest.fixture(scope="module")
def calibrated():
    model = model_of("Llama")
    return model, calibrate_basis(model, None, TEXTS)


@pytest.fixture(scope="module")
def exported(calibrated, tmp_path_factory):
    model, basis = calibrated
    path = tmp_path_factory.mktemp("static") / "static.safetensors"
    return model, basis, path, export_static(model, path, BITS, texts=TEXTS, basis=basis)


def stored(model, text):
    """Keys and values of a text, by layer and kind, ``(H, n, d)`` in float64."""
    found = {}
    for layer, seen in capture_attention(model, text[None]).items():
        found[layer, "keys"], found[layer, "values"] = seen.keys[0].double().numpy(), seen.values[0].double().numpy()
    return found


def rotated(keys, start):
    """Llama's keys ``(H, n, 16)`` as they are if the text begins at another position: turned on by as much."""
    angles = start * 10000.0 ** (-np.arange(8) / 8)
    first, second = keys[..., :8], keys[..., 8:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


# Of 256 positions. The first text is also read at 1/6, 3/6 and 5/6 of those left, the other at 2/6, 4/6 and 6/6.
STARTS = [[0, 18, 53, 88], [0, 55, 111, 166]]


# ------------------------------------------- the oracle: numpy, and the page docs/howto/servers.md


def coded(file, layer, kind, head, x):
    """Codes of ``(n, d)`` and what they stand for, token by token and channel by channel; and how near edges are."""
    part = {name: file[f"layers.{layer}.{kind}.{name}"][head].astype(np.float64) for name in ("encode", "decode")}
    means, scales, widths = (file[f"layers.{layer}.{kind}.{name}"][head] for name in ("means", "scales", "widths"))
    coordinates = x @ part["encode"]
    codes, restored, margin = np.zeros(x.shape, int), np.empty_like(x), np.full(x.shape, np.inf)
    for channel, width in enumerate(widths):
        restored[:, channel] = means[channel]
        if not width:
            continue
        levels = file["codebook"][width, : 2**width].astype(np.float64)
        scaled = (coordinates[:, channel] - means[channel]) / scales[channel]
        distances = np.abs(scaled[:, None] - levels)
        codes[:, channel] = distances.argmin(1)
        nearest = np.sort(distances, 1)
        margin[:, channel] = nearest[:, 1] - nearest[:, 0]
        restored[:, channel] += scales[channel] * levels[codes[:, channel]]
    return codes, restored, restored @ part["decode"], margin


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_the_file_alone_says_how_to_code_and_restore(kind, exported):
    model, _, path, made = exported
    file, held_out = load_file(path), stored(model, ids(70, seed=3))
    coders = getattr(made, kind)
    assert list(coders) == [0, 1]
    for layer, coder in coders.items():
        x = held_out[layer, kind]
        codes = coder.codes(torch.from_numpy(x))
        restored = coder.restore(codes).numpy()
        for head in range(len(x)):
            expected, _, back, margin = coded(file, layer, kind, head, x[head])
            clear = margin > 1e-4  # float32 may choose either of two levels that are equally near
            assert clear.mean() > 0.99
            assert np.array_equal(codes[head].numpy()[clear], expected[clear])
            tokens = clear.all(1)
            np.testing.assert_allclose(restored[head][tokens], back[tokens], atol=1e-4 * np.abs(back).max())
            assert np.array_equal(file[f"layers.{layer}.{kind}.pruned"][head], coder.widths[head].numpy() == 0)
        assert (codes.int() < 2 ** coder.widths.int()[:, None]).all()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_numbers_without_a_code_are_refused(number, exported):
    coder = exported[-1].keys[0]
    keys = torch.zeros(len(coder.widths), 4, coder.widths.shape[1])
    assert coder.codes(keys).shape == keys.shape
    keys[1, 2] = coder.encode[1, :, 0].sign() * number  # whose products all have one sign
    with pytest.raises(OptionError, match="not finite, or too large"):
        coder.codes(keys)


def test_products_need_no_restored_keys(exported):
    """What a kernel does: the queries go into the coordinates, once, and meet the levels there."""
    model, _, path, made = exported
    file, seen = load_file(path), capture_attention(model, ids(70, seed=3)[None])[1]
    keys, query = seen.keys[0], seen.queries[0, 2, -1].double().numpy()  # of the second KV head, which two share
    _, coordinates, _, _ = coded(file, 1, "keys", 1, keys[1].double().numpy())
    moved = query @ file["layers.1.keys.decode"][1].astype(np.float64).T
    restored = made.keys[1].restore(made.keys[1].codes(keys))[1].double().numpy()
    np.testing.assert_allclose(coordinates @ moved, restored @ query, rtol=1e-4, atol=1e-3)


def test_what_it_says_of_itself(exported):
    model, _, path, made = exported
    with safe_open(path, "np") as file:
        metadata, names = file.metadata(), set(file.keys())
    assert (metadata["format"], metadata["version"]) == ("grace_opt.static", "1")
    about = json.loads(metadata["about"])
    of_texts = {"texts": 2, "tokens": 4 * (150 + 90 - 2 * SINKS), "context": 256}
    assert about == {"fingerprint": made.fingerprint, "sinks": 4, **of_texts}
    parts = ("encode", "decode", "means", "scales", "widths", "pruned")
    assert names == {f"layers.{n}.{kind}.{p}" for n in (0, 1) for kind in ("keys", "values") for p in parts} | {
        "codebook"
    }
    assert about["fingerprint"]["num_hidden_layers"] == model.config.num_hidden_layers


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_means_scales_and_widths_are_those_of_the_texts(kind, exported):
    """By numpy; and no head would lose less if one channel gave what another takes."""
    model, calibrated, _, made = exported
    shares, loss_of = calibrated.shares(BITS, BITS), np.array(distortions())
    parts = [stored(model, text) for text in TEXTS]
    for layer, coder in getattr(made, kind).items():
        basis = getattr(calibrated, kind)[layer]
        every = [
            rotated(each[layer, kind], start) if kind == "keys" else each[layer, kind]
            for each, starts in zip(parts, STARTS, strict=True)
            for start in starts
        ]
        for head in range(2):
            x = np.concatenate([each[head, SINKS:] for each in every])
            y = x @ coder.encode[head].double().numpy()
            np.testing.assert_allclose(coder.means[head], y.mean(0), atol=1e-5 * np.abs(y).max())
            widths = coder.widths[head].int().numpy()
            with_bits = widths > 0
            standard = torch.from_numpy((y - y.mean(0)) / y.std(0)).float().T
            fits = fitted(standard, coder.widths[head], codebooks(torch.device("cpu"))).double().numpy() * y.std(0)
            np.testing.assert_allclose(coder.scales[head][with_bits], fits[with_bits], rtol=2e-3)
            budget = float(shares[layer][kind == "values"][head]) * 16
            assert budget - 2 < widths.sum() <= budget + 1e-6
            order = [int((column == basis.encode[head].T).all(1).nonzero()[0, 0]) for column in coder.encode[head].T]
            weight = y.var(0) * basis.energy[head].numpy()[order]
            level = np.searchsorted(WIDTHS, widths)
            for more in np.flatnonzero(level < len(WIDTHS) - 1):
                for less in np.flatnonzero(level > 0):
                    changed = widths.sum() + WIDTHS[level[more] + 1] - widths[more]
                    changed += WIDTHS[level[less] - 1] - widths[less]
                    gain = weight[more] * (loss_of[level[more]] - loss_of[level[more] + 1])
                    lost = weight[less] * (loss_of[level[less] - 1] - loss_of[level[less]])
                    assert more == less or changed > budget or gain <= lost * (1 + 1e-6)
    assert BITS - 0.1 < made.bits <= BITS


def test_texts_are_read_all_over_the_context(calibrated):
    model, _ = calibrated
    assert _starts(model, [150, 90], 256) == STARTS
    assert _starts(model, [40] * 8, 120) == [[0, 10 * n] for n in range(1, 9)]
    assert _starts(model, [40], 100) == [[0, 10, 20, 30, 40, 50, 60]]
    assert _starts(model, [40, 30], 40) == [[0], [0, 3, 7, 10]]
    assert _starts(model_of("Bloom"), [40, 30], 80) == [[0], [0]]  # it has no positions


def test_keys_far_from_the_start_lose_less_if_texts_were_read_there(tmp_path, monkeypatch):
    """With a basis that has seen the first positions alone."""
    model, tokenizer = load_pocket()
    monkeypatch.setattr(calibrate_room, "places", lambda *_: None)
    texts = ["the quiet river runs past a late singer " * 30, "a red fox told the miller about rain " * 30]
    basis, far = calibrate_basis(model, tokenizer, texts), {}
    other = tokenizer("some other words are here to be read " * 20, return_tensors="pt").input_ids
    where = torch.arange(900, 900 + other.shape[1], device="cpu")
    record(model, other, None, lambda call: far.update({call.module.layer_idx: call.key[0, :, SINKS:]}), None, where)
    lost = []
    for context in (300, 1152):
        made = export_static(model, tmp_path / "x", texts=texts, tokenizer=tokenizer, basis=basis, context=context)
        assert made.context == context
        coders = [(made.keys[n], x) for n, x in far.items()]
        lost.append([((c.restore(c.codes(x)) - x) @ c.encode).square().mean() for c, x in coders])
    assert len(lost[0]) == 3
    assert all(read < 0.8 * unread for unread, read in zip(*lost, strict=True))


@pytest.mark.parametrize("size", [1.0, 1e6, 1e-6])
def test_scales_cut_less_short_what_lies_far_out(size):
    """They have little error to the fourth, unlike the spread, which suits most of the numbers."""
    basis, y = identity_basis(1, 2), torch.randn(1, 4000, 2, generator=torch.Generator().manual_seed(0)).double()
    y[:, ::50] *= 5
    y *= size
    spread = _Spread.empty(basis)
    spread.add(y)
    coder = spread.coder(basis, torch.tensor([3.0]))
    assert coder.widths.tolist() == [[3, 3]]
    others = replace(coder, scales=y.std(1).float())
    fit, plain = (((one.restore(one.codes(y)) - y).double() ** 4).sum() for one in (coder, others))
    assert fit < 0.5 * plain


def test_some_tokens_are_kept_for_the_scales_evenly_over_the_texts():
    basis, y = identity_basis(1, 2), torch.arange(60.0, dtype=torch.float64).view(1, 30, 2)
    spread = _Spread.empty(basis)
    for first, last in ((0, 7), (7, 8), (8, 9), (9, 30)):
        spread.add(y[:, first:last], 4)
    assert torch.equal(torch.cat(spread.some, 1), y[:, ::4].float())
    assert spread.tokens == 30


def test_where_the_tokens_kept_show_no_spread_it_is_the_scale():
    basis, y = identity_basis(1, 2), torch.randn(1, 40, 2, generator=torch.Generator().manual_seed(0)).double()
    y[:, ::2, 1] = 0
    y[:, 1::2, 1] = torch.tensor([1.0, -1.0] * 10)
    spread = _Spread.empty(basis)
    spread.add(y, 2)
    coder = spread.coder(basis, torch.tensor([3.0]))
    assert (coder.widths > 0).all()
    assert (coder.scales > 0).all()
    assert coder.scales.isfinite().all()


def test_all_bits_are_a_grid_up_to_the_largest(calibrated, tmp_path):
    model, basis = calibrated
    made = export_static(model, tmp_path / "8", 8, texts=TEXTS, basis=basis)
    assert made.bits == 8
    for layer, coder in made.keys.items():
        x = torch.from_numpy(stored(model, TEXTS[0])[layer, "keys"])[:, SINKS:]
        off = (x.float() @ coder.encode) - coder.restore(coder.codes(x)) @ coder.encode
        assert (off.abs() <= coder.scales[:, None] / 127 / 2 * 1.01).all()


def test_more_bits_lose_less(calibrated, tmp_path):
    model, basis = calibrated
    x, off = torch.from_numpy(stored(model, ids(70, seed=3))[0, "keys"]).float(), []
    for bits in (0.25, 1, 2, 4, 6):
        coder = export_static(model, tmp_path / "x", bits, texts=TEXTS, basis=basis).keys[0]
        off.append(float(((coder.restore(coder.codes(x)) - x) @ coder.encode).square().mean()))
    assert off == sorted(off, reverse=True)
    assert off[-1] < 0.02 * off[0]


def test_a_channel_that_never_varies_takes_nothing_and_is_its_mean():
    basis = identity_basis(1, 4)
    spread, y = _Spread.empty(basis), torch.randn(1, 50, 4, generator=torch.Generator().manual_seed(0)).double()
    y[..., 2] = 1 / 3
    spread.add(y)
    coder = spread.coder(basis, torch.tensor([8.0]))
    assert coder.widths.tolist() == [[8, 8, 8, 0]]
    restored = coder.restore(coder.codes(y))
    assert restored.isfinite().all()
    assert torch.allclose(restored[..., 2], torch.tensor(1 / 3))


def test_is_read_back_whole(exported):
    _, _, path, made = exported
    again = StaticCoders.load(path)
    numbers = again.fingerprint, again.sinks, again.texts, again.tokens, again.context
    assert numbers == (made.fingerprint, 4, 2, made.tokens, 256)
    for kind in ("keys", "values"):
        for layer, coder in getattr(again, kind).items():
            for name, part in coder.tensors().items():
                assert torch.equal(part, getattr(made, kind)[layer].tensors()[name])


def changed(name, change):
    return lambda tensors: {**tensors, name: change(tensors[name].clone())}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (changed("layers.0.keys.widths", lambda t: t.flip(-1)), "layer 0, keys: its widths .* not descending"),
        (changed("layers.0.keys.widths", lambda t: t.masked_fill(t == t.max(), 7)), "none that can be"),
        (changed("layers.1.values.pruned", lambda t: ~t), "not those of its mask"),
        (changed("layers.1.values.scales", lambda t: -t), "a scale is not positive"),
        (changed("layers.1.values.scales", lambda t: t * torch.nan), "scales has numbers that are not finite"),
        (changed("layers.1.keys.decode", lambda t: t[:, :5]), r"decode is torch.float32 \(2, 5, 16\)"),
        (changed("layers.1.keys.means", lambda t: t.double()), "means is torch.float64"),
        (changed("codebook", lambda t: t * 2), "its levels are not those"),
        (lambda tensors: {n: t for n, t in tensors.items() if "means" not in n}, "layer 0, keys: means missing"),
        (lambda tensors: {n: t for n, t in tensors.items() if "1.keys" not in n}, "keys or values of some layer"),
        (lambda tensors: {**tensors, "layers.x.keys.means": torch.ones(1)}, "belongs to no layer"),
    ],
)
def test_what_cannot_be_is_refused(spoil, says, exported, tmp_path):
    _, _, path, _ = exported
    about, tensors = FORMAT.read(path)
    FORMAT.write(tmp_path / "spoilt", spoil(tensors), about)
    with pytest.raises(CalibrationError, match=f"spoilt: .*{says}.* Make it anew: grace-opt export MODEL"):
        StaticCoders.load(tmp_path / "spoilt")
    FORMAT.write(tmp_path / "spoilt", tensors, {**about, "sinks": -1})
    with pytest.raises(CalibrationError, match="do not say which model"):
        StaticCoders.load(tmp_path / "spoilt")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"bits": 9}, "bits=9: give a number >= 0 and <= 8"),
        ({"bits": 0}, "bits=0: no channel gets any bits"),
        ({"key_bits": 0, "value_bits": 1e-3}, r"key_bits=0, value_bits=0\.001: no channel gets any bits"),
        ({"key_bits": 2}, "bits= alone, or key_bits= and value_bits= together"),
        ({"key_bits": 2, "value_bits": -1}, "value_bits=-1"),
        ({"texts": "one text"}, "texts must be a list"),
        ({"texts": [torch.arange(3, 6)]}, "the texts have 0 tokens, .* at least 64"),
        ({"texts": ["words"]}, "tokenizer is unknown"),
        ({"context": 0}, "context=0: give an integer >= 1"),
        ({"context": 257}, "context=257: the model has 256 positions"),
    ],
)
def test_bad_input_is_named(given, says, calibrated, tmp_path):
    model, basis = calibrated
    with pytest.raises((OptionError, CalibrationError), match=says):
        export_static(model, tmp_path / "x", **{"texts": TEXTS, "basis": basis, **given})
    assert not list(tmp_path.iterdir())


def test_a_tensor_of_other_heads_is_named(exported):
    coder = exported[3].keys[0]
    for call in (coder.codes, coder.restore):
        with pytest.raises(OptionError, match=r"shape \(3, 5, 16\): give \(..., 2, tokens, 16\)"):
            call(torch.zeros(3, 5, 16, dtype=torch.uint8))


def test_the_basis_of_another_model_is_refused(calibrated, tmp_path):
    _, basis = calibrated
    other = replace(basis, fingerprint={**basis.fingerprint, "weights": "of another"})
    with pytest.raises(CalibrationError, match="the weights differ"):
        export_static(calibrated[0], tmp_path / "x", texts=TEXTS, basis=other)


@pytest.mark.slow
def test_on_the_command_line(tmp_path):
    model, tokenizer = load_pocket()
    text = tmp_path / "text.txt"
    text.write_text("the quiet river runs past a late singer " * 20)
    calibrate_basis(model, tokenizer, [text.read_text()]).save(tmp_path / "basis")
    files = ["--basis", str(tmp_path / "basis"), "--text", str(text), "--context", "300"]
    done = CliRunner().invoke(app, ["export", "pocket", "-o", str(tmp_path / "out.safetensors"), "--bits", "3", *files])
    assert done.exit_code == 0, done.output
    assert "bits per element, 3 layers, from" in done.output
    assert "at positions up to 300" in done.output
    assert 2.9 < StaticCoders.load(tmp_path / "out.safetensors").bits <= 3
    done = CliRunner().invoke(app, ["export", "pocket", "-o", str(tmp_path / "no" / "out.safetensors")])
    assert done.exit_code == 2
    assert "there is no folder" in done.output
