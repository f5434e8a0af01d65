"""`nearest_name`: the name that was most likely meant where one is unknown; for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def nearest_name(name: Any, known: Iterable[str], similarity: float = 0.6) -> str | None:
    """The known name that was most likely meant, in whatever case it was written; None if none comes near.

    Parameters
    ----------
    name : object
        What was written.
    known : iterable of str
    similarity : float
        The least ratio of `difflib.SequenceMatcher`, from 0 to 1.

    Examples
    --------
    >>> nearest_name("Drop-Greedy", ["mies", "drop_greedy"]), nearest_name("x", ["mies"])
    ('drop_greedy', None)
    """
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), lower, 1, similarity)
    return lower[near[0]] if near else None
