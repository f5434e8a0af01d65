"""`Pace`: how many steps a search in a sparse graph makes between two looks at the clock.

When: steps cost microseconds in one graph and milliseconds in the next, as exchanges do, and a time limit is to be kept
in both. The search must give the same answer whatever the slices.
"""

from __future__ import annotations

#: A slice is to take about so long.
SECONDS = 0.05


class Pace:
    """Slices that begin with one step and double until they take `SECONDS`.

    Parameters
    ----------
    most : int
        Largest slice.

    Examples
    --------
    >>> pace = Pace(3000)
    >>> for seconds in (0.01, 0.02, 0.2):
    ...     pace.took(pace.steps, seconds)
    >>> pace.steps
    1
    """

    def __init__(self, most: int) -> None:
        self.most, self.steps = most, 1

    def took(self, steps: int, seconds: float) -> None:
        """Take note of a slice, of which there may be less than was wanted."""
        fits = 2 * self.steps if seconds <= 0 else int(steps * SECONDS / seconds)
        self.steps = max(1, min(2 * self.steps, fits, self.most))
