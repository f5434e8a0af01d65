"""The page of `bench.layer_budgets`, made from its JSON file alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from operator import lt
from typing import Any

from matplotlib.figure import Figure

from bench.evictions_page import FAST, H2O_ALL, OURS, by_name, kl_by_share, worst_of
from bench.intervals import with_ends
from bench.report import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, Page, table
from grace_opt.sweep import mean_interval, paired_interval

_LOOKS = {OURS: BLUE, FAST: SKY, "SnapKV": ORANGE, H2O_ALL: GREEN}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, Any] = value["models"]
    kl = {label: _by_budgets(of["passages"]) for label, of in models.items()}
    names, shares = list(next(iter(kl.values()))), list(next(iter(kl.values()))[OURS])
    ratios = {
        name: {
            label: [paired_interval(heads, equal, compare="ratio") for equal, _, heads in own[name].values()]
            for label, own in kl.items()
        }
        for name in names
    }
    rows = [
        [name, f"{float(share):.0%}", *(with_ends(of[place], ".2f") for of in ratios[name].values())]
        for name in names
        for place, share in enumerate(shares)
    ]
    means = []
    for label, own in kl.items():
        for name in names:
            for share, (equal, layers, heads) in own[name].items():
                beside = paired_interval(heads, layers, compare="ratio")
                numbers = (with_ends(mean_interval(each)) for each in (equal, layers, heads))
                lower = f"{sum(map(lt, heads, equal))} of {beside.n}"
                means.append([label, name, f"{float(share):.0%}", *numbers, with_ends(beside, ".2f"), lower])
    costs, losses = [], []
    for label, of in models.items():
        place = of["shares"].index(0.25)
        quarter = [sum(head[place] for head in row) for row in of["losses"]]
        losses.append(max(quarter) / min(filter(None, quarter), default=1))
        steps = (f"{statistics.median(each):.1f}" for each in of["steps"].values())
        size = f"{len(quarter)} × {len(of['losses'][0])}"
        costs.append([label, size, f"{losses[-1]:,.0f}", f"{of['calibration_seconds']:.0f}", *steps])
    estimates = [each.estimate for of in ratios.values() for several in of.values() for each in several]
    worst, times, others = worst_of(ratios[OURS])
    kept, several = " / ".join(f"{float(share):.0%}" for share in shares), len(models) > 1
    counts = sorted({str(len(of["passages"])) for of in models.values()})
    columns = ["model", "eviction", "kept", "equal", "layers", "layers and heads", "/ layers", "lower than equal"]
    timed = {f"{name}, ms": len(each) for name, each in of["steps"].items()}
    return Page(
        title="Which layers and heads keep more tokens",
        picture="A column for each model; above: KL divergence by share of tokens kept, with equal and with divided "
        "budgets; below: the share that each layer keeps, with a dot for each of its heads",
        headline=f"Divided budgets leave {times} times the KL of equal ones, in the same bytes (GraphEviction"
        + f" on {worst}, the worst of {len(models)} models" * several
        + f", {kept} kept)",
        draw=lambda figure: _draw(figure, value, kl),
        asked="What does it help to let some layers and heads keep more of a prompt's tokens than others?",
        found=f"With {kept} of {value['prompt']:,} tokens kept in the mean, `{OURS}` with `LayerBudgets` has {times} "
        "times the KL divergence that it has with equal budgets, in the same bytes, on "
        f"{worst}{f', where it gains least ({others})' if others else ''}. Over all evictions"
        f"{', shares and models,' if several else ' and shares'} it is {min(estimates):.2f} to {max(estimates):.2f} "
        f"times. If one layer alone keeps a quarter, the output loses {_span(losses)} times as much with the worst "
        "layer as with the best.",
        sure=f"Measured on {len(models)} small model{'s' * several} and {' or '.join(counts)} passages of books, code "
        f"and generated text{' each' * several}, with {value['tokens']} of their own next tokens; intervals are 95 %, "
        "over passages. Budgets come from the texts that ship with grace_opt, none of which is measured.",
        tables=[
            "KL with budgets divided among layers and heads, as a multiple of that with equal ones:",
            "",
            *table(["eviction", "kept", *models], rows, 2),
        ],
        details=[
            (
                "KL in nats",
                table(columns, means, 3),
            ),
            (
                "Calibration and steps",
                [
                    "Only layers with full attention evict. *Worst / best*: what the output loses if one layer alone "
                    "keeps a quarter. Then seconds of the calibration, and milliseconds of a decoding step with "
                    f"`SnapKV` and a quarter of the tokens, medians of {min(timed.values())}, the caches taking turns.",
                    "",
                    *table(["model", "layers × KV heads", "worst / best", "calibration, s", *timed], costs),
                ],
            ),
            (
                "How it is measured",
                [
                    "`calibrate.budgets(model, tokenizer)`: each KV head in turn keeps each of five shares while the "
                    "others keep all. One calibration, with `GraphEviction`, serves all evictions. *layers*: heads of "
                    "a layer keep equally many, by the sum of their losses. The last 32 tokens stay in any case. The "
                    "evictions:",
                    "",
                    *(f"- `{setting}`" for setting in value["evictions"][:: len(shares)]),
                ],
            ),
        ],
    )


def _by_budgets(cases: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[tuple[float, ...]]]]:
    """Return the KL of every passage with equal budgets, layers' and heads', by eviction and share."""
    found = by_name(cases)
    return {name: {share: [*zip(*each, strict=True)] for share, each in of.items()} for name, of in found.items()}


def _span(numbers: Sequence[float]) -> str:
    low, high = (f"{each(numbers):,.0f}" for each in (min, max))
    return low if low == high else f"{low} to {high}"


def _draw(figure: Figure, value: dict[str, Any], kl: Mapping[str, Mapping[str, Any]]) -> None:
    figure.set_size_inches(max(8, 4 * len(kl)), 7)
    every = figure.subplots(2, len(kl), sharey="row", squeeze=False)
    for axes, bars, (label, own) in zip(*every, kl.items(), strict=True):
        of, first = value["models"][label], axes is every[0, 0]
        for name, by_share in own.items():
            places, colour = [*map(float, by_share)], _LOOKS.get(name, BLACK)
            for which, line in ((0, "--"), (2, "-")):
                means = [statistics.fmean(each[which]) for each in by_share.values()]
                axes.plot(places, means, "o", color=colour, linestyle=line, label=name if which else None)
        axes.plot([], [], color=GREY, linestyle="--", label="equal budgets")
        axes.set_title(label)
        kl_by_share(axes, places, "tokens kept, mean over heads", legend=first)
        for share, colour in zip(by_share, (SKY, BLUE, ORANGE), strict=False):
            kept = [[count / value["prompt"] for count in row] for row in of["divided"][share]]
            for layer, row in zip(of["layers"], kept, strict=True):
                bars.hlines(statistics.fmean(row), layer - 0.5, layer + 0.5, color=colour)
                bars.plot([layer] * len(row), row, ".", color=colour, markersize=4)
            bars.plot([], [], color=colour, label=f"{float(share):.0%} in the mean")
        bars.set_xlim(-1, of["layers"][-1] + 1)
        bars.locator_params(axis="x", integer=True)
        bars.set_xlabel("layer")
    bars = every[1, 0]
    bars.set_ylim(0, 1.4)  # room for the legend
    bars.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    bars.yaxis.set_major_formatter(lambda place, _: f"{place:.0%}")
    bars.set_ylabel("tokens kept")
    bars.legend()
