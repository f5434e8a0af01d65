"""`warn`: warnings that point at the user's line, however many calls of ours, of torch and transformers lie between.

When: wherever the library warns. A fixed ``stacklevel`` points into the library as soon as another function comes
between; ``skip_file_prefixes`` would do, from Python 3.12 on.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from typing import Any, NamedTuple

#: Packages whose lines nobody looks for, as they only pass on what a user has called.
_BETWEEN = frozenset(
    "grace_opt numpy torch transformers accelerate peft numba triton lm_eval kvpress typer click "
    "contextlib functools importlib threading concurrent".split()
)


class Line(NamedTuple):
    """A line of code that a warning may point at."""

    file: str
    number: int
    module: str
    registry: dict[Any, int]


def users_line() -> Line:
    """Return the innermost line that runs now and is the user's; without any, the outermost.

    Examples
    --------
    >>> users_line().number > 0
    True
    """
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _BETWEEN:
        frame = frame.f_back
    known = frame.f_globals
    registry = known.setdefault("__warningregistry__", {})
    return Line(frame.f_code.co_filename, frame.f_lineno, known.get("__name__") or "<unknown>", registry)


def warn(message: str, category: type[Warning] = UserWarning, at: Line | None = None) -> None:
    """Warn, pointing at the user's line.

    Parameters
    ----------
    message : str
    category : type of Warning
    at : Line, optional
        The line to point at, if it does not run now: what `users_line` returned when it did.

    Examples
    --------
    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     warn("this is slow")
    >>> str(said[0].message), said[0].category.__name__
    ('this is slow', 'UserWarning')
    """
    line = users_line() if at is None else at
    warnings.warn_explicit(message, category, line.file, line.number, line.module, line.registry)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
