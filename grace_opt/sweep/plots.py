"""Draw the plots of a report as PNG and SVG, by matplotlib without a display.

When: `make_report`. Lines and bars carry 95 % bootstrap intervals of their means. Colours are Okabe and Ito's without
yellow, then Tol's, which colour-blind readers can tell apart; lines also differ in dash and marker, so that no two look
alike. Sources: Okabe and Ito, Color Universal Design (2008); Tol, Colour Schemes (2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from .._util.files import write_file
from .._util.optional import require
from ..errors import OptionError
from .bootstrap import mean_interval
from .cells import SweepError, check_inside
from .curves import RESAMPLES, Curve, curves, together
from .heatmaps import draw_heatmaps
from .views import Plot

PALETTE = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
    "#000000", "#882255", "#999933", "#332288", "#8C8C8C",
)  # fmt: skip
#: The numbers of colours and of markers have no common divisor: the same pair comes back after 88 lines.
DASHES, MARKERS = ("-", "--", ":", "-."), "osD^vPX*"
#: Panels in one row.
PANELS_PER_ROW = 3


def save_plot(plot: Plot, frame: Any, path: Path) -> tuple[Path, Path]:
    """Draw `plot` and write ``path.png`` and ``path.svg``, each atomically.

    Parameters
    ----------
    plot : Plot
    frame : pandas.DataFrame
        Rows, at least one.
    path : Path
        Without suffix.
    """
    matplotlib = require("matplotlib", "bench", "a report with plots")
    backend = require("matplotlib.backends.backend_agg", "bench", "a report with plots")
    figures = require("matplotlib.figure", "bench", "a report with plots")
    numeric = [plot.y] if plot.kind in ("line", "bar", "box", "scatter") else [plot.value]
    numeric += [plot.x] if plot.kind == "scatter" else []
    for name in numeric:
        if text := [value for value in frame[name].tolist() if isinstance(value, str)]:
            raise OptionError(f"plot {plot.title!r}: column {name!r} holds text ({text[0]!r}), not numbers.")
    frame = frame[frame[[*numeric, plot.x]].notna().all(axis=1)]  # other rows belong to other views
    panels = list(dict.fromkeys(frame[plot.facet].tolist())) if plot.facet else [None]
    parts = [frame if panel is None else frame[frame[plot.facet] == panel] for panel in panels]
    across = 2 if len(panels) == 4 else max(1, min(len(panels), PANELS_PER_ROW))
    down = math.ceil(len(panels) / across) or 1
    size = (6.4, 4.2) if len(panels) < 2 else (3.6 * across + 0.8, 3.2 * down)
    # A fixed salt and no date: equal rows give equal files, and a committed report changes only with its numbers.
    with matplotlib.rc_context({"svg.hashsalt": "grace_opt", "svg.fonttype": "path"}):
        figure = figures.Figure(figsize=size, layout="constrained")
        backend.FigureCanvasAgg(figure)
        axes = figure.subplots(down, across, squeeze=False).ravel().tolist()
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        axes = axes[: len(panels)]
        if plot.kind == "heatmap":
            draw_heatmaps(plot, figure, axes, parts)
        else:
            _draw(plot, axes, parts, list(dict.fromkeys(frame[plot.hue].tolist())) if plot.hue else [None])
        for axis, panel in zip(axes, panels, strict=True):
            if panel is not None:
                axis.set_title(f"{_label(plot, plot.facet)} = {panel}", fontsize=9, parse_math=False)
        _label_axes(plot, figure, axes, across)
        if plot.hue:
            _legend(plot, figure, axes)
        figure.suptitle(plot.title, parse_math=False)
        drawn = (path.with_name(path.name + ".png"), path.with_name(path.name + ".svg"))
        for file, write in zip(drawn, (_png, _svg), strict=True):
            picture = BytesIO()
            try:
                write(figure, picture)
            except (ValueError, OverflowError) as error:  # numbers too large for an axis
                raise OptionError(
                    f"plot {plot.title!r} cannot be drawn: {error}. Are its numbers that large?"
                ) from error
            write_file(check_inside(file.parent, file), picture.getvalue(), SweepError)
    return drawn


def _png(figure: Any, picture: BytesIO) -> None:
    """Write a figure; `Figure.savefig` would draw it twice, for the same bytes."""
    agg, dpi = require("matplotlib.backends.backend_agg", "bench", "a report with plots"), figure.dpi
    figure.set_dpi(120)
    agg.FigureCanvasAgg(figure).print_png(picture)
    figure.set_dpi(dpi)


def _svg(figure: Any, picture: BytesIO) -> None:
    """The same as SVG."""
    svg = require("matplotlib.backends.backend_svg", "bench", "a report with plots")
    svg.FigureCanvasSVG(figure).print_svg(picture, metadata={"Date": None})


def _draw(plot: Plot, axes: Sequence[Any], frames: Sequence[Any], hues: list[Any]) -> None:
    """Draw all panels; lines that lie on one another in each of them are one line, under all their names."""
    lines = [curves(plot, frame, hues) if plot.kind == "line" else {} for frame in frames]
    groups = together(lines, "y" in plot.log) if plot.kind == "line" else [[hue] for hue in hues]
    for axis, frame, found in zip(axes, frames, lines, strict=True):
        _panel(plot, axis, frame, groups, found)


def _panel(plot: Plot, axis: Any, frame: Any, groups: list[list[Any]], found: Mapping[Any, Curve]) -> None:
    places = list(dict.fromkeys(frame[plot.x].tolist()))
    numeric = all(isinstance(place, int | float) for place in places)
    named = plot.kind in ("bar", "box") or not numeric
    if numeric:
        places.sort()
    for at, (hue, *same) in enumerate(groups):
        part = frame if hue is None else frame[frame[plot.hue] == hue]
        colour, marker = PALETTE[at % len(PALETTE)], MARKERS[at % len(MARKERS)]
        label = None if hue is None else ", ".join(map(str, (hue, *same)))
        style: dict[str, Any] = {"label": label, "color": colour}
        # Where lines and points meet, the first ones show around the later ones.
        wide = 1 - at / max(1, len(groups) - 1)
        if plot.kind == "line":
            if curve := {place: found[hue][place] for place in places if place in found[hue]}:
                mean, low, high = np.array(list(curve.values())).T
                axis.errorbar(
                    [places.index(place) if named else place for place in curve],
                    mean, yerr=np.abs([low - mean, high - mean]), marker=marker, markersize=3.5 + 2 * wide,
                    linestyle=DASHES[at % len(DASHES)], linewidth=1.2 + wide, elinewidth=0.8, capsize=2, **style,
                )  # fmt: skip
            continue
        values = {place: part[part[plot.x] == place][plot.y].to_numpy(float) for place in places}
        values = {place: finite for place, v in values.items() if len(finite := v[np.isfinite(v)])}
        shift = (at - (len(groups) - 1) / 2) * 0.8 / len(groups) if named and plot.kind != "scatter" else 0.0
        x = [places.index(place) + shift if named else place for place in values]
        if plot.kind == "scatter":
            pairs = [(x_, y) for x_, ys in zip(x, values.values(), strict=True) for y in ys]
            points = np.array(pairs).reshape(-1, 2).T
            axis.scatter(*points, s=8 + 16 * wide, marker=marker, alpha=0.7, linewidths=0.8, **style)
        elif plot.kind == "box":
            _boxes(axis, x, list(values.values()), 0.7 / len(groups), style)
        elif values:
            means = [mean_interval(v, resamples=RESAMPLES) for v in values.values()]
            mean = np.array([m.estimate for m in means])
            ends = np.array([[m.low, m.high] if math.isfinite(m.low) else [m.estimate] * 2 for m in means]).T
            axis.bar(x, mean, width=0.8 / len(groups), yerr=np.abs(ends - mean), capsize=2, **style)
    if named:
        axis.set_xticks(range(len(places)), [str(place) for place in places], parse_math=False)
        if max((len(str(place)) for place in places), default=0) > 6:
            for text in axis.get_xticklabels():
                text.set(rotation=30, ha="right", rotation_mode="anchor")
    if "x" in plot.log and not named:
        axis.set_xscale("log")
    elif numeric and not named and all(isinstance(place, int) for place in places):
        axis.xaxis.get_major_locator().set_params(integer=True)  # there is no layer 0.5
    if "y" in plot.log:
        axis.set_yscale("log")
    axis.grid(alpha=0.3)


def _boxes(axis: Any, x: list[Any], values: list[Any], width: float, style: dict[str, Any]) -> None:
    drawn = axis.boxplot(values, positions=x, widths=width, manage_ticks=False) if x else {}
    for part in (line for lines in drawn.values() for line in lines):
        part.set_color(style["color"])
    axis.plot([], [], **style)  # boxes are not shown in a legend


def _label_axes(plot: Plot, figure: Any, axes: Sequence[Any], across: int) -> None:
    """Name the axes: of several panels x below each column and y once, as long names run into the next panel's."""
    x, y = _label(plot, plot.x), _label(plot, plot.y)
    for axis in axes[-across:]:
        axis.set_xlabel(x, parse_math=False)
    if len(axes) > 1:
        figure.supylabel(y, fontsize="medium", parse_math=False)
    else:
        axes[0].set_ylabel(y, parse_math=False)


def _legend(plot: Plot, figure: Any, axes: Any) -> None:
    """Draw one legend for all panels, below them, where it hides nothing."""
    found: dict[str, Any] = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    if found:
        title, columns = _label(plot, plot.hue), min(len(found), 4)
        figure.legend(
            found.values(), found, title=title, ncols=columns, fontsize=7, title_fontsize=7, loc="outside lower center"
        )


def _label(plot: Plot, column: str) -> str:
    return plot.labels.get(column, column)
