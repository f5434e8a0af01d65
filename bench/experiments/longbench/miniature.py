"""A miniature of LongBench: files in its format for all 16 tasks, made from the grammar of `grace_opt.hf.tools.needle`.

When: the whole harness is to run offline, in tests and in the small sizes, on the pocket model, which knows no other
words. It tests the harness. It is no benchmark: that model was trained to state passwords, and cannot summarise, count
or program, so that most scores are near zero for every method; and digits, line breaks and the words of our
instructions are unknown to it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from bench.experiments.longbench.tasks import TASKS
from grace_opt._util.files import atomic_write
from grace_opt.hf.tools.needle import CITIES, COLOURS, fact, filler, question, random_answer

#: Sentences of filler in a context, about 13 words each.
SENTENCES = 24
_PAIRS = ("hotpotqa", "2wikimqa", "musique")
_SUMMARIES = ("gov_report", "multi_news")


def write_miniature(folder: Path, tasks: tuple[str, ...] = tuple(TASKS), examples: int = 4, seed: int = 0) -> Path:
    """Write a TASK.jsonl for each task; equal seeds give equal files.

    Examples
    --------
    >>> import tempfile
    >>> folder = write_miniature(Path(tempfile.mkdtemp()), ("qasper",), examples=2)
    >>> len((folder / "qasper.jsonl").read_text().splitlines())
    2
    """
    folder.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        rows = [example(task, number, seed) for number in range(examples)]
        with atomic_write(folder / f"{task}.jsonl") as name:
            name.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def example(task: str, number: int, seed: int = 0) -> dict[str, Any]:
    """One line of a task's file."""
    rng = random.Random(f"{task} {number} {seed}")
    made = _made(task, rng)
    return {
        "input": made["input"],
        "context": made["context"],
        "answers": made["answers"],
        "length": len(made["context"].split()),
        "dataset": task,
        "language": "en",
        "all_classes": made.get("all_classes"),
        "_id": f"{task}-{seed}-{number}",
    }


def _made(task: str, rng: random.Random) -> dict[str, Any]:
    cities = rng.sample(CITIES, 5)
    answers = {city: random_answer(rng) for city in cities}
    asked, second = cities[:2]
    context = _strewn([fact(city, answers[city]) for city in cities], rng)
    ask = f"What is the password of {asked}?"
    if task in _PAIRS:
        ask = f"What is the password of {asked}, and that of {second}?"
        return {"context": context, "input": ask, "answers": [f"{answers[asked]} and {answers[second]}"]}
    if task in _SUMMARIES:
        return {"context": context, "input": "", "answers": [" ".join(fact(city, answers[city]) for city in cities)]}
    if task == "qmsum":
        return {"context": context, "input": ask, "answers": [fact(asked, answers[asked])]}
    if task in ("trec", "triviaqa", "samsum"):
        return _few_shot(task, asked, answers, context, rng)
    if task in ("passage_count", "passage_retrieval_en"):
        return _paragraphs(task, rng)
    if task in ("lcc", "repobench-p"):
        lines = "".join(f"{fact(city, answers[city])}\n" for city in cities)
        start = f"Password of {asked}:"
        if task == "lcc":  # the line that comes next repeats one of those above
            return {"context": f"{lines}{start}\n", "input": "", "answers": [f"{answers[asked]}."]}
        return {"context": lines, "input": f"{start}\n", "answers": [f"{answers[asked]}."]}
    return {"context": context, "input": ask, "answers": [answers[asked]]}


def _few_shot(task: str, asked: str, answers: dict[str, str], context: str, rng: random.Random) -> dict[str, Any]:
    """Questions with their answers, then one without: the prompt ends where the answer starts."""
    shots = [f"{question(city)} {answer}." for city, answer in answers.items()]
    rng.shuffle(shots)
    made = {"context": context + "\n" + "\n".join(shots), "input": question(asked), "answers": [answers[asked]]}
    if task == "trec":
        made |= {"answers": [answers[asked].split()[0]], "all_classes": list(COLOURS)}
    return made


def _paragraphs(task: str, rng: random.Random) -> dict[str, Any]:
    texts = [" ".join(filler(rng) for _ in range(2)) for _ in range(8)]
    if task == "passage_count":
        texts[5:] = rng.sample(texts[:5], 3)
        rng.shuffle(texts)
    context = "\n\n".join(f"Paragraph {number}: {text}" for number, text in enumerate(texts, 1))
    if task == "passage_count":
        return {"context": context, "input": "", "answers": [str(len(set(texts)))]}
    at = rng.randrange(len(texts))
    return {"context": context, "input": texts[at].split(". ")[0] + ".", "answers": [f"Paragraph {at + 1}"]}


def _strewn(facts: list[str], rng: random.Random) -> str:
    """Filler with the facts at random places."""
    hay = [filler(rng) for _ in range(SENTENCES)]
    for sentence in facts:
        hay.insert(rng.randint(0, len(hay)), sentence)
    return " ".join(hay)
