"""Everything that follows from the records together: proved optima, published values, contradictions.

When: `bench.solvers.report`. A row is one answer: the settings of its cell, and what `bench.solvers.measure` found.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.solvers.checks import kept_limit
from bench.solvers.peers import PEERS
from bench.solvers.sets import COLLECTIONS, published, target
from bench.solvers.suites import SUITES
from grace_opt.sweep import Record, read_cell
from grace_opt.sweep.report import merge

Row = dict[str, Any]
Key = tuple[str, int]


def read_all(runs: Path) -> list[Record]:
    """Return all records in `runs`, by suite, method and instance; a damaged one raises an error that names it."""
    records = [read_cell(path) for path in runs.glob("*/cells/*.json") if not path.name.startswith(".")]
    suites, methods = list(SUITES), ["branch_and_bound", *PEERS]

    def place(record: Record) -> tuple[Any, ...]:
        c = record.cell.config
        suite = suites.index(c["suite"]) if c["suite"] in suites else len(suites)
        method = methods.index(c["method"]) if c["method"] in methods else len(methods)
        return suite, c["n"], method, c["method"], c["instance"], c["ks"], c["seed"], c["limit"] or 0.0

    return sorted(records, key=place)


def commits(records: Iterable[Record]) -> set[str]:
    """Return the commits at which the records were measured."""
    return {str(record.provenance.get("commit", "")) for record in records}


@dataclass
class Evidence:
    """All answers of a folder.

    Attributes
    ----------
    rows : list of dict
    known : dict
        Case -> published optimum or best known value, and its tolerance.
    optimum : dict
        (case, k) -> proved optimum.
    """

    rows: list[Row]
    known: dict[str, tuple[float, float]]
    optimum: dict[Key, float]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Evidence:
        """What the records say."""
        known = {f"{name}/{one.file}": target(name, one) for name in COLLECTIONS for one in published(name)}
        optimum: dict[Key, float] = {}
        rows = merge(records)
        for row in rows:
            if row["status"] == "proved":
                optimum[key(row)] = min(row["objective"], optimum.get(key(row), math.inf))
        return cls(rows, known, optimum)

    def of_method(self, suite: str, method: str) -> list[Row]:
        """Return the rows of one method in one suite."""
        return [row for row in self.rows if row["suite"] == suite and row["method"] == method]

    def of_suite(self, suite: str) -> list[Row]:
        """Return the rows of a suite."""
        return [row for row in self.rows if row["suite"] == suite]

    def best(self, suite: str) -> dict[Key, float]:
        """Return the least objective that any method reached in each case of a suite, proved or not."""
        found: dict[Key, float] = {}
        for row in self.of_suite(suite):
            if row.get("objective") is not None:
                found[key(row)] = min(float(row["objective"]), found.get(key(row), math.inf))
        return found

    def methods(self, suite: str, order: Sequence[str]) -> list[str]:
        """The methods with rows in a suite: those of `order`, in this order, then others."""
        present = dict.fromkeys(row["method"] for row in self.rows if row["suite"] == suite)
        return [*(m for m in order if m in present), *(m for m in present if m not in order)]

    def disagreements(self) -> tuple[int, list[str]]:
        """Return the number of cases that two or more methods proved, and all contradictions.

        A contradiction is a lower bound or a proved optimum above an objective that another method reached. For
        published optima, it is also an objective below them, or a proof of another value. The tolerance is that of
        `checks.check`.
        """
        by_case: dict[Key, list[Row]] = defaultdict(list)
        for row in self.rows:
            by_case[key(row)].append(row)
        both, found = 0, []
        for (case, k), rows in by_case.items():
            solved = [row for row in rows if row.get("objective") is not None]
            if not solved:
                continue
            best = min(solved, key=lambda row: float(row["objective"]))
            tolerance = max(row["tolerance"] for row in solved)
            both += len({row["method"] for row in solved if row["status"] == "proved"}) > 1
            claims = [(row["method"], row["bound"]) for row in rows if row.get("bound") is not None]
            claims += [(f"{row['method']} (proved)", row["objective"]) for row in solved if row["status"] == "proved"]
            for method, claim in claims:
                if claim > best["objective"] + tolerance:
                    found.append(
                        f"{case}, k = {k}: {method} says at least {claim!r}, {best['method']} has {best['objective']!r}"
                    )
            if case in self.known and COLLECTIONS[case.partition("/")[0]].proved:
                f = self.known[case][0]
                if best["objective"] < f:
                    found.append(f"{case}: {best['method']} is below the published optimum {f:g}")
                for row in solved:
                    if row["status"] == "proved" and row["objective"] != f:
                        found.append(f"{case}: {row['method']} proves {row['objective']!r}, published {f:g}")
        return both, found

    def excesses(self, rows: Iterable[Row]) -> list[float]:
        """(f - optimum) / |optimum| of every answer whose optimum is proved; infinite for none."""
        return [
            math.inf
            if row.get("objective") is None
            else excess(row["objective"], self.optimum[key(row)], row["tolerance"])
            for row in rows
            if key(row) in self.optimum
        ]

    def gaps(self, rows: Iterable[Row]) -> list[float]:
        """(optimum - bound) / |optimum| of every bound whose optimum is proved; infinite for no bound."""
        return [
            math.inf
            if row.get("bound") is None
            else (self.optimum[key(row)] - row["bound"]) / max(abs(self.optimum[key(row)]), 1e-300)
            for row in rows
            if key(row) in self.optimum
        ]

    def above_known(self, row: Row) -> float:
        """Return how far an answer is above the published value, relatively; NaN if either is missing."""
        if row["case"] not in self.known or row.get("objective") is None:
            return math.nan
        best, tolerance = self.known[row["case"]]
        return excess(row["objective"], best, tolerance)


def key(row: Row) -> Key:
    """Return what a row solves: a matrix and its k."""
    return row["case"], row["k"]


def excess(f: float, best: float, tolerance: float) -> float:
    """Return how far f is above the best, relatively; 0 within the tolerance."""
    return 0.0 if f - best <= tolerance else (f - best) / max(abs(best), 1e-300)


def seconds(row: Row) -> float:
    """Return the time of a case: the whole call for ours, the search without building the model for peers."""
    value = row.get("time" if row["method"] in PEERS else "wall")
    return math.nan if value is None else float(value)


def per_instance(row: Row) -> float:
    """Return the milliseconds per instance of a batch that one call solved."""
    return 1000 * seconds(row) / row["together"] if row.get("together") else math.nan


def overran(row: Row) -> bool:
    """Return whether a case took longer than its limit, by the `seconds` in the tables, or was ended."""
    return bool(row.get("ended")) or not kept_limit(row["limit"], seconds(row))


def proved(rows: Iterable[Row]) -> list[Row]:
    """Return the proved rows."""
    return [row for row in rows if row["status"] == "proved"]


def median(values: Iterable[float]) -> float:
    """Return the median of the values that are not NaN; NaN if there are none."""
    kept = [value for value in values if not math.isnan(value)]
    return statistics.median(kept) if kept else math.nan
