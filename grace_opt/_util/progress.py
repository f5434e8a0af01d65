"""A progress bar on stderr that appears only in a terminal and only for long work.

Built on rich.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import OptionError
from .quiet import quietly

#: Seconds after which a bar appears.
SECONDS_BEFORE_BAR = 1.5


@contextmanager
def progress_bar(wanted: bool | None, total: int) -> Iterator[Callable[[str, int], None]]:
    """Yield a function ``show(description, completed)`` for the block.

    Parameters
    ----------
    wanted : bool or None
        None shows the bar if the block takes longer than `SECONDS_BEFORE_BAR` and stderr is a terminal. True shows it
        at once, wherever stderr goes. False keeps the whole library quiet within the block.
    total : int
        Number of steps.

    Raises
    ------
    OptionError
        If `wanted` is none of these.

    Examples
    --------
    >>> with progress_bar(False, 1) as show:
    ...     show("nothing to see", 0)
    """
    if not (wanted is None or isinstance(wanted, bool)):
        raise OptionError(f"progress={wanted!r}: give True, False, or None for a bar where somebody is waiting.")
    if wanted is False:
        with quietly():
            yield lambda description, completed: None
        return
    if wanted is None and not sys.stderr.isatty():
        yield lambda description, completed: None
        return
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=console.is_terminal)
    task = bar.add_task("", total=total)
    lock, over = threading.Lock(), False

    def start() -> None:
        with lock:  # the block may end while the timer fires
            if not over:
                try:
                    bar.start()
                except LiveError:
                    return  # the caller shows its own display, and rich allows only one at a time

    def show(description: str, completed: int) -> None:
        bar.update(task, description=description, completed=completed)

    timer: Any = threading.Timer(SECONDS_BEFORE_BAR, start)
    timer.daemon = True
    if wanted:
        start()
    else:
        timer.start()
    try:
        yield show
    finally:
        timer.cancel()
        with lock:
            over = True
            bar.stop()
