"""What was asked of `bits=`: its KL as a share of others', and limits for it; and what was measured.

When: a table of the page.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from bench.arena.measure import DENSE
from bench.arena.numbers import BOTH, best, interval, names, nearest, ratio, told
from bench.report import small, table
from grace_opt.sweep import Interval

TURBO = "TurboQuant"
#: Ours, the name of a function that finds the other one, what it is given, and the largest ratio.
RATIOS: tuple[tuple[str, str, Callable[[dict[str, Any], str], str | None], float], ...] = (
    ("bits-3", f"{TURBO} at 3.25", lambda v, part: nearest(v, part, TURBO, 3.25), 0.15),
    ("bits-3", "the best int4 at 5", lambda v, part: _best_int4(v, part), 1.0),
    ("bits-2.25", "the best of others at 2.25 to 3", lambda v, part: best(v, part, 2.2, 3.05), 0.06),
    ("bits-2.25", f"{TURBO} at 4.25", lambda v, part: nearest(v, part, TURBO, 4.25), 1.3),
    ("bits-2", f"{TURBO} at 4.25", lambda v, part: nearest(v, part, TURBO, 4.25), 2.0),
    ("bits-1", "GRACE, λ = 0.5", lambda v, part: "grace-0.5" if "grace-0.5" in names(v, part) else None, 1.0),
)
#: Largest mean KL, on short passages and on long ones.
LIMITS: dict[str, tuple[float, float | None]] = {
    "bits-3": (0.0010, 0.0004),
    "bits-2.25": (0.0028, 0.0010),
    "bits-2": (0.0040, 0.0014),
    "bits-1.5": (0.010, None),
    "bits-1": (0.020, 0.008),
}
#: Passages, and their halves: one that is reported, or both.
COLUMNS: tuple[tuple[str, str | None], ...] = (("passages", None), ("passages", BOTH), ("long", None))


def goals(value: dict[str, Any]) -> list[str]:
    """Markdown lines: ratios, limits, hidden words and answers, each with what was asked."""
    rows = []
    for name, words, find, most in RATIOS:
        cells = []
        for part, half in COLUMNS:
            other = find(value, part) if name in names(value, part) else None
            found = ratio(value, part, name, other, half) if other else None
            asked = most if part == "passages" else None
            cells.append(_told(found, asked, ".3f", _who(value, other)) if found else "–")
        if set(cells) != {"–"}:
            rows.append([f"`bits={name.removeprefix('bits-')}`: KL as a share of that of {words}", f"{most:g}", *cells])
    for name, limits in LIMITS.items():
        cells = [
            _told(interval(value, part, name, "kl", half), limit, ".4f") if name in names(value, part) else "–"
            for (part, half), limit in zip(COLUMNS, (limits[0], *limits), strict=True)
        ]
        if set(cells) != {"–"}:
            asked = f"{limits[0]:g}" + ("" if limits[1] is None else f"; {limits[1]:g}")
            rows.append([f"`bits={name.removeprefix('bits-')}`: KL", asked, *cells])
    short = f"{value['tokens']:,} tokens"
    long = f"{value['long_tokens']:,} tokens" if value["long"] else "longer"
    lines = table(["", "at most", f"{short}, half {told(value, 'passages')}", "both halves", long], rows)
    return [
        "**What was asked, and what was found.** ✓ is within what was asked, ✗ is not; shares are ratios of means over "
        "passages, with 95 % intervals, paired; settings were chosen on half A. Peers are our implementations of them.",
        "",
        *(lines if rows else ["Nothing of it was measured."]),
        *_asked_later(value),
        "",
    ]


def _asked_later(value: dict[str, Any]) -> list[str]:
    """Return a line each on hidden words and on answers."""
    found = []
    cases = [one["rows"] for one in value["cases"] if "bits-2" in one["rows"]]
    if cases:
        dense = sum(case[DENSE]["exact"] for case in cases)
        kept = sum(case["bits-2"]["exact"] and case[DENSE]["exact"] for case in cases)
        over = statistics.fmean(case["bits-2"]["nll"] - case[DENSE]["nll"] for case in cases)
        found.append(
            f"- Hidden words at 2 bits: {kept} of the dense cache's {dense} (asked: 98 %) {_mark(kept >= 0.98 * dense)}"
            f", NLL {over:+.3f} over dense (asked: at most 0.3) {_mark(over <= 0.3)}."
        )
    asked = [one["rows"] for one in value["chat"] if {"bits-2.25", "int4"} <= set(one["rows"])]
    if asked:
        ours, four = (sum(one[name]["right"] for one in asked) for name in ("bits-2.25", "int4"))
        found.append(
            f"- Answers at 2.25 bits: {ours} of {len(asked)}, int4 {four} (asked: no fewer) {_mark(ours >= four)}."
        )
    return found


def _best_int4(value: dict[str, Any], part: str) -> str | None:
    return best(value, part, 4.9, 5.1)


def _who(value: dict[str, Any], name: str) -> str:
    return f", {value['methods'][name]['title']}"


def _told(found: Interval, most: float | None, form: str, who: str = "") -> str:
    ends = "" if found.n < 2 else f"[{found.low:{form}}, {found.high:{form}}]"  # a single passage shows no spread
    mark = "" if most is None else f" {_mark(found.estimate <= most)}"
    return f"{found.estimate:{form}}{mark} {small((ends + who).removeprefix(', '))}"


def _mark(met: bool) -> str:
    return "✓" if met else "✗"
