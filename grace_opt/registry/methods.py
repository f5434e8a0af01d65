"""The solver registry: `register_solver` adds a method by name, `get` finds one, entry points add those of packages.

A solver is a function ``solve(problem, options, run) -> SolverResult``. With ``batched=True`` the problem has exactly
one batch dimension; otherwise the function is called once per instance, without a batch dimension.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol

import torch

from .._util.names import did_you_mean
from .._util.optional import pip_install
from .._util.parameters import choice, flag, plain, shown
from .._util.warning import warn
from ..errors import OptionError, SolverError, UnknownSolverError
from ..kernels._shared.threads import always_compiled
from ..problem import DenseWeights, FactoredWeights, Problem, SparseWeights, Weights
from ..problem.constraints import constraints_of
from ..problem.dense import small_weights
from ..run import Run
from ..solution import SolverResult
from .pieces import in_pieces
from .result_checks import checked_result, copy_of_problem, refuse_overwritten

ENTRY_POINT_GROUP = "grace_opt.solvers"


@dataclass(frozen=True)
class NoOptions:
    """The options of solvers that take none."""


Solver = Callable[[Problem, Any, Run], SolverResult]


class MethodOptions(Protocol):
    """The options of a method as one dataclass object, such as ``TabuOptions(iterations=500)``."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True)
class SolverSpec:
    """One registered method.

    Attributes
    ----------
    name : str
    solver : callable
        ``(problem, options, run) -> SolverResult``.
    options : type
        A frozen dataclass; its fields are the method's options, each with a default.
    exact : bool
        Whether it proves optimality when it finishes.
    batched : bool
        Whether it solves a whole batch in one call.
    requires : tuple of str
        Modules that must be importable, each as ``"module"`` or ``"module:extra"``.
    guarantee : str
        What the method guarantees about its answer, in one line.
    summary : str
        First line of the solver's docstring.
    compiled : bool
        Whether it runs code that is compiled at its first use.
    searches : bool
        Whether it keeps improving its choice, and so obeys ``target=`` and ``patience=``.
    forms : tuple of str
        Forms of W, beside a tensor, that it takes: "sparse" and "factored", see `grace_opt.problem.Weights`. Without
        them, it gets W as a tensor, if there is memory for it.
    constraints : bool
        Whether it takes problems with constraints, ``solve(groups=…, exclude=…, together=…, costs=…)``; without, it is
        refused there.
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
    searches: bool = False
    forms: tuple[str, ...] = ()
    constraints: bool = False

    def prepare(self, weights: Weights | None = None, constrained: bool = False) -> None:
        """Load compiled code for W of this form and precision, compiling it first if it is new to this machine.

        Called before a time limit starts; does nothing unless the method is `compiled`, or takes sparse W. The loops
        for constraints are prepared only if there are some.
        """
        small = small_weights() if weights is None else weights.small()
        small = small if self.takes(small) else small_weights(small.dtype)
        if not self.compiled and small.form == DenseWeights.form:
            return
        with _preparing:  # other threads wait until everything is ready
            if (self.solver, small.dtype, small.form) not in _prepared:
                problem = Problem.of(small, 12)
                with always_compiled():
                    self.solver(problem, self.options(), Run(0))
                    for spec in (get(name) for name in ("mies", "drop_greedy")):  # where others start
                        problem.weights.objective(spec.solve(problem, spec.options(), Run(0)).mask)
                _prepared.add((self.solver, small.dtype, small.form))
            if constrained and (self.solver, small.dtype, "constrained") not in _prepared:
                problem = Problem.of(small_weights(small.dtype), 12)
                problem = replace(problem, constraints=constraints_of(problem.n, exclude=[(0, 1)]))
                with always_compiled():
                    self.solver(problem, self.options(), Run(0))
                _prepared.add((self.solver, small.dtype, "constrained"))

    def takes(self, weights: Weights) -> bool:
        """Whether the method takes W in this form; it gets a tensor otherwise."""
        return weights.form in (DenseWeights.form, *self.forms)

    def refuse_constraints(self, problem: Problem, several: bool = False) -> None:
        """Raise SolverError if the problem has constraints, or several solutions do, and the method takes none."""
        if (several or problem.constraints is not None) and not self.constraints:
            able = [repr(name) for name, spec in sorted(specs().items()) if spec.constraints]
            what = "solutions=" if problem.constraints is None else "groups=, exclude=, together=, costs="
            raise SolverError(
                f"method {self.name!r} takes no constraints ({what}): use {', '.join(able[:-1])} or {able[-1]}."
            )

    def make_options(self, given: Mapping[str, Any], arguments: Iterable[str] = ()) -> Any:
        """The options dataclass, or OptionError naming the accepted ones; `arguments` of the caller may be meant."""
        accepted = _names_of(self.options)
        for name in given:
            if name not in accepted:
                others = [spec.name for spec in specs().values() if name in _names_of(spec.options)]
                hint = f" It is one of {', '.join(others)}." if others else did_you_mean(name, [*accepted, *arguments])
                takes = f"accepts {', '.join(accepted)}" if accepted else "takes no options"
                raise OptionError(f"method {self.name!r} has no option {name!r}; it {takes}.{hint}")
        return self.options(**given)

    def solve(self, problem: Problem, options: Any, run: Run, *, check: bool = True) -> SolverResult:
        """Solve a flattened batch, one instance at a time unless the solver is batched.

        Solvers of other packages get a copy, and an error if they write into it, unless `check` is False.
        """
        self.refuse_constraints(problem)
        if problem.weights.whole_at_once() or not self.takes(problem.weights):
            return in_pieces(problem, options, run, f"method {self.name!r}", partial(self.solve, check=check))
        theirs = check and str(getattr(self.solver, "__module__", "")).partition(".")[0] != "grace_opt"
        given = copy_of_problem(problem) if theirs else problem
        if run.numbers is None:
            run = run.instances(range(problem.k.shape[0]))
        result = self._solved(given, options, run)
        if theirs:
            refuse_overwritten(problem, given, self.name)
        return _noted(result, problem, run) if run.watches else result

    def _solved(self, problem: Problem, options: Any, run: Run) -> SolverResult:
        if self.batched:
            return checked_result(self.solver(problem, options, run), problem, self.name)
        results = []
        for b in range(problem.k.shape[0]):
            one, its = problem.instance(b), run.instance(b)
            its.begin()
            results.append(checked_result(self.solver(one, options, its), one, self.name))
        device = problem.weights.device
        unknown = torch.tensor(-torch.inf, dtype=torch.float64, device=device)
        false = torch.tensor(False, dtype=torch.bool, device=device)
        of_f = results[0].objective_stats  # one each, not their sum
        return SolverResult(
            torch.stack([r.mask for r in results]),
            torch.stack([unknown if r.lower_bound is None else r.lower_bound for r in results]),
            torch.stack([false if r.limit is None else r.limit for r in results]),
            {"instances": len(results)}
            | _summed([dict(r.stats) for r in results])
            | {name: [r.stats.get(name) for r in results] for name in of_f},
            objective_stats=of_f,
        )


def _noted(result: SolverResult, problem: Problem, run: Run) -> SolverResult:
    """Record f in the run; an instance that reached its target is not marked as cut short."""
    run.note(problem.weights.objective(result.mask).tolist())
    if result.limit is None or not run.targets:
        return result
    reached = torch.tensor(run.reached(), dtype=torch.bool, device=result.limit.device)
    return replace(result, limit=result.limit & ~reached)


_REGISTRY: dict[str, SolverSpec] = {}
_prepared: set[tuple[Solver, torch.dtype, str]] = set()
_preparing = threading.RLock()  # reentrant: preparing a method calls others
_loaded = False
_this_thread = threading.local()  # `loading`: this thread is loading the solvers
#: Entry points that could not be loaded, and why.
_broken_entry_points: dict[EntryPoint, str] = {}


def register_solver(
    name: str,
    *,
    options: type = NoOptions,
    exact: bool = False,
    batched: bool = False,
    requires: tuple[str, ...] = (),
    guarantee: str = "none",
    compiled: bool = False,
    searches: bool = False,
    forms: tuple[str, ...] = (),
    constraints: bool = False,
) -> Callable[[Solver], Solver]:
    """Register the decorated function as method `name`.

    Parameters
    ----------
    name : str
        The name for ``method=``.
    options : type
        Frozen dataclass of the method's options, which validates itself in ``__post_init__``.
    exact, batched, requires, guarantee, compiled, searches, forms, constraints
        As in `SolverSpec`.

    Raises
    ------
    OptionError
        If the name is taken by another function, what is decorated is none of three arguments, `options` is not a
        frozen dataclass with a default for each field, or another parameter is not what `SolverSpec` says.

    Examples
    --------
    >>> import torch, grace_opt
    >>> from grace_opt.registry import register_solver, unregister
    >>> from grace_opt.solution import SolverResult
    >>> @register_solver("first", batched=True)
    ... def first(problem, options, run):
    ...     '''Take the first k unprotected vertices.'''
    ...     rank = problem.candidates.cumsum(-1)
    ...     return SolverResult(problem.candidates & (rank <= problem.k.unsqueeze(-1)))
    >>> grace_opt.solve([[2.0, 0.0], [0.0, 1.0]], 1, method="first").indices
    array([0])
    >>> unregister("first")
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise OptionError(
            f'{name!r} is no valid method name: write @register_solver("my_method"), letters, digits and underscores.'
        )
    frozen = getattr(getattr(options, "__dataclass_params__", None), "frozen", False)
    if not (isinstance(options, type) and frozen):
        raise OptionError(f"options of {name!r} must be a frozen dataclass: decorate it with @dataclass(frozen=True).")
    for field in dataclasses.fields(options):
        if field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise OptionError(f"option {field.name!r} of {name!r} has no default: every option needs one.")
    flags = {"exact": exact, "batched": batched, "compiled": compiled, "searches": searches, "constraints": constraints}
    exact, batched, compiled, searches, constraints = (flag(key, value) for key, value in flags.items())
    requires, forms = _names("requires", requires), _names("forms", forms)
    for form in forms:
        choice("forms", form, (SparseWeights.form, FactoredWeights.form))
    if not isinstance(guarantee, str):
        raise OptionError(f"guarantee={shown(guarantee)}: give a text, what the method guarantees, in one line.")

    def add(solver: Solver) -> Solver:
        if not callable(solver) or not _takes_three(solver):
            raise OptionError(f"method {name!r} is {shown(solver)}: decorate a function of (problem, options, run).")
        taken = _REGISTRY.get(name)
        if taken and (taken.solver.__module__, taken.solver.__qualname__) != (solver.__module__, solver.__qualname__):
            raise OptionError(
                f"a method named {name!r} is registered already ({taken.solver.__module__}): choose another name."
            )
        summary = (solver.__doc__ or "").strip().split("\n")[0]
        known = (options, exact, batched, requires, guarantee, summary, compiled, searches, forms, constraints)
        _REGISTRY[name] = SolverSpec(name, solver, *known)
        return solver

    return add


def _names(name: str, given: Any) -> tuple[str, ...]:
    """The names as a tuple; OptionError if they are a text, or not all texts."""
    if isinstance(given, str):
        raise OptionError(f"{name}={given!r}: give a tuple, {name}=({given!r},).")
    if not isinstance(given, tuple | list) or not all(isinstance(one, str) and one for one in given):
        raise OptionError(f"{name}={shown(given)}: give a tuple of names.")
    return tuple(given)


def _takes_three(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin, which does not say what it takes
        pass
    return True


def unregister(name: str) -> None:
    """Forget method `name`; for tests and notebooks."""
    _REGISTRY.pop(name, None)


def _names_of(options: type[Any]) -> list[str]:
    """The options that a caller may give."""
    return [field.name for field in dataclasses.fields(options) if field.init]


def specs() -> dict[str, SolverSpec]:
    """All registered methods by name, ours first, then the entry points of other packages.

    An entry point that cannot be loaded is left out, with a warning. A package that calls this while it is being loaded
    gets the methods registered so far.
    """
    # No lock: a thread that holds it and waits for an import could deadlock with one that imports and waits for it.
    # Importing has its own locks, and importing twice is harmless.
    global _loaded
    if not _loaded and not getattr(_this_thread, "loading", False):
        _this_thread.loading = True
        try:
            importlib.import_module("grace_opt.solvers")
            for point in entry_points(group=ENTRY_POINT_GROUP):
                _load(point)
            _loaded = True  # only now: until then, other threads must load too
        finally:
            _this_thread.loading = False
    return dict(_REGISTRY)


def _load(point: EntryPoint) -> None:
    if point in _broken_entry_points:
        return
    try:
        point.load()
    except (Exception, SystemExit) as error:  # another package's module may do anything; other methods still work
        for name, spec in list(_REGISTRY.items()):  # drop what it registered before it failed
            if f"{spec.solver.__module__}.".startswith(f"{point.module}."):
                unregister(name)
        why = f"{type(error).__name__}: {error}"
        if _broken_entry_points.setdefault(point, why) is why:
            warn(
                f"the methods of entry point {point.name} = {point.value} are missing: it could not be loaded ({why})",
                RuntimeWarning,
            )


def get(name: str) -> SolverSpec:
    """The method called `name`.

    Raises
    ------
    UnknownSolverError
        If there is none (suggests the nearest name), or a module that it requires is missing (names the extra).
    """
    known = specs()
    spec = known.get(name) if isinstance(name, str) else None
    if spec is None:
        hint = did_you_mean(name, known)
        if name == "grace":
            hint = " 'grace' is a preset of MaskProvider and CompressedCache: salient channels protected, then 'mies'."
        lost = "".join(
            f" Not loaded: {point.name} = {point.value} ({why})." for point, why in _broken_entry_points.items()
        )
        raise UnknownSolverError(f"no method is called {name!r}.{hint} Known: {', '.join(sorted(known))}.{lost}")
    for requirement in spec.requires:
        module, _, extra = requirement.partition(":")
        if not _is_installed(module):
            what = pip_install(extra) if extra else f"pip install {module}"
            raise UnknownSolverError(f"method {name!r} needs {module}, which is not installed: {what}.")
    return spec


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that a submodule belongs to
        return False


def _summed(stats: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for one in stats:
        for key, value in one.items():
            if isinstance(count := plain(value), int | float):
                total[key] = total.get(key, 0) + count
    return total
