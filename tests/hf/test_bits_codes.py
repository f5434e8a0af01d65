"""Bit planes and codes against plain loops: what is packed comes back, and numbers are at their nearest levels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grace_opt.hf.bases.codebooks import EVEN_WIDTH, WIDTHS, codebooks, distortions, gaussian_levels
from grace_opt.hf.stores.coded.bitplanes import append_bits, pack_bits, pack_codes, unpack_bits, unpack_codes
from grace_opt.hf.stores.coded.codes import Codes, Part, encode, fixed_bits, stacked
from grace_opt.kernels._shared.threads import always_compiled
from grace_opt.kernels.cache import coding
from tests import oracle

COUNTS = st.sampled_from([0, 1, 7, 8, 9, 16, 21])
LEVELS = {0: (0.0,), EVEN_WIDTH: tuple((code - 128) / 127 for code in range(256))} | {
    bits: gaussian_levels(bits) for bits in WIDTHS if bits not in (0, EVEN_WIDTH)
}


@st.composite
def packings(draw):
    """Widths, and codes that fit them."""
    widths = draw(st.lists(st.sampled_from(WIDTHS), max_size=6))
    count = draw(COUNTS)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = [random.integers(0, 2**bits, count) for bits in widths]
    return widths, np.array(codes, dtype=np.uint8).reshape(len(widths), count)


@pytest.mark.slow
@given(packings())
@settings(max_examples=150, deadline=None)
def test_planes_are_those_of_the_loops_and_hold_every_code(drawn):
    widths, codes = drawn
    wide, whole = torch.tensor(widths, dtype=torch.uint8), torch.from_numpy(codes)
    planes = pack_codes(whole, wide)
    assert planes.tolist() == oracle.bit_planes(codes.tolist(), widths)
    assert planes.shape == (sum(widths), -(-codes.shape[1] // 8))
    assert torch.equal(unpack_codes(planes, wide, codes.shape[1]), whole)


@given(st.lists(st.integers(0, 1), max_size=30), COUNTS)
@settings(max_examples=100, deadline=None)
def test_bits_appended_are_bits_packed_together(bits, count):
    bits, count = torch.tensor(bits, dtype=torch.uint8), min(count, len(bits))
    packed = pack_bits(bits)
    assert packed.tolist() == oracle.bit_planes([bits.tolist()], [1])[0]
    assert torch.equal(unpack_bits(packed, len(bits)), bits)
    assert torch.equal(append_bits(pack_bits(bits[:count]), count, bits[count:]), packed)


KINDS = {
    "ordinary": lambda x: x,
    "all equal": lambda x: x.mul_(0).add_(0.37),
    "all zero": lambda x: x.mul_(0),
    "zero channel": lambda x: x.mul_((torch.arange(x.shape[-1]) != 0).float()),
    "an outlier": lambda x: x.view(-1)[:1].mul_(1e4) if x.numel() else x,
    "far from zero": lambda x: x.add_(300),
    "loud": lambda x: x.mul_(1e4),
    "giant": lambda x: x.mul_(1e15),
    "gigantic": lambda x: x.mul_(1e30),
    "small": lambda x: x.mul_(1e-3),
    "tiny": lambda x: x.mul_(1e-12),
}


@st.composite
def tokens(draw, kinds=tuple(KINDS)):
    """Coordinates (H, T, d), the number of tokens of each class, and levels (C, H, d)."""
    counts = draw(st.lists(COUNTS, min_size=1, max_size=4).filter(sum))
    heads, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 5, 8, 12]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    found = torch.randn(heads, sum(counts), width, generator=generator)
    kind = draw(st.sampled_from(kinds))
    KINDS[kind](found)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    if dtype != torch.float16 or found.abs().max() < 6e4:
        found = found.to(dtype)
    levels = torch.randint(0, len(WIDTHS), (len(counts), heads, width), generator=generator)
    return found, tuple(counts), levels


def coded(coordinates, counts, levels):
    return encode([Part(coordinates, levels, coordinates.abs().amax((1, 2)))], counts)


def numbers_of(codes: Codes):
    """By the loops, from what is stored."""
    widths, planes = codes.widths().tolist(), [plane.tolist() for plane in codes.planes]
    stored = codes.means.tolist(), codes.scales.tolist(), codes.unit.tolist()
    return oracle.decoded(LEVELS, widths, *stored, planes, codes.counts)


def check_nearest(codes: Codes, coordinates, counts):
    """No level of a channel is nearer to a number than the one that was chosen, beyond rounding."""
    found, exact = codes.decode().double().numpy(), coordinates.double().numpy()
    widths, scales, unit = codes.widths(), iter(codes.scales.tolist()), codes.unit.tolist()
    starts = np.cumsum([0, *counts])
    for c, (first, last) in enumerate(itertools.pairwise(starts)):
        for h in range(widths.shape[1]):
            for i, bits in enumerate(widths[c, h].tolist()):
                scale = next(scales) if bits else 0.0
                levels = (np.array(LEVELS[bits]) * scale + float(codes.means[h, i])) * unit[h]
                best = np.abs(exact[h, first:last, i, None] - levels).min(-1, initial=np.inf)
                error = np.abs(exact[h, first:last, i] - found[h, first:last, i])
                assert (error <= best + 1e-5 * np.abs(exact[h]).max() + 1e-30).all()


@pytest.mark.slow
@given(tokens(), st.sampled_from([1, 60]))
@settings(max_examples=150, deadline=None)
def test_compiled_codes_are_the_reference_s(drawn, times):
    """Bit for bit; with many tokens too."""
    coordinates, counts, levels = drawn
    rows = coordinates.float().clamp(-6e4, 6e4).mT.flatten(0, 1).repeat(1, times)
    counts = tuple(count * times for count in counts)
    widths = torch.tensor(WIDTHS, dtype=torch.uint8)[levels].flatten(1)
    case = rows, rows.mean(1).half().float(), widths, counts, codebooks(rows.device)
    with always_compiled():
        scales, planes = coding.scaled_and_coded(*case)
    expected = coding.reference.scaled_and_coded(*case)
    assert torch.equal(scales, expected[0])
    assert [plane.tolist() for plane in planes] == [plane.tolist() for plane in expected[1]]


SHAPES = {
    "a Gaussian": lambda random, n: random.standard_normal(n),
    "heavy tails": lambda random, n: random.standard_t(3, n),
    "to one side": lambda random, n: random.lognormal(size=n),
    "an outlier": lambda random, n: np.append(random.standard_normal(n - 1), 30),
    "some outliers": lambda random, n: random.standard_normal(n) * np.where(np.arange(n) < 5, 8, 1),
}
#: What the sum of errors to the fourth may be beside the least that any scale has: of four rows, the middle one.
NEAR = {1: 1.1, 2: 1.1, 3: 1.3, 4: 1.7, 5: 2, 6: 2.5}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [64, 300, 1756])
@pytest.mark.parametrize("bits", NEAR)
def test_scales_have_nearly_the_least_error_to_the_fourth(shape, count, bits):
    """With the standard deviation times what suits squares, it is up to a million times as large."""
    random = np.random.default_rng([count, bits])
    rows = np.stack([SHAPES[shape](random, count) for _ in range(4)]).astype(np.float32)
    rows -= rows.mean(1, keepdims=True)
    books, widths = codebooks(torch.device("cpu")), torch.full((1, 4), bits, dtype=torch.uint8)
    found, _ = coding.reference.scaled_and_coded(torch.from_numpy(rows), torch.zeros(4), widths, [count], books)
    worse = [
        oracle.fourth_powers(row, LEVELS[bits], scale) / oracle.least_fourth_powers(row, LEVELS[bits])
        for row, scale in zip(rows, found[0].tolist(), strict=True)
    ]
    assert np.median(worse) < NEAR[bits], worse


@pytest.mark.slow
@given(tokens())
@settings(max_examples=200, deadline=None)
def test_codes_are_the_nearest_levels_and_decode_as_the_loops_do(drawn):
    coordinates, counts, levels = drawn
    codes = coded(coordinates, counts, levels)
    assert codes.counts == counts
    assert torch.equal(codes.widths(), torch.tensor(WIDTHS, dtype=torch.uint8)[levels])
    assert all(tensor.isfinite().all() for tensor in codes.tensors().values())
    found = codes.decode()
    assert found.shape == coordinates.shape
    assert found.isfinite().all()
    np.testing.assert_allclose(found, numbers_of(codes), rtol=1e-5, atol=1e-6 * float(coordinates.abs().max()))
    check_nearest(codes, coordinates, counts)


@given(tokens())
@settings(max_examples=100, deadline=None)
def test_stored_bytes_are_counted_exactly(drawn):
    coordinates, counts, levels = drawn
    codes = coded(coordinates, counts, levels)
    heads, _, width = coordinates.shape
    wide = torch.tensor(WIDTHS)[levels].flatten(1)
    planes = sum(int(each.sum()) * -(-count // 8) for each, count in zip(wide, counts, strict=True))
    index = 3 * -(-levels.numel() // 8)
    assert codes.nbytes == planes + index + 2 * heads * width + 2 * int((wide > 0).sum()) + 4 * heads
    assert codes.nbytes == sum(each.untyped_storage().nbytes() for each in codes.tensors().values())
    assert 8 * (codes.nbytes - planes - codes.scales.nbytes) <= heads * fixed_bits(1, len(counts), width)


@pytest.mark.slow
@given(tokens(), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_stacked_codes_are_those_of_each(drawn, seed):
    coordinates, counts, levels = drawn
    counts, levels = (sum(counts),), levels[:1]
    other = torch.randn(coordinates.shape, generator=torch.Generator().manual_seed(seed))
    one, two = coded(coordinates, counts, levels), coded(other, counts, levels.flip(1))
    both = stacked(one, two)
    assert torch.equal(both.decode(), torch.cat([one.decode(), two.decode()]))
    assert torch.equal(both.widths(), torch.cat([one.widths(), two.widths()], 1))
    assert 0 <= one.nbytes + two.nbytes - both.nbytes <= 3  # places of levels fill bytes together
    three = stacked(both, one)
    assert torch.equal(three.decode()[: len(both.means)], both.decode())
    assert torch.equal(three.decode()[len(both.means) :], one.decode())
    for heads, parts in (
        (0, (None, three)),
        (len(one.means), (one, stacked(two, one))),
        (len(both.means), (both, one)),
    ):
        for found, expected in zip(three.split(heads), parts, strict=True):
            if expected is None:
                assert not len(found.means)
            else:
                assert all(torch.equal(found.tensors()[name], each) for name, each in expected.tensors().items())
                assert found.nbytes == sum(each.untyped_storage().nbytes() for each in found.tensors().values())


@pytest.mark.parametrize("size", [1e-12, 3.0, 1e12])
def test_errors_on_a_gaussian_are_those_promised(size):
    """What the losses of the allocation are made of."""
    coordinates = torch.randn(2, 4000, 8, generator=torch.Generator().manual_seed(0)) + 2
    codes = coded(coordinates * size, (4000,), torch.arange(8).expand(1, 2, 8))
    error = (codes.decode() / size - coordinates).square().mean((0, 1))
    np.testing.assert_allclose(error, distortions(), rtol=0.2)


@pytest.mark.parametrize("change", ["nothing", "map", "taken apart"])
def test_codes_come_back_from_their_tensors(change):
    coordinates = torch.randn(2, 30, 5, generator=torch.Generator().manual_seed(1))
    codes = coded(coordinates, (8, 22), torch.randint(0, 8, (2, 2, 5), generator=torch.Generator().manual_seed(2)))
    again = {
        "nothing": lambda: codes,
        "map": lambda: codes.map(torch.clone),
        "taken apart": lambda: Codes.of(codes.tensors(), codes.counts),
    }[change]()
    assert torch.equal(again.decode(), codes.decode())
    assert again.nbytes == codes.nbytes
