"""The demo's figure: what a smaller cache costs by its bytes, and a heat map of interactions (the paper's Fig. 3).

Colours are from the Okabe-Ito palette, which colour-blind readers can tell apart. matplotlib is imported on first use.
Source: GRACE (arXiv 2604.16983), figure 3.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._util.files import write_file

if TYPE_CHECKING:
    from ..hf.tools.demo import DemoReport

#: Of `bits=`, and of the others in turn; markers differ from row to row.
BITS_COLOUR, COLOURS, MARKERS = "#0072B2", ("#E69F00", "#000000", "#009E73", "#D55E00", "#CC79A7"), "sDo^vPX"
#: Below this, two runs of the same cache differ as much.
LEAST_KL = 1e-9


def draw_demo(figure: Any, report: DemoReport) -> None:
    """Draw a demo's report on a matplotlib figure.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        About 11 by 4.4 inches.
    report : DemoReport
    """
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _caches(left, report)
    _heatmap(figure, right, report)


def save_demo(report: DemoReport, path: Path) -> None:
    """Draw a demo's report and write it as PNG, atomically.

    Parameters
    ----------
    report : DemoReport
    path : Path
        Where the PNG goes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    draw_demo(figure, report)
    FigureCanvasAgg(figure)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    write_file(path, picture.getvalue())


def _caches(axes: Any, report: DemoReport) -> None:
    """KL against bytes; down and left is better."""
    dense, *smaller = report.rows
    for number, row in enumerate(smaller):
        bits = row.method.endswith(" bits")
        colour = BITS_COLOUR if bits else COLOURS[number % len(COLOURS)]
        kl = max(row.kl, LEAST_KL)  # a logarithmic scale has no zero
        place = row.total_bytes / 1024
        axes.plot(place, kl, MARKERS[number % len(MARKERS)], color=colour, markersize=9, fillstyle="none",
                  markeredgewidth=2, label=row.method)  # fmt: skip
    axes.axvline(dense.total_bytes / 1024, color="0.6", linestyle=":", label=f"{dense.method}: KL 0")
    axes.set_yscale("log")
    axes.set_xlim(0, 1.05 * dense.total_bytes / 1024)
    axes.set_xlabel("K + V in 16 bits, KiB")
    axes.set_ylabel("next-token KL from dense, nats")
    axes.set_title(f"{report.context_tokens:,} tokens, then {report.later_tokens} more")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _heatmap(figure: Any, axes: Any, report: DemoReport) -> None:
    W = report.interaction.numpy()
    scale = np.sqrt(np.abs(np.diag(W)))
    shown = W / np.maximum(np.outer(scale, scale), np.finfo(float).tiny)
    image = axes.imshow(shown, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    axes.set_xlabel("channel j")
    axes.set_ylabel("channel i")
    layer = report.layers[len(report.layers) // 2]
    axes.set_title(f"interactions W$_{{ij}}$ / √(W$_{{ii}}$W$_{{jj}}$), layer {layer}, KV head 0")
    figure.colorbar(image, ax=axes, shrink=0.9)
