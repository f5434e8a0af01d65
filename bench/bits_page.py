"""docs/results/bits.md from the records of `bench.bits`: means by half of the passages, with intervals, and retrieval.

When: the script calls it, after a measurement or with ``--report-only``.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.bits_variants import BITS, VARIANTS
from bench.intervals import DENSE, hidden_words, with_ends
from bench.report import BLACK, BLUE, GREEN, ORANGE, Page, small, table
from grace_opt.sweep import mean_interval
from grace_opt.sweep.bootstrap import RESAMPLES

#: Every row's bits; None for what is no budget of bits.
ROWS: dict[str, float | None] = {
    "bits-3": 3.0,
    "bits-2.25": 2.25,
    "bits-2": 2.0,
    "bits-1.5": 1.5,
    "bits-1": 1.0,
    "int4": None,
    "ratio-0.3": None,
    **dict.fromkeys(VARIANTS, BITS),
}
TITLES = {
    **{name: f"`bits={bits:g}`" for name, bits in ROWS.items() if name.startswith("bits")},
    "int4": "int4: `Quantize(4)`",
    "ratio-0.3": "GRACE, `ratio=0.3`",
    DENSE: "dense",
    **VARIANTS,
}
#: Rows of which answers are asked for, and of which reading a prompt is timed.
RETRIEVAL, TIMED = ("bits-3", "bits-2"), ("bits-2.25",)
#: Variants of which answers are asked for as well: those whose choice retrieval has a say in.
ASKED_VARIANTS = ("local", "floor-0", "floor-0.3")
#: What is chosen on, and what is reported.
CHOSEN, REPORTED = "A", "B"


def mean(value: dict[str, Any], name: str, half: str, measure: str, kind: str | None = None) -> float | None:
    """Return a row's mean over the passages of a half, and of a kind; None without passages."""
    numbers = numbers_of(value, name, half, measure, kind)
    return statistics.fmean(numbers) if numbers else None


def numbers_of(value: dict[str, Any], name: str, half: str, measure: str, kind: str | None = None) -> list[float]:
    """Return a row's numbers on the passages of a half, and of a kind."""
    return [
        record["rows"][name][measure]
        for record in value["passages"]
        if record["half"] == half and kind in (None, record["kind"]) and name in record["rows"]
    ]


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    names = [name for name in ROWS if name not in VARIANTS]
    halves = [half for half in (CHOSEN, REPORTED) if numbers_of(value, names[0], half, "kl")]
    told = halves[-1]
    count = len(numbers_of(value, names[0], told, "kl"))
    kls = {name: mean(value, name, told, "kl") or 0.0 for name in names}
    kinds = list(dict.fromkeys(record["kind"] for record in value["passages"]))
    words = hidden_words(value["cases"], (DENSE, *RETRIEVAL), TITLES.__getitem__) if value["cases"] else []
    return Page(
        title="A budget of bits",
        picture="KL divergence from the dense cache's next-token distributions, on a logarithmic scale, by bits per "
        "element, with 95 % intervals",
        headline=_headline(value, told),
        draw=lambda figure: draw(figure, value, told),
        asked=f"If every channel of every token of a cache gets its own number of bits, how far do the next-token "
        f"distributions of {value['model']} move from those of a dense cache?",
        found=f"By {_kl(kls['bits-3'])} nats at 3 bits per element of K and V, {_kl(kls['bits-2.25'])} at 2.25 and "
        f"{_kl(kls['bits-1'])} at 1 (KL); int4 has {_kl(kls['int4'])} at {_bits(value, 'int4', told)} bits, and "
        f"pruning 30 % of the key channels {_kl(kls['ratio-0.3'])} at {_bits(value, 'ratio-0.3', told)}.",
        sure=f"This is one small model and {count} passages of {len(kinds)} kinds of text, on which no setting was "
        "chosen; 95 % intervals are over passages, which differ more than settings do."
        if halves == [CHOSEN, REPORTED]
        else "**One half of the passages only**: not to be reported.",
        tables=[*_main_table(value, names, halves), *words],
        details=[
            ("What each part is worth", _variants(value, halves)),
            ("By kind of text", _by_kind(value, names, told, kinds)),
            ("Time to compress", _time(value)),
            ("How it is counted", _counted(value)),
        ],
    )


def _main_table(value: dict[str, Any], names: Sequence[str], halves: Sequence[str]) -> list[str]:
    head = ["cache", "bits", "K", "V", "% of 16 bits", *(f"KL, half {half}" for half in halves)]
    head += [f"likeliest token equal, {halves[-1]}", f"ΔNLL, {halves[-1]}"]
    rows = []
    for name in names:
        sizes = [f"{mean(value, name, halves[-1], part):.2f}" for part in ("bits", "key_bits", "value_bits")]
        share = f"{mean(value, name, halves[-1], 'share'):.1%}"
        kls = [with_ends(mean_interval(numbers_of(value, name, half, "kl"))) for half in halves]
        top1, nll = (mean(value, name, halves[-1], measure) for measure in ("top1", "nll"))
        rows.append([TITLES[name], *sizes, share, *kls, f"{top1:.1%}", f"{nll:+.4f}"])
    return [
        "Means over passages, with 95 % intervals. Settings were chosen on half A. *Bits*: mean per element of all "
        "tokens but the sinks and the recent window, everything counted. *% of 16 bits*: K and V after the prompt, all "
        "tokens, compared with a dense cache in 16 bits. *ΔNLL*: of the text's own tokens, nats per token.",
        "",
        *table(head, rows),
    ]


def _variants(value: dict[str, Any], halves: Sequence[str]) -> list[str]:
    plain = f"bits-{BITS:g}"
    cases = [record["rows"] for record in value["cases"]]
    asked = ["of dense's hits", "NLL over dense"] if cases else []
    rows = []
    for name in (plain, *VARIANTS):
        cells = [TITLES[name]]
        for half in halves:
            own, whole = (numbers_of(value, each, half, "kl") for each in (name, plain))
            if not own:
                cells.append("–")
                continue
            times = "" if name == plain else f" (× {statistics.fmean(own) / statistics.fmean(whole):.2f})"
            cells.append(f"{_kl(statistics.fmean(own))}{times}")
        if cases and name not in (plain, *ASKED_VARIANTS):
            cells += ["–", "–"]
        elif cases:
            hits = sum(case[name]["exact"] and case[DENSE]["exact"] for case in cases)
            over = statistics.fmean(case[name]["nll"] - case[DENSE]["nll"] for case in cases)
            cells += [f"{hits}", f"{over:+.3f}"]
        rows.append(cells)
    return [
        f"Each row changes one part of the decision, at {BITS:g} bits; in brackets, its KL as a multiple of the first "
        "row's.",
        "",
        *table(["variant", *(f"KL, half {half}" for half in halves), *asked], rows),
    ]


def _by_kind(value: dict[str, Any], names: Sequence[str], half: str, kinds: Sequence[str]) -> list[str]:
    rows = [[TITLES[name], *(_kl(mean(value, name, half, "kl", kind)) for kind in kinds)] for name in names]
    return [f"KL, half {half}.", "", *table(["cache", *kinds], rows)]


def _time(value: dict[str, Any]) -> list[str]:
    seconds = value["seconds"]
    if not seconds:
        return ["Not measured."]
    dense = seconds[DENSE]
    rows = [["dense", f"{statistics.median(dense):.2f} s", "–"]]
    for name in TIMED:
        ratios = [after / before - 1 for before, after in zip(dense, seconds[name], strict=True)]
        low, high = np.quantile(ratios, (0.25, 0.75))
        text = f"{statistics.median(ratios):+.1%} {small(f'[{low:+.1%}, {high:+.1%}]')}"
        rows.append([TITLES[name], f"{statistics.median(seconds[name]):.2f} s", text])
    calibration = value["calibration"]
    return [
        f"Time in which a prompt of {value['tokens'] - value['later']:,} tokens is read: medians of {len(dense)} "
        "rounds in which the caches take turns, and quartiles of the paired differences.",
        "",
        *table(["cache", "time", "over dense"], rows),
        f"Calibrating the model, once, took {calibration['seconds']:.0f} s ({calibration['texts']} texts, "
        f"{calibration['tokens']:,} tokens).",
    ]


def _counted(value: dict[str, Any]) -> list[str]:
    names = "; ".join(dict.fromkeys(record["name"] for record in value["passages"]))
    return [
        f"{value['model']} in float32; passages of {value['tokens']:,} tokens, of which the last {value['later']} are "
        f"fed in one forward pass on the compressed cache. The first {value['sinks']} and the last {value['window']} "
        f"tokens of a prompt, and all later ones, stay dense, in every row. Texts: {names}.",
        "",
        "- The basis is calibrated on the texts that ship with grace_opt; none of them is measured on.",
        "- Each text gives a passage to half A, which begins at 30 % of it, and one to half B, at 60 %.",
        "- *KL*(dense ‖ compressed), mean over the later tokens; then over passages. Intervals: bootstrap over "
        f"passages or cases, {RESAMPLES:,} resamples.",
        "- Parameters of codes have 16 bits in any model. Bits of int4 and of pruned keys, and all percentages, are "
        "calculated as if the model had 16 bits; the distributions are those of float32.",
        "- Hidden words: one sentence at depths spread evenly over the text, at the end of a sentence.",
    ]


def _kl(number: float | None) -> str:
    return "–" if number is None else f"{number:.4f}"


def _bits(value: dict[str, Any], name: str, half: str) -> str:
    return f"{mean(value, name, half, 'bits'):.1f}"


def _headline(value: dict[str, Any], half: str) -> str:
    """What the picture says: `bits=2.25` beside int4, nearer or farther, and the bytes of both."""
    few, int4 = (
        {part: mean(value, name, half, part) or 0.0 for part in ("kl", "share")} for name in ("bits-2.25", "int4")
    )
    near = few["kl"] <= int4["kl"]
    times = int4["kl"] / few["kl"] if near else few["kl"] / int4["kl"]
    return (
        f"bits=2.25 is {times:.1f} times {'nearer to' if near else 'farther from'} the dense cache than int4, with "
        f"{few['share']:.0%} of its bytes in place of {int4['share']:.0%}"
    )


def draw(figure: Any, value: dict[str, Any], half: str) -> None:
    """KL by bits, with 95 % intervals over passages, and the references."""
    axes = figure.subplots()
    budgets = [name for name in ROWS if name.startswith("bits")]
    kinds = ((budgets, "bits=", BLUE, "o-"), (["int4"], "int4", GREEN, "s"), (["ratio-0.3"], "ratio=0.3", ORANGE, "D"))
    for names, label, colour, style in kinds:
        bits = [mean(value, name, half, "bits") for name in names]
        kls = [mean_interval(numbers_of(value, name, half, "kl")) for name in names]
        y = [one.estimate for one in kls]
        if kls[0].n > 1:  # a single passage shows no spread
            ends = [[one.estimate - one.low for one in kls], [one.high - one.estimate for one in kls]]
            axes.errorbar(bits, y, ends, fmt="none", ecolor=colour, elinewidth=1.2, capsize=3)
        axes.plot(bits, y, style, color=colour, label=label)
        axes.annotate(label, (bits[-1], y[-1]), (8, 0), textcoords="offset points", va="center", color=BLACK)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = (1, 1.5, 2, 3, 4, 5, 8, 16)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlim(0.9, 24)
    axes.minorticks_off()
    axes.set_xlabel(f"bits per element of K and V of {value['model']}, everything counted")
    axes.set_ylabel("next-token KL from dense, nats")
