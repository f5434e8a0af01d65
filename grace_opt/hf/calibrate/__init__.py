"""What is measured once for a model: `masks` of channels, a `basis` for bits and its `kl`, `budgets` of layers."""

from ..bases.calibrate import basis
from .head_budgets import budgets
from .measured_kl import kl
from .static_masks import masks

__all__ = ["basis", "budgets", "kl", "masks"]
