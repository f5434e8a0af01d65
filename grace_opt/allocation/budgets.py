"""`Budgets`: limits on the cost of disjoint parts of the groups, and where steps in order of price exhaust them.

Several such partitions are nested: each part of a finer one lies in one part of the next coarser one. Then the linear
relaxation is solved by cutting the steps at the limits of the finest partition first (`cut`), because the limits are
those of a polymatroid.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ProblemError
from .sums import exact_sum


@dataclass(frozen=True)
class Budgets:
    """One partition of the groups, with a limit for each part.

    Attributes
    ----------
    name : str
        The argument that it comes from, for messages.
    labels : Tensor (n,), int64
        The part of each group.
    limits : Tensor (B, P), float64
        Largest cost of each part; may be infinite.
    tables : tuple of (Tensor (p,), Tensor (p, g))
        Parts of similar size, and their groups; n where a part has fewer than g.
    """

    name: str
    labels: Tensor
    limits: Tensor
    tables: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, name: str, labels: Tensor, limits: Tensor) -> Budgets:
        """Tabulate the groups of each part."""
        n, count = len(labels), limits.shape[-1]
        sizes = torch.bincount(labels, minlength=count)
        groups = labels.argsort(stable=True)
        first = sizes.cumsum(0) - sizes
        tables, longest = [], 1
        # Sizes 1, 2, 3–4, 5–8, …: at most half of a table is padding, however uneven the parts.
        while longest < 2 * n:
            parts = ((sizes <= longest) & (2 * sizes > longest)).nonzero().flatten()
            if len(parts):
                place = torch.arange(int(sizes[parts].max()), device=labels.device).expand(len(parts), -1)
                inside = place < sizes[parts, None]
                members = groups[(first[parts, None] + place).clamp(max=n - 1)].masked_fill(~inside, n)
                tables.append((parts, members))
            longest *= 2
        return cls(name, labels, limits, tuple(tables))

    def totals(self, values: Tensor, rounded: bool = True) -> Tensor:
        """Sum of one value per group over each part, (B, n) to (B, P), exact up to the last digit.

        With ``rounded=False``, no addition is: any order will do.
        """
        totals, values = torch.zeros_like(self.limits), _with_padding(values)
        for parts, members in self.tables:
            of_parts = values[:, members]
            totals[:, parts] = exact_sum(of_parts) if rounded else of_parts.sum(-1)
        return totals

    def per_group(self, values: Tensor) -> Tensor:
        """The value of each group's part, (B, P) to (B, n)."""
        return values[:, self.labels]


def nested(families: Sequence[Budgets]) -> tuple[Budgets, ...]:
    """Order partitions from the finest to the coarsest, and raise ProblemError if one cuts through another."""
    ordered = tuple(sorted(families, key=lambda family: -len(set(family.labels.tolist()))))
    for fine, coarse in itertools.pairwise(ordered):
        first = parents(fine, coarse)
        stray = (first[fine.labels] != coarse.labels).nonzero().flatten()
        if len(stray):
            group = int(stray[0])
            part = int(fine.labels[group])
            raise ProblemError(
                f"part {part} of {fine.name} lies in several parts of {coarse.name} (group {group} in part "
                f"{int(coarse.labels[group])}, others in part {int(first[part])}): budgets that overlap without one "
                "containing the other are not supported. Give nested parts, such as heads within layers."
            )
    return ordered


def parents(fine: Budgets, coarse: Budgets) -> Tensor:
    """The part of `coarse` in which each part of `fine` lies: that of its first group (0 for a part without groups)."""
    n, count = len(fine.labels), fine.limits.shape[-1]
    first = torch.full((count,), n, dtype=torch.int64, device=fine.labels.device)
    first.scatter_reduce_(0, fine.labels, torch.arange(n, device=first.device), "amin")
    return torch.where(first < n, coarse.labels[first.clamp(max=n - 1)], 0)


def cut(
    family: Budgets, slope: Tensor, amount: Tensor, full: Tensor, room: Tensor, margin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Keep, in each part, the steps of steepest slope that the room holds.

    Parameters
    ----------
    family : Budgets
    slope : Tensor (B, n, S)
        Loss saved per unit of cost; not increasing within a group, 0 for no step. Ties go to the lowest index.
    amount : Tensor (B, n, S)
        Cost of each step.
    full : Tensor (B, n, S), bool
        Steps that no finer partition cut.
    room : Tensor (B, P)
        Cost that is left in each part.
    margin : Tensor (B, 1)
        How much each addition of costs is taken to be too small, or, if negative, too large, relative to the sum; 0
        if sums are not rounded.

    Returns
    -------
    amount : Tensor (B, n, S)
        What is kept of each step: all, nothing, or in each part at most one fraction.
    full : Tensor (B, n, S), bool
        Steps kept as a whole.
    price : Tensor (B, P)
        Slope of the first step that does not fit, 0 if all fit; halfway to the last step that does if it leaves no
        room. Any price between the two is then right, and there no group is undecided.
    """
    price, count = torch.zeros_like(room), slope.shape[-1]
    kept, whole = _with_padding(torch.zeros_like(amount)), _with_padding(torch.zeros_like(full))
    for parts, members in family.tables:
        shape = (len(slope), *members.shape, count)
        steep, order = _with_padding(slope)[:, members].flatten(-2).sort(dim=-1, descending=True, stable=True)
        size = _with_padding(amount)[:, members].flatten(-2).gather(-1, order)
        left = room[:, parts, None]
        end = size.cumsum(-1)
        additions = torch.arange(end.shape[-1], dtype=end.dtype, device=end.device)
        additions = torch.where(margin.unsqueeze(-1) < 0, end.shape[-1], additions)  # keeps sums increasing
        fits = end * (1.0 + margin.unsqueeze(-1) * additions) <= left
        rest = (left - (end - size)).clamp(min=0.0).minimum(size)
        price[:, parts] = _price(steep, size, fits, rest)
        for values, into in ((torch.where(fits, size, rest), kept), (fits, whole)):
            into[:, members] = torch.empty_like(values).scatter_(-1, order, values).reshape(shape)
    return kept[:, :-1], full & whole[:, :-1], price


def _price(steep: Tensor, size: Tensor, fits: Tensor, rest: Tensor) -> Tensor:
    """The price of each part, (B, p), from its steps in order."""
    if not steep.shape[-1]:
        return steep.new_zeros(steep.shape[:-1])
    inside, out = fits & (size > 0), ~fits & (size > 0)
    first = steep.masked_fill(~out, 0.0).amax(-1)
    last = steep.masked_fill(~inside, torch.inf).amin(-1)
    used_up = (first > 0) & last.isfinite() & (rest.masked_fill(~out, 0.0).amax(-1) == 0)
    return torch.where(used_up, 0.5 * (first + last), first)


def _with_padding(values: Tensor) -> Tensor:
    """Append a group of zeros, which stands for every padded place."""
    return torch.cat([values, torch.zeros_like(values[:, :1])], 1)
