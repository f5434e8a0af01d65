"""`nearest_name`: suggest the name that an unknown one was meant to be, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


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
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), lower, 1, similarity)
    return lower[near[0]] if near else None
