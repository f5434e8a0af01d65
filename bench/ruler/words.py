"""RULER's counting tasks: the ten common words of a numbered list, and the three most frequent of a coded text.

Source: RULER (Hsieh et al., arXiv 2404.06654), sections 3.3 and A; its prompts, as a score depends on them.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from bench.ruler.case import COMMON_TOKENS, FREQUENT_TOKENS, WORDS, Case

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
