"""`Cell`: one measurement of a sweep, and its record, a JSON file named after the settings.

When: results must survive any interruption of the program. A record is written atomically and synced to disk, so it is
either complete or absent, and it contains a digest of itself. A record that is cut short, edited or of another version
raises an error that names the file; it is neither used nor overwritten.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .._util.files import make_folder, write_file
from ..errors import GraceError, OptionError

#: Version of the files that a sweep writes. It is part of every key: old records are never mistaken for new ones.
FORMAT = 1
#: JSON has no NaN and no infinities; they are written as ``{"$float": "nan"}``.
NONFINITE_KEY = "$float"


class SweepError(GraceError, RuntimeError):
    """A sweep or report cannot continue: an invalid record, a full disk, workers that die."""


def check_name(name: Any) -> None:
    """Raise an `OptionError` unless an experiment's name can name a folder and a page on every system."""
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name == "index":
        raise OptionError(f"experiment={name!r}: write lower-case letters, digits, _ and - only, and not 'index'.")


@dataclass(frozen=True)
class Cell:
    """One measurement: its experiment and its settings.

    Attributes
    ----------
    experiment : str
        Lower-case letters, digits, ``_`` and ``-``; names the folder.
    config : dict
        All that the measurement depends on, seed included, as JSON values: numbers, strings, booleans, None, lists and
        dicts. Tuples become lists; numpy numbers become Python's.

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
        # Convert now, so that the function gets the same values as when they are read from a file.
        object.__setattr__(self, "config", decode(encode(self.config, "config")))

    @property
    def key(self) -> str:
        """32 hexadecimal digits that identify this cell, independent of the order of the settings."""
        return _digest({"format": FORMAT, "experiment": self.experiment, "config": encode(self.config, "config")})[:32]

    @property
    def seed(self) -> Any:
        """The setting ``seed``, or None."""
        return self.config.get("seed")

    def path(self, directory: str | os.PathLike[str]) -> Path:
        """Path of the record below the results folder."""
        return Path(directory) / self.experiment / "cells" / f"{self.key}.json"


@dataclass(frozen=True)
class Record:
    """A finished cell.

    Attributes
    ----------
    cell : Cell
    rows : list of dict
        The measurements: flat dicts of numbers, strings, booleans and None.
    seconds : float
    provenance : dict
        Commit, versions, machine, device and command, as given to the sweep.
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
        If the file exists already or cannot be written.

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
        If it is cut short, edited, of another version, of another cell than its name says, or not written by a sweep;
        the file is not changed.
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


#: What to do with an unusable file.
REPAIR_HINT = "Move it away or delete it, and start the sweep again: only this cell is measured again."


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of this version; raise a `SweepError` that says what is wrong with the file."""
    try:
        if path.exists() and not path.is_file():  # a pipe would block
            raise OSError("it is no regular file")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text, parse_constant=_finite, parse_float=_finite)
        if "\\ud" in text.lower():
            json.dumps(content, ensure_ascii=False).encode()  # half a surrogate pair is not a character
    except OSError as error:
        raise SweepError(f"cannot read {path}: {error}.") from None
    except (ValueError, RecursionError) as error:  # invalid or too deep JSON, and bytes that are not text
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
    """Turn any error from the content of a file that no sweep wrote into a `SweepError`."""
    try:
        yield
    except SweepError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise SweepError(f"{path} is not what a sweep writes: {what} {REPAIR_HINT}") from error


def check_inside(directory: Path, path: Path) -> Path:
    """Return the path; raise a `SweepError` if a symbolic link leads out of the folder, which may not be yours."""
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
    """Return the rows with plain Python numbers; raise an `OptionError` for an entry that is not number or text.

    A report shows settings and measurements in one table: a row may repeat a setting, but not contradict it.
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


#: Whole numbers of so many digits are read, whatever limit a process has set.
DIGITS = sys.int_info.str_digits_check_threshold


def encode(value: Any, where: str) -> Any:
    """Return the value for JSON, marking numbers that are not finite; raise an `OptionError` for other types."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int) and abs(value) >= 10**DIGITS:
        raise OptionError(f"{where}: a whole number of more than {DIGITS} digits is not read back; write it as text.")
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {NONFINITE_KEY: str(value)}
    if isinstance(value, list | tuple):
        return [encode(inner, where) for inner in value]
    if isinstance(value, Mapping):
        if bad := [name for name in value if not isinstance(name, str) or name == NONFINITE_KEY]:
            raise OptionError(f"{where}: {bad[0]!r} cannot be a name; use strings other than {NONFINITE_KEY!r}.")
        return {_text(name, where): encode(inner, f"{where}[{name!r}]") for name, inner in value.items()}
    raise OptionError(
        f"{where}: {type(value).__name__} is nothing that JSON can hold; use numbers, text, lists, dicts."
    )


def _text(value: str, where: str) -> str:
    """Return the text; raise an `OptionError` if files cannot hold it, so that none is written that cannot be read."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise OptionError(
            f"{where}: {value!r} holds half a surrogate pair at {error.start}, which is no character; replace it, for "
            'example by value.encode(errors="replace").decode().'
        ) from None
    return value


def decode(value: Any) -> Any:
    """Return what `encode` was given, with lists for tuples."""
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
    """Parse a JSON number; Python's reader would also take NaN, Infinity and 1e999."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number in JSON")
    return value


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
