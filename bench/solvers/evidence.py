"""What the records say together: reference optima, and whether anyone's proof contradicts anyone's answer."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.solvers.cells import kept_limit, read_all
from bench.solvers.peers import PEERS

Record = dict[str, Any]
Key = tuple[str, int]


@dataclass
class Evidence:
    """All records of a folder.

    Attributes
    ----------
    records : list of dict
    planned : dict
        Suite -> method -> number of cells.
    known : dict
        Instance -> published optimum or best-known value ``f``, and its ``tolerance``.
    optimum : dict
        (instance, k) -> proved optimum.
    """

    records: list[Record]
    planned: dict[str, dict[str, int]]
    known: dict[str, dict[str, float]]
    optimum: dict[Key, float] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Path) -> Evidence:
        """Read a folder that `run` filled. Of cells that differ by their limit alone, the longest counts."""
        longest: dict[tuple[Any, ...], Record] = {}
        for record in read_all(runs):
            cell = record["cell"]
            limit = cell["limit"] if cell["limit"] is not None else float("inf")
            name = (cell["suite"], cell["method"], cell["instance"], *cell["ks"], cell["seed"])
            if cell["suite"] == "large":
                name = (*name, limit)
            kept = longest.get(name)
            if kept is None or limit > (kept["cell"]["limit"] or 0.0):
                longest[name] = record
        plans = {p.stem: json.loads(p.read_text())["cells"] for p in sorted((runs / "plan").glob("*.json"))}
        known = json.loads((runs / "known.json").read_text()) if (runs / "known.json").is_file() else {}
        evidence = cls(list(longest.values()), plans, known)
        for instance, k, one in evidence.answers():
            if one["status"] == "proved":
                key = (instance, k)
                evidence.optimum[key] = min(one["objective"], evidence.optimum.get(key, float("inf")))
        return evidence

    def of_method(self, suite: str, method: str) -> list[Record]:
        """The records of one method in one suite."""
        return [r for r in self.records if r["cell"]["suite"] == suite and r["cell"]["method"] == method]

    def methods(self, suite: str) -> list[str]:
        """The methods that have records in a suite: in the order of the plan, then others."""
        present = sorted({r["cell"]["method"] for r in self.records if r["cell"]["suite"] == suite})
        order = list(self.planned.get(suite, {}))
        return sorted(present, key=lambda method: order.index(method) if method in order else len(order))

    def complete(self, suite: str, *methods: str) -> bool:
        """Whether these methods have all their cells on record."""
        plan = self.planned.get(suite, {})
        return all(m in plan and len(self.of_method(suite, m)) >= plan[m] for m in methods)

    def answers(self, records: Iterable[Record] | None = None) -> list[tuple[str, int, Record]]:
        """(instance, k, answer) of every answer that has an objective, batches taken apart."""
        found = []
        for record in self.records if records is None else records:
            for instance, k, one in parts(record, record.get("answers", [record])):
                if one.get("objective") is not None:
                    found.append((instance, k, {"method": record["cell"]["method"], **one}))
        return found

    def disagreements(self) -> tuple[int, list[str]]:
        """How many cases two or more methods proved, and every contradiction found.

        A contradiction is a bound above somebody's objective, a proved optimum above one, or an objective below a
        published optimum (of k-cluster), each beyond the tolerance of `cells.check`.
        """
        values: dict[Key, list[Record]] = defaultdict(list)
        for instance, k, one in self.answers():
            values[instance, k].append(one)
        certified: dict[Key, list[tuple[str, float]]] = defaultdict(list)
        for record in self.records:
            for instance, k, bound in parts(record, record.get("bounds", [])):
                if bound is not None:
                    certified[instance, k].append((record["cell"]["method"], bound))
        both, found = 0, []
        for key, ones in values.items():
            best = min(ones, key=lambda one: one["objective"])
            tolerance = max(one["tolerance"] for one in ones)
            both += len({one["method"] for one in ones if one["status"] == "proved"}) > 1
            claims = [(one["method"], one["bound"]) for one in ones if one.get("bound") is not None]
            claims += [(f"{one['method']} (proved)", one["objective"]) for one in ones if one["status"] == "proved"]
            for method, claim in [*claims, *certified.get(key, [])]:
                if claim > best["objective"] + tolerance:
                    found.append(
                        f"{key[0]}, k = {key[1]}: {method} says at least {claim!r}, "
                        f"{best['method']} has {best['objective']!r}"
                    )
            published = self.known.get(key[0])
            if published and key[0].startswith("k-cluster/"):
                if best["objective"] < published["f"]:
                    found.append(f"{key[0]}: {best['method']} is below the published optimum {published['f']:g}")
                for one in ones:
                    if one["status"] == "proved" and one["objective"] != published["f"]:
                        found.append(
                            f"{key[0]}: {one['method']} proves {one['objective']!r}, published {published['f']:g}"
                        )
        return both, found

    def ratios(self, records: Iterable[Record]) -> list[float]:
        """(f - optimum) / |optimum| of every answer whose optimum is proved."""
        return [
            excess(one["objective"], self.optimum[instance, k], one["tolerance"])
            for instance, k, one in self.answers(records)
            if (instance, k) in self.optimum
        ]

    def gaps(self, records: Iterable[Record]) -> list[float]:
        """(optimum - bound) / |optimum| of every bound whose optimum is proved; infinite for no bound."""
        found = []
        for record in records:
            values = record["bounds"] if "bounds" in record else [record.get("bound")]
            for instance, k, bound in parts(record, values):
                if (best := self.optimum.get((instance, k))) is not None:
                    found.append(float("inf") if bound is None else (best - bound) / max(abs(best), 1e-300))
        return found


def parts(record: Record, values: list[Any]) -> list[tuple[str, int, Any]]:
    """(instance, k, value) for a record's values: a batch holds each matrix of its file once for every k."""
    cell = record["cell"]
    ks, count = cell["ks"], max(len(values) // len(cell["ks"]), 1)
    if not cell["instance"].endswith("#all"):
        return [(cell["instance"], ks[0], value) for value in values]
    base = cell["instance"].removesuffix("all")
    return [(f"{base}{at % count}", ks[at // count], value) for at, value in enumerate(values)]


def excess(f: float, best: float, tolerance: float) -> float:
    """How far f is above the optimum, relatively; 0 within the tolerance."""
    return 0.0 if f - best <= tolerance else (f - best) / max(abs(best), 1e-300)


def seconds(record: Record) -> float:
    """What a case took: all of the call for ours, the search without building the model for a peer."""
    value = record.get("time" if record["cell"]["method"] in PEERS else "wall")
    return float("nan") if value is None else float(value)


def overran(record: Record) -> bool:
    """Whether a case took longer than its limit: by the same `seconds` as the tables, or it had to be ended."""
    return bool(record.get("ended")) or not kept_limit(record["cell"]["limit"], seconds(record))


def proved(records: Iterable[Record]) -> list[Record]:
    """The proved ones."""
    return [record for record in records if record["status"] == "proved"]


def median(values: Iterable[float]) -> float:
    """The median, NaN of nothing."""
    values = list(values)
    return statistics.median(values) if values else float("nan")


def per_instance(record: Record) -> float:
    """Milliseconds per instance of a batch in one call."""
    values = record.get("answers") or record.get("bounds") or [record]
    return 1000 * seconds(record) / len(values)
