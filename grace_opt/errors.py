"""Every error that grace_opt raises on purpose: one tree, so that ``except GraceError`` catches them all.

Each subclass also derives from the builtin that a newcomer would expect (``ValueError``, ``TypeError``,
``LookupError``, ``OSError``). A message says what was wrong, where, and what to write instead.

A file that is missing, cannot be read or cannot be written raises the error of what it holds: `ProblemError` for
instances, `MaskError` for masks, `CalibrationError` for bases, `CacheError` for saved caches, ``SweepError`` for sweeps
and their reports, `FileError` for all others. No ``FileNotFoundError``, no ``SafetensorError``, no ``BadZipFile`` comes
through.
"""

from __future__ import annotations

from typing import Any


class GraceError(Exception):
    """Base class of all errors raised by grace_opt."""


class ProblemError(GraceError, ValueError):
    """The instance is malformed: W, k, protected, or tensors it is built from."""


class InfeasibleBudgetError(ProblemError):
    """No allocation keeps a budget: even the cheapest admissible levels cost more.

    Attributes
    ----------
    smallest : float or array
        The smallest budgets that can be kept, in the shape of the budgets given: one number, or one per instance and
        part.
    """

    def __init__(self, message: str, smallest: Any = None) -> None:  # without it: as pickle makes it again
        super().__init__(message)
        self.smallest = smallest


class InfeasibleConstraintsError(ProblemError):
    """No choice keeps all constraints of `grace_opt.solve`.

    Attributes
    ----------
    conflict : tuple of str
        Constraints that cannot hold together, in words; without any one of them, the others can.
    """

    def __init__(self, message: str, conflict: tuple[str, ...] = ()) -> None:  # without it: as pickle makes it again
        super().__init__(message)
        self.conflict = conflict


class OptionError(GraceError, TypeError, ValueError):
    """An option is unknown, has the wrong type, or lies outside its range."""


class MissingLibraryError(OptionError, ImportError):
    """An optional library is not installed; the message names the pip extra that brings it."""


class MovedNameError(OptionError, AttributeError):
    """A name is elsewhere now; the message says where."""


class UnknownSolverError(GraceError, LookupError):
    """No solver of that name is registered, or the extra that brings it is not installed."""


class SolverError(GraceError, RuntimeError):
    """A solver could not finish, refused the instance, or returned something that is not a solution."""


class ComparisonError(SolverError):
    """A method that was asked for failed; `partial` is the `grace_opt.Comparison` of the methods that had finished."""

    partial: Any

    def __init__(self, message: str, partial: Any = None) -> None:  # without it: as pickle makes it again
        super().__init__(message)
        if partial is not None:
            self.partial = partial


class MaskError(GraceError, ValueError):
    """A mask file is corrupt, foreign or of another version, or a mask does not fit the model."""


class CacheError(GraceError, RuntimeError):
    """A pruned key cache is used in a way that would give silently wrong output."""


class CalibrationError(GraceError, ValueError):
    """A basis cannot be made or masks learned, or a basis file is corrupt, foreign or of another version or model."""


class EvaluationError(GraceError, ValueError):
    """Nothing can be compared: distributions that do not fit, an empty answer, or a cache that was not compressed."""


class FileError(GraceError, OSError):
    """A file cannot be written where it was asked for: no folder, no room, no permission, or no file."""
