r"""What a step reads by: pages with their channels' ranges, or tokens with their first channels, or their ranges.

A *page* is what is read or skipped as a whole: some consecutive tokens, or a single one with its first channels. For
both kinds, `scores` says in which order, and `bounds` what the logits of a page's tokens can be at most, in exact
arithmetic on the stored numbers:

.. math:: \text{page } p: \quad u_p = \sum_c \max(q_c\,l_{pc},\; q_c\,h_{pc}), \qquad
   \text{token } t: \quad u_t = q_C a_t + |q_C|\, e + q_R \bar k_R + \lVert q_R \rVert\,\lVert k_{tR} - \bar k_R \rVert

with the least and largest numbers :math:`l, h` of a page's real tokens, or those that the high bits of a token's code
leave; :math:`C` the first channels, :math:`a_t` a copy of them in eight bits that is off by no more than :math:`e`,
:math:`R` the others and :math:`\bar k_R` a constant near their mean, by Cauchy and Schwarz.

Source: Quest (arXiv 2406.10774) for pages; Loki (arXiv 2406.02542) and SparQ (arXiv 2312.04985) for channels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Codes of a channel are padded to whole vectors of so many tokens.
PADDED_TO = 16


class Placed:
    """What the compiled loops read by address."""

    tokens_per_page: Tensor

    def summed(self, logits: Tensor) -> Tensor:
        """Return the logarithm of the sum over each page's tokens, if all have one of these logits ``(B, H, g, P)``."""
        return logits + self.tokens_per_page[:, None, None].to(logits.dtype).log()

    def __getstate__(self) -> dict[str, Any]:
        """Leave addresses out of copies."""
        return {**self.__dict__, "places": {}}


@dataclass(frozen=True)
class PageRanges(Placed):
    """Pages of the older tokens; all but the first page have `size` tokens.

    Attributes
    ----------
    size, first : int
        Tokens of a page, and of the first one, which may have fewer.
    lower, upper : Tensor
        ``(B, H, P, d')``, of the type of the keys: each channel's least and largest number of a page's real tokens;
        zeros where a page is padding.
    tokens_per_page : Tensor
        ``(B, P)`` int32: real tokens of a page.
    reach : Tensor
        ``(B, H, d')``: the largest absolute number of each channel.
    places : dict
        What the compiled loop keeps between steps.
    """

    size: int
    first: int
    lower: Tensor
    upper: Tensor
    tokens_per_page: Tensor
    reach: Tensor
    places: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def count(self) -> int:
        """Number of pages."""
        return self.lower.shape[2]

    def estimates(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return expected and largest logits ``(B, H, g, P)`` for scaled queries ``(B, H, g, d')`` and the stored
        keys, of pages or of tokens, and a rounding scale ``(B, H, g)``: no product's terms add up to more, in absolute
        value."""
        kind = query.dtype
        lower, upper = self.lower.to(kind).mT, self.upper.to(kind).mT
        bounds = query.clamp(min=0) @ upper + query.clamp(max=0) @ lower
        return bounds, bounds, (query.abs() * self.reach.to(kind)[:, :, None]).sum(-1)


@dataclass(frozen=True)
class FirstChannels(Placed):
    """Single tokens, whose first channels give scores: copies of these in eight bits, which take less time to read.

    Attributes
    ----------
    lead : int
        Number of these channels.
    codes : Tensor
        ``(B, H, lead, S_p and some)`` uint8, the tokens of a channel side by side.
    levels : Tensor
        ``(B, H, 3, lead)``, float32 or wider: a code's step in each channel, the number that code 0 stands for, and no
        less than what a code is off.
    norms : Tensor
        ``(B, H, S_p)``, float32 or wider: no less than the norm of the other channels' distance from `mean`.
    mean : Tensor
        ``(B, H, d' - lead)``, of the type of `norms`.
    tokens_per_page : Tensor
        ``(B, S_p)`` int32: 1 for real tokens, 0 for padding.
    reach, places
        As in `PageRanges`.
    """

    lead: int
    codes: Tensor
    levels: Tensor
    norms: Tensor
    mean: Tensor
    tokens_per_page: Tensor
    reach: Tensor
    places: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    size = first = 1

    @staticmethod
    def of(keys: Tensor, real: Tensor, lead: int) -> FirstChannels:
        """Return what finds the keys ``(B, H, S, d)`` of which ``real`` (B, S) are no padding."""
        wide = torch.promote_types(keys.dtype, torch.float32)
        shown = keys.masked_fill(~real[:, None, :, None], 0.0)
        rest = shown[..., lead:].double()
        mean = (rest.sum(2) / real.sum(-1).clamp(min=1)[:, None, None]).to(wide)
        # Rounded up: more than float64's rounding of the sum, and than the rounding to the type.
        norms = torch.linalg.vector_norm(rest - mean[:, :, None].double(), dim=-1)
        norms = _up(norms, wide).masked_fill(~real[:, None], 0.0)
        numbers, hidden = keys[..., :lead].to(wide).mT, ~real[:, None, None]
        none = hidden.all(-1, keepdim=True)  # a row of padding alone
        low = numbers.masked_fill(hidden, torch.inf).amin(-1, keepdim=True).masked_fill(none, 0.0)
        high = numbers.masked_fill(hidden, -torch.inf).amax(-1, keepdim=True).masked_fill(none, 0.0)
        step = (high / 255 - low / 255).clamp(min=torch.finfo(wide).tiny)
        codes = ((numbers - low) / step).round().clamp(0, 255).masked_fill(hidden, 0.0)
        off = (numbers.double() - (low.double() + step.double() * codes.double())).masked_fill(hidden, 0.0)
        off = off.abs().amax(-1)
        levels = torch.stack([step[..., 0], low[..., 0], _up(off, wide)], dim=2)
        padding = -(-keys.shape[2] // PADDED_TO) * PADDED_TO - keys.shape[2]
        codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, padding))
        return FirstChannels(lead, codes, levels, norms, mean, real.to(torch.int32), shown.abs().amax(2))

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.norms.shape[2]

    def estimates(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `PageRanges.estimates`."""
        kind = query.dtype
        step, low, off = (each[:, :, None] for each in self.levels.to(kind).unbind(2))  # (B, H, 1, lead)
        first, others = query[..., : self.lead], query[..., self.lead :]
        expected = (first * step) @ self.codes[..., : self.count].to(kind) + (first * low).sum(-1, keepdim=True)
        expected = expected + (others * self.mean.to(kind)[:, :, None]).sum(-1, keepdim=True)
        length, norms = torch.linalg.vector_norm(others, dim=-1), self.norms.to(kind)[:, :, None]
        bounds = expected + length[..., None] * norms + (first.abs() * off).sum(-1, keepdim=True)
        # Steps times codes may be twice as large as numbers, and have the other sign.
        terms = 4 * (query.abs() * self.reach.to(kind)[:, :, None]).sum(-1)
        return expected, bounds, terms + length * norms.amax(-1)


def _up(numbers: Tensor, kind: torch.dtype) -> Tensor:
    """Round float64 numbers that are not negative up to a type, by more than their own rounding."""
    return (numbers * (1 + 2 * torch.finfo(kind).eps) + torch.finfo(kind).tiny).to(kind)


#: What pages get their scores from: what a step reads by.
PageScores = PageRanges | FirstChannels
