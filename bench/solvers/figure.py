"""The picture of the solver report: how long proofs take, by solver, and how good heuristics are for their time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bench.solvers.evidence import Evidence, seconds
from bench.solvers.suites import EXACT
from bench.solvers.tables import NAMES, OURS, PROVING, TITLES, batches
from grace_opt._util.files import atomic_write
from grace_opt.sweep.plots import MARKERS, PALETTE


def draw(evidence: Evidence, path: Path) -> None:
    """Write the picture as PNG.

    Parameters
    ----------
    evidence : Evidence
    path : Path
        Of the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    proofs, quality = figure.subplots(1, 2, width_ratios=(1.5, 1))
    _proofs(evidence, proofs)
    _quality(evidence, quality)
    with atomic_write(path) as name:
        figure.savefig(name, dpi=130, format="png")


def _proofs(evidence: Evidence, ax: Any) -> None:
    """A dot for each instance, by suite and solver; hollow where the time ran out without a proof."""
    groups: list[tuple[str, int]] = []
    for suite in PROVING:
        groups += [(suite, n) for n in sorted({row["n"] for row in evidence.of_method(suite, OURS)})]
    solvers = [m for m in (OURS, *EXACT) if any(evidence.of_method(suite, m) for suite in PROVING)]
    for at, solver in enumerate(solvers):
        style = {"color": PALETTE[at % len(PALETTE)], "marker": MARKERS[at % len(MARKERS)], "s": 22, "linewidths": 0.9}
        for done in (True, False):
            x: list[float] = []
            y: list[float] = []
            for place, (suite, n) in enumerate(groups):
                rows = [
                    r for r in evidence.of_method(suite, solver) if r["n"] == n and (r["status"] == "proved") == done
                ]
                x += [took for took in map(seconds, rows) if math.isfinite(took)]
                y += [place + (at - (len(solvers) - 1) / 2) * 0.8 / len(solvers)] * (len(x) - len(y))
            face = {} if done else {"facecolors": "none", "edgecolors": style["color"]}
            kept = {name: value for name, value in style.items() if done or name != "color"}
            ax.scatter(x, y, label=NAMES[solver] if done else None, alpha=0.75, **kept, **face)
    ax.set_xscale("log")
    ax.set_yticks(range(len(groups)), [f"{TITLES[suite]}\nn = {n}" for suite, n in groups], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("seconds, one thread")
    ax.set_title("Proving the optimum (hollow: not proved when time ran out)", fontsize=10)
    ax.grid(axis="x", alpha=0.3)
    for place in range(1, len(groups)):
        ax.axhline(place - 0.5, color="0.8", linewidth=0.8)
    ax.get_figure().legend(fontsize=8, loc="outside lower left", ncols=len(solvers))  # there it hides no dot


def _quality(evidence: Evidence, ax: Any) -> None:
    """A dot for each heuristic: how often optimal, and milliseconds for each head."""
    lines = batches(evidence)
    for at, line in enumerate(lines):
        good, all_of_them = map(int, line["optimal"].split("/"))
        x, y = line["ms per instance"], 100 * good / all_of_them
        ax.scatter([x], [y], color=PALETTE[at % len(PALETTE)], marker=MARKERS[at % len(MARKERS)], s=40)
        left = at % 2 == 1 and len(lines) > 1  # neighbours are often alike: their names go to both sides
        ax.annotate(
            line["method"],
            (x, y),
            xytext=(-6 if left else 6, 4 if left else -9),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=8,
        )
    if lines:
        ax.set_xscale("log")
        ax.set_ylim(-4, 108)
        ax.margins(x=0.25)
    else:
        ax.text(0.5, 0.5, "not measured", ha="center", transform=ax.transAxes)
    ax.set_xlabel("milliseconds for each head, all in one call")
    ax.set_ylabel("optimal (%)")
    ax.set_title("Heuristics on the heads of a real model", fontsize=10)
    ax.grid(alpha=0.3)
