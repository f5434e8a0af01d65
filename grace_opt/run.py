"""`Run`, what a call brings besides the instance: the seed, the clock, Ctrl-C, and who wants to hear of `Progress`."""

from __future__ import annotations

import numbers
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import OptionError


@dataclass(frozen=True)
class Progress:
    """What a method knows so far about one instance; what a ``callback=`` is given.

    Attributes
    ----------
    instance : int
        Number in the flattened batch.
    time : float
        Seconds since the call began.
    objective : float
        f of the best choice so far.
    lower_bound : float
        -inf where nothing is certified yet.
    mask : ndarray (n,), bool
        The best choice so far.
    """

    instance: int
    time: float
    objective: float
    lower_bound: float
    mask: npt.NDArray[np.bool_]


class _Stop:
    """Who asked a call to stop, shared by all copies of its `Run`.

    Plain attributes: a signal's handler must not wait for a lock that the thread it interrupts may hold.
    """

    def __init__(self) -> None:
        self.asked = self.by_ctrl_c = self.has_choice = False
        self.before: Any = None  # the handler that was there

    def on_ctrl_c(self, number: int, frame: Any) -> None:
        """Stop the method the first time, if it has something to return; else do what would have been done."""
        if self.by_ctrl_c or not self.has_choice:
            self.before(number, frame)
            return
        self.by_ctrl_c = self.asked = True
        if isinstance(getattr(self.before, "__self__", None), _Stop):  # `solve` in a callback: its caller stops, too
            self.before(number, frame)


@dataclass(frozen=True)
class Run:
    """What a call brings besides the instance: the seed, the clock, and who wants to hear of progress.

    Attributes
    ----------
    seed : int
        Random choices must come from it alone.
    deadline : float
        `time.monotonic()` value at which to stop with the best choice so far; infinite without a limit.
    callback : callable, optional
        Called with a `Progress` now and then, by the methods that search; stops them by a true answer.
    cap : bool
        The deadline is there for safety only: methods that could go on for ever do what they would do without one.
    pace : float
        How many times longer than it usually does a step takes now; more than 1 on a busy machine.
    """

    seed: int = 0
    deadline: float = float("inf")
    callback: Callable[[Progress], Any] | None = None
    cap: bool = False
    pace: float = 1.0
    began: float = field(default_factory=time.monotonic)
    _stop: _Stop = field(default_factory=_Stop, repr=False)

    def expired(self) -> bool:
        """Whether the time limit has passed, or Ctrl-C or the callback asked to stop."""
        return self._stop.asked or time.monotonic() >= self.deadline

    def has_time(self, seconds: float) -> bool:
        """Whether a step that can not be cut short, and takes about so long, would end in time."""
        return not self._stop.asked and time.monotonic() + seconds * self.pace < self.deadline

    def ctrl_c_stops(self) -> None:
        """Say that there is a choice to return, and that `expired` is looked at: from now on Ctrl-C is a limit.

        Without it Ctrl-C raises KeyboardInterrupt, as anywhere in Python.
        """
        self._stop.has_choice = True

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C, the callback or an error in another thread asked to stop."""
        return self._stop.asked

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C asked to stop."""
        return self._stop.by_ctrl_c

    def interrupt(self) -> None:
        """Stop as Ctrl-C does; for methods whose libraries catch the signal themselves."""
        self._stop.by_ctrl_c = self._stop.asked = True

    @contextmanager
    def heeding_ctrl_c(self) -> Iterator[None]:
        """While in this block Ctrl-C asks to stop once the method has a choice; a second one raises KeyboardInterrupt.

        Signals reach the main thread only, and a program that handles Ctrl-C in a way of its own is left to do so.
        """
        before, stop = signal.getsignal(signal.SIGINT), self._stop
        ours = before is signal.default_int_handler or isinstance(getattr(before, "__self__", None), _Stop)
        if not ours or threading.current_thread() is not threading.main_thread():
            yield
            return
        stop.before = before
        signal.signal(signal.SIGINT, stop.on_ctrl_c)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def limited(self) -> bool:
        """Whether this call has a time limit that is meant to be used."""
        return self.deadline < float("inf") and not self.cap

    def until(self, share: float) -> Run:
        """The same run with only this share of the time that remains."""
        now = time.monotonic()
        return replace(self, deadline=now + share * (self.deadline - now))

    def leaving(self, seconds: float) -> Run:
        """The same run, over so many seconds earlier, for what comes afterwards; half of what remains at most."""
        if self.deadline == float("inf"):
            return self
        return replace(self, deadline=self.deadline - min(seconds, 0.5 * max(0.0, self.deadline - time.monotonic())))

    def renumbered(self, numbers: Sequence[int]) -> Run:
        """The same run for some instances of the batch, of these numbers: the callback hears the numbers it knows."""
        tell = self.callback
        if tell is None:
            return self
        return replace(self, callback=lambda p: tell(replace(p, instance=numbers[p.instance])))

    def stop(self) -> None:
        """Let every part of the call see `expired`; for whoever has to end its threads."""
        self._stop.asked = True

    def go_on(self) -> None:
        """Take back what a callback or an error asked for, not Ctrl-C: for what comes after the method."""
        self._stop.asked = self._stop.by_ctrl_c

    def report(self, instance: int, objective: float, lower_bound: float, mask: npt.NDArray[np.bool_]) -> None:
        """Tell the callback, if there is one; afterwards `expired` knows what it answered."""
        if self.callback is not None and not self._stop.asked:
            elapsed = time.monotonic() - self.began
            if self.callback(Progress(instance, elapsed, objective, lower_bound, mask.copy())):
                self.stop()


def checked_seed(seed: Any) -> int:
    """A seed as an int; OptionError for what is none."""
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or int(seed) < 0:
        raise OptionError(f"seed={seed!r}: give a non-negative integer.")
    return int(seed)
