"""A model decodes from a coded cache by the GPU's kernel as it does from dense copies; without a GPU, Triton's
interpreter runs it.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from grace_opt.hf import CompressedCache
from grace_opt.hf.settings.bits import TAIL_BLOCK_WITH_BITS
from grace_opt.hf.stores.coded import waiting as waits
from grace_opt.kernels.cache import coded as kernels
from grace_opt.kernels.cache.coded import gpu
from tests import interpreter  # noqa: F401  (cheaper launches)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not gpu._INTERPRETED, reason="triton was imported before TRITON_INTERPRET=1 was set"
)
LENGTH = 130


@pytest.mark.slow
def test_decoding_by_the_kernel_is_decoding_from_dense_copies(tiny, monkeypatch):
    """With padding, bases of the prompt, a block that waits and blocks that have classes; one new token, and four."""
    monkeypatch.setattr(waits, "SETTLED", 2 * TAIL_BLOCK_WITH_BITS)
    monkeypatch.setattr(waits, "NEWEST", 0)
    model, generator = tiny(max_position_embeddings=1024).to(DEVICE), torch.Generator().manual_seed(1)
    before, length = LENGTH + 7 * 32, LENGTH + 7 * 32 + 4
    ids = torch.randint(3, 97, (2, length), generator=generator).to(DEVICE)
    seen = torch.ones_like(ids)
    seen[0, :20] = 0
    calls = []

    def feed(cache, start, stop, kernel=None):
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(kernels, "kernel_for", lambda *given: (calls.append(kernel), kernel)[1])
            return model(ids[:, start:stop], past_key_values=cache, attention_mask=seen[:, :stop]).logits

    cache = CompressedCache(model, bits=6, basis="none")
    feed(cache, 0, LENGTH)
    for start in range(LENGTH, before, 32):
        feed(cache, start, start + 32)
    row = cache.layers[0].compressed.rows[0]
    assert (len(row.segments), row.waits) == (2, TAIL_BLOCK_WITH_BITS)
    for stop in (before + 1, before + 4):
        first, second = copy.deepcopy(cache), copy.deepcopy(cache)
        found, expected = feed(first, before, stop, gpu.coded_attention), feed(second, before, stop)
        assert calls[-2 * len(cache.layers) :] == [gpu.coded_attention] * len(cache.layers) + [None] * len(cache.layers)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        for one, other in zip(first.layers, second.layers, strict=True):
            torch.testing.assert_close(
                one.compressed.received.sums, other.compressed.received.sums, rtol=1e-5, atol=1e-5
            )
