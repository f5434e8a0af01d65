"""docs/results/bits.md from the records of `bench.bits`: means over passages with intervals, and retrieval, by model.

When: the script calls it, after a measurement or with ``--report-only``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.bits_variants import BITS, VARIANTS
from bench.intervals import DENSE, hidden_words, with_ends
from bench.report import BLUE, GREEN, GREY, ORANGE, PINK, Page, small, table
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
#: Rows of which answers are asked for, and the one of which reading a prompt is timed: what `attach` does by itself.
RETRIEVAL, TIMED = ("bits-3", "bits-2.25", "bits-1"), "bits-2.25"
COLOURS = (BLUE, ORANGE, GREEN, PINK)


def numbers_of(of: Mapping[str, Any], name: str, measure: str, kind: str | None = None) -> list[float]:
    """Return a row's numbers on the passages of a model, or on those of a kind."""
    passages = (each for each in of["passages"] if kind in (None, each["kind"]))
    return [each["rows"][name][measure] for each in passages if name in each["rows"]]


def mean(of: Mapping[str, Any], name: str, measure: str = "kl", kind: str | None = None) -> float:
    """Return a row's mean over these passages."""
    return statistics.fmean(numbers_of(of, name, measure, kind))


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: dict[str, Any] = value["models"]
    whole = {label: of for label, of in models.items() if numbers_of(of, next(iter(VARIANTS)), "kl")}
    names = [name for name in ROWS if name not in VARIANTS]
    worst = max(models, key=lambda label: mean(models[label], TIMED))
    kl = {name: max(mean(of, name) for of in models.values()) for name in names}
    others = ", ".join(f"{label}: {mean(of, TIMED):.4f}" for label, of in models.items() if label != worst)
    first = next(iter(models.values()))["passages"]
    kinds = list(dict.fromkeys(each["kind"] for each in first))
    asked = {label: of["cases"] for label, of in models.items() if of["cases"]}
    timed = {label: of for label, of in models.items() if of["seconds"]}
    return Page(
        title="A budget of bits",
        picture="KL divergence from the dense cache's next-token distributions, on a logarithmic scale, by bits per "
        "element, a line for each model, with 95 % intervals",
        headline=f"bits=2.25 costs {worst} most: a KL of {kl[TIMED]:.4f} nats",
        draw=lambda figure: draw(figure, models),
        asked="If every channel of every token of a cache gets its own number of bits, how far do the next-token "
        "distributions of a model move from those of a dense cache?",
        found=f"The worst of {len(models)} models at 2.25 bits per element of K and V is {worst}, with a KL of "
        f"{kl[TIMED]:.4f} nats ({others}). The worst KL at 3 bits is {kl['bits-3']:.4f}, at 1 bit {kl['bits-1']:.4f}; "
        f"that of int4 {kl['int4']:.4f} at {mean(models[worst], 'int4', 'bits'):.1f} bits, and of pruning 30 % of the "
        f"key channels {kl['ratio-0.3']:.4f} at {mean(models[worst], 'ratio-0.3', 'bits'):.1f}.",
        sure=f"These are {len(models)} small models, whose weights have 4 bits, and {len(first)} passages of "
        f"{len(kinds)} kinds of text for each, on which no setting was chosen; 95 % intervals are over passages, which "
        "differ more than settings do."
        if value["half"] == "B"
        else "**The passages that settings are chosen on**: not to be reported.",
        tables=[
            "KL in nats, means over passages, with 95 % intervals.",
            "",
            *table(["cache", *models], [[TITLES[name], *_kls(models.values(), name)] for name in names]),
            *(["", *hidden_words(asked, (DENSE, *RETRIEVAL), TITLES.__getitem__)] if asked else []),
        ],
        details=[
            *([("What each part is worth", _variants(whole))] if whole else []),
            ("By kind of text", _by_kind(models, kinds)),
            ("Bytes, likeliest tokens and likelihood", _sizes(models, names)),
            *([("Time to compress", _time(timed, value["tokens"] - value["later"]))] if timed else []),
            (
                "How it is counted",
                [
                    *_counted(value, first),
                    *(
                        f"- {label}: neither variants nor hidden words nor times."
                        for label in models
                        if label not in whole
                    ),
                ],
            ),
        ],
    )


def _kls(models: Sequence[Any], name: str) -> list[str]:
    return [with_ends(mean_interval(numbers_of(of, name, "kl"))) for of in models]


def _variants(models: Mapping[str, Any]) -> list[str]:
    plain = f"bits-{BITS:g}"
    rows = [[TITLES[plain], *(f"{mean(of, plain):.4f}" for of in models.values())]]
    for name in VARIANTS:
        found = [mean(of, name) / mean(of, plain) if numbers_of(of, name, "kl") else None for of in models.values()]
        rows.append([TITLES[name], *("–" if each is None else f"× {each:.2f}" for each in found)])
    return [
        f"Each row changes one part of the decision, at {BITS:g} bits: its KL as a multiple of the first row's.",
        "",
        *table(["variant", *models], rows),
    ]


def _by_kind(models: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    rows = [
        [label, TITLES[name], *(f"{mean(of, name, 'kl', kind):.4f}" for kind in kinds)]
        for label, of in models.items()
        for name in ("bits-3", TIMED, "bits-1", "int4")
    ]
    return table(["model", "cache", *kinds], rows, words=2)


def _sizes(models: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    rows = []
    for label, of in models.items():
        for name in names:
            sizes = [f"{mean(of, name, part):.2f}" for part in ("bits", "key_bits", "value_bits")]
            share, top1, nll = (mean(of, name, measure) for measure in ("share", "top1", "nll"))
            rows.append([label, TITLES[name], *sizes, f"{share:.1%}", f"{top1:.1%}", f"{nll:+.4f}"])
    return [
        "*Bits*: mean per element of all tokens but the sinks and the recent window, everything counted. *% of 16 "
        "bits*: K and V after the prompt, all tokens, compared with a dense cache in 16 bits. *ΔNLL*: of the text's "
        "own tokens, nats per token.",
        "",
        *table(["model", "cache", "bits", "K", "V", "% of 16 bits", "likeliest token equal", "ΔNLL"], rows, words=2),
    ]


def _time(models: Mapping[str, Any], tokens: int) -> list[str]:
    rows = []
    for label, of in models.items():
        dense, coded = (of["seconds"][name] for name in (DENSE, TIMED))
        more = [after / before - 1 for before, after in zip(dense, coded, strict=True)]
        low, high = np.quantile(more, (0.25, 0.75))
        text = f"{statistics.median(more):+.1%} {small(f'[{low:+.1%}, {high:+.1%}]')}"
        made = f"{of['calibration']['seconds']:.0f} s"
        rows.append([label, *(f"{statistics.median(each):.2f} s" for each in (dense, coded)), text, made])
    return [
        f"Time in which a prompt of {tokens:,} tokens is read: medians of {len(dense)} rounds in which the caches take "
        "turns, and quartiles of the paired differences. *Calibrating* is done once for a model.",
        "",
        *table(["model", "dense", TITLES[TIMED], "over dense", "calibrating"], rows),
    ]


def _counted(value: dict[str, Any], passages: Sequence[Mapping[str, Any]]) -> list[str]:
    names = "; ".join(dict.fromkeys(each["name"] for each in passages))
    return [
        f"In float32; passages of {value['tokens']:,} tokens, of which the last {value['later']} are "
        f"fed in one forward pass on the compressed cache. The first {value['sinks']} and the last {value['window']} "
        f"tokens of a prompt, and all later ones, stay dense, in every row. Texts: {names}.",
        "",
        "- The basis is calibrated on the texts that ship with grace_opt; none of them is measured on.",
        "- Settings were chosen on half A, passages that begin at 30 % of each text; these begin at 60 %. A passage "
        "begins with the token that the model expects at the beginning, if it does.",
        "- *KL*(dense ‖ compressed), mean over the later tokens; then over passages. Intervals: bootstrap over "
        f"passages or cases, {RESAMPLES:,} resamples.",
        "- Parameters of codes have 16 bits in any model. Bits of int4 and of pruned keys, and all percentages, are "
        "calculated as if the model had 16 bits; the distributions are those of float32.",
        "- Hidden words: one sentence at depths spread evenly over the text, at the end of a sentence.",
    ]


def draw(figure: Any, models: Mapping[str, Any]) -> None:
    """KL by bits with 95 % intervals over passages, and int4 in each model's colour."""
    axes = figure.subplots()
    budgets = [name for name in ROWS if name.startswith("bits")]
    for place, ((label, of), colour) in enumerate(zip(models.items(), COLOURS, strict=False)):
        for names, style in ((budgets, "o-"), (["int4"], "s")):
            bits = [mean(of, name, "bits") * (1 + 0.008 * place) for name in names]  # so that intervals can be seen
            kls = [mean_interval(numbers_of(of, name, "kl")) for name in names]
            y = [one.estimate for one in kls]
            if kls[0].n > 1:  # a single passage shows no spread
                ends = [[one.estimate - one.low for one in kls], [one.high - one.estimate for one in kls]]
                axes.errorbar(bits, y, ends, fmt="none", ecolor=colour, elinewidth=1.2, capsize=3)
            axes.plot(bits, y, style, color=colour, label=label if names is budgets else None)
    axes.plot([], [], "s", color=GREY, label="int4")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = (1, 1.5, 2, 2.25, 3, 4, 5)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("bits per element of K and V, everything counted")
    axes.set_ylabel("next-token KL from dense, nats")
    axes.legend()
