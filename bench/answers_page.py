"""docs/results/answers.md from the records of `bench.answers`: answers kept, with intervals, beside bytes.

When: the script calls it, after a measurement or with ``--report-only``. Source: the interval of a share is Wilson's
(Journal of the American Statistical Association 22, 1927).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scipy.stats import binomtest

from bench.report import BLACK, BLUE, GREEN, ORANGE, Page, bars, small, table

#: Bytes of a number in the caches that shares are given of.
WIDTHS = {"32": 4, "16": 2}
#: The settings that the sentence names, if they were measured; all others stand in the table.
TOLD = ("grace-0.3", "grace-0.6", "4bit", "grace-0.3-4bit")


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
    told = [line for name in TOLD for line in lines if line["setting"] == name] or lines[1:]
    found = "; ".join(
        f"{line['title']}: {line['right']} answers, {line['K+V, 16 bit']:.0%} of the bytes" for line in told
    )
    head = ["cache", "answers kept", "K+V, 16 bits", "K, 16 bits", "K+V, float32", "K, float32"]
    body = []
    for line in lines:
        ends = "" if line["setting"] == "dense" else " " + small("{:.0%} to {:.0%}".format(*line["interval"]))
        shares = [f"{line[f'{part}, {bits} bit']:.1%}" for bits in ("16", "32") for part in ("K+V", "K")]
        body.append([line["title"], f"{line['right']} of {line['asked']}{ends}", *shares])
    return Page(
        title="Answers kept by a smaller cache",
        picture="Left: answers kept by each cache, with 95 % intervals; right: its bytes",
        headline=_headline(lines),
        draw=lambda figure: draw(figure, value),
        asked=f"{value['model']} answers {total} questions about texts of {value['tokens']:,} tokens from a dense "
        "cache; how many of them does it still answer from a smaller one?",
        found=f"{found} (bytes of K+V, compared with a dense cache in 16 bits).",
        sure=f"This is one small model and {value['texts']} generated texts, and with {total} questions the 95 % "
        "intervals are wide: where two overlap, neither setting is shown to be better.",
        tables=[
            "λ: share of key channels pruned. Bytes are percentages of a dense cache in 16 bits or in float32.",
            "",
            *table(head, body),
        ],
        details=[
            (
                "How it is counted",
                [
                    f"{value['model']} in float32 was asked {value['asked']} questions; those that it answers from a "
                    "dense cache count. An answer is kept if it contains the expected words, ignoring case and "
                    f"punctuation. Decoding is greedy, with at most {value['new_tokens']} tokens.",
                    "",
                    "- The question ends the prompt, so its queries help to "
                    "choose the channels. The prompt is read with dense attention, so the first token of an answer is "
                    "always the dense cache's. The last 32 tokens of a prompt and the answer stay dense.",
                    "- Intervals are Wilson's, as if questions were independent; but questions about one text share "
                    "most of their prompt.",
                    "- Bytes are all that the cache holds after the answer, with indices, scales and zero points, "
                    "without room to grow, divided by those of a dense cache of the same tokens. *float32*: as "
                    "measured. *16 bits*: calculated as if all floating-point numbers had 16 bits; packed bits and "
                    "indices stay as they are. The answers are those of float32.",
                    "- Rows of 8 and 4 bits use `Quantize` in groups of 32; `QuantizedCache` has its own defaults.",
                ],
            )
        ],
    )


def _headline(lines: list[dict[str, Any]]) -> str:
    """What the picture says: the smallest cache that keeps nine answers of ten."""
    enough = [line for line in lines[1:] if line["right"] >= 0.9 * line["asked"]]
    if not enough:
        return "No smaller cache keeps nine of ten answers"
    least = min(enough, key=lambda line: line["K+V, 16 bit"])
    title = least["title"].replace("`", "")
    kept = f"{least['right']} of {least['asked']}, in {least['K+V, 16 bit']:.0%} of the bytes"
    return f"The smallest cache that keeps nine of ten answers: {title} ({kept})"


def draw(figure: Any, value: dict[str, Any]) -> None:
    """Answers kept, and bytes, a line for each setting."""
    figure.set_size_inches(8, 4)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.2, 1))
    lines = value["rows"]
    total, places = lines[0]["asked"], range(len(lines))
    kinds = {"dense": BLACK, "bit": GREEN, "think": ORANGE, "": BLUE}
    colours = [next(colour for part, colour in kinds.items() if part in line["setting"]) for line in lines]
    for place, line, colour in zip(places, lines, colours, strict=True):
        low, high = (total * end for end in line["interval"])
        reach = [[line["right"] - low], [high - line["right"]]]
        left.errorbar(line["right"], place, xerr=reach, color=colour, marker="o", capsize=3)
    names = [line["title"].replace("`", "").replace("transformers' ", "") for line in lines]
    shares = [100 * line["K+V, 16 bit"] for line in lines]
    bars(right, names, shares, [f"{share:.0f}" for share in shares], colours)
    right.tick_params(left=False)
    right.set_xlim(0, 112)
    right.set_xlabel("K+V, % of a dense cache in 16 bits")
    left.set_xlim(0, total + 1)
    left.set_xlabel(f"answers kept, of {total}, with 95 % intervals")
