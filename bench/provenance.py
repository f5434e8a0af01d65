"""Where a number comes from: date, machine, versions, commit and command, stored beside every committed result.

Every report calls `refuse`, which rejects numbers of several commits or of uncommitted files. ``--allow-dirty`` accepts
them, and the page then says at its top that it must not be committed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grace_opt._util.files import atomic_write
from grace_opt.sweep.measure import cpu_name

#: Lists changed files, except results and model cards, which a measurement writes.
DIRTY = ("status", "--porcelain", "-uno", "--", ":/", ":!/docs/results", ":!/grace_opt/data")
#: Lists uncommitted code: a measurement may have imported it.
UNTRACKED = ("ls-files", "--others", "--exclude-standard", "--full-name", "--", ":/*.py")
PACKAGES = ("numpy", "scipy", "torch", "numba", "transformers")
#: Follows a commit whose files were changed; replaces it where git knows no commit.
CHANGED, NONE = "+", "none"


class MixedError(SystemExit):
    """Numbers that one page must not mix; says which they are and what to do."""


def provenance() -> dict[str, Any]:
    """Return what a reader needs to judge and repeat a measurement, without names or paths of the machine."""
    given = "".join(f" {shlex.quote(_without_folder(argument))}" for argument in sys.argv[1:])
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"python -m {module_name()}{given}",
        "commit": commit(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def commit() -> str:
    """Return the commit that is checked out, with a plus if files differ from it."""
    found = _git("rev-parse", "--short=7", "HEAD")
    return (found + CHANGED * bool(_git(*DIRTY) or _git(*UNTRACKED))) if found else NONE


def is_clean(source: Mapping[str, Any]) -> bool:
    """Return whether everything measured is in one commit."""
    name = str(source["commit"])
    return name != NONE and CHANGED not in name and ", " not in name


def require_clean(allow_dirty: bool) -> dict[str, Any]:
    """Return the `provenance` of this run; raise before anything is measured if its numbers could not be committed.

    Raises
    ------
    MixedError
    """
    return refuse({"this run": provenance()}, allow_dirty)


def refuse(sources: Mapping[str, Mapping[str, Any]], allow_dirty: bool = False) -> dict[str, Any]:
    """Merge provenances into one if all are of one clean commit; where they differ otherwise, list all values.

    Parameters
    ----------
    sources : mapping
        Maps what was measured (words or a file's name) to its provenance. Records may hold only date and commit.
    allow_dirty : bool
        Accept them in any case; `is_clean` of the result is then False.

    Raises
    ------
    MixedError
        Names the commits, and what was measured at each.

    Examples
    --------
    >>> both = refuse({"a": {"commit": "1234567", "cores": 2}, "b": {"commit": "1234567", "cores": 4}})
    >>> both["commit"], both["cores"]
    ('1234567', '2; 4')
    """
    by_commit: dict[str, list[str]] = {}
    for name, source in sources.items():
        by_commit.setdefault(str(source["commit"]), []).append(name)
    dirty = [name for name in by_commit if not is_clean({"commit": name})]
    if not allow_dirty and (dirty or len(by_commit) > 1):
        found = "; ".join(f"{name}: {_some(of)}" for name, of in by_commit.items())
        why = (
            f"some files differ from commit {dirty[0].rstrip(CHANGED)}: commit them and measure again"
            if dirty and dirty[0] != NONE
            else "git knows no commit here: measure in a checkout"
            if dirty
            else "a page cannot mix numbers of several commits: measure the older ones again"
        )
        raise MixedError(f"{why}, or pass --allow-dirty to try it out. Numbers by commit: {found}")
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for source in sources.values() for name in source):
        values = list(dict.fromkeys(source[name] for source in sources.values() if name in source))
        joined = ", " if name == "commit" else "; "
        merged[name] = values[0] if len(values) == 1 else joined.join(map(str, values))
    if len(dates := sorted({str(source["date"]) for source in sources.values() if "date" in source})) > 1:
        merged["date"] = f"{dates[0]} to {dates[-1]}"
    return merged


def module_name() -> str:
    """Return the name of the running ``python -m`` module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as name:
        name.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def recorded(
    path: Path,
    settings: Mapping[str, Any],
    source: Mapping[str, Any],
    measure: Callable[[], Mapping[str, Any]],
    beside: Path | None = None,
) -> dict[str, Any]:
    """Return the record in a file if this clean commit made it with these settings; else measure, and write it.

    Parameters
    ----------
    path : Path
    settings : mapping
        All that the record depends on but the commit.
    source : mapping
        From `require_clean`. If files differ from the commit, nothing is read again.
    measure : callable
        Returns the record without ``settings``, ``date`` and ``commit``.
    beside : Path, optional
        A file that `measure` writes in the same folder: without it, the record counts for nothing.
    """
    about = json.loads(json.dumps({**settings, "commit": source["commit"]}, default=str))  # tuples are lists then
    if is_clean(source) and (beside is None or beside.exists()):
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found.get("settings") == about:
                return found
        except (OSError, ValueError):
            pass  # there is none that can be read: it is measured
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"settings": about, "date": source["date"], "commit": source["commit"], **measure()}
    write_json(path, record)
    return record


def origin_of(source: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the provenance of a record that this run has read or made."""
    return {**source, "date": record["date"], "commit": record["commit"]}


def digest(*tensors: Any) -> str:
    """Return the SHA-256 of all numbers of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy())
    return found.hexdigest()


def caption(source: Mapping[str, Any]) -> str:
    """Return the line under a page: command, date, commit, machine, versions."""
    packages = ", ".join(f"{name} {source[name]}" for name in PACKAGES if name in source)
    return (
        f"`{source['command']}`, {source['date']}, commit {source['commit']}, {source['cores']} cores of "
        f"{source['cpu']}, Python {source['python']}, {packages}."
    )


def _without_folder(argument: str) -> str:
    """An argument, without the folders of a path that lies outside the checkout."""
    option, equals, path = argument.rpartition("=")
    return option + equals + (Path(path).name if path.startswith(("/", "~", "..")) else path)


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
    except FileNotFoundError:  # no git here
        return ""
    return done.stdout.strip()
