"""Parameters checked in one manner: integers, numbers, flags and names out of a list, as plain Python values.

Whatever stands for a number is taken: numpy's scalars, and arrays and tensors without dimensions. Bools are no numbers,
texts neither. A message reads ``seed=-1: give an integer >= 0.``
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

from ..errors import GraceError, OptionError

#: Longest text of a wrong value in a message.
MAX_SHOWN = 120


@overload
def integer(
    name: str,
    value: Any,
    *,
    at_least: int | None = ...,
    at_most: int | None = ...,
    optional: Literal[False] = ...,
    hint: str = ...,
    error: type[GraceError] = ...,
) -> int: ...
@overload
def integer(
    name: str,
    value: Any,
    *,
    at_least: int | None = ...,
    at_most: int | None = ...,
    optional: Literal[True],
    hint: str = ...,
    error: type[GraceError] = ...,
) -> int | None: ...
def integer(
    name: str,
    value: Any,
    *,
    at_least: int | None = None,
    at_most: int | None = None,
    optional: bool = False,
    hint: str = "",
    error: type[GraceError] = OptionError,
) -> int | None:
    """The value as an int.

    Parameters
    ----------
    name : str
        Of the parameter, for the message.
    value : object
        An int, or what can be used as one (`operator.index`); 3.0 cannot.
    at_least, at_most : int, optional
        The range, both ends included.
    optional : bool
        Whether None is a value as well.
    hint : str
        What the message says beside the range.
    error : type
        What is raised.

    Examples
    --------
    >>> import numpy as np
    >>> integer("seed", np.int64(3), at_least=0), integer("seed", np.array(3)), integer("limit", None, optional=True)
    (3, 3, None)
    >>> integer("seed", -1, at_least=0)
    Traceback (most recent call last):
    grace_opt.errors.OptionError: seed=-1: give an integer >= 0.
    """
    if value is None and optional:
        return None
    given = plain(value)
    try:
        found = None if isinstance(given, bool) or getattr(given, "shape", ()) != () else operator.index(given)
    except (TypeError, RuntimeError):  # a tensor without data raises the second
        found = None
    if found is None or not _within(found, at_least, None, at_most, None):
        wanted = "an integer" + _range(at_least, None, at_most, None)
        raise error(_message(name, value, wanted, optional, hint))
    return found


@overload
def number(
    name: str,
    value: Any,
    *,
    at_least: float | None = ...,
    above: float | None = ...,
    at_most: float | None = ...,
    below: float | None = ...,
    infinite: bool = ...,
    optional: Literal[False] = ...,
    hint: str = ...,
    error: type[GraceError] = ...,
) -> float: ...
@overload
def number(
    name: str,
    value: Any,
    *,
    at_least: float | None = ...,
    above: float | None = ...,
    at_most: float | None = ...,
    below: float | None = ...,
    infinite: bool = ...,
    optional: Literal[True],
    hint: str = ...,
    error: type[GraceError] = ...,
) -> float | None: ...
def number(
    name: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    optional: bool = False,
    hint: str = "",
    error: type[GraceError] = OptionError,
) -> float | None:
    """The value as a float; never NaN.

    Parameters
    ----------
    name, value, optional, hint, error
        As in `integer`; the value is a real number of any kind.
    at_least, above, at_most, below : float, optional
        The range; `above` and `below` are not in it themselves.
    infinite : bool
        Whether an infinite value may be given.

    Examples
    --------
    >>> import numpy as np
    >>> number("ratio", np.float32(0.5), at_least=0, below=1)
    0.5
    >>> number("ratio", 1, at_least=0, below=1)
    Traceback (most recent call last):
    grace_opt.errors.OptionError: ratio=1: give a number >= 0 and < 1.
    """
    if value is None and optional:
        return None
    given = plain(value)
    found = math.nan
    if isinstance(given, numbers.Real) and not isinstance(given, bool):
        try:
            found = float(given)
        except OverflowError:  # an integer beyond all floats
            found = math.nan
    if math.isnan(found) or (math.isinf(found) and not infinite) or not _within(found, at_least, above, at_most, below):
        kind = "a number" if infinite or at_most is not None or below is not None else "a finite number"
        wanted = kind + _range(at_least, above, at_most, below)
        raise error(_message(name, value, wanted, optional, hint))
    return found


def flag(name: str, value: Any, *, error: type[GraceError] = OptionError) -> bool:
    """The value as a bool; numpy's are taken as well.

    Examples
    --------
    >>> flag("path", 1)
    Traceback (most recent call last):
    grace_opt.errors.OptionError: path=1: give True or False.
    """
    given = plain(value)
    if not isinstance(given, bool):
        raise error(_message(name, value, "True or False", False, ""))
    return given


def choice(name: str, value: Any, allowed: Iterable[str], *, error: type[GraceError] = OptionError) -> str:
    """The value, one of the names that are allowed.

    Examples
    --------
    >>> choice("bound", "lp", ("auto", "qp", "sdp"))
    Traceback (most recent call last):
    grace_opt.errors.OptionError: bound='lp': give 'auto', 'qp' or 'sdp'.
    """
    names = list(allowed)
    if not isinstance(value, str) or value not in names:
        *most, last = map(repr, names)
        raise error(_message(name, value, f"{', '.join(most)} or {last}" if most else last, False, ""))
    return value


def check_fields(options: Any, check: Callable[..., Any], *names: str, **limits: Any) -> None:
    """Check fields of a dataclass, a frozen one too, and put the plain values in their places.

    Parameters
    ----------
    options : dataclass
        What is checked, in its ``__post_init__``.
    check : callable
        `integer`, `number`, `flag` or `choice`.
    *names : str
        The fields.
    **limits
        What `check` is told besides.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Options:
    ...     width: int = 4
    ...     def __post_init__(self):
    ...         check_fields(self, integer, "width", at_least=1)
    >>> Options(0)
    Traceback (most recent call last):
    grace_opt.errors.OptionError: width=0: give an integer >= 1.
    """
    for name in names:
        object.__setattr__(options, name, check(name, getattr(options, name), **limits))


def shown(value: Any) -> str:
    """A wrong value as a message shows it, cut where it is long.

    Examples
    --------
    >>> shown("seven"), len(shown(list(range(10_000)))), shown(10**5000)
    ("'seven'", 120, 'an int of 16610 bits')
    """
    try:
        text = repr(value)
    except ValueError:  # Python writes no integers of thousands of digits
        return f"an int of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def plain(value: Any) -> Any:
    """What a scalar of numpy's, or an array or tensor without dimensions, holds; anything else as it is."""
    if getattr(value, "shape", None) != () or not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, TypeError, ValueError):  # a tensor without data
        return value


def _within(
    value: float, at_least: float | None, above: float | None, at_most: float | None, below: float | None
) -> bool:
    return (
        (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
    )


def _range(at_least: float | None, above: float | None, at_most: float | None, below: float | None) -> str:
    ends = ((">=", at_least), (">", above), ("<=", at_most), ("<", below))
    said = " and ".join(f"{sign} {end}" for sign, end in ends if end is not None)
    return f" {said}" if said else ""


def _message(name: str, value: Any, wanted: str, optional: bool, hint: str) -> str:
    return f"{name}={shown(value)}: give {wanted}{', or None' if optional else ''}{hint and f'; {hint}'}."
