"""Quantised storage: errors against half a step per group, blocks, sequences, bytes, files."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from grace_opt.errors import CacheError, OptionError
from grace_opt.hf import CacheConfig, CompressedCache
from grace_opt.hf.models.observation import Observation
from grace_opt.hf.settings.backends import SUPPORTED_BITS
from grace_opt.hf.settings.quantization import Quantize
from grace_opt.hf.stores.packed.tokens import QuantizedTokens, quantize
from tests.packed import numbers_of

MODULES = {"quanto": "optimum", "hqq": "hqq"}
GROUP = 8
PAIRS = [(backend, bits) for backend, offered in SUPPORTED_BITS.items() for bits in offered]


def installed(backend):
    return importlib.util.find_spec(MODULES[backend]) is not None


@pytest.fixture(params=SUPPORTED_BITS)
def backend(request):
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def library_and_bits(request):
    if not installed(request.param[0]):
        pytest.skip(f"{request.param[0]} is not installed")
    return request.param


def draw(*shape, dtype=torch.float32, seed=0):
    """Normal numbers whose channels have means and sizes of their own, as keys have."""
    generator = torch.Generator().manual_seed(seed)
    mean, size = (torch.randn(shape[-1], generator=generator) for _ in range(2))
    return (torch.randn(*shape, generator=generator) * (size.abs() + 0.1) + 3 * mean).to(dtype)


def grouped(x, grouping, group):
    """The groups of a (B, H, S, C) tensor as a list of index tuples, the slow and plain way."""
    batch, heads, tokens, channels = x.shape
    if grouping == "tokens":
        return [
            (b, h, slice(s, s + group), c)
            for b in range(batch)
            for h in range(heads)
            for s in range(0, tokens, group)
            for c in range(channels)
        ]
    group = group if channels % group == 0 else channels
    return [
        (b, h, s, slice(c, c + group))
        for b in range(batch)
        for h in range(heads)
        for s in range(tokens)
        for c in range(0, channels, group)
    ]


def bits_of(x):
    """The bytes, so that equal means equal to the last bit."""
    return x.contiguous().view(torch.uint8)


def storages(x):
    """Bytes of the storages below, found without the class's help."""
    found = {}
    for row in x._rows:
        for block in row:
            for field in dataclasses.fields(block):
                part = getattr(block, field.name)
                if isinstance(part, torch.Tensor):
                    found[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.parametrize("channels", [16, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("grouping", ["tokens", "channels"])
def test_no_number_moves_by_more_than_half_a_step(library_and_bits, grouping, dtype, channels):
    backend, bits = library_and_bits
    x = draw(2, 3, 16, channels, dtype=dtype)
    found = QuantizedTokens.quantize(x, bits, grouping, GROUP, backend).dequantize()
    assert found.dtype == dtype
    assert found.shape == x.shape
    # Scale, zero point and result are each rounded once, relative to numbers below the group's largest and its width.
    eps = torch.finfo(dtype if dtype != torch.float64 else torch.float32).eps
    for where in grouped(x, grouping, GROUP):
        group = x[where].double()
        step = (group.max() - group.min()) / (2**bits - 1)
        allowed = step / 2 + 2.5 * eps * group.abs().max()
        assert (found[where].double() - group).abs().max() <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_groups_of_equal_numbers_come_back(library_and_bits, dtype):
    backend, bits = library_and_bits
    x = draw(1, 2, 1, 4, dtype=dtype).expand(1, 2, GROUP, 4)
    found = QuantizedTokens.quantize(x, bits, "tokens", GROUP, backend).dequantize()
    assert torch.allclose(found, x, rtol=torch.finfo(dtype).eps, atol=0)


def test_narrow_groups_far_from_zero_stay_finite_in_float16(library_and_bits):
    backend, bits = library_and_bits
    x = (1000 + torch.rand(1, 1, GROUP, 4)).half()
    found = QuantizedTokens.quantize(x, bits, "tokens", GROUP, backend).dequantize()
    assert (found.float() - x.float()).abs().max() <= 0.5 / (2**bits - 1) + 1.5


@pytest.mark.parametrize("group", [1, 3, 128])
def test_any_group_size(library_and_bits, group):
    backend, bits = library_and_bits
    x = draw(1, 1, 384, 3, dtype=torch.bfloat16)
    found = QuantizedTokens.quantize(x, bits, "tokens", group, backend).dequantize()
    width = x.double().unflatten(2, (-1, group))
    width = (width.amax(3) - width.amin(3)).max()
    assert (found.double() - x.double()).abs().max() <= width / (2**bits - 1) / 2 + 2.5 * 2**-7 * x.abs().max()


def test_a_tensor_of_one_group(library_and_bits):
    backend, bits = library_and_bits
    x = torch.arange(5.0).view(1, 1, 1, 5)
    found = QuantizedTokens.quantize(x, bits, "channels", GROUP, backend).dequantize()
    assert (found - x).abs().max() <= 4 / (2**bits - 1) / 2 + 1e-5


def test_views_and_gradients_do_no_harm(backend):
    x = draw(2, 16, 3, 8)
    expected = QuantizedTokens.quantize(x.transpose(1, 2).contiguous(), 4, "tokens", GROUP, backend).dequantize()
    found = QuantizedTokens.quantize(x.requires_grad_().transpose(1, 2), 4, "tokens", GROUP, backend).dequantize()
    assert torch.equal(found, expected)
    assert not found.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("grouping", "channels"), [("tokens", 5), ("channels", 5), ("channels", 2 * GROUP)])
def test_a_kernel_is_told_where_everything_is(library_and_bits, grouping, channels, dtype):
    backend, bits = library_and_bits
    x = draw(2, 3, 3 * GROUP, channels, dtype=dtype)
    stored = QuantizedTokens.quantize(x, bits, grouping, GROUP, backend).append(x[:, :, :GROUP]).select([1, 0, 1])
    assert stored.packed.dtype == stored.packed.parameters == dtype
    assert stored.packed is stored.packed, "made once"
    found = numbers_of(stored.packed).to(dtype)
    torch.testing.assert_close(found, stored.dequantize(), atol=1e-6, rtol=2 * torch.finfo(dtype).eps)


def test_a_kernel_reads_in_order_what_came_in_another_order(backend):
    stored = QuantizedTokens.quantize(draw(1, 2, 2 * GROUP, 5), 4, "tokens", GROUP, backend)
    turned = {name: tensor.mT.contiguous().mT for name, tensor in stored.tensors().items()}
    found = QuantizedTokens.from_tensors(turned, stored.meta())
    assert torch.equal(found.dequantize(), stored.dequantize())
    assert all(tensor.is_contiguous() for tensor in found.packed.tensors)


def test_what_no_kernel_reads(backend):
    x = draw(2, 2, 3 * GROUP, 5)
    one = QuantizedTokens.quantize(x[:1], 4, "tokens", GROUP, backend)
    other = QuantizedTokens.quantize(x[1:, :, :GROUP], 4, "tokens", GROUP, backend).append(x[1:, :, GROUP:])
    assert QuantizedTokens(one._form, [one._rows[0], other._rows[0]]).packed is None, "blocks of other lengths"
    if backend == "hqq":  # of which one block needs scales in float32, and the other does not
        stored = QuantizedTokens.quantize(x.half(), 8, "tokens", GROUP, backend)
        stored = stored.append(1000 + x[:, :, :GROUP].half())
        assert {block.scale.dtype for block in stored._rows[0]} == {torch.float16, torch.float32}
        assert stored.packed is None


def test_a_copy_does_not_point_to_the_original(backend):
    stored = QuantizedTokens.quantize(draw(1, 2, 2 * GROUP, 5), 4, "tokens", GROUP, backend)
    own = {t.data_ptr() for t in stored.packed.tensors}
    other = copy.deepcopy(stored)
    assert torch.equal(numbers_of(other.packed), numbers_of(stored.packed))
    assert own.isdisjoint(other.packed.table[..., :3].flatten().tolist())


@pytest.mark.parametrize(("grouping", "more"), [("tokens", 2 * GROUP), ("channels", 5)])
def test_appending_equals_quantising_each_part(library_and_bits, grouping, more):
    backend, bits = library_and_bits
    parts = [draw(2, 3, 3 * GROUP, 7), draw(2, 3, more, 7, seed=1), draw(2, 3, more, 7, seed=2)]
    each = [QuantizedTokens.quantize(part, bits, grouping, GROUP, backend) for part in parts]
    joined = each[0].append(parts[1]).append(parts[2])
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in each], dim=2))
    assert joined.shape == (2, 3, 3 * GROUP + 2 * more, 7)
    assert joined.nbytes == sum(part.nbytes for part in each) == storages(joined)
    assert each[0].shape[2] == 3 * GROUP


@pytest.mark.parametrize(
    "indices",
    [[2, 0, 1], [1], [0, 0, 2, 2], [-1], torch.tensor([1, 0]), torch.tensor([True, False, True])],
    ids=str,
)
def test_selecting_equals_indexing_the_numbers(backend, indices):
    x = QuantizedTokens.quantize(draw(3, 2, 16, 5), 2, "tokens", GROUP, backend).append(draw(3, 2, 8, 5, seed=1))
    assert torch.equal(x.select(indices).dequantize(), x.dequantize()[indices])


def test_repeated_sequences_share_their_bytes_until_they_differ(backend):
    one = QuantizedTokens.quantize(draw(1, 2, 16, 5), 4, "tokens", GROUP, backend)
    three = one.select([0, 0, 0])
    assert three.nbytes == one.nbytes == storages(three)
    more = draw(3, 2, 8, 5, seed=1)
    longer = three.append(more)
    assert longer.nbytes == one.nbytes + QuantizedTokens.quantize(more, 4, "tokens", GROUP, backend).nbytes
    assert torch.equal(longer.dequantize()[1, :, :16], one.dequantize()[0])
    assert copy.deepcopy(longer).nbytes == longer.nbytes


def test_bytes_are_those_of_bits_scales_and_zero_points(library_and_bits):
    backend, bits = library_and_bits
    batch, heads, tokens, channels, group = 2, 4, 128, 32, 32
    x = draw(batch, heads, tokens, channels, dtype=torch.float16)
    stored = QuantizedTokens.quantize(x, bits, "tokens", group, backend)
    overhead = 2 * 2 * 8 / group  # a scale and a zero point, two bytes each, in bits per number
    expected = x.nbytes * ((3.2 if bits == 3 else bits) + overhead) / 16
    assert stored.nbytes == storages(stored)
    assert stored.nbytes == pytest.approx(expected, rel=0.02)
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in stored.tensors().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grouping", ["tokens", "channels"])
def test_saved_and_loaded_bit_for_bit(library_and_bits, grouping, dtype, tmp_path):
    backend, bits = library_and_bits
    x = QuantizedTokens.quantize(draw(2, 3, 16, 7, dtype=dtype), bits, grouping, GROUP, backend)
    x = x.append(draw(2, 3, 8, 7, dtype=dtype, seed=1)).select([1, 0, 1])
    save_file(x.tensors(), tmp_path / "x.safetensors")
    meta = json.loads(json.dumps(x.meta()))
    found = QuantizedTokens.from_tensors(load_file(tmp_path / "x.safetensors"), meta)
    assert (found.shape, found.dtype, found.nbytes) == (x.shape, x.dtype, x.nbytes)
    assert found.meta() == x.meta()
    assert torch.equal(bits_of(found.dequantize()), bits_of(x.dequantize()))
    more = draw(3, 3, 8, 7, dtype=dtype, seed=2)
    assert torch.equal(bits_of(found.append(more).dequantize()), bits_of(x.append(more).dequantize()))


def test_copied_and_moved(backend):
    x = QuantizedTokens.quantize(draw(2, 3, 16, 7), 4, "tokens", GROUP, backend)
    for other in (copy.deepcopy(x), x.to("cpu", non_blocking=True)):
        assert torch.equal(other.dequantize(), x.dequantize())
        assert (other.device, other.nbytes) == (x.device, x.nbytes)
    away = x.select([0, 0]).to("meta")
    assert away.device.type == "meta"
    assert away.shape == (2, 3, 16, 7)
    assert "4 bits" in repr(x)


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu(library_and_bits):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    backend, bits = library_and_bits
    x = draw(2, 3, 16, 7, dtype=torch.float16)
    here, there = (QuantizedTokens.quantize(x.to(d), bits, "tokens", GROUP, backend) for d in ("cpu", "cuda"))
    assert there.device.type == "cuda"
    step = (x.float().amax() - x.float().amin()) / (2**bits - 1)
    assert (there.dequantize().cpu().float() - here.dequantize().float()).abs().max() <= 1.01 * step
    assert torch.equal(there.to("cpu").dequantize(), there.dequantize().cpu())


def test_quantization_applies_to_keys_and_values(backend):
    keys, values = draw(2, 3, 16, 5), draw(2, 3, 19, 16)
    found, untouched = quantize(Quantize(keys=4, group_size=GROUP, backend=backend), keys, values)
    assert untouched is values
    assert torch.equal(found.dequantize(), QuantizedTokens.quantize(keys, 4, "tokens", GROUP, backend).dequantize())
    untouched, found = quantize(Quantize(values=2, group_size=GROUP, backend=backend), keys, values)
    assert untouched is keys
    assert torch.equal(found.dequantize(), QuantizedTokens.quantize(values, 2, "channels", GROUP, backend).dequantize())


def test_quantization_is_plain_data():
    quantization = Quantize(keys=3, values=8, group_size=64, backend="hqq")
    assert Quantize.from_dict(json.loads(json.dumps(quantization.to_dict()))) == quantization
    with pytest.raises(OptionError, match="has no bits"):
        Quantize.from_dict({"bits": 4})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "torchao"}, "unknown"),
        ({"backend": "torchao", "keys": None}, "unknown"),
        ({"keys": 4.0}, r'^keys=4\.0: give an integer >= 1, or None; backend="quanto" offers 2, 4; .*\.$'),
        ({"keys": 4.0, "backend": "quanto"}, r'^keys=4\.0: give an integer; backend="quanto" offers 2, 4\.$'),
        ({"values": "4"}, "values='4': give an integer >= 1, or None; .*quanto"),
        ({"keys": True}, "keys=True: give an integer >= 1, or None; .*quanto"),
        ({"keys": 8, "backend": "quanto"}, 'offers 2, 4; backend="hqq" has 8'),
        ({"keys": 5, "backend": "hqq"}, "offers 1, 2, 3, 4, 8"),
        ({"values": 3, "backend": "quanto"}, 'values=3: backend="quanto"'),
        ({"keys": True}, "keys=True"),
        ({"keys": 4.0}, "keys=4.0"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 2.5, "keys": None}, "group_size"),
    ],
)
def test_bad_options_are_told_at_once(options, message):
    with pytest.raises(OptionError, match=message):
        Quantize(**options)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(1, 1, 8, 4, dtype=torch.int32), {}, "int32 numbers"),
        (torch.zeros(1, 1, 8, 4, dtype=torch.bool), {}, "bool numbers"),
        (torch.zeros(1, 8, 4), {}, r"shape \(1, 8, 4\)"),
        (torch.zeros(0, 1, 8, 4), {}, "none of them zero"),
        (torch.zeros(1, 1, 9, 4), {}, "9 tokens do not divide into groups of 8"),
        (torch.zeros(1, 1, 8, 4), {"grouping": "heads"}, "heads"),
        (torch.zeros(1, 1, 8, 4), {"group_size": 0}, "group_size"),
    ],
)
def test_what_can_not_be_quantised(backend, x, options, message):
    with pytest.raises(OptionError, match=message):
        QuantizedTokens.quantize(x, 4, **{"group_size": GROUP, "backend": backend, **options})


def test_numbers_of_numpy_become_plain(backend):
    """They would not go into a file's JSON."""
    x = QuantizedTokens.quantize(draw(1, 1, 16, 4), np.int64(4), "tokens", np.int64(GROUP), backend)
    assert json.loads(json.dumps(x.meta())) == x.meta()


def test_what_does_not_continue_changes_nothing(backend):
    x = QuantizedTokens.quantize(draw(2, 3, 16, 7), 4, "tokens", GROUP, backend)
    for other in (draw(1, 3, 8, 7), draw(2, 3, 8, 6), draw(2, 3, 8, 7).half(), torch.zeros(3)):
        with pytest.raises(CacheError, match="must be the same"):
            x.append(other)
    with pytest.raises(OptionError, match="9 tokens"):
        x.append(draw(2, 3, 9, 7))
    for indices in ([2], [], [-3]):
        with pytest.raises(OptionError, match="batch of 2"):
            x.select(indices)
    assert x.shape == (2, 3, 16, 7)


def test_files_that_do_not_fit(backend):
    x = QuantizedTokens.quantize(draw(2, 3, 16, 7), 4, "tokens", GROUP, backend)
    tensors, meta = x.tensors(), x.meta()
    for change in (
        {"format": 2},
        {"backend": "other"},
        {"bits": 2},
        {"grouping": "heads"},
        {"heads": 5},
        {"dtype": "float3"},
        {"dtype": "int8"},
        {"rows": [[0], [7]]},
        {"rows": []},
        {"rows": [[0], [0, 1]]},
        {"tokens": [16, 24]},
    ):
        with pytest.raises(CacheError):
            QuantizedTokens.from_tensors(tensors, {**meta, **change})
    with pytest.raises(CacheError, match=r"1\.scale"):
        QuantizedTokens.from_tensors({name: t for name, t in tensors.items() if name != "1.scale"}, meta)


def test_a_file_whose_last_group_of_tokens_is_cut(backend):
    x = QuantizedTokens.quantize(draw(1, 2, 16, 4), 4, "tokens", GROUP, backend)
    whole, meta = x.tensors(), {**x.meta(), "tokens": [12]}
    tensors = {name: tensor[: len(tensor) * 12 // 16].contiguous() for name, tensor in whole.items()}
    with pytest.raises(CacheError, match="12 tokens do not divide into groups of 8"):
        QuantizedTokens.from_tensors(tensors, meta)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_names_stand_for_keys_and_values_in_so_many_bits(bits):
    assert CacheConfig(quantize=f"int{bits}").quantize == Quantize(keys=bits, values=bits)
    assert CacheConfig(quantize=f"INT{bits}").quantize.group_size == 32


@pytest.mark.parametrize(
    ("name", "near"), [("4bit", "int4"), ("in4", "int4"), ("q8_0", "int8"), ("nf4", "int4"), ("kivi", None)]
)
def test_unknown_names_suggest_the_nearest(name, near):
    with pytest.raises(OptionError, match=f"^quantize='{name}': write one of 'int8', 'int4', 'int3'") as raised:
        CacheConfig(quantize=name)
    assert str(raised.value).endswith("values=2)" if near is None else f"Did you mean '{near}'?")


@pytest.mark.parametrize(
    ("bits", "here", "chosen"),
    [
        ((4, None), ("quanto", "hqq"), "quanto"),
        ((4, 2), ("quanto", "hqq"), "quanto"),
        ((4, 2), ("hqq",), "hqq"),
        ((4, 2), (), "quanto"),
        ((4, 3), ("quanto", "hqq"), "hqq"),
        ((8, None), ("quanto",), "hqq"),
        ((None, None), ("quanto", "hqq"), "quanto"),
    ],
)
def test_the_back_end_is_the_first_that_is_installed_and_has_the_bits(bits, here, chosen, monkeypatch):
    monkeypatch.setattr("grace_opt.hf.settings.backends._is_installed", lambda backend: backend in here)
    made = Quantize(keys=bits[0], values=bits[1])
    assert made.backend == chosen
    assert Quantize.from_dict(made.to_dict()) == made


def test_bits_that_no_back_end_has_say_which_do():
    with pytest.raises(
        OptionError, match=r'no back end .* in 4 and 5 bits: backend="quanto" offers 2, 4; backend="hqq" offers 1, 2'
    ):
        Quantize(keys=5, values=4)


def test_a_missing_library_names_the_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("grace_opt._util.optional.importlib.import_module", missing)
    for name in SUPPORTED_BITS:
        with pytest.raises(OptionError, match=r"pip install .\.\[quant\]. in"):
            QuantizedTokens.quantize(draw(1, 1, 8, 4), 4, "tokens", GROUP, name)
        with pytest.raises(OptionError, match=name):
            Quantize(backend=name).check_installed()


def prompt_of(length, backend, **settings):
    """A layer whose prompt of this length was quantised, and the keys and values of that prompt."""
    bits = Quantize(keys=4, values=4, group_size=GROUP, backend=backend)
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16, hidden_size=32)
    layer = CompressedCache(config, ratio=0.0, quantize=bits, recent_window=5, **settings).layers[0]
    every = draw(1, 2, 700, 16), draw(1, 2, 700, 16, seed=1)
    keys, values = (part[:, :, :length] for part in every)
    layer.update(keys, values)
    layer.attended()
    layer.observe(Observation(keys, None, length, 0.25, None), keys, values)
    return layer, every


@pytest.mark.filterwarnings("ignore:the prompt has")
def test_no_length_of_a_prompt_is_kept_worse_than_another(backend):
    """Groups begin at the first token and lie along it: other caches group by the remainder of the length."""
    longest, every = prompt_of(300, backend)
    rounded = longest.full_width()
    for length in range(1, 301):
        layer, _ = prompt_of(length, backend)
        coded = max(length - 5, 0) // GROUP * GROUP
        assert layer.pruned_length == coded
        for found, same, true in zip(layer.full_width(), rounded, every, strict=True):
            assert torch.equal(found[:, :, :coded], same[:, :, :coded])
            assert torch.equal(found[:, :, coded:], true[:, :, coded:length])
    for true, found, grouping in zip(every, rounded, ("tokens", "channels"), strict=True):
        plain = QuantizedTokens.quantize(true[:, :, :288], 4, grouping, GROUP, backend).dequantize()
        assert torch.equal(found[:, :, :288], plain)


def test_nothing_is_quantised_twice(backend):
    """Forty blocks later, the first tokens are what they were after the prompt, to the bit, and the last as good."""
    layer, every = prompt_of(45, backend, tail_block=GROUP)
    before = [part.clone() for part in layer.full_width()]
    coded, flushes = layer.pruned_length, 0
    for at in range(45, 45 + 41 * GROUP):
        layer.update(*(part[:, :, at : at + 1] for part in every))
        layer.attended()
        if layer.pruned_length > coded:
            flushes += 1
            for found, old in zip(layer.full_width(), before, strict=True):
                assert torch.equal(found[:, :, :coded], old[:, :, :coded])
            before, coded = [part.clone() for part in layer.full_width()], layer.pruned_length
    assert flushes >= 40
    for true, found, grouping in zip(every, before, ("tokens", "channels"), strict=True):
        plain = QuantizedTokens.quantize(true[:, :, :coded], 4, grouping, GROUP, backend).dequantize()
        assert torch.equal(found[:, :, :coded], plain)
