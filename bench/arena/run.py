"""Measure the cells that have no record yet, by `grace_opt.sweep`, and gather all records for the page.

When: ``python -m bench.arena``. Ctrl-C keeps every finished cell; the same command goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.arena.measure import Arena
from bench.arena.plan import cells_of_cases, cells_of_long, cells_of_passages, cells_of_texts
from bench.intervals import DENSE
from bench.provenance import is_clean
from bench.real_model import digest
from grace_opt.hf import attention_implementation
from grace_opt.sweep import Cell, Record, read_cell, run_sweep
from grace_opt.sweep.measure import Function


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
