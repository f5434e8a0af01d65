"""Other people's solvers beside ours on a few instances: ``python -m bench.peers``.

Ten heads of a real model and three k-cluster instances are proved by every exact solver of `bench.solvers.peers` that
is installed, and dispersion with 500 vertices shows what heuristics with a penalty do. It is the quick part of
``python -m bench.solvers all``, whose methods, checks and records it uses: some eleven minutes on a machine that does
nothing else. Writes docs/results/peers.{md,json,png}. Ctrl-C keeps what is measured; the same command goes on.

When: after a release of one of the solvers, or a change of `bench.solvers.peers`. Needs ``pip install ".[peers]"``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.provenance import require_clean
from bench.report import BLUE, GREY, ORANGE, Page, parser_of, read_results, write_results
from bench.solvers.evidence import Evidence, Row, median, seconds
from bench.solvers.fetch import fetch
from bench.solvers.peers import FREE_LIMITS
from bench.solvers.report import free_limits, notes_of, of_one_commit, short, shown_table
from bench.solvers.run import run
from bench.solvers.suites import EXACT
from bench.solvers.tables import MEANINGS, NAMES, OURS, Line, sampled, share_proved
from grace_opt.errors import GraceError
from grace_opt.sweep import Record
from grace_opt.sweep.cells import decode, encode

#: The two groups of instances, and how the name of a case begins.
GROUPS = {"heads": "heads.npz", "k-cluster": "k_cluster:"}
WORDS = {"heads": "heads", "k-cluster": "k-cluster instances"}
#: With less of a core than this, times say more about the machine than about solvers.
QUIET = 0.9


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what has no record yet, and write the page."""
    parser = parser_of("peers", __doc__)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the instances (default: data)")
    parser.add_argument("--runs", type=Path, default=Path("runs/peers"), help="folder of the records")
    parser.add_argument("--model", default="smollm2-135m", help="whose heads, as in `python -m bench.solvers fetch`")
    parser.add_argument("--size", choices=("smoke", "small", "full"), default="small", help="as in bench.solvers")
    args = parser.parse_args(arguments)
    if args.report_only:
        print(write_results(args.out, read_results(args.out), page, allow_dirty=args.allow_dirty, measured=False))
        return 0
    require_clean(args.allow_dirty)  # rather than after eleven minutes
    try:
        fetch(args.data, ["heads"], args.model, _say)
        run(args.data, args.runs, args.size, _say, names=("beside", "samplers"))
        records, source = of_one_commit(args.runs, args.allow_dirty)
    except GraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped: finished cells are kept; the same command continues from there", file=sys.stderr)
        return 130
    value: dict[str, Any] = encode({"provenance": source, **content(records)}, "report")
    print(write_results(args.out, value, page, allow_dirty=args.allow_dirty))
    return 0


def content(records: Sequence[Record]) -> dict[str, Any]:
    """Return everything that the page says, as numbers and text."""
    evidence = Evidence.of(records)
    both, contradictions = evidence.disagreements()
    rows = evidence.of_suite("beside")
    wall, spent = (sum(row[name] for row in rows if row.get("cpu") is not None) for name in ("wall", "cpu"))
    return {
        "versions": sorted({str(row["version"]) for row in evidence.rows if row.get("version")}),
        "captured": sorted({row["data"] for row in rows if row["data"]}),
        "sizes": {name: max((row["n"] for row in _group(rows, name)), default=0) for name in GROUPS},
        "limit": max(row["limit"] for row in rows),
        "exact": exact(rows),
        "samplers": sampled(evidence),
        "seconds": [
            {"solver": NAMES[method], "group": name, "seconds": seconds(row), "proved": row["status"] == "proved"}
            for method in (OURS, *EXACT)
            for name in GROUPS
            for row in _group(evidence.of_method("beside", method), name)
            if math.isfinite(seconds(row))
        ],
        "share of a core": spent / wall if wall else None,
        "missing": [NAMES[method] for method in EXACT if not any(row["method"] == method for row in rows)],
        "proved by more than one": both,
        "contradictions": contradictions,
        "failures and notes": notes_of(evidence),
    }


def exact(rows: Sequence[Row]) -> list[Line]:
    """Return a line for each exact solver: what it proved of both groups, how fast, and what it left open."""
    found = []
    for method in (OURS, *EXACT):
        own = [row for row in rows if row["method"] == method]
        line: Line = {"solver": NAMES[method]}
        for name in GROUPS:
            group = _group(own, name)
            line[f"{name}: proved"] = share_proved(group)
            line[f"{name}: median s"] = median(map(seconds, group))
            line[f"{name}: worst gap %"] = max(
                (100 * _gap(row) for row in group if row["status"] == "limit"), default=0
            )
        line["free edition takes"] = FREE_LIMITS.get(method, "any size")
        if own:
            found.append(line)
    return found


def page(value: dict[str, Any]) -> Page:
    """Return what docs/results/peers.md says of the numbers."""
    value = decode(value)
    number, share = len(value["contradictions"]), value["share of a core"]
    absent = f"; not installed: {', '.join(value['missing'])}" if value["missing"] else ""
    notes = value["failures and notes"]
    limit, sizes = short(value["limit"]), value["sizes"]
    meaning = (
        f"**Proved optima.** Heads of a real model (n = {sizes['heads']}) and random graphs (k-cluster, "
        f"n = {sizes['k-cluster']}) at k = n/2, in one thread, {limit} s each. Heads alone flatter every exact solver: "
        "their W is positive semidefinite, so that the program is convex, and that of k-cluster is not. *Worst gap*: "
        "between the best set and the bound when time ran out, in percent of f."
    )
    samplers: list[str] = []
    if value["samplers"]:
        samplers = ["**D-Wave's samplers.** " + MEANINGS["samplers"], "", *shown_table(value["samplers"])]
    times = f"each solver ran once, and the others got {short(100 * (share or 0))} % of a core"
    if share is not None and share < QUIET:
        times += ": the machine was busy, so measure again"
    return Page(
        title="Other solvers beside ours",
        picture="Seconds to a proved optimum, by solver, of real heads and of k-cluster instances",
        headline=_headline(value),
        draw=lambda figure: draw(figure, value),
        asked="How do other people's solvers do on heads of a real model, on k-cluster instances, and on dispersion?",
        found=_found(value),
        sure=f"{value['proved by more than one']} optima were proved by more than one method, with {number or 'no'} "
        f"contradiction{'s' * (number != 1)}; {times}{absent}.",
        tables=[
            *(meaning, "", *shown_table(value["exact"])),
            *samplers,
            *(f"- Contradiction: {line}" for line in value["contradictions"]),
        ],
        details=[
            *([(f"Failures and remarks ({len(notes)})", [f"- {line}" for line in notes])] if notes else []),
            ("How it is measured", _measured(value)),
        ],
    )


def draw(figure: Any, value: Mapping[str, Any]) -> None:
    """Draw a dot for each instance: its seconds, by solver; hollow where time ran out without a proof."""
    figure.set_size_inches(9, 4.2)
    ax = figure.subplots()
    solvers = list(dict.fromkeys(one["solver"] for one in value["seconds"]))
    for at, (name, colour) in enumerate(zip(GROUPS, (BLUE, ORANGE), strict=True)):
        for done in (True, False):
            dots = [one for one in value["seconds"] if one["group"] == name and one["proved"] == done]
            look = {"color": colour, "label": name} if done else {"facecolors": "none", "edgecolors": colour}
            height = [solvers.index(one["solver"]) + 0.3 * at - 0.15 for one in dots]
            ax.scatter([one["seconds"] for one in dots], height, s=24, marker="os"[at], **look)
    ax.set_xscale("log")
    ax.axvline(value["limit"], color=GREY, linewidth=0.8)
    ax.set_yticks(range(len(solvers)), solvers)
    ax.invert_yaxis()
    ax.set_xlabel("seconds, one thread (hollow: not proved when time ran out)")
    ax.legend(fontsize=8)


def _found(value: dict[str, Any]) -> str:
    """Return the second sentence: ours and the best of the others in both groups, then the samplers."""
    said = []
    ours = next(line for line in value["exact"] if line["solver"] == NAMES[OURS])
    for name in GROUPS:
        others = [line for line in value["exact"] if line is not ours and "/" in str(line[f"{name}: proved"])]
        text = f"of the {WORDS[name]}, ours proved {_in_words(ours, name)}"
        if others:
            best = min(
                others, key=lambda line: (-int(line[f"{name}: proved"].split("/")[0]), line[f"{name}: median s"])
            )
            text += f", and {best['solver']}, the best of the others, {_in_words(best, name)}"
        said.append(text)
    for line in value["samplers"]:
        penalised = line["instances"].startswith("dispersion") and line["method"].startswith("dwave")
        if penalised and math.isfinite(line["worst above %"]):
            said.append(f"on dispersion, `{line['method']}` stays {short(line['worst above %'])} % behind at worst")
    sentence = "; ".join(said)
    return sentence[0].upper() + sentence[1:] + "."


def _headline(value: dict[str, Any]) -> str:
    """What the picture says: what ours proves of both groups, and the most that another solver does."""
    ours, *others = value["exact"]
    most = {
        name: max((int(line[key].split("/")[0]) for line in others if "/" in str(line[key])), default=0)
        for name, key in ((name, f"{name}: proved") for name in GROUPS)
    }
    said = [
        f"{ours[f'{name}: proved'].replace('/', ' of ')} {WORDS[name]} (others at most {most[name]})" for name in GROUPS
    ]
    return f"Ours proves {' and '.join(said)}"


def _in_words(line: Line, name: str) -> str:
    return f"{line[f'{name}: proved'].replace('/', ' of ')} (median {short(line[f'{name}: median s'])} s)"


def _measured(value: dict[str, Any]) -> list[str]:
    """Return Markdown lines on how the numbers came about."""
    return [
        "As in [the comparison of solvers](solvers.md): one process and one thread for each solver, warmed up; f is "
        "recomputed from the vertices in float64, and a proof counts only if the solver's bound agrees with that f.",
        "",
        *free_limits(value["versions"]),
        *([f"Real heads: {'; '.join(value['captured'])}.", ""] if value["captured"] else []),
        f"Versions: {', '.join(value['versions'])}.",
    ]


def _group(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["case"].startswith(GROUPS[name])]


def _gap(row: Row) -> float:
    """Return (f - bound) / |f|; infinite without either."""
    if row.get("objective") is None or row.get("bound") is None:
        return math.inf
    return (float(row["objective"]) - float(row["bound"])) / max(abs(float(row["objective"])), 1e-300)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
