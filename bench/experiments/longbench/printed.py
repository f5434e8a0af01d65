"""The numbers that the paper prints in Tables 1 to 3, for the tables of a report.

When: views are made. The files in ``bench/experiments/paper`` begin with lines that say where they are from.
Source: GRACE (arXiv 2604.16983).
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable
from pathlib import Path

from bench.experiments.longbench.tasks import TASKS
from grace_opt.sweep import Paper

FOLDER = Path(__file__).parent.parent / "paper"


@functools.cache
def rows(name: str) -> tuple[dict[str, str], ...]:
    """The lines of one file, without its comments."""
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    return tuple(csv.DictReader(line for line in lines if not line.startswith("#")))


def pairs(table: int) -> list[tuple[str, int]]:
    """Evictions and KV sizes of Table 1 or 2."""
    return list(dict.fromkeys((row["eviction"], int(row["kv"])) for row in _table(table)))


def averages(table: int, command: str) -> list[Paper]:
    """The column Avg of Table 1 or 2."""
    found = []
    for row in _table(table):
        at = {"checkpoint": row["checkpoint"], "eviction": row["eviction"], "kv": int(row["kv"])}
        for method, ratio in _places(row, table):
            value = float(row["Avg"])
            found.append(Paper("score", {**at, "ratio": ratio, "method": method}, value, f"Table {table}", command))
    return found


def scores(table: int, eviction: str, kv: int, command: str) -> list[Paper]:
    """The 16 tasks of Table 1 or 2 at one KV size."""
    found = []
    for row in _table(table):
        if (row["eviction"], int(row["kv"])) != (eviction, kv):
            continue
        for method, ratio in _places(row, table):
            for task in TASKS:
                at = {"checkpoint": row["checkpoint"], "ratio": ratio, "task": task, "method": method}
                found.append(Paper(f"{eviction} {kv}", at, float(row[task]), f"Table {table}", command))
    return found


def needle(command: str) -> list[Paper]:
    """Table 3."""
    found = []
    for row in rows("needle.csv"):
        at = {"checkpoint": "Llama-3-8B-Instruct", "kv": row["kv"], "ratio": float(row["ratio"])}
        found.append(Paper("score", {**at, "method": row["method"]}, float(row["score"]), "Table 3", command))
    return found


def _table(table: int) -> list[dict[str, str]]:
    return [row for row in rows("longbench.csv") if row["table"] == str(table)]


def _places(row: dict[str, str], table: int) -> Iterable[tuple[str, float]]:
    """Method and ratio; eviction alone stands beside every ratio."""
    if row["method"] != "none":
        return [(row["method"], float(row["ratio"]))]
    ratios = sorted({float(other["ratio"]) for other in _table(table) if other["ratio"]})
    return [("dense", ratio) for ratio in ratios]
