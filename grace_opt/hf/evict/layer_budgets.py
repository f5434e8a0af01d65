"""`LayerBudgets`: an eviction whose budget is divided among layers and KV heads, by what the output loses with each.

When: layers differ, and so do their heads. In SmolLM2, dropping the same tokens from one layer costs a hundred times as
much as from another, in every text (docs/results/layer_budgets.md). A layer evicts before the next one has been read,
so how the budget is divided cannot depend on the prompt: it comes from a calibration.

Source: PyramidKV (arXiv 2406.02069) for budgets that differ by layer, there by a fixed rule; Ada-KV (arXiv 2407.11550)
for heads, there by a prompt's scores within a layer; `grace_opt.allocate`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ...allocation import allocate
from ...errors import OptionError
from ..models.arguments import explains_arguments
from .layer_losses import LayerLosses
from .token_budget import Budget

#: No layer, or head, keeps less than this share of what each would keep if all kept equally many.
LEAST = 1 / 8
#: Number of different budgets that a layer, or head, may get, besides keeping all.
STEPS = 128


@explains_arguments({"eviction": "write evict=", "layer_losses": "write losses="})
@dataclass(frozen=True)
class LayerBudgets:
    """Divide an eviction's budget among layers and heads so that the model's output loses least, by measured losses.

    .. math:: \\min_n \\sum_h f_h(n_h) \\quad \\text{subject to} \\quad \\sum_h n_h \\le H \\, n

    with :math:`f_h` the loss if head h of all H heads alone keeps :math:`n_h` tokens, and n the budget of the eviction.
    Solved, up to a step, by `grace_opt.allocate`, once for each length of prompt; never worse than equal budgets.

    Among the layers alone, whose heads then keep equally many, if the losses are those of layers, or where heads are
    stored together: with ``bits=``, ``read=`` and static masks.

    Attributes
    ----------
    evict : SnapKV, H2O, StreamingLLM or GraphEviction
        Chooses the tokens. Its budget is the mean over the heads of all layers.
    losses : LayerLosses
        From `calibrate.budgets`.

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
                f"LayerBudgets(losses={type(self.losses).__name__}): write losses=calibrate.budgets(model, "
                "tokenizer), or losses=LayerLosses.load(FILE)"
            )

    @property
    def queries_needed(self) -> int | None:
        """As many as the eviction needs."""
        return self.evict.queries_needed  # type: ignore[no-any-return]

    def tokens(self, layer: int, layers: int, length: int, *, least: int = 0, dense_layers: int = 0) -> int:
        """Return the budget of a layer whose heads keep equally many tokens; that of a layer not measured is the mean.

        Parameters
        ----------
        layer, layers, length
            As in `TokenEviction.tokens`.
        least : int
            Number of tokens that each layer keeps in any case.
        dense_layers : int
            Number of first layers that do not evict, and have no part of the budget.
        """
        mean = self._mean(length, least)
        if mean == length or layer not in self.losses.layers or layer < dense_layers:
            return mean
        least = max(least, self.evict.always)
        return _divided(self, mean, length, least, dense_layers)[self.losses.layers.index(layer)]

    def tokens_of_heads(
        self, layer: int, length: int, *, least: int = 0, dense_layers: int = 0, step: int = 1
    ) -> tuple[int, ...]:
        """Return the budgets of a layer's KV heads; none if the losses are those of whole layers.

        Parameters
        ----------
        layer, length, least, dense_layers
            As in `tokens`.
        step : int
            Budgets that differ from `length` do so by a multiple of this, or are all the mean.
        """
        count = self.losses.heads
        if not count or layer not in self.losses.layers or layer < dense_layers:
            return ()
        mean = self._mean(length, least)
        if mean == length:
            return (mean,) * count
        found = _divided(self, mean, length, max(least, self.evict.always), dense_layers, step)
        return found[count * self.losses.layers.index(layer) :][:count]

    def _mean(self, length: int, least: int) -> int:
        mean: int = self.evict.count(length)
        return max(mean, min(least, length)) if isinstance(self.evict.budget, float) else mean

    def keeping(self, budget: float) -> Any:
        """Return the eviction with another budget, such as a layer's number of tokens."""
        return dataclasses.replace(self.evict, budget=budget)

    def scores(self, *arguments: Any, **named: Any) -> Tensor:
        """Score by the eviction at its own budget; see `TokenEviction.scores`. The cache asks that of `keeping`."""
        return self.evict.scores(*arguments, **named)  # type: ignore[no-any-return]


def is_divisible(evict: object) -> bool:
    """Whether an eviction has one budget for all layers, which can be replaced."""
    return isinstance(evict, Budget) and type(evict).tokens is Budget.tokens


def check_divisible(evict: object, call: str) -> None:
    """Raise OptionError unless an eviction is divisible."""
    if not is_divisible(evict):
        raise OptionError(
            f"{call}(evict={evict!r}): write an object of SnapKV, H2O, StreamingLLM or GraphEviction, for instance "
            "GraphEviction(budget=0.25). PyramidKV divides its budget itself, and so may an eviction of your own"
        )


@functools.lru_cache(maxsize=64)
def _divided(
    budgets: LayerBudgets, mean: int, length: int, least: int, dense_layers: int, step: int | None = None
) -> tuple[int, ...]:
    """Return how many tokens each measured layer keeps; with a step, each of their heads, one layer after the other."""
    losses, least = budgets.losses, min(max(least, math.ceil(mean * LEAST)), mean)
    if step is None:
        losses = losses.of_layers()
    levels = np.append(np.geomspace(least, length, STEPS).round().astype(np.int64), mean)
    if step is not None:
        levels = length - (length - levels) // step * step  # never less than `least`
    levels = np.unique(levels)
    curves = losses.relative_curves(np.append(levels, mean) / length)
    evicting = np.array(losses.layers) >= dense_layers
    equal, curves = curves[evicting][..., -1].sum(), curves[evicting][..., :-1].reshape(-1, len(levels))
    divided = [mean] * len(curves)
    if levels[0] <= mean and np.any(losses.losses):  # nothing tells heads without any loss apart
        best = allocate(curves, levels, float(len(curves) * mean))
        if best.objective < equal:  # it may be off by a step
            divided = _spent([int(levels[level]) for level in best.levels], levels, len(curves) * mean)
    heads = 1 if step is None else losses.heads
    return (mean,) * (heads * int((~evicting).sum())) + tuple(divided)


def _spent(divided: list[int], levels: np.ndarray, budget: int) -> list[int]:
    """Give what no measured loss asks for to those that keep fewest: texts may come that were not calibrated on."""
    for place in sorted(range(len(divided)), key=divided.__getitem__):
        room = divided[place] + budget - sum(divided)
        divided[place] = max(divided[place], int(levels[levels <= room][-1]))
    return divided
