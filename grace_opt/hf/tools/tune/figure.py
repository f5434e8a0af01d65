"""The picture of `tune`: KL against the share of the bytes, and the frontier: settings that none beats in both.

Built on matplotlib, in Okabe and Ito's colours, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from io import BytesIO
from typing import Any

from ...._util.files import write_file
from ...._util.optional import require
from ....errors import EvaluationError
from .candidates import FAMILIES
from .recommend import Recommendation, Target
from .rows import TuneRow

#: Colour and marker of each family.
LOOKS = dict(
    zip(
        FAMILIES,
        (("#E69F00", "s"), ("#0072B2", "o"), ("#56B4E9", "D"), ("#009E73", "^"), ("#CC79A7", "X")),
        strict=True,
    )
)
OTHER = ("#999999", "v")


def frontier(rows: Sequence[TuneRow]) -> list[TuneRow]:
    """Return the rows that no other beats in bytes and in KL, smallest first."""
    best, found = math.inf, []
    for row in sorted(rows, key=lambda one: (one.share.estimate, one.kl.estimate)):
        if row.kl.estimate < best:
            best = row.kl.estimate
            found.append(row)
    return found


def draw_frontier(figure: Any, rows: Sequence[TuneRow], target: Target, recommendation: Recommendation | None) -> None:
    """Draw on a matplotlib figure.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    rows : sequence of TuneRow
        At least one.
    target : Target
    recommendation : Recommendation or None
    """
    axes = figure.subplots()
    for family in dict.fromkeys(row.candidate.family for row in rows):
        colour, marker = LOOKS.get(family, OTHER)
        own = [row for row in rows if row.candidate.family == family]
        x, y = ([getattr(row, name).estimate for row in own] for name in ("share", "kl"))
        ends = [
            [max(row.kl.estimate - max(row.kl.low, 0.0), 0.0) if math.isfinite(row.kl.low) else 0.0 for row in own],
            [max(row.kl.high - row.kl.estimate, 0.0) if math.isfinite(row.kl.high) else 0.0 for row in own],
        ]
        axes.errorbar(
            [100 * share for share in x], y, yerr=ends, fmt=marker, color=colour, capsize=2, elinewidth=1, label=family
        )
    line = frontier(rows)
    axes.plot(
        [100 * row.share.estimate for row in line],
        [row.kl.estimate for row in line],
        color="0.6",
        linewidth=1,
        zorder=0,
    )
    for row in line:
        axes.annotate(
            row.name, (100 * row.share.estimate, row.kl.estimate), textcoords="offset points", xytext=(-5, -9),
            ha="right", fontsize=7, color="0.35",
        )  # fmt: skip
    if target.kind == "max_kl":
        axes.axhline(target.value, color="0.4", linestyle=":", linewidth=1, label=f"asked for: KL ≤ {target.value:g}")
    elif target.kind == "max_share":
        axes.axvline(
            100 * target.value, color="0.4", linestyle=":", linewidth=1, label=f"asked for: ≤ {target.value:.0%}"
        )
    if recommendation is not None and recommendation.reached:
        chosen = recommendation.row
        axes.plot(
            100 * chosen.share.estimate, chosen.kl.estimate, "o", markersize=15, fillstyle="none", color="black",
            label=f"recommended: {chosen.name}",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("bytes of the cache, % of a dense one in 16 bits")
    axes.set_ylabel("KL from the dense cache's next tokens, nats")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, labelspacing=0.9)


def save_frontier(
    rows: Sequence[TuneRow], target: Target, recommendation: Recommendation | None, path: str | os.PathLike[str]
) -> None:
    """Write the picture as PNG, atomically."""
    if not rows:
        raise EvaluationError("nothing was measured, so there is nothing to draw")
    require("matplotlib", "demo", "the picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    draw_frontier(figure, rows, target, recommendation)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    write_file(path, picture.getvalue())
