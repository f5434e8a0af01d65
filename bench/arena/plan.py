"""What is measured where: every method on short passages, some on long ones, hidden words and questions.

When: `bench.arena.run` makes its cells of it. Cells of one prompt stand together, so that it is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bench.arena.contenders import Contender
from bench.arena.measure import Arena
from bench.intervals import DENSE
from bench.passages import HALVES
from bench.real_model import digest
from grace_opt.sweep import Cell

#: On half A of the passages as well: what the page compares.
BOTH_HALVES = (
    *("bits-1", "bits-1.5", "bits-2", "bits-2.25", "bits-3", "bits-4", "int4", "grace-0.5"),
    *("transformers-4", "kivi-4-g32", "kivi-2-g32", "turboquant-4", "turboquant-3", "turboquant-2", "hadamard-4"),
    *("hadamard-3", "oscar-3", "block-gtq-3", "rdkv-3", "rdkv-2.5", "snapkv-at-2.25", "h2o-at-2.25"),
    "reference-entropy-2.25",
)
#: On long passages.
LONG = (
    *("bits-1", "bits-1.5", "bits-2", "bits-2.25", "bits-3", "grace-0.5", "snapkv-at-2.25"),
    *("kivi-4-g32", "kivi-2-g32", "turboquant-4", "turboquant-3", "turboquant-2"),
)
#: Asked for hidden words.
RETRIEVAL = (
    *("bits-1", "bits-1.5", "bits-2", "bits-3", "int4", "snapkv-at-2.25"),
    *("kivi-2-g32", "turboquant-2"),
)
#: Asked questions.
CHAT = ("bits-2", "bits-2.25", "int4", "snapkv-at-2.25", "kivi-2-g32", "turboquant-4", "turboquant-2")


def chosen(names: Sequence[str], contenders: Mapping[str, Contender]) -> list[str]:
    """Return those of the names that compete; the command line may have left some out."""
    return [name for name in names if name in contenders]


def cells_of_passages(arena: Arena, common: Mapping[str, Any]) -> list[Cell]:
    """Return a cell for every contender and short passage; on half A for those of `BOTH_HALVES`."""
    return list(_passages(arena, common, list(arena.contenders), False))


def cells_of_long(arena: Arena, common: Mapping[str, Any]) -> list[Cell]:
    """Return a cell for every one of `LONG` and long passage."""
    return list(_passages(arena, common, chosen(LONG, arena.contenders), True)) if arena.long else []


def _passages(arena: Arena, common: Mapping[str, Any], names: Sequence[str], long: bool) -> Iterator[Cell]:
    halves = {passage.half for passage in arena.passages}
    for number, passage in enumerate(arena.long if long else arena.passages):
        ids = digest(passage.ids)
        for name in names:
            if not long and passage.half == HALVES[0] and len(halves) > 1 and name not in BOTH_HALVES:
                continue
            where = {"long": long, "passage": number, "ids": ids, "later": arena.later}
            settings = {"method": name, "settings": arena.contenders[name].settings}
            yield Cell("long" if long else "passages", {**common, **where, **settings})


def cells_of_cases(arena: Arena, common: Mapping[str, Any]) -> list[Cell]:
    """Return a cell for every one of `RETRIEVAL`, and the dense cache, and hidden word."""
    found = []
    for number, case in enumerate(arena.cases):
        ids = digest(case.context, case.question, case.answer)
        for name in (DENSE, *chosen(RETRIEVAL, arena.contenders)):
            found.append(Cell("retrieval", {**common, "case": number, "ids": ids, **_method(arena, name)}))
    return found


def cells_of_texts(arena: Arena, common: Mapping[str, Any], asked: Sequence[Sequence[int]] | None) -> list[Cell]:
    """Return the cells of questions: those of the dense cache, or of all others about what it answers.

    Parameters
    ----------
    arena : Arena
    common : mapping
        Goes into every cell.
    asked : sequence of sequences of int, optional
        The numbers of the questions about each text that the dense cache answers; None is for the dense cache itself.
    """
    found = []
    for number, text in enumerate(arena.texts):
        questions = list(range(len(text))) if asked is None else list(asked[number])
        ids = digest(*(torch.tensor(question.ids) for question in text))
        for name in [DENSE] if asked is None else chosen(CHAT, arena.contenders):
            if questions:
                where = {"text": number, "questions": questions, "ids": ids, "new_tokens": arena.new_tokens}
                found.append(Cell("chat", {**common, **where, **_method(arena, name)}))
    return found


def _method(arena: Arena, name: str) -> dict[str, str]:
    return {"method": name, "settings": "" if name == DENSE else arena.contenders[name].settings}
