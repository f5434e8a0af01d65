"""docs/results/answers.md from the records of `bench.answers`: answers kept, with intervals, beside bytes.

When: the script calls it, after a measurement or with ``--report-only``. Source: the interval of a share is Wilson's
(Journal of the American Statistical Association 22, 1927).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scipy.stats import binomtest

from bench.report import BLACK, BLUE, GREEN, ORANGE, Page, small, table

#: Bytes of a number in the caches that shares are given of.
WIDTHS = {"32": 4, "16": 2}
#: An answer more or less is no difference; a setting that keeps so many counts as keeping them.
NEARLY_ALL = 0.9


def rows(found: dict[str, list[dict[str, Any]]], titles: Mapping[str, str]) -> list[dict[str, Any]]:
    """A line for each setting: answers kept of how many, Wilson's 95 % interval, and shares of a dense cache."""
    dense = found["dense"][0]["asked"][0]
    lines = []
    for name, records in found.items():
        asked = [one for record in records for one in record["asked"]]
        if name == "dense":
            asked = [one for one in asked if one["right"]]
        right = sum(one["right"] for one in asked)
        ends = binomtest(right, len(asked)).proportion_ci(0.95, method="wilson")
        line = {"setting": name, "title": titles[name], "right": right, "asked": len(asked)}
        line["interval"] = [float(ends.low), float(ends.high)]
        for bits in WIDTHS:
            stored = [sum(one[f"bytes, {bits} bit"][part] for one in asked) for part in range(2)]
            tokens = sum(one["tokens"] for one in asked) / dense["tokens"]
            whole = [tokens * size for size in dense[f"bytes, {bits} bit"]]
            line[f"K, {bits} bit"], line[f"K+V, {bits} bit"] = stored[0] / whole[0], sum(stored) / sum(whole)
        lines.append(line)
    return lines


def page(value: dict[str, Any]) -> Page:
    """What the page says of the numbers."""
    lines = value["rows"]
    total = lines[0]["asked"]
    keeps = [line for line in lines[1:] if line["right"] >= NEARLY_ALL * line["asked"]]
    least = min(keeps, key=lambda line: line["K+V, 16 bit"], default=None)
    lost = [line for line in lines[1:] if line["right"] < NEARLY_ALL * line["asked"]]
    found = "No smaller cache keeps nine in ten of them."
    if least is not None:
        others = ", ".join(f"{line['title']} keeps {line['right']}" for line in lost)
        found = (
            f"{least['title']} keeps {least['right']} of {total} in the fewest bytes, {least['K+V, 16 bit']:.0%} of "
            f"K+V in 16 bits; {others or 'every other setting keeps nine in ten of them, too'}."
        )
    head = ["cache", "answers kept", "K+V of 16 bit", "K of 16 bit", "K+V of float32", "K of float32"]
    body = []
    for line in lines:
        ends = "" if line["setting"] == "dense" else small(" {:.0%} to {:.0%}".format(*line["interval"]))
        shares = [f"{line[f'{part}, {bits} bit']:.1%}" for bits in ("16", "32") for part in ("K+V", "K")]
        body.append([line["title"], f"{line['right']} of {line['asked']}{ends}", *shares])
    return Page(
        title="Answers kept by a smaller cache",
        picture="Answers kept, with 95 % intervals, by the bytes of the cache",
        draw=lambda figure: draw(figure, value),
        asked=f"Of the {total} questions about texts of {value['tokens']:,} tokens that {value['model']} answers from "
        "a dense cache, how many does it still answer from a smaller one?",
        found=found,
        sure=f"One small model and {value['texts']} generated texts: with {total} questions the 95 % intervals are "
        "wide, and settings whose intervals overlap are not told apart.",
        tables=table(head, body),
        details=[
            (
                "How it is counted",
                [
                    f"{value['model']}, float32; {value['asked']} questions were asked, and those that the dense cache "
                    "answers count. An answer is kept if the expected words stand in it, case and punctuation aside; "
                    f"greedy decoding, at most {value['new_tokens']} tokens.",
                    "",
                    "- The question ends the prompt, and so the queries that choose the channels. The prompt is read "
                    "with dense attention, so an answer's first token is the dense cache's. The last 32 tokens of a "
                    "prompt stay dense, and so does the answer.",
                    "- Intervals: Wilson's, as if questions were independent; those about one text share most of their "
                    "prompt.",
                    "- Bytes: all that the cache holds after the answer, indices, scales and zero points included, "
                    "without room to grow, beside a dense cache of as many tokens. *Of float32*: as measured. *Of 16 "
                    "bit*: the same tensors with every floating-point number in 16 bits, beside a dense cache in 16 "
                    "bits; packed bits and indices stay as wide as they are. Answers are those of float32.",
                    "- Rows of 8 and 4 bits are `Quantization` in groups of 32; `QuantizedCache` has its own defaults.",
                ],
            )
        ],
    )


def draw(figure: Any, value: dict[str, Any]) -> None:
    """Answers kept by bytes; pruning, quantisation and both in colours of their own."""
    axes = figure.subplots()
    figure.set_size_inches(8, 4.2)
    total = value["rows"][0]["asked"]
    for line in value["rows"]:
        x, kept = 100 * line["K+V, 16 bit"], line["right"]
        bits = "bit" in line["setting"]
        colour = (
            BLACK if line["setting"] == "dense" else GREEN if bits else ORANGE if "think" in line["setting"] else BLUE
        )
        low, high = (total * end for end in line["interval"])
        axes.errorbar(x, kept, [[kept - low], [high - kept]], color=colour, marker="o", capsize=3, alpha=0.85)
        name = line["title"].replace(", nothing pruned", "").replace("`", "").replace("transformers' ", "")
        above = line["setting"] in ("think-0.3", "transformers-4bit")
        axes.annotate(name, (x, low if not above else high), (0, 4 if above else -11), textcoords="offset points",
                      ha="center", fontsize=7.5, color=colour)  # fmt: skip
    axes.set_xlabel("K+V, % of a dense cache in 16 bits")
    axes.set_ylabel(f"answers kept, of {total}")
    axes.set_xlim(18, 108)
    axes.set_ylim(-1, total + 2)
    axes.set_title(f"{value['model']}, {value['tokens']:,} tokens")
