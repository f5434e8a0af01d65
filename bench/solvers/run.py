"""Measure the cells that have no record yet, by `grace_opt.sweep`: a warm process per method, one cell at a time.

When: `python -m bench.solvers run`. Ctrl-C keeps every finished cell; the same command continues from there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.provenance import is_clean, provenance
from bench.solvers import measure, suites
from bench.solvers.evidence import commits, read_all
from bench.solvers.sets import COLLECTIONS, lines_digest, published
from grace_opt.errors import OptionError
from grace_opt.sweep import Cell, WarmProcesses, run_sweep

Say = Callable[[str], None]


def run(
    data: Path,
    out: Path,
    size: str,
    say: Say,
    *,
    names: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
    retry_failed: bool = False,
    progress: bool | None = None,
) -> int:
    """Measure what is missing, and return how many cells that was.

    Parameters
    ----------
    data : Path
        The folder that `bench.solvers.fetch` filled.
    out : Path
        Folder for the records.
    size : str
        A key of `suites.SIZES`.
    say : callable
        Called with each message.
    names, methods : sequences of str, optional
        Only these suites and methods, to try something out; default: all.
    retry_failed : bool
        Measure failed cells again.
    progress : bool or None
        As in `run_sweep`.
    """
    source = provenance()
    if others := sorted(commits(read_all(out)) - {source["commit"]}):
        raise OptionError(
            f"{out} holds cells of commit {', '.join(others)}, this is {source['commit']}: a page shows one commit "
            "only. Give another --out, or delete that folder."
        )
    if not is_clean(source):
        say("Files differ from the commit: the report will refuse these cells unless you pass --allow-dirty.")
    planned = _planned(data, size, names, methods, say)
    todo: dict[str, list[Cell]] = {}
    for suite, cells in planned.items():
        if retry_failed:
            _forget_failed(out, cells)
        todo[suite] = [cell for cell in cells if not cell.path(out).exists()]
    say(f"{sum(map(len, todo.values()))} of {sum(map(len, planned.values()))} cells to measure")
    done = 0
    with WarmProcesses(
        lambda config: str(config["method"]),
        warm_up=measure.warm_up,
        time_limit=measure.patience,
        lost=measure.lost,
        logs=out / "logs",
    ) as processes:
        for at, (suite, cells) in enumerate(planned.items(), 1):
            say(f"suite {at} of {len(planned)}: {suite}, {len(todo[suite])} cells")
            function = functools.partial(measure.measure, str(data))
            result = run_sweep(cells, function, out, processes=processes, provenance=source, progress=progress)
            for failure in result.failures:
                say(f"  failed: {failure.config['method']} on {failure.config['instance']}: {failure.error}")
            done += result.made
            later = {cell.config["method"] for name in list(planned)[at:] for cell in todo[name]}
            for method in processes.names:
                if method not in later:
                    processes.end(method)
    return done


def _planned(
    data: Path, size: str, names: Sequence[str] | None, methods: Sequence[str] | None, say: Say
) -> dict[str, list[Cell]]:
    """Return the cells of each suite whose instances and methods are available; `say` gets the others and why."""
    known = suites.SUITES | suites.OTHERS
    found: dict[str, list[Cell]] = {}
    reasons: dict[str, str | None] = {}
    for name in _checked(names):
        try:
            configs = known[name](data, suites.SIZES[size])
        except FileNotFoundError as error:
            if names is not None:
                raise OptionError(f"suite {name}: {error}") from error
            say(f"suite {name} is left out: {error}")
            continue
        for method in {config["method"] for config in configs} - reasons.keys():
            reasons[method] = suites.missing(method)
        wanted = [c for c in configs if reasons[c["method"]] is None and (methods is None or c["method"] in methods)]
        if wanted:
            found[name] = [Cell(name, config) for config in wanted]
    for method, why in sorted(reasons.items()):
        if why is not None:
            say(f"{method} is left out: {why}")
    if not found:
        raise OptionError("nothing can be measured: no suite has both its instances and its methods.")
    _check_public(data, found)
    return found


def _checked(names: Sequence[str] | None) -> list[str]:
    known = suites.SUITES | suites.OTHERS
    for name in names or ():
        if name not in known:
            raise OptionError(f"no suite is called {name!r}; there are {', '.join(known)}.")
    return [name for name in known if name in (suites.SUITES if names is None else names)]


def _check_public(data: Path, planned: dict[str, list[Cell]]) -> None:
    """Refuse files that are not the published ones: the published values would not be theirs."""
    for name in COLLECTIONS:
        digests = {one.file: one.sha256 for one in published(name)}
        for file in sorted({cell.config["instance"].partition("/")[2] for cell in planned.get(name, [])}):
            path = data / name / file
            if lines_digest(path.read_bytes()) != digests[file]:
                raise OptionError(
                    f"{path} is not the published file (SHA-256 of its lines differs): fetch {name} again."
                )


def _forget_failed(out: Path, cells: Sequence[Cell]) -> None:
    wanted = {cell.key for cell in cells}
    for record in read_all(out):
        if record.cell.key in wanted and any(row["status"] == "failed" for row in record.rows):
            record.cell.path(out).unlink()
