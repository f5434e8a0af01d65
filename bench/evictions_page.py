"""The page of `bench.evictions`, made from its JSON file alone, and what other pages of KL by model have of it."""

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
    kl = {label: by_name(each) for label, each in cases.items()}
    ratios = {label: {ours: _beside_best(each, ours) for ours in (OURS, FAST)} for label, each in kl.items()}
    worst, times, others = worst_of({label: [each for _, each in of[OURS].values()] for label, of in ratios.items()})
    kept = " / ".join(f"{float(share):.0%}" for share in shares)
    counts = " or ".join(dict.fromkeys(str(len(each)) for each in cases.values()))
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
        headline=f"GraphEviction has {times} times the KL of the best other, with {kept} of the tokens kept"
        + f" ({worst}, the worst of {len(models)} models)" * (len(models) > 1),
        draw=lambda figure: draw_models(figure, kl, _LOOKS, "tokens kept"),
        asked="How close to the dense cache do the evictions stay, at equal numbers of tokens?",
        found=f"With {kept} of {value['prompt']:,} tokens kept, `{OURS}` has {times} times the KL divergence of "
        f"the best other eviction at that share on {worst}{f', where it does worst ({others})' if others else ''}. "
        f"Choosing takes it {spans[OURS]} of the time to read the prompt. The fast setting takes {spans[FAST]}, and "
        f"has {_times(each for _, each in ratios[worst][FAST].values())} times that KL on {worst}.",
        sure=f"Measured on {', '.join(models)}, {counts} passages of books, code and generated text each, with "
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


def by_name(cases: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Return the ``kl`` of every passage, by eviction (or what else chooses) and share."""
    first = cases[0]["kl"]
    return {name: {share: [one["kl"][name][share] for one in cases] for share in first[name]} for name in first}


def worst_of(ratios: Mapping[str, Sequence[Interval]]) -> tuple[str, str, str]:
    """Return the model with the largest ratios, in words these ratios, and those of the other models."""
    worst = max(ratios, key=lambda label: statistics.geometric_mean(each.estimate for each in ratios[label]))
    others = "; ".join(f"{label}: {_times(each)}" for label, each in ratios.items() if label != worst)
    return worst, _times(ratios[worst]), others


def _beside_best(kl: Mapping[str, Mapping[str, list[float]]], ours: str) -> dict[str, tuple[str, Interval]]:
    """Return, at each share, the best of the other evictions, and the ratio of our KL to its."""
    found = {}
    for share, own in kl[ours].items():
        best = min(set(kl) - {OURS, FAST}, key=lambda name: statistics.fmean(kl[name][share]))
        found[share] = best, paired_interval(own, kl[best][share], compare="ratio")
    return found


def _times(found: Iterable[Interval]) -> str:
    return " / ".join(f"{ratio.estimate:.2f}" for ratio in found)


def _shares_of_prefill(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: each / seconds["prefill"] for name, each in seconds.items() if name != "prefill"}


def _span(numbers: Sequence[float]) -> str:
    low, high = (f"{each(numbers):.1%}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


def draw_models(
    figure: Figure,
    kl: Mapping[str, Mapping[str, Mapping[str, list[float]]]],
    looks: Mapping[str, tuple[str, str]],
    label: str,
) -> None:
    """Draw mean KL divergences by model, in panels, by name and by share; `label` says what share it is."""
    figure.set_size_inches(max(8, 4 * len(kl)), 4)
    every = figure.subplots(1, len(kl), sharey=True, squeeze=False)[0]
    for axes, (model, own) in zip(every, kl.items(), strict=True):
        for name, rows in own.items():
            colour, line = looks.get(name, (BLACK, "-"))
            means, places = [*map(statistics.fmean, rows.values())], [*map(float, rows)]
            axes.plot(places, means, "o", color=colour, linestyle=line, label=name.replace("`", ""))
        axes.set_title(model)
        kl_by_share(axes, places, label, legend=axes is every[0])


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
