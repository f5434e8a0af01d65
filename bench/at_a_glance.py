"""The five numbers that matter most, and their plots, from other pages of results: ``python -m bench.at_a_glance``.

It measures nothing: it reads the JSON files of other pages, which must come from one clean commit. Writes
docs/results/at_a_glance.{json,md,png}, which docs/benchmarks.md shows.

When: after the pages that it reads, as the last of ``make results``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from bench.provenance import refuse
from bench.report import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RESULTS,
    Page,
    add_options,
    bars,
    read_results,
    table,
    write_results,
)
from bench.results import COMMANDS

SOURCES = ("solvers", "real_model", "efficiency", "test_deep")
NAMES = {
    "branch_and_bound": "grace_opt", "gurobi": "Gurobi", "scip": "SCIP", "cpsat": "CP-SAT", "highs": "HiGHS",
    "think": "THINK", "mies": "MIES", "local_search": "local search", "portfolio": "portfolio",
}  # fmt: skip


#: Suites of real heads, and methods that prove.
HEADS = ("heads", "real64")
PROVE = ("branch_and_bound", "gurobi", "scip", "cpsat", "highs")


def gather(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The five, from the JSON files by name."""
    solvers, model, step, deep = (values[name] for name in SOURCES)
    single = solvers.get("everything", solvers["proofs"])
    proofs = [
        {"method": row["method"], "median_s": row["median s"], "proved": row["proved"], "cases": row["cases"]}
        for row in single
        if row["suite"] in HEADS and row["method"] in PROVE
    ]
    quality = [
        {"method": row["method"], "optimal": row["optimal"], "worst_gap": _percent(row)}
        for row in solvers["heuristics"]
        if row["method"] in NAMES
    ]
    bytes_kl = [
        {"method": row["method"], "ratio": row["ratio"], "kl": row["kl"],
         "share": row["total_bytes"] / model["dense"]["total_bytes"]}
        for row in model["rows"]
    ]  # fmt: skip
    context = max(row["context"] for row in step["rows"])
    times = {
        (row["method"], row["context"]): row["median"]["tpot_s"]
        for row in step["rows"]
        if row["method"] in ("dense", "grace") and row["status"] == "measured"
    }
    steps = [
        {"context": of, "dense_s": times["dense", of], "grace_s": times["grace", of]}
        for of in sorted({key[1] for key in times})
    ]
    methods = deep["methods"]
    return {
        "proofs": proofs,
        "quality": quality,
        "model": model["model"],
        "kl": bytes_kl,
        "steps": steps,
        "longest": context,
        "on": step["words"].replace("*", ""),
        "deep": {
            "instances": deep["instances"],
            "breaches": deep["breaches"],
            "optimal": {name: m["optimal"] / m["instances"] for name, m in methods.items() if name in NAMES},
        },
    }


def rows(value: Mapping[str, Any]) -> list[list[str]]:
    """Question, number and page of each."""
    ours = next(row for row in value["proofs"] if row["method"] == "branch_and_bound")
    peers = [row for row in value["proofs"] if row["method"] != "branch_and_bound"]
    peer = min(peers, key=lambda row: row["median_s"], default=None)
    beside = f"; {NAMES[peer['method']]} {_seconds(peer['median_s'])}" if peer else ""
    best = {row["method"]: row for row in value["quality"]}
    last = max(row["ratio"] for row in value["kl"])
    kl = {row["method"]: row for row in value["kl"] if row["ratio"] == last}
    step = value["steps"][-1]
    deep = value["deep"]
    return [
        [
            "How fast is a proof on a real head?",
            f"**{_seconds(ours['median_s'])}** at the median, {ours['proved']} of {ours['cases']} proved{beside}",
            "[solvers](./../reference/solvers.md)",
        ],
        [
            "How good is an answer without a proof?",
            f"portfolio is optimal in **{_of(best['portfolio'])}** real cases, MIES in {_of(best['mies'])} (at worst "
            f"{best['mies']['worst_gap']:.0f} % above the optimum), THINK in {_of(best['think'])}",
            "[solvers](./../reference/solvers.md)",
        ],
        [
            "How much does a smaller cache change a real model?",
            f"with {kl['GRACE']['share']:.0%} of the bytes, KL **{kl['GRACE']['kl']:.3f}** nats from dense; THINK "
            f"{kl['THINK']['kl']:.3f}",
            "[a real model](./real_model.md), [answers kept](./answers.md)",
        ],
        [
            "How long does a token take?",
            f"**{step['grace_s'] / step['dense_s']:.2f} ×** the time with a dense cache, after {step['context']:,} "
            "tokens on a CPU",
            "[efficiency](./efficiency.md), [one layer](./decode_cpu.md)",
        ],
        [
            "Are the results correct?",
            f"**{deep['breaches']} wrong claims** on {deep['instances']:,} enumerated instances",
            "[tests in depth](./test_deep.md)",
        ],
    ]


def _found(value: Mapping[str, Any]) -> str:
    """Return the five numbers in one sentence."""
    ours = next(row for row in value["proofs"] if row["method"] == "branch_and_bound")
    best = next(row for row in value["quality"] if row["method"] == "portfolio")
    last = max((row for row in value["kl"] if row["method"] == "GRACE"), key=lambda row: row["ratio"])
    step, deep = value["steps"][-1], value["deep"]
    return (
        f"A proof takes {_seconds(ours['median_s'])}; without one, portfolio is optimal in {_of(best)} cases; a cache "
        f"of {last['share']:.0%} of the bytes changes next tokens by a KL of {last['kl']:.3f} nats; a token takes "
        f"{step['grace_s'] / step['dense_s']:.2f} × the time on a CPU; {deep['breaches'] or 'no'} "
        f"claim{'s are' * (deep['breaches'] != 1) or ' is'} wrong on {deep['instances']:,} enumerated instances."
    )


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    return Page(
        title="At a glance",
        picture="Five plots: time of a proof, quality without one, KL by bytes, time per token, share of optima found",
        draw=lambda figure: draw(figure, value),
        asked="How fast is a proof, how good is an answer without one, what does a smaller cache cost and save, and "
        "are the results correct?",
        found=_found(value),
        sure=f"Everything ran on two cores of one machine, with one small model, {value['model']}, or its shape with "
        "random weights; each number's page says how it was measured and what it does not show.",
        tables=table(["question", "number", "page"], rows(value), words=3),
    )


def draw(figure: Any, value: Mapping[str, Any]) -> None:
    """Five panels."""
    figure.set_size_inches(10, 5.6)
    first, second, third, fourth, fifth, rest = figure.subplots(2, 3).flat
    rest.set_axis_off()
    proofs = sorted(value["proofs"], key=lambda row: row["median_s"])
    times = [1000 * row["median_s"] for row in proofs]
    texts = [f"{_seconds(row['median_s'])}, {row['proved']} of {row['cases']}" for row in proofs]
    colours = [BLUE if row["method"] == "branch_and_bound" else GREY for row in proofs]
    bars(first, [NAMES[row["method"]] for row in proofs], times, texts, colours)
    first.set_xscale("log")
    first.set_xlim(min(times) / 3, 60 * max(times))
    first.set(title="A proof, real heads, n = 64", xlabel="ms, median; proved of cases")
    quality = value["quality"]
    shares = [100 * _optimal(row) for row in quality]
    texts = [f"{row['optimal']}, worst +{row['worst_gap']:.2g} %" for row in quality]
    bars(second, [NAMES[row["method"]] for row in quality], shares, texts, GREEN)
    second.set_xlim(0, 210)
    second.set_xticks([0, 50, 100])
    second.set(title="Without a proof, the same heads", xlabel="optimal, % of cases; worst gap")
    for method, colour, marker in (("THINK", ORANGE, "s"), ("GRACE", BLUE, "D")):
        of = [row for row in value["kl"] if row["method"] == method]
        third.plot([100, *(100 * row["share"] for row in of)], [0, *(row["kl"] for row in of)], color=colour,
                   marker=marker, label=method)  # fmt: skip
    third.set(title="A real model", xlabel="K+V, % of dense", ylabel="KL from dense, nats")
    third.legend(fontsize=8)
    x = range(len(value["steps"]))
    for shift, key, colour, label in ((-0.2, "dense_s", BLACK, "dense"), (0.2, "grace_s", BLUE, "GRACE, λ = 0.6")):
        drawn = fourth.bar([at + shift for at in x], [1000 * row[key] for row in value["steps"]], 0.38, color=colour,
                           label=label)  # fmt: skip
        fourth.bar_label(drawn, fmt="%.0f", fontsize=8)
    fourth.set_xticks(x, [f"{row['context']:,}" for row in value["steps"]])
    fourth.set(title="Time per token, on a CPU", xlabel="tokens of the prompt", ylabel="ms")
    fourth.set_ylim(top=1.3 * fourth.get_ylim()[1])
    fourth.legend(loc="upper left", fontsize=8)
    fourth.grid(visible=False, axis="x")
    shares = value["deep"]["optimal"]
    names = {**NAMES, "branch_and_bound": "branch and bound"}
    bars(fifth, [names[name] for name in shares], [100 * share for share in shares.values()],
         [f"{100 * share:.1f}" for share in shares.values()], GREEN)  # fmt: skip
    fifth.set_xlim(0, 125)
    fifth.set(title=f"{value['deep']['instances']:,} enumerated instances", xlabel="optimal, %")


def _percent(row: Mapping[str, Any]) -> float:
    """The worst gap, from "5.013%" or a number of percents."""
    return float(re.sub("[% ]", "", str(next(value for name, value in row.items() if name.startswith("worst")))))


def _optimal(row: Mapping[str, Any]) -> float:
    found, cases = row["optimal"].split("/")
    return int(found) / int(cases)


def _of(row: Mapping[str, Any]) -> str:
    return str(row["optimal"]).replace("/", " of ")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "at_a_glance")
    args = parser.parse_args()
    values = {name: read_results(RESULTS / name) for name in SOURCES}
    sources: dict[str, Mapping[str, Any]] = {}
    for name, value in values.items():
        found = value["provenance"]  # of several runs a list
        for place, one in enumerate(found if isinstance(found, list) else [found]):
            sources[f"{name}, run {place + 1}" if isinstance(found, list) else name] = one
    source = {**refuse(sources, args.allow_dirty), "command": COMMANDS["at_a_glance"]}
    written = write_results(args.out, {"provenance": source, **gather(values)}, page, allow_dirty=args.allow_dirty)
    print(written)


if __name__ == "__main__":
    main()
