"""The six metrics of LongBench, each from 0 to 1 for one answer and one reference, and the best over several of them.

When: an answer that a model generated is to be scored. Normalisation and the definitions follow LongBench (Bai et al.,
arXiv 2308.14508); F1 is SQuAD's (Rajpurkar et al., arXiv 1606.05250). ROUGE-L comes from rouge-score, whose tokens are
lower-case letters and digits, and not from the package `rouge` that LongBench uses: scores of summaries differ a little
from the official ones, for all methods alike. Edit similarity comes from rapidfuzz, unrounded.
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grace_opt._util.optional import require

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
#: A line with one of these is a comment or the frame of a code block, and no code.
_NO_CODE = ("`", "#", "//")


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces.

    Examples
    --------
    >>> normalise("The  Amber-Wolf, a king!")
    'amberwolf king'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def qa_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words, as bags, after `normalise`.

    Examples
    --------
    >>> qa_f1("the amber wolf", "amber fox")
    0.5
    """
    ours, theirs = normalise(answer).split(), normalise(reference).split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def rouge_l(answer: str, reference: str) -> float:
    """F of the longest common subsequence of words.

    Examples
    --------
    >>> rouge_l("amber wolf", "amber red wolf")
    0.8
    """
    return _rouge("rougeL", answer, reference)


def rouge_1(answer: str, reference: str) -> float:
    """F of single words, as bags; what needles are scored with.

    Examples
    --------
    >>> rouge_1("wolf amber", "amber wolf")
    1.0
    """
    return _rouge("rouge1", answer, reference)


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / (classes that the answer names) if the right one is among them, else 0.

    A class whose name is a part of the right one's does not count: who writes "red fox" has not written "red" as well.

    Examples
    --------
    >>> classification("a city or a country", "city", ["city", "country", "river"])
    0.5
    """
    named = [name for name in classes if name in answer and (name == reference or name not in reference)]
    return 1 / len(named) if reference in named else 0.0


def retrieval(answer: str, reference: str) -> float:
    """Share of the answer's numbers that are the reference's, which reads "Paragraph 12".

    Examples
    --------
    >>> retrieval("Paragraph 12, or 3", "Paragraph 12")
    0.5
    """
    found = re.search(r"\d+", reference)
    return count(answer, found[0]) if found else 0.0


def count(answer: str, reference: str) -> float:
    """Share of the answer's numbers that equal the reference.

    Examples
    --------
    >>> count("7", "7"), count("seven", "7")
    (1.0, 0.0)
    """
    numbers = re.findall(r"\d+", answer)
    return numbers.count(reference.strip()) / len(numbers) if numbers else 0.0


def edit_similarity(answer: str, reference: str) -> float:
    """Similarity by insertions and deletions of the answer's first line of code; 1 where it equals the reference.

    Examples
    --------
    >>> edit_similarity("# a comment\\nx = 1", "x = 1")
    1.0
    """
    lines = (line for line in answer.lstrip("\n").split("\n") if not any(mark in line for mark in _NO_CODE))
    ratio = require("rapidfuzz.fuzz", "bench", "edit similarity").ratio(next(lines, ""), reference)
    return float(ratio) / 100


METRICS = {
    "qa_f1": qa_f1,
    "rouge_l": rouge_l,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
    "edit_similarity": edit_similarity,
}


def score(metric: str, answer: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """The best score over the references.

    Examples
    --------
    >>> score("qa_f1", "wolf", ["amber", "the wolf"])
    1.0
    """
    if metric == "classification":
        return max(classification(answer, reference, classes) for reference in references)
    return max(float(METRICS[metric](answer, reference)) for reference in references)  # type: ignore[operator]


def _rouge(kind: str, answer: str, reference: str) -> float:
    return float(_scorer(kind).score(reference, answer)[kind].fmeasure)


@functools.cache
def _scorer(kind: str) -> Any:
    return require("rouge_score.rouge_scorer", "bench", "ROUGE").RougeScorer([kind], use_stemmer=False)
