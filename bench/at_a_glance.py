"""The five numbers that matter most, and their plots, from other pages of results: ``python -m bench.at_a_glance``.

It measures nothing: it reads the JSON files of other pages, which must come from one clean commit. Writes
docs/results/at_a_glance.{json,md,png}, which docs/benchmarks.md shows.

When: after the pages that it reads, as the last of ``make results``.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Mapping
from typing import Any

from bench.bits_page import REPORTED, mean
from bench.decode_bits import DENSE, ratio
from bench.decode_bits import OURS as STEPS
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

SOURCES = ("solvers", "bits", "decode_bits", "test_deep")
NAMES = {
    "branch_and_bound": "grace_opt", "gurobi": "Gurobi", "scip": "SCIP", "cpsat": "CP-SAT", "highs": "HiGHS",
    "think": "THINK", "mies": "MIES", "local_search": "local search", "portfolio": "portfolio",
}  # fmt: skip

#: The real model's caches, by their names on the page of bits, with colours and markers.
CACHES = {
    "bits-1": BLUE, "bits-1.5": BLUE, "bits-2": BLUE, "bits-2.25": BLUE, "bits-3": BLUE,
    "int4": ORANGE, "ratio-0.3": GREEN,
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
    kl = [
        {"cache": name, "share": mean(model, name, REPORTED, "share"), "kl": mean(model, name, REPORTED, "kl")}
        for name in CACHES
    ]
    steps = [
        {"tokens": cell["tokens"], **{name: statistics.median(cell["ms"][name]) for name in (DENSE, STEPS)},
         "ratio": ratio(cell["ms"], STEPS, DENSE)}
        for cell in step["steps"]
    ]  # fmt: skip
    methods = deep["methods"]
    return {
        "proofs": proofs,
        "quality": quality,
        "model": model["model"],
        "kl": kl,
        "steps": steps,
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
    kl = {row["cache"]: row for row in value["kl"]}
    few, int4, pruned = kl["bits-2.25"], kl["int4"], kl["ratio-0.3"]
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
            f"with {few['share']:.0%} of the bytes of 16 bits (`bits=2.25`), next tokens differ by a KL of "
            f"**{few['kl']:.4f}** nats from dense; int4 by {int4['kl']:.4f} with {int4['share']:.0%}; channels pruned "
            f"as in the paper, `ratio=0.3`, by {pruned['kl']:.4f} with {pruned['share']:.0%}",
            "[a budget of bits](./bits.md), [the arena](./arena.md), [GRACE beside THINK](./real_model.md)",
        ],
        [
            "How long does a token take?",
            f"with `bits=2.25`, **{step['ratio']:.2f} ×** the time with a dense cache, after {step['tokens']:,} tokens "
            "on a CPU",
            "[steps on 2.25 bits](./decode_bits.md), [pruned channels](./efficiency.md)",
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
    few = next(row for row in value["kl"] if row["cache"] == "bits-2.25")
    step, deep = value["steps"][-1], value["deep"]
    return (
        f"A proof takes {_seconds(ours['median_s'])}; without one, portfolio is optimal in {_of(best)} cases; a cache "
        f"of {few['share']:.0%} of the bytes changes next tokens by a KL of {few['kl']:.4f} nats; a token then takes "
        f"{step['ratio']:.2f} × the time on a CPU; {deep['breaches'] or 'no'} "
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
        sure=f"Everything ran on two cores of one machine, with one small model, {value['model']}; "
        "each number's page says how it was measured and what it does not show.",
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
    kl = value["kl"]
    budget = [row for row in kl if CACHES[row["cache"]] == BLUE]
    third.plot([100 * row["share"] for row in budget], [row["kl"] for row in budget], color=BLUE, zorder=1)
    for row in kl:
        third.scatter(100 * row["share"], row["kl"], color=CACHES[row["cache"]], zorder=2)
        name = row["cache"].replace("-", "=")
        if name in ("bits=1", "bits=2.25", "int4", "ratio=0.3"):
            at_left = name == "ratio=0.3"
            third.annotate(name, (100 * row["share"], row["kl"]), xytext=(-6 if at_left else 6, 4), fontsize=8,
                           textcoords="offset points", ha="right" if at_left else "left")  # fmt: skip
    third.set_yscale("log")
    third.margins(y=0.12)
    third.set_xlim(0, 100)
    third.set(title="A smaller cache of a real model", xlabel="K and V, % of 16 bits", ylabel="KL from dense, nats")
    x = range(len(value["steps"]))
    for shift, key, colour, label in ((-0.2, DENSE, BLACK, "dense"), (0.2, STEPS, BLUE, STEPS)):
        drawn = fourth.bar([at + shift for at in x], [row[key] for row in value["steps"]], 0.38, color=colour,
                           label=label)  # fmt: skip
        fourth.bar_label(drawn, fmt="%.0f", fontsize=8)
    fourth.set_xticks(x, [f"{row['tokens']:,}" for row in value["steps"]])
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
