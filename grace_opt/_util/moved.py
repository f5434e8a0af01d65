"""`refuse_moved`: what a module says of names that it had before, one release long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
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
