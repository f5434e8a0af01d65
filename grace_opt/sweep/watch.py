"""Show the progress of a sweep: a bar with the time left on a terminal, otherwise an occasional line.

Built on rich.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Seconds between two lines where stderr is a file.
SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def watching(wanted: bool | None, name: str, total: int, before: int) -> Iterator[Callable[[int, int], None]]:
    """Yield a function ``show(finished, failed)`` for the block.

    Parameters
    ----------
    wanted : bool or None
        True shows a bar wherever stderr goes, False nothing; None shows a bar on a terminal and otherwise a line every
        `SECONDS_BETWEEN_LINES`.
    name : str
        The name to show.
    total, before : int
        Number of cells of the sweep, and of those finished before; the time left is computed from the others.

    Examples
    --------
    >>> with watching(False, "demo", 2, 0) as show:
    ...     show(1, 0)
    """
    if wanted is False or before == total:
        yield lambda finished, failed: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if wanted is None and not sys.stderr.isatty():
        began = last = time.monotonic()

        def line(finished: int, failed: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= SECONDS_BETWEEN_LINES:
                last, made = now, max(finished + failed - before, 1)
                left = (now - began) / made * (total - finished - failed)
                bad = f", {failed} failed" if failed else ""
                console.print(f"{name}: {finished}/{total} cells{bad}, about {left:.0f} s left")

        yield line
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Cells take seconds to hours: rich's own mean over the last minute would cover one of them or none.
    bar = Progress(
        *columns, TextColumn("ETA"), TimeRemainingColumn(), console=console, transient=True, speed_estimate_period=86400
    )
    with bar:
        task = bar.add_task(name, total=total - before)

        def show(finished: int, failed: int) -> None:
            text = f"{name}, {failed} failed" if failed else name
            bar.update(task, completed=finished + failed - before, description=text)

        yield show
