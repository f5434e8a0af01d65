"""The demo's figure: reconstruction error per layer against THINK (the paper's Fig. 5) and an interaction heatmap
(Fig. 3).

Colours are from the Okabe-Ito palette, which colour-blind readers can tell apart. matplotlib is imported on first use.
Source: GRACE (arXiv 2604.16983), figures 3 and 5.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._util.files import write_file

if TYPE_CHECKING:
    from ..hf.demo import DemoReport

COLOURS = {"THINK": "#000000", "GRACE": "#0072B2", "GRACE + local search": "#D55E00"}
STYLES = ("-", "--", ":")


def draw_demo(figure: Any, report: DemoReport) -> None:
    """Draw a demo's report on a matplotlib figure.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        About 11 by 4.4 inches.
    report : DemoReport
    """
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _reconstruction(left, report)
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


def _reconstruction(axes: Any, report: DemoReport) -> None:
    pruned = [row for row in report.rows if row.layer_objective]
    ratios = sorted({row.ratio for row in pruned})
    base = {row.ratio: np.array(row.layer_objective) for row in pruned if row.method == "THINK"}
    axes.axhline(0, color=COLOURS["THINK"], linewidth=1, label="THINK")
    for row in pruned:
        if row.method != "THINK":
            style = STYLES[ratios.index(row.ratio) % len(STYLES)]
            change = 100 * (np.array(row.layer_objective) / base[row.ratio] - 1)
            label = f"{row.method}, λ = {row.ratio:g}"
            # Larger, open markers for one curve: the two often coincide.
            marker = {"marker": "o", "markersize": 8, "fillstyle": "none"} if "local" in row.method else {"marker": "."}
            axes.plot(report.layers, change, style, color=COLOURS[row.method], label=label, **marker)
    axes.set_xlabel("layer")
    axes.set_ylabel("change of reconstruction error\nagainst THINK (%)")
    axes.set_title("‖Q$_P$K$_P$ᵀ‖² of the pruned channels P, observed queries")
    axes.xaxis.get_major_locator().set_params(integer=True)
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
