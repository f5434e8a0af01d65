"""Codes of a trellis against trying all of them; compiled ones against the definition; and what they gain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import trellis_levels
from grace_opt.hf.bases.codebooks import EVEN_WIDTH, WIDTHS, codebooks, distortions, trellis_codebook
from grace_opt.hf.stores.coded.bitplanes import unpack_codes
from grace_opt.hf.stores.coded.codes import Part, encode
from grace_opt.kernels._shared.threads import always_compiled
from grace_opt.kernels.cache import coding
from grace_opt.kernels.cache.coding import cpu, trellis
from tests import oracle

CPU = torch.device("cpu")
BOOK, OWN = trellis_codebook(CPU), [bits for bits in WIDTHS if 0 < bits < EVEN_WIDTH]


def numbers(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """What a row of codes stands for, by the oracle."""
    return BOOK[bits + 1].double()[oracle.read_of_trellis(codes.tolist())]


@given(st.lists(st.integers(0, 255), max_size=40))
def test_codes_are_read_as_the_oracle_reads_them(codes):
    given = torch.tensor(codes, dtype=torch.uint8)
    assert trellis.as_read(given % 128).tolist() == oracle.read_of_trellis([code % 128 for code in codes])
    both = torch.stack([given % 2, given % 4])
    assert [row.tolist() for row in trellis.as_read(both)] == [oracle.read_of_trellis(row.tolist()) for row in both]


@st.composite
def rows(draw):
    """A row, from ordinary to far beyond the levels, with ties; and its bits."""
    bits, count = draw(st.sampled_from([1, 1, 2])), draw(st.integers(0, 7))
    count = min(count, 10 // bits)
    kind = draw(st.sampled_from(["normal", "ties", "far", "levels"]))
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = seed.standard_normal(count)
    if kind == "ties":
        row = np.round(row)
    elif kind == "far":
        row *= 100
    elif kind == "levels":
        row = seed.choice(BOOK[bits + 1, : 2 << bits].numpy(), count)
    return row.astype(np.float32), bits


@settings(max_examples=80, deadline=None)
@given(rows())
def test_no_codes_have_a_smaller_error(drawn):
    """Viterbi's algorithm against trying every sequence of codes."""
    row, bits = drawn
    scaled, levels = torch.from_numpy(row)[None], BOOK[bits + 1]
    (codes,) = trellis.searched(scaled, levels[None], torch.tensor([bits]))
    error = float((scaled[0].double() - numbers(codes, bits)).square().sum())
    assert error == pytest.approx(oracle.least_of_trellis(row.tolist(), levels.tolist(), bits), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("giant", "within"), [(1, 1e-6), (1000, 1e-7)])
@pytest.mark.parametrize("bits", [1, 3])
def test_nor_of_long_rows(bits, giant, within):
    """Sums of many errors, some of them a million times as large as others, lose nothing to float32."""
    row = np.random.default_rng(bits).standard_normal(4000).astype(np.float32)
    row[[7, 8, 1000, 3990]] *= giant
    levels = BOOK[bits + 1].numpy()[: 2 << bits]
    (codes,) = trellis_levels.coded(row[None], levels, bits)
    error = float(np.square(row.astype(float) - levels[codes]).sum())
    assert error == pytest.approx(oracle.least_of_long_trellis(row, levels.astype(float), bits), rel=within)


def cases(counts, scale, seed):
    """Rows of every width in two classes, some constant, one with an outlier."""
    g = torch.Generator().manual_seed(seed)
    found = torch.randn(2 * len(WIDTHS), sum(counts), generator=g) * scale
    found[3] = 0
    found[-1:, :1] *= 1e3
    widths = torch.tensor(WIDTHS, dtype=torch.uint8).repeat(2)
    return found, found.mean(1).half().float(), torch.stack([widths, widths.roll(3)]), counts


@pytest.mark.parametrize("counts", [(1, 2), (0, 9), (7, 64), (300, 33)])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 4.0])
def test_compiled_codes_are_the_reference_s(counts, scale):
    """Bit for bit: scales, and planes."""
    case = *cases(counts, scale, sum(counts)), codebooks(CPU, trellis=True)
    with always_compiled():
        found = coding.scaled_and_coded(*case)
    expected = coding.reference.scaled_and_coded(*case)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


def test_without_the_instructions_codes_are_torch_s(monkeypatch, switch):
    case = *cases((40, 90), 1.0, 0), codebooks(CPU, trellis=True)
    squares = case[0][None], torch.rand(1, 130), (40, 90)
    expected = coding.reference.scaled_and_coded(*case), coding.reference.weighted_squares(*squares)
    monkeypatch.setattr(cpu, "call_with", lambda *arguments: pytest.fail("a compiled loop was called"))
    switch("GRACE_OPT_LLVM", "0")
    with always_compiled():
        (scales, planes), found = coding.scaled_and_coded(*case), coding.weighted_squares(*squares)
    assert all(map(torch.equal, (scales, *planes, *found), (expected[0][0], *expected[0][1], *expected[1])))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_among_equal_ones_compiled_codes_are_the_reference_s_too(bits):
    """Whole numbers lie between two levels of a subset, and on another."""
    levels = np.arange(2 << bits, dtype=np.float32)
    row = np.random.default_rng(bits).integers(-2, len(levels) + 2, 60).astype(np.float32)
    table = torch.from_numpy(np.pad(levels, (0, 256 - len(levels))))[None]
    codes = trellis.searched(torch.from_numpy(row)[None], table, torch.tensor([bits]))
    assert trellis_levels.coded(row[None], levels, bits).tolist() == trellis.as_read(codes).tolist()


def test_codes_of_eight_bits_know_no_trellis():
    given, means, widths, counts = cases((40, 90), 1.0, 0)
    found = [coding.reference.scaled_and_coded(given, means, widths, counts, codebooks(CPU, each)) for each in (0, 1)]
    for number, own in enumerate(widths):
        plain, trellis_coded = (unpack_codes(each[1][number], own, counts[number]) for each in found)
        assert torch.equal(plain[own == EVEN_WIDTH], trellis_coded[own == EVEN_WIDTH])
        assert torch.equal(found[0][0][number, own == EVEN_WIDTH], found[1][0][number, own == EVEN_WIDTH])
        assert not torch.equal(plain[own == 2], trellis_coded[own == 2])


@pytest.mark.parametrize("bits", OWN)
def test_errors_of_a_gaussian_are_those_said_and_less_than_without(bits):
    """Scales have the least sum of errors to the fourth, so that squared errors are a little larger than said."""
    found = torch.randn(1, 4000, 16, generator=torch.Generator().manual_seed(1))
    place = WIDTHS.index(bits)
    part = Part(found, torch.full((1, 1, 16), place), found.abs().amax((1, 2)))
    plain, trellis_coded = (encode([part], (4000,), each) for each in (False, True))
    assert plain.nbytes == trellis_coded.nbytes
    errors = [float((each.decode() - found).square().mean()) for each in (plain, trellis_coded)]
    assert 0.95 * distortions(trellis=True)[place] < errors[1] < 1.15 * distortions(trellis=True)[place]
    assert errors[1] < 0.83 * errors[0]


@pytest.mark.parametrize("bits", OWN)
def test_levels_are_at_rest_under_the_iteration_that_made_them(bits):
    """And symmetric, which in-place reading relies on."""
    levels = BOOK[bits + 1, : 2 << bits].numpy()
    assert np.array_equal(levels, -levels[::-1])
    assert (np.diff(levels) > 0).all()
    sample = np.random.default_rng(5).standard_normal((20, 4000), dtype=np.float32)
    moved = trellis_levels.fitted(sample, levels, bits)
    spread = np.sqrt(distortions(trellis=True)[WIDTHS.index(bits)])
    middle = slice(len(levels) // 8 or 1, -(len(levels) // 8 or 1))  # the outermost are the means of few numbers
    assert np.abs(moved - levels)[middle].max() < 0.25 * spread
