"""Whole heads coded by the compiled loop: the codes of the steps that it replaces, up to rounding."""

from dataclasses import replace

import pytest
import torch

from grace_opt import kernels
from grace_opt.hf.bases.classes import class_sizes
from grace_opt.hf.stores.coded import heads as bits_heads
from grace_opt.hf.stores.coded.heads import StoredHeads, code_heads
from grace_opt.kernels._shared import threads
from grace_opt.kernels._shared.threads import always_compiled
from grace_opt.kernels.cache import heads


def stored(count, shape, mean, seed, encode=True):
    """Heads with channels of unequal size, some of which get no bits and some many."""
    g = torch.Generator().manual_seed(seed)
    number, width = shape
    size = torch.logspace(-3, 1, width)[torch.randperm(width, generator=g)]
    tensor = torch.randn(number, 2 * count, width, generator=g)[:, ::2] * size + size
    order = torch.stack([torch.randperm(count, generator=g) for _ in range(number)])
    matrices = torch.randn(number, width, width, generator=g) / width**0.5 if encode else None
    weights, energy = torch.rand(number, count, generator=g) + 0.1, torch.rand(number, width, generator=g).double()
    bits = torch.full((number,), mean * count * width, dtype=torch.float64)
    return StoredHeads(tensor, order, matrices, weights, energy, class_sizes(count), bits)


def both(parts, monkeypatch):
    """Codes by the loop, and step by step."""
    with always_compiled():
        found = code_heads(parts)
        monkeypatch.setattr(bits_heads, "is_compiled", lambda *tensors: False)
        return found, code_heads(parts)


def check_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.widths(), other.widths())
        assert torch.equal(one.unit, other.unit)
        assert one.nbytes == other.nbytes
        assert one.counts == other.counts
        # Half a unit in the last place of float16, and what rounding turns over.
        assert torch.allclose(one.scales.float(), other.scales.float(), rtol=2e-3, atol=0)
        assert torch.allclose(one.means.float(), other.means.float(), rtol=2e-3, atol=1e-5)
        bits = [(a ^ b).count_nonzero() / max(a.numel(), 1) for a, b in zip(one.planes, other.planes, strict=True)]
        assert max(bits) < 2e-3


@pytest.mark.parametrize("team", [True, False])
@pytest.mark.parametrize("count", [96, 433, 1501])
@pytest.mark.parametrize("mean", [0.3, 2.0, 7.0])
def test_codes_are_those_of_the_steps(team, count, mean, monkeypatch):
    """For keys and values of different widths, in numbers that fill no block, in torch's threads and in ours."""
    if not team:
        monkeypatch.setattr(threads, "torch_team", lambda: None)
    parts = [stored(count, (3, 64), mean, 1), stored(count, (3, 18), mean, 2, encode=False)]
    check_same(*both(parts, monkeypatch))


@pytest.mark.parametrize("factor", [0.0, 1e-12, 1e-3, 1e6, 1e15])
def test_heads_beyond_float16_have_a_unit(factor, monkeypatch):
    """Among heads of ordinary size; a head of zeros, too, is coded."""
    part = stored(200, (3, 16), 2.0, 3)
    part.tensor[1] *= factor
    found, expected = both([part], monkeypatch)
    check_same(found, expected)
    assert (found[0].unit == 1).tolist() == [True, factor == 1e-3 and bool(expected[0].unit[1] == 1), True]
    assert found[0].decode().isfinite().all()


@pytest.mark.parametrize("mean", [0.3, 2.0, 7.0])
def test_codes_of_a_trellis_are_as_good_as_those_of_the_steps(mean, monkeypatch):
    """Rounding of a coordinate may change all codes after it, but not what they lose."""
    parts = [replace(stored(433, (3, 64), mean, 1), trellis=True)]
    (found,), (expected,) = both(parts, monkeypatch)
    assert found.trellis
    assert expected.trellis
    assert torch.equal(found.widths(), expected.widths())
    assert found.nbytes == expected.nbytes
    exact = parts[0].tensor.gather(1, parts[0].order[..., None].expand_as(parts[0].tensor)) @ parts[0].encode
    errors = [(each.decode() - exact).square().sum((1, 2)) for each in (found, expected)]
    torch.testing.assert_close(*errors, rtol=0.01, atol=0)


def test_equal_tokens_are_coded(monkeypatch):
    part = stored(200, (2, 16), 2.0, 4)
    part.tensor[:] = part.tensor[:, :1]
    found, expected = both([part], monkeypatch)
    for codes in (found[0], expected[0]):
        coordinates = (part.tensor @ part.encode).float()
        assert torch.allclose(codes.decode(), coordinates, rtol=2e-3, atol=1e-4)


def test_a_head_is_coded_as_it_is_alone():
    """Ranks of a tensor-parallel model have some of the heads each."""
    part = stored(500, (4, 32), 2.0, 5)
    half = replace(part, **{name: each[2:] for name, each in vars(part).items() if isinstance(each, torch.Tensor)})
    with always_compiled():
        (whole,), (alone,) = code_heads([part]), code_heads([half])
    assert torch.equal(whole.decode()[2:], alone.decode())


def test_only_large_heads_on_the_cpu_are_compiled(switch):
    large, small = (torch.zeros(2, count, 64) for count in (heads.HEAD_FROM // 64 + 1, 100))
    assert heads.is_compiled(large, large)
    assert not heads.is_compiled(large, small)
    assert not heads.is_compiled(large.half(), large)
    assert not heads.is_compiled(large.mT.contiguous().mT, large)
    assert not heads.is_compiled(large.to("meta"), large)
    switch("GRACE_OPT_LLVM", "0")
    assert not heads.is_compiled(large, large)
    loop = next(c for c in kernels.explain().choices if c.operation == "heads" and c.device == "cpu")
    assert "GRACE_OPT_LLVM=0" in loop.why
