"""RULER's tasks by its published rules, from a seed; or read from a file that RULER has made.

A case has a context, which a cache is made of, and a question with the beginning of its answer, which comes later. The
context is as long as fits: with the question and the tokens to generate, at most the given number of tokens.

Two things differ from RULER, whose data is fetched from elsewhere: essays are the texts of `bench.material`, and words
are those of `grace_opt.hf.tools.needle`. Questions about documents (SQuAD, HotpotQA) cannot be made here; `read_cases`
reads a file of any task.

Source: RULER (Hsieh et al., arXiv 2404.06654).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.ruler.cases import (
    COMMON_TOKENS,
    COMMON_WORDS,
    FREQUENT_TOKENS,
    NEEDLE_TOKENS,
    NEEDLES,
    QUESTION_TOKENS,
    TRACKING_TOKENS,
    WORDS,
    Case,
    common_case,
    frequent_case,
    needle_case,
    tracking_case,
)

#: Every task that can be made here.
TASKS = (*NEEDLES, "vt", "cwe", "fwe")
#: RULER's other tasks, and what their data is.
NOT_HERE = {"qa_1": "SQuAD", "qa_2": "HotpotQA"}
#: Of the tasks that generate another number than the needles do.
NEW_TOKENS = {
    "vt": TRACKING_TOKENS,
    "cwe": COMMON_TOKENS,
    "fwe": FREQUENT_TOKENS,
    **dict.fromkeys(NOT_HERE, QUESTION_TOKENS),
}

Count = Callable[[str], int]


def make_case(task: str, tokens: int, count: Count, essay: Sequence[str], seed: int) -> Case:
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


def read_cases(path: Path) -> list[Case]:
    """Read cases that RULER has made: JSON lines with ``input`` and ``outputs``; the question is the last line.

    Raises
    ------
    SystemExit
        If it cannot be read, or a line is no case.
    """
    name = path.stem
    kind = next((each for each in (*TASKS, *NOT_HERE) if each in name), name)
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SystemExit(f"--file {path}: cannot be read: {error}") from None
    for number, line in enumerate(filter(None, lines), 1):
        try:
            value = json.loads(line)
            text, outputs = value["input"] + value.get("answer_prefix", ""), tuple(map(str, value["outputs"]))
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"--file {path}, line {number}: no case with input and outputs ({error!r})") from None
        context, line_break, question = text.rpartition("\n")
        if not line_break or not outputs:
            raise SystemExit(f"--file {path}, line {number}: no line before the question, or nothing is expected")
        found.append(
            Case(kind, context, "\n" + question, outputs, NEW_TOKENS.get(kind, NEEDLE_TOKENS), kind in NOT_HERE)
        )
    if not found:
        raise SystemExit(f"--file {path}: holds no case")
    return found
