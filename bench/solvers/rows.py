"""The goals, one function each: what we measured, what the peers did in the same run, what was to be reached.

`GOALS` lists them in the order of the table. A row whose cells are not all on record is neither met nor missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from bench.solvers.cells import kept_limit
from bench.solvers.evidence import Evidence, Record, excess, median, overran, per_instance, proved, seconds
from bench.solvers.peers import PEERS

OURS = "branch_and_bound"


@dataclass(frozen=True)
class Row:
    """One line of the table; `met` is None where not everything was measured."""

    what: str
    ours: str
    peers: str
    target: str
    met: bool | None


def proof(records: list[Record]) -> str:
    """How many were proved, and how long it took: the median, the longest and the sum, the unproved included."""
    if not records:
        return "not measured"
    if all(r["status"] == "refused" for r in records):
        return f"refused all {len(records)}"
    times = [t for t in map(seconds, records) if math.isfinite(t)]
    told = f"{len(proved(records))}/{len(records)} proved"
    return told + (f", median {median(times):.3g} s, max {max(times):.3g} s, total {sum(times):.3g} s" if times else "")


def others(evidence: Evidence, suite: str, *ours: str) -> str:
    """The same of every peer in the suite."""
    lines = [f"{m}: {proof(evidence.of_method(suite, m))}" for m in evidence.methods(suite) if m not in ours]
    return "; ".join(lines) or "–"


def real64(evidence: Evidence) -> Row:
    """Real cases, n = 64."""
    ours, theirs = (evidence.of_method("real64", m) for m in (OURS, "gurobi"))
    speed = median(map(seconds, theirs)) / median(map(seconds, ours))
    total = sum(map(seconds, ours))
    return Row(
        "180 real cases, n = 64, proved optimal",
        proof(ours) + ("" if math.isnan(speed) else f"; Gurobi's median is {speed:.1f} × ours"),
        others(evidence, "real64", OURS),
        "all proved, total ≤ 7 s, median ≥ 5 × faster than Gurobi's",
        len(proved(ours)) == len(ours) and total <= 7 and speed >= 5
        if evidence.complete("real64", OURS, "gurobi")
        else None,
    )


def synthetic128(evidence: Evidence) -> Row:
    """Synthetic, n = 128."""
    ours = evidence.of_method("synthetic128", OURS)
    met = len(proved(ours)) == len(ours) and median(map(seconds, ours)) <= 0.3
    return Row(
        "synthetic n = 128, 40 cases",
        proof(ours),
        others(evidence, "synthetic128", OURS),
        "all proved, median ≤ 0.3 s",
        met if evidence.complete("synthetic128", OURS) else None,
    )


def pairs128(evidence: Evidence) -> Row:
    """Hard real cases, n = 128."""
    ours, theirs = (evidence.of_method("pairs128", m) for m in (OURS, "gurobi"))
    took = {(r["cell"]["instance"], *r["cell"]["ks"]): seconds(r) for r in proved(ours)}
    both = {(r["cell"]["instance"], *r["cell"]["ks"]): seconds(r) for r in proved(theirs)}
    slower = sum(took[case] > both[case] for case in took.keys() & both.keys())
    return Row(
        "hard real n = 128, 40 cases",
        f"{proof(ours)}; slower than Gurobi in {slower} of {len(took.keys() & both.keys())} that both prove",
        others(evidence, "pairs128", OURS),
        "≥ 90 % proved in 60 s; never slower than Gurobi where both prove",
        len(proved(ours)) >= 0.9 * len(ours) and not slower if evidence.complete("pairs128", OURS, "gurobi") else None,
    )


def synthetic256(evidence: Evidence) -> Row:
    """Synthetic, n = 256."""
    ours = evidence.of_method("synthetic256", OURS)
    return Row(
        "synthetic n = 256, 8 cases",
        proof(ours),
        others(evidence, "synthetic256", OURS),
        "≥ 7/8 in 60 s",
        8 * len(proved(ours)) >= 7 * len(ours) if evidence.complete("synthetic256", OURS) else None,
    )


def kcluster(evidence: Evidence) -> Row:
    """k-cluster, proved."""
    ours = evidence.of_method("kcluster", OURS)
    by_size = {n: [r for r in ours if r["n"] == n] for n in sorted({r["n"] for r in ours})}
    small, middle, big = (by_size.get(n, []) for n in (40, 80, 100))
    met = (
        all(r["status"] == "proved" and seconds(r) <= 1 for r in small)
        and all(r["status"] == "proved" and seconds(r) <= 60 for r in middle)
        and 2 * sum(seconds(r) <= 600 for r in proved(big)) >= len(big)
    )
    return Row(
        "k-cluster, proved",
        "; ".join(f"n = {n}: {proof(records)}" for n, records in by_size.items()) or "not measured",
        others(evidence, "kcluster", OURS),
        "all n = 40 ≤ 1 s; all n = 80 ≤ 60 s; ≥ half of n = 100 ≤ 10 min",
        met if evidence.complete("kcluster", OURS) else None,
    )


def kcluster_find(evidence: Evidence) -> Row:
    """k-cluster, found."""
    told, all_found = [], True
    for method in ("tabu", "portfolio"):
        records = evidence.of_method("kcluster_find", method)
        found = [r for r in records if reached(evidence, r)]
        all_found &= len(found) == len(records)
        told.append(f"{method} {len(found)}/{len(records)}, longest call {longest(records)}")
    return Row(
        "k-cluster, optimum found, n ≤ 120",
        "; ".join(told),
        "–",
        "all, at a limit of 5 s each",
        all_found if evidence.complete("kcluster_find", "tabu", "portfolio") else None,
    )


def mdplib(evidence: Evidence) -> Row:
    """MDPLIB, gap to the best known value."""
    records = evidence.of_method("mdplib", "tabu")
    told = []
    for instance in sorted({r["cell"]["instance"] for r in records}):
        runs = [r for r in records if r["cell"]["instance"] == instance]
        hits = sum(reached(evidence, r) for r in runs)
        name = instance.rpartition("/")[2].partition("_n")[0]
        slowest = max(r["time"] for r in runs)
        gap = max(above(evidence, r) for r in runs)
        told.append(f"{name} {hits}/{len(runs)} seeds, worst gap {gap:.3%}, search at most {slowest:.2f} s")
    return Row(
        "MDPLIB, gap to best known in 10 s",
        "tabu: " + "; ".join(told) if told else "not measured",
        "–",
        "0 % from 10/10 seeds, on every one",
        all(reached(evidence, r) for r in records) if evidence.complete("mdplib", "tabu") else None,
    )


def heuristics(evidence: Evidence) -> Row:
    """Heuristics against the proved optimum."""
    records = evidence.of_method("heuristics", "portfolio")
    above_optimum = evidence.ratios(records)
    optimal, ms = sum(r == 0 for r in above_optimum), median(map(per_instance, records))
    instances = sum(len(r.get("answers", [])) for r in records)
    dwave = []
    for method in ("dwave_sa", "dwave_tabu"):
        samples = evidence.of_method("samplers", method)
        if worst := evidence.ratios(samples):
            told = "; ".join(f"{penalty:g}: {share:.0%}" for penalty, share, _ in by_penalty(evidence, samples))
            dwave.append(
                f"{method} on synthetic n = 128: best of three penalties worst +{max(worst):.1%}; wrong size {told}"
            )
    return Row(
        "heuristics against the proved optimum, 180 real cases, batched",
        f"portfolio optimal in {optimal}/{instances}, {ms:.2f} ms per instance" if instances else "not measured",
        "; ".join(dwave) or "–",
        "portfolio optimal in 180/180 at ≤ 5 ms per instance",
        optimal == instances > 0 and ms <= 5
        if evidence.complete("heuristics", "portfolio") and evidence.complete("real64", OURS)
        else None,
    )


def tight(evidence: Evidence) -> Row:
    """Certified gap without search."""
    method = "bound:certificate,level=tight"
    records = evidence.of_method("tight", method)
    gap, ms = median(evidence.gaps(records)), median(map(per_instance, records))
    return Row(
        'certified gap without search (`certify="tight"`), the same 180, batched',
        f"median {gap:.2%}, {ms:.2f} ms per instance" if records else "not measured",
        "see the ladder",
        "≤ 0.5 % median at ≤ 10 ms per instance",
        gap <= 0.005 and ms <= 10 if evidence.complete("tight", method) and evidence.complete("real64", OURS) else None,
    )


def large(evidence: Evidence) -> Row:
    """n = 5000."""
    told, met = [], True
    for method in ("portfolio", "tabu"):
        records = evidence.of_method("large", method)
        for instance in sorted({r["cell"]["instance"] for r in records}):
            runs = {r["cell"]["limit"]: r for r in records if r["cell"]["instance"] == instance}
            short, long = runs.get(10.0), runs.get(60.0)
            if not short or not long or short.get("objective") is None or long.get("objective") is None:
                met = False
                continue
            behind = (short["objective"] - long["objective"]) / abs(long["objective"])
            memory = max(short["memory"], long["memory"]) / 2**30
            met &= behind <= 0.005 and memory <= 2
            kind = instance.split(":")[1]
            told.append(f"{method}, {kind}: {behind:+.3%} at 10 s, peak {memory:.2f} GiB")
    return Row(
        "random n = 5000, k = 500",
        "; ".join(told) or "not measured",
        "–",
        "≤ 2 GB; within 0.5 % of the 60 s value in 10 s",
        met if evidence.complete("large", "tabu", "portfolio") else None,
    )


def limits(evidence: Evidence) -> Row:
    """Time limits, by the whole call; and by the method alone, which is what ``time_limit=`` promises."""
    limited = [r for r in evidence.records if r["cell"]["limit"] and r["cell"]["method"] not in PEERS]
    late = [r for r in limited if overran(r)]
    alone = sum(not r.get("ended") and kept_limit(r["cell"]["limit"], r.get("time") or math.nan) for r in limited)
    told = f"{len(limited) - len(late)} of {len(limited)} whole calls kept theirs"
    if late:
        # One that had to be ended has no time: nobody knows how much more it would have taken.
        worst = max((math.inf if r.get("ended") else seconds(r)) - r["cell"]["limit"] for r in late)
        told += f', the worst took {worst:.2f} s more; by `stats["time"]`, which leaves out the checks of the input '
        told += f"as the limit does, {alone} of {len(limited)}"
    return Row(
        "time limits of ours",
        told,
        "–",
        "all whole calls, within 10 % + 0.2 s",
        not late if limited else None,
    )


GOALS: tuple[Callable[[Evidence], Row], ...] = (
    real64,
    synthetic128,
    pairs128,
    synthetic256,
    kcluster,
    kcluster_find,
    mdplib,
    heuristics,
    tight,
    large,
    limits,
)


def reached(evidence: Evidence, record: Record) -> bool:
    """Whether a record's answer is as good as the published one."""
    known, f = evidence.known.get(record["cell"]["instance"]), record.get("objective")
    return known is not None and f is not None and f <= known["f"] + known["tolerance"]


def above(evidence: Evidence, record: Record) -> float:
    """How far a record's answer is above the published one, relatively; NaN where either lacks."""
    known, f = evidence.known.get(record["cell"]["instance"]), record.get("objective")
    if known is None or f is None:
        return math.nan
    return 0.0 if reached(evidence, record) else (f - known["f"]) / abs(known["f"])


def by_penalty(evidence: Evidence, records: list[Record]) -> list[tuple[float, float, float]]:
    """(penalty, share of samples of the wrong size, worst excess over the optimum) over the records.

    The excess is infinite where not one sample had the right size.
    """
    shares: dict[float, list[float]] = {}
    worst: dict[float, float] = {}
    for record in records:
        best = evidence.optimum.get((record["cell"]["instance"], record["cell"]["ks"][0]), math.nan)
        for one in record.get("penalties", []):
            at = one["penalty"]
            shares.setdefault(at, []).append(one["wrong size"])
            above_it = math.inf if one["best"] is None else excess(one["best"], best, record["tolerance"])
            worst[at] = max(worst.get(at, 0.0), above_it)
    return [(at, sum(found) / len(found), worst[at]) for at, found in sorted(shares.items())]


def longest(records: list[Record]) -> str:
    """The longest call."""
    times = [t for t in map(seconds, records) if math.isfinite(t)]
    return f"{max(times):.2f} s" if times else "–"
