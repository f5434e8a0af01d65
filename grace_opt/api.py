"""The public calls: `solve` uses one method, `compare` runs several on one problem, `methods` lists all of them.

Each solver's docstring has its references.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Never

import numpy as np
import torch
from torch import Tensor

from . import bounds, objective, registry
from ._util.array_like import as_tensor
from ._util.arrays import count_true
from ._util.names import arguments_of, refuse_unknown
from ._util.parameters import flag, integer, number, plain, shown
from ._util.progress import progress_bar
from .comparison import Comparison, best_of_sizes, several_solutions
from .errors import ComparisonError, GraceError, OptionError, ProblemError, UnknownSolverError
from .kernels._shared.limits import SMALL
from .problem import Problem, Reduction, SparseWeights
from .problem.constraints import NAMES as CONSTRAINTS
from .problem.constraints import Constraints, Row, constraints_of, refuse_infeasible
from .registry import MethodOptions, SolverSpec
from .registry.result_checks import bound_within_rounding
from .run import Progress, Run, checked_seed
from .solution import Solution, SolverResult, Status, check_mask, contradicted, labels_of, proved, relative_gap

#: Seconds that `compare` gives each method if neither methods nor a limit were given.
DEFAULT_COMPARE_SECONDS = 10.0

Certify = bool | Literal["fast", "tight"]


@np.errstate(under="ignore")  # whatever the caller has set
def solve(
    W: Any,
    k: Any = None,
    method: str | MethodOptions = "mies",
    *,
    maximize: bool = False,
    required: Any = None,
    protected: Any = None,
    groups: Any = None,
    counts: Any = None,
    exclude: Any = None,
    together: Any = None,
    costs: Any = None,
    budget: float | None = None,
    data: Any = None,
    solutions: int = 1,
    min_difference: int = 1,
    seed: int = 0,
    time_limit: float | None = None,
    target: Any = None,
    patience: float | None = None,
    certify: Certify = False,
    check: bool = True,
    callback: Callable[[Progress], Any] | None = None,
    **options: Any,
) -> Solution:
    r"""Choose the k vertices that induce the subgraph of least weight; with ``maximize=True`` of most.

    .. math::

        \min_{S \subseteq V,\; |S| = k} f(S), \qquad
        f(S) = 1_S^\top W 1_S = \sum_{i \in S} W_{ii} + 2 \sum_{i < j \in S} W_{ij}

    Parameters
    ----------
    W : array_like (..., n, n), sparse matrix, DataFrame, networkx graph, FactoredWeights, distances, or Problem
        Symmetric weights: ``W_ii`` of vertices, ``2 W_ij`` of edges. Leading dimensions are a batch. For a graph, f is
        the weight of the induced subgraph, each edge counted once. A vector (n (n - 1) / 2,) is read as scipy's
        ``pdist`` returns it. The labels of a DataFrame and the nodes of a graph come back as `Solution.labels`. A list
        of DataFrames with the same labels in the same order is a batch. A float64 array is not copied: change it, and
        what the `Solution` knows of its problem (`Solution.verify`) changes with it.
    k : int, int array broadcastable to (...), or tuple (low, high) for one instance
        Number of vertices to choose. Leave out when W is a `Problem`. A range means the best choice of any of these
        sizes: they are solved one by one, the time limit is divided among them, and bounds hold for all of them.
    method : str or options object
        A registered name (see `methods`), or a method's options as one object, such as
        ``grace_opt.solvers.TabuOptions(iterations=500)``.
    maximize : bool
        Seek the largest f: the heaviest, densest or most diverse choice. Objective and bound are in your sign: the
        certified bound is then `Solution.upper_bound`, and `target` means "at least".
    required : array_like, optional
        Always chosen: bool mask (n,) or (..., n), indices (r,), or, where W has labels, a list of them. They count
        towards k.
    protected : array_like, optional
        Never chosen: given like `required`.
    groups : sequence of n labels, mapping of several, str or list of str, optional
        The group of every vertex; several partitions by name as a mapping from names to labels. With `data`, the name
        of a column, or a list of names.
    counts : int, pair or mapping, optional
        How many to choose of each group: an int for exactly so many, a pair (low, high) with None for an open end, or a
        mapping from labels to these; labels that it does not name have no limit. Of several partitions, a mapping from
        their names to all that.
    exclude : sequence of pairs of vertices, optional
        Never both chosen. Vertices are numbers, or labels where W has labels; here and in `together`.
    together : sequence of sets of vertices, optional
        All of a set are chosen, or none.
    costs : sequence of n numbers, optional
        At least 0, or the name of a column of `data`. With `budget`: ``math.fsum`` of the chosen costs is at most that.
    budget : float, optional
    data : DataFrame, optional
        Has the columns, a row for each vertex, by W's labels or in W's order.
    solutions : int
        How many different choices to find: the best, and `Solution.others` with the best of those that differ from all
        before; fewer if there are no more, or a limit or the callback ends the search. Every one is proved, or not, as
        one is, and its bound is of what differs from those before it. For methods that take constraints.
    min_difference : int
        How many vertices of each of these are missing in every other one.
    seed : int
        Seed of all random choices.
    time_limit : float, optional
        Seconds after which the method stops with the best choice so far (Status.LIMIT). Includes the certificate, which
        gets at most half of the time and is skipped if it does not fit. Does not include the checks, nor compiling:
        some methods compile their loops at the first use on a machine, which takes some seconds once, and load them at
        the first use in a process.
    target : float, or array broadcastable to (...), optional
        Stop searching an instance as soon as its f is at most this (with ``maximize=True``, at least this);
        Status.FEASIBLE, unless it is proved optimal. A target never makes a method search longer.
    patience : float, optional
        Stop searching an instance after this many seconds without a better choice (Status.LIMIT). As with a time limit,
        methods that have no natural end search until then, and answers depend on the machine.
    certify : bool, "fast" or "tight"
        Compute a lower bound with `grace_opt.bounds.certificate` after the method has run, for the instances that it
        has not proved optimal (True means "fast"). Its share of a time limit is the method's loss: the answer may be
        worse than without it. If it is False, only branch_and_bound, exhaustive, portfolio (at level
        "fast") and sdp give a bound.
    check : bool
        False skips the checks that read W's data, and leaves the objective in W's own precision: for trusted callers.
    callback : callable, optional
        Called with a `Progress` now and then by tabu, annealing, branch_and_bound and portfolio, one call at a time per
        instance.
        If it returns True, the method stops with the best choice so far (Status.LIMIT).
    **options
        The method's own options, if `method` is a name; an unknown option raises an error that lists the known ones.

    Returns
    -------
    Solution
        numpy in, numpy out; torch in, torch out on the same device. Its status is Status.OPTIMAL if objective and bound
        are equal within 1e-9 of ``|objective|``, or within its rounding if that is more; of integers within less than
        a step, such as 1 (`Problem.step`), and beyond 2⁵² units exactly. All of it is the same for any multiple of W.

    Raises
    ------
    ProblemError, OptionError, UnknownSolverError, SolverError
        `InfeasibleConstraintsError`, a ProblemError, if no choice keeps all constraints: it names a smallest set of
        them that contradict each other. SolverError if the method takes no constraints: it names those that do.

    Notes
    -----
    Complexity is the method's, plus O(n²) per instance for the checks and the objective.

    A time limit is checked between steps. A step that cannot be interrupted (an eigenvalue problem of thousands of
    vertices takes seconds) starts only if it seems to fit. The first choice is always made: a greedy pass, O(kn) per
    instance. The limit may be exceeded by a twentieth, or by a tenth of a second if that is more. A bound that does not
    fit is skipped.

    `target` and `patience` are checked together with the clock, by the methods that search: tabu, annealing,
    local_search, portfolio, branch_and_bound, exhaustive and beam (`SolverSpec.searches`). They have no effect on mies,
    think, drop_greedy and random, which do not search, and on sdp, which spends its time on a bound. Patience starts
    with the search of each instance; in portfolio, with each of its searches.

    Ctrl-C stops a method that searches at its next look at the clock, as a time limit does: the best choice so far is
    returned with its bound and Status.INTERRUPTED, for every instance of a batch. A second Ctrl-C, or one before there
    is a choice, raises KeyboardInterrupt; so does one during mies, think, drop_greedy or random. In a loop, check the
    status. None of this applies outside the main thread, or if the program installs its own handler for Ctrl-C.

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

    Options as one object, and a search that stops at f ≤ 6:

    >>> from grace_opt.solvers import TabuOptions
    >>> searched = solve(W, 2, TabuOptions(iterations=500), target=6)
    >>> searched.method, searched.options["iterations"], float(searched.objective)
    ('tabu', 500, 5.0)

    The heaviest pair that has vertex 1:

    >>> heaviest = solve(W, 2, "exhaustive", maximize=True, required=[1])
    >>> heaviest.indices, float(heaviest.objective), float(heaviest.upper_bound)
    (array([0, 1]), 9.0, 9.0)

    One vertex of each group:

    >>> solve(W, 2, "exhaustive", groups=["a", "b", "a"], counts=1).indices
    array([1, 2])

    The two best choices:

    >>> first = solve(W, 2, "exhaustive", solutions=2)
    >>> [(one.indices.tolist(), float(one.objective)) for one in (first, *first.others)]
    [([0, 2], 5.0), ([1, 2], 8.0)]
    """
    several = integer("solutions", solutions, at_least=1), integer("min_difference", min_difference, at_least=1)
    constraints = (groups, counts, exclude, together, costs, budget, data)
    if isinstance(k, tuple) and (sizes := _sizes(W, k, protected, check)) is not None:
        given, low, high = sizes
        if several[0] > 1:
            raise OptionError(f"solutions={several[0]} are of one size: give k as a number, or leave solutions= out.")
        reduced = _reduced(given, None, None, required, maximize, check, constraints)
        _refuse_infeasible(reduced, low)
        if reduced.problem.required is not None:  # smaller sizes have no choice
            low = max(low, int(count_true(reduced.problem.required)))
        alike = {"maximize": maximize, "required": required, "seed": seed, "target": target, "patience": patience}
        alike |= {"certify": certify, "check": check, **dict(zip(CONSTRAINTS, constraints, strict=True)), **options}

        def one(size: int, **more: Any) -> Solution:
            return solve(given.with_size(size), None, method, **alike, **more)

        return best_of_sizes(
            range(low, high + 1),
            one,
            maximize=flag("maximize", maximize),
            time_limit=number("time_limit", time_limit, above=0, infinite=True, optional=True, hint="in seconds"),
            target=None if target is None else number("target", target, infinite=True),
            callback=_checked_callback(callback),
        )
    reduction = _reduced(W, k, protected, required, maximize, check, constraints)
    problem = reduction.problem
    callback = _checked_callback(callback)
    spec, made = registry.chosen(method, options, arguments_of(solve) if options else ())
    reduction.check_options(made)
    spec.refuse_constraints(problem, several[0] > 1)
    stopping = _Stopping.of(reduction, time_limit, target, patience)
    seed, level = checked_seed(seed), _level(certify)
    if several[0] > 1:
        given = _of_one_instance(reduction.given, f"solutions={several[0]}")
        rows = () if given.constraints is None else given.constraints.rows
        alike = {"maximize": maximize, "required": required, "seed": seed, "target": target, "patience": patience}
        alike |= {"certify": certify, "check": check, **options}
        if several[1] > given.k_max:
            raise OptionError(
                f"min_difference={several[1]}: choices of k = {given.k_max} vertices cannot differ in more than "
                f"{given.k_max}."
            )

        def another(more: tuple[Row, ...], **limits: Any) -> Solution:
            constrained = replace(given, constraints=Constraints((*rows, *more), given.n)) if rows or more else given
            return solve(constrained, None, method, **alike, **limits)

        return several_solutions(*several, another, time_limit=time_limit, callback=callback)
    _refuse_infeasible(reduction)
    if stopping.timed:
        _prepare(spec, level, problem)
    run = stopping.run(seed, callback=reduction.callback(callback))
    with run.stopping_on_ctrl_c():
        answer = _answer(reduction.flat, spec, made, run, level, check)
        _certify(reduction.flat, [answer], level, run.beside_search())
        return _finish(reduction, answer)


@np.errstate(under="ignore")  # whatever the caller has set
def compare(
    W: Any,
    k: Any = None,
    methods: Sequence[str | MethodOptions] | None = None,
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    maximize: bool = False,
    required: Any = None,
    protected: Any = None,
    groups: Any = None,
    counts: Any = None,
    exclude: Any = None,
    together: Any = None,
    costs: Any = None,
    budget: float | None = None,
    data: Any = None,
    seed: int = 0,
    time_limit: float | None = None,
    target: Any = None,
    patience: float | None = None,
    certify: Certify = False,
    check: bool = True,
    progress: bool | None = None,
    **unknown: Never,
) -> Comparison:
    """Solve one problem by several methods, and return their solutions in the order given.

    Parameters
    ----------
    W, k
        As in `solve`; the checks run once.
    methods : sequence of str or options objects, optional
        Names or options objects, as in `solve`. Default: every method. Those that refuse the instance, or need a
        library that is not installed, are then listed with the reason in `Comparison.left_out`.
    options : mapping, optional
        Options by name of the method: ``{"local_search": {"start": "think"}}``.
    maximize, required, protected, seed, target, patience, check
        As in `solve`, for every method.
    groups, counts, exclude, together, costs, budget, data
        As in `solve`: methods that take no constraints refuse them.
    certify : bool, "fast" or "tight"
        As in `solve`, but once, after all methods: for the best answer to each instance, unless a method proved it
        optimal. Every solution then gets the best bound known. Skipped if the comparison fails or a method is
        interrupted.
    time_limit : float, optional
        As in `solve`, for each method, and again for the certificate. Default: none if `methods` is given, else
        `DEFAULT_COMPARE_SECONDS` each, since some methods would search for hours.
    progress : bool, optional
        Show a progress bar on stderr; default: if stderr is a terminal and it takes longer than a second or two. False
        also leaves out the line that says that loops are being compiled.
    **unknown
        Refused, with the argument that may be meant.

    Returns
    -------
    Comparison
        A sequence of `Solution`, with a table, a DataFrame and JSON. Ctrl-C stops the comparison and returns the
        solutions so far, including that of the running method, with ``interrupted`` set.

    Raises
    ------
    ComparisonError
        If a method in `methods` fails or refuses the instance; ``partial`` is the `Comparison` of the methods that
        had finished. Any other exception is a bug in a solver: it keeps its type, and also gets ``partial``.
    ProblemError, OptionError, UnknownSolverError
        As in `solve`, before any method runs.

    Notes
    -----
    Complexity is the sum of the methods'. All methods solve the same instance, so the best bound of any method
    holds for all; gaps in the table are relative to it.

    Examples
    --------
    >>> both = compare([[4.0, 1.0, -2.0], [1.0, 3.0, 0.0], [-2.0, 0.0, 5.0]], 2, ["mies", "exhaustive"])
    >>> [float(s.objective) for s in both], both.best.method
    ([8.0, 5.0], 'exhaustive')
    """
    refuse_unknown(compare, unknown)
    if isinstance(methods, str) or dataclasses.is_dataclass(methods):
        raise OptionError(f"methods={shown(methods)}: give a list, [{shown(methods)}].")
    if not (methods is None or isinstance(methods, Iterable)):
        raise OptionError(f"methods={shown(methods)}: give a list of methods, such as ['mies', 'tabu'].")
    by_name = {} if options is None else options
    if not isinstance(by_name, Mapping) or not all(isinstance(each, Mapping) for each in by_name.values()):
        raise OptionError(f"options={shown(options)}: give a dict of dicts, such as {{'tabu': {{'iterations': 500}}}}.")
    constraints = (groups, counts, exclude, together, costs, budget, data)
    reduction = _reduced(W, k, protected, required, maximize, check, constraints)
    problem = reduction.problem
    asked = methods is not None
    given = sorted(registry.specs()) if methods is None else list(methods)
    if not given:
        raise OptionError("methods=[] names no method: give at least one, or leave methods= out for all of them.")
    names = [each for each in given if isinstance(each, str)]
    if stray := [name for name in by_name if name not in names]:
        raise OptionError(
            f"options= names {stray[0]!r}, which is not among the names of methods compared: {', '.join(names)}."
        )
    cap = methods is None and time_limit is None
    stopping = _Stopping.of(reduction, DEFAULT_COMPARE_SECONDS if cap else time_limit, target, patience)
    plan, left_out = [], {}
    for each in given:
        try:
            plan.append(registry.chosen(each, by_name.get(each, {}) if isinstance(each, str) else {}))
        except UnknownSolverError as error:
            if asked:
                raise
            left_out[str(each)] = str(error)
    for _, made in plan:
        reduction.check_options(made)
    _refuse_infeasible(reduction)
    seed, level = checked_seed(seed), _level(certify)
    answers: list[_Answer] = []
    interrupted = False

    def finished() -> tuple[Solution, ...]:
        return tuple(_finish(reduction, answer) for answer in answers)

    with progress_bar(progress, len(plan)) as show:
        for at, (spec, made) in enumerate(plan):
            try:
                show(spec.name, at)
                if stopping.timed and not (cap and problem.n**2 <= SMALL):
                    _prepare(spec, level, problem)
                run = stopping.run(seed, cap=cap)
                with run.stopping_on_ctrl_c():
                    answers.append(_answer(reduction.flat, spec, made, run, None, check))
                if run.interrupted:
                    interrupted = True
                    left_out |= {later.name: "interrupted" for later, _ in plan[at + 1 :]}
                    break
            except KeyboardInterrupt:
                if not answers:
                    raise
                interrupted = True
                left_out |= {later.name: "interrupted" for later, _ in plan[at:]}
                break
            except (GraceError, MemoryError) as error:
                why = str(error) or type(error).__name__
                if asked:
                    kept = f" Finished before, in the error's .partial: {_names(answers)}." if answers else ""
                    raise ComparisonError(f"{spec.name}: {why}{kept}", Comparison(finished(), left_out)) from error
                left_out[spec.name] = why
            except Exception as error:  # a bug in a solver: keep its type and traceback, and the results so far
                error.partial = Comparison(finished(), left_out)  # type: ignore[attr-defined]
                error.add_note(f"compare() was running {spec.name!r}; finished methods are in the error's .partial.")
                raise
    if answers and not interrupted:
        run = stopping.run(seed, cap=cap).beside_search()
        run.ctrl_c_stops()  # the answers are there
        try:
            with run.stopping_on_ctrl_c():
                _certify(reduction.flat, answers, level, run)
            interrupted = run.interrupted
        except KeyboardInterrupt:  # pressed twice
            interrupted = True
    return Comparison(finished(), left_out, interrupted)


def methods() -> list[SolverSpec]:
    """Return every registered method, sorted by name.

    Examples
    --------
    >>> "mies" in [spec.name for spec in methods()]
    True
    """
    return [spec for _, spec in sorted(registry.specs().items())]


@dataclass
class _Answer:
    """What one method found on the flattened batch, and the best bound known."""

    spec: SolverSpec
    options: Any
    run: Run
    result: SolverResult
    value: Tensor
    bound: Tensor | None
    elapsed: float


def _answer(flat: Problem, spec: SolverSpec, options: Any, run: Run, level: str | None, check: bool) -> _Answer:
    """Run the solver on the flattened batch, leaving time for a certificate of this level."""
    began = time.perf_counter()
    by_itself = getattr(options, "bound", None) in (level, bounds.LEVELS[-1])  # it leaves time for a certificate
    own = run if level is None or by_itself else run.leaving(bounds.seconds_to_certify(flat, level))
    result = spec.solve(flat, options, own, check=check)
    if run.stopped_at is not None:  # perhaps at its last call, after which the method had nothing to do
        limit = torch.zeros_like(flat.k, dtype=torch.bool) if result.limit is None else result.limit.clone()
        limit[run.stopped_at] = True
        result = replace(result, limit=limit)
    if check:
        check_mask(flat, result.mask, spec.name)
    if check or level is not None or result.lower_bound is not None:
        value = flat.weights.objective(result.mask)  # nothing is certified for an f that is not exact
    elif result.objective is not None:
        value = result.objective
    else:
        value = flat.weights.objective_fast(result.mask)
    bound = result.lower_bound
    if bound is not None:
        bound = (
            bound_within_rounding(flat, result.mask, value, bound, spec.name) if check else torch.minimum(bound, value)
        )
        if result.certified is not None and flat.weights.whole_at_once():
            # The method saw tensors.
            bound = torch.minimum(torch.maximum(bound, bounds.form_bound(flat, run.beside_search())), value)
    return _Answer(spec, options, run, result, value, bound, time.perf_counter() - began)


def _certify(flat: Problem, answers: Sequence[_Answer], level: str | None, run: Run) -> None:
    """Give every answer the best bound known, after computing one of this level for instances not yet proved."""
    if level is None:
        return
    masks, value = answers[0].result.mask.clone(), answers[0].value.clone()
    best = torch.full_like(value, -math.inf)
    for answer in answers:
        better = answer.value < value
        masks[better], value[better] = answer.result.mask[better], answer.value[better]
    for answer in answers:
        if answer.bound is not None:  # a wrong one, of another package's method, must not become everybody's
            best = torch.maximum(best, answer.bound.masked_fill(contradicted(answer.bound, value), -math.inf))
    done = any(answer.result.certified in (level, bounds.LEVELS[-1]) for answer in answers)
    rows = (~proved(flat, masks, value, best) & ~(done & best.isfinite())).nonzero().squeeze(-1)
    if len(rows):
        run.go_on()
        found = bounds.certificate(flat.instances(rows), level, incumbent=masks[rows], run=run)
        best[rows] = torch.maximum(best[rows], found)
    for answer in answers:
        own = answer.bound
        answer.bound = best if own is None else torch.where(contradicted(own, value), own, best)


def _finish(reduction: Reduction, answer: _Answer) -> Solution:
    """Turn a method's answer into a `Solution` of the problem as given."""
    problem, result, spec, run = reduction.given, answer.result, answer.spec, answer.run
    flat, mask, uncertified = reduction.whole, reduction.full(result.mask), answer.bound is None
    value = reduction.value(answer.value, mask)
    bound = _lower_bound(reduction.flat, value, None if answer.bound is None else reduction.bound(answer.bound))
    optimal = value == bound if uncertified else proved(flat, mask, value, bound)
    if problem.integer:  # nothing lies strictly between a whole f and the next one below it
        bound = torch.where(optimal, torch.maximum(bound, value), bound)
    gap = _no_gap(value, bound) if uncertified else relative_gap(flat, mask, value, bound)
    limit = torch.zeros_like(flat.k, dtype=torch.bool) if result.limit is None else result.limit
    shape, export = problem.batch_shape, problem.backend.export
    indices = objective.indices_from_mask(mask, problem.k_max).reshape(*shape, problem.k_max)
    f, other = (export(reduction.signed(each).reshape(shape)) for each in (value, bound))
    stats = reduction.stats(dict(result.stats), result.objective_stats)
    required = reduction.problem.required
    return Solution(
        mask=export(mask.reshape(*shape, problem.n)),
        indices=export(indices),
        objective=f,
        lower_bound=f if reduction.maximize else other,
        upper_bound=other if reduction.maximize else f,
        gap=export(gap.reshape(shape)),
        status=_statuses(optimal, limit, run.interrupted, shape),
        method=spec.name,
        options=dataclasses.asdict(answer.options),
        seed=run.seed,
        stats={"time": answer.elapsed, **{name: _shaped(each, shape, export) for name, each in stats.items()}},
        labels=None if problem.labels is None else labels_of(indices.tolist(), problem.labels),
        maximize=reduction.maximize,
        required=None if required is None else export(required),
        problem=problem,
    )


def _reduced(
    W: Any, k: Any, protected: Any, required: Any, maximize: Any, check: bool, constraints: tuple[Any, ...]
) -> Reduction:
    """The problem as given, checked, and the one that solvers get."""
    flag("check", check)
    if isinstance(W, Problem) and (k is not None or protected is not None):
        raise OptionError("W is a Problem, which holds k and protected already: leave k= and protected= out.")
    given = W if isinstance(W, Problem) else Problem.of(W, _given(k), protected=protected, check=check)
    if any(each is not None for each in constraints):
        given = _constrained(given, dict(zip(CONSTRAINTS, constraints, strict=True)))
    return Reduction.of(given, required=required, maximize=maximize, check=check)


def _sizes(W: Any, k: tuple[Any, ...], protected: Any, check: bool) -> tuple[Problem, int, int] | None:
    """The instance and the range of its sizes; None if k is not one, but a size for each instance of a batch."""
    if len(k) != 2 or isinstance(W, Problem) or _is_batch(W):
        return None
    low, high = (integer("k", size, at_least=0, error=ProblemError) for size in k)
    if low > high:
        raise ProblemError(f"k={k}: give a range of sizes as (low, high), the smaller one first.")
    flag("check", check)
    some = Problem.of(W, low, protected=protected, check=check)
    free = int(count_true(some.candidates))
    if free < high <= some.n:
        high = free  # larger sizes have no choice
    if high > some.n:
        Problem.of(W, high, check=check)  # refuses it
    return some.with_size(high), low, high


def _is_batch(W: Any) -> bool:
    """Whether W has leading dimensions; a list of graphs or frames has one."""
    depth = 0
    while isinstance(W, list | tuple) and W:
        W, depth = W[0], depth + 1
    return depth + (2 if hasattr(W, "adjacency") else len(getattr(W, "shape", ()))) > 2


def _checked_callback(callback: Any) -> Callable[[Progress], Any] | None:
    if callback is not None and not callable(callback):
        raise OptionError(f"callback={callback!r}: give a function of a Progress, or leave it out.")
    return callback  # type: ignore[no-any-return]


def _constrained(given: Problem, asked: Mapping[str, Any]) -> Problem:
    """The problem with the constraints that are asked for."""
    given = _of_one_instance(given, f"constraints ({_asked(asked)})")
    return replace(given, constraints=constraints_of(given.n, given.labels, **asked))


def _of_one_instance(given: Problem, what: str) -> Problem:
    """The problem; ProblemError if it is a batch."""
    if math.prod(given.batch_shape) != 1:
        raise ProblemError(
            f"W is a batch of shape {given.batch_shape}, and {what} are those of one instance: solve its instances one "
            "by one."
        )
    return given


def _asked(asked: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}=" for name, value in asked.items() if value is not None)


def _refuse_infeasible(reduction: Reduction, least: int | None = None) -> None:
    """Raise InfeasibleConstraintsError if no choice, of this size or of one from `least` on, keeps the constraints."""
    given = reduction.given
    if given.constraints is not None:
        required = reduction.problem.required
        candidates, k = given.candidates.reshape(-1), int(given.k.reshape(()))
        flat = None if required is None else required.reshape(-1)
        refuse_infeasible(given.constraints, (k if least is None else least, k), candidates, flat, given.labels)


def _prepare(spec: SolverSpec, level: str | None, problem: Problem) -> None:
    """Have everything compiled before a time limit starts to run."""
    spec.prepare(problem.weights, problem.constraints is not None)
    if level is not None or spec.compiled:
        bounds.prepare(sparse=problem.weights.form == SparseWeights.form)


def _shaped(value: Any, shape: tuple[int, ...], export: Callable[[Tensor], Any]) -> Any:
    """A statistic for users: a tensor over the flattened batch gets the batch's shape and W's kind of array."""
    return export(value.reshape(*shape, *value.shape[1:])) if isinstance(value, Tensor) else value


def _lower_bound(problem: Problem, value: Tensor, found: Tensor | None) -> Tensor:
    """The bound found, at most f; f itself if there is only one choice."""
    bound = torch.full_like(value, -math.inf) if found is None else torch.minimum(found, value)
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


def _names(answers: Sequence[_Answer]) -> str:
    return ", ".join(answer.spec.name for answer in answers)


def _given(k: Any) -> Any:
    if k is None:
        raise OptionError("k is missing: give the number of vertices to choose, solve(W, k).")
    return k


@dataclass(frozen=True)
class _Stopping:
    """When to stop: the checked arguments of `solve`, from which each method gets its own `Run`."""

    time_limit: float
    targets: tuple[float, ...]
    patience: float

    @classmethod
    def of(cls, reduction: Reduction, time_limit: Any, target: Any, patience: Any) -> _Stopping:
        limit = number("time_limit", time_limit, above=0, infinite=True, optional=True, hint="in seconds")
        wait = number("patience", patience, above=0, infinite=True, optional=True, hint="in seconds")
        targets = reduction.targets(_targets(reduction.given, target))
        return cls(math.inf if limit is None else limit, targets, math.inf if wait is None else wait)

    @property
    def timed(self) -> bool:
        """Whether seconds are counted, so that compiling should come before."""
        return min(self.time_limit, self.patience) < math.inf

    def run(self, seed: int, callback: Callable[[Progress], Any] | None = None, cap: bool = False) -> Run:
        """The clock starts now."""
        deadline = time.monotonic() + self.time_limit
        return Run(seed, deadline, callback, cap, targets=self.targets, patience=self.patience)


def _targets(problem: Problem, target: Any) -> tuple[float, ...]:
    """The target of every instance of the flattened batch; none at all where none was given."""
    shape = problem.batch_shape
    if target is None:
        return ()
    if not isinstance(target, list | tuple) and getattr(target, "shape", ()) == ():
        return (number("target", target, infinite=True),) * math.prod(shape)
    wanted = f"a number, or one for each instance, of shape {shape}"
    try:
        given = as_tensor(target, "target", wanted)
        if given.dtype == torch.bool or bool(given.isnan().any()):
            raise OptionError(f"target={shown(target)}: give {wanted}.")
        return tuple(given.to("cpu", torch.float64).expand(shape).flatten().tolist())
    except (ProblemError, RuntimeError):
        raise OptionError(f"target={shown(target)}: give {wanted}.") from None


def _level(certify: Any) -> str | None:
    """The level of `bounds.certificate` that ``certify=`` asks for."""
    given = plain(certify)
    if given is False or given is None:
        return None
    if given is True:
        return bounds.LEVELS[0]
    if isinstance(given, str) and given in bounds.LEVELS:
        return given
    raise OptionError(f"certify={shown(certify)}: give False, True or one of {', '.join(map(repr, bounds.LEVELS))}.")
