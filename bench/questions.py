"""Questions about texts that hold the answers: a set of them, the prompts made of it, and when an answer counts.

When: `bench.answers` asks a model. A set is a TOML file, ``questions.toml`` beside this one by default: texts, each a
title and facts, and each fact a sentence, a question about it and what counts as its answer. A text becomes a prompt of
a wanted length by sentences between the facts that hold none: each takes one part of every list of the set's `filler`.
"""

from __future__ import annotations

import random
import re
import tomllib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).parent / "questions.toml"


@dataclass(frozen=True)
class Fact:
    """A sentence, a question about it, and its answers, of which any will do."""

    says: str
    asks: str
    answer: tuple[str, ...]


@dataclass(frozen=True)
class Text:
    """Facts that stand in one text, in their order, and the parts of the sentences between them."""

    title: str
    facts: tuple[Fact, ...]
    filler: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Prompt:
    """The tokens of a text with one question after it, and the fact that answers it."""

    ids: tuple[int, ...]
    fact: Fact


def read_questions(path: Path) -> list[Text]:
    """The texts of a set.

    Raises
    ------
    SystemExit
        If the file is not such a set: what is wrong, and in which text.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"--questions {path.name}: cannot be read as TOML: {error}") from None
    where, filler, texts = f"--questions {path.name}", found.get("filler"), found.get("text")
    if not (isinstance(filler, list) and filler and all(map(_strings, filler))):
        raise SystemExit(f'{where}: give it filler = [["In the morning", ...], ["it rained.", ...]], at least one list')
    if not (isinstance(texts, list) and texts):
        raise SystemExit(f"{where}: there is no [[text]] in it; {DEFAULT.name} shows what one looks like")
    parts = tuple(map(tuple, filler))
    return [_text(text, parts, f"{where}, text {number}") for number, text in enumerate(texts, 1)]


def _text(found: Any, filler: tuple[tuple[str, ...], ...], where: str) -> Text:
    title, facts = (found.get(name) if isinstance(found, dict) else None for name in ("title", "facts"))
    if not (isinstance(title, str) and isinstance(facts, list) and facts):
        raise SystemExit(f'{where}: give it title = "..." and facts = [...], at least one')
    return Text(title, tuple(_fact(fact, f"{where}, fact {n}") for n, fact in enumerate(facts, 1)), filler)


def _fact(found: Any, where: str) -> Fact:
    says, asks, answer = (found.get(name) if isinstance(found, dict) else None for name in ("says", "asks", "answer"))
    if not (_strings([says, asks]) and _strings(answer)):
        raise SystemExit(f'{where}: write {{ says = "...", asks = "...", answer = ["...", ...] }}')
    if not answered(says, answer):
        raise SystemExit(f"{where}: {says!r} holds none of its answers {answer}")
    return Fact(says, asks, tuple(answer))


def _strings(found: Any) -> bool:
    """Whether it is a list of strings, at least one, with a letter or digit in each."""
    return isinstance(found, list) and bool(found) and all(isinstance(part, str) and normal(part) for part in found)


def prompts(text: Text, tokenizer: Any, tokens: int, seed: int = 0) -> list[Prompt]:
    """One prompt for each fact, of one text that with the longest question has at most `tokens` tokens.

    The facts stand in their order at random places among the filler; the question follows the text. If the tokenizer
    has a chat template, both are one message of the user.

    Raises
    ------
    SystemExit
        If the facts alone are longer.
    """
    rng = random.Random(f"{seed} {text.title}")

    def encoded(body: Sequence[str], question: str) -> tuple[int, ...]:
        content = f"{' '.join(body)}\n\n{question}"
        if not getattr(tokenizer, "chat_template", None):
            return tuple(tokenizer(content).input_ids)
        messages = [{"role": "user", "content": content}]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer(chat, add_special_tokens=False).input_ids)

    says = [fact.says for fact in text.facts]
    longest = max((fact.asks for fact in text.facts), key=lambda asks: len(encoded([], asks)))
    if (least := len(encoded(says, longest))) > tokens:
        raise SystemExit(f"--tokens {tokens}: the facts of {text.title!r} and a question alone have {least}")
    hay: list[str] = []
    while len(encoded([*hay, *says, sentence := " ".join(map(rng.choice, text.filler))], longest)) <= tokens:
        hay.append(sentence)
    places = sorted(rng.randint(0, len(hay)) for _ in says)
    body = list(hay)
    for place, sentence in reversed(list(zip(places, says, strict=True))):
        body.insert(place, sentence)
    return [Prompt(encoded(body, fact.asks), fact) for fact in text.facts]


def in_common(found: Sequence[Prompt]) -> int:
    """How many first tokens some prompts share."""
    columns = zip(*(prompt.ids for prompt in found), strict=False)
    return next((at for at, column in enumerate(columns) if len(set(column)) > 1), min(len(p.ids) for p in found))


def normal(text: str) -> str:
    """Letters and digits, in lower case, words apart by one blank.

    Examples
    --------
    >>> normal("  It's THE  ‘Golden Heron’.")
    'it s the golden heron'
    """
    return " ".join(re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold()))


def answered(text: str, answers: Sequence[str]) -> bool:
    """Whether a text holds one of the answers, word for word.

    Examples
    --------
    >>> answered("She sailed from Bergen.", ["Bergen"]), answered("Bergenia is a plant.", ["Bergen"])
    (True, False)
    """
    return any(f" {normal(answer)} " in f" {normal(text)} " for answer in answers)
