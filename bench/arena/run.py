"""What is measured where, and the run: cells without a record, by `grace_opt.sweep`, and all records for the page.

Every method is measured on short passages, some on long ones, hidden words and questions. Cells of one prompt stand
together, so that it is read once. Ctrl-C keeps every finished cell; the same command goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.arena.contenders import Contender
from bench.arena.measure import Arena
from bench.intervals import DENSE
from bench.passages import HALVES
from bench.provenance import digest, is_clean
from grace_opt.hf import attention_implementation
from grace_opt.sweep import Cell, Record, read_cell, run_sweep
from grace_opt.sweep.measure import Function

#: On half A of the passages as well: what the page compares.
BOTH_HALVES = (
    *("bits-1", "bits-1.5", "bits-2", "bits-2.25", "bits-3", "bits-4", "int4", "grace-0.5"),
    *("transformers-4", "kivi-4-g32", "kivi-2-g32", "turboquant-4", "turboquant-3", "turboquant-2", "hadamard-4"),
    *("hadamard-3", "oscar-3", "block-gtq-3", "rdkv-3", "rdkv-2.5", "snapkv-at-2.25", "h2o-at-2.25"),
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


def settings_of_all(arena: Arena, source: Mapping[str, Any], now: str) -> dict[str, Any]:
    """Return what every record depends on; `now` too if files differ from the commit, so that none is used again."""
    basis = arena.subject.basis
    parts = [*basis.key_rates.values(), *basis.value_rates.values()]
    parts += [each.encode for bases in (basis.keys, basis.values) for each in bases.values()]
    common = {
        "commit": source["commit"],
        "weights": digest(*arena.subject.model.parameters()),
        "basis": digest(*parts),
        **{name: source[name] for name in ("torch", "transformers")},
    }
    return common if is_clean(source) else {**common, "measured": now}


def run(
    arena: Arena, runs: Path, source: Mapping[str, Any], now: str, progress: bool | None = None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Measure what is not measured yet.

    Parameters
    ----------
    arena : Arena
    runs : Path
        Folder of the records.
    source : mapping
        The provenance of now.
    now : str
        Marks the records of changed files.
    progress : bool or None
        As in `run_sweep`.

    Returns
    -------
    dict
        ``passages``, ``long``, ``cases`` and ``chat``, ready for the page.
    dict
        The provenance of every record.

    Raises
    ------
    SystemExit
        Names how many cells failed, and the first four.
    """
    common = settings_of_all(arena, source, now)
    sources: dict[str, dict[str, Any]] = {}

    def measured(cells: Sequence[Cell], function: Function) -> list[Record]:
        if not cells:
            return []
        result = run_sweep(cells, function, runs, provenance=source, progress=progress)
        if result.failures:
            told = "; ".join(f"{_where(one.config)}: {one.error}" for one in result.failures[:4])
            raise SystemExit(
                f"{len(result.failures)} cells of {cells[0].experiment} failed; all others are kept. {told}. Leave a "
                "method out with --without NAME, and the page says so"
            )
        records = [read_cell(cell.path(runs)) for cell in cells]
        sources.update({f"{cells[0].experiment}, {_where(one.cell.config)}": one.provenance for one in records})
        return records

    with attention_implementation(arena.subject.model, "grace_sdpa"), torch.no_grad():
        short = measured(cells_of_passages(arena, common), arena.measure_passage)
        long = measured(cells_of_long(arena, common), arena.measure_passage)
        cases = measured(cells_of_cases(arena, common), arena.measure_case)
        dense = measured(cells_of_texts(arena, common, None), arena.measure_text)
        asked = [[row["question"] for row in one.rows if row["right"]] for one in dense]
        chat = measured(cells_of_texts(arena, common, asked), arena.measure_text)
    found = {
        "passages": _of_passages(short, arena.passages),
        "long": _of_passages(long, arena.long),
        "cases": [
            {
                "name": case.name,
                "depth": case.depth,
                "tokens": case.context.shape[1],
                "rows": {one.cell.config["method"]: one.rows[0] for one in cases if one.cell.config["case"] == number},
            }
            for number, case in enumerate(arena.cases)
        ],
        "chat": _of_texts([*dense, *chat], arena),
    }
    return found, sources


def _of_passages(records: Sequence[Record], passages: Sequence[Any]) -> list[dict[str, Any]]:
    return [
        {
            **{"kind": passage.kind, "name": passage.name, "half": passage.half},
            "rows": {one.cell.config["method"]: one.rows[0] for one in records if one.cell.config["passage"] == number},
        }
        for number, passage in enumerate(passages)
    ]


def _of_texts(records: Sequence[Record], arena: Arena) -> list[dict[str, Any]]:
    """Return a line for every question that was asked."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for record in records:
        config = record.cell.config
        for row in record.rows:
            question = arena.texts[config["text"]][row["question"]]
            line = found.setdefault(
                (config["text"], row["question"]), {"text": config["text"], "asks": question.fact.asks, "rows": {}}
            )
            line["rows"][config["method"]] = {"right": row["right"], "answer": row["answer"]}
    return [found[key] for key in sorted(found)]


def _where(config: Mapping[str, Any]) -> str:
    """Name a cell."""
    place = next(f"{name} {config[name] + 1}" for name in ("passage", "case", "text") if name in config)
    return f"{config['method']} on {place}" if config["method"] != DENSE else f"the dense cache on {place}"
