"""RULER's two scores, as published: how many of the expected strings an answer contains.

Source: RULER (Hsieh et al., arXiv 2404.06654), its evaluation of synthetic tasks: case does not count, and
control characters of an answer are line breaks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def cleaned(answer: str) -> str:
    """Return an answer as RULER compares it."""
    return _CONTROL.sub("\n", answer.strip()).strip()


def string_match_all(answer: str, expected: Sequence[str]) -> float:
    """Return the share of the expected strings that an answer contains: all tasks but questions about documents.

    Examples
    --------
    >>> string_match_all("They are ABC and xyz.", ["abc", "XYZ", "other"])
    0.666...
    """
    text = cleaned(answer).lower()
    return sum(each.lower() in text for each in expected) / len(expected)


def string_match_part(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if an answer contains one of the expected strings, else 0: questions about documents.

    Examples
    --------
    >>> string_match_part("in Oslo", ["Oslo", "Oslo, Norway"]), string_match_part("in Rome", ["Oslo"])
    (1.0, 0.0)
    """
    text = cleaned(answer).lower()
    return float(any(each.lower() in text for each in expected))
