"""The public calls: `solve` one problem by one method, `compare` several methods on it, `methods` to see what there is.

References for the problem and the methods stand with each solver.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from . import bounds, objective, registry
from ._util.arrays import count_true
from ._util.progress import progress_bar
from .comparison import Comparison, ComparisonError
from .errors import GraceError, OptionError, UnknownSolverError
from .problem import Problem
from .registry import SolverSpec
from .registry.result_checks import bound_within_rounding
from .run import Progress, Run, checked_seed
from .solution import Solution, Status, check_mask, proved, relative_gap

#: Seconds that `compare` gives each method where neither methods nor a limit were named.
DEFAULT_COMPARE_SECONDS = 10.0

Certify = bool | Literal["fast", "tight"]


def solve(
    W: Any,
    k: Any = None,
    method: str = "mies",
    *,
    protected: Any = None,
    seed: int = 0,
    time_limit: float | None = None,
    certify: Certify = False,
    check: bool = True,
    callback: Callable[[Progress], Any] | None = None,
    **options: Any,
) -> Solution:
    r"""Choose k vertices whose induced subgraph has the least weight.

    .. math:: \min_{S \subseteq V,\; |S| = k} \; 1_S^\top W 1_S

    Parameters
    ----------
    W : array_like (..., n, n), scipy.sparse matrix, networkx graph, or Problem
        Symmetric weights: ``W_ii`` of vertices, ``2 W_ij`` of edges. Leading dimensions are a batch.
    k : int, or int array broadcastable to (...)
        How many vertices to choose. Leave out when W is a `Problem`.
    method : str
        A registered name, see `methods`.
    protected : array_like, optional
        Vertices that must not be chosen: bool mask (n,) or (..., n), or indices (p,).
    seed : int
        All randomness comes from it.
    time_limit : float, optional
        Seconds after which the method stops with the best choice so far (Status.LIMIT). The checks and the
        certificate are not counted in it, nor is compiling: some methods' loops are compiled at their first use on a
        machine, which takes some ten seconds once, and loaded at their first use in a process.
    certify : bool, "fast" or "tight"
        Compute a lower bound for methods that bring none; see `grace_opt.bounds.certificate` (True means "fast").
    check : bool
        False skips the checks that read W's data, and leaves the objective in W's own precision: for trusted callers.
    callback : callable, optional
        Called with a `Progress` now and then by the methods that search (tabu, branch_and_bound, portfolio), one call
        at a time per instance; returning True stops them with the best choice so far (Status.LIMIT).
    **options
        The method's own options; an unknown one raises and names the accepted ones.

    Returns
    -------
    Solution
        numpy in, numpy out; torch in, torch out on the same device.

    Raises
    ------
    ProblemError, OptionError, UnknownSolverError, SolverError

    Notes
    -----
    Complexity is the method's, plus O(n²) per instance for the checks and the objective.

    A time limit is looked at between steps, and a step that can not be cut short (an eigenvalue problem of thousands of
    vertices takes seconds) is begun only if it seems to fit. What a method needs for a first choice is always done: a
    greedy pass, O(kn) per instance. Expect the limit and a twentieth of it, or a tenth of a second if that is more. A
    bound that does not fit is left out.

    Ctrl-C stops a method that searches as a time limit does, at its next look at the clock: the best choice so far is
    returned with its bound and Status.INTERRUPTED, for every instance of a batch. A second Ctrl-C, or one before there
    is a choice, raises KeyboardInterrupt; so does any during the methods that do not search (mies, think, drop_greedy,
    random). In a loop, look at the status. In other threads than the main one, and where a program handles Ctrl-C in a
    way of its own, nothing of this applies.

    References
    ----------
    GRACE, arXiv 2604.16983, section 3.

    Examples
    --------
    >>> W = [[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]]
    >>> greedy, best = solve(W, 2), solve(W, 2, method="exhaustive")
    >>> greedy.indices, float(greedy.objective)
    (array([1, 2]), 8.0)
    >>> best.indices, float(best.objective), best.status.name
    (array([0, 2]), 5.0, 'OPTIMAL')
    """
    problem = W if isinstance(W, Problem) else Problem.of(W, _given(k), protected=protected, check=check)
    if isinstance(W, Problem) and (k is not None or protected is not None):
        raise OptionError("W is a Problem, which holds k and protected already: leave k= and protected= out.")
    if callback is not None and not callable(callback):
        raise OptionError(f"callback={callback!r}: give a function of a Progress, or leave it out.")
    spec = registry.get(method)
    made = spec.make_options(options)
    seed, bound = checked_seed(seed), _certificate(problem, certify)
    if time_limit is not None:
        spec.prepare()
    began = time.perf_counter()
    run = Run(seed, _deadline(time_limit), callback)
    with run.heeding_ctrl_c():
        return _finish(problem, spec, made, run, bound, check, began)


def compare(
    W: Any,
    k: Any = None,
    methods: Sequence[str] | None = None,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    protected: Any = None,
    seed: int = 0,
    time_limit: float | None = None,
    certify: Certify = False,
    check: bool = True,
    progress: bool | None = None,
) -> Comparison:
    """Solve one problem by several methods: their solutions side by side, in the order asked for.

    Parameters
    ----------
    W, k
        As in `solve`; the checks run once.
    methods : sequence of str, optional
        Registered names; default: every method, except those whose requirements are missing or that refuse the
        instance, which `Comparison.left_out` lists with the reasons.
    options : mapping, optional
        Options per method: ``{"local_search": {"start": "think"}}``.
    protected, seed, certify, check
        As in `solve`, for all of them; the certificate is computed once and serves all.
    time_limit : float, optional
        As in `solve`, for each method. Default: none for methods that were named; `DEFAULT_COMPARE_SECONDS` each
        where none was, since some of them would search for hours.
    progress : bool, optional
        A progress bar on stderr; default: where stderr is a terminal and it takes longer than a second or two.

    Returns
    -------
    Comparison
        A sequence of `Solution`, with a table, a DataFrame and JSON. Ctrl-C stops the comparison and returns the
        solutions that are there, if there is any, that of the method at work included, with ``interrupted`` set.

    Raises
    ------
    ComparisonError
        If a method named in `methods` fails or refuses the instance; its ``partial`` is the `Comparison` of what had
        finished. Any other exception is a bug of a solver's: it keeps its type, and has ``partial``, too.
    ProblemError, OptionError, UnknownSolverError
        As in `solve`, before any method runs.

    Notes
    -----
    Complexity is the sum of the methods'. All methods solve the same instance, so that the best lower bound of all of
    them holds for each; gaps in the table are to it.

    Examples
    --------
    >>> both = compare([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]], 2, ["mies", "exhaustive"])
    >>> [float(s.objective) for s in both], both.best.method
    ([8.0, 5.0], 'exhaustive')
    """
    if isinstance(methods, str):
        raise OptionError(f"methods={methods!r}: give a list of names, [{methods!r}].")
    problem = W if isinstance(W, Problem) else Problem.of(W, _given(k), protected=protected, check=check)
    if isinstance(W, Problem) and (k is not None or protected is not None):
        raise OptionError("W is a Problem, which holds k and protected already: leave k= and protected= out.")
    asked, per_method = methods is not None, dict(options or {})
    names = sorted(registry.specs()) if methods is None else list(methods)
    if stray := sorted(set(per_method) - set(names)):
        raise OptionError(f"options= names {stray[0]!r}, which is not among the methods compared: {', '.join(names)}.")
    cap = methods is None and time_limit is None
    limit = DEFAULT_COMPARE_SECONDS if cap else time_limit
    _deadline(limit)  # wrong ones are refused before anything runs
    plan, left_out = [], {}
    for name in names:
        try:
            spec = registry.get(name)
        except UnknownSolverError as error:
            if asked:
                raise
            left_out[name] = str(error)
        else:
            plan.append((spec, spec.make_options(dict(per_method.get(name, {})))))
    seed, bound = checked_seed(seed), _certificate(problem, certify)  # one certificate serves them all
    done: list[Solution] = []
    interrupted = False
    with progress_bar(progress, len(plan)) as show:
        for at, (spec, made) in enumerate(plan):
            try:
                show(spec.name, at)
                if limit is not None:
                    spec.prepare()
                began = time.perf_counter()
                run = Run(seed, _deadline(limit), cap=cap)
                with run.heeding_ctrl_c():
                    done.append(_finish(problem, spec, made, run, bound, check, began))
                if run.interrupted:
                    interrupted = True
                    left_out |= {later.name: "interrupted" for later, _ in plan[at + 1 :]}
                    break
            except KeyboardInterrupt:
                if not done:
                    raise
                interrupted = True
                left_out |= {later.name: "interrupted" for later, _ in plan[at:]}
                break
            except (GraceError, MemoryError) as error:
                why = str(error) or type(error).__name__
                if asked:
                    kept = f" What had finished is in the error's .partial: {_names(done)}." if done else ""
                    raise ComparisonError(f"{spec.name}: {why}{kept}", Comparison(tuple(done), left_out)) from error
                left_out[spec.name] = why
            except Exception as error:  # a bug of the solver's: it keeps its type and traceback, the user the results
                error.partial = Comparison(tuple(done), left_out)  # type: ignore[attr-defined]
                error.add_note(f"compare() was at method {spec.name!r}; the error's .partial has what had finished.")
                raise
    return Comparison(tuple(done), left_out, interrupted)


def methods() -> list[SolverSpec]:
    """Every registered method, sorted by name.

    Examples
    --------
    >>> "mies" in [spec.name for spec in methods()]
    True
    """
    return [spec for _, spec in sorted(registry.specs().items())]


def _finish(
    problem: Problem, spec: SolverSpec, options: Any, run: Run, certified: Tensor | None, check: bool, began: float
) -> Solution:
    """Run the solver on the flattened batch and dress its result."""
    flat = problem.flatten()
    result = spec.solve(flat, options, run, check=check)
    mask = result.mask
    if check:
        check_mask(flat, mask, spec.name)
    uncertified = certified is None and result.lower_bound is None
    if check or not uncertified:  # nothing is certified for an f that is not exact
        value = objective.evaluate(flat.W, mask)
    elif result.objective is not None:
        value = result.objective
    else:
        value = objective.evaluate_fast(flat.W, mask)
    bound = _lower_bound(flat, mask, value, {spec.name: result.lower_bound, "certify=": certified}, check)
    optimal = value == bound if uncertified else proved(flat, mask, value, bound)
    if problem.integer:  # nothing lies strictly between a whole f and the next one below it
        bound = torch.where(optimal, torch.maximum(bound, value), bound)
    limit = torch.zeros_like(flat.k, dtype=torch.bool) if result.limit is None else result.limit
    elapsed = time.perf_counter() - began
    shape, export = problem.batch_shape, problem.backend.export
    indices = objective.indices_from_mask(mask, problem.k_max)
    labels = problem.labels
    return Solution(
        mask=export(mask.reshape(*shape, problem.n)),
        indices=export(indices.reshape(*shape, problem.k_max)),
        objective=export(value.reshape(shape)),
        lower_bound=export(bound.reshape(shape)),
        gap=export((_no_gap(value, bound) if uncertified else relative_gap(flat, mask, value, bound)).reshape(shape)),
        status=_statuses(optimal, limit, run.interrupted, shape),
        method=spec.name,
        options=dataclasses.asdict(options),
        seed=run.seed,
        stats={"time": elapsed, **{name: _shaped(value, shape, export) for name, value in result.stats.items()}},
        labels=None if labels is None else [labels[int(i)] for i in indices.flatten()],
        problem=problem,
    )


def _shaped(value: Any, shape: tuple[int, ...], export: Callable[[Tensor], Any]) -> Any:
    """A statistic as users see it: a tensor, whose first dimension is the flattened batch, in their kind and shape."""
    return export(value.reshape(*shape, *value.shape[1:])) if isinstance(value, Tensor) else value


def _lower_bound(
    problem: Problem, mask: Tensor, value: Tensor, found: Mapping[str, Tensor | None], check: bool
) -> Tensor:
    """The best of the bounds found, each by whom, and of what is known of forced choices; at most f."""
    bound = torch.full_like(value, -math.inf)
    for name, one in found.items():
        if one is not None:
            bound = torch.maximum(bound, bound_within_rounding(problem, mask, value, one, name) if check else one)
    bound = torch.minimum(bound, value)
    forced = (problem.k == 0) | (problem.k == count_true(problem.candidates))
    return torch.where(forced, value, bound)


def _no_gap(value: Tensor, bound: Tensor) -> Tensor:
    """`relative_gap` where nothing was certified, without a pass over W: 0 for forced choices, else infinite."""
    return torch.zeros_like(value).masked_fill(value != bound, torch.inf)


def _statuses(optimal: Tensor, limit: Tensor, interrupted: bool, shape: tuple[int, ...]) -> Any:
    stopped = Status.INTERRUPTED if interrupted else Status.LIMIT
    names = np.empty(optimal.numel(), dtype=object)
    for i, (is_optimal, is_limit) in enumerate(zip(optimal.tolist(), limit.tolist(), strict=True)):
        names[i] = Status.OPTIMAL if is_optimal else stopped if is_limit or interrupted else Status.FEASIBLE
    return names.reshape(shape) if shape else names[0]


def _names(solutions: Sequence[Solution]) -> str:
    return ", ".join(s.method for s in solutions)


def _given(k: Any) -> Any:
    if k is None:
        raise OptionError("k is missing: say how many vertices to choose, solve(W, k).")
    return k


def _deadline(time_limit: Any) -> float:
    if time_limit is None:
        return math.inf
    if isinstance(time_limit, bool) or not isinstance(time_limit, numbers.Real) or not float(time_limit) > 0:
        raise OptionError(f"time_limit={time_limit!r}: give a positive number of seconds, or leave it out.")
    return time.monotonic() + float(time_limit)


def _certificate(problem: Problem, certify: Any) -> Tensor | None:
    """The lower bounds that ``certify=`` asks for, shape (B,)."""
    if certify is False or certify is None:
        return None
    if certify is True:
        certify = bounds.LEVELS[0]
    if certify in bounds.LEVELS:
        return bounds.certificate(problem.flatten(), str(certify))
    raise OptionError(f"certify={certify!r}: give False, True or one of {', '.join(map(repr, bounds.LEVELS))}.")
