"""`Run`, what a call brings besides the instance: the seed, when to stop, and who wants to hear of `Progress`.

Four things end a search before it is through: the time limit, Ctrl-C or the callback, a target that f has reached, and
patience that has run out. The first two end the whole call, the others each instance of a batch by itself.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ._util.parameters import integer


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


class _Found:
    """The least f so far and when it was found, by instance; shared by all copies of a `Run`.

    Each instance is searched by one thread at a time, so that no lock is needed.
    """

    def __init__(self) -> None:
        self.value: dict[int, float] = {}
        self.since: dict[int, float] = {}


@dataclass(frozen=True)
class Run:
    """What a call brings besides the instance: the seed, when to stop, and who wants to hear of progress.

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
    targets : tuple of float
        One per instance of the whole call: searching ends where f is at most this. Empty: none.
    patience : float
        Seconds after which searching an instance ends, unless a better choice was found; they begin anew with each.
    numbers : tuple of int, optional
        The numbers of these instances in the whole call; None: they are the whole call.
    pace : float
        How many times longer than it usually does a step takes now; more than 1 on a busy machine.
    """

    seed: int = 0
    deadline: float = float("inf")
    callback: Callable[[Progress], Any] | None = None
    cap: bool = False
    targets: tuple[float, ...] = ()
    patience: float = float("inf")
    numbers: tuple[int, ...] | None = None
    pace: float = 1.0
    began: float = field(default_factory=time.monotonic)
    _stop: _Stop = field(default_factory=_Stop, repr=False)
    _found: _Found = field(default_factory=_Found, repr=False)

    def expired(self) -> bool:
        """Whether to stop: time is over, or Ctrl-C or the callback asked for it, or no instance is `open` any more."""
        return not self.has_time(0.0)

    def has_time(self, seconds: float) -> bool:
        """Whether a step that cannot be cut short, and takes about this long, would end before the search has to."""
        if self._stop.asked:
            return False
        then = time.monotonic() + seconds * self.pace
        return then < self.deadline and (not self.watches or self.numbers is None or any(self._open(then)))

    @property
    def watches(self) -> bool:
        """Whether there is a target or patience, so that searches have to `note` what they find."""
        return bool(self.targets) or self.patience < math.inf

    def open(self) -> list[bool]:
        """Which instances are to be searched on: those that are not at their target, and still have patience."""
        return self._open(time.monotonic())

    def _open(self, then: float) -> list[bool]:
        since = self._found.since
        return [
            not reached and then < since.get(number, math.inf) + self.patience
            for number, reached in zip(self.numbers or (), self.reached(), strict=True)
        ]

    def reached(self) -> list[bool]:
        """Which instances have a choice with f at most their target."""
        value = self._found.value
        return [bool(self.targets) and b in value and value[b] <= self.targets[b] for b in self.numbers or ()]

    def note(self, values: Sequence[float]) -> None:
        """Say what f is of the best choice so far, for each instance: where it fell, patience begins anew."""
        if not self.watches:
            return
        now, found = time.monotonic(), self._found
        for number, value in zip(self.numbers or (), values, strict=True):
            if value < found.value.get(number, math.inf):
                found.value[number], found.since[number] = value, now

    def begin(self) -> None:
        """Say that searching these instances begins now: patience with them does as well."""
        if self.watches:
            self._found.since.update(dict.fromkeys(self.numbers or (), time.monotonic()))

    def instances(self, places: Sequence[int]) -> Run:
        """The same run for the instances at these places of the batch, as `Problem.instances` has them."""
        numbers = tuple(places) if self.numbers is None else tuple(self.numbers[place] for place in places)
        return replace(self, numbers=numbers)

    def instance(self, place: int) -> Run:
        """The same run for the instance at this place of the batch; it is number 0 of its own."""
        return self.instances([place])

    def beside_search(self) -> Run:
        """The same run for work that finds no better choice, such as a bound: target and patience do not end it."""
        return replace(self, targets=(), patience=math.inf)

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
        """Whether this call has a time limit that is meant to be used, or patience: searches go on until then."""
        return (self.deadline < math.inf and not self.cap) or self.patience < math.inf

    def until(self, share: float) -> Run:
        """The same run with only this share of the time that remains, and of the patience."""
        now = time.monotonic()
        return replace(self, deadline=now + share * (self.deadline - now), patience=share * self.patience)

    def leaving(self, seconds: float) -> Run:
        """The same run, over this many seconds earlier, for what comes afterwards; half of what remains at most."""
        if self.deadline == float("inf"):
            return self
        return replace(self, deadline=self.deadline - min(seconds, 0.5 * max(0.0, self.deadline - time.monotonic())))

    def stop(self) -> None:
        """Let every part of the call see `expired`; for whoever has to end its threads."""
        self._stop.asked = True

    def go_on(self) -> None:
        """Take back what a callback or an error asked for, not Ctrl-C: for what comes after the method."""
        self._stop.asked = self._stop.by_ctrl_c

    def report(self, instance: int, objective: float, lower_bound: float, mask: npt.NDArray[np.bool_]) -> None:
        """Note f of one instance's best choice and tell the callback; `expired` knows what came of it."""
        one = self.instance(instance)
        one.note([objective])
        if self.callback is not None and not self._stop.asked:
            elapsed = time.monotonic() - self.began
            (number,) = one.numbers or (instance,)
            if self.callback(Progress(number, elapsed, objective, lower_bound, mask.copy())):
                self.stop()


def checked_seed(seed: Any) -> int:
    """A seed as an int; OptionError for what is none."""
    return integer("seed", seed, at_least=0)
