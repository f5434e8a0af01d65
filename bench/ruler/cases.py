"""RULER's cases by kind: needles in noise, in an essay or among others; chains of variables; words that are counted.

Source: RULER (Hsieh et al., arXiv 2404.06654), sections 3.1 to 3.3 and A; its prompts, as a score depends on them.
"""

from __future__ import annotations

import itertools
import random
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from grace_opt.hf.tools import needle

#: Tokens that are generated, as RULER does.
NEEDLE_TOKENS, TRACKING_TOKENS, COMMON_TOKENS, FREQUENT_TOKENS, QUESTION_TOKENS = 128, 30, 120, 50, 32
#: Repeated around needles and variables.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
#: Words of keys and of lists. RULER takes its own from a package.
WORDS = sorted(word for word in needle.vocabulary() if word.isalpha() and len(word) > 2)


@dataclass(frozen=True)
class Case:
    """One case: an answer to `question` after `context` has to contain `expected`.

    Attributes
    ----------
    task : str
    context, question : str
        The question ends with the beginning of its answer.
    expected : tuple of str
    new_tokens : int
        Number of tokens to generate.
    any_of : bool
        Whether one of the expected strings is enough.
    """

    task: str
    context: str
    question: str
    expected: tuple[str, ...]
    new_tokens: int
    any_of: bool = False


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


#: Number of assignments from one variable to the next.
HOPS = 4


def _chain(letters: int, size: int, rng: random.Random) -> tuple[str, str, list[str]]:
    """Return noise with a chain of variables in it, the question about it, and the variables."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [name] * (name not in names)
    number = rng.randint(10_000, 99_998)
    steps = [f"VAR {names[0]} = {number}", *(f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names))]
    text = [NOISE] * size
    for place, step in zip(sorted(rng.sample(range(size + 1), len(steps)))[::-1], steps[::-1], strict=True):
        text.insert(place, step)
    return (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n" + "\n".join(text),
        f"\nQuestion: Find all variables that are assigned the value {number} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, {HOPS + 1} variables are assgined the value {number}, "
        "they are: ",  # "assgined" is RULER's own spelling
        names,
    )


def tracking_case(size: int, rng: random.Random) -> Case:
    """Return a case with `size` lines of noise."""
    shown, asked, answer = _chain(3, HOPS + 1, rng)
    context, question, names = _chain(5, size, rng)
    example = f"{shown}{asked}{' '.join(answer)}\n\n"
    return Case("vt", example + context, question.rstrip(), tuple(names), TRACKING_TOKENS)


#: How many words come often, the exponent of the coded words' Zipf distribution, and their length.
COMMON_WORDS, ALPHA, LETTERS = 10, 2.0, 6
#: The sum of 1/k² over all k.
ZETA_2 = 1.6449340668482264


def _listed(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _counted(size: int, common: int, others: int, rng: random.Random) -> tuple[str, list[str]]:
    """Return a numbered list of `size` words, of which the first ten come more often, and these."""
    words = rng.sample(WORDS, size)
    often = words[:COMMON_WORDS]
    every = often * common + words[COMMON_WORDS:] * others
    rng.shuffle(every)
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{_listed(every)}",
        often,
    )


def common_case(size: int, tokens: int, rng: random.Random) -> Case:
    """Return a case with a list of `size` different words; a list of fewer than 4,096 tokens repeats them less."""
    question = (
        "\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words that appear most "
        "often in the list are:"
    )
    short = tokens < 4096
    shown, answer = _counted(20 if short else 40, *((3, 1) if short else (10, 3)), rng)
    context, often = _counted(size, *((6, 1) if short else (30, 3)), rng)
    return Case("cwe", f"{shown}{question} {_listed(answer)}\n{context}", question, tuple(often), COMMON_TOKENS)


def frequent_case(size: int, vocabulary: int, rng: random.Random) -> Case:
    """Return a case with about `size` coded words."""
    words: list[str] = []
    while len(words) < vocabulary:
        word = "".join(rng.choices(string.ascii_lowercase, k=LETTERS))
        words += [word] * (word not in words)
    words[0] = "..."  # the most frequent one is noise
    coded = [word for rank, word in enumerate(words, 1) for _ in range(int(size * rank**-ALPHA / ZETA_2))]
    rng.shuffle(coded)
    return Case(
        "fwe",
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        f"appeared coded words. {' '.join(coded)}",
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:",
        tuple(words[1:4]),
        FREQUENT_TOKENS,
    )
