"""RULER's needle tasks: sentences with a key and a value, hidden in noise, in an essay or among others like them.

Source: RULER (Hsieh et al., arXiv 2404.06654), sections 3.1 and A; its prompts, as a score depends on them.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from bench.ruler.case import NEEDLE_TOKENS, NOISE, WORDS, Case

#: Number of depths, evenly spread over an essay, of which needles get different ones.
DEPTHS = 40


@dataclass(frozen=True)
class Needles:
    """A variant of the needle task: kinds of haystack, keys and values, and how many there are of each."""

    haystack: str
    key: str
    value: str
    keys: int = 1
    values: int = 1
    queries: int = 1


NEEDLES = {
    "niah_single_1": Needles("noise", "words", "numbers"),
    "niah_single_2": Needles("essay", "words", "numbers"),
    "niah_single_3": Needles("essay", "words", "uuids"),
    "niah_multikey_1": Needles("essay", "words", "numbers", keys=4),
    "niah_multikey_2": Needles("needles", "words", "numbers"),
    "niah_multikey_3": Needles("needles", "uuids", "uuids"),
    "niah_multivalue": Needles("essay", "words", "numbers", values=4),
    "niah_multiquery": Needles("essay", "words", "numbers", keys=4, queries=4),
}


def _random(kind: str, rng: random.Random) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return "-".join(rng.sample(WORDS, 2))


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def needle_case(task: str, size: int, essay: Sequence[str], rng: random.Random) -> Case:
    """Return a case with a haystack of `size` sentences."""
    how = NEEDLES[task]
    keys = [_random(how.key, rng) for _ in range(how.keys)]
    values = {key: [_random(how.value, rng) for _ in range(how.values)] for key in keys}
    hidden = [_needle(how.value, key, value) for key in keys for value in values[key]]
    rng.shuffle(hidden)
    queries = rng.sample(keys, how.queries)
    if how.haystack == "essay":
        depths = sorted(rng.sample(range(DEPTHS), len(hidden)), reverse=True)
        hay, places, between = list(essay[:size]), [round(size * depth / (DEPTHS - 1)) for depth in depths], " "
    else:
        places, between = sorted(rng.sample(range(size + 1), len(hidden)), reverse=True), "\n"
        hay = [NOISE] * size
        if how.haystack == "needles":
            hay = [_needle(how.value, _random(how.key, rng), _random(how.value, rng)) for _ in range(size)]
    for place, sentence in zip(places, hidden, strict=True):
        hay.insert(place, sentence)
    one = how.queries * how.values == 1
    asked = queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"
    kind = how.value[:-1] if one else how.value
    few, are, all_of = ("A", "is", "is") if one else ("Some", "are", "are all")
    about = f"special magic {kind} for {asked} mentioned in the provided text"
    return Case(
        task,
        f"{few} special magic {kind} {are} hidden within the following text. Make sure to memorize it. I will quiz you "
        f"about the {kind} afterwards.\n{between.join(hay)}",
        f"\nWhat {all_of} the {about}? The {about} {are}",
        tuple(value for key in queries for value in values[key]),
        NEEDLE_TOKENS,
    )
