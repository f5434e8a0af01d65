"""The solver registry: `register` adds a method by name, `get` finds one, entry points bring other packages' solvers.

A solver is a function ``solve(problem, options, run) -> Result``. With ``batched=True`` the problem has exactly one
batch dimension; otherwise it is called once per instance, without a batch dimension. Source: ours.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import math
import numbers
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import objective
from ..errors import OptionError, UnknownSolverError
from ..kernels.threads import COMPILE_FROM
from ..problem import Problem
from ..solution import Result
from .result_checks import checked, copied, refuse_overwritten

ENTRY_POINT_GROUP = "grace_opt.solvers"
#: From so many vertices on everything is compiled.
LARGE = math.isqrt(COMPILE_FROM) + 1


@dataclass(frozen=True)
class NoOptions:
    """For solvers that take none."""


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
    """

    seed: int = 0
    deadline: float = float("inf")
    callback: Callable[[Progress], Any] | None = None
    cap: bool = False
    began: float = field(default_factory=time.monotonic)
    _stop: _Stop = field(default_factory=_Stop, repr=False)

    def expired(self) -> bool:
        """Whether the time limit has passed, or Ctrl-C or the callback asked to stop."""
        return self._stop.asked or time.monotonic() >= self.deadline

    def has_time(self, seconds: float) -> bool:
        """Whether a step that can not be cut short, and takes about so long, would end in time."""
        return not self._stop.asked and time.monotonic() + seconds < self.deadline

    def ctrl_c_stops(self) -> None:
        """Say that there is a choice to return, and that `expired` is looked at: from now on Ctrl-C is a limit.

        Without it Ctrl-C raises KeyboardInterrupt, as anywhere in Python.
        """
        self._stop.has_choice = True

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

    def renumbered(self, numbers: Sequence[int]) -> Run:
        """The same run for some instances of the batch, of these numbers: the callback hears the numbers it knows."""
        tell = self.callback
        if tell is None:
            return self
        return replace(self, callback=lambda p: tell(replace(p, instance=numbers[p.instance])))

    def stop(self) -> None:
        """Let every part of the call see `expired`; for whoever has to end its threads."""
        self._stop.asked = True

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


Solver = Callable[[Problem, Any, Run], Result]


@dataclass(frozen=True)
class SolverSpec:
    """One registered method.

    Attributes
    ----------
    name : str
    solver : callable
        ``(problem, options, run) -> Result``.
    options : type
        A frozen dataclass; its fields are the method's options.
    exact : bool
        Whether it proves optimality when it finishes.
    batched : bool
        Whether it takes a whole batch at once.
    requires : tuple of str
        Modules that must be importable, each as ``"module"`` or ``"module:extra"``.
    guarantee : str
        What is known about the answer, in one line.
    summary : str
        First line of the solver's docstring.
    compiled : bool
        Whether it runs code that is compiled at its first use.
    """

    name: str
    solver: Solver
    options: type = NoOptions
    exact: bool = False
    batched: bool = False
    requires: tuple[str, ...] = ()
    guarantee: str = "none"
    summary: str = ""
    compiled: bool = False

    def prepare(self) -> None:
        """Have compiled code loaded, and at its first use on a machine compiled, before a time limit starts to run."""
        if not self.compiled:
            return
        with _preparing:  # another thread waits until all is there, not only begun
            if self.solver not in _prepared:
                place = torch.arange(24.0, dtype=torch.float64, device="cpu")
                small = torch.cos(7 * place[:, None] * place)  # no bound settles it: every part of a search is called
                self.solver(Problem.of(small[None], 12), self.options(), Run(0))
                # Where W is large, greedy passes and f are compiled as well.
                large = Problem.of(torch.zeros(1, LARGE, LARGE, dtype=torch.float64, device="cpu"), LARGE // 2)
                for spec in (get(name) for name in ("mies", "drop_greedy")):
                    objective.evaluate(large.W, spec.solve(large, spec.options(), Run(0)).mask)
                _prepared.add(self.solver)

    def make_options(self, given: dict[str, Any]) -> Any:
        """The options dataclass, or OptionError naming the accepted ones."""
        accepted = [field.name for field in dataclasses.fields(self.options)]
        for name in given:
            if name not in accepted:
                near = nearest(name, accepted)
                hint = f" Did you mean {near!r}?" if near is not None else ""
                takes = f"accepts {', '.join(accepted)}" if accepted else "takes no options"
                raise OptionError(f"method {self.name!r} has no option {name!r}; it {takes}.{hint}")
        return self.options(**given)

    def solve(self, problem: Problem, options: Any, run: Run, *, check: bool = True) -> Result:
        """Solve a flattened batch, looping over instances where the solver takes one at a time.

        Solvers of other packages get a copy and are refused if they write into it, unless `check` is False.
        """
        theirs = check and str(getattr(self.solver, "__module__", "")).partition(".")[0] != "grace_opt"
        given = copied(problem) if theirs else problem
        result = self._solved(given, options, run)
        if theirs:
            refuse_overwritten(problem, given, self.name)
        return result

    def _solved(self, problem: Problem, options: Any, run: Run) -> Result:
        if self.batched:
            return checked(self.solver(problem, options, run), problem, self.name)
        instances = (problem.instance(b) for b in range(problem.W.shape[0]))
        results = [checked(self.solver(one, options, run), one, self.name) for one in instances]
        device = problem.W.device
        unknown = torch.tensor(-torch.inf, dtype=torch.float64, device=device)
        false = torch.tensor(False, device=device)
        return Result(
            torch.stack([r.mask for r in results]),
            torch.stack([unknown if r.lower_bound is None else r.lower_bound for r in results]),
            torch.stack([false if r.limit is None else r.limit for r in results]),
            {"instances": len(results)} | _summed([dict(r.stats) for r in results]),
        )


_REGISTRY: dict[str, SolverSpec] = {}
_prepared: set[Solver] = set()
_preparing = threading.RLock()  # preparing a method calls others
_loaded = False
_here = threading.local()  # `loading`: this thread is at it
#: Entry points that could not be loaded, and why.
_broken: dict[EntryPoint, str] = {}


def register(
    name: str,
    *,
    options: type = NoOptions,
    exact: bool = False,
    batched: bool = False,
    requires: tuple[str, ...] = (),
    guarantee: str = "none",
    compiled: bool = False,
) -> Callable[[Solver], Solver]:
    """Register the decorated function as method `name`.

    Parameters
    ----------
    name : str
        What users write as ``method=``.
    options : type
        Frozen dataclass of the method's options; validate in its ``__post_init__``.
    exact, batched, requires, guarantee, compiled
        As in `SolverSpec`.

    Raises
    ------
    OptionError
        If the name is taken by another function, or `options` is not a frozen dataclass.

    Examples
    --------
    >>> import torch, grace_opt
    >>> from grace_opt.registry import register, unregister
    >>> from grace_opt.solution import Result
    >>> @register("first", batched=True)
    ... def first(problem, options, run):
    ...     '''Take the first k unprotected vertices.'''
    ...     rank = problem.candidates.cumsum(-1)
    ...     return Result(problem.candidates & (rank <= problem.k.unsqueeze(-1)))
    >>> grace_opt.solve([[2.0, 0.0], [0.0, 1.0]], 1, method="first").indices
    array([0])
    >>> unregister("first")
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise OptionError(
            f'{name!r} is no name for a method: write @register("my_method"), letters, digits and underscores.'
        )
    if not (dataclasses.is_dataclass(options) and options.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise OptionError(f"options of {name!r} must be a frozen dataclass: decorate it with @dataclass(frozen=True).")

    def add(solver: Solver) -> Solver:
        taken = _REGISTRY.get(name)
        if taken and (taken.solver.__module__, taken.solver.__qualname__) != (solver.__module__, solver.__qualname__):
            raise OptionError(
                f"a method named {name!r} is registered already ({taken.solver.__module__}): choose another name."
            )
        summary = (solver.__doc__ or "").strip().split("\n")[0]
        _REGISTRY[name] = SolverSpec(name, solver, options, exact, batched, requires, guarantee, summary, compiled)
        return solver

    return add


def unregister(name: str) -> None:
    """Forget method `name`; for tests and notebooks."""
    _REGISTRY.pop(name, None)


def specs() -> dict[str, SolverSpec]:
    """All registered methods by name, ours first, entry points of other packages loaded.

    One that can not be loaded is left out, with a warning; a package that asks while it is being loaded gets what there
    is so far.
    """
    # No lock of ours: whoever holds it and waits for an import could meet one who imports and waits for the lock.
    # Importing has its own locks, and importing twice is harmless.
    global _loaded
    if not _loaded and not getattr(_here, "loading", False):
        _here.loading = True
        try:
            importlib.import_module("grace_opt.solvers")
            for point in entry_points(group=ENTRY_POINT_GROUP):
                _load(point)
            _loaded = True  # not before: until then other threads load, too
        finally:
            _here.loading = False
    return dict(_REGISTRY)


def _load(point: EntryPoint) -> None:
    if point in _broken:
        return
    try:
        point.load()
    except Exception as error:  # whatever somebody's module raises: the other methods are fine
        for name, spec in list(_REGISTRY.items()):  # what it registered before it failed is of no use
            if f"{spec.solver.__module__}.".startswith(f"{point.module}."):
                unregister(name)
        why = f"{type(error).__name__}: {error}"
        if _broken.setdefault(point, why) is why:
            warnings.warn(
                f"the methods of entry point {point.name} = {point.value} are missing, it could not be loaded: {why}",
                RuntimeWarning,
                stacklevel=3,
            )


def nearest(name: Any, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant, in whatever case it was written.

    Examples
    --------
    >>> nearest("Drop-Greedy", ["mies", "drop_greedy"]), nearest("MIES", ["mies"]), nearest("x", ["mies"])
    ('drop_greedy', 'mies', None)
    """
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), lower, 1)
    return lower[near[0]] if near else None


def get(name: str) -> SolverSpec:
    """The method called `name`.

    Raises
    ------
    UnknownSolverError
        If there is none (the nearest name is suggested), or a module that it requires is missing (the extra is named).
    """
    known = specs()
    spec = known.get(name) if isinstance(name, str) else None
    if spec is None:
        near = nearest(name, known)
        hint = f" Did you mean {near!r}?" if near is not None else ""
        if name == "grace":
            hint = " 'grace' is a preset of MaskProvider and PrunedKeyCache: salient channels protected, then 'mies'."
        lost = "".join(f" Not loaded: {point.name} = {point.value} ({why})." for point, why in _broken.items())
        raise UnknownSolverError(f"no method is called {name!r}.{hint} Known: {', '.join(sorted(known))}.{lost}")
    for requirement in spec.requires:
        module, _, extra = requirement.partition(":")
        if importlib.util.find_spec(module) is None:
            what = f"grace-opt[{extra}]" if extra else module
            raise UnknownSolverError(f'method {name!r} needs {module}, which is not installed: pip install "{what}".')
    return spec


def _summed(stats: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for one in stats:
        for key, value in one.items():
            if isinstance(value, int | float):
                total[key] = total.get(key, 0) + value
    return total
