"""Check that compiled steps equal the reference's, bit for bit, on a small case with levels that are not admissible."""

from __future__ import annotations

import torch

from .._shared.cases import draw
from . import reference


def cpu() -> bool:
    """Compare hulls, levels and prices of three instances with different budgets."""
    from . import cpu as compiled

    device = torch.device("cpu")
    losses = draw(device, 3, 41, 6).double().square()
    costs = (draw(device, 41, 6).double().abs() * 9).round().expand(3, -1, -1)
    admissible = draw(device, 3, 41, 6) > -1
    admissible[..., 0] = True
    least = costs.masked_fill(~admissible, torch.inf).amin(-1).sum(-1)
    limits = least + torch.tensor([0.0, 20.0, 150.0], dtype=torch.float64, device=device)
    case = losses, costs, admissible
    hulls = reference.lower_hulls(*case)
    expected = *hulls, *reference.within_budget(*case, limits, *hulls)
    actual = *compiled.lower_hulls(*case), *compiled.within_budget(*case, limits, *hulls)
    return all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
