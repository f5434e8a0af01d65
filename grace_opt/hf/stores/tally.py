"""What was read, and what the unread tokens' attention could have been at most: `ReadTally` and `ReadReport`.

When: every step adds to its layer's tally, without waiting for the device; `grace_opt.hf.CompressedCache.read_report`
adds up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Steps whose numbers are kept apart before they are added up.
STEPS_KEPT = 64


@dataclass(frozen=True)
class LayerReading:
    """One layer's steps.

    Attributes
    ----------
    layer : int
        Its position in the model.
    steps : int
        New tokens whose attention read few tokens, candidates that were dropped again among them; those of the prompt,
        and more than 32 at once, are not counted. A cache that was loaded begins at 0.
    share : float
        Mean share of the stored tokens that was read, over steps, sequences and KV heads; 1 without steps.
    bound_mean, bound_max : float
        Mean and maximum, over steps, sequences and query heads, of the bound on the share of the attention that was on
        unread tokens; 0 without steps.
    """

    layer: int
    steps: int
    share: float
    bound_mean: float
    bound_max: float

    @staticmethod
    def of_all(layer: int) -> LayerReading:
        """Return that of a layer that reads all."""
        return LayerReading(layer, 0, 1.0, 0.0, 0.0)


@dataclass(frozen=True)
class ReadReport:
    """What all layers read that keep all tokens; those with sliding windows have few, and are not counted.

    Attributes
    ----------
    layers : tuple of LayerReading
        One for each, in the model's order, those that ``dense_layers=`` leaves dense among them.
    confidence : float, optional
        With ``by="sampling"``: the probability with which each single bound holds. Of the largest of many bounds, it
        says nothing. None: all hold for certain.
    """

    layers: tuple[LayerReading, ...]
    confidence: float | None = None

    @property
    def steps(self) -> int:
        """Steps, in the layer that has most."""
        return max((each.steps for each in self.layers), default=0)

    @property
    def share(self) -> float:
        """Mean share of the stored tokens that was read, over all layers: those with ``dense_layers=`` read all."""
        return _mean([each.share for each in self.layers], 1.0)

    @property
    def bound_mean(self) -> float:
        """Mean bound on the share of the attention that was on unread tokens."""
        return _mean([each.bound_mean for each in self.layers], 0.0)

    @property
    def bound_max(self) -> float:
        """The largest of these bounds."""
        return max((each.bound_max for each in self.layers), default=0.0)

    def __str__(self) -> str:
        if not self.steps:
            return "no step has read few tokens yet"
        lines = [
            f"{self.steps} steps read {self.share:.1%} of the stored tokens; what they left had at most "
            f"{self.bound_mean:.3g} of the attention on average, {self.bound_max:.3g} at worst"
            f"{at_confidence(self.confidence)}"
        ]
        lines += [
            f"  layer {each.layer}: {each.share:.1%} read, at most {each.bound_mean:.3g} unread, {each.bound_max:.3g} "
            "at worst"
            for each in self.layers
        ]
        return "\n".join(lines)


def at_confidence(confidence: float | None) -> str:
    """Return what to say of bounds that hold with a probability; nothing of those that are certain.

    Examples
    --------
    >>> at_confidence(0.95)
    ', each bound at 95 % confidence'
    """
    return "" if confidence is None else f", each bound at {100 * confidence:.12g} % confidence"


def _mean(found: list[float], otherwise: float) -> float:
    return sum(found) / len(found) if found else otherwise


@dataclass
class ReadTally:
    """Adds up one layer's steps, on their device."""

    steps: int = 0
    _waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _sums: Tensor | None = None

    def add(self, shares: Tensor, bounds: Tensor) -> None:
        """Take in a new token: the shares read, of each KV head, and the bounds, of each query head."""
        self.steps += 1
        self._waiting.append((shares, bounds))
        if len(self._waiting) >= STEPS_KEPT:
            self._add_up()

    def _add_up(self) -> None:
        rows = [
            torch.stack([shares.double().mean(), bounds.double().mean(), bounds.double().max()])
            for shares, bounds in self._waiting
        ]
        if self._sums is not None:
            rows.append(self._sums.to(rows[0].device))
        table = torch.stack(rows)
        self._sums = torch.cat([table[:, :2].sum(0), table[:, 2:].amax(0)])
        self._waiting = []

    def reading(self, layer: int) -> LayerReading:
        """Return the numbers so far; waits for the device."""
        if self._waiting:
            self._add_up()
        if self._sums is None:
            return LayerReading.of_all(layer)
        share, mean, most = self._sums.tolist()
        return LayerReading(layer, self.steps, share / self.steps, mean / self.steps, most)
