"""Check parameters (integers, numbers, flags, names from a list) and return plain Python values.

Numbers may be numpy scalars, or arrays and tensors without dimensions; bools and texts are refused. A message reads
``seed=-1: give an integer >= 0.``
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

from ..errors import GraceError, OptionError

#: Longest text of a wrong value in a message, in characters.
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
    """Return the value as an int.

    Parameters
    ----------
    name : str
        Name of the parameter, for the message.
    value : object
        An int, or anything that `operator.index` accepts; not 3.0.
    at_least, at_most : int, optional
        The range, both ends included.
    optional : bool
        Whether None is allowed.
    hint : str
        Text that the message adds to the range.
    error : type
        Type of the error to raise.

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
    bare = plain(value)
    try:
        whole = None if isinstance(bare, bool) or getattr(bare, "shape", ()) != () else operator.index(bare)
    except (TypeError, RuntimeError):  # a tensor without data raises RuntimeError
        whole = None
    if whole is None or not _within(whole, at_least, None, at_most, None):
        wanted = "an integer" + _range(at_least, None, at_most, None)
        raise error(_message(name, value, wanted, optional, hint))
    return whole


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
    """Return the value as a float; never NaN.

    Parameters
    ----------
    name, value, optional, hint, error
        As in `integer`; the value is a real number of any kind.
    at_least, above, at_most, below : float, optional
        The range; `above` and `below` exclude their bound.
    infinite : bool
        Whether an infinite value is allowed.

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
    bare = plain(value)
    real = math.nan
    if isinstance(bare, numbers.Real) and not isinstance(bare, bool):
        try:
            real = float(bare)
        except OverflowError:  # an integer beyond all floats
            real = math.nan
    if math.isnan(real) or (math.isinf(real) and not infinite) or not _within(real, at_least, above, at_most, below):
        kind = "a number" if infinite or at_most is not None or below is not None else "a finite number"
        wanted = kind + _range(at_least, above, at_most, below)
        raise error(_message(name, value, wanted, optional, hint))
    return real


def flag(name: str, value: Any, *, error: type[GraceError] = OptionError) -> bool:
    """Return the value as a bool; numpy's bools are accepted too.

    Examples
    --------
    >>> flag("path", 1)
    Traceback (most recent call last):
    grace_opt.errors.OptionError: path=1: give True or False.
    """
    bare = plain(value)
    if not isinstance(bare, bool):
        raise error(_message(name, value, "True or False", False, ""))
    return bare


def choice(name: str, value: Any, allowed: Iterable[str], *, error: type[GraceError] = OptionError) -> str:
    """Return the value if it is one of the allowed names.

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
    """Check fields of a dataclass, also a frozen one, and replace them by the plain values.

    Parameters
    ----------
    options : dataclass
        The object to check, in its ``__post_init__``.
    check : callable
        `integer`, `number`, `flag` or `choice`.
    *names : str
        Names of the fields.
    **limits
        Further arguments of `check`.

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
    """Return a wrong value as shown in a message, cut if it is long.

    Examples
    --------
    >>> shown("seven"), len(shown(list(range(10_000)))), shown(10**5000)
    ("'seven'", 120, 'an int of 16610 bits')
    """
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return f"an int of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def plain(value: Any) -> Any:
    """Return the number in a numpy scalar or a 0-d array or tensor; anything else unchanged."""
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
