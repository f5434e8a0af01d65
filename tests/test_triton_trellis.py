"""Codes of a trellis by Triton, in its interpreter without a GPU: as small errors as those of the definition.

Rounding may lead another way where two are as good. The wrong versions at the end show that worse ones are noticed.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from triton import JITFunction

from grace_opt.hf.bases.codebooks import codebooks, trellis_codebook
from grace_opt.kernels._shared import dispatch
from grace_opt.kernels.cache import coding
from grace_opt.kernels.cache.coding import gpu, trellis
from tests import interpreter  # noqa: F401  (cheaper launches)
from tests.mutants import mutant

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and isinstance(gpu._search, JITFunction),
    reason="triton was imported before TRITON_INTERPRET=1 was set",
)


def excess(search, rows: int, count: int, kind: str = "normal") -> float:
    """By how much the sum of a row's squared errors is above that of the definition, at most, beside it."""
    scaled = torch.randn(rows, count, generator=torch.Generator().manual_seed(count)).to(DEVICE)
    scaled = {"normal": scaled, "ties": scaled.round(), "far": 50 * scaled}[kind]
    bits = torch.arange(rows, device=DEVICE) % 6 + 1
    levels = trellis_codebook(DEVICE)[bits + 1]
    every = []
    for each in (search, trellis.searched):
        codes = each(scaled, levels, bits)
        assert codes.shape == scaled.shape
        assert codes.dtype == torch.uint8
        every.append((scaled - levels.gather(1, trellis.as_read(codes).long())).double().square().sum(1))
    return float((every[0] / every[1] - 1).max()) if scaled.numel() else 0.0


@pytest.mark.parametrize("kind", ["normal", "ties", "far"])
def test_errors_are_those_of_the_definition(kind):
    assert excess(gpu.searched, 37, 23, kind) <= 1e-5


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (2, 3), (0, 9), (9, 0)])
def test_few_numbers(rows, count):
    assert excess(gpu.searched, rows, count) <= 1e-5


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the CPU cannot play the GPU beside one")
def test_it_codes_where_a_gpu_runs_it(monkeypatch):
    """Scales and planes too, up to rounding: of what they stand for, errors are compared above."""
    monkeypatch.setattr(dispatch, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(dispatch, "_verdicts", {(coding.KERNEL.name, DEVICE): True})
    monkeypatch.setattr(coding, "worth_compiling", lambda numbers: False)
    calls = []
    monkeypatch.setattr(gpu, "searched", lambda *given: calls.append(given) or trellis.searched(*given))
    rows = torch.randn(6, 30, generator=torch.Generator().manual_seed(0))
    widths = torch.tensor([[0, 1, 2, 3, 6, 8]], dtype=torch.uint8)
    for books, times in ((codebooks(DEVICE), 0), (codebooks(DEVICE, trellis=True), 1)):
        found = coding.scaled_and_coded(rows, rows.mean(1), widths, (30,), books)
        expected = coding.reference.scaled_and_coded(rows, rows.mean(1), widths, (30,), books)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1][0], expected[1][0])
        assert len(calls) == times


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type == "cuda", reason="compiled kernels remember what they call")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b5, w5 = _way(c2 + e0, c6 + e2)", "b5, w5 = _way(c2 + e2, c6 + e0)"),
        ("(w6 << 6)", "(w6 << 5)"),
        ("tl.where(c7 < least, 7, state)", "tl.where(c7 < least, 6, state)"),
        ("place * SUBSETS + 2", "place * SUBSETS + 1"),
        ("most // SUBSETS", "most // SUBSETS - 1"),
        ("= far, far, far", "= tl.zeros([ROWS], tl.float32), far, far"),
        ("b4 - b0, b5 - b0", "b4 - b0, b5"),
        ("((survivor >> state) & 1) << 2)", "((survivor >> state) & 1) << 1)"),
        ("places >> (2 * PLACE)", "places >> PLACE"),
        ("bit | (place << 1)", "place << 1"),
    ],
)
def test_a_wrong_version_would_be_noticed(old, new, tmp_path):
    wrong = mutant(gpu, old, new, tmp_path).searched
    assert max(excess(wrong, 12, 30), excess(wrong, 6, 5, "far")) > 1e-3
