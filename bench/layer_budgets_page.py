"""The page of `bench.layer_budgets`: what its numbers say, made from the JSON file alone.

When: `bench.layer_budgets` writes its results, or ``--report-only`` makes the page again.
"""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure

from bench.evictions_page import FAST, H2O_ALL, OURS
from bench.intervals import with_ends
from bench.passage_runs import kl_by_share
from bench.report import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, Page, table
from grace_opt.sweep import mean_interval, paired_interval

_LOOKS = {OURS: BLUE, FAST: SKY, "SnapKV": ORANGE, H2O_ALL: GREEN}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    cases = value["passages"]
    names, shares = list(cases[0]["kl"]), list(cases[0]["kl"][OURS])
    equal, layers, heads = (
        {name: {share: [one["kl"][name][share][which] for one in cases] for share in shares} for name in names}
        for which in range(3)
    )
    rows, ratios = [], {}
    for name in names:
        for share in shares:
            before, some, after = (kind[name][share] for kind in (equal, layers, heads))
            ratio = ratios[name, share] = paired_interval(after, before, compare="ratio")
            wins = sum(a < b for a, b in zip(after, before, strict=True))
            means = (with_ends(mean_interval(kl)) for kl in (before, some, after))
            beside = with_ends(paired_interval(after, some, compare="ratio"), ".2f")
            rows.append([name, f"{float(share):.0%}", *means, with_ends(ratio, ".2f"), beside, f"{wins} of {ratio.n}"])
    times = {name: " / ".join(f"{ratios[name, share].estimate:.2f}" for share in shares) for name in names}
    kept = " / ".join(f"{float(share):.0%}" for share in shares)
    place = value["shares"].index(0.25)
    quarter = [sum(head[place] for head in row) for row in value["losses"]]
    step = {name: statistics.median(times) for name, times in value["steps"].items()}
    others = ", ".join(f"{name} {times[name]}" for name in names[1:])
    return Page(
        title="Which layers and heads keep more tokens",
        picture="Left: KL divergence by share of tokens kept, with equal and with divided budgets; right: the share "
        "that each layer keeps, with a dot for each of its heads",
        draw=lambda figure: _draw(figure, value, equal, heads, shares),
        asked=f"What does it help, on {value['model']}, to let some layers and heads keep more of a prompt's tokens "
        "than others?",
        found=f"With {kept} of {value['prompt']:,} tokens kept in the mean, `{OURS}` with `LayerBudgets` has "
        f"{times[OURS]} times the KL divergence that it has with equal budgets, in the same bytes; {others}. If one "
        f"layer alone keeps a quarter, the output loses {max(quarter) / min(quarter):,.0f} times as much with the "
        "worst layer as with the best.",
        sure=f"This is one small model and {len(cases)} passages of books, code and generated text, each with "
        f"{value['tokens']} of its own next tokens; intervals are 95 %, over passages. Budgets come from the "
        "texts that ship with grace_opt, none of which is measured.",
        tables=table(
            ["eviction", "kept", "KL, equal", "layers", "layers and heads", "/ equal", "/ layers", "lower than equal"],
            rows,
            words=2,
        ),
        details=[
            (
                "How it is measured",
                [
                    f"`calibrate_eviction(model, tokenizer)` took {value['calibration_seconds']:.0f} s: each KV head "
                    "in turn keeps each of five shares while the others keep all. One calibration, with "
                    "`GraphEviction`, serves all evictions. *layers*: heads of a layer keep equally many, by the "
                    "sum of their losses. The last 32 tokens stay in any case. The evictions:",
                    "",
                    *(f"- `{setting}`" for setting in value["evictions"][:: len(shares)]),
                    "",
                    "A decoding step with `SnapKV` and a quarter of the tokens, median of "
                    f"{len(value['steps']['equal'])}, the caches taking turns: "
                    + ", ".join(f"{name} {ms:.1f} ms" for name, ms in step.items())
                    + ".",
                ],
            ),
        ],
    )


def _draw(figure: Figure, value: dict[str, Any], equal: Any, heads: Any, shares: list[str]) -> None:
    axes, bars = figure.subplots(1, 2)
    places = [float(share) for share in shares]
    for name in equal:
        colour = _LOOKS.get(name, BLACK)
        for rows, line in ((equal, "--"), (heads, "-")):
            means = [statistics.fmean(rows[name][share]) for share in shares]
            axes.plot(places, means, "o", color=colour, linestyle=line, label=name if line == "-" else None)
    axes.plot([], [], color=GREY, linestyle="--", label="equal budgets")
    kl_by_share(axes, places, "tokens kept, mean over heads")
    for share, colour in zip(shares, (SKY, BLUE, ORANGE), strict=False):
        kept = [[count / value["prompt"] for count in row] for row in value["divided"][share]]
        label = f"{float(share):.0%} in the mean"
        bars.step(range(len(kept)), [statistics.fmean(row) for row in kept], where="mid", color=colour, label=label)
        for head in zip(*kept, strict=True):
            bars.plot(range(len(kept)), head, ".", color=colour, markersize=4)
    bars.set_ylim(0, 1.02)
    bars.yaxis.set_major_formatter(lambda place, _: f"{place:.0%}")
    bars.set_xlabel("layer")
    bars.set_ylabel("tokens kept")
    bars.legend()
