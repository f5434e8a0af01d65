"""The tables of the solver report, one function each: a list of rows, one for each setting, one column for each metric.

When: `bench.solvers.report`. `MEANINGS` has the line that stands above each table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bench.solvers.evidence import Evidence, Key, Row, excess, key, median, overran, per_instance, proved, seconds
from bench.solvers.peers import PEERS, PENALTIES
from bench.solvers.suites import EXACT, HEURISTICS, SEARCHES

OURS = "branch_and_bound"
PROVING = ("heads", "pairs", "synthetic", "clusters", "kcluster")
TITLES = {
    "heads": "heads of a real model",
    "pairs": "pairs of heads",
    "synthetic": "synthetic attention",
    "clusters": "k-cluster, by seed",
    "kcluster": "k-cluster, Lambert's",
}
NAMES = {
    OURS: "ours",
    "gurobi": "Gurobi",
    "cplex": "CPLEX",
    "copt": "COPT",
    "xpress": "Xpress",
    "scip": "SCIP",
    "cpsat": "CP-SAT",
    "highs": "HiGHS",
}
#: Stands where all cases are larger than a free edition takes.
OVER_LIMIT = "over the free licence's limit"
Line = dict[str, Any]


def proofs(evidence: Evidence) -> list[Line]:
    """Return the proved optima: a line for each suite and n, with number and median time of each solver."""
    found = []
    for suite in PROVING:
        for n in sorted({row["n"] for row in evidence.of_method(suite, OURS)}):
            line: Line = {"instances": TITLES[suite], "n": n}
            for method in (OURS, *EXACT):
                rows = [row for row in evidence.of_method(suite, method) if row["n"] == n]
                line[f"{NAMES[method]}: proved"] = share_proved(rows)
                line[f"{NAMES[method]}: median s"] = _took(rows)
            found.append(line)
    return _without_empty(found)


def batches(evidence: Evidence) -> list[Line]:
    """Return how good and fast each heuristic is on all heads in one call, compared with the proved optima."""
    found = []
    for method in evidence.methods("heuristics", HEURISTICS):
        rows = evidence.of_method("heuristics", method)
        if above := evidence.excesses(rows):
            found.append(
                {
                    "method": method,
                    "optimal": f"{sum(one == 0 for one in above)}/{len(above)}",
                    "median above %": 100 * median(above),
                    "worst above %": 100 * max(above),
                    "ms per instance": median(map(per_instance, rows)),
                }
            )
    return found


def certificates(evidence: Evidence) -> list[Line]:
    """Return the gap to the proved optimum and the time of every bound, the loosest first."""
    found = []
    for method in evidence.methods("certificates", ()):
        rows = [row for row in evidence.of_method("certificates", method) if row["status"] != "failed"]
        if gaps := evidence.gaps(rows):
            found.append(
                {
                    "bound": method.removeprefix("bound:").replace(",", ", "),
                    "instances": len(gaps),
                    "median gap %": 100 * median(gaps),
                    "worst gap %": 100 * max(gaps),
                    "above the optimum": sum(gap < -1e-9 for gap in gaps),
                    "ms per instance": median(map(per_instance, rows)),
                }
            )
    return sorted(found, key=lambda line: -line["median gap %"])


def public(evidence: Evidence) -> list[Line]:
    """Return how often each method reaches the published values, and how far off it is at worst."""
    groups: dict[str, list[Row]] = {}
    for row in evidence.rows:
        if row["suite"] in ("kcluster", "mdplib") and row["method"] != OURS:
            name = row["case"].partition("/")[2].partition("_n")[0]
            groups.setdefault(name if row["suite"] == "mdplib" else f"k-cluster, n = {row['n']}", []).append(row)
    methods = [
        m for m in (*SEARCHES, "portfolio", *HEURISTICS) if any(r["method"] == m for g in groups.values() for r in g)
    ]
    found = []
    for name, rows in groups.items():
        line: Line = {"instance": name}
        for method in dict.fromkeys(methods):
            gaps = [evidence.above_known(row) for row in rows if row["method"] == method]
            line[f"{method}: reached"] = f"{sum(gap == 0 for gap in gaps)}/{len(gaps)}" if gaps else None
            line[f"{method}: worst above %"] = 100 * max(gaps) if gaps else None
            line[f"{method}: median s"] = _took([row for row in rows if row["method"] == method])
        found.append(line)
    return _without_empty(found)


def sampled(evidence: Evidence) -> list[Line]:
    """Return how good the samplers are, which may return sets of another size, and ours on the same cases."""
    found = []
    methods = evidence.methods("samplers", ())
    if not any(method in PEERS for method in methods):
        return []
    best = evidence.best("samplers")
    instances = dict.fromkeys((row["case"].partition(":")[0], row["n"]) for row in evidence.of_suite("samplers"))
    for (kind, n), method in ((instance, method) for instance in instances for method in methods):
        rows = [
            row
            for row in evidence.of_method("samplers", method)
            if (row["case"].partition(":")[0], row["n"]) == (kind, n)
        ]
        above = [above_best(best, row, row.get("objective")) for row in rows]
        line: Line = {"instances": f"{kind}, n = {n}", "method": method, "cases": len(rows)}
        line["best of all"] = f"{sum(one == 0 for one in above)}/{len(above)}"
        line["worst above %"] = 100 * max(above, default=math.nan)
        for penalty in PENALTIES:
            wrong = [row[name] for row in rows if row.get(name := f"wrong size at penalty {penalty:g}") is not None]
            line[f"wrong size at {penalty:g} %"] = 100 * sum(wrong) / len(wrong) if wrong else None
            name = f"best at penalty {penalty:g}"
            worst = [above_best(best, row, row[name]) for row in rows if row.get(name) is not None]
            line[f"worst above at {penalty:g} %"] = 100 * max(worst) if worst else None
        line["median s"] = median(map(seconds, rows))
        found.append(line)
    return _without_empty(found)


def large(evidence: Evidence) -> list[Line]:
    """Return how much worse a short time limit is than a long one on large instances, and the peak of memory."""
    found = []
    for method in evidence.methods("large", HEURISTICS):
        rows = evidence.of_method("large", method)
        for case in dict.fromkeys(row["case"] for row in rows):
            runs = sorted((row for row in rows if row["case"] == case), key=lambda row: float(row["limit"]))
            values = [math.nan if row.get("objective") is None else float(row["objective"]) for row in runs]
            found.append(
                {
                    "instance": f"{case.partition(':')[0]}, n = {runs[0]['n']}",
                    "method": method,
                    "short s": runs[0]["limit"],
                    "long s": runs[-1]["limit"],
                    "f after the long": values[-1],
                    "short is above by %": 100 * (values[0] - values[-1]) / abs(values[-1]),
                    "longest call beyond its limit s": max(seconds(row) - row["limit"] for row in runs),
                    "peak GiB": max((row["memory"] / 2**30 for row in runs if row.get("memory")), default=math.nan),
                }
            )
    return found


def limits(evidence: Evidence) -> list[Line]:
    """Return how many calls of ours exceed their time limit, by the whole call and by the method's own clock."""
    found = []
    limited = [row for row in evidence.rows if row["limit"] is not None and row["method"] not in PEERS]
    for method in dict.fromkeys(row["method"] for row in limited):
        rows = [row for row in limited if row["method"] == method]
        late = [row for row in rows if overran(row)]
        own = [
            row for row in rows if row.get("ended") or excess(row.get("time") or 0.0, 1.1 * row["limit"] + 0.2, 0.0) > 0
        ]
        # One that had to be ended has no time: nobody knows how much more it would have taken.
        beyond = [math.inf if row.get("ended") else seconds(row) - row["limit"] for row in late]
        found.append(
            {
                "method": method,
                "calls with a limit": len(rows),
                "late": len(late),
                "late by its own clock": len(own),
                "most s beyond": max(beyond, default=0.0),
            }
        )
    return found


def everything(evidence: Evidence) -> list[Line]:
    """Return a line for each suite, n and method: cases, proofs, times, nodes."""
    found = []
    for suite, n, method in dict.fromkeys((row["suite"], row["n"], row["method"]) for row in evidence.rows):
        rows = [row for row in evidence.of_method(suite, method) if row["n"] == n]
        if all(row.get("together", 1) > 1 for row in rows):
            continue
        times = [took for took in map(seconds, rows) if math.isfinite(took)]
        found.append(
            {
                "suite": suite,
                "n": n,
                "method": method,
                "cases": len(rows),
                "proved": len(proved(rows)),
                "refused or failed": sum(row["status"] in ("refused", "failed") for row in rows),
                "median s": median(times),
                "max s": max(times, default=math.nan),
                "total s": sum(times),
                "median nodes": median(float(row["nodes"]) for row in rows if row.get("nodes") is not None),
                "late": sum(map(overran, rows)),
            }
        )
    return found


#: Name in the JSON file -> (title, function), in the order of the page; those of `FOLDED` come last.
TABLES: dict[str, tuple[str, Callable[[Evidence], list[Line]]]] = {
    "proofs": ("Proved optima", proofs),
    "heuristics": ("Heuristics, all heads in one call", batches),
    "certificates": ("Lower bounds without search", certificates),
    "published": ("Public instances", public),
    "samplers": ("D-Wave's samplers", sampled),
    "large": ("Large random instances", large),
    "limits": ("Do our methods keep their time limits?", limits),
    "everything": ("Every suite and method, one instance at a time", everything),
}
FOLDED = ("limits", "everything")
#: What the columns of each table mean.
MEANINGS = {
    "proofs": "How many optima each solver proved, and its median time per instance. Heads alone flatter every exact "
    "solver: look at k-cluster beside them.",
    "heuristics": "*Optimal*: answers that equal the proved optimum. *Above %*: how much larger f is than the optimum.",
    "certificates": "*Gap*: how far the bound lies below the proved optimum, in percent of it; smaller is better. "
    "*Above the optimum*: number of wrong bounds; it must be 0.",
    "published": "*Reached*: runs that found the published value. *Worst above %*: the worst run, above that value.",
    "samplers": "The samplers minimise f plus a penalty on sets of another size, so an answer may have more or fewer "
    "than k vertices. *Wrong size*: how many percent of the samples do, by weight of the penalty. The answer is the "
    "best sample of the right size over all penalties; *best of all*: how often no method here found a better one. "
    "Annealing flips one vertex at a time, so between two sets of k vertices it has to climb the penalty, and the more "
    "exchanges an instance needs, the further it stays behind. Tabu search takes the best flip even if it leads "
    "upwards: at 20 ms a sample it is the one to beat. *Dispersion* has random distances, as MDPLIB's MDG-a.",
    "large": "Each method ran twice, with a short and a long time limit. *Short is above by %*: how much larger f is "
    "after the short one.",
    "limits": "*Late*: whole calls that ended more than 10 % + 0.2 s after their limit. *By its own clock*: the same "
    'by `stats["time"]`, which does not include the checks of the input.',
    "everything": "*Late*: as above. *Median nodes*: of the search tree.",
}


def _took(rows: list[Row]) -> float | None:
    """The median time; None where nothing was measured or all were refused."""
    took = median(map(seconds, rows))
    return None if math.isnan(took) else took


def share_proved(rows: list[Row]) -> str | None:
    """Return "3/4", the cases proved of those that the solver took; None without rows."""
    over = sum(row["status"] == "refused" for row in rows)
    if not rows or over == len(rows):
        return OVER_LIMIT if rows else None
    return f"{len(proved(rows))}/{len(rows) - over}" + (f", {over} {OVER_LIMIT}" if over else "")


def above_best(best: Mapping[Key, float], row: Row, f: float | None) -> float:
    """Return how far f is above the best of a row's case, relatively; infinite for no answer of the right size."""
    return math.inf if f is None or math.isinf(f) else excess(f, best[key(row)], row["tolerance"])


def _without_empty(lines: list[Line]) -> list[Line]:
    """The lines without columns that none of them fills, such as those of a peer that is not installed."""
    kept = [name for name in (lines[0] if lines else {}) if any(line[name] is not None for line in lines)]
    return [{name: line[name] for name in kept} for line in lines]
