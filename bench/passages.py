"""Passages of several kinds of text, measured one by one; and cases of retrieval: a word hidden in a text.

Sources are the four texts of `bench.material` (or ``--text``), the source of two modules of Python's standard library,
which changes with Python's version, and generated JSON and numbered lines. Each gives two passages, one for each half:
half A is for choosing settings, half B for reporting them.

Source: the retrieval task follows Kamradt's needle-in-a-haystack test (2023).
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import random
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bench.material import read_text
from bench.provenance import digest, origin_of, recorded
from bench.report import parser_of
from grace_opt.hf.tools.needle import CITIES, filler

HALVES = ("A", "B")
#: Where the passage of each half begins, as a share of its source.
STARTS = {"A": 0.3, "B": 0.6}
#: Where two passages of half B begin.
LATER_STARTS = (0.5, 0.75)
MODULES: tuple[ModuleType, ...] = (argparse, typing)
#: Characters to generate for each token of a passage: three to four passages, also where a token is a digit.
CHARACTERS = 16
#: Words that a model does not expect; one each is hidden.
WORDS = """lantern walrus copper meadow violin saffron glacier tiger button orchid hammer pepper marble falcon ribbon
candle parrot cactus anchor barrel helmet turtle velvet wagon zebra compass""".split()

_SENTENCE_END = re.compile(r"[.!?;]\s+")


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of a text, ``ids`` of shape ``(1, tokens)``."""

    kind: str
    name: str
    half: str
    ids: Tensor


@dataclass(frozen=True)
class Case:
    """A text in which a word is hidden, the question about it, and the answer; as tokens, ``(1, n)`` each."""

    name: str
    depth: float
    context: Tensor
    question: Tensor
    answer: Tensor


def sources(texts: Sequence[Path], tokens: int, seed: int) -> Iterator[tuple[str, str, str]]:
    """Yield kind, name and text of every source; generated ones are long enough for passages of `tokens` tokens."""
    for path in texts:
        name, text = read_text(path)
        yield "book", name, text
    for module in MODULES:
        yield "Python", f"{module.__name__}.py of Python {platform.python_version()}", inspect.getsource(module)
    length = CHARACTERS * tokens
    yield "JSON", "generated JSON", json_text(random.Random(f"{seed} JSON"), length)
    yield "lines", "generated numbered lines", numbered_lines(random.Random(f"{seed} lines"), length)


def beginning(tokenizer: Any) -> Tensor:
    """Return the token that every text of a model begins with, ``(1, 1)``, or none, ``(1, 0)``.

    Without it, a model that expects one (Gemma) predicts much worse, and loses more to any compression.
    """
    ids = tokenizer("a", return_tensors="pt").input_ids
    return ids[:, : int(ids[0, 0] == getattr(tokenizer, "bos_token_id", None))]


def passage_at(ids: Tensor, place: int, tokens: int, begun: Tensor) -> Tensor:
    """Return the tokens of a text from a place on, ``(1, tokens)``, behind what every text begins with."""
    return torch.cat([begun, ids[:, place : place + tokens - begun.shape[1]]], dim=1)


def passages(texts: Sequence[Path], tokenizer: Any, tokens: int, seed: int = 0) -> list[Passage]:
    """Return two passages of every source, that of half A first.

    Raises
    ------
    SystemExit
        If a text is too short for two passages that do not overlap.
    """
    found, begun = [], beginning(tokenizer)
    for kind, name, text in sources(texts, tokens, seed):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        count = ids.shape[1]
        first, second = (int(STARTS[half] * count) for half in HALVES)
        if first + tokens > second or second + tokens > count:
            raise SystemExit(f"{name!r} has {count} tokens, too few for two passages of {tokens}: name a longer --text")
        found += [
            Passage(kind, name, half, passage_at(ids, at, tokens, begun))
            for half, at in zip(HALVES, (first, second), strict=True)
        ]
    return found


def later_passages(texts: Sequence[Path], tokenizer: Any, tokens: int, seed: int = 1, room: int = 2) -> list[Passage]:
    """Return two passages of the second half of every source, for reporting what was chosen or learned on half A.

    Generated text is long enough for `room` times as many tokens as `passages` needs. With the usual seed it is never
    that of the other passages.

    Raises
    ------
    SystemExit
        If a text is too short for two that do not overlap.
    """
    found, begun = [], beginning(tokenizer)
    for kind, name, text in sources(texts, room * tokens, seed):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        count = ids.shape[1]
        places = [int(start * count) for start in LATER_STARTS]
        if places[0] + tokens > places[1] or places[1] + tokens > count:
            raise SystemExit(f"{name!r} has {count} tokens, too few for two passages of {tokens}: name a longer --text")
        found += [Passage(kind, name, "B", passage_at(ids, place, tokens, begun)) for place in places]
    return found


def passage_parser(name: str, description: str | None, *, models: bool = False) -> argparse.ArgumentParser:
    """Return the parser of a benchmark that measures settings on `later_passages`; `models` as in `parser_of`."""
    parser = parser_of(name, description, model=not models, models=models)
    parser.add_argument("--prompt", type=int, default=1792, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens after it (default %(default)s)")
    parser.add_argument("--passages", type=int, help="number of passages (default: all 16)")
    return parser


def measure_passages(
    cut: Sequence[Passage],
    folder: Path,
    settings: Mapping[str, Any],
    source: Mapping[str, Any],
    measure: Callable[[Passage], Any],
    what: str = "kl",
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return kind, name and what was measured of each passage, and where each comes from.

    Parameters
    ----------
    cut : sequence of Passage
    folder : Path
        Of the records, a file for each passage.
    settings, source : mapping
        As in `recorded`.
    measure : callable
        Returns what `what` is to be.
    what : str
    """
    found, origins = [], {}
    for number, passage in enumerate(cut):
        record = recorded(
            folder / f"passage_{number:02}.json",
            {**settings, "ids": digest(passage.ids)},
            source,
            lambda passage=passage: {what: measure(passage)},  # type: ignore[misc]
        )
        print(f"{number + 1} of {len(cut)}: {passage.name}", flush=True)
        found.append({"kind": passage.kind, "name": passage.name, what: record[what]})
        origins[f"passage {number}"] = origin_of(source, record)
    return found, origins


def long_passages(texts: Sequence[Path], tokenizer: Any, tokens: int, seed: int = 0) -> list[Passage]:
    """Return a passage for half B of every source that is long enough, as generated ones always are.

    It begins at `STARTS`, or as much earlier as it must, but in the second half of the source.
    """
    found, begun = [], beginning(tokenizer)
    for kind, name, text in sources(texts, tokens, seed):
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        count = ids.shape[1]
        at = min(int(STARTS["B"] * count), count - tokens)
        if 2 * at >= count:
            found.append(Passage(kind, name, "B", passage_at(ids, at, tokens, begun)))
    return found


def json_text(rng: random.Random, length: int) -> str:
    """Return a list of records with at least `length` characters.

    Examples
    --------
    >>> text = json_text(random.Random(0), 500)
    >>> len(text) >= 500, sorted(json.loads(text)[0])
    (True, ['active', 'city', 'id', 'note', 'scores'])
    """
    records: list[dict[str, Any]] = []
    size = 0
    while size < length:
        records.append(
            {
                "id": rng.randrange(10**6),
                "city": rng.choice(CITIES),
                "active": rng.random() < 0.5,
                "scores": [round(rng.uniform(0, 100), 1) for _ in range(rng.randint(1, 4))],
                "note": filler(rng),
            }
        )
        size += len(json.dumps(records[-1]))
    return json.dumps(records, indent=1)


def numbered_lines(rng: random.Random, length: int) -> str:
    """Return numbered sentences with at least `length` characters.

    Examples
    --------
    >>> numbered_lines(random.Random(0), 1).split(".")[0]
    '1'
    """
    lines: list[str] = []
    while sum(map(len, lines)) < length:
        lines.append(f"{len(lines) + 1}. {filler(rng)}")
    return "\n".join(lines)


def cases(texts: Sequence[Path], tokenizer: Any, count: int, tokens: int) -> list[Case]:
    """Return cases of retrieval: the texts take turns, and the depths are spread evenly over every text's cases.

    Parameters
    ----------
    texts : sequence of Path
    tokenizer : callable
    count : int
        Number of cases.
    tokens : int
        Number of tokens around the sentence with the word.

    Raises
    ------
    SystemExit
        If a text is too short.
    """
    stories = [read_text(path) for path in texts]
    numbers = [tokenizer(text, add_special_tokens=False).input_ids for _, text in stories]
    rounds, found = -(-count // len(stories)), []
    for number in range(count):
        name, ids, turn = stories[number % len(stories)][0], numbers[number % len(stories)], number // len(stories)
        space = len(ids) - tokens
        if space < rounds:
            raise SystemExit(f"{name!r} has {len(ids)} tokens, too few for --cases {count}: name a longer --text")
        start = space * turn // rounds
        body = tokenizer.decode(ids[start : start + tokens])
        place = int((turn + 0.5) / rounds * len(body))
        end = _SENTENCE_END.search(body, place)
        cut = end.end() if end else place
        city, word = CITIES[7 * number % len(CITIES)], WORDS[3 * number % len(WORDS)]
        parts = (
            f"{body[:cut]}Remember this: the secret word of {city} is {word}. {body[cut:]}",
            f"\n\nQuestion: What is the secret word of {city}?\nAnswer: The secret word of {city} is",
            f" {word}",
        )
        context, question, answer = (
            tokenizer(part, add_special_tokens=False, return_tensors="pt").input_ids for part in parts
        )
        context = torch.cat([beginning(tokenizer), context], dim=1)
        found.append(Case(name, cut / len(body), context, question, answer))
    return found
