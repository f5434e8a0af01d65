"""Look up numbers in what `bench.arena` measured of a model: a method's on the passages of a half, means, ratios.

When: the page and its picture. Intervals are bootstraps over passages, paired where two methods are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench.arena.contenders import OUR_FAMILIES
from grace_opt.sweep import Interval, mean_interval, paired_interval

#: What is chosen on, and what is reported.
CHOSEN, REPORTED = "A", "B"
BOTH = CHOSEN + REPORTED


def numbers(of: dict[str, Any], part: str, name: str, measure: str, half: str | None = None) -> list[float]:
    """Return a method's numbers on the passages of a part ("passages" or "long"), by default of the reported half.

    `half` may be `BOTH`.
    """
    half = half or told(of, part)
    return [one["rows"][name][measure] for one in of[part] if one["half"] in half and name in one["rows"]]


def told(of: dict[str, Any], part: str) -> str:
    """Return the half that is reported: B, unless only A was measured."""
    halves = {one["half"] for one in of[part]}
    return REPORTED if REPORTED in halves else CHOSEN


def names(of: dict[str, Any], part: str) -> list[str]:
    """Return the methods that a part has, in their order."""
    return [name for name in of["methods"] if numbers(of, part, name, "kl")]


def mean(of: dict[str, Any], part: str, name: str, measure: str) -> float:
    """Return a method's mean over the passages of the reported half."""
    return statistics.fmean(numbers(of, part, name, measure))


def interval(of: dict[str, Any], part: str, name: str, measure: str, half: str | None = None) -> Interval:
    """Return that mean with its 95 % interval."""
    return mean_interval(numbers(of, part, name, measure, half))


def ratio(of: dict[str, Any], part: str, name: str, other: str, half: str | None = None) -> Interval | None:
    """Return a method's mean KL as a share of another's, with the interval over passages.

    None if one of them was not measured on all of the passages.
    """
    half = half or told(of, part)
    pairs = [numbers(of, part, each, "kl", half) for each in (name, other)]
    if {len(each) for each in pairs} != {sum(one["half"] in half for one in of[part])}:
        return None
    return paired_interval(*pairs, compare="ratio")


def families(of: dict[str, Any], part: str) -> dict[str, list[str]]:
    """Return the methods of each family, from few bits to many."""
    found: dict[str, list[str]] = {}
    for name in names(of, part):
        found.setdefault(of["methods"][name]["family"], []).append(name)
    return {family: sorted(each, key=lambda name: mean(of, part, name, "bits")) for family, each in found.items()}


def peers(of: dict[str, Any], part: str, least: float, most: float) -> Iterator[str]:
    """Yield the methods of others that have between `least` and `most` bits."""
    for family, each in families(of, part).items():
        if family not in OUR_FAMILIES:
            yield from (name for name in each if least <= mean(of, part, name, "bits") <= most)


def best(of: dict[str, Any], part: str, least: float, most: float) -> str | None:
    """Return the method of others with the least mean KL among those of so many bits."""
    found = list(peers(of, part, least, most))
    return min(found, key=lambda name: mean(of, part, name, "kl")) if found else None
