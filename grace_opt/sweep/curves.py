"""The lines of a plot: means with their intervals, and which lines lie on one another in every panel.

When: `plots`, for plots of lines. Lines that a reader could not tell apart are drawn as one, under all their names: of
four lines at one place only the last would be seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .bootstrap import mean_interval
from .views import Plot

#: Enough for an error bar.
RESAMPLES = 999
#: Lines are drawn as one if they are nowhere farther apart than this share of their panel's height: a line's width.
APART = 0.01
#: Mean, and the two ends of its interval, for each place on the x axis.
Curve = Mapping[Any, tuple[float, float, float]]


def curves(plot: Plot, frame: Any, hues: Sequence[Any]) -> dict[Any, Curve]:
    """Return the line of each hue in one panel; places without finite numbers are left out.

    Parameters
    ----------
    plot : Plot
    frame : pandas.DataFrame
        Rows of the panel.
    hues : sequence
        Values of ``plot.hue``, or None alone.
    """
    found: dict[Any, Curve] = {}
    for hue in hues:
        part = frame if hue is None else frame[frame[plot.hue] == hue]
        curve = {}
        for place in dict.fromkeys(part[plot.x].tolist()):
            values = part[part[plot.x] == place][plot.y].to_numpy(float)
            if len(finite := values[np.isfinite(values)]):
                mean = mean_interval(finite, resamples=RESAMPLES)
                ends = (mean.low, mean.high) if math.isfinite(mean.low) else (mean.estimate,) * 2
                curve[place] = (mean.estimate, *ends)
        found[hue] = curve
    return found


def together(panels: Sequence[Mapping[Any, Curve]], log: bool = False) -> list[list[Any]]:
    """Return the hues in groups of lines that lie on one another in every panel, the first of each as it is drawn.

    Parameters
    ----------
    panels : sequence of dict
        What `curves` returned for each panel.
    log : bool
        The y axis is logarithmic.

    Returns
    -------
    list of list
        In order of appearance; a hue without any line stands alone.

    Examples
    --------
    >>> flat, near, far = ({1: (y, y, y), 2: (y, y, y)} for y in (0.0, 1e-3, 1.0))
    >>> together([{"mies": flat, "think": near, "random": far}])
    [['mies', 'think'], ['random']]
    """
    scaled = [{hue: _scaled(curve, log) for hue, curve in panel.items()} for panel in panels]
    heights = [_height(list(panel.values())) for panel in scaled]
    groups: list[list[Any]] = []
    for hue in dict.fromkeys(hue for panel in panels for hue in panel):
        seen = any(panel[hue] for panel in panels)
        for group in groups if seen else []:
            pairs = [(panel[group[0]], panel[hue]) for panel in scaled]
            if all(_one(*pair, APART * height) for pair, height in zip(pairs, heights, strict=True)):
                group.append(hue)
                break
        else:
            groups.append([hue])
    return groups


def _scaled(curve: Curve, log: bool) -> dict[Any, np.ndarray]:
    """The numbers as they stand on the axis; on a logarithmic one there is no place for zero."""
    found = {place: np.array(numbers, dtype=np.float64) for place, numbers in curve.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        return {place: np.log10(numbers) if log else numbers for place, numbers in found.items()}


def _height(lines: Sequence[Mapping[Any, np.ndarray]]) -> float:
    """Return what a panel's y axis spans."""
    numbers = np.concatenate([numbers for line in lines for numbers in line.values()] or [np.zeros(1)])
    finite = numbers[np.isfinite(numbers)]
    return float(np.ptp(finite)) if len(finite) else 0.0


def _one(first: Mapping[Any, np.ndarray], second: Mapping[Any, np.ndarray], apart: float) -> bool:
    """Return whether two lines have the same places, and at each of them the same numbers up to `apart`."""
    return first.keys() == second.keys() and all(
        bool(np.allclose(first[place], second[place], rtol=0, atol=apart)) for place in first
    )
