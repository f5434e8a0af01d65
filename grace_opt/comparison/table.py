"""The table of a `Comparison`: one row per method, for the whole batch or for each of its first instances.

Built on rich.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._util.terminal import FittingTable

#: Number of instances of a batch that tables show one by one; JSON has all.
MAX_INSTANCES_SHOWN = 20


def comparison_table(
    rows: Sequence[Mapping[str, Any]],
    methods: Sequence[str],
    nodes: Sequence[int | None],
    notes: Sequence[str],
    *,
    per_instance: bool,
    maximize: bool,
) -> FittingTable:
    """The rows of `Comparison.rows` as a table; for a batch, one row per method unless `per_instance`.

    `nodes` are the totals of each method, if it counts nodes; `notes` end the caption.
    """
    size = len(rows) // len(methods) if methods else 0
    summed = size > 1 and not per_instance
    notes = [_gap_note(rows, size, maximize), *notes]
    if summed:
        notes.insert(
            0,
            f"{size} instances; best: number of them for which no method found a "
            f"{'larger' if maximize else 'smaller'} objective",
        )
    elif size > MAX_INSTANCES_SHOWN:
        notes.insert(0, f"{size} instances, the first {MAX_INSTANCES_SHOWN} shown")
    table = FittingTable(caption=". ".join(notes) + ".")
    has_nodes = any(count is not None for count in nodes)
    names = ("method", *(("mean objective", "best", "median gap", "worst gap") if summed else ("objective", "gap")))
    if size > 1 and not summed:
        names = (names[0], "instance", *names[1:])
    for name in (*names, "certified", "status", "time", *(["nodes"] if has_nodes else [])):
        table.add_column(name, justify="left" if name in ("method", "certified", "status") else "right")
    f = np.array([row["objective"] for row in rows]).reshape(len(methods), size)
    for at, method in enumerate(methods):
        mine = rows[at * size : (at + 1) * size]
        if summed:
            gaps = [row["gap"] for row in mine]
            best = int((f[at] == (f.max(0) if maximize else f.min(0))).sum())
            cells = [f"{f[at].mean():.9g}", f"{best}/{size}", _percent(float(np.median(gaps))), _percent(max(gaps))]
            counts = [sum(row[name] for row in mine) for name in ("contradicted", "optimal", "certified")]
            words = ("contradicted", "optimal", "bounded")
            statuses = Counter(row["status"] for row in mine)
            table.add_row(
                method,
                *cells,
                next((f"{count} {word}" for count, word in zip(counts, words, strict=True) if count), "no"),
                ", ".join(f"{count} {name}" for name, count in statuses.items()),
                f"{mine[0]['time']:.2g} s",
                *([_count(nodes[at])] if has_nodes else []),
            )
            continue
        for row in mine[:MAX_INSTANCES_SHOWN]:
            first = row["instance"] == 0
            table.add_row(
                method if first else "",
                *([str(row["instance"])] if size > 1 else []),
                *(f"{row['objective']:.9g}", _percent(row["gap"])),
                _certified(row),
                row["status"],
                f"{row['time']:.2g} s" if first else "",
                *([_count(row["nodes"])] if has_nodes else []),
            )
    return table


def _gap_note(rows: Sequence[Mapping[str, Any]], size: int, maximize: bool) -> str:
    kind = "upper" if maximize else "lower"
    if not any(row["certified"] for row in rows):
        return f"no {kind} bound: certify=True adds one"
    if size == 1:
        bound = rows[0]["best_bound"]
        return f"gap: to {bound:.9g}, the best {kind} bound of all methods"
    return f"gap: to the best {kind} bound that any method has for the instance"


def _certified(row: Mapping[str, Any]) -> str:
    """What the bounds say of an answer; a method with a wrong one has proved nothing."""
    return next((word for word in ("contradicted", "optimal") if row[word]), "bounded" if row["certified"] else "no")


def _percent(gap: float) -> str:
    return f"{gap:.3%}" if math.isfinite(gap) else "unknown"


def _count(number: float | None) -> str:
    return "" if number is None else f"{int(number):,}"
