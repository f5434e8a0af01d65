"""Check that Triton's W agrees with the float64 reference on a small case, padding included."""

from __future__ import annotations

import torch

from ..._shared.cases import draw
from . import reference


def gpu(device: torch.device) -> bool:
    """Compare W to 1e-5 of its largest entry, for float32 and for float16 inputs."""
    from . import gpu as on_chip

    queries, keys = draw(device, 2, 4, 70, 40), draw(device, 2, 2, 700, 40)
    valid = torch.arange(700, device=device).expand(2, -1) >= torch.tensor(
        [[0], [90]], dtype=torch.int64, device=device
    )
    good = True
    for dtype in (torch.float32, torch.float16):
        q, k = queries.to(dtype), keys.to(dtype)
        expected = reference.interaction_matrix(q.double(), k.double(), valid)
        actual = on_chip.interaction_matrix(q, k, valid)
        good &= bool(((actual - expected).abs().max() <= 1e-5 * expected.abs().max()).item())
    return good
