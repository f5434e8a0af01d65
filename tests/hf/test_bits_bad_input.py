"""Bad input with ``bits=``: a named error, or defined behaviour; never NaN in what is decoded."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import warnings

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from grace_opt.errors import CacheError, CalibrationError, OptionError
from grace_opt.hf import (
    CacheConfig,
    CompressedCache,
    Quantize,
    StreamingLLM,
    attach,
    attention_implementation,
    calibrate,
    capture_attention,
)
from grace_opt.hf.bases.calibrated import CalibratedBasis
from grace_opt.hf.models.observation import Observation
from grace_opt.hf.stores.tail import Tail
from tests.hf.conftest import build

NOT_NUMBERS = (0, -1, 16.5, math.nan, math.inf, True, "2", np.array([2.0, 3.0]), [2, 3], {}, 10**400)


@pytest.fixture(scope="module")
def basis_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("bases") / "llama.safetensors"
    calibrate.basis(build("Llama"), None, [torch.arange(3, 90).repeat(3)]).save(file)
    return file


@pytest.fixture
def made(basis_file):
    """`made("calibrated", bits=3)`: a cache for the tiny Llama."""

    def make(basis="none", **settings):
        basis = basis_file if basis == "calibrated" else basis
        return CompressedCache(build("Llama").config, **{"basis": basis, "recent_window": 8, **settings})

    return make


class TestSettings:
    @pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda value: str(value)[:12])
    @pytest.mark.parametrize("name", ["bits", "key_bits", "value_bits"])
    def test_that_are_no_number_of_bits(self, name, value):
        other = {"key_bits": {"value_bits": 2}, "value_bits": {"key_bits": 2}}.get(name, {})
        with pytest.raises(OptionError, match=rf"^{name}=.*: give a number > 0 and <= 16"):
            CacheConfig(**{name: value}, **other)

    @pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, True, "1 MB", np.array([2, 3])], ids=str)
    def test_that_are_no_number_of_bytes(self, value):
        with pytest.raises(OptionError, match=r"^total_bytes=.*: give an integer >= 1"):
            CacheConfig(total_bytes=value)

    @pytest.mark.parametrize("value", [np.float32(2.25), np.array(2.25), torch.tensor(2.25), 2.25])
    def test_numbers_of_other_libraries_become_plain(self, value):
        config = CacheConfig(bits=value)
        assert type(config.bits.bits) is float
        assert json.loads(json.dumps(config.to_dict()))["bits"] == 2.25
        assert type(CacheConfig(total_bytes=np.int64(5000)).bits.total_bytes) is int

    @pytest.mark.parametrize(
        ("bits", "says"), [(0.0625, "alone take 0.0625 bits"), (1e-9, r"bits=1e-09: the classes of the tokens alone")]
    )
    def test_that_are_fewer_than_anything_takes(self, bits, says, made):
        with pytest.raises(OptionError, match=says):
            made(bits=bits)
        with pytest.raises(OptionError, match=r"^value_bits="):
            made(key_bits=2, value_bits=bits)

    @pytest.mark.parametrize(
        "given",
        [
            {"key_bits": 2},
            {"value_bits": 2},
            {"bits": 2, "total_bytes": 10**6},
            {"bits": 2, "key_bits": 2, "value_bits": 2},
            {"key_bits": 2, "total_bytes": 10**6},
        ],
        ids=" ".join,
    )
    def test_that_say_it_twice_or_half(self, given):
        says = f"{' and '.join(given)} given: write bits= alone, key_bits= and value_bits= together, total_bytes="
        with pytest.raises(OptionError, match=says):
            CacheConfig(**given)

    @pytest.mark.parametrize(
        "other",
        [
            {"ratio": 0.6},
            {"ratio": [0.5, 0.5]},
            {"ratio": np.array([0.5, 0.5])},
            {"kept_channels": 8},
            {"quantize": Quantize(keys=4)},
            {"protect": (0.1, 0.2)},
            {"method": "think"},
            {"weight": "signed"},
            {"fused": False},
        ],
        ids=lambda other: next(iter(other)),
    )
    @pytest.mark.parametrize("given", [{"bits": 2}, {"key_bits": 2, "value_bits": 3}, {"total_bytes": 10**6}])
    def test_that_decide_something_else(self, given, other):
        says = f"^{next(iter(given))}= gives .* does not go together with {next(iter(other))}; leave it out, or leave"
        with pytest.raises(OptionError, match=says):
            CacheConfig(**given, **other)

    @pytest.mark.parametrize("name", ["path", "tokenizer"])
    def test_options_of_methods_and_of_nobody(self, name):
        with pytest.raises(OptionError, match=f"^a cache with bits= has no setting {name}"):
            CacheConfig(bits=2, options={name: True})

    @pytest.mark.parametrize("given", ["provider", "masks"])
    def test_beside_what_chooses_channels(self, given, made):
        with pytest.raises(OptionError, match=f"{given}= chooses which channels go, and bits= gives all of them"):
            made(bits=2, **{given: lambda *_: None})

    @pytest.mark.parametrize(
        ("given", "meant"),
        [
            ({"bit": 2}, "For bit, write bits="),
            ({"bits_": 2}, "For bits_, write bits="),
            ({"bits": 2, "recent_windw": 8}, r"has no setting recent_windw\..* write recent_window="),
            ({"nbits": 2}, r"For nbits, write bits=, the mean over all channels, or quantize=Quantize\(4\)"),
            ({"kv_bits": 2}, "For kv_bits, write bits="),
            ({"keybits": 2, "value_bits": 2}, "value_bits given: .*For keybits, write key_bits="),
            ({"nbytes": 2}, "For nbytes, write max_bytes="),
            ({"totalbytes": 2}, "For totalbytes, write total_bytes="),
        ],
    )
    def test_with_other_names_say_what_was_meant(self, given, meant):
        with pytest.raises(OptionError, match=meant):
            CompressedCache(build("Llama"), **given)

    def test_with_blocks_too_small_for_means_of_their_own_are_refused(self):
        with pytest.raises(OptionError, match=r"tail_block=15: .*would outweigh its codes; write 16 or more"):
            CacheConfig(bits=2, tail_block=15)
        assert CacheConfig(bits=2, tail_block=16).tail_block == 16
        with pytest.raises(OptionError, match="tail_block"):
            CacheConfig(bits=2, tail_block="64")

    def test_that_survive_json_and_those_of_files_without_them(self):
        for config in (
            CacheConfig(bits=2.25),
            CacheConfig(key_bits=4, value_bits=2, basis="none", sink_tokens=0, tail_block=16),
            CacheConfig(total_bytes=10**6, basis="b.safetensors", evict=StreamingLLM(budget=99)),
        ):
            assert CacheConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
        old = CacheConfig(ratio=0.6).to_dict()
        for name in ("bits", "key_bits", "value_bits", "total_bytes", "basis", "sink_tokens"):
            del old[name]
        assert CacheConfig.from_dict(old) == CacheConfig(ratio=0.6)
        assert CacheConfig.from_dict(old).sink_tokens == 0
        assert CacheConfig.from_dict({"bits": 2}) == CacheConfig(bits=2)
        assert (CacheConfig(bits=2).sink_tokens, CacheConfig(bits=2).tail_block) == (4, 64)

    @pytest.mark.parametrize("name", ["method", "ratio", "weight", "fused", "seed", "observation_window"])
    @pytest.mark.parametrize("make", ["CacheConfig", "CompressedCache", "attach"])
    def test_beside_what_they_would_ignore_are_refused_even_at_its_default(self, make, name):
        given = {"bits": 2, "basis": "none", name: CacheConfig().to_dict()[name]}
        model = build("Llama")
        makers = {
            "CacheConfig": CacheConfig,
            "CompressedCache": functools.partial(CompressedCache, model),
            "attach": functools.partial(attach, model),
        }
        with pytest.raises(OptionError, match=f"^bits= gives .* does not go together with {name}; leave it out"):
            makers[make](**given)

    def test_beside_none_which_is_no_argument(self):
        assert CacheConfig(bits=2, quantize=None, kept_channels=None) == CacheConfig(bits=2)

    def test_of_a_copied_configuration_do_not_mind_its_defaults(self):
        """replace() and from_dict() pass every field: none of them was given by anybody."""
        assert dataclasses.replace(CacheConfig(sink_tokens=4, tail_block=64), bits=2) == CacheConfig(bits=2)
        values = {**CacheConfig().to_dict(), "bits": 2.0, "tail_block": 64, "sink_tokens": 4}
        assert CacheConfig.from_dict(values) == CacheConfig(bits=2)
        del values["fused"]  # as in a file from before that field
        assert CacheConfig.from_dict(values) == CacheConfig(bits=2)


class TestBasis:
    @pytest.mark.parametrize("wrong", [3, None, "", ["none"]], ids=str)
    def test_that_is_no_name(self, wrong):
        with pytest.raises(OptionError, match=r'^basis=.*: write "calibrated", "none", or the path'):
            CacheConfig(bits=2, basis=wrong)

    def test_in_memory_is_saved_first_and_not_printed(self, basis_file):
        with pytest.raises(OptionError, match=r"write made\.save\(FILE\)") as raised:
            CacheConfig(bits=2, basis=CalibratedBasis.load(basis_file))
        assert len(str(raised.value)) < 400

    def test_without_bits(self):
        with pytest.raises(OptionError, match=r"trellis=False is for bits=: write bits=2.25 as well, or leave"):
            CacheConfig(trellis=False, ratio=0.3)
        assert CacheConfig(trellis=False) == CacheConfig(bits=2.25, trellis=False)  # the default has bits
        with pytest.raises(OptionError, match="trellis=True is for bits="):
            CacheConfig(trellis=True, read="pages")
        assert CacheConfig(read="pages").to_dict()["trellis"] is None
        with pytest.raises(OptionError, match="trellis='yes': give True or False"):
            CacheConfig(bits=2, trellis="yes")
        for budget in ({"bits": 2}, {"key_bits": 2, "value_bits": 3}, {"total_bytes": 10**6}):
            for read in ("pages", "channels", "sampling"):
                with pytest.raises(OptionError, match=r"read= goes without bits=: .*; leave out read=, or write quant"):
                    CacheConfig(**budget, read=read)
        with pytest.raises(OptionError, match=r"basis='none' is for bits=: write bits=2.25 as well, or leave"):
            CacheConfig(basis="none", ratio=0.3)
        assert CacheConfig(basis="none") == CacheConfig(bits=2.25, basis="none")

    def test_that_is_mistyped_or_missing(self, made):
        with pytest.raises(
            CalibrationError, match=r"basis='calibratd': there is no such file\. Write .*Did you mean 'calibrated'"
        ):
            made("calibratd", bits=2)

    def test_of_another_model_or_other_heads(self, basis_file):
        for changes, says in (({"num_key_value_heads": 4}, "num_key_value_heads: basis 2, model 4"), ({}, "")):
            model = build("Llama", **changes) if changes else build("Qwen3")
            with pytest.raises(CalibrationError, match=f"made for another model .*{says}"):
                CompressedCache(model, bits=2, basis=basis_file)

    def test_that_is_cut_off(self, basis_file, made, tmp_path):
        (tmp_path / "cut").write_bytes(basis_file.read_bytes()[:-100])
        with pytest.raises(CalibrationError, match="cannot be read as a calibrated basis"):
            made(tmp_path / "cut", bits=2)

    def test_of_a_model_whose_tokenizer_nobody_knows(self):
        with pytest.raises(
            CalibrationError, match=r"calibrate\.basis\(model, tokenizer\)\.save\(FILE\) and basis=FILE"
        ):
            CompressedCache(build("Llama"), bits=2)
        with pytest.raises(CalibrationError, match="a configuration has no weights"):
            CompressedCache(build("Llama").config, bits=2)

    def test_from_a_text_that_is_too_short(self):
        with pytest.raises(CalibrationError, match="token"):
            calibrate.basis(build("Llama"), None, [torch.arange(3, 5)])


class TestPrompt:
    def test_too_short_for_classes_stays_dense_and_says_so_once(self, made, prompt, generate):
        model = build("Llama")
        model.set_attn_implementation("grace_sdpa")
        cache = made(bits=2)
        with pytest.warns(
            UserWarning, match="the prompt has 40 tokens and stays dense: bits are given from 76 tokens on"
        ) as found:
            tokens = generate(model, cache, prompt)
        assert len(found) == 1
        assert torch.equal(tokens, generate(model, DynamicCache(config=model.config), prompt))
        report = cache.memory_report()
        assert report.bits is None
        assert (
            str(report)
            .splitlines()[0]
            .startswith("55 tokens, all dense, as the prompt is too short for its bits, in 2 of 2 layers")
        )
        assert "nothing coded" in str(made(bits=2).memory_report())

    def test_of_one_token(self, made):
        model = build("Llama")
        model.set_attn_implementation("grace_sdpa")
        cache = made(bits=2)
        with pytest.warns(UserWarning, match="the prompt has 1 token and"), torch.no_grad():
            assert model(torch.tensor([[5]]), past_key_values=cache).logits.isfinite().all()

    def test_one_token_of_a_longer_prompt_is_not_said_to_be_short(self):
        model = build("Llama")
        with attach(model, bits=3, basis="none") as attached, warnings.catch_warnings():
            warnings.simplefilter("error")
            model.generate(torch.arange(3, 173)[None] % 97, max_new_tokens=1, prefill_chunk_size=1, do_sample=False)
        assert attached.cache.memory_report().pruned_tokens > 100

    @pytest.mark.slow
    @pytest.mark.parametrize("basis", ["none", "calibrated"])
    @pytest.mark.parametrize("padding", [120, 119, 117])
    def test_with_a_row_of_nearly_nothing_but_padding(self, padding, basis, made, step, close):
        model = build("Llama")
        model.set_attn_implementation("grace_sdpa")
        ids = torch.randint(3, 97, (2, 120), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, :padding] = 0
        more = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(2))  # one block is moved
        caches = [made(basis, bits=6, tail_block=16) for _ in range(2)]
        found, alone = step(model, caches[0], ids, more, mask), step(model, caches[1], ids[:1], more[:1])
        assert caches[0].layers[0].compressed.rows[0].waits == 16
        assert found.isfinite().all()
        assert close(found[:1], alone)

    def test_of_more_bytes_than_it_could_use(self, made):
        model = build("Llama")
        model.set_attn_implementation("grace_sdpa")
        ids = torch.randint(3, 97, (1, 200), generator=torch.Generator().manual_seed(1))
        for basis in ("none", "calibrated"):
            cache = made(basis, total_bytes=10**9)
            with torch.no_grad():
                model(ids, past_key_values=cache)
            assert 8 < cache.memory_report().bits < 10


def coded(cache, keys, values, queries=None):
    """The layer of a cache that has these keys and values, coded by these queries."""
    keys, values = cache.update(keys, values, 0)
    if queries is None:
        queries = torch.randn(1, 4, *keys.shape[2:], generator=torch.Generator().manual_seed(9)).to(keys.dtype)
    layer = cache.layers[0]
    layer.attended()
    layer.observe(Observation(queries, None, keys.shape[2], 0.25, None), keys, values)
    return layer


def drawn(seed=0, width=16, tokens=200):
    return torch.randn(1, 2, tokens, width, generator=torch.Generator().manual_seed(seed))


def zeroed(channels):
    found = drawn()
    found[..., channels] = 0
    return found


def with_one(number):
    found = drawn()
    found[0, 0, 50, 3] = number
    return found


#: What keys and values are, and how large their errors may be, as a share of their standard deviation.
DEGENERATE = {
    "zeros": torch.zeros(1, 2, 200, 16),
    "all equal": torch.full((1, 2, 200, 16), 3.0),
    "zero channels": zeroed([5, 7]),
    "only one channel": zeroed(list(range(1, 16))),
    "twice the same channel": drawn()[..., [0, 1, 2, 3] * 4],
    "of rank one": drawn()[:, :, :1] * drawn(1)[..., :1],
    "a head of zeros": drawn() * torch.tensor([0.0, 1.0])[:, None, None],
    "one loud token": with_one(1e4),
    "loud channels": drawn() * torch.logspace(-4, 4, 16),
    "tiny": drawn() * 1e-20,
    "huge": drawn() * 1e17,
}


@pytest.mark.parametrize("basis", ["none", "calibrated"])
class TestNumbers:
    @staticmethod
    def check(layer, keys, values, share):
        """All decoded numbers are finite and near the given ones, also those of a block that is appended."""
        old, block = layer.compressed.length, slice(40, 104)
        newer = Tail(keys[:, :, block], values[:, :, block])
        layer.compressed = layer.compressed.extended(layer.plan, newer)
        for decoded, given in zip(layer.full_width(), (keys, values), strict=True):
            decoded, given = decoded.double(), given.double()
            assert decoded.isfinite().all()
            assert decoded.shape[2] == given.shape[2] + 64
            off = [decoded[:, :, :old] - given[:, :, :old], decoded[:, :, old : old + 64] - given[:, :, block]]
            most = given.abs().amax()
            shares = [float(each.square().mean().sqrt() / most.clamp(min=1e-30)) for each in off]
            assert shares[0] <= share
            assert shares[1] <= 2 * share  # the scales were chosen without these tokens

    @pytest.mark.parametrize("name", DEGENERATE)
    def test_that_are_degenerate(self, name, basis, made):
        keys = values = DEGENERATE[name]
        self.check(coded(made(bits=8), keys, values), keys, values, 0.035)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    @pytest.mark.parametrize("kind", ["up to 1e4", "around 1e4", "the largest"])
    def test_up_to_1e4_in_every_type(self, kind, dtype, basis, made):
        keys = {"up to 1e4": drawn().clamp(-4, 4) * 2500, "around 1e4": drawn() + 1e4, "the largest": drawn().sign()}
        keys = keys[kind] * (65504 if kind == "the largest" else 1)
        keys, values = keys.to(dtype), keys.flip(-1).to(dtype)
        queries = 2500 * torch.randn(1, 4, 200, 16, generator=torch.Generator().manual_seed(9)).clamp(-4, 4)
        self.check(coded(made(basis, bits=8), keys, values, queries.to(dtype)), keys, values, 0.035)

    @pytest.mark.parametrize("queries", ["zeros", "loud", "the same"])
    def test_whatever_the_queries(self, queries, basis, made):
        keys, values = drawn(), drawn(1)
        asked = torch.randn(1, 4, 200, 16, generator=torch.Generator().manual_seed(9))
        asked = {"zeros": asked * 0, "loud": asked * 1e4, "the same": asked[:, :, :1].expand(-1, -1, 200, -1)}[queries]
        # Without any query, keys get no bits: they are their means.
        self.check(coded(made(basis, bits=8), keys, values, asked), keys, values, 0.3 if queries == "zeros" else 0.1)

    @pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
    @pytest.mark.parametrize("where", ["keys", "values", "queries"])
    def test_that_are_not_finite_are_refused(self, where, number, basis, made):
        given = {"keys": drawn(), "values": drawn(1), "queries": torch.ones(1, 4, 200, 16)}
        given[where][0, 1, 150, 3] = number
        with pytest.raises(CacheError, match=r"layer 0 are not finite \(inf or NaN\), so they cannot be coded"):
            coded(made(basis, bits=4), **given)

    @pytest.mark.parametrize("where", ["keys", "values", "queries"])
    def test_beyond_float32_are_refused(self, where, basis, made):
        given = {"keys": drawn(), "values": drawn(1), "queries": torch.ones(1, 4, 200, 16)}
        given = {name: tensor.double() for name, tensor in given.items()}
        given[where] *= 1e100
        with pytest.raises(CacheError, match=r"layer 0 go up to \de\+100, and bits= codes numbers up to 1e\+18"):
            coded(made(basis, bits=4), **given)


@pytest.mark.parametrize(("width", "depth"), [(20, 20), (16, 12), (12, 16), (7, 3), (1, 1)])
def test_widths_that_are_no_powers_of_two_or_differ(width, depth, made):
    keys, values = drawn(0, width), drawn(1, depth)
    TestNumbers.check(coded(made(bits=8), keys, values), keys, values, 0.035)


def test_no_warning_of_numpy_or_torch(made):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coded(made(bits=2), DEGENERATE["zeros"], DEGENERATE["all equal"])


@torch.no_grad()
def last_logits(model, ids, basis, file):
    """Those of a coded cache and of a dense one."""
    if basis == "calibrated":
        calibrate.basis(model, None, [ids]).save(file)
        basis = file
    found = []
    for cache in (CompressedCache(model, bits=8, basis=basis), None):
        with attention_implementation(model, "grace_sdpa"):
            cache = model(ids[:, :-1], past_key_values=cache, use_cache=True).past_key_values
            found.append(model(ids[:, -1:], past_key_values=cache).logits[0, -1].float())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("basis", ["none", "calibrated"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_with_activations_of_1e4(dtype, basis, tmp_path):
    """Codes move the logits as they do with small activations, besides the type's own rounding."""
    model, file = copy.deepcopy(build("Llama")), tmp_path / "basis.safetensors"
    ids = torch.randint(3, 97, (1, 160), generator=torch.Generator().manual_seed(4))
    coded, exact = last_logits(model, ids, basis, file)
    error = (coded - exact).abs().max()
    largest = max(
        float(torch.cat([seen.keys, seen.values]).abs().max()) for seen in capture_attention(model, ids).values()
    )
    with torch.no_grad():
        for layer in model.model.layers:
            attention, scale = layer.self_attn, 2.0 ** math.floor(math.log2(3e4 / largest))
            for grown, shrunk in ((attention.k_proj, attention.q_proj), (attention.v_proj, attention.o_proj)):
                grown.weight.mul_(scale)
                shrunk.weight.div_(scale)
    model = model.to(dtype)
    assert max(seen.keys.abs().max() for seen in capture_attention(model, ids).values()) > 1e4
    coded, dense = last_logits(model, ids, basis, file)
    assert coded.isfinite().all()
    assert (coded - dense).abs().max() < 2 * error + 4 * (dense - exact).abs().max()
