"""docs/results/answers.md from the records of `bench.answers`: answers kept, with intervals, beside bytes, by model.

When: the script calls it, after a measurement or with ``--report-only``. Source: the interval of a share is Wilson's
(Journal of the American Statistical Association 22, 1927).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scipy.stats import binomtest

from bench.report import BLUE, GREEN, ORANGE, PINK, Page, small, table

#: Bytes of a number in the caches that shares are given of.
WIDTHS = {"32": 4, "16": 2}
#: The settings that the sentence names, if they were measured; all others stand in the table.
TOLD = ("bits-2.25", "grace-0.3", "grace-0.6", "4bit", "grace-0.3-4bit")
COLOURS = (BLUE, ORANGE, GREEN, PINK)
#: The lines of each model, by the names of settings.
Lines = Mapping[str, Mapping[str, Mapping[str, Any]]]


def rows(found: Mapping[str, list[dict[str, Any]]], titles: Mapping[str, str]) -> list[dict[str, Any]]:
    """A line for each setting: answers kept of how many, Wilson's 95 % interval, and shares of the dense cache.

    There is none if the dense cache answers nothing.
    """
    dense = [one for record in found["dense"] for one in record["asked"] if one["right"]]
    lines = []
    for name, records in found.items() if dense else ():
        asked = dense if name == "dense" else [one for record in records for one in record["asked"]]
        right = sum(one["right"] for one in asked)
        ends = binomtest(right, len(asked)).proportion_ci(0.95, method="wilson")
        line = {"setting": name, "title": titles[name], "right": right, "asked": len(asked)}
        line["interval"] = [float(ends.low), float(ends.high)]
        for bits in WIDTHS:
            stored, whole = (
                [sum(one[f"bytes, {bits} bit"][part] for one in of) for part in range(2)] for of in (asked, dense)
            )
            line[f"K, {bits} bit"], line[f"K+V, {bits} bit"] = stored[0] / whole[0], sum(stored) / sum(whole)
        lines.append(line)
    return lines


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    models: Lines = {label: {line["setting"]: line for line in of["rows"]} for label, of in value["models"].items()}
    able = {label: of for label, of in models.items() if of}
    unable = ", ".join(label for label in models if label not in able)
    titles = {name: line["title"] for of in able.values() for name, line in of.items()}
    totals = {label: of["dense"]["asked"] if of else 0 for label, of in models.items()}
    counts = [totals[label] for label in able] or [0]
    counted = " to ".join(map(str, sorted({min(counts), max(counts)})))
    body = [
        [title, *(cell for of in able.values() for cell in (_cells(of[name]) if name in of else ("–", "–")))]
        for name, title in titles.items()
    ]
    widths = [f"{part}, {bits} bit" for bits in ("16", "32") for part in ("K+V", "K")]
    sizes = [
        [label, line["title"], *(f"{line[width]:.1%}" for width in widths)]
        for label, of in able.items()
        for line in of.values()
    ]
    nothing = f"None of the questions is answered from a dense cache by {unable}, so there is nothing to keep."
    return Page(
        title="Answers kept by a smaller cache",
        picture="Left: answers kept by each cache, a colour for each model, with 95 % intervals; right: its bytes",
        headline=_headline(able),
        draw=lambda figure: draw(figure, able, titles),
        asked=f"Of {value['asked']} questions about texts of {value['tokens']:,} tokens, "
        + ", ".join(f"{label} answers {total}" for label, total in totals.items())
        + " from a dense cache; how many of these are still answered from a smaller one?",
        found=" ".join([*([_found(able)] if able else []), *([nothing] if unable else [])]),
        sure=f"{'This is one small model' if len(models) == 1 else f'These are {len(models)} small models'} and "
        f"{value['texts']} generated texts"
        + f", and with {counted} questions the 95 % intervals are wide: where two overlap, neither setting is shown "
        "to be better" * bool(able) + ".",
        tables=[
            "λ: share of key channels pruned. Bytes are percentages of a dense cache in 16 bits.",
            "",
            *table(["cache", *(f"{label}: {what}" for label in able for what in ("answers kept", "K+V"))], body),
        ]
        if able
        else [],
        details=[
            ("Bytes of keys, and in float32", table(["model", "cache", *widths], sizes, words=2)),
            (
                "How it is counted",
                [
                    "Models are in float32; the questions that one answers from a dense cache count. An answer is kept "
                    "if it contains the expected words, ignoring case and punctuation. Decoding is greedy, with at "
                    f"most {value['new_tokens']} tokens.",
                    "",
                    "- The question ends the prompt, so its queries help to "
                    "choose the channels. The prompt is read with dense attention, so the first token of an answer is "
                    "always the dense cache's. The last 32 tokens of a prompt and the answer stay dense"
                    + "; `bits=` keeps the first 4 dense, too, codes newer tokens in blocks of 64, and is calibrated "
                    "on the texts that ship with grace_opt" * ("bits-2.25" in titles) + ".",
                    "- Intervals are Wilson's, as if questions were independent; but questions about one text share "
                    "most of their prompt.",
                    "- Bytes are all that the cache holds after the answer, with indices, scales and zero points, "
                    "without room to grow, divided by those of the dense cache. Layers with sliding windows stay dense "
                    "in ours, and count. *32 bit*: as measured, in float32. *16 bit*: calculated as if all "
                    "floating-point numbers had 16 bits; packed bits and indices stay as they are. The answers are "
                    "those of float32.",
                    "- Rows of 8 and 4 bits use `Quantize` in groups of 32; `QuantizedCache` has its own defaults, and "
                    "refuses models with sliding windows.",
                ],
            ),
        ],
    )


def _cells(line: Mapping[str, Any]) -> tuple[str, str]:
    ends = "" if line["setting"] == "dense" else " " + small("{:.0%} to {:.0%}".format(*line["interval"]))
    return f"{line['right']} of {line['asked']}{ends}", f"{line['K+V, 16 bit']:.1%}"


def _share(line: Mapping[str, Any]) -> str:
    return f"{line['K+V, 16 bit']:.0%} of the bytes"


def _worst(models: Lines, name: str) -> tuple[str, Mapping[str, Any]]:
    """Return the model that keeps the smallest share of its answers in a cache, and its line."""
    return min(((label, of[name]) for label, of in models.items()), key=lambda of: of[1]["right"] / of[1]["asked"])


def _measured(models: Lines) -> list[str]:
    """Return the smaller caches that all models have."""
    first, *others = models.values()
    return [name for name in first if name != "dense" and all(name in of for of in others)]


def _found(models: Lines) -> str:
    told, names = [], _measured(models)
    for name in [name for name in TOLD if name in names] or names:
        label, line = _worst(models, name)
        on = f" ({label})" * (len(models) > 1)
        told.append(f"{line['title']}: {line['right']} of {line['asked']}{on} in {_share(line)}")
    kept = "Answers kept" + f" by the worst of {len(models)} models" * (len(models) > 1)
    return f"{kept}: {'; '.join(told)} (bytes of K+V, compared with a dense cache in 16 bits)."


def _headline(models: Lines) -> str:
    """What the picture says: the smallest cache that keeps nine answers of ten of every model."""
    if not models:
        return "No model answers a question from a dense cache"
    every = " of every model" * (len(models) > 1)
    worst = {name: _worst(models, name) for name in _measured(models)}
    enough = [name for name, (_, line) in worst.items() if line["right"] >= 0.9 * line["asked"]]
    if not enough:
        return f"No smaller cache keeps nine of ten answers{every}"
    label, line = worst[min(enough, key=lambda name: max(of[name]["K+V, 16 bit"] for of in models.values()))]
    kept = f"{line['right']} of {line['asked']}{f' of {label}, the worst' * bool(every)}"
    title = line["title"].replace("`", "")
    return f"The smallest cache that keeps nine of ten answers{every}: {title} ({kept}, in {_share(line)})"


def draw(figure: Any, models: Lines, titles: Mapping[str, str]) -> None:
    """Answers kept, and bytes, a line for each smaller cache and model."""
    figure.set_size_inches(8, 3.2 + 0.8 * len(models))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.2, 1))
    names, height = [name for name in titles if name != "dense"], 0.8 / max(len(models), 2)
    for number, ((label, of), colour) in enumerate(zip(models.items(), COLOURS, strict=False)):
        lines = [of[name] for name in names if name in of]
        places = [names.index(line["setting"]) + height * (number - (len(models) - 1) / 2) for line in lines]
        kept = [100 * line["right"] / line["asked"] for line in lines]
        ends = [[abs(100 * line["interval"][end] - x) for line, x in zip(lines, kept, strict=True)] for end in range(2)]
        said = f"{label}, of {of['dense']['asked']} answers"
        left.errorbar(kept, places, xerr=ends, fmt="o", color=colour, capsize=2, markersize=5, label=said)
        drawn = right.barh(places, [100 * line["K+V, 16 bit"] for line in lines], color=colour, height=0.85 * height)
        right.bar_label(drawn, fmt="%.0f", padding=3, fontsize=7)
    left.set_yticks(range(len(names)), [titles[name].replace("`", "").replace("transformers' ", "") for name in names])
    left.invert_yaxis()
    for axes in (left, right):
        axes.grid(visible=False, axis="y")
    right.tick_params(left=False)
    right.margins(x=0.1)
    right.set_xlabel("K+V, % of a dense cache in 16 bits")
    left.set_xlim(-2, 102)
    left.set_xlabel("answers kept, %, with 95 % intervals")
    if models:
        figure.legend(loc="outside lower center", ncols=2)
