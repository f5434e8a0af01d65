"""`ReadIndex`: what a cache keeps beside its old tokens to find those that a step should read.

It is made from the stored keys alone, whenever they change: at the end of the prompt, when newer tokens join them, when
the cache is cropped, and when it is loaded. Pages are counted from the last old token backwards, and padding belongs to
none, so a padded row has the pages that it would have alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ....kernels.cache.reading import FirstChannels, HashTables, PageRanges, PageScores
from ...settings.reading import PAGES, SAMPLING, TopTokens

#: What a product of a share and a number of tokens may be off, in tokens.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class ReadIndex:
    """By what the old tokens are read.

    Attributes
    ----------
    reading : TopTokens
        How.
    lead : int or None
        With "channels": how many of the stored channels give scores, the first.
    padding : Tensor or None
        ``(B,)`` int32: how many of the first old tokens are padding; None for none.
    units : PageScores or HashTables
        Pages, or tokens; or what samples them.
    layer : int
        With "sampling": the layer's position in the model, as each has hyperplanes of its own.
    """

    reading: TopTokens
    lead: int | None
    padding: Tensor | None
    units: PageScores | HashTables
    layer: int = 0

    @staticmethod
    def of(reading: TopTokens, keys: Tensor, lead: int | None, padding: Tensor | None, layer: int = 0) -> ReadIndex:
        """Make it for the old tokens' keys ``(B, H, S_p, d')``, sinks not among them."""
        with torch.no_grad():
            places = torch.arange(keys.shape[2], device=keys.device)
            real = places >= (keys.new_zeros(len(keys)) if padding is None else padding)[:, None]
            if not keys.shape[2]:  # cropped to its sinks, a cache has nothing to find: as with one token of padding
                keys, real = functional.pad(keys, (0, 0, 0, 1)), functional.pad(real, (0, 1))
            if reading.by == SAMPLING:
                return ReadIndex(reading, None, padding, _sampler(reading, keys, real, layer), layer)
            if reading.by == PAGES:
                return ReadIndex(reading, None, padding, page_ranges(keys, real, reading.unit_size))
            assert lead is not None
            return ReadIndex(reading, lead, padding, FirstChannels.of(keys, real, lead))

    def remade(self, keys: Tensor) -> ReadIndex:
        """Return one for more or fewer keys; those that are padding stay the first."""
        padding = None if self.padding is None else self.padding.clamp(max=keys.shape[2])
        return ReadIndex.of(self.reading, keys, self.lead, padding, self.layer)

    def limits(self, old: int, dense: int) -> tuple[Any, ...]:
        """Return what says how much is read, behind `units`, for the kernel; nothing does for a sample."""
        if isinstance(self.units, HashTables):
            return ()
        return *self.least(old, dense), self.reading.epsilon, self.reading.top_p

    def least(self, old: int, dense: int) -> tuple[Tensor, int]:
        """Return how many units are read at least, ``(B,)``, and the largest of these numbers.

        Parameters
        ----------
        old, dense : int
            Number of old tokens, padding counted, and of those that are always read.
        """
        assert not isinstance(self.units, HashTables)
        units, share = self.units.count, self.reading.share
        most = least_units(units, self.units.size, share, old, dense)
        if self.padding is None:
            shape, device = self.units.tokens_per_page.shape[:1], self.units.tokens_per_page.device
            return torch.full(shape, most, dtype=torch.int64, device=device), most
        real = old - self.padding.double()  # in float64, where numbers of tokens are exact
        budget = (share * (real + dense) + _ROUNDING).floor() - dense
        whole = (budget / self.units.size).floor().clamp(min=1, max=units)
        return torch.where(budget >= real, units, whole).long(), most

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that have a row for each sequence, by name."""
        found = {name: part for name, part in vars(self.units).items() if isinstance(part, Tensor)}
        found.pop("planes", None)
        return found if self.padding is None else {**found, "padding": self.padding}

    def all_tensors(self) -> dict[str, Tensor]:
        """Return all tensors that are kept, by name."""
        return self.tensors() | ({"planes": self.units.planes} if isinstance(self.units, HashTables) else {})

    def changed(self, change: Callable[[Tensor], Tensor]) -> ReadIndex:
        """Return it with its tensors changed: moved, or some rows of them; hyperplanes stay where they are."""
        new = {name: change(part) for name, part in self.tensors().items()}
        padding = new.pop("padding", None)
        return replace(self, padding=padding, units=replace(self.units, **new))  # type: ignore[arg-type]


def least_units(units: int, size: int, share: float, old: int, dense: int) -> int:
    """Return how many of some units of a size are read at least where nothing is padding; `old`, `dense` as in
    `ReadIndex.least`."""
    tokens = math.floor(share * (old + dense) + _ROUNDING) - dense
    return units if tokens >= old else min(max(tokens // size, 1), units)


def page_ranges(keys: Tensor, real: Tensor, size: int) -> PageRanges:
    """Return the ranges of pages of keys ``(B, H, S, d)``, of which ``real`` (B, S) are no padding."""
    batch, _, count, width = keys.shape
    size = min(size, max(count, 1))  # one page, rather than room for tokens that do not exist
    pages = math.ceil(count / size)
    before = pages * size - count
    exists = functional.pad(real, (before, 0)).view(batch, 1, pages, size, 1)
    paged = functional.pad(keys, (0, 0, before, 0)).view(batch, -1, pages, size, width)
    lower = paged.masked_fill(~exists, torch.inf).amin(3)
    upper = paged.masked_fill(~exists, -torch.inf).amax(3)
    counts = exists[:, 0, :, :, 0].sum(-1)
    empty = (counts == 0)[:, None, :, None]
    lower, upper = lower.masked_fill(empty, 0.0), upper.masked_fill(empty, 0.0)
    reach = torch.maximum(lower.abs(), upper.abs()).amax(2)
    return PageRanges(size, size - before, lower, upper, counts.to(torch.int32), reach)


def _sampler(reading: TopTokens, keys: Tensor, real: Tensor, layer: int) -> HashTables:
    tables, bits, seed, confidence = reading.tables, reading.hash_bits, reading.seed, reading.confidence
    assert tables is not None
    assert bits is not None
    assert seed is not None
    assert confidence is not None
    return HashTables.of(keys, real, tables, bits, confidence, seed, layer)


def padding_of(valid: Tensor | None, positions: Tensor | None, old: int, sinks: int) -> Tensor | None:
    """Return how many of the first old tokens behind the sinks are padding, ``(B,)`` int32; None if nothing is.

    Parameters
    ----------
    valid : Tensor or None
        ``(B, S)`` bool, False at padding.
    positions : Tensor or None
        ``(B, 1 or H, n)``: which tokens are stored, in their order; None for the first `old`.
    old, sinks : int
        Number of tokens of the prompt before the recent window, and of sink tokens.
    """
    if valid is None:
        return None
    stored = valid[:, :old] if positions is None else valid[:, :old].gather(-1, positions[:, 0].long())
    return (stored[:, sinks:].cumsum(-1) == 0).sum(-1).to(torch.int32)


def all_channels(kept: Tensor, width: int) -> Tensor:
    """Return the kept channels ``(B, H, d')`` and behind them all others, ``(B, H, width)``, both ascending."""
    others = torch.ones(*kept.shape[:2], width, dtype=torch.uint8, device=kept.device).scatter_(-1, kept, 0)
    rest = others.argsort(dim=-1, descending=True, stable=True)[..., : width - kept.shape[-1]]
    return torch.cat([kept, rest], dim=-1)
