"""What is measured once for a model: `masks` of channels, a `basis` for bits, `budgets` of layers and heads."""

from ..bases.calibrate import basis
from .head_budgets import budgets
from .static_masks import masks

__all__ = ["basis", "budgets", "masks"]
