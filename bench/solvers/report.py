"""docs/results/solvers.{md,json,png} from the records: a picture, three sentences, tables, and where it comes from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bench.provenance import caption
from bench.solvers.evidence import Evidence, Row, check_commits, commits, median, proved, read_all, seconds
from bench.solvers.figure import draw
from bench.solvers.peers import PEERS
from bench.solvers.suites import SUITES
from bench.solvers.tables import FOLDED, OURS, PROVING, TABLES, Line
from grace_opt._util.files import make_folder, write_file
from grace_opt.errors import FileError, OptionError
from grace_opt.sweep import Record
from grace_opt.sweep.cells import encode

DRAFT = "**Not to be committed**: made with --allow-dirty, of cells that are not all of one clean commit."


def write_report(runs: Path, results: Path, *, allow_dirty: bool = False) -> str:
    """Write the page, its numbers as JSON, and its picture; the page.

    Parameters
    ----------
    runs : Path
        The folder that `bench.solvers.run` filled.
    results : Path
        Where solvers.md, solvers.json and solvers.png go.
    allow_dirty : bool
        Whether cells of several commits, or of a tree with changes, will do; the page then says so.

    Raises
    ------
    OptionError
        If there are no records, or they are not of one clean commit.
    """
    records = read_all(runs)
    if not records:
        raise OptionError(f"no records in {runs}: python -m bench.solvers run --data DIR --out {runs}")
    if not allow_dirty:
        check_commits(records, runs)
    evidence = Evidence.of(records)
    both, contradictions = evidence.disagreements()
    tables = {name: function(evidence) for name, (_, function) in TABLES.items()}
    sources = _sources(records)
    content = {
        "provenance": sources,
        "commits": sorted(commits(records)),
        "versions": _versions(evidence),
        "captured": sorted({row["data"] for row in evidence.rows if row["data"]}),
        "sentences": sentences(evidence, tables, both, contradictions),
        **tables,
        "proved by more than one": both,
        "contradictions": contradictions,
        "failures and notes": _notes(evidence),
    }
    make_folder(results, FileError)
    draw(evidence, results / "solvers.png")
    write_file(results / "solvers.json", json.dumps(encode(content, "report"), indent=2, allow_nan=False) + "\n")
    text = page(content, allow_dirty)
    write_file(results / "solvers.md", text)
    return text


def page(content: dict[str, Any], draft: bool) -> str:
    """The page of a report's content."""
    lines = [DRAFT, ""] if draft else []
    lines += ["![Seconds to a proved optimum by solver, and how often heuristics are optimal](solvers.png)", ""]
    lines += [line for sentence in content["sentences"] for line in (sentence, "")]
    for name, (title, _) in TABLES.items():
        if content[name] and name not in FOLDED:
            lines += [f"**{title}**", "", *_table(content[name]), ""]
    for line in content["contradictions"]:
        lines.append(f"- {line}")
    for name in FOLDED:
        if content[name]:
            lines += ["", *_folded(TABLES[name][0], _table(content[name]))]
    if notes := content["failures and notes"]:
        lines += ["", *_folded(f"Failures and remarks ({len(notes)})", [f"- {line}" for line in notes])]
    if content["captured"]:
        lines += ["", f"Captured: {'; '.join(content['captured'])}."]
    lines += ["", f"Solvers: {', '.join(content['versions'])}.", "", caption(content["provenance"][-1])]
    return "\n".join([*lines, ""])


def sentences(evidence: Evidence, tables: dict[str, list[Line]], both: int, contradictions: list[str]) -> list[str]:
    """What was asked, what was found, how sure it is; and what is left out."""
    ours = [row for suite in PROVING for row in evidence.of_method(suite, OURS)]
    asked = (
        "**Asked**: how fast is the best set of k vertices proved to be best, how good are heuristics and certificates "
        "that take milliseconds, and what do other people's solvers do with the same instances?"
    )
    took = _short(median(map(seconds, ours)))
    found = [f"branch and bound proved {len(proved(ours))} of {len(ours)}, in {took} s in the median"]
    found += _beside_gurobi(evidence)
    if best := next((line for line in tables["heuristics"] if line["method"] == "portfolio"), None):
        found.append(f"`portfolio` is optimal on {best['optimal']} heads, {_short(best['ms per instance'])} ms each")
    if tight := next((line for line in tables["certificates"] if "level=tight" in line["bound"]), None):
        gap, ms = _short(tight["median gap %"]), _short(tight["ms per instance"])
        found.append(f'`certify="tight"` leaves a gap of {gap} % in the median, in {ms} ms each')
    sure = (
        "**How sure**: every method has one thread and a warm process of its own, and they take turns; f is recomputed "
        "from the vertices, and a proof that does not hold is taken back. "
        f"{both} cases were proved by more than one method, with {len(contradictions) or 'no'} contradictions. "
        "Times are of one run on one machine: differences of a tenth mean nothing."
    )
    absent = [f"the suite `{name}`" for name in SUITES if not any(row["suite"] == name for row in evidence.rows)]
    absent += [f"`{name}`" for name in PEERS if not any(row["method"] == name for row in evidence.rows)]
    left = [f"Left out, for want of the instances or the solver: {', '.join(absent)}."] if absent else []
    return [asked, f"**Found**: {'; '.join(found)}.", sure, *left]


def _beside_gurobi(evidence: Evidence) -> list[str]:
    """Ours and Gurobi on the cases that both were given."""
    told = []
    for suite in ("heads", "pairs"):
        theirs = {
            (row["case"], row["k"]): row for row in evidence.of_method(suite, "gurobi") if row["status"] != "refused"
        }
        ours = {(row["case"], row["k"]): row for row in evidence.of_method(suite, OURS)}
        shared = [(ours[case], theirs[case]) for case in theirs if case in ours]
        if shared:
            mine, other = (median(seconds(pair[at]) for pair in shared) for at in (0, 1))
            counts = [len(proved(pair[at] for pair in shared)) for at in (0, 1)]
            told.append(
                f"of {len(shared)} {suite} that Gurobi was given, ours proved {counts[0]} in {_short(mine)} s, "
                f"Gurobi {counts[1]} in {_short(other)} s"
            )
    return told


def _sources(records: list[Record]) -> list[dict[str, Any]]:
    """The provenances that differ, in the order of their dates."""
    found: list[dict[str, Any]] = []
    for record in records:
        if record.provenance not in found:
            found.append(record.provenance)
    return sorted(found, key=lambda source: str(source.get("date")))


def _versions(evidence: Evidence) -> list[str]:
    return sorted({str(row["version"]) for row in evidence.rows if row.get("version")})


def _notes(evidence: Evidence) -> list[str]:
    def told(row: Row) -> str:
        return f"{row['method']}, {row['case']}, k = {row['k']}: {row.get('message') or row.get('note')}"

    return [told(row) for row in evidence.rows if row["status"] == "failed" or row.get("note")]


def _folded(title: str, lines: list[str]) -> list[str]:
    return ["<details>", f"<summary>{title}</summary>", "", *lines, "", "</details>"]


def _table(rows: list[Line]) -> list[str]:
    """A Markdown table; numbers to the right."""
    heads = list(rows[0])
    numeric = [all(isinstance(row[head], int | float | None) for row in rows) for head in heads]
    lines = [f"| {' | '.join(heads)} |", "|" + "|".join("---:" if right else "---" for right in numeric) + "|"]
    return lines + [f"| {' | '.join(_shown(row[head]) for head in heads)} |" for row in rows]


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    return _short(value) if isinstance(value, float) else str(value).replace("|", "\\|")


def _short(value: float) -> str:
    """Three digits, as a person writes them."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
