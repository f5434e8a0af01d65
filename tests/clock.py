"""`Clock`: time in the hands of a test, so that what is tested is counted in steps, on a machine of any speed.

All of the library asks `time.monotonic` how late it is. A test that takes the fixture `clock` says itself what the
answer is: time stands still, goes on where the test tells it to, or by `per_look` whenever anybody asks, which long
loops do once for each slice of their work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

#: Looks at a clock that stands, after which nobody waits any longer.
ENOUGH = 2000


class Clock:
    """What `time.monotonic` says.

    Attributes
    ----------
    now : float
    per_look : float
        Seconds that pass with every look.
    """

    def __init__(self, per_look: float = 0.0) -> None:
        self.now, self.per_look, self._looks, self._last = 1000.0, per_look, 0, 0.0
        self._timers: list[tuple[float, Timer]] = []

    def __call__(self) -> float:
        self.now += self.per_look
        self._looks, self._last = self._looks + 1 if self.now == self._last else 0, self.now
        assert self._looks < ENOUGH, "somebody waits for a clock that stands: it has to go on with each look"
        return self.now

    def sleep(self, seconds: float) -> None:
        """Go on by some seconds, as `time.sleep` does; timers whose time has come run."""
        self.now += seconds
        due = [timer for at, timer in self._timers if at <= self.now]
        self._timers = [(at, timer) for at, timer in self._timers if at > self.now]
        for timer in due:
            if not timer.cancelled:
                timer.function()

    def timer(self, seconds: float, function: Callable[[], None]) -> Timer:
        """Return what stands for `threading.Timer`."""
        return Timer(self, seconds, function)


class Timer:
    """A `threading.Timer` that a `Clock` runs, in the thread that goes on."""

    daemon = False

    def __init__(self, clock: Clock, seconds: float, function: Callable[[], None]) -> None:
        self.clock, self.seconds, self.function, self.cancelled = clock, seconds, function, False

    def start(self) -> None:
        self.clock._timers.append((self.clock.now + self.seconds, self))

    def cancel(self) -> None:
        self.cancelled = True


class Taken:
    """Seconds of a block, by the clock or of the processor, whichever are fewer: others may have had the cores.

    For what has to be done within its time on a real clock.
    """

    def __enter__(self) -> Taken:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = min(time.perf_counter() - self._began[0], time.process_time() - self._began[1])


@contextmanager
def held(per_look: float = 0.0) -> Iterator[Clock]:
    """Hold the clock within this block; for tests that cannot take the fixture."""
    clock = Clock(per_look)
    with mock.patch.object(time, "monotonic", clock):
        yield clock
