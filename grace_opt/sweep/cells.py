"""`Cell`, one measurement of a sweep, and its record: one JSON file, named after what was asked for.

When: whenever results are to survive whatever stops the program. A record is written atomically and synced to disk,
so that it is there as a whole or not at all, and it carries a digest of itself. One that is cut short, was edited, or
is of another version is an error that names the file: it is neither used nor overwritten.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._util.files import make_folder, write_file
from ..errors import GraceError, OptionError

#: Version of the files that a sweep writes. A change of it changes every key, so that no old record is taken for a new.
FORMAT = 1
#: JSON has no NaN and no infinities; they are written as ``{"$float": "nan"}``.
NONFINITE_KEY = "$float"


class SweepError(GraceError, RuntimeError):
    """A sweep or its report cannot go on: a record that cannot be trusted, a full disk, workers that die."""


def check_name(name: Any) -> None:
    """Raise an `OptionError` unless the name of an experiment can be that of a folder and of a page, wherever."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name == "index":
        raise OptionError(f"experiment={name!r}: write lower-case letters, digits, _ and - only, and not 'index'.")


@dataclass(frozen=True)
class Cell:
    """One measurement: the experiment that it belongs to and the settings that it is made with.

    Attributes
    ----------
    experiment : str
        Lower-case letters, digits, ``_`` and ``-``; names the folder.
    config : dict
        All that the measurement depends on, seed included, as JSON has it: numbers, strings, booleans, None, lists and
        dicts. Tuples become lists, numpy's numbers become Python's.

    Examples
    --------
    >>> one = Cell("demo", {"ratio": 0.6, "seed": 0})
    >>> one.key == Cell("demo", {"seed": 0, "ratio": 0.6}).key, one.seed
    (True, 0)
    """

    experiment: str
    config: dict[str, Any]

    def __post_init__(self) -> None:
        check_name(self.experiment)
        if not isinstance(self.config, Mapping):
            raise OptionError(f"config={self.config!r}: give a dict of settings.")
        # What comes back from a file is what the function is called with now, tuples and numpy numbers included.
        object.__setattr__(self, "config", decode(encode(self.config, "config")))

    @property
    def key(self) -> str:
        """32 hexadecimal digits that tell this cell from all others, whatever the order of the settings."""
        return _digest({"format": FORMAT, "experiment": self.experiment, "config": encode(self.config, "config")})[:32]

    @property
    def seed(self) -> Any:
        """The setting ``seed``, None if there is none."""
        return self.config.get("seed")

    def path(self, directory: str | os.PathLike[str]) -> Path:
        """Where the record stands below the results folder."""
        return Path(directory) / self.experiment / "cells" / f"{self.key}.json"


@dataclass(frozen=True)
class Record:
    """A finished cell.

    Attributes
    ----------
    cell : Cell
    rows : list of dict
        What was measured: flat, numbers, strings, booleans and None.
    seconds : float
    provenance : dict
        Commit, versions, machine, device, command, as the sweep was told.
    """

    cell: Cell
    rows: list[dict[str, Any]]
    seconds: float
    provenance: dict[str, Any]


def write_cell(directory: str | os.PathLike[str], record: Record) -> Path:
    """Write a record atomically, and sync it to disk.

    Parameters
    ----------
    directory : path
        The results folder.
    record : Record

    Returns
    -------
    Path
        The file.

    Raises
    ------
    SweepError
        If the file is there already, or cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> cell = Cell("demo", {"seed": 0})
    >>> path = write_cell(tempfile.mkdtemp(), Record(cell, [{"error": math.inf}], 0.1, {}))
    >>> read_cell(path).rows
    [{'error': inf}]
    """
    path = record.cell.path(directory)
    if path.exists():
        raise SweepError(f"{path} is there already: a finished cell is not overwritten.")
    content = {
        "format": FORMAT,
        "experiment": record.cell.experiment,
        "config": encode(record.cell.config, "config"),
        "seed": encode(record.cell.seed, "seed"),
        "rows": encode(check_rows(record.rows, record.cell.config), "rows"),
        "seconds": record.seconds,
        "provenance": encode(record.provenance, "provenance"),
    }
    write_sweep_file(path, json.dumps({**content, "digest": _digest(content)}, indent=1, allow_nan=False) + "\n")
    return path


def read_cell(path: str | os.PathLike[str]) -> Record:
    """Read a record.

    Raises
    ------
    SweepError
        If it is cut short, edited, of another version, not the cell that its name says, or holds anything else than
        a sweep writes; the file stays as it is.
    """
    path = Path(path)
    content = read_json(path)
    with content_errors(path):
        if content.pop("digest", None) != _digest(content):
            raise SweepError(f"{path} was changed after it was measured: its digest differs. {REPAIR_HINT}")
        cell = Cell(content["experiment"], decode(content["config"]))
        rows = check_rows(decode(content["rows"]), cell.config)
        seconds, provenance = content["seconds"], decode(content["provenance"])
        if type(seconds) not in (int, float) or seconds < 0:
            raise OptionError(f"seconds={seconds!r} is no time.")
        if not isinstance(provenance, dict):
            raise OptionError(f"provenance={provenance!r} is no object.")
        record = Record(cell, rows, float(seconds), provenance)
    if cell.key != path.stem:
        raise SweepError(f"{path} holds another cell, {cell.key}. Rename it back, or: {REPAIR_HINT}")
    return record


#: What to do about a file that cannot be used.
REPAIR_HINT = "Move it away or delete it, and start the sweep again: that one is made anew, all others stay."


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of this version, or a `SweepError` that says what is wrong with the file."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError("it is no regular file")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if "\\ud" in text.lower():
            json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair is no character
    except OSError as error:
        raise SweepError(f"cannot read {path}: {error}.") from None
    except (ValueError, RecursionError) as error:  # JSON that is none, or too deep, and bytes that are no text
        raise SweepError(f"{path} is cut short or not JSON ({error}). {REPAIR_HINT}") from None
    if not isinstance(content, dict) or "format" not in content:
        raise SweepError(f"{path} is not a file of a sweep. {REPAIR_HINT}")
    if content["format"] != FORMAT:
        raise SweepError(
            f"{path} has format {content['format']!r}, this version of grace_opt reads {FORMAT}. Read it with the "
            f"version that wrote it, or give another results folder. {REPAIR_HINT}"
        )
    return content


@contextmanager
def content_errors(path: Path) -> Iterator[None]:
    """Turn whatever the content of a file leads to, when it is not what a sweep writes, into a `SweepError`."""
    try:
        yield
    except SweepError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise SweepError(f"{path} is not what a sweep writes: {what} {REPAIR_HINT}") from error


def check_inside(directory: Path, path: Path) -> Path:
    """The path; a `SweepError` if a symbolic link makes it lead out of the folder, which may be somebody else's."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory)):
        raise SweepError(
            f"{path} leads out of {directory}, to {os.path.realpath(path)}: a report follows no links that leave its "
            "folder. Put the files there, or make the folder itself the link."
        )
    return path


def write_sweep_file(path: Path, text: str) -> None:
    """Write a file of a sweep, and its folders."""
    make_folder(path.parent, SweepError)
    write_file(path, text, SweepError)


def check_rows(rows: Any, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows with Python's own numbers; an `OptionError` says which entry is not a number or text.

    A report shows settings and measurements in one table, so that a row may repeat a setting but not contradict it.
    """
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise OptionError(f"a cell gives a list of rows, each a dict; got {type(rows).__name__}.")
    for at, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise OptionError(f"row {at} is a {type(row).__name__}: give a dict of column to number or text.")
        for name, value in row.items():
            if not isinstance(value, bool | int | float | str | np.generic | None):
                raise OptionError(f"row {at}, column {name!r}: {type(value).__name__} is no number and no text.")
            if name in config and encode(value, name) != encode(config[name], name):
                raise OptionError(
                    f"row {at} says {name}={value!r}, its cell's setting is {config[name]!r}: rename one of them."
                )
    checked: list[dict[str, Any]] = decode(encode(list(rows), "rows"))
    return checked


def encode(value: Any, where: str) -> Any:
    """The value as JSON has it, what is not finite marked; an `OptionError` names what JSON cannot hold."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {NONFINITE_KEY: str(value)}
    if isinstance(value, list | tuple):
        return [encode(inner, where) for inner in value]
    if isinstance(value, Mapping):
        if bad := [name for name in value if not isinstance(name, str) or name == NONFINITE_KEY]:
            raise OptionError(f"{where}: {bad[0]!r} cannot be a name; use strings other than {NONFINITE_KEY!r}.")
        return {name: encode(inner, f"{where}[{name!r}]") for name, inner in value.items()}
    raise OptionError(
        f"{where}: {type(value).__name__} is nothing that JSON can hold; use numbers, text, lists, dicts."
    )


def decode(value: Any) -> Any:
    """What `encode` was given, with lists for tuples."""
    if isinstance(value, list):
        return [decode(inner) for inner in value]
    if isinstance(value, dict):
        if set(value) != {NONFINITE_KEY}:
            return {name: decode(inner) for name, inner in value.items()}
        if value[NONFINITE_KEY] not in ("nan", "inf", "-inf"):
            raise OptionError(f"{NONFINITE_KEY}: {value[NONFINITE_KEY]!r} is none of nan, inf and -inf.")
        return float(value[NONFINITE_KEY])
    return value


def _finite(text: str) -> float:
    """What JSON calls a number; Python's reader takes NaN, Infinity and 1e999 as well."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number in JSON")
    return value


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
