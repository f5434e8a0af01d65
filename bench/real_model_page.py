"""docs/results/real_model.md from the records of `bench.real_model`: means, paired differences, and what they say.

When: the script calls it, after a measurement or with ``--report-only``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from bench.report import BLUE, GREY, Page, small, table
from grace_opt.attention.weights import prune_count
from grace_opt.sweep import Interval, mean_interval, paired_interval
from grace_opt.sweep.bootstrap import RESAMPLES

METHODS, RATIOS = {"THINK": "think", "GRACE": "grace"}, (0.5, 0.6)
RECENT = OBSERVED = 32
#: What is compared, in the table's order: name in a record, format, heading.
MEASURES = (
    ("kl", ".4f", "KL, nats"),
    ("top1", ".1%", "likeliest next token equal"),
    ("agreement", ".1%", "tokens equal"),
    ("prefix", ".1f", "common prefix, tokens"),
)


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of paired differences, and the ends of its bootstrap 95 % interval over prompts."""
    found = mean_interval(differences)
    return found.estimate, found.low, found.high


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the prompts, and paired differences between the methods."""
    dense = {part: float(np.mean([r["dense"][part] for r in records])) for part in ("key_bytes", "total_bytes")}
    rows, differences = [], []
    for ratio in dict.fromkeys(cell["ratio"] for cell in records[0]["pruned"]):
        by_method = {
            method: [c for r in records for c in r["pruned"] if (c["method"], c["ratio"]) == (method, ratio)]
            for method in METHODS
        }
        for method, cells in by_method.items():
            parts = [name for name, _, _ in MEASURES] + ["key_bytes", "total_bytes"]
            rows.append({"method": method, "ratio": ratio, **{p: float(np.mean([c[p] for c in cells])) for p in parts}})
        pairs = list(zip(by_method["GRACE"], by_method["THINK"], strict=True))
        paired = {name: interval([g[name] - t[name] for g, t in pairs]) for name, _, _ in MEASURES}
        nearer = sum(g["kl"] < t["kl"] for g, t in pairs)
        differences.append({"ratio": ratio, **paired, "prompts of lower KL": nearer})
    return {"dense": dense, "rows": rows, "GRACE - THINK": differences}


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models, count, prompts, ratios = value["models"], value["new_tokens"], value["prompts"], value["ratios"]
    several = len(models) > 1
    kl = {label: _kl_ratios(of) for label, of in models.items()}
    times = {label: " / ".join(f"{found.estimate:.2f}" for found, _ in of) for label, of in kl.items()}
    worst = max(kl, key=lambda label: geometric_mean(found.estimate for found, _ in kl[label]))
    others = ", ".join(f"{label}: {said}" for label, said in times.items() if label != worst)
    at = " / ".join(f"{ratio:g}" for ratio in ratios)
    nearer = " and ".join(
        f"{sum(of['GRACE - THINK'][place]['prompts of lower KL'] for of in models.values())} at λ = {ratio:g}"
        for place, ratio in enumerate(ratios)
    )
    texts = "; ".join(dict.fromkeys(record["text"] for of in models.values() for record in of["by prompt"]))
    return Page(
        title="Real models with pruned keys",
        picture="KL divergence of GRACE from the dense cache's next-token distributions, divided by that of THINK, on "
        "a logarithmic scale: each prompt, and the ratio of means, a panel per model",
        headline=f"GRACE has {times[worst]} times the KL of THINK at λ = {at}"
        + f" ({worst}, the worst of {len(models)} models)" * several,
        draw=lambda figure: draw(figure, kl, ratios),
        asked="At equal bytes, do the next-token distributions of a model stay nearer to those of a dense cache if "
        "GRACE chooses the channels, or if THINK does?",
        found=f"GRACE has {times[worst]} times the KL divergence of THINK at λ = {at}"
        + f" on {worst}, where it does worst ({others})" * several
        + f". By KL, {_verdicts(models, 'kl')}; by the share of generated tokens equal to the dense cache's, "
        f"{_verdicts(models, 'agreement', higher=True)}.",
        sure=f"{f'These are {len(models)} small models' if several else 'This is one small model'} in 4 bits; of "
        f"{len(models) * prompts} prompts of {value['tokens']:,} tokens, GRACE has the lower KL for {nearer}; "
        "intervals are 95 %, paired by prompt.",
        tables=[
            "λ: share of key channels pruned. All other columns compare with the dense cache: bytes, next-token "
            f"distributions, and {count} generated tokens (*tokens equal*, *common prefix*).",
            "",
            *table(
                ["model", "cache", "λ", "K+V, % of dense", "K, % of dense", *(head for _, _, head in MEASURES)],
                [row for label, of in models.items() for row in _rows(label, of)],
                words=3,
            ),
        ],
        details=[
            (
                "How it is counted",
                [
                    f"A model in float32 reads {prompts} prompts of {value['tokens']:,} tokens ({texts}) and generates "
                    f"{count} tokens greedily; recent and observation windows have {RECENT} tokens. Numbers are means "
                    "over prompts.",
                    "",
                    *(
                        f"- {label}: of {of['head_dim']} channels, "
                        + " / ".join(f"{prune_count(ratio, of['head_dim'])}" for ratio in ratios)
                        + f" are pruned at λ = {at}; a dense K takes {of['dense']['key_bytes'] / 2**20:.2f} MiB, and "
                        f"K+V {of['dense']['total_bytes'] / 2**20:.2f} MiB."
                        for label, of in models.items()
                    ),
                    "- *KL*(dense ‖ pruned) and *likeliest next token equal*: both caches are given the tokens that "
                    "the dense one generated.",
                    f"- *Tokens equal*: share of the {count} generated tokens equal to the dense cache's at the same "
                    "place. After the first difference the texts differ, so this mostly follows the *common prefix*.",
                    "- *GRACE − THINK*: mean of the paired differences and its bootstrap 95 % interval "
                    f"({RESAMPLES:,} resamples of {prompts} prompts); shares in percentage points (pp).",
                    "- Bytes are those of `memory_report()` after the prompt, in float32, with kept indices, and those "
                    "of layers with sliding windows, which are not pruned. In 16 bits everything is half as large, "
                    "except the indices.",
                ],
            )
        ],
    )


def _kl_ratios(of: Mapping[str, Any]) -> list[tuple[Interval, list[float]]]:
    """Return, for each λ, GRACE's mean KL divided by THINK's, and these ratios of every prompt."""
    found = []
    for paired in of["GRACE - THINK"]:
        grace, think = (
            [
                cell["kl"]
                for record in of["by prompt"]
                for cell in record["pruned"]
                if (cell["method"], cell["ratio"]) == (method, paired["ratio"])
            ]
            for method in ("GRACE", "THINK")
        )
        ratios = [a / b for a, b in zip(grace, think, strict=True)]
        found.append((paired_interval(grace, think, compare="ratio"), ratios))
    return found


def _verdicts(models: Mapping[str, Any], measure: str, higher: bool = False) -> str:
    """Which choice is better, on which models."""
    found: dict[str, list[str]] = {}
    for label, of in models.items():
        found.setdefault(_verdict(of["GRACE - THINK"], measure, higher), []).append(label)
    if len(found) == 1:
        return f"{next(iter(found))}{f' on all {len(models)} models' * (len(models) > 1)}"
    return ", and ".join(f"{verdict} on {', '.join(labels)}" for verdict, labels in found.items())


def _verdict(differences: Sequence[dict[str, Any]], measure: str, higher: bool = False) -> str:
    """Which choice is better where every interval says so."""
    signs = {(np.sign(p[measure][1]) if np.sign(p[measure][1]) == np.sign(p[measure][2]) else 0) for p in differences}
    if len(signs) > 1 or signs == {0}:
        return "no difference is shown" if signs == {0} else "a difference is shown at some λ only"
    return "GRACE is nearer" if (signs.pop() > 0) == higher else "THINK is nearer"


def _signed(paired: dict[str, Any], measure: str) -> str:
    form = next(form for name, form, _ in MEASURES if name == measure)
    scale, form, unit = (100, form.replace("%", "f"), " pp") if form.endswith("%") else (1, form, "")
    mean, low, high = (f"{scale * number:+{form}}" for number in paired[measure])
    return f"{mean}{unit} {small(f'[{low}, {high}]')}"


def _rows(label: str, of: Mapping[str, Any]) -> list[list[str]]:
    rows, dense = [], of["dense"]
    for paired in of["GRACE - THINK"]:
        for row in (r for r in of["rows"] if r["ratio"] == paired["ratio"]):
            sizes = [f"{row[part] / dense[part]:.1%}" for part in ("total_bytes", "key_bytes")]
            numbers = [f"{row[measure]:{form}}" for measure, form, _ in MEASURES]
            rows.append([label, row["method"], f"{row['ratio']:g}", *sizes, *numbers])
        shown = [_signed(paired, measure) for measure, _, _ in MEASURES]
        rows.append([label, "GRACE − THINK", f"{paired['ratio']:g}", "–", "–", *shown])
    return rows


def draw(figure: Figure, kl: Mapping[str, list[tuple[Interval, list[float]]]], ratios: Sequence[float]) -> None:
    """GRACE's KL divided by THINK's, of each prompt and of the means, a panel per model."""
    figure.set_size_inches(max(8, 3 * len(kl)), 3.6)
    every = figure.subplots(1, len(kl), sharey=True, squeeze=False)[0]
    for axes, (label, of) in zip(every, kl.items(), strict=True):
        for place, (found, points) in enumerate(of):
            spread = place - 0.1 + np.linspace(-0.12, 0.12, len(points))
            axes.plot(spread, points, "o", color=GREY, ms=4, label="each prompt" if place == 0 else None)
            ends = [[found.estimate - found.low], [found.high - found.estimate]]
            look: dict[str, Any] = {"color": BLUE, "marker": "D", "linestyle": "", "capsize": 4}
            axes.errorbar(
                place + 0.15, found.estimate, ends, **look, label="means, 95 % interval" if place == 0 else None
            )
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_xticks(range(len(ratios)), [f"λ = {ratio:g}" for ratio in ratios])
        axes.set_xlim(-0.5, len(ratios) - 0.5)
        axes.set_title(label)
    every[0].set_ylabel("KL, GRACE / THINK")
    every[0].legend()
