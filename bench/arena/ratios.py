"""Ours beside others: the KL of `bits=` as a share of that of each quantiser that one would compare it with.

When: a table of the page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.arena.numbers import BOTH, best, names, nearest, ratio, told
from bench.report import small, table

TURBO = "TurboQuant"
#: Ours, the name of what it is compared with, and a function that finds that.
RATIOS: tuple[tuple[str, str, Callable[[dict[str, Any], str], str | None]], ...] = (
    ("bits-3", f"{TURBO} at 3.25", lambda v, part: nearest(v, part, TURBO, 3.25)),
    ("bits-3", "the best int4 at 5", lambda v, part: best(v, part, 4.9, 5.1)),
    ("bits-2.25", "the best of others at 2.25 to 3", lambda v, part: best(v, part, 2.2, 3.05)),
    ("bits-2.25", f"{TURBO} at 4.25", lambda v, part: nearest(v, part, TURBO, 4.25)),
    ("bits-2", f"{TURBO} at 4.25", lambda v, part: nearest(v, part, TURBO, 4.25)),
    ("bits-1", "GRACE, λ = 0.5", lambda v, part: "grace-0.5" if "grace-0.5" in names(v, part) else None),
)
#: Passages, and their halves: one that is reported, or both.
COLUMNS: tuple[tuple[str, str | None], ...] = (("passages", None), ("passages", BOTH), ("long", None))


def ratios(value: dict[str, Any]) -> list[str]:
    """Markdown lines."""
    rows = []
    for name, words, find in RATIOS:
        cells = []
        for part, half in COLUMNS:
            other = find(value, part) if name in names(value, part) else None
            found = ratio(value, part, name, other, half) if other else None
            if found is None or other is None:
                cells.append("–")
                continue
            who = value["methods"][other]["title"]
            cells.append(f"{found.estimate:.3f} {small(f'[{found.low:.3f}, {found.high:.3f}]')} {small(who)}")
        if set(cells) != {"–"}:
            rows.append([f"`bits={name.removeprefix('bits-')}`, of {words}", *cells])
    if not rows:
        return []
    short, long = f"{value['tokens']:,} tokens", f"{value['long_tokens']:,} tokens"
    return [
        "**KL of ours as a share of that of others**: ratios of means over passages, with 95 % intervals, paired. "
        "Settings were chosen on half A. Peers are our implementations of them.",
        "",
        *table(["", f"{short}, half {told(value, 'passages')}", f"{short}, both halves", long], rows),
        "",
    ]
