"""`Run`: the seed of a call, its limits, and the callback that receives `Progress`.

Four things stop a search early: the time limit; Ctrl-C or the callback; f reaching the target; patience running out.
The first two end the whole call, the last two end single instances of a batch.
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
    """What a method knows so far about one instance; passed to ``callback=``.

    Attributes
    ----------
    instance : int
        Index in the flattened batch.
    time : float
        Seconds since the call began.
    objective : float
        f of the best choice so far.
    lower_bound : float
        No choice has a smaller f; -inf if nothing is certified yet. With ``maximize=True``, f of the best choice.
    mask : ndarray (n,), bool
        The best choice so far.
    upper_bound : float
        With ``maximize=True``: no choice has a larger f; inf if nothing is certified yet. Else f of the best choice.
    """

    instance: int
    time: float
    objective: float
    lower_bound: float
    mask: npt.NDArray[np.bool_]
    upper_bound: float


class _Stop:
    """Whether a call was asked to stop, and by whom; shared by all copies of its `Run`.

    No locks: a signal handler must not wait for a lock that the interrupted thread may hold.
    """

    def __init__(self) -> None:
        self.requested = self.by_ctrl_c = self.has_choice = False
        self.instance: int | None = None  # at which the callback requested it
        self.before: Any = None  # the previous handler

    def on_ctrl_c(self, number: int, frame: Any) -> None:
        """Stop the method the first time, if it has a choice to return; otherwise call the previous handler."""
        if self.by_ctrl_c or not self.has_choice:
            self.before(number, frame)
            return
        self.by_ctrl_c = self.requested = True
        if isinstance(getattr(self.before, "__self__", None), _Stop):
            # `solve` called in a callback: stop its caller too.
            self.before(number, frame)


class _BestSoFar:
    """The least f so far and when it was found, by instance; shared by all copies of a `Run`.

    No locks: only one thread at a time searches an instance.
    """

    def __init__(self) -> None:
        self.value: dict[int, float] = {}
        self.since: dict[int, float] = {}


@dataclass(frozen=True)
class Run:
    """The seed of a call, its limits, and the callback.

    Attributes
    ----------
    seed : int
        The only source of random choices.
    deadline : float
        `time.monotonic()` value at which to stop with the best choice so far; infinite without a limit.
    callback : callable, optional
        Called with a `Progress` now and then by the methods that search; they stop if it returns something true.
    cap : bool
        The deadline is only a safeguard: methods with no natural end stop where they would without a limit.
    targets : tuple of float
        One per instance of the whole call: searching an instance ends when f is at most this. Empty: none.
    patience : float
        Searching an instance ends after this many seconds without a better choice.
    numbers : tuple of int, optional
        Indices of these instances in the whole call; None: all of them.
    pace : float
        How many times longer than usual a step takes now; more than 1 on a busy machine.
    began : float
        `time.monotonic()` value when the call began.

    Examples
    --------
    >>> run = Run(deadline=time.monotonic() + 60)
    >>> run.expired(), run.has_time(seconds=90)
    (False, False)
    """

    seed: int = 0
    deadline: float = float("inf")
    callback: Callable[[Progress], Any] | None = None
    cap: bool = False
    targets: tuple[float, ...] = ()
    patience: float = float("inf")
    numbers: tuple[int, ...] | None = None
    pace: float = 1.0
    began: float = field(default_factory=lambda: time.monotonic())
    _stop: _Stop = field(default_factory=_Stop, repr=False)
    _best: _BestSoFar = field(default_factory=_BestSoFar, repr=False)

    def expired(self) -> bool:
        """Whether to stop: time is up, Ctrl-C or the callback asked for it, or no instance is `open` any more."""
        return not self.has_time(0.0)

    def left(self) -> float:
        """Return the seconds that are left, infinite without a limit; 0 if it is time to stop."""
        return 0.0 if self.expired() else max(self.deadline - time.monotonic(), 0.0)

    def has_time(self, seconds: float) -> bool:
        """Whether a step of about this many seconds, which cannot be interrupted, fits into the remaining time."""
        if self._stop.requested:
            return False
        then = time.monotonic() + seconds * self.pace
        return then < self.deadline and (not self.watches or self.numbers is None or any(self._open(then)))

    @property
    def watches(self) -> bool:
        """Whether there is a target or patience; searches must then `note` what they find."""
        return bool(self.targets) or self.patience < math.inf

    def open(self) -> list[bool]:
        """Which instances to go on searching: those not yet at their target, with patience left."""
        return self._open(time.monotonic())

    def _open(self, then: float) -> list[bool]:
        since = self._best.since
        return [
            not reached and then < since.get(number, math.inf) + self.patience
            for number, reached in zip(self.numbers or (), self.reached(), strict=True)
        ]

    def reached(self) -> list[bool]:
        """Which instances have a choice with f at most their target."""
        value = self._best.value
        return [bool(self.targets) and b in value and value[b] <= self.targets[b] for b in self.numbers or ()]

    def note(self, values: Sequence[float]) -> None:
        """Record f of the best choice so far, for each instance; where it fell, patience starts again."""
        if not self.watches:
            return
        now, found = time.monotonic(), self._best
        for number, value in zip(self.numbers or (), values, strict=True):
            if value < found.value.get(number, math.inf):
                found.value[number], found.since[number] = value, now

    def begin(self) -> None:
        """Record that the search of these instances starts now, and patience with it."""
        if self.watches:
            self._best.since.update(dict.fromkeys(self.numbers or (), time.monotonic()))

    def instances(self, places: Sequence[int]) -> Run:
        """The same run for the instances at these places in the batch, in the order of `Problem.instances`."""
        numbers = tuple(places) if self.numbers is None else tuple(self.numbers[place] for place in places)
        return replace(self, numbers=numbers)

    def instance(self, place: int) -> Run:
        """The same run for the instance at this place in the batch, which is instance 0 of the new run."""
        return self.instances([place])

    def beside_search(self) -> Run:
        """The same run without target and patience, for work that finds no better choice, such as a bound."""
        return replace(self, targets=(), patience=math.inf)

    def ctrl_c_stops(self) -> None:
        """Let Ctrl-C act as a limit from now on. Call it once there is a choice to return, and check `expired`.

        Before this call, Ctrl-C raises KeyboardInterrupt as usual.
        """
        self._stop.has_choice = True

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C, the callback or an error in another thread asked to stop."""
        return self._stop.requested

    @property
    def stopped_at(self) -> int | None:
        """The instance of the whole call at which the callback asked to stop."""
        return self._stop.instance

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C asked to stop."""
        return self._stop.by_ctrl_c

    def interrupt(self) -> None:
        """Stop as Ctrl-C does; for methods that use a library which catches the signal."""
        self._stop.by_ctrl_c = self._stop.requested = True

    @contextmanager
    def stopping_on_ctrl_c(self) -> Iterator[None]:
        """Inside this block, Ctrl-C asks to stop once the method has a choice; a second one raises KeyboardInterrupt.

        Only in the main thread, which alone receives signals, and only if the program has no handler for Ctrl-C.
        """
        before, stop = signal.getsignal(signal.SIGINT), self._stop
        ours = before is signal.default_int_handler or isinstance(getattr(before, "__self__", None), _Stop)
        if not ours or threading.current_thread() is not threading.main_thread():
            yield
            return
        stop.before = before
        try:  # from here on: a signal may come as soon as the handler is there
            signal.signal(signal.SIGINT, stop.on_ctrl_c)
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def limited(self) -> bool:
        """Whether there is patience, or a time limit that is no mere safeguard: searches continue until then."""
        return (self.deadline < math.inf and not self.cap) or self.patience < math.inf

    def until(self, share: float) -> Run:
        """The same run with only this share of the remaining time and of the patience."""
        now = time.monotonic()
        return replace(self, deadline=now + share * (self.deadline - now), patience=share * self.patience)

    def leaving(self, seconds: float) -> Run:
        """The same run, ending this many seconds earlier to leave time for later work, at most half of what remains."""
        if self.deadline == float("inf"):
            return self
        return replace(self, deadline=self.deadline - min(seconds, 0.5 * max(0.0, self.deadline - time.monotonic())))

    def stop(self) -> None:
        """Make `expired` true in every part of the call, to end its threads."""
        self._stop.requested = True

    def go_on(self) -> None:
        """Undo a stop by a callback or an error, but not by Ctrl-C; for work after the method."""
        self._stop.requested = self._stop.by_ctrl_c

    def report(self, instance: int, objective: float, lower_bound: float, mask: npt.NDArray[np.bool_]) -> None:
        """Record f of one instance's best choice and call the callback; check `expired` afterwards."""
        one = self.instance(instance)
        one.note([objective])
        if self.callback is not None and not self._stop.requested:
            elapsed = time.monotonic() - self.began
            (number,) = one.numbers or (instance,)
            if self.callback(Progress(number, elapsed, objective, lower_bound, mask.copy(), objective)):
                self._stop.instance = number
                self.stop()


def checked_seed(seed: Any) -> int:
    """The seed as an int; raises OptionError if it is not one."""
    return integer("seed", seed, at_least=0)
