"""Blocks for servers: sizes, what is read again, damage, bad input, and LMCache's interface."""

from __future__ import annotations

import sys
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from grace_opt.errors import CacheError, CalibrationError, MissingLibraryError, OptionError
from grace_opt.hf import CalibratedBasis, calibrate, capture_attention
from grace_opt.hf.bases.classes import WEIGHT_FLOOR
from grace_opt.hf.bases.expected import RIDGE, directions, expected, expected_sums
from grace_opt.serving import BlockCodec, lmcache
from grace_opt.serving.block_codec import _HEADER, LEAST_TOKENS
from grace_opt.serving.block_layer import DENSE
from tests.hf.matrix import model_of

HEADS, WIDTH = 2, 64


def ids(length=300, seed=1):
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def pocket():
    from grace_opt.hf.models import load_pocket

    model, tokenizer = load_pocket()
    return model, calibrate.basis(model, tokenizer, ["the quiet river runs past a late singer " * 40])


@pytest.fixture(scope="module")
def basis(pocket):
    return pocket[1]


def block(tokens, dtype=torch.float32, scale=1.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(2, 3, tokens, HEADS * WIDTH, generator=random) * scale).to(dtype)


def error(codec, given_block):
    off = codec.decode(codec.encode(given_block)).double() - given_block.double()
    return float(off.square().mean().sqrt() / given_block.double().square().mean().sqrt())


# What keys say of attention


def test_coefficients_are_those_of_ridge_regression():
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(1, 40, 3, generator=random, dtype=torch.float64)
    received = torch.rand(2, 1, 40, generator=random, dtype=torch.float64)
    found = directions(*expected_sums(keys, *received))[0].numpy()
    x = np.concatenate([keys[0].numpy(), keys[0].numpy() ** 2], axis=1)
    x = x - x.mean(0)
    for column, p in enumerate(received[:, 0].numpy()):
        y = np.log(p + WEIGHT_FLOOR * p.mean())
        wanted = np.linalg.solve(x.T @ x + RIDGE * np.diag((x**2).sum(0)), x.T @ (y - y.mean()))
        np.testing.assert_allclose(found[:, column], wanted, rtol=1e-4, atol=1e-6)


def test_attention_that_follows_from_keys_is_expected():
    random = torch.Generator().manual_seed(4)
    texts = [torch.randn(2, 300, 8, generator=random) for _ in range(3)]
    true = [each[..., 0] - 0.5 * each[..., 1].square() for each in texts]
    sums = [expected_sums(keys.double(), logs.exp(), (2 * logs).exp()) for keys, logs in zip(texts, true, strict=True)]
    found = directions(*(sum(each) for each in zip(*sums[:2], strict=True)))
    for number, moment in enumerate(expected(texts[2], found), 1):
        logs = moment.log()
        assert torch.corrcoef(torch.stack([logs[0], number * true[2][0]]))[0, 1] > 0.9


def test_keys_that_do_not_differ_say_nothing():
    same = torch.ones(1, 20, 4, dtype=torch.float64)
    assert not directions(*expected_sums(same, torch.rand(1, 20), torch.rand(1, 20))).any()


def test_the_basis_keeps_it_in_its_file_and_old_files_lack_it(basis, tmp_path):
    basis.save(tmp_path / "new.safetensors")
    read = CalibratedBasis.load(tmp_path / "new.safetensors")
    assert all(torch.equal(read.expected[layer], basis.expected[layer]) for layer in basis.layers)
    old = replace(basis, expected={})
    old.save(tmp_path / "old.safetensors")
    assert CalibratedBasis.load(tmp_path / "old.safetensors").expected == {}
    assert old.digest() == basis.digest()  # what is coded does not depend on it
    with pytest.raises(
        CalibrationError, match=r"before blocks could be coded; make it anew: grace-opt calibrate basis"
    ):
        BlockCodec(tmp_path / "old.safetensors")
    for wrong in ({0: basis.expected[0]}, {**basis.expected, 1: basis.expected[1][:, :-1]}):
        with pytest.raises(CalibrationError, match="expected attention"):
            replace(basis, expected=wrong)


# Blocks


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 400),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    bits=st.sampled_from([2.0, 2.5, 4.0, 8.0]),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 100.0, 1e15]),
    seed=st.integers(0, 3),
)
def test_a_block_has_the_size_that_was_said_and_is_read_again(basis, tokens, dtype, bits, scale, seed):
    if dtype == torch.float16:
        scale = min(max(scale, 1e-3), 100.0)
    codec, whole = BlockCodec(basis, bits), block(tokens, dtype, scale, seed)
    size = codec.nbytes(tokens, dtype)
    data = codec.encode(whole)
    assert data.dtype == torch.uint8
    assert len(data) == size
    if tokens >= LEAST_TOKENS:
        assert size - _HEADER.size <= bits * whole.numel() / 8 + 1e-6 * size
        assert size >= 0.98 * bits * whole.numel() / 8 - 8 * 3
    found = codec.decode(torch.cat([data, torch.zeros(5, dtype=torch.uint8)]))  # a buffer may be longer
    assert found.shape == whole.shape
    assert found.dtype == dtype
    assert found.isfinite().all()
    if tokens < LEAST_TOKENS:
        assert torch.equal(found, whole)


def test_more_bits_leave_less_error(basis):
    whole = block(256)
    errors = [error(BlockCodec(basis, bits), whole) for bits in (1.5, 2.5, 4.0, 8.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.03


def test_large_tokens_stay_dense_and_do_not_spoil_the_others(basis):
    plain = block(256)
    sinks = plain.clone()
    sinks[0, :, 7] *= 300
    found = BlockCodec(basis).decode(BlockCodec(basis).encode(sinks))
    assert torch.equal(found[:, :, 7], sinks[:, :, 7])
    others = torch.arange(256) != 7
    off = (found - sinks)[:, :, others].square().mean().sqrt()
    assert off < 1.2 * error(BlockCodec(basis), plain)
    assert DENSE >= 1


def test_equal_blocks_have_equal_bytes_in_any_thread(basis):
    codec, whole = BlockCodec(basis), block(256)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: codec.encode(whole), range(8))]
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("tokens", [10, 128])
def test_a_flipped_bit_is_found(basis, tokens):
    codec = BlockCodec(basis)
    data = codec.encode(block(tokens, torch.bfloat16))
    places = [*range(8 * _HEADER.size), 8 * _HEADER.size, 4 * len(data), 8 * len(data) - 1]
    for place in places:
        flipped = data.clone()
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(CacheError, match="damaged"):
            codec.decode(flipped)


def test_parts_and_other_bytes_are_refused(basis):
    codec = BlockCodec(basis)
    data = codec.encode(block(128))
    with pytest.raises(CacheError, match="damaged"):
        codec.decode(data[:-1])
    with pytest.raises(CacheError, match="no block"):
        codec.decode(data[:10])
    with pytest.raises(CacheError, match="no block"):
        codec.decode(torch.zeros(200, dtype=torch.uint8))
    with pytest.raises(CacheError, match="no block"):
        codec.decode(data.float())
    for other in (data.numpy(), bytes(data.numpy()), None):
        with pytest.raises(CacheError, match=r"torch\.frombuffer"):
            codec.decode(other)
        with pytest.raises(CacheError, match="give a tensor"):
            codec.encode(other)


def test_what_is_read_is_finite(basis):
    whole = block(256, torch.float16, 1.5e4).clamp(-65504, 65504)
    assert BlockCodec(basis).decode(BlockCodec(basis).encode(whole)).isfinite().all()
    with pytest.raises(CacheError, match=r"larger than 2\^60"):
        BlockCodec(basis).encode(block(256, torch.float32, 1e30))


def test_autocast_changes_nothing(basis):
    codec, whole = BlockCodec(basis), block(128)
    data = codec.encode(whole)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert torch.equal(codec.encode(whole), data)
            assert torch.equal(codec.decode(data), codec.decode(data))


def test_bits_and_basis_stay_what_they_are(basis):
    codec = BlockCodec(basis)
    with pytest.raises(AttributeError):
        codec.bits = 4.0
    assert "bits=2.5" in repr(codec)


def test_blocks_of_another_basis_or_of_other_bits_are_refused(basis):
    data = BlockCodec(basis).encode(block(128))
    keys = {layer: replace(each, energy=each.energy * 2) for layer, each in basis.keys.items()}
    for other in (BlockCodec(basis, 3), BlockCodec(replace(basis, keys=keys))):
        with pytest.raises(CacheError, match=r"was coded with bits=2.5 .* read it with those"):
            other.decode(data)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: block(128)[0], r"shape \(3, 128, 128\)"),
        (lambda: block(128)[:, :2], r"shape \(2, 2, 128, 128\)"),
        (lambda: block(128)[..., :64], r"shape \(2, 3, 128, 64\)"),
        (lambda: block(128).masked_fill(torch.tensor(True), torch.nan), "not finite"),
    ],
)
def test_what_is_no_block_of_the_model_is_refused(basis, wrong, message):
    with pytest.raises(CacheError, match=message):
        BlockCodec(basis).encode(wrong())


def test_numbers_that_cannot_be_are_refused(basis, tmp_path):
    for bits in (0, -1, 9.5, float("nan"), "2", None):
        with pytest.raises(OptionError, match="bits"):
            BlockCodec(basis, bits)
    codec = BlockCodec(basis)
    for tokens in (0, 2**15, 2.5):
        with pytest.raises(OptionError, match="tokens"):
            codec.nbytes(tokens, torch.float16)
    with pytest.raises(OptionError, match=r"dtype=torch\.float64"):
        codec.encode(block(128).double())
    with pytest.raises(OptionError, match=r"bits=0.3: .* take .* bits per number; write more, or use longer blocks"):
        BlockCodec(basis, 0.3).nbytes(64, torch.float16)
    with pytest.raises(CalibrationError):
        BlockCodec(tmp_path / "missing.safetensors")


def test_layers_without_a_basis_stay_as_they_are():
    model = model_of("Gemma 3")
    made = calibrate.basis(model, None, [ids()])
    codec, layers = BlockCodec(made, 4), model.config.num_hidden_layers
    assert 0 < len(made.layers) < layers
    heads, width = made.keys[made.layers[0]].energy.shape
    whole = torch.randn(2, layers, 100, heads * width)
    found = codec.decode(codec.encode(whole))
    for layer in range(layers):
        assert torch.equal(found[:, layer], whole[:, layer]) == (layer not in made.layers)


def test_a_model_goes_on_from_blocks_as_from_its_own_cache(pocket):
    model, made = pocket
    text = torch.randint(3, 300, (1, 300), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        captured = capture_attention(model, text[:, :256])
        exact = model(text).logits[0, 256:].log_softmax(-1)
        whole = torch.stack(
            [
                torch.stack(
                    [getattr(captured[layer], kind)[0].transpose(0, 1).flatten(1) for layer in sorted(captured)]
                )
                for kind in ("keys", "values")
            ]
        )
        lost = []
        for bits in (1.5, 3, 6):
            codec = BlockCodec(made, bits)
            keys, values = codec.decode(codec.encode(whole)).unflatten(-1, (HEADS, WIDTH)).transpose(2, 3)
            cache = DynamicCache(config=model.config)
            for layer in range(len(keys)):
                cache.update(keys[layer][None], values[layer][None], layer)
            found = model(text[:, 256:], past_key_values=cache).logits[0].log_softmax(-1)
            lost.append(float((exact.exp() * (exact - found)).sum(-1).mean()))
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < 0.01


# LMCache


class _Memory:
    def __init__(self, tensor):
        self.tensor = tensor


class _Layout:
    def __init__(self, *shapes, dtype=torch.bfloat16):
        self.shapes, self.dtypes = [torch.Size(each) for each in shapes], [dtype] * len(shapes)


@pytest.fixture
def serdes(monkeypatch):
    """A stand-in of LMCache's documented interface; its own is in `test_lmcache_itself`."""
    found = types.ModuleType("lmcache.v1.distributed.serde")
    found.factories = {}
    found.register_serde_factory = found.factories.__setitem__
    found.Serializer = found.Deserializer = object

    class AsyncSerdeProcessor:
        def __init__(self, serializer, deserializer, max_workers=1):
            self.serializer, self.deserializer, self.max_workers = serializer, deserializer, max_workers

    found.AsyncSerdeProcessor = AsyncSerdeProcessor
    monkeypatch.setitem(sys.modules, found.__name__, found)
    return found


@pytest.fixture
def file(basis, tmp_path):
    basis.save(tmp_path / "basis.safetensors")
    return str(tmp_path / "basis.safetensors")


def test_the_serde_fills_the_buffer_that_it_asked_for(serdes, file):
    lmcache.register()
    made = serdes.factories["grace_opt"]({"basis": file, "bits": 3, "max_workers": 2})
    whole = block(256, torch.bfloat16)
    size = made.serializer.estimate_serialized_size(_Layout(whole.shape))
    buffer, into = torch.zeros(size, dtype=torch.uint8), torch.empty_like(whole)
    assert made.serializer.serialize(_Memory(whole), _Memory(buffer), object()) == size
    assert made.max_workers == 2
    made.deserializer.deserialize(_Memory(buffer), _Memory(into), object())
    assert torch.equal(into, BlockCodec(file, 3).decode(buffer))
    with pytest.raises(CacheError, match="all layers in one tensor, and this one has 2"):
        made.serializer.estimate_serialized_size(_Layout(whole.shape, whole.shape))
    with pytest.raises(CacheError, match=r"shape \(2, 3, 256, 64\)"):
        made.serializer.estimate_serialized_size(_Layout((2, 3, 256, 64)))
    with pytest.raises(CacheError, match="the buffer has 100 bytes"):
        made.serializer.serialize(_Memory(whole), _Memory(buffer[:100]), None)
    with pytest.raises(CacheError, match="is asked for"):
        made.deserializer.deserialize(_Memory(buffer), _Memory(into[:, :, :9]), None)
    with pytest.raises(CacheError, match="is asked for"):
        made.deserializer.deserialize(_Memory(buffer), _Memory(into.half()), None)
    with pytest.raises(CacheError, match="holds no tensor"):
        made.serializer.serialize(_Memory(None), _Memory(buffer), None)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({}, '"basis"'),
        ({"basis": "x", "bit": 3}, "'bit'.*bits"),
        ({"basis": "nowhere"}, "nowhere"),
        ({"basis": None}, '"basis"'),
    ],
)
def test_wrong_settings_of_the_serde(serdes, settings_, message):
    with pytest.raises((OptionError, CalibrationError), match=message):
        lmcache.processor(settings_)


def test_threads_are_a_number(serdes, file):
    for wrong in (0, "2", 2.5, None):
        with pytest.raises(OptionError, match="max_workers"):
            lmcache.processor({"basis": file, "max_workers": wrong})


def test_without_lmcache_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "lmcache", None)
    with pytest.raises(MissingLibraryError, match="pip install lmcache"):
        lmcache.register()
    with pytest.raises(SystemExit, match="pip install lmcache"):
        lmcache.main()


def test_lmcache_itself(file):
    """With the package, where it is installed: not in this project's environment, which has other versions."""
    serde = pytest.importorskip("lmcache.v1.distributed.serde")
    import select

    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    def memory(tensor):
        about = MemoryObjMetadata(tensor.shape, tensor.dtype, 0, tensor.nbytes, 1, 0, MemoryFormat.KV_2LTD)
        return TensorMemoryObj(tensor.flatten().view(torch.uint8), about, None)

    lmcache.register("grace_opt_test")
    made = serde.create_serde_processor(serde.SerdeConfig("grace_opt_test", {"basis": file}))
    whole, key = block(256, torch.bfloat16), ObjectKey(b"text", "pocket", 0)
    buffer = torch.zeros(
        made.estimate_serialized_size(MemoryLayoutDesc([whole.shape], [whole.dtype])), dtype=torch.uint8
    )
    into = torch.zeros_like(whole)
    for submit, query, ready, pair in (
        (made.submit_serialize, made.query_serialize_result, made.get_serialize_event_fd(), (whole, buffer)),
        (made.submit_deserialize, made.query_deserialize_result, made.get_deserialize_event_fd(), (buffer, into)),
    ):
        source, target = (memory(each) for each in pair)
        task = submit([source], [target], [key])
        assert select.select([ready], [], [], 60)[0]
        assert query(task) is True
    made.close()
    assert torch.equal(into, BlockCodec(file).decode(buffer))
