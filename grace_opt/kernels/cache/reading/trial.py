"""Check that compiled loops agree with their references on a small case: outputs, numbers of tokens, and bounds."""

from __future__ import annotations

from typing import Any

import torch

from ..._shared.cases import draw
from . import host, reference, sampled, sampled_host
from .hashes import HashTables
from .pages import FirstChannels, PageRanges, PageScores
from .reference import Few
from .stored import Stored


def cpu() -> bool:
    """Compare pages and channels, with and without conditions to read on, and samples."""
    device = torch.device("cpu")
    query, keys = draw(device, 2, 6, 1, 20), draw(device, 2, 3, 301, 20) / 2
    sinks, tail = draw(device, 2, 3, 3, 20), draw(device, 2, 3, 17, 20)
    old, new = draw(device, 2, 3, 304, 12), draw(device, 2, 3, 17, 12)
    kept_indices = torch.arange(20, device=device).expand(2, 3, 20).contiguous()
    reach, channels = keys.abs().amax(2), FirstChannels.of(keys, torch.ones(2, 301, dtype=torch.bool, device=device), 7)
    whole = keys[:, :, 1:].reshape(2, 3, 75, 4, 20)
    lower, upper = (torch.cat([keys[:, :, :1], end], 2) for end in (whole.amin(3), whole.amax(3)))
    tokens_per_page = torch.full((2, 76), 4, dtype=torch.int32, device=device)
    tokens_per_page[:, 0] = 1
    pages = PageRanges(4, 1, lower, upper, tokens_per_page, reach)
    least = torch.tensor([20, 31], dtype=torch.int64, device=device)
    stored = Stored(keys, kept_indices, sinks, tail, old, new)
    cases: list[tuple[PageScores, dict[str, Any]]] = [
        (pages, {}), (channels, {}), (channels, {"top_p": 0.7}), (pages, {"epsilon": 0.3}), (channels, {"epsilon": 0.2})
    ]  # fmt: skip
    for scores, more in cases:
        actual = host.read_attention(query, stored, scores, least, 31, **more)
        expected = reference.attention(query, stored, scores, least, 31, **more)
        if not _agree(actual, expected):
            return False
    real = torch.arange(301, device=device) >= torch.tensor([[0], [100]], dtype=torch.int64, device=device)
    mask = torch.nn.functional.pad(real, (3, 17), value=True)[:, None, None]
    tables = HashTables.of(keys, real, 9, 5, 0.9, seed=0, layer=0)
    actual, expected = (attend(query, stored, tables, mask) for attend in (sampled_host.read_sample, sampled.attention))
    return _agree(actual, expected)


def _agree(actual: Few, expected: Few) -> bool:
    if not torch.equal(actual.tokens, expected.tokens):
        return False
    close = torch.allclose(actual.output, expected.output, rtol=0, atol=3e-5)  # of values near 4 at most
    return close and torch.allclose(actual.bound, expected.bound, rtol=2e-2, atol=1e-6)
