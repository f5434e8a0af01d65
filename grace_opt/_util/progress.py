"""Progress on stderr of long work: a bar in a terminal, a line now and then in a log.

Built on rich.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import OptionError
from .quiet import is_quiet, quietly

#: Seconds after which a bar appears.
SECONDS_BEFORE_BAR = 1.5
#: Least seconds between two lines where stderr is no terminal, and their share of the time so far.
SECONDS_BETWEEN_LINES, SHARE_BETWEEN_LINES = 10.0, 0.05
#: The clock, and how it is waited for: until the event is set, or so many seconds; tests hold both.
seconds = time.monotonic
pause: Callable[[threading.Event, float], bool] = threading.Event.wait


@contextmanager
def progress_bar(wanted: bool | None, total: int, unit: str | None = None) -> Iterator[Callable[[str, float], None]]:
    """Yield a function ``show(description, completed)`` for the block.

    Parameters
    ----------
    wanted : bool or None
        None shows the bar if the block takes longer than `SECONDS_BEFORE_BAR` and stderr is a terminal. True shows it
        at once, wherever stderr goes. False keeps the whole library quiet within the block.
    total : int
        Number of steps.
    unit : str, optional
        What the steps are called, if each takes about as long as the others: then the time left is shown, and where
        stderr is no terminal, None writes a line every ten seconds, and later less often.

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
    elif wanted is None and (is_quiet() or sys.stderr is None):
        yield lambda description, completed: None
    elif wanted or sys.stderr.isatty():
        with _bar(bool(wanted), total, unit) as show:
            yield show
    elif unit is not None:
        with _lines(total, unit) as show:
            yield show
    else:
        yield lambda description, completed: None


class TimeLeft:
    """How long the remaining steps will take, judged by those since the first call of `now`.

    Parameters
    ----------
    total : int
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._seen: list[tuple[float, float]] = []  # the first step and the last, and when they ended

    def now(self, completed: float) -> None:
        """Note how many steps are done."""
        if not self._seen or completed != self._seen[-1][0]:
            self._seen[1:] = [(completed, seconds())]

    def __str__(self) -> str:
        """Return it in words, such as ``, about 40 s left``; empty before a step, or a twentieth of all, is seen.

        Examples
        --------
        >>> str(TimeLeft(3))
        ''
        """
        if len(self._seen) < 2:
            return ""
        (first, began), (done, now) = self._seen
        if done - first < min(self._total / 20, 1):  # what comes first often takes longer
            return ""
        left = (now - began) / (done - first) * (self._total - done) - (seconds() - now)
        return f", about {_in_words(max(left, 0.0))} left"


def _in_words(left: float) -> str:
    """Return a duration with its unit.

    Examples
    --------
    >>> _in_words(99), _in_words(150), _in_words(9000)
    ('99 s', '2 min', '2.5 h')
    """
    if left < 100:
        return f"{left:.0f} s"
    return f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"


@contextmanager
def _lines(total: int, unit: str) -> Iterator[Callable[[str, float], None]]:
    left, now, over = TimeLeft(total), ("", 0.0), threading.Event()

    def show(description: str, completed: float) -> None:
        nonlocal now
        left.now(completed)
        now = description, completed

    def write() -> None:
        from .terminal import escape_path  # rich draws a random number when it is imported, and others count on theirs

        waited = 0.0
        while not pause(over, wait := max(SECONDS_BETWEEN_LINES, SHARE_BETWEEN_LINES * waited)):
            waited += wait
            stream = sys.stderr
            if now[0] and stream is not None:
                stream.write(escape_path(f"grace_opt: {now[0]}: {int(now[1])} of {total} {unit}{left}", stream) + "\n")
                stream.flush()

    writer = threading.Thread(target=write, name="progress", daemon=True)
    writer.start()
    try:
        yield show
    finally:
        over.set()
        writer.join()


@contextmanager
def _bar(at_once: bool, total: int, unit: str | None) -> Iterator[Callable[[str, float], None]]:
    from rich.console import Console
    from rich.errors import LiveError
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    left = TimeLeft(total)

    class Left(ProgressColumn):
        """The unit and the time left, counted down."""

        def render(self, task: Any) -> Text:
            return Text("" if unit is None else f"{unit}{left}")

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Left(),
        TimeElapsedColumn(),
        console=console,
        transient=console.is_terminal,
    )
    task = bar.add_task("", total=total)
    lock, over = threading.Lock(), False

    def start() -> None:
        with lock:  # the block may end while the timer fires
            if not over:
                try:
                    bar.start()
                except LiveError:
                    return  # the caller shows its own display, and rich allows only one at a time

    def show(description: str, completed: float) -> None:
        left.now(completed)
        bar.update(task, description=description, completed=completed)

    timer: Any = threading.Timer(SECONDS_BEFORE_BAR, start)
    timer.daemon = True
    if at_once:
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
