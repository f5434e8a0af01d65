"""docs/results/solvers.{md,json,png} from the records, in the form that all pages of results have.

When: `python -m bench.solvers report` or `all`. `content` makes the numbers from records of one clean commit, `page`
makes the page from these numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.provenance import NONE, refuse
from bench.report import Page, read_results, table, write_results
from bench.solvers.evidence import Evidence, Row, median, proved, read_all, seconds
from bench.solvers.figure import dots, draw
from bench.solvers.peers import FREE_LIMITS, PEERS
from bench.solvers.suites import SUITES
from bench.solvers.tables import FOLDED, MEANINGS, NAMES, OURS, PROVING, TABLES, Line
from grace_opt.errors import OptionError
from grace_opt.sweep import Record
from grace_opt.sweep.cells import decode, encode

#: What the instances of a suite are called in a sentence.
SUITE_WORDS = {"clusters": "k-cluster instances"}
#: Smaller numbers of a table differ from 0 by rounding only.
TINY = 0.0001


def write_report(runs: Path, results: Path, *, allow_dirty: bool = False) -> str:
    """Write the page, its numbers as JSON, and its picture; return the page.

    Parameters
    ----------
    runs : Path
        The folder that `bench.solvers.run` filled.
    results : Path
        Where solvers.md, solvers.json and solvers.png go.
    allow_dirty : bool
        Accept records of several commits, or of changed files; the page then says so.

    Raises
    ------
    OptionError
        If there are no records.
    MixedError
        If they are not all of one clean commit.
    """
    records, source = of_one_commit(runs, allow_dirty)
    value: dict[str, Any] = encode({"provenance": source, **content(records)}, "report")
    return write_results(results / "solvers", value, page, allow_dirty=allow_dirty)


def of_one_commit(runs: Path, allow_dirty: bool) -> tuple[list[Record], dict[str, Any]]:
    """Return the records of a folder, and where they come from; the errors are those of `write_report`."""
    records = read_all(runs)
    if not records:
        raise OptionError(f"no records in {runs}: python -m bench.solvers run --data DIR --out {runs}")
    sources = {_name(r): {**r.provenance, "commit": r.provenance.get("commit") or NONE} for r in records}
    return records, refuse(sources, allow_dirty)


def rewrite_report(results: Path, *, allow_dirty: bool = False) -> str:
    """Write the page again from the JSON file in `results`; return it."""
    value = read_results(results / "solvers")
    if "summary" not in value:
        raise OptionError("solvers.json is of an older form: make it from its records, python -m bench.solvers report")
    return write_results(results / "solvers", value, page, allow_dirty=allow_dirty, measured=False)


def content(records: Sequence[Record]) -> dict[str, Any]:
    """Return everything that the page says, as numbers and text."""
    evidence = Evidence.of(records)
    both, contradictions = evidence.disagreements()
    ours = [row for suite in PROVING for row in evidence.of_method(suite, OURS)]
    summary = {"cases": len(ours), "proved": len(proved(ours)), "median s": median(map(seconds, ours))}
    return {
        "versions": sorted({str(row["version"]) for row in evidence.rows if row.get("version")}),
        "captured": sorted({row["data"] for row in evidence.rows if row["data"]}),
        "summary": summary,
        "beside gurobi": [line for suite in ("heads", "pairs", "clusters") for line in _beside_gurobi(evidence, suite)],
        "missing suites": [name for name in SUITES if not any(row["suite"] == name for row in evidence.rows)],
        "missing methods": [name for name in PEERS if not any(row["method"] == name for row in evidence.rows)],
        **{name: function(evidence) for name, (_, function) in TABLES.items()},
        "dots": dots(evidence),
        "proved by more than one": both,
        "contradictions": contradictions,
        "failures and notes": notes_of(evidence),
    }


def page(value: dict[str, Any]) -> Page:
    """Return what docs/results/solvers.md says of the numbers."""
    value = decode(value)
    notes, contradictions = value["failures and notes"], value["contradictions"]
    tables: list[str] = []
    for name, (title, _) in TABLES.items():
        if value[name] and name not in FOLDED:
            tables += [f"**{title}.** {MEANINGS[name]}", "", *shown_table(value[name])]
    details = [(TABLES[name][0], [MEANINGS[name], "", *shown_table(value[name])]) for name in FOLDED if value[name]]
    if notes:
        details.append((f"Failures and remarks ({len(notes)})", [f"- {line}" for line in notes]))
    return Page(
        title="Solvers on the same instances",
        picture="Seconds to a proved optimum, by solver and instances; how often heuristics are optimal, by time",
        headline=_headline(value),
        draw=lambda figure: draw(figure, value),
        asked="How long does it take to prove that a set of k vertices is the best, how good are answers and lower "
        "bounds that take milliseconds, and how do other solvers do on the same instances?",
        found=_found(value),
        sure=_sure(value),
        tables=[*tables, *(f"- Contradiction: {line}" for line in contradictions)],
        details=[*details, ("How it is measured", _counted(value))],
    )


def _headline(value: dict[str, Any]) -> str:
    """What the picture says: proofs, beside Gurobi's where both were given the same heads."""
    ours = value["summary"]
    said = f"Branch and bound proves {ours['proved']} of {ours['cases']} optima (median {short(ours['median s'])} s)"
    if line := next((line for line in value["beside gurobi"] if line["suite"] == "heads"), None):
        theirs = short(line["Gurobi: median s"])
        said += f"; on {line['cases']} heads it takes {short(line['ours: median s'])} s, Gurobi {theirs} s"
    return said


def _found(value: dict[str, Any]) -> str:
    """Return the second sentence: proofs, Gurobi on the same cases, heuristics, certificates."""
    ours = value["summary"]
    found = [f"Branch and bound proved {ours['proved']} of {ours['cases']} optima, in {short(ours['median s'])} s at "
             "the median"]  # fmt: skip
    for line in value["beside gurobi"]:
        words = SUITE_WORDS.get(line["suite"], line["suite"])
        found.append(
            f"on the {line['cases']} {words} that Gurobi was given, ours proved {line['ours: proved']} "
            f"(median {short(line['ours: median s'])} s) and Gurobi {line['Gurobi: proved']} "
            f"({short(line['Gurobi: median s'])} s)"
        )
    if best := next((line for line in value["heuristics"] if line["method"] == "portfolio"), None):
        found.append(f"`portfolio` found the optimum of {best['optimal'].replace('/', ' of ')} heads in "
                     f"{short(best['ms per instance'])} ms each")  # fmt: skip
    if tight := next((line for line in value["certificates"] if "level=tight" in line["bound"]), None):
        gap = tight["median gap %"]
        below = "equals the optimum" if abs(gap) < TINY else f"is {short(gap)} % below the optimum"
        took = short(tight["ms per instance"])
        found.append(f'the lower bound of `certify="tight"` {below} at the median, in {took} ms each')
    return "; ".join(found) + "."


def _sure(value: dict[str, Any]) -> str:
    """Return the third sentence; it names what is missing."""
    both, number = value["proved by more than one"], len(value["contradictions"])
    absent = [f"the suite `{name}`" for name in value["missing suites"]]
    absent += [f"`{name}`" for name in value["missing methods"]]
    missing = f"; not measured, because instances or solvers were missing: {', '.join(absent)}" if absent else ""
    return (
        f"{both} optima were proved by more than one method, with {number or 'no'} contradiction{'s' * (number != 1)}; "
        f"times are from one run on one machine, so ignore differences of a tenth{missing}."
    )


def _counted(value: dict[str, Any]) -> list[str]:
    """Return Markdown lines on how the numbers came about."""
    lines = [
        "Every method runs in one thread, in its own process, which is compiled and warmed up before the clock starts. "
        "On each instance the methods take turns. Times of our methods are whole calls of `solve`; those of other "
        "solvers are their search only, without building the model. *Median s* includes the cases that ran into the "
        "time limit.",
        "",
        "f is recomputed from the vertices in float64. A proof counts only if the solver's bound agrees with that f.",
        "",
        "Other solvers get W times a number: integers as small as possible, or f about 1000, since their tolerances "
        "are absolute ([what they claim otherwise](scales.md)). CP-SAT gets integers; what rounding W to them can cost "
        "(half a unit for each of k² weights) is taken off its bound.",
        "",
    ]
    lines += free_limits(value["versions"])
    if value["captured"]:
        lines += [f"Real heads: {'; '.join(value['captured'])}.", ""]
    return [*lines, f"Versions: {', '.join(value['versions'])}."]


def free_limits(versions: Sequence[str]) -> list[str]:
    """Return Markdown lines on what the free editions take, of those that were measured."""
    measured = {version.partition(" ")[0] for version in versions}
    named = [f"{NAMES[name]} {limit}" for name, limit in FREE_LIMITS.items() if PEERS[name][1] in measured]
    return [f"Free editions take no more than so much: {'; '.join(named)}.", ""] if named else []


def _beside_gurobi(evidence: Evidence, suite: str) -> list[Line]:
    """Return ours and Gurobi on the cases of a suite that both were given: one line, or none."""
    theirs = {(row["case"], row["k"]): row for row in evidence.of_method(suite, "gurobi") if row["status"] != "refused"}
    ours = {(row["case"], row["k"]): row for row in evidence.of_method(suite, OURS)}
    shared = [case for case in theirs if case in ours]
    if not shared:
        return []
    line: Line = {"suite": suite, "cases": len(shared)}
    for method, rows in ((OURS, ours), ("gurobi", theirs)):
        line[f"{NAMES[method]}: proved"] = len(proved(rows[case] for case in shared))
        line[f"{NAMES[method]}: median s"] = median(seconds(rows[case]) for case in shared)
    return [line]


def notes_of(evidence: Evidence) -> list[str]:
    def told(row: Row) -> str:
        return f"{row['method']}, {row['case']}, k = {row['k']}: {row.get('message') or row.get('note')}"

    return [told(row) for row in evidence.rows if row["status"] == "failed" or row.get("note")]


def _name(record: Record) -> str:
    """Return a record in words, with its file."""
    config = record.cell.config
    cell = f"{config['suite']}, {config['method']}, {config['instance']}, seed {config['seed']}"
    return f"{cell} ({record.cell.key}.json)"


def shown_table(rows: Sequence[Line]) -> list[str]:
    """Return a Markdown table, texts first."""
    heads = list(rows[0])
    words = next((at for at, head in enumerate(heads) if not isinstance(rows[0][head], str)), len(heads))
    return table(heads, [[_shown(row[head]) for head in heads] for row in rows], words=words)


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return short(value) if isinstance(value, float) else str(value).replace("|", "\\|")


def short(value: float) -> str:
    """Three digits, as a person writes them."""
    if 0 < abs(value) < TINY:
        return f"< {TINY}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
