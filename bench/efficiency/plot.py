"""Time per token against context, with the floor that the cost model puts under a step.

When: after a run with several contexts. Bytes of a step are those of `bench.cost_model`, the bandwidth is measured as
there. Colours as in `bench.efficiency.methods`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.cache_bytes import ITEM
from bench.cost_model import PROBES, SINGLE, Model, decode, probes, timed
from bench.efficiency.measure import MEASURED, Row
from bench.efficiency.methods import METHODS


def bandwidth(sizes: Model, device: str, rounds: int = 7) -> float:
    """Bytes per second of a large copy, read and written."""
    copy = probes(sizes, 1, device)["copy"]
    return 2 * PROBES[device][2] * SINGLE / statistics.median(timed({"copy": copy}, device, rounds)["copy"])


def floors(sizes: Model, rows: Sequence[Row], item: int, rate: float) -> list[dict[str, Any]]:
    """What a dense and a pruned step take at least, by their bytes; no products counted.

    Parameters
    ----------
    sizes : Model
    rows : sequence of Row
        Of which batches, contexts and ratios.
    item : int
        Bytes of a number. The cost model's are 16-bit, and everything but the kept indices grows with them.
    rate : float
        Bytes per second.
    """
    found = []
    for batch, context in dict.fromkeys((row.batch, row.context) for row in rows):
        for ratio in (None, *dict.fromkeys(row.ratio for row in rows if row.ratio is not None)):
            seconds = decode(sizes, context, ratio, batch).bytes * item / ITEM / rate
            found.append({"batch": batch, "context": context, "ratio": ratio, "seconds": seconds})
    return found


def draw(figure: Any, rows: Sequence[Row], least: Sequence[Mapping[str, Any]], title: str) -> None:
    """A panel for each attention function, batch and λ.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    rows : sequence of Row
    least : sequence of mapping
        As `floors` gives them.
    title : str
    """
    figure.suptitle(title, fontsize=10)
    ratios: list[float | None] = list(dict.fromkeys(row.ratio for row in rows if row.ratio is not None)) or [None]
    sizes = list(dict.fromkeys((row.attention, row.batch) for row in rows))
    panels = [(*size, ratio) for size in sizes for ratio in ratios]
    columns = min(len(panels), 2)
    lines = math.ceil(len(panels) / columns)
    figure.set_size_inches(max(4.4 * columns, 7), 1.4 + 3.2 * lines)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.1)
    grid = figure.subplots(lines, columns, squeeze=False).flat
    legend: dict[str, Any] = {}
    for axes, (attention, batch, ratio) in zip(grid, panels, strict=False):
        inside = [r for r in rows if (r.attention, r.batch) == (attention, batch) and r.ratio in (None, ratio)]
        legend |= _methods(axes, [row for row in inside if row.status == MEASURED])
        legend |= _floors(axes, [f for f in least if f["batch"] == batch and f["ratio"] in (None, ratio)])
        axes.set_title(f"{attention}, batch {batch}" + (f", λ = {ratio:g}" if ratio else ""), fontsize=10)
        _scales(axes, sorted({row.context for row in inside}))
    for axes in [*grid][len(panels) :]:
        axes.set_axis_off()
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def _methods(axes: Any, rows: Sequence[Row]) -> dict[str, Any]:
    drawn = {}
    for name in dict.fromkeys(row.method for row in rows):
        method = METHODS[name]
        points = sorted((row.context, 1000 * (row.median("tpot_s") or 0)) for row in rows if row.method == name)
        colour, marker = method.look
        (drawn[method.title],) = axes.plot(
            *zip(*points, strict=True), color=colour, marker=marker, markersize=5, linewidth=1.4, alpha=0.9
        )
    return drawn


def _floors(axes: Any, least: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    drawn = {}
    for ratio in dict.fromkeys(f["ratio"] for f in least):
        points = sorted((f["context"], 1000 * f["seconds"]) for f in least if f["ratio"] == ratio)
        title, style = ("lower bound, dense", "--") if ratio is None else ("lower bound, pruned", ":")
        (drawn[title],) = axes.plot(
            *zip(*points, strict=True), color="0.45", linestyle=style, marker="_", linewidth=1.2
        )
    return drawn


def _scales(axes: Any, contexts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("ms per token (TPOT)")
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
