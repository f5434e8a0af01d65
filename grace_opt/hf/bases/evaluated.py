"""Switch a model to evaluation for a block: no dropout, and every module's mode restored afterwards.

When: a model is read to learn from it, and may be in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and restore the mode of every module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
