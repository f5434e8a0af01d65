"""The page of `bench.evictions`: what its numbers say, made from the JSON file alone.

When: `bench.evictions` writes its results, or ``--report-only`` makes the page again.
"""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure

from bench.intervals import with_ends
from bench.passage_runs import kl_by_share
from bench.report import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, SKY, Page, table
from grace_opt.sweep import mean_interval, paired_interval

OURS, FAST = "GraphEviction", "GraphEviction, fast"
H2O_LAST, H2O_ALL = "H2O, last 32 queries", "H2O, all queries"
_LOOKS = {OURS: (BLUE, "-"), FAST: (BLUE, "--"), "SnapKV": (ORANGE, "-"), "PyramidKV": (PINK, "-")}
_LOOKS |= {H2O_LAST: (GREEN, "-"), H2O_ALL: (SKY, "-"), "StreamingLLM": (GREY, "-")}

#: f below this share of the outputs is rounding.
NOTHING = 1e-9


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
            ("Greedy's choice and certified bounds", _bounds(value)),
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


def _bounds(value: dict[str, Any]) -> list[str]:
    rows, shares = [], sorted({one["share"] for one in value["bounds"]}, reverse=True)
    for share in shares:
        some = [one for one in value["bounds"] if one["share"] == share]
        total = {
            name: statistics.fmean(one[name] for one in some) for name in ("greedy", "blocks", "diagonal", "bound")
        }
        rows.append(
            [
                f"{share:.0%}",
                *(f"{total[name]:.4f}" for name in ("diagonal", "blocks", "greedy", "bound")),
                f"{1 - total['bound'] / total['greedy']:.1%}" if total["greedy"] > NOTHING else "–",
            ]
        )
    heads = len({one["layer"] for one in value["bounds"]})
    return [
        f"The first head of {heads} layers, a prompt of {value['short']} tokens, W formed. f is the change of the "
        "observed outputs to first order, as a share of their squares, mean over heads: of the smallest diagonal "
        "entries, of the greedy order in blocks, of the greedy order one by one (`mies`), and a lower bound that no "
        "choice can beat.",
        "",
        *table(["kept", "f, diagonal", "f, greedy in blocks", "f, greedy", "bound", "greedy's gap, at most"], rows),
    ]


def _draw(figure: Figure, kl: dict[str, dict[str, list[float]]], shares: list[str]) -> None:
    axes, places = figure.subplots(), [float(share) for share in shares]
    for name, rows in kl.items():
        colour, line = _LOOKS.get(name, (BLACK, "-"))
        means = [statistics.fmean(rows[share]) for share in shares]
        axes.plot(places, means, "o", color=colour, linestyle=line, label=name)
    kl_by_share(axes, places, "tokens kept")
