"""`refuse_moved`: what a module says of names that it had before, one release long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NoReturn

from ..errors import MovedNameError, OptionError


def refuse_moved(module: str, names: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__``: an error with the new name for those that moved, the usual one for others.

    Parameters
    ----------
    module : str
        Its name.
    names : mapping
        From each old name to what to write instead.

    Examples
    --------
    >>> refuse_moved("grace_opt", {"FactoredWeights": "grace_opt.FactoredWeights"})("FactoredWeights")
    Traceback (most recent call last):
    grace_opt.errors.MovedNameError: grace_opt.FactoredWeights has another name now: write grace_opt.FactoredWeights.
    """

    def attribute(name: str) -> NoReturn:
        if name in names:
            says = f"{module}.{name} has another name now: write {names[name]}."
            if sys._getframe(1).f_code.co_name == "_handle_fromlist":
                raise OptionError(says)  # `from module import name` would not show the words of an AttributeError
            raise MovedNameError(says)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return attribute


def refuse_modules(moved: Mapping[str, str]) -> None:
    """Put a stand-in for each module that moved where imports look; whatever is read of it says the new name.

    Examples
    --------
    >>> refuse_modules({"grace_opt.gone": "grace_opt.here"})
    >>> from grace_opt.gone import anything
    Traceback (most recent call last):
    grace_opt.errors.OptionError: grace_opt.gone has moved: write grace_opt.here.
    """
    for old, new in moved.items():
        module = sys.modules[old] = ModuleType(old)
        module.__getattr__ = _of_moved(old, new)  # type: ignore[method-assign]


def _of_moved(old: str, new: str) -> Callable[[str], NoReturn]:
    def attribute(name: str) -> NoReturn:
        if name.startswith("__"):  # Python and its tools ask
            raise AttributeError(name)
        raise OptionError(f"{old} has moved: write {new}.")

    return attribute
