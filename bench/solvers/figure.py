"""The picture of the solver report: how long proofs take, by solver, and how good heuristics are for their time.

When: `bench.solvers.report`. `dots` takes from the records what `draw` needs, so that the JSON file can hold it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.solvers.evidence import Evidence, seconds
from bench.solvers.suites import EXACT
from bench.solvers.tables import NAMES, OURS, PROVING, TITLES, Line
from grace_opt.sweep.plots import MARKERS, PALETTE

#: Solvers in the order of the legend.
ORDER = [NAMES[solver] for solver in (OURS, *EXACT)]


def dots(evidence: Evidence) -> list[Line]:
    """The seconds of each exact solver on each group of instances, apart for proved and unproved.

    Parameters
    ----------
    evidence : Evidence
    """
    found: list[Line] = []
    for suite in PROVING:
        for n in sorted({row["n"] for row in evidence.of_method(suite, OURS)}):
            for solver in (OURS, *EXACT):
                rows = [row for row in evidence.of_method(suite, solver) if row["n"] == n]
                line: Line = {"instances": TITLES[suite], "n": n, "solver": NAMES[solver]}
                for name, done in (("proved", True), ("unproved", False)):
                    times = [seconds(row) for row in rows if (row["status"] == "proved") == done]
                    line[name] = [took for took in times if math.isfinite(took)]
                if rows:
                    found.append(line)
    return found


def draw(figure: Any, value: Mapping[str, Any]) -> None:
    """Draw both panels.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    value : mapping
        With the "dots" and the table "heuristics" of the JSON file.
    """
    figure.set_size_inches(11, 4.6)
    proofs, quality = figure.subplots(1, 2, width_ratios=(1.5, 1))
    _proofs(value["dots"], proofs)
    _quality(value["heuristics"], quality)


def _proofs(lines: Sequence[Line], ax: Any) -> None:
    """A dot for each instance, by suite and solver; hollow where the time ran out without a proof."""
    groups = list(dict.fromkeys((line["instances"], line["n"]) for line in lines))
    solvers = [solver for solver in ORDER if any(line["solver"] == solver for line in lines)]
    for at, solver in enumerate(solvers):
        colour, marker = PALETTE[at % len(PALETTE)], MARKERS[at % len(MARKERS)]
        style = {"marker": marker, "s": 22, "linewidths": 0.9, "alpha": 0.75}
        shift = (at - (len(solvers) - 1) / 2) * 0.8 / len(solvers)
        for name, look in (("proved", {"color": colour}), ("unproved", {"facecolors": "none", "edgecolors": colour})):
            x: list[float] = []
            y: list[float] = []
            for line in lines:
                if line["solver"] == solver:
                    x += line[name]
                    y += [groups.index((line["instances"], line["n"])) + shift] * len(line[name])
            ax.scatter(x, y, label=solver if name == "proved" else None, **style, **look)
    ax.set_xscale("log")
    ax.set_yticks(range(len(groups)), [f"{title}\nn = {n}" for title, n in groups], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("seconds, one thread")
    ax.set_title("Proving the optimum (hollow: not proved when time ran out)", fontsize=10)
    ax.grid(visible=False, axis="y")
    for place in range(1, len(groups)):
        ax.axhline(place - 0.5, color="0.8", linewidth=0.8)
    if solvers:  # outside, where it hides no dot
        ax.get_figure().legend(fontsize=8, loc="outside lower left", ncols=len(solvers))


def _quality(lines: Sequence[Line], ax: Any) -> None:
    """A dot for each heuristic: how often optimal, and milliseconds for each head."""
    for at, line in enumerate(lines):
        good, all_of_them = map(int, line["optimal"].split("/"))
        x, y = line["ms per instance"], 100 * good / all_of_them
        colour, marker = PALETTE[at % len(PALETTE)], MARKERS[at % len(MARKERS)]
        ax.scatter([x], [y], color=colour, marker=marker, s=40, label=line["method"])
    if lines:
        ax.set_xscale("log")
        ax.set_ylim(-4, 108)
        ax.margins(x=0.25)
        ax.legend(fontsize=8)  # several are alike: names beside their dots would lie on one another
    else:
        ax.text(0.5, 0.5, "not measured", ha="center", transform=ax.transAxes)
    ax.set_xlabel("milliseconds for each head, all in one call")
    ax.set_ylabel("optimal (%)")
    ax.set_title("Heuristics on the heads of a real model", fontsize=10)
