"""The commands about instances: methods, solve, compare, generate."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from .. import api, instances
from .._util.terminal import FittingTable, escape_path
from ..comparison import Comparison
from ..errors import ComparisonError, OptionError
from ..instances import generators
from ..problem import Problem
from ..problem import symmetrize as symmetrize_matrix
from ..solution import Solution
from .common import AsJson, Exit, Seed, console, errors, errors_as_exit_codes, print_json
from .constraints import Budget, ConstraintOptions, Costs, Counts, Data, Exclude, Groups, Together
from .tables import solution_table
from .values import parse_options, parse_vertices

VERTICES_HELP = (
    "vertices such as 0,3,17, counted from 0 whatever the file's format, or names that the file gives them, quoted if "
    "they have commas: '\"a,b\",c'"
)
File = Annotated[
    Path,
    typer.Argument(
        help=f"Instance: {', '.join(instances.SUFFIXES)} (k-cluster .dat, MDPLIB .txt, DIMACS .clq, .col); text also "
        "gzipped, as in W.csv.gz."
    ),
]
K = Annotated[int | None, typer.Option("-k", "--k", help="Number of vertices to choose; default: as in the file.")]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        help="Stop a method after this many seconds and keep its best choice. In solve, --certify counts as well; in "
        "compare, it gets as long once more."
    ),
]
Target = Annotated[
    float | None, typer.Option(help="Stop searching as soon as f is at most this; with --maximize, at least this.")
]
Patience = Annotated[
    float | None, typer.Option(help="Stop a search after this many seconds without improvement; not reproducible.")
]
_CERTIFIES = "--certify/--no-certify", "Compute a certified bound and the gap to it."
Certify = Annotated[bool | None, typer.Option(_CERTIFIES[0], help=_CERTIFIES[1], show_default="no-certify")]
CertifyAll = Annotated[bool | None, typer.Option(_CERTIFIES[0], help=_CERTIFIES[1], show_default="certify")]
Tight = Annotated[bool, typer.Option("--tight", help="Compute a tighter bound, which takes longer.")]
Maximize = Annotated[
    bool, typer.Option("--maximize", help="Seek the largest f: the heaviest, densest or most diverse choice.")
]
Symmetrize = Annotated[
    bool, typer.Option("--symmetrize", help="If the file's W is asymmetric, take (W + W^T)/2, which has the same f.")
]
Required = Annotated[str | None, typer.Option(help=f"Always chosen: {VERTICES_HELP}.")]
Protected = Annotated[str | None, typer.Option(help=f"Never chosen: {VERTICES_HELP}.")]


def methods(as_json: AsJson = False) -> None:
    """List the solvers, their guarantees and their options."""
    rows: list[dict[str, Any]] = [
        {
            "method": spec.name,
            "exact": spec.exact,
            "searches": spec.searches,
            "guarantee": spec.guarantee,
            "options": {field.name: field.default for field in dataclasses.fields(spec.options)},
            "summary": spec.summary,
        }
        for spec in api.methods()
    ]
    if as_json:
        print_json(rows)
        return
    table = FittingTable("method", "exact", "guarantee", "options")
    table.add_column("summary", min_width=30)
    for row in rows:
        options = "\n".join(f"{name}={value}" for name, value in row["options"].items())
        table.add_row(row["method"], "yes" if row["exact"] else "", row["guarantee"], options, row["summary"])
    console.print(table)


def solve(
    file: File,
    k: K = None,
    method: Annotated[str, typer.Option(help="Name of the solver; for a list: grace-opt methods")] = "mies",
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Option of the method, name=value; repeatable. True, False and None as in Python or JSON; start= also "
            "takes vertices, as --required does."
        ),
    ] = None,
    maximize: Maximize = False,
    symmetrize: Symmetrize = False,
    required: Required = None,
    protected: Protected = None,
    data: Data = None,
    groups: Groups = None,
    counts: Counts = None,
    exclude: Exclude = None,
    together: Together = None,
    costs: Costs = None,
    budget: Budget = None,
    seed: Seed = 0,
    time_limit: TimeLimit = None,
    target: Target = None,
    patience: Patience = None,
    certify: Certify = None,
    tight: Tight = False,
    as_json: AsJson = False,
) -> None:
    """Solve the instance in FILE by one method.

    Example: grace-opt solve W.npy -k 39 --method local_search --option start=think --certify
    """
    with errors_as_exit_codes():
        instance = _read(file, symmetrize)
        options = parse_options(option, instance.labels)
        common = _common(seed, (time_limit, target, patience), _level(certify, tight, False))
        common |= _wanted(instance, maximize, required)
        common |= ConstraintOptions(data, groups, counts, exclude, together, costs, budget).arguments(instance.labels)
        problem = _problem(instance, _k(k, instance, file), protected)
        with redirect_stdout(sys.stderr):  # libraries print too, such as SCS at Ctrl-C; stdout is for the answer
            solution = api.solve(problem, None, method, **common, **options)
    if as_json:
        print_json([solution.to_dict()])
    else:
        console.print(solution_table(solution, _notes(instance, solution)))
    _exit_unless_finished({status.name for status in np.ravel(np.asarray(solution.status, dtype=object))})


def compare(
    file: File,
    k: K = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Name of a method; repeatable. Default: all that accept this size.")
    ] = None,
    maximize: Maximize = False,
    symmetrize: Symmetrize = False,
    required: Required = None,
    protected: Protected = None,
    data: Data = None,
    groups: Groups = None,
    counts: Counts = None,
    exclude: Exclude = None,
    together: Together = None,
    costs: Costs = None,
    budget: Budget = None,
    seed: Seed = 0,
    time_limit: TimeLimit = None,
    target: Target = None,
    patience: Patience = None,
    certify: CertifyAll = None,
    tight: Tight = False,
    as_json: AsJson = False,
) -> None:
    """Solve the instance in FILE by several methods, side by side.

    Every method gets 10 seconds, unless --method or --time-limit is given.

    Example: grace-opt compare W.npz -k 39 --method think --method mies --method local_search
    """
    with errors_as_exit_codes():
        instance = _read(file, symmetrize)
        common = _common(seed, (time_limit, target, patience), _level(certify, tight, True))
        common |= _wanted(instance, maximize, required)
        common |= ConstraintOptions(data, groups, counts, exclude, together, costs, budget).arguments(instance.labels)
        problem = _problem(instance, _k(k, instance, file), protected)
        try:
            with redirect_stdout(sys.stderr):
                compared = api.compare(problem, None, method or None, **common)
        except ComparisonError as error:
            _show(instance, error.partial, as_json)
            raise
    _show(instance, compared, as_json)
    if compared.interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    if not compared:
        raise typer.Exit(Exit.SOLVER)
    rows = compared.rows()
    proved = {row["instance"] for row in rows if row["optimal"]}
    missed = {row["status"] for row in rows if row["instance"] not in proved}
    # Reaching the default limit is no failure.
    limited = method or time_limit is not None or patience is not None
    _exit_unless_finished(missed if limited else missed - {"LIMIT"})


def generate(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(generators.GENERATORS)}.")],
    n: Annotated[int, typer.Option("-n", "--n", min=1, help="Number of vertices.")],
    out: Annotated[Path, typer.Option(help="File to write; its suffix decides the format.")],
    k: Annotated[
        int | None, typer.Option("-k", "--k", help="Number to choose; KIND has a default, or says that it needs one.")
    ] = None,
    seed: Seed = 0,
    option: Annotated[
        list[str] | None,
        typer.Option(help="Option of KIND, name=value; repeatable. True, False and None as in Python or JSON."),
    ] = None,
) -> None:
    """Write a random instance of KIND to a file.

    Example: grace-opt generate k_cluster -n 40 -k 10 --option density=0.25 --out graph.dat
    """
    with errors_as_exit_codes():
        make = generators.GENERATORS.get(kind)
        if make is None:
            raise OptionError(f"no kind is called {kind!r}; there are {', '.join(generators.GENERATORS)}.")
        options = parse_options(option) | ({} if k is None else {"k": k})
        accepted = [name for name in inspect.signature(make).parameters if name not in ("n", "seed")]
        if unknown := sorted(set(options) - set(accepted)):
            raise OptionError(f"kind {kind!r} has no option {unknown[0]!r}; it accepts {', '.join(accepted)}.")
        if kind == "planted" and k is None:
            raise OptionError(f"k is missing: give the number of vertices to plant, e.g. -k {max(1, n // 2)}.")
        made = make(n, seed=seed, **options)
        stores_k = instances.suffix_of(out) in instances.SUFFIXES_WITH_K
        instances.write(out, made.W, made.k if stores_k else None)
    # If the file cannot store k, this line must say it.
    stated = "" if made.k is None else f", k = {made.k}" + ("" if stores_k else " (not in the file)")
    console.print(f"wrote {escape_path(str(out), sys.stdout)}: {kind}, n = {n}{stated}, seed {seed}", soft_wrap=True)
    if made.planted is not None:
        console.print(f"planted: {' '.join(map(str, made.planted))}", soft_wrap=True)


def _show(instance: instances.Instance, compared: Comparison, as_json: bool) -> None:
    for name, why in compared.left_out.items():
        errors.print(f"left out: {name}: {why}", style="dim", soft_wrap=True)
    if as_json:
        print_json(compared.values()["solutions"])
    elif compared:
        console.print(compared.table())
        if note := _in_source_terms(instance, compared.best):
            console.print(f"best: {note}", style="dim")


def _in_source_terms(instance: instances.Instance, solution: Solution) -> str | None:
    return instance.describe(float(solution.objective)) if np.ndim(solution.objective) == 0 else None


def _notes(instance: instances.Instance, solution: Solution) -> str | None:
    """What to say below the answer: f in the file's own terms, and that its vertices have other numbers there."""
    from_1 = "vertices count from 0 here, from 1 in the file" if instance.source in instances.COUNT_FROM_1 else None
    return "\n".join(note for note in (_in_source_terms(instance, solution), from_1) if note) or None


def _exit_unless_finished(statuses: set[str]) -> None:
    for status in (Exit.INTERRUPTED, Exit.LIMIT):  # names of `Status` as well
        if status.name in statuses:
            raise typer.Exit(status)


def _read(file: Path, symmetric: bool) -> instances.Instance:
    instance = instances.read(file)
    if symmetric and not _is_symmetric(instance.W):  # whole numbers stay whole if they can
        return dataclasses.replace(instance, W=symmetrize_matrix(instance.W))
    return instance


def _is_symmetric(W: Any) -> bool:
    if hasattr(W, "tocsr"):  # sparse
        return bool(W.shape[0] == W.shape[1] and (W != W.T).nnz == 0)
    return np.array_equal(W, W.swapaxes(-1, -2))


def _k(k: int | None, instance: instances.Instance, file: Path) -> Any:
    if k is None and instance.k is None:
        half = max(1, instance.W.shape[-1] // 2)
        raise OptionError(f"{file} does not state k: give the number of vertices to choose, e.g. -k {half}.")
    return instance.k if k is None else k


def _common(
    seed: int, stopping: tuple[float | None, float | None, float | None], certify: bool | str
) -> dict[str, Any]:
    """The arguments that `solve` and `compare` share."""
    stops = dict(zip(("time_limit", "target", "patience"), stopping, strict=True))
    return {"seed": seed, **stops, "certify": certify}


def _level(certify: bool | None, tight: bool, usual: bool) -> bool | str:
    """Which certificate is asked for."""
    if tight and certify is False:
        raise OptionError("--no-certify asks for no bound, and --tight for a tighter one: leave out one of them.")
    return "tight" if tight else usual if certify is None else certify


def _problem(instance: instances.Instance, k: Any, protected: str | None) -> Problem:
    blocked = parse_vertices("protected", protected, instance.labels)
    return Problem.of(instance.W, k, protected=blocked, labels=instance.labels)


def _wanted(instance: instances.Instance, maximize: bool, required: str | None) -> dict[str, Any]:
    """What is sought: the most, and with which vertices."""
    if maximize and instance.source in instances.OBJECTIVE_TERMS:
        factor, counted = instances.OBJECTIVE_TERMS[instance.source]
        extreme = "least" if factor < 0 else "most"  # of what the file counts
        errors.print(
            f"note: in {instance.source} files the least f is the best; --maximize seeks the {extreme} {counted}.",
            style="dim",
            soft_wrap=True,
        )
    return {"maximize": maximize, "required": parse_vertices("required", required, instance.labels)}
