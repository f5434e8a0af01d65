"""The page of `bench.learned`: what its numbers say, made from the JSON file alone.

When: `bench.learned` writes its results, or ``--report-only`` makes the page again.
"""

from __future__ import annotations

import statistics
from typing import Any

from matplotlib.figure import Figure

from bench.intervals import with_ends
from bench.report import BLUE, GREEN, GREY, ORANGE, Page, table
from grace_opt.sweep import Interval, mean_interval, paired_interval

LEARNED, CALIBRATED = "learned (`learn_masks`)", "calibrated, MIES"
CALIBRATED_GRACE, PROMPT = "calibrated, GRACE", "per prompt, GRACE"
_LOOKS = {LEARNED: (BLUE, "-"), CALIBRATED: (ORANGE, "-"), CALIBRATED_GRACE: (GREY, "-"), PROMPT: (GREEN, "--")}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    cases = value["passages"]
    ratios = list(cases[0]["kl"][LEARNED])
    kl = {name: {ratio: [one["kl"][name][ratio] for one in cases] for ratio in ratios} for name in _LOOKS}
    against = {
        other: {ratio: paired_interval(kl[LEARNED][ratio], kl[other][ratio], compare="ratio") for ratio in ratios}
        for other in (CALIBRATED, CALIBRATED_GRACE, PROMPT)
    }
    rows = []
    for other, by_ratio in against.items():
        for ratio in ratios:
            wins = sum(a < b for a, b in zip(kl[LEARNED][ratio], kl[other][ratio], strict=True))
            rows.append([other, f"{float(ratio):.0%}", with_ends(by_ratio[ratio], ".2f"), f"{wins} of {len(cases)}"])
    shares = " / ".join(f"{float(ratio):.0%}" for ratio in ratios)
    seconds = {name: [value["seconds"][f"{name}, {ratio}"] for ratio in ratios] for name in _LOOKS if name != PROMPT}
    return Page(
        title="Learned masks",
        picture="KL divergence from the dense cache's next-token distributions by share of channels pruned, for "
        "learned and calibrated masks and for channels chosen per prompt",
        draw=lambda figure: _draw(figure, kl, ratios),
        asked=f"How close to the dense cache does {value['model']} stay with static masks that are learned, beside "
        "calibrated ones, and beside channels chosen for each prompt?",
        found=f"With {shares} of the channels pruned, learned masks have "
        f"{_times(list(against[CALIBRATED].values()))} the KL divergence of calibrated ones (MIES), and "
        f"{_times(list(against[PROMPT].values()))} that of channels chosen per prompt by GRACE. Learning takes "
        f"{statistics.fmean(seconds[LEARNED]) / 60:.1f} minutes for each ratio, calibrating "
        f"{statistics.fmean(seconds[CALIBRATED]) / 60:.1f}.",
        sure=f"This is one small model and {len(cases)} passages of books, code and generated text, each with "
        f"{value['tokens']} of its own next tokens; intervals are 95 %, over passages. Masks come from other passages "
        "of the same sources: on other kinds of text they may be worse.",
        tables=[
            *table(
                ["channels", *(f"KL, {float(ratio):.0%} pruned" for ratio in ratios), "seconds to make"],
                [
                    [
                        name,
                        *(with_ends(mean_interval(kl[name][ratio])) for ratio in ratios),
                        f"{statistics.fmean(seconds[name]):.0f}" if name in seconds else "–",
                    ]
                    for name in _LOOKS
                ],
            ),
            "",
            *table(["learned beside", "pruned", "KL, ratio to it", "passages where lower"], rows),
        ],
        details=[
            (
                "How it is measured",
                [
                    f"A prompt of {value['prompt']:,} tokens is read, its keys are pruned but for the last 32, and "
                    f"{value['tokens']} tokens are fed. Masks are made from {value['learned_on']:,} tokens of "
                    f"{value['sources']} passages, one from the first half of each source; prompts are from the "
                    f"second halves. Learning takes {' and '.join(map(str, value['steps']))} steps in each layer. "
                    "Every head keeps the same number of channels in all rows.",
                ],
            ),
        ],
    )


def _times(found: list[Interval]) -> str:
    return " / ".join(f"{each.estimate:.2f}" for each in found) + " times"


def _draw(figure: Figure, kl: dict[str, dict[str, list[float]]], ratios: list[str]) -> None:
    axes, places = figure.subplots(), [float(ratio) for ratio in ratios]
    for name, (colour, line) in _LOOKS.items():
        means = [statistics.fmean(kl[name][ratio]) for ratio in ratios]
        axes.plot(places, means, "o", color=colour, linestyle=line, label=name.replace("`", ""))
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:.0%}" for place in places])
    axes.set_xlabel("channels pruned")
    axes.set_ylabel("KL, nats")
    axes.legend()
