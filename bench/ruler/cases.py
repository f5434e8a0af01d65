"""RULER's cases by its published rules, from a seed: needles in noise, essays or needles, chains, counted words.

A case has a context, which a cache is made of, and a question with the beginning of its answer, which comes later. The
context is as long as fits: with the question and the tokens to generate, at most the given number of tokens.

Two things differ from RULER, whose data is fetched from elsewhere: essays are the texts of `bench.material`, and words
are those of `grace_opt.hf.tools.needle`. Questions about documents (SQuAD, HotpotQA) cannot be made here.

Source: RULER (Hsieh et al., arXiv 2404.06654), sections 3.1 to 3.3 and A; its prompts, as a score depends on them.
"""

from __future__ import annotations

import itertools
import random
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grace_opt.hf.tools import needle

#: Tokens that are generated, as RULER does.
NEEDLE_TOKENS, TRACKING_TOKENS, COMMON_TOKENS, FREQUENT_TOKENS = 128, 30, 120, 50
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
    """

    task: str
    context: str
    question: str
    expected: tuple[str, ...]
    new_tokens: int


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


#: Every task that can be made here.
TASKS = (*NEEDLES, "vt", "cwe", "fwe")


def make_case(task: str, tokens: int, count: Callable[[str], int], essay: Sequence[str], seed: int) -> Case:
    """Make a case.

    Parameters
    ----------
    task : str
        One of `TASKS`.
    tokens : int
        Most tokens of context, question and answer together.
    count : callable
        Returns the number of tokens of a text.
    essay : sequence of str
        Sentences of an essay.
    seed : int
        Equal seeds give equal cases.

    Raises
    ------
    SystemExit
        If not even the shortest context fits, or the essay is too short.
    """
    least, most = 4, tokens
    if task == "cwe":
        least, most = COMMON_WORDS + 1, len(WORDS)
    elif task == "fwe":
        least = 32  # fewer leave no fourth word
    elif task in NEEDLES and NEEDLES[task].haystack == "essay":
        most = min(tokens, len(essay))

    def made(size: int) -> Case:
        rng = random.Random(f"{task} {seed}")
        if task in NEEDLES:
            return needle_case(task, size, essay, rng)
        if task == "vt":
            return tracking_case(size, rng)
        return common_case(size, tokens, rng) if task == "cwe" else frequent_case(size, tokens // 50, rng)

    def fits(case: Case) -> bool:
        return count(case.context) + count(case.question) + case.new_tokens <= tokens

    if most < least or not fits(made(least)):
        raise SystemExit(f"{task} does not fit into {tokens} tokens: give more with --tokens, or longer texts")
    while least < most:  # the longest that fits
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(made(middle)) else (least, middle - 1)
    return made(least)
