"""The pages of `bench.evictions` and `bench.layer_budgets`, made from their JSON files alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bench.intervals import with_ends
from bench.report import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, Page, table
from grace_opt.sweep import Interval, mean_interval, paired_interval

OURS, FAST = "GraphEviction", "GraphEviction, fast"
H2O_LAST, H2O_ALL = "H2O, last 32 queries", "H2O, all queries"
_LOOKS = {OURS: (BLUE, "-"), FAST: (BLUE, "--"), "SnapKV": (ORANGE, "-"), "PyramidKV": (PINK, "-")}
_LOOKS |= {H2O_LAST: (GREEN, "-"), H2O_ALL: (SKY, "-"), "StreamingLLM": (GREY, "-")}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, Any] = value["models"]
    cases = {label: of["passages"] for label, of in models.items()}
    first = next(iter(cases.values()))
    names, shares = list(first[0]["kl"]), list(first[0]["kl"][OURS])
    kl = {label: _by_eviction(each) for label, each in cases.items()}
    ratios = {label: {ours: _beside_best(each, ours) for ours in (OURS, FAST)} for label, each in kl.items()}
    times = {label: _times(each[OURS].values()) for label, each in ratios.items()}
    worst = max(
        ratios, key=lambda label: statistics.geometric_mean(r.estimate for _, r in ratios[label][OURS].values())
    )
    others = "; ".join(f"{label}: {said}" for label, said in times.items() if label != worst)
    kept = " / ".join(f"{float(share):.0%}" for share in shares)
    cost = {label: _shares_of_prefill(of["seconds"]) for label, of in models.items()}
    spans = {name: _span([of[name] for of in cost.values()]) for name in (OURS, FAST)}
    rows, against = [], []
    for label, own in kl.items():
        for name in names:
            means = (with_ends(mean_interval(own[name][share])) for share in shares)
            rows.append([label, name, *means, f"{cost[label][name]:.1%}"])
        for ours, of in ratios[label].items():
            for share, (best, ratio) in of.items():
                wins = sum(a < b for a, b in zip(own[ours][share], own[best][share], strict=True))
                said = f"{wins} of {ratio.n}"
                against.append([label, ours, f"{float(share):.0%}", best, with_ends(ratio, ".2f"), said])
    return Page(
        title="Which tokens to keep",
        picture="KL divergence from the dense cache's next-token distributions by share of tokens kept, both on "
        "logarithmic scales, for every eviction, a panel per model",
        headline=f"GraphEviction has {times[worst]} times the KL of the best other, with {kept} of the tokens kept"
        + f" ({worst}, the worst of {len(models)} models)" * (len(models) > 1),
        draw=lambda figure: _draw(figure, kl, shares),
        asked="How close to the dense cache do the evictions stay, at equal numbers of tokens?",
        found=f"With {kept} of {value['prompt']:,} tokens kept, `{OURS}` has {times[worst]} times the KL divergence of "
        f"the best other eviction at that share on {worst}{f', where it does worst ({others})' if others else ''}. "
        f"Choosing takes it {spans[OURS]} of the time to read the prompt. The fast setting takes {spans[FAST]}, and "
        f"has {_times(ratios[worst][FAST].values())} times that KL on {worst}.",
        sure=f"Measured on {', '.join(models)}, {len(first)} passages of books, code and generated text each, with "
        f"{value['tokens']} of their own next tokens; intervals are 95 %, over passages.",
        tables=[
            *table(
                ["model", "eviction", *(f"KL, {float(s):.0%} kept" for s in shares), "time, share of prefill"], rows, 2
            ),
            "",
            *table(["model", "eviction", "kept", "best other", "KL, ratio to it", "passages where lower"], against, 4),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"All layers evict at once, on average the same share; the last 32 tokens stay in any case. The "
                    f"time is that of choosing a quarter of the tokens in all layers, beside reading a prompt of "
                    f"{value['prompt'] + value['tokens']:,} tokens. Passages come from "
                    "the second half of each source; settings were chosen on others, from the first half. "
                    "The settings:",
                    "",
                    *(f"- `{setting}`" for setting in value["evictions"][:: len(shares)]),
                ],
            ),
        ],
    )


def _by_eviction(cases: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return the KL of every passage, by eviction and share."""
    first = cases[0]["kl"]
    return {name: {share: [one["kl"][name][share] for one in cases] for share in first[name]} for name in first}


def _beside_best(kl: Mapping[str, Mapping[str, list[float]]], ours: str) -> dict[str, tuple[str, Interval]]:
    """Return, at each share, the best of the other evictions, and the ratio of our KL to its."""
    found = {}
    for share, own in kl[ours].items():
        best = min(set(kl) - {OURS, FAST}, key=lambda name: statistics.fmean(kl[name][share]))
        found[share] = best, paired_interval(own, kl[best][share], compare="ratio")
    return found


def _times(found: Iterable[tuple[str, Interval]]) -> str:
    return " / ".join(f"{ratio.estimate:.2f}" for _, ratio in found)


def _shares_of_prefill(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: each / seconds["prefill"] for name, each in seconds.items() if name != "prefill"}


def _span(numbers: Sequence[float]) -> str:
    low, high = (f"{each(numbers):.1%}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


def _draw(figure: Figure, kl: Mapping[str, Mapping[str, Mapping[str, list[float]]]], shares: list[str]) -> None:
    figure.set_size_inches(max(8, 4 * len(kl)), 4)
    every = figure.subplots(1, len(kl), sharey=True, squeeze=False)[0]
    places = [float(share) for share in shares]
    for axes, (label, own) in zip(every, kl.items(), strict=True):
        for name, rows in own.items():
            colour, line = _LOOKS.get(name, (BLACK, "-"))
            means = [statistics.fmean(rows[share]) for share in shares]
            axes.plot(places, means, "o", color=colour, linestyle=line, label=name)
        axes.set_title(label)
        kl_by_share(axes, places, "tokens kept", legend=axes is every[0])


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


def kl_by_share(axes: Axes, places: Sequence[float], label: str, *, legend: bool = True) -> None:
    """Make the axes of a picture of KL divergences by shares kept, both on logarithmic scales."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:.0%}" for place in places])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(label)
    if legend:
        axes.set_ylabel("KL, nats")
        axes.legend()
