"""What was measured as Markdown: a table per attention function, batch and context, the paper's figures beside it.

Source: Table 4 of GRACE (arXiv 2604.16983), on one RTX 3090.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from bench.cost_model import si
from bench.efficiency.measure import MEASURED, WARM_UP, Row
from bench.efficiency.methods import METHODS

#: Time to first token and per token of Llama-3-8B, in seconds, by method and λ.
PAPER = {
    ("think", 0.5): (2.42, 0.07224),
    ("grace", 0.5): (2.73, 0.07166),
    ("think", 0.6): (2.33, 0.07209),
    ("grace", 0.6): (2.80, 0.07237),
}


def by_size(rows: Sequence[Row]) -> list[tuple[tuple[str, int, int], list[Row]]]:
    """Rows of the same attention, batch and context, together."""
    groups = itertools.groupby(rows, key=lambda row: (row.attention, row.batch, row.context))
    return [(size, list(of)) for size, of in groups]


def page(rows: Sequence[Row], about: Mapping[str, Any], floors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everything, as Markdown lines.

    Parameters
    ----------
    rows : sequence of Row
    about : mapping
        ``words``, ``shape``, ``device``, ``dtype``, ``threads``, ``rounds``, ``new_tokens`` and ``bandwidth``.
    floors : sequence of mapping
        As `bench.efficiency.plot.floors` gives them.
    """
    threads = about["threads"]
    where = f", {threads} thread{'s' * (threads > 1)}" if about["device"] == "cpu" else ""
    lines = [
        f"{about['words']}, {about['dtype']}, on {about['device_name']}{where}; medians of "
        f"{about['rounds']} interleaved rounds, {about['new_tokens']} new tokens, of which the first ends the TTFT and "
        f"the next {WARM_UP} are left out of the TPOT.",
        "",
    ]
    for (attention, batch, context), of_size in by_size(rows):
        lines += [f"**{context:,} tokens × {batch}**, {attention} attention.", ""]
        lines += table(of_size, paper=about["shape"] == "llama3-8b")
        least = [f for f in floors if (f["batch"], f["context"]) == (batch, context)]
        steps = ", ".join(f"{_name(f['ratio'])} {si(f['seconds'], 's')}" for f in least)
        lines += [f"Floor of a step, by its bytes at {si(about['bandwidth'], 'B/s')}: {steps}.", ""]
    return lines


def table(rows: Sequence[Row], paper: bool) -> list[str]:
    """One size's table.

    Parameters
    ----------
    rows : sequence of Row
    paper : bool
        Whether the paper measured this shape.
    """
    head = ["cache", "λ", "TTFT", "× dense", "selection", "TPOT", "× dense", "bytes", "× dense", "peak"]
    if paper:
        head += ["paper, RTX 3090: TTFT", "TPOT"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    dense = next((row for row in rows if row.method == "dense"), None)
    for row in rows:
        cells = [METHODS[row.method].title, "–" if row.ratio is None else f"{row.ratio:g}"]
        cells += _measured(row, dense) if row.status == MEASURED else [row.status.replace("|", "/"), *["–"] * 7]
        if paper:
            published = PAPER.get((row.method, row.ratio or 0.0), (None, None))
            cells += [_cell(value, "s") for value in published]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _measured(row: Row, dense: Row | None) -> list[str]:
    pairs = [
        (row.median("ttft_s"), dense and dense.median("ttft_s"), "s"),
        (row.median("tpot_s"), dense and dense.median("tpot_s"), "s"),
        (row.cache_bytes, dense and dense.cache_bytes, "B"),
    ]
    cells = [[_cell(value, unit), f"{value / of:.2f}" if value and of else "–"] for value, of, unit in pairs]
    chosen, first = row.median("selection_s"), row.median("ttft_s")
    cells[0].append(f"{chosen / first:.1%}" if chosen is not None and first else "–")
    return [*itertools.chain(*cells), _cell(row.peak_bytes, "B")]


def _cell(value: float | None, unit: str) -> str:
    return "–" if value is None else si(value, unit)


def _name(ratio: float | None) -> str:
    return "dense" if ratio is None else f"λ = {ratio:g}"
