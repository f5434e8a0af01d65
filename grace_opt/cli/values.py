"""Values of options from their text: vertices by number or name, options of a method.

When: `app` reads the command line. Vertices are one row of CSV, so that a name may have commas (RFC 4180).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable
from typing import Any

from .. import api
from ..errors import OptionError

#: Option values that Python and JSON spell differently.
PYTHON_LITERALS = {"True": True, "False": False, "None": None}


def parse_options(texts: Iterable[str] | None, labels: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return the values of several ``--option name=value`` by their names.

    Parameters
    ----------
    texts : iterable of str or None
    labels : tuple of str, optional
        As for `parse_option`.

    Raises
    ------
    OptionError
        If one is of another form, or given twice.

    Examples
    --------
    >>> parse_options(["start=think", "iterations=1e3"])
    {'start': 'think', 'iterations': 1000}
    """
    options: dict[str, Any] = {}
    for text in texts or ():
        name, value = parse_option(text, labels)
        if name in options:
            raise OptionError(f"--option {name}=... is given twice: write it once.")
        options[name] = value
    return options


def parse_option(text: str, labels: tuple[str, ...] | None = None) -> tuple[str, Any]:
    """Return the name and the value of ``--option name=value``.

    Parameters
    ----------
    text : str
    labels : tuple of str, optional
        Names of the file's vertices, which ``start=`` takes.

    Raises
    ------
    OptionError
        If it is of another form.

    Examples
    --------
    >>> parse_option("restart_after=None"), parse_option("start=a,b", ("a", "b", "c"))
    (('restart_after', None), ('start', ['a', 'b']))
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise OptionError(f"--option {text!r}: write name=value, for instance --option start=think.")
    if name == "start" and (chosen := _start(value, labels)) is not None:
        return name, chosen
    if value in PYTHON_LITERALS:
        return name, PYTHON_LITERALS[value]
    try:
        if re.fullmatch(r"-?[0-9]+(,-?[0-9]+)+", value):
            return name, [int(number) for number in value.split(",")]  # vertices, as for --protected
        return name, json.loads(value, parse_float=_number)
    except json.JSONDecodeError:
        return name, value
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise OptionError(f"--option {name}=...: the value cannot be read ({error}).") from None


def _number(text: str) -> int | float:
    """A JSON number that has a point or an exponent: without a point an integer, as 1e3 of iterations is meant."""
    number = float(text)
    return int(number) if "." not in text and number.is_integer() else number


def _start(text: str, labels: tuple[str, ...] | None) -> list[Any] | None:
    """The vertices of ``--option start=``, given as for ``--required``; None if it is a method's name or JSON."""
    if text.startswith("[") or text in {spec.name for spec in api.methods()}:
        return None
    entries = _entries("option start", text)
    # One word that is no name may be a method's, mistyped.
    named = labels is not None and (len(entries) > 1 or not set(entries).isdisjoint(labels))
    if named or (entries and all(re.fullmatch(r"[0-9]{1,18}", entry) for entry in entries)):
        return parse_vertices("option start", text, labels)
    return None


def parse_vertices(option: str, text: str | None, labels: tuple[str, ...] | None) -> list[Any] | None:
    """Return the vertices of an option: names, if one is or names are numbers; else numbers.

    Parameters
    ----------
    option : str
        Its name, for messages.
    text : str or None
        Numbers or names with commas; names that have commas themselves in double quotes.
    labels : tuple of str or None
        Names of the file's vertices.

    Raises
    ------
    OptionError
        If they are neither, or quotes are not closed.

    Examples
    --------
    >>> parse_vertices("required", '"a,b",c', ("a,b", "c", "d")), parse_vertices("required", "", None)
    (['a,b', 'c'], [])
    """
    if text is None:
        return None
    entries = _entries(option, text)
    if labels is not None and (set(entries) & set(labels) or any(label.isdecimal() for label in labels)):
        return entries  # the error names the one that is unknown
    # int() also takes 1_0, which is more likely meant as 1,0 than as 10, and digits of other scripts.
    if not all(re.fullmatch(r"\s*[+-]?[0-9]{1,4000}\s*", entry) for entry in entries):
        if labels is None:
            raise OptionError(f"--{option} {text!r}: write vertex numbers with commas, e.g. 0,3,17.")
        return entries
    numbers = [int(entry) for entry in entries]
    if labels is None:
        return numbers
    if wrong := [number for number in numbers if not 0 <= number < len(labels)]:
        raise OptionError(
            f"--{option}: {wrong[0]} is neither a name in the file nor a vertex from 0 to {len(labels) - 1}."
        )
    return [labels[number] for number in numbers]


def _entries(option: str, text: str) -> list[str]:
    """What stands between the commas of a row of CSV."""
    try:
        (row,) = csv.reader([text], skipinitialspace=True, strict=True)
    except csv.Error as error:
        raise OptionError(
            f"--{option} {text!r} cannot be read ({error}): put a name that has commas in double quotes, '\"a,b\",c', "
            "and double the quotes in it."
        ) from None
    return [entry.strip() for entry in row if entry.strip()]
