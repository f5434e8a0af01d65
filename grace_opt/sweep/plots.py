"""Draw the plots of a report as PNG and SVG, by matplotlib without a display.

When: `make_report`. Lines and bars carry 95 % bootstrap intervals of their means. Colours are Okabe and Ito's, which
colour-blind readers can tell apart; lines also differ in dash and marker. Source: Okabe and Ito, Color Universal Design
(2008).
"""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from .._util.files import write_file
from .._util.optional import require
from ..errors import OptionError
from .bootstrap import mean_interval
from .cells import SweepError, check_inside
from .views import Plot

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
DASHES, MARKERS = ("-", "--", ":", "-."), "osD^vPX*"
#: Enough for an error bar.
RESAMPLES = 999
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
    across = max(1, min(len(panels), PANELS_PER_ROW))
    down = math.ceil(len(panels) / across) or 1
    size = (6.4, 4.2) if len(panels) < 2 else (3.6 * across + 0.8, 3.2 * down)
    limits = _limits(plot, [frame if p is None else frame[frame[plot.facet] == p] for p in panels])
    # A fixed salt and no date: equal rows give equal files, and a committed report changes only with its numbers.
    with matplotlib.rc_context({"svg.hashsalt": "grace_opt", "svg.fonttype": "path"}):
        figure = figures.Figure(figsize=size, layout="constrained")
        backend.FigureCanvasAgg(figure)
        axes = np.ravel(figure.subplots(down, across, squeeze=False))
        for axis, panel in zip(axes, panels, strict=False):
            part = frame if panel is None else frame[frame[plot.facet] == panel]
            hues = list(dict.fromkeys(frame[plot.hue].tolist())) if plot.hue else [None]
            _panel(plot, figure, axis, part, hues, limits)
            if panel is not None:
                axis.set_title(f"{_label(plot, plot.facet)} = {panel}", fontsize=9, parse_math=False)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        if plot.hue and plot.kind != "heatmap":
            _legend(plot, figure, axes)
        figure.suptitle(plot.title, parse_math=False)
        drawn = (path.with_name(path.name + ".png"), path.with_name(path.name + ".svg"))
        settings: tuple[dict[str, Any], ...] = ({"dpi": 120}, {"metadata": {"Date": None}})
        for file, options in zip(drawn, settings, strict=True):
            picture = BytesIO()
            try:
                figure.savefig(picture, format=file.suffix[1:], **options)
            except (ValueError, OverflowError) as error:  # numbers too large for an axis
                raise OptionError(
                    f"plot {plot.title!r} cannot be drawn: {error}. Are its numbers that large?"
                ) from error
            write_file(check_inside(file.parent, file), picture.getvalue(), SweepError)
    return drawn


def _panel(plot: Plot, figure: Any, axis: Any, frame: Any, hues: list[Any], limits: tuple[float, float]) -> None:
    axis.set_xlabel(_label(plot, plot.x), parse_math=False)
    axis.set_ylabel(_label(plot, plot.y), parse_math=False)
    if plot.kind == "heatmap":
        _heatmap(plot, figure, axis, frame, limits)
        return
    places = list(dict.fromkeys(frame[plot.x].tolist()))
    numeric = all(isinstance(place, int | float) for place in places)
    named = plot.kind in ("bar", "box") or not numeric
    if numeric:
        places.sort()
    for at, hue in enumerate(hues):
        part = frame if hue is None else frame[frame[plot.hue] == hue]
        colour = PALETTE[at % len(PALETTE)]
        style: dict[str, Any] = {"label": None if hue is None else str(hue), "color": colour}
        marker = MARKERS[at % len(MARKERS)]
        values = {place: part[part[plot.x] == place][plot.y].to_numpy(float) for place in places}
        values = {place: finite for place, v in values.items() if len(finite := v[np.isfinite(v)])}
        shift = (at - (len(hues) - 1) / 2) * 0.8 / len(hues) if plot.kind in ("bar", "box") else 0.0
        x = [places.index(place) + shift if named else place for place in values]
        if plot.kind == "scatter":
            pairs = [(x_, y) for x_, ys in zip(x, values.values(), strict=True) for y in ys]
            axis.scatter(*np.array(pairs).reshape(-1, 2).T, s=14, marker=marker, alpha=0.7, **style)
        elif plot.kind == "box":
            drawn = (
                axis.boxplot(list(values.values()), positions=x, widths=0.7 / len(hues), manage_ticks=False)
                if x
                else {}
            )
            for part_ in (line for lines in drawn.values() for line in lines):
                part_.set_color(colour)
            axis.plot([], [], **style)  # boxes are not shown in a legend
        elif values:
            found = [mean_interval(v, resamples=RESAMPLES) for v in values.values()]
            mean = np.array([f.estimate for f in found])
            ends = np.array([[f.low, f.high] if math.isfinite(f.low) else [f.estimate] * 2 for f in found]).T
            errors = np.abs(ends - mean)
            if plot.kind == "bar":
                axis.bar(x, mean, width=0.8 / len(hues), yerr=errors, capsize=2, **style)
            else:
                dashes = DASHES[at % len(DASHES)]
                axis.errorbar(x, mean, yerr=errors, marker=marker, markersize=4, linestyle=dashes, capsize=2, **style)
    if named:
        axis.set_xticks(range(len(places)), [str(place) for place in places], parse_math=False)
        axis.tick_params(axis="x", labelrotation=30 if max((len(str(p)) for p in places), default=0) > 6 else 0)
    if "x" in plot.log and not named:
        axis.set_xscale("log")
    if "y" in plot.log:
        axis.set_yscale("log")
    elif numeric and not named and all(isinstance(place, int) for place in places):
        axis.xaxis.get_major_locator().set_params(integer=True)  # there is no layer 0.5
    axis.grid(alpha=0.3)


def _heatmap(plot: Plot, figure: Any, axis: Any, frame: Any, limits: tuple[float, float]) -> None:
    means = _means(plot, frame)
    image = axis.imshow(
        means.to_numpy(float), cmap="viridis", aspect="auto", interpolation="nearest", vmin=limits[0], vmax=limits[1]
    )
    for labels, ticks, most in ((means.columns, axis.set_xticks, 8), (means.index, axis.set_yticks, 16)):
        step = math.ceil(len(labels) / most)
        ticks(range(0, len(labels), step), [str(label) for label in labels[::step]], parse_math=False)
    figure.colorbar(image, ax=axis, shrink=0.9, label=_label(plot, plot.value))


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


def _means(plot: Plot, frame: Any) -> Any:
    """Means over rows, y by x: numbers sorted, texts in order of appearance."""
    means = frame.groupby([plot.y, plot.x], sort=True)[plot.value].mean().unstack(plot.x)
    for name, axis in ((plot.y, 0), (plot.x, 1)):
        places = list(dict.fromkeys(frame[name].tolist()))
        if any(isinstance(place, str) for place in places):
            means = means.reindex(places, axis=axis)
    return means


def _limits(plot: Plot, parts: list[Any]) -> tuple[float, float]:
    """Return common colour limits for all panels of a heatmap, so that they can be compared."""
    if plot.kind != "heatmap":
        return 0.0, 1.0
    found = np.concatenate([_means(plot, part).to_numpy(float).ravel() for part in parts if len(part)] or [[0.0]])
    finite = found[np.isfinite(found)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)


def _label(plot: Plot, column: str) -> str:
    return plot.labels.get(column, column)
