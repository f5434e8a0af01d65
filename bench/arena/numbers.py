"""Look up numbers in what `bench.arena` measured: a method's on the passages of a half, means, ratios to others.

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


def numbers(value: dict[str, Any], part: str, name: str, measure: str, half: str | None = None) -> list[float]:
    """Return a method's numbers on the passages of a part ("passages" or "long"), by default of the reported half.

    `half` may be `BOTH`.
    """
    half = half or told(value, part)
    return [one["rows"][name][measure] for one in value[part] if one["half"] in half and name in one["rows"]]


def told(value: dict[str, Any], part: str) -> str:
    """Return the half that is reported: B, unless only A was measured."""
    halves = {one["half"] for one in value[part]}
    return REPORTED if REPORTED in halves else CHOSEN


def names(value: dict[str, Any], part: str) -> list[str]:
    """Return the methods that a part has, in their order."""
    return [name for name in value["methods"] if numbers(value, part, name, "kl")]


def mean(value: dict[str, Any], part: str, name: str, measure: str) -> float:
    """Return a method's mean over the passages of the reported half."""
    return statistics.fmean(numbers(value, part, name, measure))


def interval(value: dict[str, Any], part: str, name: str, measure: str, half: str | None = None) -> Interval:
    """Return that mean with its 95 % interval."""
    return mean_interval(numbers(value, part, name, measure, half))


def ratio(value: dict[str, Any], part: str, name: str, other: str, half: str | None = None) -> Interval | None:
    """Return a method's mean KL as a share of another's, with the interval over passages.

    None if one of them was not measured on all of the passages.
    """
    half = half or told(value, part)
    pairs = [numbers(value, part, each, "kl", half) for each in (name, other)]
    if {len(each) for each in pairs} != {sum(one["half"] in half for one in value[part])}:
        return None
    return paired_interval(*pairs, compare="ratio")


def families(value: dict[str, Any], part: str) -> dict[str, list[str]]:
    """Return the methods of each family, from few bits to many."""
    found: dict[str, list[str]] = {}
    for name in names(value, part):
        found.setdefault(value["methods"][name]["family"], []).append(name)
    return {f: sorted(each, key=lambda n: mean(value, part, n, "bits")) for f, each in found.items()}


def peers(value: dict[str, Any], part: str, least: float, most: float) -> Iterator[str]:
    """Yield the methods of others that have between `least` and `most` bits."""
    for family, each in families(value, part).items():
        if family not in OUR_FAMILIES:
            yield from (name for name in each if least <= mean(value, part, name, "bits") <= most)


def nearest(value: dict[str, Any], part: str, family: str, bits: float, within: float = 0.15) -> str | None:
    """Return the method of a family whose bits are nearest to some; None if none is within `within`."""
    found = families(value, part).get(family, [])
    close = [(abs(mean(value, part, name, "bits") - bits), name) for name in found]
    distance, name = min(close, default=(within + 1, ""))
    return name if distance <= within else None


def best(value: dict[str, Any], part: str, least: float, most: float) -> str | None:
    """Return the method of others with the least mean KL among those of so many bits."""
    found = list(peers(value, part, least, most))
    return min(found, key=lambda name: mean(value, part, name, "kl")) if found else None
