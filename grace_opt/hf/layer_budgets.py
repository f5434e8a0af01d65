"""`LayerBudgets`: an eviction whose budget is divided among the layers, by what the output loses with each.

When: layers differ. In SmolLM2, dropping the same tokens from one layer costs a hundred times as much as from another,
in every text (docs/results/layer_budgets.md). A layer evicts before the next one has been read, so how the budget is
divided cannot depend on the prompt: it comes from a calibration. The heads of a layer keep equally many tokens, as they
are stored in one tensor.

Source: PyramidKV (arXiv 2406.02069) for budgets that differ by layer, there by a fixed rule; `grace_opt.allocate`.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..allocation import allocate
from ..errors import OptionError
from .arguments import explains_arguments
from .layer_losses import LayerLosses
from .token_budget import Budget

#: No layer keeps less than this share of what each would keep if all kept equally many.
LEAST = 1 / 8
#: Number of different budgets that a layer may get, besides keeping all.
STEPS = 128


@explains_arguments({"eviction": "write evict=", "layer_losses": "write losses="})
@dataclass(frozen=True)
class LayerBudgets:
    """Divide an eviction's budget among the layers so that the model's output loses least, by measured losses.

    .. math:: \\min_n \\sum_l f_l(n_l) \\quad \\text{subject to} \\quad \\sum_l n_l \\le L \\, n

    with :math:`f_l` the loss if layer l alone keeps :math:`n_l` tokens, and n the budget of the eviction. Solved, up to
    a step, by `grace_opt.allocate`, once for each length of prompt; never worse than equal budgets.

    Attributes
    ----------
    evict : SnapKV, H2O, StreamingLLM or GraphEviction
        Chooses the tokens. Its budget is the mean over the layers.
    losses : LayerLosses
        From `calibrate_eviction`.

    Examples
    --------
    >>> from grace_opt.hf import SnapKV
    >>> losses = LayerLosses((0, 1), (0.25, 0.5), ((0.04, 0.01), (0.0004, 0.0001)))
    >>> evict = LayerBudgets(SnapKV(budget=0.25), losses)
    >>> [evict.tokens(layer, layers=2, length=1000) for layer in range(2)]
    [409, 90]
    """

    evict: Any  # a `Budget` that is a `TokenEviction`
    losses: LayerLosses

    def __post_init__(self) -> None:
        """Refuse evictions whose budget is not one for all layers."""
        check_divisible(self.evict, "LayerBudgets")
        if not isinstance(self.losses, LayerLosses):
            raise OptionError(
                f"LayerBudgets(losses={type(self.losses).__name__}): write losses=calibrate_eviction(model, "
                "tokenizer), or losses=LayerLosses.load(FILE)"
            )

    @property
    def queries_needed(self) -> int | None:
        """As many as the eviction needs."""
        return self.evict.queries_needed  # type: ignore[no-any-return]

    def tokens(self, layer: int, layers: int, length: int, *, least: int = 0, dense_layers: int = 0) -> int:
        """Return the budget of a layer, or all tokens if there are fewer; that of a layer not measured is the mean.

        Parameters
        ----------
        layer, layers, length
            As in `TokenEviction.tokens`.
        least : int
            Number of tokens that each layer keeps in any case.
        dense_layers : int
            Number of first layers that do not evict, and have no part of the budget.
        """
        mean: int = self.evict.count(length)
        if isinstance(self.evict.budget, float):
            mean = max(mean, min(least, length))
        evicting = self.losses.layers.index(layer) if layer in self.losses.layers else None
        if mean == length or evicting is None or layer < dense_layers:
            return mean
        return _divided(self, mean, length, min(max(least, self.evict.always), mean), dense_layers)[evicting]

    def keeping(self, budget: float) -> Any:
        """Return the eviction with another budget, such as a layer's number of tokens."""
        return dataclasses.replace(self.evict, budget=budget)

    def scores(self, *arguments: Any, **named: Any) -> Tensor:
        """Score by the eviction at its own budget; see `TokenEviction.scores`. The cache asks that of `keeping`."""
        return self.evict.scores(*arguments, **named)  # type: ignore[no-any-return]


def check_divisible(evict: object, call: str) -> None:
    """Raise OptionError unless an eviction has one budget for all layers, which can be replaced."""
    if not isinstance(evict, Budget) or type(evict).tokens is not Budget.tokens:
        raise OptionError(
            f"{call}(evict={evict!r}): write an object of SnapKV, H2O, StreamingLLM or GraphEviction, for instance "
            "GraphEviction(budget=0.25). PyramidKV divides its budget itself, and so may an eviction of your own"
        )


@functools.lru_cache(maxsize=64)
def _divided(budgets: LayerBudgets, mean: int, length: int, least: int, dense_layers: int) -> tuple[int, ...]:
    """Return how many tokens each measured layer keeps."""
    evicting = [layer >= dense_layers for layer in budgets.losses.layers]
    least = max(least, int(np.ceil(mean * LEAST)))
    levels = np.unique(np.append(np.geomspace(least, length, STEPS).round().astype(np.int64), (mean, length)))
    losses = budgets.losses.relative_curves(levels / length)[evicting]
    best = allocate(losses, levels, float(len(losses) * mean))
    divided = [int(levels[level]) for level in best.levels]
    if best.objective >= losses[:, levels == mean].sum():  # it may be off by a step
        divided = [mean] * len(losses)
    return (mean,) * (len(evicting) - len(divided)) + tuple(divided)
