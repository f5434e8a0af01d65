"""The table of `tune`: a row for each setting, smallest first, with 95 % intervals below the numbers. Built on rich."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from rich.text import Text

from ...._util.terminal import FittingTable
from ....sweep import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .recommend import Recommendation
    from .rows import TuneRow

#: What the columns mean, printed below the table.
COLUMNS = (
    "Means over the windows, with 95 % bootstrap intervals. bits: per element of what is compressed, everything "
    "counted. bytes: of the whole cache after the context, as a share of a dense one in 16 bits. KL: divergence from "
    "the dense cache's next-token distributions, nats. same: share of positions at which the likeliest token stays the "
    "same. ΔNLL: how much less likely the text's own tokens get, nats. facts: hidden ones that are found, asked for "
    "after the cache was compressed. time: of a token, beside the dense cache's, in turns."
)


class Shown(Protocol):
    """What the table needs of a `TuneResult`."""

    @property
    def rows(self) -> tuple[TuneRow, ...]: ...
    @property
    def recommendation(self) -> Recommendation | None: ...
    @property
    def windows(self) -> Sequence[object]: ...


def table_of(result: Shown) -> FittingTable:
    """Return the table."""
    counted = max((row.windows for row in result.rows), default=0)
    windows = "1 window" if counted == 1 else f"{counted} windows"
    table = FittingTable(title=f"smaller caches, compared with the dense one on {windows}")
    table.add_column("setting", min_width=16)
    for name in ("bits", "bytes", "KL", "same", "ΔNLL", "facts", "time"):
        table.add_column(name, justify="right")
    found = result.recommendation
    chosen = found.row if found is not None and found.reached else None
    for row in sorted(result.rows, key=lambda one: one.share.estimate):
        style = "bold green" if row is chosen else ""
        table.add_row(
            Text(("→ " if row is chosen else "") + row.name, style),
            with_ends(row.bits, ".2f"),
            with_ends(row.share, ".1%"),
            with_ends(row.kl, ".4f"),
            with_ends(row.top1, ".1%"),
            with_ends(row.nll, "+.4f"),
            f"{row.found}/{row.asked}",
            "" if row.time is None else with_ends(row.time, ".2f"),
        )
    if result.rows:
        table.caption = f"The dense cache finds {result.rows[0].dense_found} of {result.rows[0].asked} facts."
    return table


def with_ends(found: Interval, form: str) -> str:
    """Return an estimate, and below it the ends of its interval, unless they look the same or there are none."""
    middle, low, high = (f"{value:{form}}" for value in (found.estimate, found.low, found.high))
    if not math.isfinite(found.low) or low == high:
        return middle
    return f"{middle}\n[{low}, {high}]"
