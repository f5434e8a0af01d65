"""docs/results/solvers.{json,md} from the records: the goals, every method in every suite, the ladder of bounds."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.provenance import caption, provenance, write_json
from bench.solvers.cells import finite
from bench.solvers.evidence import Evidence, Record, median, overran, per_instance, proved, seconds
from bench.solvers.rows import GOALS, above, by_penalty, reached

PROVING = ("real64", "synthetic128", "pairs128", "synthetic256", "kcluster", "kcluster120", "kcluster_find")


def write(runs: Path, results: Path) -> str:
    """Write both files and return the text.

    Parameters
    ----------
    runs : Path
        The folder that `run` filled.
    results : Path
        Where solvers.json and solvers.md go.
    """
    evidence = Evidence.of(runs)
    if not evidence.records:
        raise SystemExit(f"no records in {runs}: python -m bench.solvers run --data DIR --out {runs}")
    sources = [json.loads(p.read_text()) for p in sorted((runs / "provenance").glob("*.json"))] or [provenance()]
    both, contradictions = evidence.disagreements()
    rows = [goal(evidence) for goal in GOALS]
    tables = {
        "proofs": proofs(evidence),
        "published": published(evidence),
        "heuristics": batches(evidence),
        "samplers": sampled(evidence),
        "ladder": ladder(evidence),
        "large": scale(evidence),
    }
    commits = sorted({record["commit"] for record in evidence.records})
    notes = [
        f"{r['cell']['method']}, {r['cell']['instance']}, k = {r['cell']['ks']}: {r.get('message') or r.get('note')}"
        for r in evidence.records
        if r["status"] == "failed" or r.get("note")
    ]
    versions = sorted({r["version"] for r in evidence.records if r.get("version")})
    content = {
        "provenance": sources,
        "commits": commits,
        "versions": versions,
        "goals": [dataclasses.asdict(row) for row in rows],
        **tables,
        "proved by more than one": both,
        "contradictions": contradictions,
        "failures and notes": notes,
    }
    write_json(results / "solvers.json", finite(content))
    met = {True: "yes", False: "**no**", None: "not measured in full"}
    lines = [
        "One thread each, methods taking turns. Ours: the whole call to `solve`. Peers: their search alone, without",
        "building the model, on 8 cases a row (Gurobi on all of the first). Medians and totals include the unproved.",
        "",
        *_table(
            [{"what": r.what, "ours": r.ours, "peers": r.peers, "target": r.target, "met": met[r.met]} for r in rows]
        ),
    ]
    titles = {
        "proofs": "Every method on single instances (seconds)",
        "published": "Published optima and best-known values",
        "heuristics": "Heuristics on the real cases as one batch, against the proved optimum",
        "samplers": "Samplers with a penalty for the wrong size, synthetic n = 128",
        "ladder": "Lower bounds against the proved optimum, gap and time",
        "large": "Random n = 5000, k = 500",
    }
    for name, title in titles.items():
        if tables[name]:
            lines += ["", f"**{title}**", "", *_table(tables[name])]
    lines += ["", f"{both} cases were proved by more than one method; contradictions: {len(contradictions)}."]
    lines += [f"- {line}" for line in contradictions]
    if notes:
        lines += ["", f"Failures and remarks ({len(notes)}):", *[f"- {line}" for line in _shortened(notes)]]
    lines += [
        "",
        f"Solvers: {', '.join(versions)}. Measured at commits {', '.join(commits)}.",
        "",
        caption(sources[-1]),
    ]
    text = "\n".join([*lines, ""])
    (results / "solvers.md").write_text(text, encoding="utf-8")
    return text


def proofs(evidence: Evidence) -> list[dict[str, Any]]:
    """Suite × n × method: cases, proved, seconds, nodes."""
    found = []
    for suite in PROVING:
        for method in evidence.methods(suite):
            records = evidence.of_method(suite, method)
            for n in sorted({r["n"] for r in records}):
                sized = [r for r in records if r["n"] == n]
                times = [t for t in map(seconds, sized) if math.isfinite(t)]
                found.append(
                    {
                        "suite": suite,
                        "n": n,
                        "method": method,
                        "cases": len(sized),
                        "proved": len(proved(sized)),
                        "refused or failed": sum(r["status"] in ("refused", "failed") for r in sized),
                        "median s": median(times),
                        "max s": max(times, default=math.nan),
                        "total s": sum(times),
                        "median nodes": median(r["nodes"] for r in sized if r.get("nodes") is not None),
                        "over the limit": sum(map(overran, sized)),
                    }
                )
    return found


def published(evidence: Evidence) -> list[dict[str, Any]]:
    """MDPLIB by instance, k-cluster by size: how often the published value is reached, and the gap to it."""
    found = []
    for suite in ("kcluster_find", "mdplib"):
        for method in evidence.methods(suite):
            groups: dict[str, list[Record]] = {}
            for record in evidence.of_method(suite, method):
                name = record["cell"]["instance"].rpartition("/")[2].partition("_n")[0]
                groups.setdefault(name if suite == "mdplib" else f"k-cluster n = {record['n']}", []).append(record)
            for name, records in groups.items():
                gaps = [above(evidence, r) for r in records]
                found.append(
                    {
                        "instance": name,
                        "method": method,
                        "runs": len(records),
                        "reached": sum(reached(evidence, r) for r in records),
                        "median gap": _percent(median(gaps)),
                        "worst gap": _percent(max(gaps)),
                        "median s": median(map(seconds, records)),
                    }
                )
    return found


def batches(evidence: Evidence) -> list[dict[str, Any]]:
    """Each heuristic on the batch of real cases."""
    found = []
    for method in evidence.methods("heuristics"):
        for record in evidence.of_method("heuristics", method):
            above_optimum = evidence.ratios([record])
            if not above_optimum:
                continue
            found.append(
                {
                    "method": method,
                    "optimal": f"{sum(r == 0 for r in above_optimum)}/{len(above_optimum)}",
                    "median": _percent(median(above_optimum)),
                    "worst": _percent(max(above_optimum)),
                    "ms per instance": per_instance(record),
                }
            )
    return found


def sampled(evidence: Evidence) -> list[dict[str, Any]]:
    """The samplers, and ours on the same cases."""
    found = []
    for method in evidence.methods("samplers"):
        records = evidence.of_method("samplers", method)
        above_optimum = evidence.ratios(records)
        penalties = [
            f"{penalty:g}: {share:.0%} wrong, "
            + (f"worst +{worst:.1%}" if math.isfinite(worst) else "none right for some")
            for penalty, share, worst in by_penalty(evidence, records)
        ]
        found.append(
            {
                "method": method,
                "cases": len(records),
                "optimal": f"{sum(r == 0 for r in above_optimum)}/{len(above_optimum)}",
                "worst": _percent(max(above_optimum, default=math.nan)),
                "by penalty (× mean weight of a chosen vertex)": "; ".join(penalties) or "–",
                "median s": median(map(seconds, records)),
            }
        )
    return found


def ladder(evidence: Evidence) -> list[dict[str, Any]]:
    """Every bound: its gap to the proved optimum and its time, the loosest first."""
    found = []
    for method in evidence.methods("tight"):
        records = [r for r in evidence.of_method("tight", method) if r["status"] != "failed"]
        if gaps := evidence.gaps(records):
            found.append(
                (
                    -median(gaps),
                    {
                        "bound": method.removeprefix("bound:").replace(",", ", "),
                        "instances": len(gaps),
                        "median gap": _percent(median(gaps)),
                        "worst gap": _percent(max(gaps)),
                        "below the optimum": sum(gap >= -1e-9 for gap in gaps),
                        "ms per instance": median(map(per_instance, records)),
                    },
                )
            )
    return [row for _, row in sorted(found, key=lambda pair: pair[0])]


def scale(evidence: Evidence) -> list[dict[str, Any]]:
    """The large instances: the objective by time limit, and the peak of memory."""
    return [
        {
            "instance": record["cell"]["instance"],
            "method": method,
            "limit s": record["cell"]["limit"],
            "objective": record.get("objective"),
            "call s": seconds(record),
            "peak GiB": record.get("memory", math.nan) / 2**30,
        }
        for method in evidence.methods("large")
        for record in evidence.of_method("large", method)
    ]


def _percent(share: float) -> str:
    return "–" if not math.isfinite(share) else f"{share:.3%}"


def _shortened(lines: list[str], most: int = 20) -> Iterable[str]:
    yield from lines[:most]
    if len(lines) > most:
        yield f"… and {len(lines) - most} more, in solvers.json"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """A Markdown table; numbers to the right."""
    heads = list(rows[0])
    numeric = [all(isinstance(row[h], int | float) or row[h] is None for row in rows) for h in heads]
    lines = ["| " + " | ".join(heads) + " |", "|" + "|".join("---:" if right else "---" for right in numeric) + "|"]
    return lines + ["| " + " | ".join(_shown(row[h]) for h in heads) + " |" for row in rows]


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.9g}"
    return str(value).replace("|", "\\|")
