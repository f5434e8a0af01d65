"""The pages of `bench.evictions` and `bench.layer_budgets`, made from their JSON files alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bench.intervals import with_ends
from bench.report import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, Page, table
from grace_opt.sweep import mean_interval, paired_interval

OURS, FAST = "GraphEviction", "GraphEviction, fast"
H2O_LAST, H2O_ALL = "H2O, last 32 queries", "H2O, all queries"
_LOOKS = {OURS: (BLUE, "-"), FAST: (BLUE, "--"), "SnapKV": (ORANGE, "-"), "PyramidKV": (PINK, "-")}
_LOOKS |= {H2O_LAST: (GREEN, "-"), H2O_ALL: (SKY, "-"), "StreamingLLM": (GREY, "-")}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    cases = value["passages"]
    names, shares = list(cases[0]["kl"]), list(cases[0]["kl"][OURS])
    kl = {name: {share: [one["kl"][name][share] for one in cases] for share in shares} for name in names}
    others = [name for name in names if name not in (OURS, FAST)]
    best = {share: min(others, key=lambda name: statistics.fmean(kl[name][share])) for share in shares}
    against = []
    for ours in (OURS, FAST):
        for share in shares:
            ratio = paired_interval(kl[ours][share], kl[best[share]][share], compare="ratio")
            wins = sum(a < b for a, b in zip(kl[ours][share], kl[best[share]][share], strict=True))
            against.append([ours, f"{float(share):.0%}", best[share], with_ends(ratio, ".2f"), f"{wins} of {ratio.n}"])
    ratios = {share: paired_interval(kl[OURS][share], kl[best[share]][share], compare="ratio") for share in shares}
    times = " / ".join(f"{ratios[share].estimate:.2f}" for share in shares)
    kept = " / ".join(f"{float(share):.0%}" for share in shares)
    fast = " / ".join(
        f"{paired_interval(kl[FAST][share], kl[best[share]][share], compare='ratio').estimate:.2f}" for share in shares
    )
    seconds = dict(value["seconds"])
    prefill = seconds.pop("prefill")
    cost = {name: f"{each / prefill:.1%}" for name, each in seconds.items()}
    return Page(
        title="Which tokens to keep",
        picture="KL divergence from the dense cache's next-token distributions by share of tokens kept, both on "
        "logarithmic scales, for every eviction",
        headline=f"GraphEviction has {times} times the KL of the best other, with {kept} of the tokens kept",
        draw=lambda figure: _draw(figure, kl, shares),
        asked=f"How close to the dense cache do the evictions stay on {value['model']}, at equal numbers of tokens?",
        found=f"With {kept} of {value['prompt']:,} tokens kept, `{OURS}` has {times} times the KL divergence of "
        f"the best other eviction at that share. Choosing takes it {cost[OURS]} of the time to read the prompt. The "
        f"fast setting takes {cost[FAST]}, and has {fast} times that KL.",
        sure=f"This is one small model and {len(cases)} passages of books, code and generated text, each with "
        f"{value['tokens']} of its own next tokens; intervals are 95 %, over passages.",
        tables=[
            *table(
                ["eviction", *(f"KL, {float(share):.0%} kept" for share in shares), "time, share of prefill"],
                [
                    [name, *(with_ends(mean_interval(kl[name][share])) for share in shares), cost[name]]
                    for name in names
                ],
            ),
            "",
            *table(["eviction", "kept", "best other", "KL, ratio to it", "passages where lower"], against, words=3),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"All layers evict at once, on average the same share; the last 32 tokens stay in any case. The "
                    f"time is that of choosing a quarter of the tokens in all layers, beside reading a prompt of "
                    f"{value['prompt'] + value['tokens']:,} tokens, which took {prefill:.2f} s. Passages come from "
                    "the second half of each source; settings were chosen on others, from the first half. "
                    "The settings:",
                    "",
                    *(f"- `{setting}`" for setting in value["evictions"][:: len(shares)]),
                ],
            ),
        ],
    )


def _draw(figure: Figure, kl: dict[str, dict[str, list[float]]], shares: list[str]) -> None:
    axes, places = figure.subplots(), [float(share) for share in shares]
    for name, rows in kl.items():
        colour, line = _LOOKS.get(name, (BLACK, "-"))
        means = [statistics.fmean(rows[share]) for share in shares]
        axes.plot(places, means, "o", color=colour, linestyle=line, label=name)
    kl_by_share(axes, places, "tokens kept")


_BUDGET_LOOKS = {OURS: BLUE, FAST: SKY, "SnapKV": ORANGE, H2O_ALL: GREEN}


def budgets_page(value: dict[str, Any]) -> Page:
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
        headline=f"Divided budgets leave {times[OURS]} times the KL of equal ones, in the same bytes (GraphEviction, "
        f"{kept} kept)",
        draw=lambda figure: _draw_budgets(figure, value, equal, heads, shares),
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
                    f"`calibrate.budgets(model, tokenizer)` took {value['calibration_seconds']:.0f} s: each KV head "
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


def _draw_budgets(figure: Figure, value: dict[str, Any], equal: Any, heads: Any, shares: list[str]) -> None:
    axes, bars = figure.subplots(1, 2)
    places = [float(share) for share in shares]
    for name in equal:
        colour = _BUDGET_LOOKS.get(name, BLACK)
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
    bars.set_ylim(0, 1.4)  # room for the legend
    bars.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    bars.yaxis.set_major_formatter(lambda place, _: f"{place:.0%}")
    bars.set_xlabel("layer")
    bars.set_ylabel("tokens kept")
    bars.legend()


def kl_by_share(axes: Axes, places: Sequence[float], label: str) -> None:
    """Make the axes of a picture of KL divergences by shares kept, both on logarithmic scales."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:.0%}" for place in places])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(label)
    axes.set_ylabel("KL, nats")
    axes.legend()
