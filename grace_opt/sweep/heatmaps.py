"""The heatmaps of a report: one scale of colours for all panels, and numbers in the cells of small ones.

When: `plots`, for plots of kind "heatmap". Where nearly all numbers are equal, colours alone would show nothing: small
panels also show each number. In large ones a few extreme cells would leave one colour for all others, so the scale ends
before them, and its bar has a point at that end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .views import Plot

#: Panels of up to this many cells show numbers.
NUMBERED = 64
#: The share of a larger heatmap's cells that may lie beyond the colours, at either end.
BEYOND = 0.005


def draw_heatmaps(plot: Plot, figure: Any, axes: Sequence[Any], frames: Sequence[Any]) -> None:
    """Draw one panel on each of `axes`, and one colour bar for all of them.

    Parameters
    ----------
    plot : Plot
        Of kind "heatmap".
    figure : matplotlib.figure.Figure
    axes : sequence of matplotlib.axes.Axes
    frames : sequence of pandas.DataFrame
        Rows of each panel.
    """
    panels = [_means(plot, frame) for frame in frames]
    numbered = all(means.size <= NUMBERED for means in panels)
    low, high, extend = _limits([means.to_numpy(float) for means in panels], 0.0 if numbered else BEYOND)
    for axis, means in zip(axes, panels, strict=True):
        numbers = means.to_numpy(float)
        image = axis.imshow(numbers, cmap="viridis", aspect="auto", interpolation="nearest", vmin=low, vmax=high)
        for labels, ticks, most in ((means.columns, axis.set_xticks, 8), (means.index, axis.set_yticks, 16)):
            step = math.ceil(len(labels) / most)
            ticks(range(0, len(labels), step), [str(label) for label in labels[::step]], parse_math=False)
        for (row, column), number in np.ndenumerate(numbers) if numbered else ():
            if math.isfinite(number):
                light = (number - low) / (high - low) > 0.6 if high > low else False
                axis.text(
                    column, row, f"{number:.3g}", ha="center", va="center", fontsize=7, color="k" if light else "w"
                )
    label = plot.labels.get(plot.value, plot.value)
    bar = figure.colorbar(image, ax=list(axes), shrink=0.9, extend=extend)
    bar.set_label(label, parse_math=False)


def _means(plot: Plot, frame: Any) -> Any:
    """Means over rows, y by x: numbers sorted, texts in order of appearance."""
    means = frame.groupby([plot.y, plot.x], sort=True)[plot.value].mean().unstack(plot.x)
    for name, axis in ((plot.y, 0), (plot.x, 1)):
        places = list(dict.fromkeys(frame[name].tolist()))
        if any(isinstance(place, str) for place in places):
            means = means.reindex(places, axis=axis)
    return means


def _limits(panels: Sequence[np.ndarray], beyond: float) -> tuple[float, float, str]:
    """Return the ends of the colours, the same in all panels, and at which of them numbers lie beyond.

    Examples
    --------
    >>> _limits([np.r_[np.arange(99.0), 1e6]], 0.02)
    (2.0, 97.0, 'both')
    >>> _limits([np.ones(4)], 0.02)
    (1.0, 1.0, 'neither')
    """
    found = np.concatenate([panel.ravel() for panel in panels] or [np.zeros(1)])
    finite = found[np.isfinite(found)]
    if not len(finite):
        return 0.0, 1.0, "neither"
    low = float(np.quantile(finite, beyond, method="higher"))
    high = float(np.quantile(finite, 1 - beyond, method="lower"))
    if low == high:  # nearly all are equal
        low, high = float(finite.min()), float(finite.max())
    ends = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    return low, high, ends[bool(finite.min() < low), bool(finite.max() > high)]
