"""Unknown names: `nearest_name` suggests the one that was meant, and `refuse_unknown` refuses keywords in our words."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import OptionError


def nearest_name(name: Any, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, ignoring case; None if none is similar.

    Parameters
    ----------
    name : object
        The unknown name.
    known : iterable of str
    similarity : float
        Least ratio of `difflib.SequenceMatcher` that counts, from 0 to 1.

    Examples
    --------
    >>> nearest_name("Drop-Greedy", ["mies", "drop_greedy"]), nearest_name("x", ["mies"])
    ('drop_greedy', None)
    """
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(str(name).lower(), lower, 1, similarity)
    return lower[near[0]] if near else None


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest name; empty if none is near.

    Examples
    --------
    >>> did_you_mean("meis", ["mies"]), did_you_mean("x", ["mies"])
    (" Did you mean 'mies'?", '')
    """
    near = nearest_name(name, known)
    return f" Did you mean {near!r}?" if near is not None else ""


def arguments_of(call: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments of a function, without those that take any.

    Examples
    --------
    >>> arguments_of(nearest_name)
    ('name', 'known', 'similarity')
    """
    return tuple(
        name
        for name, parameter in inspect.signature(call).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    )


def refuse_unknown(
    call: Callable[..., Any], unknown: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Raise OptionError for keywords that a function does not have; do nothing if there are none.

    Parameters
    ----------
    call : callable
        What was called.
    unknown : iterable of str
        The keywords.
    elsewhere : mapping, optional
        Sentences for keywords of other calls that people try here.

    Examples
    --------
    >>> refuse_unknown(nearest_name, ["know"])
    Traceback (most recent call last):
    grace_opt.errors.OptionError: nearest_name has no argument 'know'; it takes name, known, similarity. Did you mean
    'known'?
    """
    for name in unknown:
        known = arguments_of(call)
        hint = f" {elsewhere[name]}" if elsewhere and name in elsewhere else did_you_mean(name, known)
        raise OptionError(f"{call.__qualname__} has no argument {name!r}; it takes {', '.join(known)}.{hint}")
