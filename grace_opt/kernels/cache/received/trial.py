"""Check that compiled sums of attention agree with the reference on a small case."""

from __future__ import annotations

import torch

from ..._shared.cases import draw
from . import reference


def cpu() -> bool:
    """Compare both sums for two heads, with numbers of queries and keys that fill no block."""
    from . import host

    device = torch.device("cpu")
    queries, keys, weights = draw(device, 2, 61, 20), draw(device, 2, 77, 20), draw(device, 61).abs()
    actual, expected = (
        host.attention_received(queries, weights, keys, 0.5),
        reference.attention_received(queries, weights, keys, 0.5, None, 2**20),
    )
    return all(torch.allclose(one, other, rtol=1e-4, atol=0) for one, other in zip(actual, expected, strict=True))
